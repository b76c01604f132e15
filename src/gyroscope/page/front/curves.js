// Curves on one time axis: scalars such as the loss, then one chart per quantity with one line per layer.

const MOST_LINES = 60;

// At most 60 of a list, spread evenly from the first to the last.
const spread = (list) => (list.length <= MOST_LINES ? list : Array.from({ length: MOST_LINES }, (_, i) => list[Math.round((i * (list.length - 1)) / (MOST_LINES - 1))]));
const lineOf = (frame, layer, which = "mean") => frame[which].subarray(layer * frame.bins, (layer + 1) * frame.bins);
const lastValue = (frame, layer) => lineOf(frame, layer).findLast((v) => v - v === 0) ?? null;
const finite = (values, log) => Array.from(values, (v) => (v == null || v - v !== 0 || (log && v <= 0) ? null : v));

// Smallest and largest value over all layers, per bin.
const envelope = (frame) => (frame.envelope ??= ["max", "min"].map((which) => frame.centers.map((_, t) => gather(frame[which], frame.bins, 0, frame.layers, t, which))));

// Moving mean over `width` values, unknown ones left out.
function movingMean(values, width) {
	const half = width >> 1;
	let [sum, known] = [0, 0];
	const add = (v, sign) => { if (v - v === 0) { sum += sign * v; known += sign; } };
	for (let i = 0; i < half; i++) add(values[i], 1);
	return values.map((v, i) => {
		add(values[i + half], 1);
		add(values[i - half - 1], -1);
		return v === v && known ? sum / known : NaN;
	});
}

// Linear interpolation at `x`, null outside.
function interpolate(steps, values, x) {
	let i = 0;
	return x.map((at) => {
		while (i < steps.length - 2 && steps[i + 1] < at) i++;
		const [a, b] = [values[i], values[i + 1]];
		return at < steps[0] || at > steps.at(-1) || a == null || b == null ? null : a + ((b - a) * (at - steps[i])) / (steps[i + 1] - steps[i]);
	});
}

