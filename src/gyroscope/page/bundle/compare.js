// Several runs: options that differ, rotation against accuracy, side by side, and the difference of two.

// Ranks from 1, ties get the mean of their places.
function ranks(values) {
  const order = values.map((v, i) => [v, i]).sort((a, b) => a[0] - b[0]);
  const out = Array(values.length);
  for (let i = 0, j; i < order.length; i = j) {
    for (j = i; j < order.length && order[j][0] === order[i][0]; j++);
    for (let k = i; k < j; k++) out[order[k][1]] = (i + j + 1) / 2;
  }
  return out;
}

// Spearman's rank correlation; NaN if one side is constant.
function rankCorrelation(x, y) {
  const [a, b] = [ranks(x), ranks(y)];
  const middle = (a.length + 1) / 2;
  let [ab, aa, bb] = [0, 0, 0];
  a.forEach((_, i) => {
    ab += (a[i] - middle) * (b[i] - middle);
    aa += (a[i] - middle) ** 2;
    bb += (b[i] - middle) ** 2;
  });
  return ab / Math.sqrt(aa * bb);
}

// The accuracies that runs share, the one on unseen data first.
function accuracyNames(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.accuracies ?? {})))];
  const place = (name) => [/test/i, /val|eval/i, /./].findIndex((rule) => rule.test(name));
  return names.sort((a, b) => place(a) - place(b));
}

