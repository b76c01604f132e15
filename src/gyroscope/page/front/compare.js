// Several runs: options that differ, rotation against accuracy, side by side, and the difference of two.

// Ranks from 1; ties get the mean of their places.
function ranks(values) {
	const sorted = [...values].sort((a, b) => a - b);
	return values.map((v) => (sorted.indexOf(v) + sorted.lastIndexOf(v)) / 2 + 1);
}

// Spearman's rank correlation; NaN if one side is constant.
function rankCorrelation(x, y) {
	const [a, b] = [ranks(x), ranks(y)].map((list) => list.map((r) => r - (list.length + 1) / 2));
	const dot = (p, q) => p.reduce((sum, v, i) => sum + v * q[i], 0);
	return dot(a, b) / Math.sqrt(dot(a, a) * dot(b, b));
}

// The accuracies of runs, those on unseen data first.
function accuracyNames(runs) {
	const place = (name) => [/test/i, /val/i, /./].findIndex((rule) => rule.test(name));
	return [...new Set(runs.flatMap((run) => Object.keys(run.accuracies ?? {})))].sort((a, b) => place(a) - place(b));
}

const runLink = (run) => h("a", { href: `#run=${encodeURIComponent(run.id)}` }, clean(run.name));

// Final mean rotation against accuracy; null with fewer than three runs that have both.
function scatterPanel(runs, metric, setMetric) {
	const names = accuracyNames(runs);
	const chosen = names.includes(metric) ? metric : names[0];
	const points = runs.filter((run) => run.rotation && run.accuracies?.[chosen] != null).map((run) => ({ run, x: run.rotation[1], y: run.accuracies[chosen] }));
	if (points.length < 3) return null;
	const [xs, ys] = [points.map((p) => p.x), points.map((p) => p.y)];
	const rank = rankCorrelation(xs, ys);
	const [width, height, left, bottom] = [Math.max(280, Math.min(680, innerWidth - 60)), 300, 56, 258];
	const margin = Math.max((Math.max(...ys) - Math.min(...ys)) * 0.12, 0.002);
	const [most, low, high] = [niceAbove(Math.max(...xs)), Math.min(...ys) - margin, Math.max(...ys) + margin];
	const xOf = (v) => left + (v / most) * (width - left - 20);
	const yOf = (v) => bottom - ((v - low) / (high - low)) * (bottom - 12);
	const text = (x, y, anchor, words) => svg("text", { x, y, "text-anchor": anchor }, words);
	const line = (x1, y1, x2, y2) => svg("line", { x1, y1, x2, y2, class: "grid" });
	const image = svg("svg", { class: "scatter", viewBox: `0 0 ${width} ${height}`, width, role: "group", "aria-label": `Mean final rotation against ${clean(chosen)} accuracy of ${points.length} runs` },
		...ticks(0, most, width / 110).flatMap((v) => [line(xOf(v), 12, xOf(v), bottom), text(xOf(v), bottom + 16, "middle", number(v, 3))]),
		...ticks(low, high, 5).flatMap((v) => [line(left, yOf(v), width - 20, yOf(v)), text(left - 6, yOf(v) + 4, "end", `${number(100 * v, 3)} %`)]),
		text((left + width) / 2, height - 6, "middle", "mean final rotation"));
	const taken = points.map(({ x, y }) => ({ y: yOf(y), start: xOf(x) - 6, end: xOf(x) + 6 }));
	for (const { run, x, y } of points) {
		const name = shorten(clean(run.name), 34);
		const label = `${clean(run.name)}: rotation ${number(x, 3)}, ${percent(y)}`;
		const link = svg("a", { href: `#run=${encodeURIComponent(run.id)}`, "aria-label": label }, svg("title", {}, label), svg("circle", { cx: xOf(x), cy: yOf(y), r: 5 }));
		// The name goes to the right or to the left of its point; where both are taken, the point says it when asked.
		const room = name.length * 6.2;
		const side = [xOf(x) + 9, xOf(x) - 9 - room].find((start) => start > left && start + room < width && !taken.some((one) => Math.abs(one.y - yOf(y)) < 13 && start < one.end && one.start < start + room));
		if (side != null) link.append(text(side > xOf(x) ? side : xOf(x) - 9, yOf(y) + 4, side > xOf(x) ? "start" : "end", name));
		if (side != null) taken.push({ y: yOf(y), start: side, end: side + room });
		image.append(link);
	}
	return panel("scatter", "Rotation against accuracy", names.length > 1 && h("div.tools", select("Accuracy", names.map((name) => [name, `${clean(name)} accuracy`]), chosen, setMetric)),
		h("p.says", rank === rank ? `Rank correlation over ${points.length} runs: ${rank < 0 ? "−" : "+"}${Math.abs(rank).toFixed(2)}` : "The runs do not differ on one of the axes, so there is no rank correlation."), image);
}