// Lines with steps of their own, on the union of their steps: undefined is a step that a line does not have.
function joined(lines) {
	const x = [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
	const place = new Map(x.map((step, i) => [step, i]));
	for (const line of lines) {
		const out = Array(x.length);
		line.values.forEach((v, i) => (out[place.get(line.steps[i])] = v));
		line.values = out;
	}
	return { x, lines };
}

function lineKeys(lines) {
	return lines.map((line) => {
		const swatch = h("i");
		swatch.style.background = line.color;
		return h("span", swatch, shorten(line.short ?? line.name, 40));
	});
}

// Scalars that belong on one chart: losses, then accuracies, then each of the others.
function scalarCharts(scalars) {
	const charts = new Map([["loss", []], ["accuracy", []]]);
	for (const scalar of scalars) {
		const key = /loss/i.test(scalar.name) ? "loss" : /acc/i.test(scalar.name) ? "accuracy" : scalar.name;
		charts.set(key, [...(charts.get(key) ?? []), scalar]);
	}
	return new Map([...charts].filter(([, list]) => list.length));
}

function scalarData(key, scalars, { log }) {
	const hues = CATEGORIES[theme()];
	const all = scalars.flatMap((one) => one.values).filter((v) => v != null);
	const [low, high] = [all.reduce((a, b) => Math.min(a, b), Infinity), all.reduce((a, b) => Math.max(a, b), 0)];
	log ??= key === "loss" && low > 0 && high > 50 * low;
	const lines = [];
	const bands = [];
	scalars.forEach((one, i) => {
		const hue = hues[i % hues.length];
		const line = (values, more) => lines.push({ name: clean(one.name), steps: one.steps, values: finite(values, log), color: hue, ...more });
		if (one.min) {
			bands.push([lines.length, `${hue}33`]);
			line(one.max, { color: "transparent", hidden: true });
			line(one.min, { color: "transparent", hidden: true });
		}
		line(one.values, { width: 1.5, points: one.steps.length < 60 });
	});
	const keys = lines.filter((line) => !line.hidden);
	const last = keys.map((line) => `${line.name} ${number(line.values.findLast((v) => v != null))}`).join(", ");
	return { ...joined(lines), bands, log, look: key === "accuracy" ? "fraction" : "linear", describe: `Last values: ${last}.`, note: bands.length ? "thinned: mean, with smallest to largest shaded" : "", keys: lineKeys(keys) };
}

function quantityData(info, frame, head, { selected, short, window, log }) {
	const { layers, bins, edges } = frame;
	log ??= info.scale === "log";
	const chosen = [...selected].filter((l) => l < layers).sort((a, b) => a - b);
	const drawn = spread(chosen.length ? chosen : [...Array(layers).keys()]);
	const visible = Math.min(bins, (bins * (window[1] - window[0])) / (edges[bins] - edges[0] || 1));
	const smooth = info.noisy && drawn.length > 8 ? 2 * Math.floor(visible / 120) + 1 : 1;
	const predicted = head.predicted?.[info.name];
	// A few chosen layers get colors that are easily told apart.
	const hueOf = (layer) => (chosen.length && chosen.length <= 8 ? CATEGORIES[theme()][chosen.indexOf(layer)] : depthColor(layer, layers));
	const lines = drawn.map((layer) => ({
		name: clean(head.layers[layer]?.name),
		short: short[layer],
		values: finite(smooth > 1 ? movingMean(lineOf(frame, layer), smooth) : lineOf(frame, layer), log),
		color: hueOf(layer),
		width: chosen.length && chosen.length < 9 ? 2 : 1.25,
		tell: (t) => binRows({ first: frame.first[t], last: frame.last[t], ...Object.fromEntries(["mean", "min", "max"].map((which) => [which, frame[which][layer * bins + t]])) }),
	}));
	const notes = [];
	if (drawn.length < layers) notes.push(`${drawn.length} of ${plural(layers, "layer")}; the range of all is shaded`);
	if (smooth > 1) notes.push(`moving mean over ${plural(smooth, frame.exact ? "measurement" : "bin")}`);
	const keys = lines.length > 10 ? [h("span", "first layer", h("i.depth"), "last layer")] : lineKeys(lines);
	if (lines.length > 10) keys[0].children[0].style.background = `linear-gradient(to right,${[0, 1, 2, 3, 4].map((u) => depthColor(u, 5))})`;
	const known = predicted?.layers.filter((layer) => drawn.includes(layer)) ?? [];
	for (const layer of known.filter((_, i) => i % Math.ceil(known.length / 6) === 0))
		lines.push({ name: `${clean(head.layers[layer].name)}: ${clean(predicted.label)}`, values: finite(interpolate(predicted.steps, predicted.values[predicted.layers.indexOf(layer)], frame.centers), log), color: hueOf(layer), dash: [5, 4], width: 1.75 });
	if (known.length) notes.push(`dashed: ${clean(predicted.label)}${known.length > 6 ? " of some layers" : ""}`);
	const bands = drawn.length < layers ? [[lines.length, color("shade")]] : [];
	if (bands.length) for (const values of envelope(frame)) lines.push({ values: finite(values, log), color: "transparent", hidden: true });
	return { x: frame.centers, lines, bands, log, look: info.scale, note: notes.join(" · "), keys, describe: describe(info, frame, head) };
}

// A sentence in place of a picture: the last values of the layers.
function describe(info, frame, head) {
	const last = [...Array(frame.layers).keys()].map((l) => ({ l, v: lastValue(frame, l) })).filter(({ v }) => v != null);
	if (!last.length) return `${labelOf(info)}: no values.`;
	const ends = [(a, b) => (b.v < a.v ? b : a), (a, b) => (b.v > a.v ? b : a)].map((pick) => last.reduce(pick)).map(({ v, l }) => `${number(v)} (${shorten(clean(head.layers[l]?.name), 60)})`);
	return `${labelOf(info)} of ${plural(frame.layers, "layer")}, ${steps(frame.first[0], frame.last[frame.bins - 1])}; last values from ${ends.join(" to ")}.`;
}

// All charts of a run. `on` gets hover, steps, zoom, shown, and `quantity` to show one in the heatmap.
function createCurves(model, on) {
	const [grid, chips] = [h("div.charts"), h("div.chips", { role: "group", "aria-label": "Quantities drawn as curves" })];
	const node = h("div", chips, grid);
	const cards = new Map();
	let state = null;
	const watcher = new IntersectionObserver((entries) => {
		for (const { target, isIntersecting } of entries) for (const card of cards.values()) if (card.node === target) {
			card.near = isIntersecting;
			card.refresh();
		}
	}, { rootMargin: "300px" });

	function makeCard(key, title, words, give, tools) {
		const chart = createChart(on);
		const keys = h("div.keys");
		const toggle = button("log", () => { card.log = !card.isLog; card.dirty = true; card.refresh(); }, { label: `Logarithmic axis of ${title}`, kind: "small" });
		const card = { chart, dirty: true, node: h("figure.chart", h("figcaption", h("h3", title), h("span.tools", tools, toggle, popup(`About ${title}`, words))), chart.node, keys) };
		card.refresh = async (far = false) => {
			if (!card.dirty || card.busy || !(card.near || far)) return;
			card.busy = true;
			card.dirty = false;
			try {
				const data = await give(card.log);
				toggle.setAttribute("aria-pressed", (card.isLog = data.log));
				keys.replaceChildren(...data.keys, h("span", data.note));
				chart.show({ ...data, window: state.window, markers: state.markers });
				chart.point(state.step);
			} catch (error) {
				keys.textContent = error.message;
			}
			card.busy = false;
			card.refresh(far);
		};
		cards.set(key, card);
		watcher.observe(card.node);
		return card;
	}

	function shown() {
		const all = model.head.quantities;
		const usual = all.filter(({ name }) => (state.shown ?? USUAL).includes(name));
		return usual.length || state.shown ? usual : all.slice(0, 6);
	}

	function layout() {
		const { head } = model;
		const wanted = new Map();
		for (const [key, list] of scalarCharts(head.scalars)) wanted.set(`scalar ${key}`, () => makeCard(`scalar ${key}`, list.length > 1 ? key : clean(list[0].name), [`Logged by the training: ${list.map((one) => clean(one.name)).join(", ")}.`], async (log) => scalarData(key, scalarCharts(model.head.scalars).get(key), { log })));
		for (const info of shown()) wanted.set(info.name, () => makeCard(info.name, labelOf(info), quantityWords(info), async (log) => quantityData(info, await model.load(info.name), model.head, { ...state, log }), button("map", () => on.quantity(info.name), { label: `Show ${labelOf(info)} in the heatmap`, kind: "small" })));
		for (const [key, card] of cards) if (!wanted.has(key)) {
			watcher.unobserve(card.node);
			card.chart.destroy();
			cards.delete(key);
		}
		const nodes = [...wanted].map(([key, make]) => (cards.get(key) ?? make()).node);
		if (nodes.length !== grid.children.length || nodes.some((one, i) => one !== grid.children[i])) grid.replaceChildren(...nodes);
		const names = shown().map((info) => info.name);
		const toggle = (name) => on.shown(names.includes(name) ? names.filter((one) => one !== name) : [...names, name]);
		refill(chips, Object.entries(GROUPS).map(([group, title]) => {
			const list = head.quantities.filter((info) => (GROUPS[info.group] ? info.group : "other") === group);
			return list.length && h("span.chip-group", h("span.muted", title), list.map((info) => button(clean(info.name).replaceAll("_", " "), () => toggle(info.name), { label: `Curves of ${labelOf(info)}`, kind: "chip", "aria-pressed": String(names.includes(info.name)) })));
		}).filter(Boolean));
	}

	// Charts below the fold are drawn when nothing else is to do, so that scrolling and printing find them ready.
	const idle = window.requestIdleCallback ?? ((work) => setTimeout(work, 200));
	let resting = false;
	function rest() {
		if (!resting) idle(async () => {
			resting = false;
			const card = [...cards.values()].find((one) => one.dirty && !one.busy);
			if (!card || !node.isConnected) return;
			await card.refresh(true);
			rest();
		});
		resting = true;
	}

	return {
		node,
		show(next) {
			state = { ...next, step: state?.step };
			layout();
			for (const card of cards.values()) {
				card.dirty = true;
				card.refresh();
			}
			rest();
		},
		point(step) {
			if (state) state.step = step;
			for (const card of cards.values()) if (card.near) card.chart.point(step);
		},
		resize: () => cards.forEach((card) => card.chart.resize()),
		destroy() {
			watcher.disconnect();
			cards.forEach((card) => card.chart.destroy());
		},
	};
}