function scatterPanel(runs, metric, setMetric, open) {
  const names = accuracyNames(runs);
  const chosen = names.includes(metric) ? metric : names[0];
  const points = runs.filter((run) => run.rotation && run.accuracies?.[chosen] != null).map((run) => ({ run, x: run.rotation[1], y: run.accuracies[chosen] }));
  if (points.length < 3) return null;
  const correlation = rankCorrelation(points.map((p) => p.x), points.map((p) => p.y));
  const [width, height, left, bottom] = [520, 300, 56, 40];
  const most = niceAbove(Math.max(...points.map((p) => p.x)));
  const [worst, best] = [Math.min(...points.map((p) => p.y)), Math.max(...points.map((p) => p.y))];
  const margin = Math.max((best - worst) * 0.12, 0.002);
  const [low, high] = [worst - margin, best + margin];
  const xOf = (v) => left + (v / most) * (width - left - 16);
  const yOf = (v) => height - bottom - ((v - low) / (high - low)) * (height - bottom - 12);
  const text = (x, y, words, more = {}) => svg("text", { x, y, ...more }, document.createTextNode(words));
  const image = svg("svg", { class: "scatter", viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": `Mean final rotation against ${clean(chosen)} accuracy of ${points.length} runs, rank correlation ${number(correlation, 2)}` });
  for (const v of ticks(0, most, 5)) image.append(svg("line", { x1: xOf(v), x2: xOf(v), y1: 12, y2: height - bottom, class: "grid" }), text(xOf(v), height - bottom + 16, number(v, 3), { "text-anchor": "middle" }));
  for (const v of ticks(low, high, 5)) image.append(svg("line", { x1: left, x2: width - 16, y1: yOf(v), y2: yOf(v), class: "grid" }), text(left - 6, yOf(v) + 4, `${number(100 * v, 3)} %`, { "text-anchor": "end" }));
  image.append(text((left + width) / 2, height - 6, "mean final rotation", { "text-anchor": "middle" }));
  const taken = [];
  for (const { run, x, y } of [...points].sort((a, b) => b.y - a.y)) {
    const [cx, cy] = [xOf(x), yOf(y)];
    const name = shorten(clean(run.name), 22);
    const end = cx > width - 130;
    const box = [end ? cx - 8 - name.length * 6 : cx + 8, cy - 7, name.length * 6, 14];
    const link = svg("a", { href: `#run=${encodeURIComponent(run.id)}`, "aria-label": `${clean(run.name)}: rotation ${number(x, 3)}, ${percent(y)}` }, svg("title", {}, document.createTextNode(`${clean(run.name)}: rotation ${number(x, 3)}, ${percent(y)}`)), svg("circle", { cx, cy, r: 5 }));
    if (!taken.some((b) => box[0] < b[0] + b[2] && b[0] < box[0] + box[2] && box[1] < b[1] + b[3] && b[1] < box[1] + box[3])) {
      taken.push(box);
      link.append(text(cx + (end ? -8 : 8), cy + 4, name, { "text-anchor": end ? "end" : "start" }));
    }
    image.append(link);
  }
  const says = Number.isNaN(correlation) ? "The runs do not differ on one of the axes, so there is no rank correlation." : `Rank correlation over ${points.length} runs: ${correlation >= 0 ? "+" : "−"}${Math.abs(correlation).toFixed(2)}.`;
  return el("section", { class: "panel", "aria-labelledby": "scatter-title" },
    el("div", { class: "row head" }, el("h2", { id: "scatter-title", text: "Rotation against accuracy" }), names.length > 1 ? select("Accuracy", names.map((name) => ({ value: name, text: clean(name) })), chosen, setMetric) : null, explain("scatter")),
    el("p", { class: "says", text: says }), image);
}

const sameValue = (a, b) => JSON.stringify(a ?? null) === JSON.stringify(b ?? null);

// Names of options that are not the same in all runs.
const differing = (runs) => [...new Set(runs.flatMap((run) => Object.keys(run.options ?? {})))].filter((key) => runs.some((run) => !sameValue(run.options?.[key], runs[0].options?.[key])));

function optionsPanel(runs) {
  const keys = differing(runs);
  const metrics = accuracyNames(runs);
  const rows = runs.map((run) => el("tr", {}, el("th", { scope: "row" }, el("a", { href: `#run=${encodeURIComponent(run.id)}`, text: clean(run.name) })), ...keys.map((key) => el("td", { text: evidenceText(run.options?.[key]) })), el("td", { class: "number", text: run.rotation ? number(run.rotation[1], 3) : "–" }), el("td", { class: "number", text: run.loss == null ? "–" : number(run.loss, 3) }), ...metrics.map((name) => el("td", { class: "number", text: percent(run.accuracies?.[name]) }))));
  return el("section", { class: "panel", "aria-labelledby": "options-title" }, el("div", { class: "row head" }, el("h2", { id: "options-title", text: "What differs" }), explain("options")),
    keys.length ? null : el("p", { class: "muted", text: "The recorded hyperparameters are the same in these runs." }),
    el("div", { class: "scroll-x", tabindex: 0, role: "region", "aria-label": "Hyperparameters that differ" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col", text: "run" }), ...keys.map((key) => el("th", { scope: "col", text: clean(key) })), ...["rotation", "loss", ...metrics.map((name) => clean(name))].map((name) => el("th", { scope: "col", class: "number", text: name })))), el("tbody", {}, rows))));
}

// Difference of two frames over the layers that both have; on a logarithmic scale, log10 of the ratio.
function differenceFrame(one, two, pairs, log) {
  const { bins, first, last } = one;
  const mean = new Float32Array(pairs.length * bins).fill(NaN);
  const places = centers(one).map((step) => binAt(two, step));
  pairs.forEach(([a, b], i) => {
    for (let t = 0; t < bins; t++) {
      if (places[t] < 0) continue;
      const [x, y] = [one.mean[a * bins + t], two.mean[b * two.bins + places[t]]];
      mean[i * bins + t] = log ? (x > 0 && y > 0 ? Math.log10(y / x) : NaN) : y - x;
    }
  });
  return { layers: pairs.length, bins, first, last, exact: true, mean, min: mean, max: mean };
}

// Layers that two runs share, as pairs of their places.
function commonLayers(one, two) {
  const places = new Map(two.layers.map((layer, i) => [layer.name, i]));
  return one.layers.map((layer, i) => [i, places.get(layer.name)]).filter(([, place]) => place != null);
}

const smallData = (frame, names, scale, full, info) => {
  const rows = rowsOf(frame.layers, [], new Set());
  return { frame, rows, names, short: names, scale, window: full, full, span: [0, Math.max(rows.length, 1)], selected: new Set(), folded: new Set(), hidden: new Set(), groups: [], severities: new Map(), markers: [], unit: info.unit === "1" ? "" : info.unit };
};

function createCompare(app, runs) {
  const models = runs.map((run) => createModel(app.source, run.id));
  const node = el("div", { class: "page" });
  let heats = [];
  let charts = [];

  async function fill() {
    const readable = [];
    const errors = [];
    for (const [i, model] of models.entries()) {
      try {
        if (!model.head) await model.open();
        readable.push(i);
      } catch (error) {
        errors.push(`${clean(runs[i].name)}: ${error.message}`);
      }
    }
    const sound = readable.map((i) => models[i]);
    const heads = sound.map((model) => model.head);
    const infos = new Map(heads.flatMap((head) => head.quantities).map((info) => [info.name, info]));
    const everywhere = (name) => heads.every((head) => head.quantities.some((info) => info.name === name));
    const names = [...infos.keys()].sort((a, b) => everywhere(b) - everywhere(a));
    const q = names.includes(app.state.q) ? app.state.q : names.includes("rotation") ? "rotation" : names[0];
    const info = infos.get(q);
    const frames = [];
    for (const model of sound) {
      if (!model.head.quantities.some((one) => one.name === q)) frames.push(null);
      else try {
        frames.push(await model.load(q));
      } catch (error) {
        errors.push(`${clean(model.head.name)}: ${error.message}`);
        frames.push(null);
      }
    }
    const kind = app.state.scale ?? (info ? usualScale(info) : "linear");
    const some = frames.filter(Boolean);
    const scale = makeScale(kind, info?.scale ?? "linear", some.map((frame) => frame.mean));
    const ends = some.filter((frame) => frame.bins).flatMap((frame) => [edgesOf(frame)[0], edgesOf(frame)[frame.bins]]);
    const full = ends.length ? [Math.min(...ends), Math.max(...ends)] : [0, 1];
    charts.forEach((chart) => chart.destroy());
    [heats, charts] = [[], []];
    const tools = el("div", { class: "tools" }, names.length ? select("Quantity", names.map((name) => ({ value: name, text: labelOf(infos.get(name)) })), q, (name) => app.set({ q: name })) : null, select("Color scale", ["linear", "log", "quantile"].map((value) => ({ value, text: value })), scale.kind, (value) => app.set({ scale: value })), legendOf(scale, info ? labelOf(info) : ""));
    const side = el("div", { class: "side" });
    sound.forEach((model, i) => {
      if (!frames[i]) return side.append(el("figure", {}, el("figcaption", { text: clean(model.head.name) }), el("p", { class: "muted", text: `This run does not hold ${info ? labelOf(info) : "quantities"}.` })));
      const heat = createHeatmap({}, { small: true });
      heat.node.setAttribute("aria-label", `${clean(model.head.name)}: ${describeQuantity(info, frames[i], model.head)}`);
      heats.push([heat, () => smallData(frames[i], model.head.layers.map((layer) => layer.name), scale, full, info)]);
      side.append(el("figure", {}, el("figcaption", {}, el("a", { href: `#run=${encodeURIComponent(model.id)}`, text: clean(model.head.name) }), el("span", { class: "muted", text: ` ${plural(model.head.layers.length, "layer")}` })), heat.node));
    });
    const differ = heads.some((head) => !sameValue(head.layers.map((layer) => layer.name), heads[0]?.layers.map((layer) => layer.name)));
    node.replaceChildren(
      el("section", { class: "run-head" }, el("h1", { text: `${plural(runs.length, "run")} compared` }), el("p", { class: "facts-line" }, runs.map((run) => el("span", { class: "tag" }, clean(run.name), runs.length > 2 ? button("×", `Remove ${clean(run.name)} from the comparison`, () => app.set({ compare: app.state.compare.filter((id) => id !== run.id) }, true), { class: "plain" }) : null)))),
      ...errors.map((text) => el("p", { class: "panel error", text })),
      optionsPanel(runs),
      ...[scatterPanel(runs, app.state.metric, (metric) => app.set({ metric }), null)].filter(Boolean),
      el("section", { class: "panel", "aria-labelledby": "side-title" }, el("div", { class: "row head" }, el("h2", { id: "side-title", text: "Side by side" }), explain("compare")), differ ? el("p", { class: "muted", text: "These runs have different layers: compare the pattern from the first layer (top) to the last (bottom), not row by row." }) : null, tools, side),
      meansPanel(sound, frames, info, full),
      ...(sound.length > 1 ? [differencePanel(sound, frames, info)] : []),
    );
    draw();
    if (info) node.querySelector("#side-title").dataset.ready = q;
  }

  function meansPanel(sound, frames, info, full) {
    const hues = CATEGORIES[themeName()];
    const chartOn = { steps() {}, hover() {}, zoom() {} };
    const charting = (title, list, look, log) => {
      const { x, spreadOut } = joinSteps(list);
      const lines = list.map((one, i) => ({ name: one.name, values: spreadOut(one.steps, known(one.values, log)), color: hues[i % hues.length], dash: i >= hues.length ? [6, 3] : undefined, width: 1.5 }));
      const chart = createChart(chartOn);
      charts.push(chart);
      const keys = el("div", { class: "keys" }, lines.map((line) => {
        const swatch = el("i");
        swatch.style.background = line.color;
        return el("span", {}, swatch, shorten(line.name, 30));
      }));
      heats.push([chart, () => ({ x, lines, look, log, window: full, height: 220, describe: `${title} of ${list.length} runs over steps` })]);
      return el("figure", { class: "chart" }, el("figcaption", {}, el("h3", { text: title })), chart.node, keys);
    };
    const means = sound.map((model, i) => frames[i] && { name: clean(model.head.name), steps: centers(frames[i]), values: Array.from({ length: frames[i].bins }, (_, t) => gather(frames[i].mean, frames[i].bins, 0, frames[i].layers, t, "mean")) }).filter(Boolean);
    const losses = sound.map((model) => [model, model.head.scalars.find((one) => one.name === "loss") ?? model.head.scalars.find((one) => /loss/i.test(one.name))]).filter(([, one]) => one).map(([model, one]) => ({ name: clean(model.head.name), steps: one.steps, values: one.values }));
    return el("section", { class: "panel", "aria-labelledby": "means-title" }, el("h2", { id: "means-title", text: "Over time" }), el("div", { class: "charts" }, info && means.length ? charting(`${labelOf(info)}, mean over layers`, means, info.scale, info.scale === "log") : null, losses.length ? charting("loss", losses, "linear", losses.every((one) => one.values.every((v) => v == null || v > 0))) : null));
  }

  function differencePanel(sound, frames, info) {
    const place = (id, otherwise) => { const i = sound.findIndex((model) => model.id === id); return i < 0 ? otherwise : i; };
    const [a, b] = [place(app.state.pair[0], 0), place(app.state.pair[1], 1)];
    const choose = (which, value) => select(which ? "Second run" : "First run", sound.map((model) => ({ value: model.id, text: clean(model.head.name) })), sound[value].id, (id) => app.set({ pair: which ? [sound[a].id, id] : [id, sound[b].id] }));
    const pairs = commonLayers(sound[a].head, sound[b].head);
    const [one, two] = [sound[a].head.layers.length, sound[b].head.layers.length];
    const says = [];
    if (pairs.length < Math.max(one, two)) says.push(pairs.length ? `The layers differ: ${plural(one, "layer")} and ${plural(two, "layer")}, of which ${plural(pairs.length, "name")} in common. The difference is over those.` : `The layers differ: no name of the ${plural(one, "layer")} of the first run is among the ${plural(two, "layer")} of the second. Compare them side by side, by depth, or by their means.`);
    const body = [];
    if (a === b) says.push("Choose two different runs.");
    else if (!frames[a] || !frames[b]) says.push(`One of the two runs does not hold ${info ? labelOf(info) : "quantities"}.`);
    else if (pairs.length) {
      const log = info.scale === "log";
      const frame = differenceFrame(frames[a], frames[b], pairs, log);
      const scale = makeScale("linear", "signed", [frame.mean]);
      const heat = createHeatmap({}, { small: true });
      heat.node.classList.add("large");
      const label = log ? `log₁₀ of the ratio of ${labelOf(info)}` : `difference of ${labelOf(info)}`;
      heat.node.setAttribute("aria-label", `${label}: second run compared with the first, ${plural(pairs.length, "layer")}`);
      heats.push([heat, () => smallData(frame, pairs.map(([i]) => sound[a].head.layers[i].name), scale, frame.bins ? [edgesOf(frame)[0], edgesOf(frame)[frame.bins]] : [0, 1], { unit: "1" })]);
      body.push(legendOf(scale, label), el("p", { class: "muted", text: `${label[0].toUpperCase()}${label.slice(1)}, second run compared with the first.` }), heat.node);
    }
    return el("section", { class: "panel", "aria-labelledby": "difference-title" }, el("div", { class: "row head" }, el("h2", { id: "difference-title", text: "Difference of two runs" }), explain("difference")), el("div", { class: "tools" }, choose(0, a), el("span", { text: "→" }), choose(1, b)), ...says.map((text) => el("p", { text })), ...body);
  }

  const draw = () => { for (const [one, data] of heats) one.show(data()); };
  return { node, ready: fill, update: fill, resize: () => heats.forEach(([one]) => one.resize()), destroy: () => charts.forEach((chart) => chart.destroy()), redraw: fill, changed: async () => {} };
}
