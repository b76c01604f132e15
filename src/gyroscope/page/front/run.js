// One run: its data as they arrive, and its page.

// Head and frames of a run. `frames` are those of the visible steps, `whole` those of all steps; in a report they are the
// same. A frame stays until its successor has come, so that the page never empties.
function createModel(source, id) {
	const pending = new Map();
	let window = null;
	const model = { id, head: null, frames: new Map(), whole: new Map(), onframe() {} };
	model.open = async () => (model.head = await source.run(id));
	model.load = async (quantity) => model.frames.get(quantity) ?? ask(quantity, window);
	model.loadWhole = async (quantity) => model.whole.get(quantity) ?? ask(quantity, null);
	function ask(quantity, range) {
		const key = `${quantity} ${range}`;
		if (!pending.has(key)) {
			const margin = range ? (range[1] - range[0]) / 4 : 0;
			pending.set(key, source.series(id, quantity, range ? { from: Math.max(range[0] - margin, 0), to: range[1] + margin } : {}).then((frame) => {
				if (!range) model.whole.set(quantity, frame);
				if (same(range, window) || !model.frames.has(quantity)) model.frames.set(quantity, frame);
				return frame;
			}).finally(() => pending.delete(key)));
		}
		return pending.get(key);
	}
	async function renew(range) {
		for (const quantity of [...model.frames.keys()]) {
			if (!same(range, window)) return; // the reader has moved on
			await ask(quantity, range);
			model.onframe(quantity);
		}
	}
	// The reader looks at other steps: a server is asked for these in more detail.
	model.look = async (range) => {
		if (!source.windows || same(range, window)) return;
		window = range;
		if (!range) for (const [quantity, frame] of model.whole) model.frames.set(quantity, frame);
		await renew(range);
	};
	// The run has changed on disk.
	model.renew = async () => {
		await model.open();
		if (window) for (const quantity of [...model.whole.keys()]) await ask(quantity, null);
		await renew(window);
	};
	return model;
}

const MOVING = "Drag to pan; wheel to zoom after a click (Shift: layers only, Alt: steps only); double click for everything. Click a row to select its layer, with Ctrl to add it, with Shift for all up to it. Click a bracket to fold a block into its mean. Keys: arrows pan, + and − zoom, 0 shows everything, Shift and arrows read cells, Enter selects, f folds.";

