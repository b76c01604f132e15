// Rows of the heatmap: layers, grouped by the dots in their names. A group is a stretch of neighboring layers whose names
// begin alike; folded, it is one row.

// Return all groups {from, to, name, depth}, outer ones before inner ones; `to` is the layer after the last.
function groupLayers(names) {
	const parts = names.map((name) => name.split("."));
	const groups = [];
	function within(from, to, dots, depth) {
		for (let a = from, b; a < to; a = b) {
			for (b = a + 1; b < to && parts[a].length > dots + 1 && parts[b].length > dots + 1 && parts[b][dots] === parts[a][dots]; b++);
			const most = b - a > 0.8 * (to - from); // it would fold nearly everything: look inside
			if (b === a + 1 || dots > 12) continue;
			if (!most) groups.push({ from: a, to: b, depth, key: `${a}-${b}`, name: clean(parts[a].slice(0, dots + 1).join(".")) });
			within(a, b, dots + 1, depth + !most);
		}
	}
	within(0, names.length, 0, 0);
	return groups;
}

// Return the rows {from, to, group}; `group` is null for a layer on its own.
function rowsOf(layers, groups, folded) {
	const starts = new Map(groups.filter((one) => folded.has(one.key)).reverse().map((one) => [one.from, one]));
	const rows = [];
	for (let l = 0; l < layers; l = rows.at(-1).to) {
		const group = starts.get(l) ?? null;
		rows.push({ from: l, to: group?.to ?? l + 1, group });
	}
	return rows;
}

// Mean over some layers at a bin, or their smallest or largest value; what is unknown is left out.
function gather(values, bins, from, to, t, which = "mean") {
	let [sum, known, least, most] = [0, 0, Infinity, -Infinity];
	for (let l = from, i = from * bins + t; l < to; l++, i += bins) {
		const v = values[i];
		if (v !== v) continue;
		known++;
		sum += v;
		if (v < least) least = v;
		if (v > most) most = v;
	}
	return known ? (which === "mean" ? sum / known : which === "min" ? least : most) : NaN;
}

// Values [rows × bins].
function rowValues({ mean, bins, layers }, rows) {
	if (rows.length === layers) return mean;
	const out = new Float32Array(rows.length * bins);
	rows.forEach(({ from, to }, r) => { for (let t = 0; t < bins; t++) out[r * bins + t] = gather(mean, bins, from, to, t); });
	return out;
}

// Names without an ending that all share, such as ".weight".
function shortNames(names) {
	const ending = names.length > 1 ? /\.[^.]+$/.exec(names[0])?.[0] : null;
	const shared = ending && names.every((name) => name.endsWith(ending));
	return names.map((name) => clean(shared ? name.slice(0, -ending.length) : name));
}