function optionsPanel(runs) {
	const keys = [...new Set(runs.flatMap((run) => Object.keys(run.options ?? {})))].filter((key) => runs.some((run) => !same(run.options?.[key], runs[0].options?.[key])));
	const metrics = accuracyNames(runs);
	return panel("options", "What differs", !keys.length && h("p.muted", "The recorded hyperparameters are the same in these runs."),
		h("div.scroll-x", { tabindex: 0, role: "region", "aria-label": "Hyperparameters that differ" }, h("table", h("thead", h("tr", ["run", ...keys].map((name) => h("th", { scope: "col" }, clean(name))), ["rotation", "loss", ...metrics].map((name) => h("th.number", { scope: "col" }, clean(name))))),
			h("tbody", runs.map((run) => h("tr", h("th", { scope: "row" }, runLink(run)), keys.map((key) => h("td", said(run.options?.[key]))), [run.rotation ? number(run.rotation[1], 3) : "–", run.loss == null ? "–" : number(run.loss, 3), ...metrics.map((name) => percent(run.accuracies?.[name]))].map((words) => h("td.number", words))))))));
}

// Second frame minus first, over pairs of layers; on a logarithmic scale, log10 of the ratio.
function differenceFrame(one, two, pairs, log) {
	const { bins } = one;
	const mean = new Float32Array(pairs.length * bins).fill(NaN);
	one.centers.forEach((step, t) => {
		const other = binAt(two, step);
		if (other >= 0) pairs.forEach(([a, b], i) => {
			const [x, y] = [one.mean[a * bins + t], two.mean[b * two.bins + other]];
			mean[i * bins + t] = !log ? y - x : x > 0 && y > 0 ? Math.log10(y / x) : NaN;
		});
	});
	return { ...one, layers: pairs.length, mean, min: mean, max: mean };
}

// A small heatmap of a frame and what it shows.
function smallHeat(frame, layers, scale, window, label, large) {
	const heat = createHeatmap();
	if (large) heat.node.classList.add("large");
	heat.node.setAttribute("aria-label", label);
	const data = { frame, rows: rowsOf(layers.length, [], new Set()), names: layers.map((layer) => layer.name), scale, window, span: [0, Math.max(1, layers.length)], empty: "no values" };
	return { ...heat, draw: () => heat.show(data) };
}