function createRunPage(app, id) {
	const model = createModel(app.source, id);
	const { state } = app;
	let [names, short, groups, severities, markers, full] = [[], [], [], new Map(), [], [0, 1]];
	let layout = {}; // rows, and the folding that they follow
	let memo = {}; // the color scale, and what it was made for
	let trouble = ""; // why the heatmap is empty
	let active = null; // the finding that was gone to

	const info = () => model.head.quantities.find((one) => one.name === state.q);
	const windowNow = () => (state.steps ? clamped(state.steps, full, 1) : full);
	const spanNow = () => (state.rows ? clamped(state.rows, [0, Math.max(1, layout.rows.length)], 1) : [0, Math.max(1, layout.rows.length)]);

	// Everything that follows from the head.
	function digest() {
		const { layers, diagnosis: { findings }, schedule, events, steps: { first, last, count }, quantities } = model.head;
		if (!same(names, layers.map((layer) => layer.name))) {
			names = layers.map((layer) => layer.name);
			[groups, short, layout] = [groupLayers(names), shortNames(names), {}];
		}
		severities = new Map();
		for (const severity of ["note", "warning", "serious"]) for (const one of findings) if (severityOf(one.severity) === severity) for (const name of one.layers) severities.set(names.indexOf(name), severity);
		markers = [
			...schedule.map(({ step, text }) => ({ step, text, kind: "schedule" })),
			...events.filter((one) => one.kind !== "finding").map(({ step, kind, text }) => ({ step, text: `${kind}: ${text}`, kind: "event" })),
			...findings.map((finding) => ({ step: finding.since, text: finding.sentence, kind: "finding", severity: severityOf(finding.severity), finding })),
		].filter((one) => one.step != null);
		const half = count > 1 ? (last - first) / (count - 1) / 2 : 0.5;
		full = count ? [first - half, last + half] : [0, 1];
		if (!info()) state.q = (quantities.find((one) => one.name === "rotation") ?? quantities[0])?.name ?? null;
	}

	function arrange(folded = state.fold) {
		if (layout.folded !== folded) layout = { folded, rows: rowsOf(names.length, groups, folded) };
	}

	// ---- what the reader does
	const setSteps = (next) => app.set({ steps: next && clamped(next, full, Math.min(3, full[1] - full[0])).map((s) => Math.round(s * 100) / 100) });
	function zoomSteps(factor, at) {
		const [a, b] = windowNow();
		const next = zoomed([a, b], at ?? (a + b) / 2, factor);
		setSteps(next[1] - next[0] < full[1] - full[0] ? next : null);
	}
	function pick(row, { ctrlKey, metaKey, shiftKey }) {
		const add = ctrlKey || metaKey || shiftKey;
		const [from, to] = shiftKey && pick.last != null ? [Math.min(pick.last, row.from), Math.max(pick.last + 1, row.to)] : [row.from, row.to];
		const layers = Array.from({ length: to - from }, (_, i) => from + i);
		const all = !shiftKey && layers.every((l) => state.layers.has(l)) && (add || state.layers.size === layers.length);
		const next = new Set(add ? state.layers : []);
		for (const l of layers) if (all) next.delete(l); else next.add(l);
		pick.last = row.from;
		app.set({ layers: next });
	}
	function foldRows(folded) {
		const [top, bottom] = spanNow();
		const layer = layout.rows[Math.floor(top)]?.from;
		const zoomedIn = state.rows;
		app.set({ fold: folded, rows: null });
		const row = layout.rows.findIndex((one) => one.to > layer);
		if (zoomedIn && bottom - top < layout.rows.length) app.set({ rows: clamped([row, row + bottom - top], [0, layout.rows.length], 1) });
	}
	function foldGroup(group) {
		if (!group) return;
		const next = new Set(state.fold);
		if (!next.delete(group.key)) next.add(group.key);
		foldRows(next);
	}
	// Go to a finding: its layers, and the steps around its beginning.
	function go(finding) {
		const layers = new Set(finding.layers.map((name) => names.indexOf(name)).filter((l) => l >= 0));
		const width = full[1] - full[0];
		const patch = { layers, rows: null, steps: finding.since != null && width > 20 ? clamped([finding.since - 0.15 * width, finding.since + 0.25 * width], full, 3) : null };
		if (layers.size) {
			patch.fold = new Set(groups.filter((group) => state.fold.has(group.key) && ![...layers].some((l) => l >= group.from && l < group.to)).map((group) => group.key));
			arrange(patch.fold);
			const rows = layout.rows.flatMap((row, r) => (layers.has(row.from) ? [r] : []));
			const next = clamped([rows[0] - 3, rows.at(-1) + 4], [0, layout.rows.length], 22);
			if (next[1] - next[0] < layout.rows.length) patch.rows = next;
		}
		active = finding.sentence;
		app.set(patch);
		fillHead();
		heat.point(finding.since);
		curves.point(finding.since);
		heatPanel.scrollIntoView();
		heat.node.focus({ preventScroll: true });
	}
	function openLayer(layer) {
		app.set({ open: layer });
		if (layer != null) table.reveal(layer);
	}

	// ---- the parts of the page
	const [headBox, findingsBox, recordedBox, bar, heatTools, legend, summary] = [h("div"), h("div.findings-body"), h("div"), h("div.sticky", { role: "group", "aria-label": "Steps and layers shown" }), h("div.tools"), h("div"), h("p.hidden", { id: "heat-summary" })];
	const readout = h("p.readout.muted", { "aria-live": "polite" });
	const heat = createHeatmap({
		steps: setSteps,
		rows: (rows) => app.set({ rows: rows?.map((r) => Math.round(r * 1000) / 1000) ?? null }),
		hover(cell, step) {
			curves.point(step);
			readout.textContent = cell ? `${cell.name} · ${steps(cell.first, cell.last)} · ${number(cell.mean)}${cell.min === cell.max ? "" : ` (${number(cell.min)} to ${number(cell.max)})`}` : readout.dataset.rest ?? "";
		},
		pick,
		fold: foldGroup,
		marker: (marks) => marks.find((mark) => mark.finding) && go(marks.find((mark) => mark.finding).finding),
		hint: () => (readout.textContent = "Click the heatmap first, or hold Ctrl, to zoom with the wheel."),
	});
	const curves = createCurves(model, {
		hover: (step) => { heat.point(step); curves.point(step); },
		steps: setSteps,
		zoom: zoomSteps,
		quantity: (q) => { app.set({ q }); heatPanel.scrollIntoView(); },
		shown: (shown) => app.set({ shown }),
	});
	const table = createTable(model, { pick: (layers) => app.set({ layers }), open: openLayer, search: (search) => app.set({ search }), sort: (sort) => app.set({ sort }) });
	const heatPanel = panel("heatmap", "Layers over time", heatTools, legend, heat.node, readout, summary, fold("How to move", h("p", MOVING)));
	const tablePanel = panel("layers", "Layers", table.node);
	const node = h("div.page", headBox, h("div.two", panel("findings", "Findings", findingsBox), panel("recorded", "What was recorded", recordedBox)), bar, heatPanel, panel("curves", "Curves", curves.node), tablePanel, glossary());
	const watcher = new IntersectionObserver(([entry]) => {
		if (!entry.isIntersecting) return;
		watcher.disconnect();
		table.load();
	}, { rootMargin: "400px" });

	function fillHead() {
		const { head } = model;
		const run = app.runs.find((one) => one.id === id) ?? {};
		const line = [head.model && clean(head.model), plural(head.layers.length, "layer"), head.steps.count ? `last step ${whole(head.steps.last)}, ${whole(head.steps.count)} measured` : "no step measured yet", run.optimizer && clean(run.optimizer), run.loss != null && `loss ${number(run.loss)}`, ...Object.entries(run.accuracies ?? {}).map(([name, value]) => `${clean(name)} accuracy ${percent(value)}`)];
		const answer = h("span.muted", { role: "status" });
		const ask = () => app.source.sample(id, 20).then(() => (answer.textContent = "Asked for: the training measures its next 20 steps in detail."), (error) => (answer.textContent = error.message));
		headBox.replaceChildren(h("section.run-head", h("h1", clean(head.name), " ", stateTag(head.state)), h("p.facts-line", line.filter(Boolean).map((text) => h("span", text))), app.source.sample && head.state === "running" && h("p.tools", button("Measure the next 20 steps in detail", ask), answer)));
		const opened = [...node.querySelectorAll(".two details")].map((one) => one.open);
		refill(findingsBox, findingsList(head, app.config.docs, go, active));
		refill(recordedBox, recordedList(head));
		node.querySelectorAll(".two details").forEach((one, i) => (one.open = opened[i] ?? false));
	}

	function fillBar() {
		if (bar.contains(document.activeElement) && document.activeElement.type === "number") return;
		const [a, b] = windowNow();
		const { first, last } = model.head.steps;
		const edge = (label, value, next) => {
			const input = h("input", { type: "number", "aria-label": label, value, min: first, max: last, onchange: () => { const range = next(Number(input.value)); input.blur(); if (range[1] > range[0]) setSteps(range); else fillBar(); } });
			return input;
		};
		const chosen = [...state.layers];
		const sign = (text, label, act) => button(text, act, { label });
		refill(bar,
			h("span.tools", h("span.muted", "steps"), edge("First step shown", Math.max(first ?? 0, Math.ceil(a)), (v) => [v, b]), "–", edge("Last step shown", Math.min(last ?? 0, Math.floor(b)), (v) => [a, v]),
				h("span.buttons", sign("+", "Zoom in", () => heat.zoom(1 / 1.5)), sign("−", "Zoom out", () => heat.zoom(1.5)), sign("◂", "Earlier steps", () => heat.pan(-0.25, 0)), sign("▸", "Later steps", () => heat.pan(0.25, 0)), sign("▴", "Layers above", () => heat.pan(0, -0.25)), sign("▾", "Layers below", () => heat.pan(0, 0.25)), sign("all", "Show all steps and layers", () => app.set({ steps: null, rows: null })))),
			h("span.tools", chosen.length ? [h("span.tag", chosen.length === 1 ? shorten(short[chosen[0]] ?? "", 40) : `${chosen.length} of ${plural(names.length, "layer")}`), chosen.length === 1 && sign("detail", "Open the detail of this layer", () => { tablePanel.scrollIntoView(); openLayer(chosen[0]); }), sign("clear", "Clear the selection of layers", () => app.set({ layers: new Set() }))] : h("span.muted", "all layers")));
	}

	function fillHeatTools() {
		const one = info();
		const at = (level) => new Set(groups.filter((group) => group.depth === level).map((group) => group.key));
		const levels = [...new Set(groups.map((group) => group.depth))].sort();
		const now = !state.fold.size ? "" : levels.find((level) => same([...at(level)], [...state.fold])) ?? "own";
		refill(heatTools,
			select("Quantity", model.head.quantities.map((each) => [each.name, labelOf(each), GROUPS[each.group] ?? GROUPS.other]), one?.name ?? "", (q) => app.set({ q })),
			select("Color scale", ["linear", "log", "quantile"].map((kind) => [kind, kind, "", kind === "log" && one?.scale === "signed"]), state.scale ?? usualScale(one), (kind) => app.set({ scale: kind === usualScale(one) ? null : kind })),
			levels.length > 0 && select("Rows", [["", `every layer (${names.length})`], ...levels.map((level) => [level, `fold ${shorten(groups.find((group) => group.depth === level).name, 30)} … (${rowsOf(names.length, groups, at(level)).length})`]), ...(now === "own" ? [["own", `folded by hand (${layout.rows.length})`]] : [])], now, (level) => level !== "own" && foldRows(level === "" ? new Set() : at(Number(level)))),
			one && popup("About this quantity", quantityWords(one)));
	}

	function drawHeat() {
		arrange();
		const one = info();
		const frame = model.frames.get(one?.name);
		const key = [model.whole.get(one?.name) ?? frame, state.scale, one?.scale, theme()];
		if (!memo.key || key.some((part, i) => part !== memo.key[i])) {
			memo = { key, scale: makeScale(state.scale ?? usualScale(one), one?.scale ?? "linear", key[0] ? [key[0].mean] : []) };
			refill(legend, legendOf(memo.scale, one ? labelOf(one) : "nothing"));
		}
		const empty = !names.length ? "This run has no layers." : !one ? "No quantity was recorded." : trouble || (!model.head.steps.count ? "No step has been measured yet." : frame ? "This quantity has no values." : "Reading …");
		heat.show({ frame: frame?.layers === names.length && !memo.scale.empty ? frame : null, empty, rows: layout.rows, names, short, scale: memo.scale, window: windowNow(), full, span: spanNow(), selected: state.layers, folded: state.fold, groups, severities, markers });
	}

	async function loadHeat() {
		const one = info();
		trouble = "";
		try {
			if (one) await model.load(one.name);
		} catch (error) {
			trouble = "The measurements cannot be shown.";
			app.say(error.message);
		}
		drawHeat();
		tellHeat();
	}

	// Words for the heatmap: what it shows, and how finely.
	function tellHeat() {
		const one = info();
		const frame = model.frames.get(one?.name);
		heat.node.setAttribute("aria-label", one ? `Heatmap of ${labelOf(one)}, layer by step` : "Heatmap");
		summary.textContent = frame ? `${describe(one, frame, model.head)} The table of layers holds the last values.` : "No values.";
		const fine = frame?.bins ? (frame.exact ? "every measured step" : `${frame.bins} bins of about ${whole(Math.round((frame.last[frame.bins - 1] - frame.first[0] + 1) / frame.bins))} steps: mean, smallest and largest value of each`) : "";
		readout.textContent = readout.dataset.rest = [fine, frame?.precision && `values ${frame.precision}`, frame?.clipped && `${whole(frame.clipped)} values ≤ 0 in the lowest color`].filter(Boolean).join(" · ");
	}

	let soon = null;
	function drawCurves(delay = 0) {
		clearTimeout(soon);
		soon = setTimeout(() => curves.show({ window: windowNow(), selected: state.layers, short, markers, shown: state.shown }), delay);
	}
	const drawTable = () => table.show({ selected: state.layers, open: state.open, search: state.search, sort: state.sort, severities });

	// Draw what depends on the changed parts of the state. Curves wait until the heatmap has stopped moving.
	let asking = null;
	function update(changed) {
		const any = (...keys) => keys.some((key) => changed.has(key));
		if (any("steps", "rows", "layers", "fold", "q", "scale")) drawHeat();
		if (any("q")) loadHeat();
		if (any("steps", "layers")) fillBar();
		if (any("q", "scale", "fold")) fillHeatTools();
		if (any("steps", "layers", "shown")) drawCurves(any("steps") ? 60 : 0);
		if (any("layers", "open", "search", "sort")) drawTable();
		if (!any("steps")) return;
		clearTimeout(asking);
		asking = setTimeout(() => model.look(state.steps && windowNow()).catch((error) => app.say(error.message)), 200);
	}
	model.onframe = (quantity) => {
		if (!node.isConnected) return;
		if (quantity === state.q) { drawHeat(); tellHeat(); }
		drawCurves(80);
		if (quantity in COLUMNS) drawTable();
	};
	function drawAll() {
		fillHead();
		fillBar();
		drawHeat();
		fillHeatTools();
		drawTable();
		drawCurves();
	}

	return {
		node, model, heat, update,
		ready: async () => { await model.open(); digest(); },
		async shown() {
			drawAll();
			watcher.observe(tablePanel);
			await loadHeat();
		},
		async changed() {
			await model.renew();
			digest();
			drawAll();
			tellHeat();
		},
		redraw: drawAll,
		resize() {
			heat.resize();
			curves.resize();
		},
		destroy() {
			clearTimeout(soon);
			clearTimeout(asking);
			watcher.disconnect();
			curves.destroy();
		},
	};
}
