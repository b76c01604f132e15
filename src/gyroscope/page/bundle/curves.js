// Curves on one time axis: scalars such as the loss, then one chart per quantity with one line per layer.

const MOST_LINES = 60;
const DECADES = 8;

// About `most` layers, spread evenly from the first to the last.
const spread = (layers, most = MOST_LINES) => (layers <= most ? [...Array(layers).keys()] : Array.from({ length: most }, (_, i) => Math.round((i * (layers - 1)) / (most - 1))));

const centers = (frame) => (frame.centers ??= Array.from(frame.first, (a, t) => (a + frame.last[t]) / 2));

// Smallest and largest value over all layers, per bin.
function envelope(frame) {
  if (frame.envelope) return frame.envelope;
  const [low, high] = [[], []];
  for (let t = 0; t < frame.bins; t++) {
    low.push(gather(frame.min, frame.bins, 0, frame.layers, t, "min"));
    high.push(gather(frame.max, frame.bins, 0, frame.layers, t, "max"));
  }
  return (frame.envelope = { low, high });
}

const lineOf = (values, layer, bins) => values.subarray(layer * bins, (layer + 1) * bins);

// Moving mean over `width` bins, unknown values left out.
function movingMean(values, width) {
  const half = width >> 1;
  const out = new Float32Array(values.length);
  let [sum, known] = [0, 0];
  const add = (i, sign) => {
    const v = values[i];
    if (i >= 0 && i < values.length && v - v === 0) { sum += sign * v; known += sign; }
  };
  for (let i = 0; i < half; i++) add(i, 1);
  for (let i = 0; i < values.length; i++) {
    add(i + half, 1);
    add(i - half - 1, -1);
    out[i] = values[i] === values[i] && known ? sum / known : NaN;
  }
  return out;
}

// Linear interpolation at `x`; null outside.
function interpolate(steps, values, x) {
  let i = 0;
  return x.map((at) => {
    while (i < steps.length - 2 && steps[i + 1] < at) i++;
    if (!steps.length || at < steps[0] || at > steps.at(-1)) return null;
    const [a, b] = [values[i], values[i + 1] ?? values[i]];
    return a == null || b == null ? null : a + (b - a) * Math.min(1, (at - steps[i]) / (steps[i + 1] - steps[i] || 1));
  });
}

const known = (values, log) => Array.from(values, (v) => (v == null || v - v !== 0 || (log && v <= 0) ? null : v));

// Series with steps of their own, on the union of their steps: undefined is a step that a series does not have.
function joinSteps(series) {
  const x = [...new Set(series.flatMap((one) => one.steps))].sort((a, b) => a - b);
  const place = new Map(x.map((step, i) => [step, i]));
  const spreadOut = (steps, values) => {
    const out = Array(x.length);
    steps.forEach((step, i) => (out[place.get(step)] = values[i]));
    return out;
  };
  return { x, spreadOut };
}

