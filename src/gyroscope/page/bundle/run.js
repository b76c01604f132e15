// One run: its data as they arrive, and its page.

const BINS = 512;

// Head and frames of a run. `frames` are those of the visible steps, `whole` those of all steps; in a report they are the
// same. A frame that is out of date stays until its successor has come, so that the page never empties.
function createModel(source, id) {
  const pending = new Map();
  let steps = null;
  const model = { id, head: null, frames: new Map(), whole: new Map(), onframe: () => {} };
  model.open = async () => (model.head = await source.run(id));
  model.load = (quantity) => {
    if (model.frames.has(quantity)) return Promise.resolve(model.frames.get(quantity));
    return ask(quantity, steps);
  };
  function ask(quantity, range) {
    const key = `${quantity}|${range}`;
    if (!pending.has(key)) {
      const margin = range ? (range[1] - range[0]) / 4 : 0;
      const wanted = source.windows && range ? { bins: BINS, from: Math.max(range[0] - margin, 0), to: range[1] + margin } : { bins: BINS };
      pending.set(key, source.series(id, quantity, wanted).then((frame) => {
        if (!source.windows || !range) model.whole.set(quantity, frame);
        if (String(range) === String(steps) || !model.frames.has(quantity)) model.frames.set(quantity, frame);
        return frame;
      }).finally(() => pending.delete(key)));
    }
    return pending.get(key);
  }
  async function renew(quantities, range) {
    for (const quantity of quantities) {
      if (String(range) !== String(steps)) return; // the reader has moved on
      await ask(quantity, range);
      model.onframe(quantity);
    }
  }
  // The reader looks at other steps: a server is asked for them in more detail.
  model.setSteps = async (range) => {
    if (!source.windows || String(range) === String(steps)) return;
    steps = range;
    if (range) await renew([...model.frames.keys()], range);
    else {
      for (const [quantity, frame] of model.whole) model.frames.set(quantity, frame);
      await renew([...model.frames.keys()], null);
    }
  };
  // The run has changed on disk.
  model.renew = async () => {
    model.head = await source.run(id);
    if (steps) for (const quantity of [...model.whole.keys()]) await ask(quantity, null);
    await renew([...model.frames.keys()], steps);
  };
  return model;
}

