// The table of layers, of which only the visible rows exist, and the detail of one layer.

const LINE = 30; // height of a row
const COLUMNS = ["rotation", "rate_per_step", "weight_norm", "update_ratio", "effective_lr", "gradient_norm"];

// `model` gives the head and frames; `on` gets pick(layers), open(layer), search and sort.
function createTable(model, on) {
  const search = el("input", { type: "search", placeholder: "layer name, or a pattern such as *.conv1.*", "aria-label": "Search layers by text or pattern", oninput: () => on.search(search.value) });
  const count = el("span", { class: "muted", role: "status" });
  const all = button("Select these", "Select the layers that match the search", () => on.pick(new Set(order)));
  const head = el("tr");
  const body = el("tbody");
  const table = el("table", { class: "layers" }, el("caption", { class: "hidden", text: "Layers with their last values" }), el("thead", {}, head), body);
  const scroll = el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of layers", onscroll: eachFrame(() => fill()) }, table);
  const detail = el("aside", { class: "detail", "aria-label": "Detail of a layer", hidden: true });
  const node = el("div", {}, el("div", { class: "tools" }, search, all, count), el("div", { class: "with-detail" }, scroll, detail));
  let state = null;
  let order = [];
  let printing = false;

  const columns = () => {
    const has = new Set(model.head.quantities.map((info) => info.name));
    const some = COLUMNS.filter((name) => has.has(name));
    return some.length ? some : [...has].slice(0, 4);
  };
  const infoOf = (name) => model.head.quantities.find((info) => info.name === name);
  const worst = (layer) => state.severities.get(layer);

  function value(layer, key) {
    const one = model.head.layers[layer];
    if (key === "layer") return layer;
    if (key === "name" || key === "kind") return one[key];
    if (key === "size") return one.shape.reduce((a, b) => a * b, 1);
    if (key === "findings") return { serious: 3, warning: 2, note: 1 }[worst(layer)] ?? 0;
    const frame = model.frames.get(key);
    return frame && layer < frame.layers ? lastValue(frame, layer) : null;
  }

  function sorted() {
    const { key, down } = state.sort;
    const match = state.search ? glob(state.search) : () => true;
    const layers = model.head.layers.map((_, l) => l).filter((l) => match(model.head.layers[l].name));
    if (key === "layer" && !down) return layers;
    const keys = layers.map((l) => value(l, key));
    const places = layers.map((_, i) => i).sort((i, j) => {
      const [a, b] = [keys[i], keys[j]];
      if (a == null || b == null) return (a == null) - (b == null) || i - j;
      return ((a < b ? -1 : a > b ? 1 : 0) * (down ? -1 : 1)) || i - j;
    });
    return places.map((i) => layers[i]);
  }

  function heads() {
    const cell = (key, text, title, kind = "") => {
      const active = state.sort.key === key;
      return el("th", { scope: "col", class: kind, "aria-sort": active ? (state.sort.down ? "descending" : "ascending") : null },
        el("button", { type: "button", title, "data-key": key, onclick: () => on.sort({ key, down: active ? !state.sort.down : kind.includes("number") && key !== "layer" }) }, text, el("span", { "aria-hidden": "true", class: "arrow", text: active ? (state.sort.down ? " ↓" : " ↑") : "" })));
    };
    const focused = head.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    const everything = el("input", { type: "checkbox", "aria-label": "Select all layers shown, or none", checked: order.length && order.every((l) => state.selected.has(l)), onchange: () => on.pick(everything.checked ? new Set(order) : new Set()) });
    head.replaceChildren(el("td", { class: "check" }, everything), cell("layer", "#", "Sort by depth", "number"), cell("name", "layer", "Sort by name", "name"), cell("findings", "findings", "Sort by findings"), cell("kind", "kind", "Sort by kind", "wide"), cell("size", "shape", "Sort by number of weights", "wide"), el("th", { scope: "col", class: "course", text: "rotation over time" }),
      ...columns().map((name) => cell(name, shortLabel(name), `Sort by the last ${labelOf(infoOf(name))}`, "number")));
    if (focused) head.querySelector(`[data-key="${focused}"]`)?.focus();
  }
  const shortLabel = (name) => ({ rate_per_step: "rad/step", weight_norm: "‖w‖", update_ratio: "‖Δw‖/‖w‖", effective_lr: "η/‖w‖²", gradient_norm: "‖g‖" })[name] ?? name.replaceAll("_", " ");

  function row(layer, place) {
    const one = model.head.layers[layer];
    const frame = model.frames.get("rotation");
    const has = frame && layer < frame.layers && frame.bins;
    const box = el("input", { type: "checkbox", "aria-label": `Select ${shorten(clean(one.name), 80)}`, checked: state.selected.has(layer), onchange: () => {
      const next = new Set(state.selected);
      if (!next.delete(layer)) next.add(layer);
      on.pick(next);
    } });
    const severity = worst(layer);
    return el("tr", { "aria-rowindex": place + 2, "data-layer": layer, class: [state.selected.has(layer) && "selected", state.open === layer && "open"].filter(Boolean).join(" ") },
      el("td", { class: "check" }, box), el("td", { class: "number", text: layer + 1 }),
      el("td", { class: "name" }, el("button", { type: "button", class: "plain", title: clean(one.name), onclick: () => on.open(layer), text: clean(one.name) }), one.frozen ? el("span", { class: "tag", text: "frozen" }) : null),
      el("td", {}, severity ? badge(severity) : null), el("td", { class: "wide", text: clean(one.kind) }), el("td", { class: "wide", text: one.shape.join("×") }),
      el("td", { class: "course" }, has ? sparkline(thin(lineOf(frame.mean, layer, frame.bins), 48), { low: 0, high: state.highest, label: "rotation over time" }) : null),
      ...columns().map((name) => el("td", { class: "number", text: model.frames.has(name) ? (value(layer, name) == null ? "–" : number(value(layer, name), 3)) : "…" })));
  }

  const spacer = (rows) => {
    const cell = el("td", { colspan: 7 + columns().length });
    cell.style.height = `${rows * LINE}px`;
    return el("tr", { "aria-hidden": "true", class: "spacer" }, cell);
  };

  function fill() {
    if (!state) return;
    const shown = printing ? order.length : Math.ceil((scroll.clientHeight || 480) / LINE) + 8;
    const start = printing ? 0 : Math.max(0, Math.min(Math.floor(scroll.scrollTop / LINE) - 4, order.length - shown));
    const end = Math.min(order.length, start + shown);
    const focused = body.contains(document.activeElement) ? [document.activeElement.closest("tr").dataset.layer, document.activeElement.tagName] : null;
    body.replaceChildren(...(start ? [spacer(start)] : []), ...order.slice(start, end).map((layer, i) => row(layer, start + i)), ...(end < order.length ? [spacer(order.length - end)] : []));
    if (focused) body.querySelector(`tr[data-layer="${focused[0]}"] ${focused[1]}`)?.focus({ preventScroll: true });
  }

  function show(next) {
    state = next;
    const frame = model.frames.get("rotation");
    state.highest = frame ? Math.max(1e-12, sampleOf([frame.mean]).most) : 1;
    order = sorted();
    if (document.activeElement !== search && search.value !== state.search) search.value = state.search;
    count.textContent = state.search ? `${order.length} of ${plural(model.head.layers.length, "layer")}` : plural(model.head.layers.length, "layer");
    all.disabled = !order.length || !state.search;
    table.setAttribute("aria-rowcount", order.length + 1);
    heads();
    fill();
    showDetail();
  }

  async function showDetail() {
    const layer = state.open;
    node.classList.toggle("has-detail", layer != null);
    detail.hidden = layer == null;
    if (layer == null) return detail.replaceChildren();
    const one = model.head.layers[layer];
    const findings = model.head.diagnosis.findings.filter((finding) => finding.layers.includes(one.name));
    const facts = [["kind", clean(one.kind)], ["shape", one.shape.join(" × ")], ["weights", whole(one.shape.reduce((a, b) => a * b, 1))], ["depth", `${layer + 1} of ${model.head.layers.length}`]];
    if (one.frozen) facts.push(["frozen", "yes"]);
    const list = el("div", { class: "small-curves" });
    if (detail.dataset.layer !== String(layer)) {
      detail.replaceChildren(
        el("div", { class: "row" }, el("h3", { tabindex: -1, text: clean(one.name) }), button("×", "Close the detail", () => on.open(null), { class: "small" })),
        el("dl", { class: "facts" }, facts.map(([term, text]) => el("div", {}, el("dt", { text: term }), el("dd", { text })))),
        ...findings.map((finding) => el("p", {}, badge(finding.severity), ` ${clean(finding.sentence)}`)), list, explain("detail"));
      detail.dataset.layer = layer;
    }
    const home = detail.querySelector(".small-curves");
    for (const info of model.head.quantities) {
      let frame;
      try {
        frame = await model.load(info.name);
      } catch { continue; }
      if (state.open !== layer || layer >= frame.layers) return;
      let card = [...home.children].find((child) => child.dataset.name === info.name);
      const now = lastValue(frame, layer);
      const parts = ["mean", "min", "max"].map((which) => thin(lineOf(frame[which], layer, frame.bins), 120, which));
      const fresh = el("div", { "data-name": info.name }, el("span", { text: labelOf(info) }), el("b", { text: now == null ? "–" : number(now) }),
        sparkline(parts[0], { width: 180, height: 36, log: info.scale === "log", band: frame.exact && parts[0].length === frame.bins ? null : [parts[1], parts[2]], label: `${labelOf(info)} over time` }));
      if (card) card.replaceWith(fresh);
      else home.append(fresh);
    }
  }

  addEventListener("beforeprint", () => { printing = order.length <= 300; fill(); });
  addEventListener("afterprint", () => { printing = false; fill(); });

  return {
    node,
    show,
    detail,
    // Load what the columns show, one after the other.
    async load() {
      for (const name of columns()) {
        try {
          await model.load(name);
        } catch { return; }
        if (state) show(state);
      }
    },
    reveal(layer) {
      const place = order.indexOf(layer);
      if (place >= 0) scroll.scrollTop = Math.max(0, place * LINE - scroll.clientHeight / 3);
    },
  };
}

// At most `most` values: means of neighbors, or their smallest or largest.
function thin(values, most, which = "mean") {
  if (values.length <= most) return values;
  return Array.from({ length: most }, (_, i) => {
    const from = Math.floor((i * values.length) / most);
    const part = values.subarray(from, Math.max(from + 1, Math.floor(((i + 1) * values.length) / most)));
    return gather(part, 1, 0, part.length, 0, which);
  });
}