// One uPlot chart. `data`: x, lines [{name, values, color, dash, quiet}], bands, look, log, window, markers, height.
function createChart(on) {
  const node = el("div", { class: "plot", role: "img" });
  const link = el("div", { class: "link" });
  const dot = el("div", { class: "dot" });
  let u = null;
  let data = null;
  let signature = "";

  function yRange(chart, low, high) {
    if (low == null || high == null || !Number.isFinite(low) || !Number.isFinite(high)) return data.log ? [0.1, 1] : [0, 1];
    if (data.log) {
      const bottom = Math.max(low, high * 10 ** -DECADES);
      const margin = Math.max((high / bottom) ** 0.05, 1.05);
      return [bottom / margin, high * margin];
    }
    if (data.look === "fraction" && low >= 0) return [0, high > 0.5 && high <= 1.005 ? 1 : niceAbove(high)];
    if (data.look === "signed") return [-1, 1].map((sign) => sign * niceAbove(Math.max(-low, high)));
    const margin = Math.max((high - low) * 0.06, Math.abs(high) * 0.01, 1e-12);
    return [low >= 0 && low - margin < 0 ? 0 : low - margin, high + margin];
  }

  function make() {
    u?.destroy();
    const ink = { stroke: color("muted"), grid: { stroke: color("grid"), width: 1 }, ticks: { stroke: color("grid"), size: 4 }, font: `11px ${getComputedStyle(document.body).fontFamily}` };
    u = new uPlot({
      width: Math.max(node.clientWidth, 120),
      height: data.height,
      legend: { show: false },
      padding: [8, 10, 0, 0],
      scales: { x: { time: false, range: () => data.window }, y: { distr: data.log ? 3 : 1, range: yRange } },
      series: [{}, ...data.lines.map((line) => ({ stroke: line.color, width: line.width ?? 1.25, dash: line.dash, auto: !line.quiet, scale: "y", points: { show: line.quiet ? false : line.points ?? data.x.length < 3, size: 4, fill: line.color } }))],
      bands: (data.bands ?? []).map(([high, low, fill]) => ({ series: [high + 1, low + 1], fill })),
      axes: [
        { ...ink, size: 26, gap: 3, splits: (chart, i, low, high) => ticks(low, high, Math.max(2, chart.bbox.width / devicePixelRatio / 90), 1), values: (chart, splits) => splits.map(whole) },
        { ...ink, size: 54, gap: 4, splits: (chart, i, low, high) => (data.log ? logTicks(low, high, 6) : ticks(low, high, 5)), values: (chart, splits) => splits.map((v) => number(v, 3)) },
      ],
      cursor: { x: false, y: false, points: { show: false }, drag: { x: true, y: false, setScale: false }, bind: { dblclick: () => () => { on.steps(null); return null; } } },
      hooks: { setSelect: [selected], setCursor: [moved], drawAxes: [drawMarkers] },
    }, columns(), node);
    u.over.append(link, dot);
    u.over.addEventListener("mouseleave", () => { dot.hidden = true; tip.hide(); on.hover(null, null); });
    u.over.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      const at = u.posToVal(event.offsetX, "x");
      on.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300))), at);
    }, { passive: false });
    link.hidden = dot.hidden = true;
  }

  const columns = () => [data.x, ...data.lines.map((line) => line.values)];

  function selected() {
    const { left, width } = u.select;
    if (width > 5) on.steps([u.posToVal(left, "x"), u.posToVal(left + width, "x")]);
    if (width) u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  }

  function moved() {
    const { left, top, idx } = u.cursor;
    if (left < 0 || idx == null || !u.over.matches(":hover")) return;
    let nearest = null;
    data.lines.forEach((line, i) => {
      const v = line.values[idx];
      if (v == null || line.quiet) return;
      const y = u.valToPos(v, "y");
      const away = Math.abs(y - top);
      if (away < 28 && (!nearest || away < nearest.away)) nearest = { line, i, v, y, away };
    });
    const step = u.posToVal(left, "x");
    on.hover(step, nearest?.line.layer ?? null);
    dot.hidden = !nearest;
    if (!nearest) return tip.hide();
    dot.style.transform = `translate(${u.valToPos(data.x[idx], "x")}px, ${nearest.y}px)`;
    dot.style.background = nearest.line.color;
    const box = u.over.getBoundingClientRect();
    tip.show(box.left + left, box.top + top, nearest.line.name, nearest.line.tell ? nearest.line.tell(idx) : [["step", whole(data.x[idx])], ["value", number(nearest.v)]]);
  }

  function drawMarkers(chart) {
    const { ctx, bbox } = chart;
    ctx.save();
    ctx.lineWidth = devicePixelRatio;
    for (const marker of data.markers ?? []) {
      if (marker.kind === "event" || marker.step < data.window[0] || marker.step > data.window[1]) continue;
      const x = Math.round(chart.valToPos(marker.step, "x", true));
      ctx.strokeStyle = marker.kind === "finding" ? color(marker.severity === "note" ? "muted" : marker.severity) : color("muted");
      ctx.setLineDash(marker.kind === "finding" ? [] : [2, 4]);
      ctx.globalAlpha = marker.kind === "finding" ? 0.5 : 0.7;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  return {
    node,
    show(next) {
      data = next;
      node.setAttribute("aria-label", data.describe);
      if (!node.clientWidth) return;
      const now = JSON.stringify([themeName(), data.log, data.look, data.height, data.x.length < 3, data.bands, data.lines.map((line) => [line.color, line.dash, line.quiet, line.width])]);
      if (!u || now !== signature) make();
      else {
        u.setData(columns(), false);
        u.setScale("x", { min: data.window[0], max: data.window[1] });
      }
      signature = now;
    },
    point(step) {
      if (!u) return;
      const x = step == null ? -1 : u.valToPos(step, "x");
      link.hidden = !(x >= 0 && x <= u.over.clientWidth);
      if (!link.hidden) link.style.transform = `translateX(${x}px)`;
    },
    resize() {
      if (u && node.clientWidth) u.setSize({ width: node.clientWidth, height: data.height });
    },
    destroy: () => u?.destroy(),
  };
}

// Scalars that belong on one chart: losses, accuracies; every other one has its own.
function scalarCharts(scalars) {
  const charts = new Map();
  for (const scalar of scalars) {
    const key = /loss/i.test(scalar.name) ? "loss" : /acc/i.test(scalar.name) ? "accuracy" : scalar.name;
    if (!charts.has(key)) charts.set(key, []);
    charts.get(key).push(scalar);
  }
  return [...charts].sort(([a], [b]) => ["accuracy", "loss"].indexOf(b) - ["accuracy", "loss"].indexOf(a));
}

function scalarData(name, scalars, shared) {
  const hues = CATEGORIES[themeName()];
  const { x, spreadOut } = joinSteps(scalars);
  const positive = scalars.flatMap((one) => one.values.filter((v) => v != null));
  const [low, high] = [positive.reduce((a, b) => Math.min(a, b), Infinity), positive.reduce((a, b) => Math.max(a, b), -Infinity)];
  const log = shared.log ?? (name === "loss" && low > 0 && high > 50 * low);
  const lines = [];
  const bands = [];
  scalars.forEach((one, i) => {
    const hue = hues[i % hues.length];
    const put = (values) => spreadOut(one.steps, known(values, log));
    lines.push({ name: clean(one.name), values: put(one.values), color: hue, width: 1.5, points: one.steps.length < 60 });
    if (one.thinned && one.min) {
      lines.push({ values: put(one.max), color: "transparent", quiet: true }, { values: put(one.min), color: "transparent", quiet: true });
      bands.push([lines.length - 2, lines.length - 1, `${hue}33`]);
    }
  });
  const last = scalars.map((one) => `${clean(one.name)} ${number(one.values.findLast((v) => v != null))}`).join(", ");
  return { x, lines, bands, log, look: name === "accuracy" ? "fraction" : "linear", describe: `${clean(name)} over steps; last values: ${last}.`, note: scalars.some((one) => one.thinned) ? "thinned: mean, with smallest to largest shaded" : "", legend: lines.filter((line) => !line.quiet) };
}

function quantityData(info, frame, head, { selected, window, log, smooth }) {
  const { layers } = frame;
  const names = head.layers;
  const chosen = [...selected].filter((l) => l < layers).sort((a, b) => a - b);
  const drawn = (chosen.length ? spread(chosen.length).map((i) => chosen[i]) : spread(layers));
  log ??= info.scale === "log";
  const x = centers(frame);
  const visible = (frame.bins * (window[1] - window[0])) / Math.max(1e-9, edgesOf(frame)[frame.bins] - edgesOf(frame)[0]);
  const wide = smooth && info.noisy && drawn.length > 8 ? 2 * Math.floor(Math.min(visible, frame.bins) / 120) + 1 : 1;
  const predicted = head.predicted?.[info.name];
  const lines = [];
  for (const layer of drawn) {
    const values = lineOf(frame.mean, layer, frame.bins);
    const hue = depthColor(layer, layers);
    const tell = (t) => {
      const at = layer * frame.bins + t;
      const rows = [[frame.first[t] === frame.last[t] ? "step" : "steps", frame.first[t] === frame.last[t] ? whole(frame.first[t]) : `${whole(frame.first[t])}–${whole(frame.last[t])}`], ["value", number(frame.mean[at])]];
      return frame.first[t] === frame.last[t] ? rows : [...rows, ["smallest", number(frame.min[at])], ["largest", number(frame.max[at])]];
    };
    lines.push({ name: clean(names[layer]?.name), layer, values: known(wide > 1 ? movingMean(values, wide) : values, log), color: hue, width: chosen.length && chosen.length < 9 ? 2 : 1.25, tell });
    const place = predicted ? predicted.layers.indexOf(layer) : -1;
    if (place >= 0 && (drawn.length <= 8 || lines.length % Math.ceil(drawn.length / 4) === 1)) {
      lines.push({ name: `${clean(names[layer]?.name)}, predicted`, values: known(interpolate(predicted.steps, predicted.values[place], x), log), color: hue, dash: [5, 4] });
    }
  }
  const solid = lines.filter((line) => !line.dash);
  const bands = [];
  if (solid.length < layers && frame.bins) {
    const { low, high } = envelope(frame);
    lines.push({ values: known(high, log), color: "transparent", quiet: true }, { values: known(low, log), color: "transparent", quiet: true });
    bands.push([lines.length - 2, lines.length - 1, color("shade")]);
  }
  const notes = [];
  if (solid.length < layers) notes.push(`${solid.length} of ${plural(layers, "layer")}; the range of all layers is shaded`);
  if (wide > 1) notes.push(`moving mean over ${wide} ${frame.exact ? "measurements" : "bins"}`);
  if (predicted && lines.some((line) => line.dash)) notes.push(`dashed: ${clean(predicted.label)}`);
  return { x, lines, bands, log, look: info.scale, note: notes.join(" · "), describe: describeQuantity(info, frame, head), legend: solid.length <= 10 ? solid : null, depth: solid.length > 10 };
}

// A sentence in place of a picture: last values over layers.
function describeQuantity(info, frame, head) {
  if (!frame.bins || !frame.layers) return `${labelOf(info)}: no values.`;
  let [low, high] = [null, null];
  for (let l = 0; l < frame.layers; l++) {
    const v = lastValue(frame, l);
    if (v == null) continue;
    if (!low || v < low.v) low = { v, l };
    if (!high || v > high.v) high = { v, l };
  }
  if (!low) return `${labelOf(info)} has no finite values.`;
  const named = ({ v, l }) => `${number(v)} (${shorten(clean(head.layers[l]?.name), 60)})`;
  return `${labelOf(info)} of ${plural(frame.layers, "layer")}, ${stepsText(frame.first[0], frame.last[frame.bins - 1])}; last values from ${named(low)} to ${named(high)}.`;
}

function lastValue(frame, layer) {
  for (let t = frame.bins - 1; t >= 0; t--) {
    const v = frame.mean[layer * frame.bins + t];
    if (v - v === 0) return v;
  }
  return null;
}

// All charts of a run. `model` gives frames; `on` gets hover, steps, zoom, and `quantity` to show one in the heatmap.
function createCurves(model, on) {
  const grid = el("div", { class: "charts" });
  const chips = el("div", { class: "chips", role: "group", "aria-label": "Quantities drawn as curves" });
  const node = el("div", {}, chips, grid);
  const cards = new Map();
  let state = null;
  const watcher = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      const card = [...cards.values()].find((one) => one.node === target);
      if (!card) continue;
      card.near = isIntersecting;
      if (isIntersecting) card.refresh();
    }
  }, { rootMargin: "300px" });

  function makeCard(key, title, words, load, give, more = []) {
    const chart = createChart(on);
    const note = el("p", { class: "muted note" });
    const legend = el("div", { class: "keys" });
    const toggle = button("log", `Logarithmic axis for ${title}`, () => { card.log = !card.isLog; card.dirty = true; card.refresh(); }, { "aria-pressed": "false", class: "small" });
    const figure = el("figure", { class: "chart" }, el("figcaption", {}, el("h3", { text: title }), el("span", { class: "tools" }, ...more, toggle, el("details", { class: "mini" }, el("summary", { "aria-label": `About ${title}`, text: "?" }), el("div", { class: "pop" }, ...words.map((text) => el("p", { text })))))), chart.node, legend, note);
    const card = {
      node: figure, chart, dirty: true, near: false, log: null, isLog: false, busy: false,
      async refresh(anyway = false) {
        if (!card.dirty || card.busy || !(card.near || anyway) || !state) return;
        card.busy = true;
        card.dirty = false;
        try {
          await load();
          const data = give(card.log);
          card.isLog = data.log;
          toggle.setAttribute("aria-pressed", String(data.log));
          note.textContent = data.note;
          legend.replaceChildren(...legendKeys(data));
          chart.show({ height: 190, ...data, window: state.window, markers: state.markers });
          chart.point(state.step);
        } catch (error) {
          note.textContent = error.message;
          if (!(error instanceof SourceError)) console.error(error);
        }
        card.busy = false;
        if (card.dirty) card.refresh(anyway);
      },
    };
    cards.set(key, card);
    watcher.observe(figure);
    return card;
  }

  function legendKeys(data) {
    if (data.legend) return data.legend.map((line) => {
      const swatch = el("i");
      swatch.style.background = line.color;
      return el("span", {}, swatch, shorten(line.name, 40));
    });
    if (!data.depth) return [];
    const bar = el("i", { class: "depth" });
    bar.style.background = `linear-gradient(to right, ${[0, 0.25, 0.5, 0.75, 1].map((u) => depthColor(u * 100, 101)).join(",")})`;
    return [el("span", {}, "first layer", bar, "last layer")];
  }

  function shownQuantities() {
    const all = model.head.quantities;
    if (state.shown) return all.filter((info) => state.shown.has(info.name));
    const usual = all.filter((info) => USUAL.has(info.name));
    if (!usual.some((info) => info.name === "rate_per_step")) usual.push(...all.filter((info) => info.name === "rate"));
    return usual.length ? all.filter((info) => usual.includes(info)) : all.slice(0, 6);
  }

  function layout() {
    const wanted = new Map();
    for (const [name, list] of scalarCharts(model.head.scalars)) wanted.set(`scalar:${name}`, { name, list });
    const shown = shownQuantities();
    for (const info of shown) wanted.set(info.name, { info });
    for (const [key, card] of cards) if (!wanted.has(key)) {
      watcher.unobserve(card.node);
      card.chart.destroy();
      card.node.remove();
      cards.delete(key);
    }
    const nodes = [];
    for (const [key, { name, list, info }] of wanted) {
      const card = cards.get(key) ?? (list
        ? makeCard(key, list.length > 1 ? name : clean(list[0].name), [`Logged by the training: ${list.map((one) => clean(one.name)).join(", ")}. Its steps are those of the curves below.`], async () => {}, (log) => scalarData(name, scalarCharts(model.head.scalars).find(([one]) => one === name)?.[1] ?? [], { log }))
        : makeCard(key, labelOf(info), quantityWords(info), () => model.load(info.name), (log) => quantityData(info, model.frames.get(info.name), model.head, { ...state, log }), [button("map", `Show ${labelOf(info)} in the heatmap`, () => on.quantity(info.name), { class: "small" })]));
      nodes.push(card.node);
    }
    if (nodes.some((one, i) => grid.children[i] !== one)) grid.replaceChildren(...nodes);
    const key = model.head.quantities.map((info) => info.name).join();
    if (chips.dataset.key !== key + [...(state.shown ?? [])].join()) {
      chips.dataset.key = key + [...(state.shown ?? [])].join();
      const groups = Object.entries(GROUPS).map(([group, title]) => [title, model.head.quantities.filter((info) => (GROUPS[info.group] ? info.group : "other") === group)]).filter(([, list]) => list.length);
      const focused = chips.contains(document.activeElement) ? document.activeElement.dataset.name : null;
      chips.replaceChildren(...groups.map(([title, list]) => el("span", { class: "chip-group" }, el("span", { class: "muted", text: title }), ...list.map((info) => el("button", { type: "button", class: "chip", "aria-pressed": String(shown.includes(info)), title: labelOf(info), "data-name": info.name, text: info.name.replaceAll("_", " "), onclick: () => {
        const next = new Set(shownQuantities().map((one) => one.name));
        if (!next.delete(info.name)) next.add(info.name);
        on.shown(next);
      } })))));
      if (focused) [...chips.querySelectorAll("button")].find((one) => one.dataset.name === focused)?.focus();
    }
  }

  // Charts below the fold are drawn when nothing else is to do, so that printing and scrolling find them ready.
  const idle = window.requestIdleCallback ?? ((work) => setTimeout(work, 200));
  let resting = false;
  function rest() {
    if (resting) return;
    resting = true;
    idle(async () => {
      resting = false;
      const card = [...cards.values()].find((one) => one.dirty && !one.busy);
      if (!card || !node.isConnected) return;
      await card.refresh(true);
      rest();
    });
  }

  return {
    node,
    show(next) {
      state = { ...next, step: state?.step };
      layout();
      for (const card of cards.values()) { card.dirty = true; if (card.near) card.refresh(); }
      rest();
    },
    point(step) {
      if (state) state.step = step;
      for (const card of cards.values()) if (card.near) card.chart.point(step);
    },
    resize() {
      for (const card of cards.values()) card.chart.resize();
    },
    destroy() {
      watcher.disconnect();
      for (const card of cards.values()) card.chart.destroy();
    },
  };
}