function createCompare(app, runs) {
	const models = runs.map((run) => createModel(app.source, run.id));
	const node = h("div.page");
	let drawn = []; // charts and heatmaps

	async function update() {
		const errors = [];
		const attempt = (model, act) => act().catch((error) => void errors.push(`${clean(runs[models.indexOf(model)].name)}: ${error.message}`));
		for (const model of models) if (!model.head) await attempt(model, model.open);
		const sound = models.filter((model) => model.head);
		const infos = new Map(sound.flatMap((model) => model.head.quantities).map((info) => [info.name, info]));
		const q = [app.state.q, "rotation", ...infos.keys()].find((name) => infos.has(name));
		const info = infos.get(q) ?? { name: "quantities", scale: "linear" };
		for (const model of sound) model.frame = model.head.quantities.some((one) => one.name === q) ? await attempt(model, () => model.load(q)) : null;
		const frames = sound.map((model) => model.frame).filter((frame) => frame?.bins);
		const scale = makeScale(app.state.scale ?? usualScale(info), info.scale, frames.map((frame) => frame.mean));
		const ends = frames.flatMap((frame) => [frame.edges[0], frame.edges[frame.bins]]);
		const full = ends.length ? [Math.min(...ends), Math.max(...ends)] : [0, 1];
		drawn.forEach((one) => one.destroy?.());
		drawn = [];
		const layers = sound.map((model) => model.head.layers.map((layer) => layer.name));
		const side = sound.map((model) => {
			const heat = model.frame && smallHeat(model.frame, model.head.layers, scale, full, `${clean(model.head.name)}: ${describe(info, model.frame, model.head)}`);
			if (heat) drawn.push(heat);
			return h("figure", h("figcaption", runLink(model.head), h("span.muted", ` ${plural(model.head.layers.length, "layer")}`)), heat?.node ?? h("p.muted", `This run does not hold ${labelOf(info)}.`));
		});
		node.replaceChildren(...[
			h("section.run-head", h("h1", `${plural(runs.length, "run")} compared`), h("p.tools", runs.map((run) => h("span.tag", clean(run.name), runs.length > 2 && button("×", () => app.set({ compare: app.state.compare.filter((id) => id !== run.id) }, true), { label: `Remove ${clean(run.name)}`, kind: "plain" }))))),
			...errors.map((text) => h("p.panel.error", text)),
			optionsPanel(runs),
			scatterPanel(runs, app.state.metric, (metric) => app.set({ metric })),
			panel("compare", "Side by side", layers.some((names) => !same(names, layers[0])) && h("p", "These runs have different layers: compare the pattern from the first layer (top) to the last (bottom), not row by row."),
				h("div.tools", infos.size > 0 && select("Quantity", [...infos.values()].map((one) => [one.name, labelOf(one)]), q, (name) => app.set({ q: name })), select("Color scale", ["linear", "log", "quantile"].map((kind) => [kind, kind]), scale.kind, (kind) => app.set({ scale: kind }))),
				legendOf(scale, labelOf(info)), h("div.side", side)),
			meansPanel(sound, info, full),
			sound.length > 1 && differencePanel(sound, info),
		].filter(Boolean));
		for (const one of drawn) one.draw();
	}

	function lineFigure(title, lines, look, log, window) {
		const hues = CATEGORIES[theme()];
		lines.forEach((line, i) => Object.assign(line, { values: finite(line.values, log), color: hues[i % hues.length], dash: i < hues.length ? undefined : [6, 3], width: 1.5 }));
		const keys = lineKeys(lines);
		const chart = createChart();
		const data = { ...joined(lines), look, log, window, describe: `${title} of ${plural(lines.length, "run")} over steps` };
		drawn.push({ ...chart, draw: () => chart.show(data) });
		return lines.length > 0 && h("figure.chart", h("figcaption", h("h3", title)), chart.node, h("div.keys", keys));
	}

	function meansPanel(sound, info, full) {
		const name = (model) => clean(model.head.name);
		const means = sound.filter((model) => model.frame).map((model) => ({ name: name(model), steps: model.frame.centers, values: model.frame.centers.map((_, t) => gather(model.frame.mean, model.frame.bins, 0, model.frame.layers, t)) }));
		const losses = sound.flatMap((model) => (scalarCharts(model.head.scalars).get("loss") ?? []).slice(0, 1).map((one) => ({ name: name(model), steps: one.steps, values: one.values })));
		return h("section.panel", h("h2", "Over time"), h("div.charts", lineFigure(`${labelOf(info)}, mean over layers`, means, info.scale, info.scale === "log", full), lineFigure("loss", losses, "linear", true, full)));
	}

	function differencePanel(sound, info) {
		const [a, b] = [0, 1].map((i) => sound.find((model) => model.id === app.state.pair[i]) ?? sound[i]);
		const choose = (label, one, pair) => select(label, sound.map((model) => [model.id, clean(model.head.name)]), one.id, (id) => app.set({ pair: pair(id) }));
		const places = new Map(b.head.layers.map((layer, i) => [layer.name, i]));
		const pairs = a.head.layers.map((layer, i) => [i, places.get(layer.name)]).filter(([, place]) => place != null);
		const [one, two] = [a, b].map((model) => model.head.layers.length);
		const body = [];
		if (pairs.length < Math.max(one, two)) body.push(h("p", `The layers differ: ${plural(one, "layer")} and ${plural(two, "layer")}, ${pairs.length ? `of which ${plural(pairs.length, "name")} in common. The difference is over those.` : "and no name in common. Compare them side by side, or by their means."}`));
		if (a === b) body.push(h("p", "Choose two different runs."));
		else if (!a.frame?.bins || !b.frame?.bins) body.push(h("p", `One of the two runs does not hold ${labelOf(info)}.`));
		else if (pairs.length) {
			const log = info.scale === "log";
			const frame = differenceFrame(a.frame, b.frame, pairs, log);
			const scale = makeScale("linear", "signed", [frame.mean]);
			const label = `${log ? "log₁₀ of the ratio of" : "Difference of"} ${labelOf(info)}: second run compared with the first`;
			const heat = smallHeat(frame, pairs.map(([i]) => a.head.layers[i]), scale, [frame.edges[0], frame.edges[frame.bins]], label, true);
			drawn.push(heat);
			body.push(legendOf(scale, label), h("p.muted", label), heat.node);
		}
		return panel("difference", "Difference of two runs", h("div.tools", choose("First run", a, (id) => [id, b.id]), "→", choose("Second run", b, (id) => [a.id, id])), body);
	}

	// Runs that are still written are read again, unless the reader is just using a control.
	async function changed(ids) {
		const fresh = models.filter((model) => model.head && ids?.has(model.id));
		for (const model of fresh) await model.renew();
		if (fresh.length && !node.contains(document.activeElement)) await update();
	}

	return { node, update, ready: async () => {}, shown: update, redraw: update, changed, resize: () => drawn.forEach((one) => one.resize()), destroy: () => drawn.forEach((one) => one.destroy?.()) };
}