function createRunPage(app, id) {
  const model = createModel(app.source, id);
  const { state } = app;
  const node = el("div", { class: "page" });
  const parts = {};
  let groups = [];
  let levels = [];
  let names = [];
  let short = [];
  let severities = new Map();
  let markers = [];
  let full = [0, 1];
  let layout = { key: null, rows: [], hidden: new Set() };
  let scaleMemo = {};
  let activeFinding = null;

  const info = () => model.head.quantities.find((one) => one.name === state.q) ?? null;
  const folded = () => state.fold;
  const clampSteps = (range) => (range ? [Math.max(full[0], Math.min(range[0], full[1] - 1)), Math.min(full[1], Math.max(range[1], full[0] + 1))] : full);
  const spanNow = () => {
    const n = Math.max(layout.rows.length, 1);
    if (!state.rows) return [0, n];
    const size = Math.min(state.rows[1] - state.rows[0], n);
    const start = Math.min(Math.max(state.rows[0], 0), n - size);
    return [start, start + size];
  };

  // Everything that follows from the head.
  function digest() {
    const { head } = model;
    names = head.layers.map((layer) => layer.name);
    if (names.join("\n") !== digest.names) {
      digest.names = names.join("\n");
      groups = groupLayers(names);
      levels = [...new Set(everyGroup(groups).map((group) => group.depth))];
      short = shortNames(names);
      layout.key = null;
    }
    const place = new Map(names.map((name, i) => [name, i]));
    const order = { serious: 3, warning: 2, note: 1 };
    severities = new Map();
    for (const finding of head.diagnosis.findings) for (const name of finding.layers) {
      const layer = place.get(name);
      const severity = severityOf(finding.severity);
      if (layer != null && !(order[severities.get(layer)] >= order[severity])) severities.set(layer, severity);
    }
    markers = [
      ...head.schedule.map((one) => ({ step: one.step, kind: "schedule", text: one.text })),
      ...head.events.filter((one) => one.kind !== "finding").map((one) => ({ step: one.step, kind: "event", text: `${one.kind}: ${one.text}` })),
      ...head.diagnosis.findings.filter((one) => one.since != null).map((finding) => ({ step: finding.since, kind: "finding", severity: severityOf(finding.severity), text: finding.sentence, finding })),
    ].filter((one) => one.step != null);
    const { first, last, count } = head.steps;
    const half = count > 1 ? (last - first) / (count - 1) / 2 : 0.5;
    full = count ? [first - half, last + half] : [0, 1];
    if (!head.quantities.some((one) => one.name === state.q)) state.q = head.quantities.some((one) => one.name === "rotation") ? "rotation" : head.quantities[0]?.name ?? null;
  }

  function headline() {
    const { head } = model;
    const summary = app.runs.find((run) => run.id === id);
    const facts = [head.model == null ? null : clean(head.model), plural(head.layers.length, "layer"), head.steps.count ? `step ${whole(head.steps.last)}, ${whole(head.steps.count)} measured` : "no step measured yet"];
    if (summary?.optimizer) facts.push(clean(summary.optimizer));
    const last = (name) => head.scalars.find((one) => one.name === name)?.values.findLast((v) => v != null);
    const loss = summary?.loss ?? last("loss");
    if (loss != null) facts.push(`loss ${number(loss)}`);
    for (const [name, value] of Object.entries(summary?.accuracies ?? {})) facts.push(`${clean(name)} accuracy ${percent(value)}`);
    return el("section", { class: "run-head" }, el("h1", {}, clean(head.name), " ", stateTag(head.state)), el("p", { class: "facts-line" }, facts.filter(Boolean).map((text) => el("span", { text }))), sampleButton(head));
  }

  function sampleButton(head) {
    if (!app.source.sample || head.state !== "running") return null;
    const says = el("span", { class: "muted", role: "status" });
    return el("p", { class: "tools" }, button("Measure the next 20 steps in detail", "Measure the next 20 steps in detail", async () => {
      try {
        await app.source.sample(id, 20);
        says.textContent = "Asked for. The training measures its next 20 steps in detail.";
      } catch (error) {
        says.textContent = error.message;
      }
    }), says);
  }

  // ---- actions
  const setSteps = (steps) => app.set({ steps: steps && [Math.round(steps[0] * 100) / 100, Math.round(steps[1] * 100) / 100] });
  function zoomSteps(factor, at = null) {
    const [a, b] = clampSteps(state.steps);
    const middle = at ?? (a + b) / 2;
    const size = Math.max((b - a) * factor, Math.min(3, full[1] - full[0]));
    if (size >= full[1] - full[0]) return setSteps(null);
    const start = Math.min(Math.max(middle - (middle - a) * (size / (b - a)), full[0]), full[1] - size);
    setSteps([start, start + size]);
  }
  function panSteps(share) {
    if (!state.steps) return;
    const [a, b] = clampSteps(state.steps);
    const shift = Math.min(Math.max(share * (b - a), full[0] - a), full[1] - b);
    setSteps([a + shift, b + shift]);
  }
  function pick(row, event) {
    const layers = [];
    for (let l = row.from; l < row.to; l++) layers.push(l);
    const all = layers.every((l) => state.layers.has(l));
    let next;
    if (event.shiftKey && pick.last != null) {
      const [a, b] = [Math.min(pick.last, row.from), Math.max(pick.last + 1, row.to)];
      next = new Set(state.layers);
      for (let l = a; l < b; l++) next.add(l);
    } else if (event.ctrlKey || event.metaKey) {
      next = new Set(state.layers);
      for (const l of layers) all ? next.delete(l) : next.add(l);
    } else next = all && state.layers.size === layers.length ? new Set() : new Set(layers);
    pick.last = row.from;
    app.set({ layers: next });
  }
  function foldGroup(group) {
    const key = groupKey(group);
    const next = new Set(folded());
    if (!next.delete(key)) next.add(key);
    refold(next);
  }
  function refold(next) {
    const span = spanNow();
    const top = state.rows ? layout.rows[Math.floor(span[0])]?.from : null;
    app.set({ fold: next, rows: null });
    if (top == null) return;
    const at = layout.rows.findIndex((row) => row.to > top);
    const size = span[1] - span[0];
    if (size < layout.rows.length) app.set({ rows: [at, at + size] });
  }
  function go(finding, i) {
    const place = new Map(names.map((name, l) => [name, l]));
    const layers = finding.layers.map((name) => place.get(name)).filter((l) => l != null);
    activeFinding = i;
    const patch = { layers: new Set(layers) };
    const span = full[1] - full[0];
    if (finding.since != null && span > 20) patch.steps = [Math.max(full[0], finding.since - 0.15 * span), Math.min(full[1], finding.since + 0.25 * span)];
    else patch.steps = null;
    if (layers.length) {
      const hit = new Set(layers);
      const next = new Set([...folded()].filter((key) => {
        const [a, b] = key.split("-").map(Number);
        return !layers.some((l) => l >= a && l < b);
      }));
      patch.fold = next;
      layoutRows(next);
      const rows = layout.rows.map((row, r) => (hit.has(row.from) ? r : -1)).filter((r) => r >= 0);
      const [a, b] = [rows[0], rows.at(-1) + 1];
      const size = Math.max(b - a + 6, 22);
      patch.rows = size < layout.rows.length ? [Math.max(0, (a + b - size) / 2), Math.max(0, (a + b - size) / 2) + size] : null;
    } else patch.rows = null;
    app.set(patch);
    parts.heat.point(finding.since);
    parts.curves.point(finding.since);
    parts.heatPanel.scrollIntoView({ behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth", block: "start" });
    parts.heat.node.focus({ preventScroll: true });
  }

  function layoutRows(fold = folded()) {
    const key = [...fold].join();
    if (layout.key === key) return;
    const hidden = new Set();
    const inside = (group, under) => {
      if (under) hidden.add(groupKey(group));
      for (const child of group.children) inside(child, under || fold.has(groupKey(group)));
    };
    for (const group of groups) inside(group, false);
    layout = { key, rows: rowsOf(names.length, groups, fold), hidden, groups: everyGroup(groups), fold };
  }

  // ---- the page
  function build() {
    parts.head = el("div");
    parts.findings = el("div", { class: "findings-body" });
    parts.recorded = el("div");
    parts.heat = createHeatmap({
      steps: setSteps,
      rows: (rows) => app.set({ rows: rows && rows.map((r) => Math.round(r * 1000) / 1000) }),
      hover(cell, step) {
        parts.curves.point(step);
        parts.readout.textContent = cell ? `${cell.name} · ${stepsText(cell.first, cell.last)} · ${number(cell.mean)}${cell.min !== cell.max ? ` (${number(cell.min)} to ${number(cell.max)})` : ""}` : parts.readout.dataset.rest ?? "";
      },
      pick,
      fold: foldGroup,
      marker: (found) => { const one = found.find((mark) => mark.finding); if (one) go(one.finding, model.head.diagnosis.findings.indexOf(one.finding)); },
      hint: () => (parts.readout.textContent = "To zoom with the wheel, click the heatmap first or hold Ctrl."),
    }, { id: "heat" });
    parts.curves = createCurves(model, {
      hover(step) { parts.heat.point(step); parts.curves.point(step); },
      steps: setSteps,
      zoom: zoomSteps,
      quantity: (q) => { app.set({ q }); parts.heatPanel.scrollIntoView({ block: "start" }); },
      shown: (shown) => app.set({ shown }),
    });
    parts.table = createTable({ ...model, get head() { return model.head; }, frames: model.whole, load: (q) => (model.whole.has(q) ? Promise.resolve(model.whole.get(q)) : model.load(q)) }, {
      pick: (layers) => app.set({ layers }),
      open: (layer) => { app.set({ open: layer }); if (layer != null) parts.table.detail.querySelector("h3")?.focus(); },
      search: (search) => app.set({ search }),
      sort: (sort) => app.set({ sort }),
    });
    parts.bar = el("div", { class: "sticky", role: "group", "aria-label": "Steps and layers shown" });
    parts.heatTools = el("div", { class: "tools" });
    parts.legend = el("div");
    parts.readout = el("p", { class: "readout muted", "aria-live": "polite" });
    parts.summary = el("p", { class: "hidden", id: "heat-summary" });
    parts.heatPanel = el("section", { class: "panel anchor", "aria-labelledby": "heat-title" }, el("div", { class: "row head" }, el("h2", { id: "heat-title", text: "Layers over time" }), explain("heatmap")), parts.heatTools, parts.legend, parts.heat.node, parts.readout, parts.summary,
      fold("How to move", el("p", { text: "Drag to pan, wheel to zoom after a click (Shift: layers only, Alt: steps only), Shift and drag for a box, double click for everything. Click a row to select its layer, with Ctrl to add. Click a bracket to fold a block into its mean. Keys: arrows pan, + and − zoom, 0 shows everything, Shift and arrows read cells, Enter selects, f folds." })));
    parts.curvesPanel = el("section", { class: "panel", "aria-labelledby": "curves-title" }, el("div", { class: "row head" }, el("h2", { id: "curves-title", text: "Curves" }), explain("curves")), parts.curves.node);
    parts.tablePanel = el("section", { class: "panel", "aria-labelledby": "table-title" }, el("div", { class: "row head" }, el("h2", { id: "table-title", text: "Layers" }), explain("table")), parts.table.node);
    const panel = (name, title, body) => el("section", { class: "panel", "aria-labelledby": `${name}-title` }, el("div", { class: "row head" }, el("h2", { id: `${name}-title`, text: title }), explain(name)), body);
    node.append(parts.head, el("div", { class: "two" }, panel("findings", "Findings", parts.findings), panel("recorded", "What was recorded", parts.recorded)), parts.bar, parts.heatPanel, parts.curvesPanel, parts.tablePanel, glossaryPanel());
    const seen = new IntersectionObserver((entries) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      seen.disconnect();
      parts.table.load();
    }, { rootMargin: "400px" });
    seen.observe(parts.tablePanel);
  }

  function fillHead() {
    parts.head.replaceChildren(headline());
    parts.findings.replaceChildren(...findingsPanel(model.head, app.config.docs, go, activeFinding));
    const open = [...parts.recorded.querySelectorAll("details")].map((one) => one.open);
    parts.recorded.replaceChildren(...recordedPanel(model.head));
    parts.recorded.querySelectorAll("details").forEach((one, i) => (one.open = open[i] ?? false));
  }

  function fillBar() {
    if (parts.bar.contains(document.activeElement) && document.activeElement.tagName === "INPUT") return;
    const focused = parts.bar.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    const [a, b] = clampSteps(state.steps);
    const { first, last } = model.head.steps;
    const edge = (label, value, which) => {
      const input = el("input", { type: "number", "aria-label": label, value, min: first, max: last, onchange: () => {
        const next = [a, b];
        next[which] = Number(input.value);
        if (Number.isFinite(next[which]) && next[1] > next[0]) { input.blur(); setSteps(next); }
      } });
      return input;
    };
    const n = state.layers.size;
    parts.bar.replaceChildren(
      el("span", { class: "tools" }, el("span", { class: "muted", text: "steps" }), edge("First step shown", Math.max(first ?? 0, Math.ceil(a)), 0), "–", edge("Last step shown", Math.min(last ?? 0, Math.floor(b)), 1),
        button("−", "Zoom out in time", () => zoomSteps(1.5)), button("+", "Zoom in on time", () => zoomSteps(1 / 1.5)), button("◂", "Earlier steps", () => panSteps(-0.25), { disabled: !state.steps }), button("▸", "Later steps", () => panSteps(0.25), { disabled: !state.steps }), button("all", "Show all steps", () => setSteps(null), { disabled: !state.steps })),
      el("span", { class: "tools" }, n ? el("span", { class: "tag" }, n === 1 ? shorten(short[[...state.layers][0]] ?? "", 36) : `${n} of ${plural(names.length, "layer")}`) : el("span", { class: "muted", text: "all layers" }), n ? button("clear", "Clear the selection of layers", () => { activeFinding = null; app.set({ layers: new Set() }); }) : null,
        n === 1 ? button("detail", "Open the detail of this layer", () => openDetail([...state.layers][0])) : null));
    if (focused) parts.bar.querySelector(`[aria-label="${focused}"]`)?.focus();
  }
  function openDetail(layer) {
    app.set({ open: layer });
    parts.table.reveal(layer);
    parts.tablePanel.scrollIntoView({ block: "start" });
    parts.table.detail.querySelector("h3")?.focus({ preventScroll: true });
  }

  function fillHeatTools() {
    if (parts.heatTools.contains(document.activeElement) && document.activeElement.tagName === "SELECT" && fillHeatTools.key === model.head.quantities.length) return;
    fillHeatTools.key = model.head.quantities.length;
    const focused = parts.heatTools.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    const one = info();
    const choices = model.head.quantities.map((each) => ({ value: each.name, text: labelOf(each), group: GROUPS[each.group] ?? GROUPS.other }));
    const kind = state.scale ?? (one ? usualScale(one) : "linear");
    const signed = one?.scale === "signed";
    const foldChoices = [{ value: "", text: `every layer (${names.length})` }, ...levels.map((level) => ({ value: String(level), text: `${["blocks", "inner blocks", "third level"][level] ?? `level ${level + 1}`} (${rowsOf(names.length, groups, foldAt(level)).length} rows)` }))];
    const now = !state.fold.size ? "" : levels.map(String).find((level) => sameValue([...foldAt(Number(level))].sort(), [...state.fold].sort())) ?? "own";
    if (now === "own") foldChoices.push({ value: "own", text: `folded by hand (${layout.rows.length} rows)` });
    parts.heatTools.replaceChildren(
      select("Quantity", choices, one?.name ?? "", (q) => app.set({ q })),
      select("Color scale", [{ value: "linear", text: "linear" }, { value: "log", text: "log", disabled: signed }, { value: "quantile", text: "quantile" }], kind, (scale) => app.set({ scale: one && scale === usualScale(one) ? null : scale })),
      levels.length ? select("Rows", foldChoices, now, (level) => { if (level !== "own") refold(level === "" ? new Set() : foldAt(Number(level))); }) : null,
      el("span", { class: "buttons" }, button("+", "Zoom in on steps and layers", () => parts.heat.zoom(1 / 1.5)), button("−", "Zoom out of steps and layers", () => parts.heat.zoom(1.5)), ...[["◂", "Move left", -0.25, 0], ["▸", "Move right", 0.25, 0], ["▴", "Move up", 0, -0.25], ["▾", "Move down", 0, 0.25]].map(([text, label, x, y]) => button(text, label, () => parts.heat.pan(x, y))), button("all", "Show all steps and layers", () => app.set({ steps: null, rows: null }))),
      one ? el("details", { class: "mini" }, el("summary", { "aria-label": "About this quantity", text: "?" }), el("div", { class: "pop" }, quantityWords(one).map((text) => el("p", { text })))) : "");
    if (focused) parts.heatTools.querySelector(`[aria-label="${focused}"]`)?.focus();
  }
  const foldAt = (level) => new Set(everyGroup(groups).filter((group) => group.depth === level).map(groupKey));

  function heatData() {
    const one = info();
    const frame = one ? model.frames.get(one.name) : null;
    const scaled = one ? model.whole.get(one.name) ?? frame : null;
    const kind = state.scale ?? (one ? usualScale(one) : "linear");
    if (scaleMemo.frame !== scaled || scaleMemo.kind !== kind || !scaleMemo.scale || scaleMemo.theme !== themeName()) {
      scaleMemo = { frame: scaled, kind, theme: themeName(), scale: makeScale(kind, one?.scale ?? "linear", scaled ? [scaled.mean] : []) };
      parts.legend.replaceChildren(legendOf(scaleMemo.scale, one ? labelOf(one) : ""));
    }
    const empty = !model.head.layers.length ? "This run has no layers." : !one ? "No quantity was recorded." : heatData.error ? heatData.error : !model.head.steps.count ? "No step has been measured yet." : frame ? "This quantity has no values." : "Reading …";
    return { frame: frame && frame.bins && frame.layers === names.length ? frame : null, empty, rows: layout.rows, names, short, scale: scaleMemo.scale, window: clampSteps(state.steps), full, span: spanNow(), selected: state.layers, folded: state.fold, hidden: layout.hidden, groups: layout.groups, severities, markers, unit: one && one.unit !== "1" ? one.unit : "" };
  }

  function drawHeat() {
    layoutRows();
    parts.heat.show(heatData());
  }

  function describe() {
    const one = info();
    const frame = one && model.frames.get(one.name);
    parts.heat.node.setAttribute("aria-label", one ? `Heatmap of ${labelOf(one)}, layer by step` : "Heatmap");
    parts.summary.textContent = frame ? `${describeQuantity(one, frame, model.head)} The table of layers below holds the last values.` : "No values yet.";
    const bin = frame && !frame.exact && frame.bins ? `${frame.bins} bins of about ${whole(Math.round((frame.last[frame.bins - 1] - frame.first[0] + 1) / frame.bins))} steps` : frame?.bins ? "every measured step" : "";
    const rest = [bin, frame?.precision && frame.precision !== "float32" ? `values ${frame.precision}` : "", frame?.clipped ? `${whole(frame.clipped)} values ≤ 0 at the lowest color` : ""].filter(Boolean).join(" · ");
    parts.readout.dataset.rest = rest;
    parts.readout.textContent = rest;
  }

  const drawCurves = () => parts.curves.show({ window: clampSteps(state.steps), selected: state.layers, markers, shown: state.shown, smooth: true });
  let soon = null;
  function drawCurvesSoon(delay) {
    clearTimeout(soon);
    soon = setTimeout(drawCurves, delay);
  }
  const drawTable = () => parts.table.show({ selected: state.layers, open: state.open, search: state.search, sort: state.sort, severities });

  let asking = null;
  async function loadHeat() {
    const one = info();
    heatData.error = null;
    if (!one) return;
    try {
      await model.load(one.name);
    } catch (error) {
      heatData.error = "The measurements cannot be shown.";
      app.say(error.message, "error");
    }
  }

  // Something in the state has changed: draw what depends on it.
  function update(changed = null) {
    const any = (...keys) => !changed || keys.some((key) => changed.has(key));
    if (any("q")) loadHeat().then(() => { drawHeat(); describe(); });
    if (any("steps", "rows", "layers", "fold", "q", "scale")) drawHeat();
    if (any("steps", "layers")) fillBar();
    if (any("q", "scale", "fold")) fillHeatTools();
    if (any("steps", "layers", "shown")) drawCurvesSoon(changed?.has("steps") ? 60 : 0);
    if (any("layers", "open", "search", "sort")) drawTable();
    if (any("steps") && app.source.windows) {
      clearTimeout(asking);
      asking = setTimeout(() => model.setSteps(state.steps && clampSteps(state.steps)).catch((error) => app.say(error.message, "error")), 200);
    }
  }
  model.onframe = (quantity) => {
    if (!node.isConnected) return;
    if (quantity === state.q) { drawHeat(); describe(); }
    drawCurvesSoon(80);
    if (COLUMNS.includes(quantity)) drawTable();
  };

  return {
    node,
    model,
    parts,
    update,
    async ready() {
      await model.open();
      digest();
      layoutRows();
      build();
      fillHead();
    },
    async shown() {
      fillBar();
      fillHeatTools();
      drawHeat();
      drawTable();
      await loadHeat();
      drawHeat();
      describe();
      drawCurves();
    },
    async changed() {
      await model.renew();
      digest();
      fillHead();
      fillBar();
      fillHeatTools();
      drawHeat();
      describe();
      drawTable();
      drawCurvesSoon(0);
    },
    redraw() {
      drawHeat();
      drawCurves();
      drawTable();
    },
    resize() {
      parts.heat?.resize();
      parts.curves?.resize();
    },
    destroy: () => { clearTimeout(soon); clearTimeout(asking); parts.curves?.destroy(); },
  };
}
