// The table of layers, of which only the visible rows exist, and the detail of one layer.

const LINE = 30; // height of a row
const TALL = 480; // height of the table
const COLUMNS = { rotation: "rotation", rate_per_step: "rad/step", weight_norm: "‖w‖", update_ratio: "‖Δw‖/‖w‖", effective_lr: "η/‖w‖²", gradient_norm: "‖g‖" };

// At most `most` values: the mean of neighbors, or their smallest or largest.
function thinned(values, most, which) {
	if (values.length <= most) return values;
	const at = (i) => Math.floor((i * values.length) / most);
	return Array.from({ length: most }, (_, i) => gather(values, 1, at(i), at(i + 1), 0, which));
}

// `on` gets pick (layers), open (a layer), search and sort.
function createTable(model, on) {
	const search = h("input", { type: "search", placeholder: "name or pattern, such as *.conv1.*", "aria-label": "Search layers by text or pattern", oninput: () => on.search(search.value) });
	const [count, head, body, detail] = [h("span.muted", { role: "status" }), h("tr"), h("tbody"), h("aside.detail", { "aria-label": "Detail of a layer" })];
	const all = button("Select these", () => on.pick(new Set(order)), { label: "Select the layers that match the search" });
	const table = h("table.layers", h("caption.hidden", "Layers with their last values"), h("thead", head), body);
	const scroll = h("div.scroll", { tabindex: 0, role: "region", "aria-label": "Table of layers", onscroll: eachFrame(() => fill()) }, table);
	const node = h("div", h("div.tools", search, all, count), h("div.with-detail", scroll, detail));
	let [state, order, printing] = [null, [], false];

	const columns = () => {
		const names = model.head.quantities.map((info) => info.name);
		const usual = Object.keys(COLUMNS).filter((name) => names.includes(name));
		return usual.length ? usual : names.slice(0, 4);
	};
	const weights = (layer) => layer.shape.reduce((a, b) => a * b, 1);

	function value(l, key) {
		const layer = model.head.layers[l];
		if (key === "layer") return l;
		if (key === "name" || key === "kind") return layer[key];
		if (key === "shape") return weights(layer);
		if (key === "findings") return ["note", "warning", "serious"].indexOf(state.severities.get(l));
		return model.head.quantities.find((info) => info.name === key)?.last[l] ?? null;
	}

	function row(l, place) {
		const layer = model.head.layers[l];
		const frame = model.whole.get("rotation");
		const severity = state.severities.get(l);
		const picked = state.selected.has(l);
		const toggle = () => {
			const next = new Set(state.selected);
			if (!next.delete(l)) next.add(l);
			on.pick(next);
		};
		return h("tr", { "aria-rowindex": place + 2, "data-layer": l, class: `${picked ? "selected" : ""} ${state.open === l ? "open" : ""}` },
			h("td.check", h("input", { type: "checkbox", "aria-label": `Select ${shorten(clean(layer.name), 80)}`, checked: picked, onchange: toggle })), h("td.number", l + 1),
			h("td.name", button(clean(layer.name), () => on.open(l), { kind: "plain", title: clean(layer.name) }), layer.frozen && h("span.tag", "frozen")),
			h("td", severity && badge(severity)), h("td.wide", clean(layer.kind)), h("td.wide", layer.shape.join("×")),
			h("td", frame?.bins && l < frame.layers && sparkline(thinned(lineOf(frame, l), 48), { low: 0, high: state.highest, label: "rotation over time" })),
			columns().map((name) => { const v = value(l, name); return h("td.number", v != null ? number(v, 3) : "–"); }));
	}

	function spacer(rows) {
		const cell = h("td", { colspan: 20 });
		cell.style.height = `${rows * LINE}px`;
		return rows > 0 && h("tr.spacer", { "aria-hidden": "true" }, cell);
	}

	function fill() {
		const shown = printing ? order.length : Math.ceil(TALL / LINE) + 8;
		const start = Math.max(0, Math.min(Math.floor(scroll.scrollTop / LINE) - 4, order.length - shown));
		const end = Math.min(order.length, start + shown);
		const focus = body.contains(document.activeElement) ? [document.activeElement.closest("tr").dataset.layer, document.activeElement.tagName] : null;
		refill(body, spacer(start), order.slice(start, end).map((l, i) => row(l, start + i)), spacer(order.length - end));
		if (focus) body.querySelector(`[data-layer="${focus[0]}"] ${focus[1]}`)?.focus({ preventScroll: true });
	}

	function show(next) {
		state = next;
		const frame = model.whole.get("rotation");
		if (frame) state.highest = frame.highest ??= Math.max(1e-12, sampleOf([frame.mean]).most);
		const { layers } = model.head;
		const match = glob(state.search);
		order = sortBy([...layers.keys()].filter((l) => match(layers[l].name)), (l) => value(l, state.sort.key), state.sort.down);
		if (document.activeElement !== search) search.value = state.search;
		count.textContent = `${state.search ? `${order.length} of ` : ""}${plural(layers.length, "layer")}`;
		all.disabled = !order.length || !state.search;
		table.setAttribute("aria-rowcount", order.length + 1);
		const every = h("input", { type: "checkbox", "aria-label": "Select all layers shown, or none", checked: order.length > 0 && order.every((l) => state.selected.has(l)), onchange: () => on.pick(new Set(every.checked ? order : [])) });
		refill(head, h("td.check", every), sortHeads([["layer", "#", "number", "Sort by depth"], ["name", "layer", "name"], ["findings", "findings"], ["kind", "kind", "wide"], ["shape", "shape", "wide", "Sort by number of weights"], [null, "over time"], ...columns().map((name) => [name, COLUMNS[name] ?? clean(name), "number", `Sort by the last ${clean(name)}`])], state.sort, on.sort));
		fill();
		showDetail();
	}

	async function showDetail() {
		const l = state.open;
		const layer = model.head.layers[l];
		node.classList.toggle("has-detail", !!layer);
		detail.hidden = !layer;
		if (!layer) return (detail.dataset.layer = "");
		if (detail.dataset.layer !== String(l)) {
			detail.dataset.layer = l;
			detail.replaceChildren(h("div.row", h("h3", { tabindex: -1 }, clean(layer.name)), button("×", () => on.open(null), { label: "Close the detail", kind: "small" })),
				facts([["kind", clean(layer.kind)], ["shape", layer.shape.join(" × ")], ["weights", whole(weights(layer))], ["depth", `${l + 1} of ${model.head.layers.length}`], ...(layer.frozen ? [["frozen", "yes"]] : [])]),
				...model.head.diagnosis.findings.filter((one) => one.layers.includes(layer.name)).map((one) => h("p", badge(one.severity), clean(one.sentence))), h("div.small-curves"));
		}
		const home = detail.lastChild;
		for (const [i, info] of model.head.quantities.entries()) {
			const frame = await model.loadWhole(info.name).catch(() => null);
			if (state.open !== l) return;
			if (!frame || l >= frame.layers) continue;
			const [mean, min, max] = ["mean", "min", "max"].map((which) => thinned(lineOf(frame, l, which), 120, which));
			const last = info.last[l];
			const card = h("div", h("span", labelOf(info)), h("b", last == null ? "–" : number(last)), sparkline(mean, { width: 180, height: 36, log: info.scale === "log", band: frame.exact ? null : [min, max], label: `${labelOf(info)} over time` }));
			if (home.children[i]) home.children[i].replaceWith(card);
			else home.append(card);
		}
	}

	for (const [name, value] of [["beforeprint", true], ["afterprint", false]]) addEventListener(name, () => { printing = value && order.length <= 300; if (state && node.isConnected) fill(); });

	return {
		node,
		show,
		// Load what the columns show, one after the other.
		async load() {
			for (const name of columns()) {
				await model.loadWhole(name).catch(() => null);
				if (state) show(state);
			}
		},
		// Show a layer: its row, and its detail with the focus on it.
		reveal(l) {
			scroll.scrollTop = Math.max(0, order.indexOf(l) * LINE - TALL / 3);
			detail.querySelector("h3")?.focus({ preventScroll: true });
		},
	};
}
