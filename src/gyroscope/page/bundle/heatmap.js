// The heatmap, layer × step. Values are encoded once into bytes; a redraw looks their colors up and copies pixels, so that
// panning over 1,202 layers stays within a frame.

const STRIP = 18; // height of the markers above
const AXIS = 22; // height of the time axis below
const BRACKET = 9; // width of one level of brackets
const ROW = 24; // height of a row that needs no zoom
const THINNEST = 11; // height of a row that has space for its name

// One tooltip for the whole page; rows are [name, value] or a text.
const tip = (() => {
  const node = el("div", { class: "tip", role: "presentation", hidden: true });
  return {
    node,
    show(x, y, title, rows) {
      node.replaceChildren(el("strong", { text: title }), ...rows.map((row) => (Array.isArray(row) ? el("div", {}, el("span", { text: row[0] }), el("b", { text: row[1] })) : el("p", { text: row }))));
      node.hidden = false;
      const { offsetWidth: w, offsetHeight: h } = node;
      const left = x + 16 + w < innerWidth ? x + 16 : Math.max(4, x - 16 - w);
      node.style.transform = `translate(${left}px, ${Math.max(4, Math.min(y + 14, innerHeight - h - 4))}px)`;
    },
    hide: () => (node.hidden = true),
  };
})();

// Codes at coarser and coarser times, so that a pixel never skips values when bins outnumber pixels.
function timeLevels(codes, rows, bins, edges, width) {
  const levels = [{ codes, bins, edges }];
  while (levels.at(-1).bins > 2 * width) {
    const { codes: fine, bins: n, edges: old } = levels.at(-1);
    const half = n >> 1;
    const coarse = new Uint8Array(rows * half);
    for (let r = 0; r < rows; r++) for (let t = 0; t < half; t++) {
      const [a, b] = [fine[r * n + 2 * t], fine[r * n + 2 * t + 1]];
      coarse[r * half + t] = a && b ? (a + b) >> 1 : a || b;
    }
    const edge = Float64Array.from({ length: half + 1 }, (_, t) => old[2 * t]);
    edge[half] = old[n];
    levels.push({ codes: coarse, bins: half, edges: edge });
  }
  return levels;
}

// Return a heatmap. `on` gets what the reader does: steps, rows, hover, pick, fold. A small one has no names and is not moved.
function createHeatmap(on, { small = false, id = "" } = {}) {
  const base = el("canvas", { "aria-hidden": "true" });
  const over = el("canvas", { "aria-hidden": "true", class: "over" });
  const node = el("div", { class: small ? "heat small" : "heat", ...(small ? { role: "img" } : { tabindex: 0, role: "application", "aria-roledescription": "heatmap", "aria-describedby": `${id}-summary` }) }, base, over);
  const image = document.createElement("canvas");
  const [paper, glass, pixels] = [base.getContext("2d", { alpha: false }), over.getContext("2d"), image.getContext("2d")];
  let buffer = null;
  let d = null; // what is shown
  let g = null; // geometry
  let ready = null; // codes and colors
  let cursor = null; // {row, step} of the pointer or the keyboard
  let marks = []; // markers with their places

  function measure() {
    const width = node.clientWidth;
    if (!width || !d) return false;
    const gutter = small ? 0 : Math.round(Math.min(Math.max(width * 0.17, 96), 210));
    const tall = small ? 96 : Math.max(280, Math.min(600, innerHeight * 0.62));
    const plot = small ? tall : Math.max(48, Math.min(d.rows.length * ROW, tall));
    const ratio = Math.min(devicePixelRatio || 1, 2);
    g = { width, gutter, top: small ? 0 : STRIP, w: width - gutter - (small ? 0 : 8), h: plot, ratio, height: plot + (small ? 0 : STRIP) + AXIS };
    for (const canvas of [base, over]) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(g.height * ratio);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${g.height}px`;
    }
    node.style.height = `${g.height}px`;
    for (const context of [paper, glass]) context.setTransform(ratio, 0, 0, ratio, 0, 0);
    return true;
  }

  // Show new data; codes are made again only if the values, the rows or the colors are others.
  function show(next) {
    const old = d;
    d = next;
    const theme = themeName();
    const resized = !g || g.width !== node.clientWidth || !old || old.rows !== d.rows;
    if (resized && !measure()) return;
    if (!ready || old.frame !== d.frame || old.rows !== d.rows || old.scale !== d.scale || ready.theme !== theme || resized) {
      const values = d.frame ? rowValues(d.frame, d.rows) : new Float32Array(0);
      ready = {
        theme,
        colors: palette(d.scale.signed, color("none")),
        levels: d.frame && d.frame.bins ? timeLevels(d.scale.encode(values), d.rows.length, d.frame.bins, edgesOf(d.frame), g.w * g.ratio) : [],
        ink: color("ink"), muted: color("muted"), back: color("panel"), line: color("line"), accent: color("accent"), serious: color("serious"), warning: color("warning"), note: color("muted"),
        font: `${small ? 10 : 11}px ${getComputedStyle(document.body).fontFamily}`,
        rowOf: new Int32Array(d.frame ? d.frame.layers : 0),
      };
      d.rows.forEach(({ from, to }, r) => ready.rowOf.fill(r, from, to));
    }
    draw();
    point();
  }

  const xOf = (step) => g.gutter + ((step - d.window[0]) / (d.window[1] - d.window[0])) * g.w;
  const yOf = (row) => g.top + ((row - d.span[0]) / (d.span[1] - d.span[0])) * g.h;
  const stepAt = (x) => d.window[0] + ((x - g.gutter) / g.w) * (d.window[1] - d.window[0]);
  const rowAt = (y) => d.span[0] + ((y - g.top) / g.h) * (d.span[1] - d.span[0]);

  function fillPixels() {
    const [s0, s1] = d.window;
    const [r0, r1] = d.span;
    const width = Math.max(1, Math.round(g.w * g.ratio));
    const all = ready.levels[0];
    const visible = (all.bins * (s1 - s0)) / Math.max(all.edges[all.bins] - all.edges[0], 1e-9);
    const level = ready.levels[Math.min(ready.levels.length - 1, Math.max(0, Math.ceil(Math.log2(Math.max(visible / width, 1e-9)) - 0.01)))];
    const columns = new Int32Array(width);
    const { edges, bins, codes } = level;
    for (let x = 0, t = 0; x < width; x++) {
      const step = s0 + ((x + 0.5) / width) * (s1 - s0);
      while (t < bins && edges[t + 1] < step) t++;
      columns[x] = t < bins && step >= edges[0] ? t : -1;
    }
    const crowded = r1 - r0 > g.h * g.ratio;
    const top = crowded ? r0 : Math.floor(r0);
    const count = crowded ? Math.round(g.h * g.ratio) : Math.ceil(r1) - top;
    const each = crowded ? (r1 - r0) / count : 1;
    if (!buffer || buffer.width !== width || buffer.height !== count) {
      buffer = new ImageData(width, count);
      image.width = width;
      image.height = count;
    }
    const out = new Uint32Array(buffer.data.buffer);
    const { colors } = ready;
    for (let y = 0, i = 0; y < count; y++) {
      const a = Math.min(Math.floor(top + y * each), d.rows.length - 1);
      const b = Math.min(Math.max(a + 1, Math.floor(top + (y + 1) * each)), d.rows.length);
      if (b === a + 1) {
        const at = a * bins;
        for (let x = 0; x < width; x++, i++) out[i] = columns[x] < 0 ? colors[0] : colors[codes[at + columns[x]]];
      } else {
        for (let x = 0; x < width; x++, i++) {
          let [sum, known] = [0, 0];
          for (let r = a, at = a * bins + columns[x]; r < b && columns[x] >= 0; r++, at += bins) {
            const c = codes[at];
            if (c) { sum += c; known++; }
          }
          out[i] = known ? colors[(sum / known) | 0] : colors[0];
        }
      }
    }
    pixels.putImageData(buffer, 0, 0);
    paper.imageSmoothingEnabled = false;
    if (crowded) paper.drawImage(image, g.gutter, g.top, g.w, g.h);
    else paper.drawImage(image, 0, r0 - top, width, r1 - r0, g.gutter, g.top, g.w, g.h);
  }

  function draw() {
    paper.fillStyle = ready.back;
    paper.fillRect(0, 0, g.width, g.height);
    paper.font = ready.font;
    if (ready.levels.length && d.rows.length) fillPixels();
    else {
      paper.fillStyle = color("none");
      paper.fillRect(g.gutter, g.top, g.w, g.h);
      paper.fillStyle = ready.ink;
      paper.textAlign = "center";
      paper.textBaseline = "middle";
      paper.fillText(d.empty ?? "no values yet", g.gutter + g.w / 2, g.top + g.h / 2);
    }
    drawAxis();
    if (small) return;
    drawRows();
    drawMarkers();
  }

  function drawAxis() {
    paper.fillStyle = ready.muted;
    paper.strokeStyle = ready.line;
    paper.textBaseline = "top";
    const bottom = g.top + g.h;
    const places = ticks(d.window[0], d.window[1], Math.max(2, Math.floor(g.w / 110)), 1);
    for (const step of places) {
      const x = Math.round(xOf(step)) + 0.5;
      if (x < g.gutter - 1 || x > g.gutter + g.w + 1) continue;
      paper.beginPath();
      paper.moveTo(x, bottom);
      paper.lineTo(x, bottom + 4);
      paper.stroke();
      const text = whole(step);
      const half = paper.measureText(text).width / 2;
      paper.textAlign = "left";
      paper.fillText(text, Math.min(Math.max(x - half, g.gutter), g.width - 2 * half - 1), bottom + 6);
    }
    if (!small) {
      paper.textAlign = "right";
      paper.fillText("step", g.gutter - 8, bottom + 6);
    }
  }

  // Names, brackets of groups, selection.
  function drawRows() {
    const height = g.h / (d.span[1] - d.span[0]);
    const [first, last] = [Math.max(0, Math.floor(d.span[0])), Math.min(d.rows.length, Math.ceil(d.span[1]))];
    const inner = g.gutter - 2 * BRACKET - 10;
    const letters = Math.max(6, Math.floor(inner / 5.9));
    paper.save();
    paper.beginPath();
    paper.rect(0, g.top, g.width, g.h);
    paper.clip();
    paper.textAlign = "right";
    paper.textBaseline = "middle";
    const write = (text, y, strong, dot) => {
      paper.fillStyle = strong ? ready.accent : ready.ink;
      paper.fillText(shorten(text, letters - (dot ? 2 : 0)), inner, y);
      if (!dot) return;
      paper.fillStyle = ready[dot];
      paper.beginPath();
      paper.arc(inner - Math.min(paper.measureText(shorten(text, letters - 2)).width + 8, inner - 5), y, 3, 0, 7);
      paper.fill();
    };
    const severity = (row) => {
      for (let l = row.from; l < row.to; l++) if (d.severities.has(l)) return d.severities.get(l);
      return null;
    };
    const open = d.groups.filter((group) => !d.hidden.has(groupKey(group)) && !d.folded.has(groupKey(group)));
    const place = (group) => [yOf(ready.rowOf[group.from]), yOf(ready.rowOf[group.to - 1] + 1)];
    if (height >= THINNEST) {
      for (let r = first; r < last; r++) {
        const row = d.rows[r];
        const text = row.group ? `▸ ${clean(row.group.name)} (${row.to - row.from})` : d.short[row.from];
        write(text, yOf(r + 0.5), selectedRow(row), severity(row));
      }
    } else {
      const fits = (depth) => {
        const sizes = open.filter((group) => group.depth === depth).map((group) => place(group)).map(([a, b]) => b - a);
        return sizes.length > 1 && sizes.reduce((a, b) => a + b, 0) / sizes.length >= 13;
      };
      const depth = [3, 2, 1, 0].find(fits);
      if (depth == null) {
        const every = Math.ceil(14 / height);
        for (let r = Math.ceil(first / every) * every; r < last; r += every) write(d.rows[r].group ? clean(d.rows[r].group.name) : d.short[d.rows[r].from], yOf(r + 0.5), selectedRow(d.rows[r]));
      } else for (const group of open) {
        const [a, b] = place(group);
        if (group.depth === depth && b - a >= THINNEST) write(clean(group.name), Math.min(Math.max((a + b) / 2, g.top + 7), g.top + g.h - 7));
      }
    }
    paper.lineWidth = 1;
    for (const group of open) {
      const [a, b] = place(group);
      if (group.depth > 1 || b - a < 8 || b < g.top || a > g.top + g.h) continue;
      const x = inner + 5 + group.depth * BRACKET + 0.5;
      paper.strokeStyle = cursor?.group === group ? ready.accent : ready.muted;
      paper.beginPath();
      paper.moveTo(x + 4, a + 2.5);
      paper.lineTo(x, a + 2.5);
      paper.lineTo(x, b - 2.5);
      paper.lineTo(x + 4, b - 2.5);
      paper.stroke();
      if (group.depth === 0 && height > 4) {
        paper.fillStyle = ready.back;
        paper.fillRect(g.gutter, a - 0.5, g.w, 1);
        paper.fillRect(g.gutter, b - 0.5, g.w, 1);
      }
    }
    paper.fillStyle = ready.accent;
    if (d.selected.size) for (let r = first; r < last; r++) if (selectedRow(d.rows[r])) paper.fillRect(g.gutter - 5, yOf(r), 4, Math.max(height, 1));
    paper.restore();
  }

  function selectedRow(row) {
    for (let l = row.from; l < row.to; l++) if (!d.selected.has(l)) return false;
    return true;
  }

  function drawMarkers() {
    marks = [];
    for (const marker of d.markers) {
      const x = xOf(marker.step);
      if (x < g.gutter - 1 || x > g.gutter + g.w + 1) continue;
      const near = marks.find((one) => Math.abs(one.x - x) < 5 && one.kind === marker.kind);
      if (near) near.all.push(marker);
      else marks.push({ x, kind: marker.kind, severity: marker.severity, all: [marker] });
    }
    for (const { x, kind, severity } of marks) {
      if (kind === "schedule") {
        paper.setLineDash([2, 3]);
        for (const [shift, ink] of [[0, "rgba(0,0,0,.65)"], [1, "rgba(255,255,255,.65)"]]) {
          paper.strokeStyle = ink;
          paper.beginPath();
          paper.moveTo(Math.round(x) + shift + 0.5, g.top);
          paper.lineTo(Math.round(x) + shift + 0.5, g.top + g.h);
          paper.stroke();
        }
        paper.setLineDash([]);
      }
      paper.fillStyle = kind === "finding" ? ready[severity] : ready.muted;
      const y = STRIP - 4;
      paper.beginPath();
      if (kind === "schedule") paper.rect(x - 1, 4, 2, STRIP - 5);
      else if (kind === "finding") { paper.moveTo(x - 5.5, 5); paper.lineTo(x + 5.5, 5); paper.lineTo(x, y + 1); }
      else { paper.moveTo(x, y - 9); paper.lineTo(x + 4, y - 5); paper.lineTo(x, y - 1); paper.lineTo(x - 4, y - 5); }
      paper.fill();
    }
  }

  // The pointer: a line at the step and a frame around the row.
  function point() {
    glass.clearRect(0, 0, g.width, g.height);
    if (!cursor || cursor.step == null) return;
    const x = Math.round(xOf(cursor.step)) + 0.5;
    glass.lineWidth = 1;
    if (x >= g.gutter && x <= g.gutter + g.w) for (const [shift, ink] of [[0, "rgba(0,0,0,.8)"], [1, "rgba(255,255,255,.8)"]]) {
      glass.strokeStyle = ink;
      glass.beginPath();
      glass.moveTo(x + shift, g.top);
      glass.lineTo(x + shift, g.top + g.h);
      glass.stroke();
    }
    if (cursor.row == null) return;
    const [a, b] = [Math.max(yOf(cursor.row), g.top), Math.min(yOf(cursor.row + 1), g.top + g.h)];
    if (b <= a) return;
    glass.strokeStyle = "rgba(255,255,255,.9)";
    glass.strokeRect(g.gutter + 0.5, a - 0.5, g.w - 1, Math.max(b - a, 2) + 1);
    glass.strokeStyle = "rgba(0,0,0,.8)";
    glass.strokeRect(g.gutter + 1.5, a + 0.5, g.w - 3, Math.max(b - a - 1, 1));
  }

  // The cell at a row and a step: its layers, steps and values.
  function cell(row, step) {
    if (!d?.frame || row == null || !(row >= 0 && row < d.rows.length)) return null;
    const t = binAt(d.frame, step);
    if (t < 0) return null;
    const { from, to } = d.rows[row];
    const { bins, first, last } = d.frame;
    const [mean, min, max] = ["mean", "min", "max"].map((which) => gather(d.frame[which], bins, from, to, t, which));
    return { row, from, to, name: rowName(d.rows[row], d.names), first: first[t], last: last[t], mean, min, max };
  }

  const toLocal = (event) => {
    const box = node.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const inside = (x, y) => x >= g.gutter && x <= g.gutter + g.w && y >= g.top && y <= g.top + g.h;
  const cellAtLocal = (x, y) => (g && d && inside(x, y) ? cell(Math.min(Math.floor(rowAt(y)), d.rows.length - 1), stepAt(x)) : null);

  function bracketAt(x, y) {
    const depth = Math.floor((x - (g.gutter - 2 * BRACKET - 8)) / BRACKET);
    if (small || depth < 0 || depth > 1 || y < g.top || y > g.top + g.h) return null;
    const layer = d.rows[Math.floor(rowAt(y))]?.from;
    return d.groups.find((group) => group.depth === depth && group.from <= layer && layer < group.to && !d.folded.has(groupKey(group)) && !d.hidden.has(groupKey(group)));
  }

  function hover(event) {
    if (!g || !d) return;
    const [x, y] = toLocal(event);
    const found = cellAtLocal(x, y);
    const group = bracketAt(x, y);
    const moved = cursor?.group !== group;
    over.style.cursor = group || (x < g.gutter && y > g.top && y < g.top + g.h) ? "pointer" : "";
    cursor = found ? { row: found.row, step: stepAt(x) } : group ? { group } : null;
    if (moved && !small) draw();
    point();
    if (found) tip.show(event.clientX, event.clientY, found.name, cellRows(found));
    else if (group) tip.show(event.clientX, event.clientY, clean(group.name), [`Click to fold ${group.to - group.from} layers into their mean.`]);
    else if (!small && y < g.top) {
      const near = marks.filter((mark) => Math.abs(mark.x - x) < 7).flatMap((mark) => mark.all);
      if (near.length) tip.show(event.clientX, event.clientY, stepsText(near[0].step, near[0].step), near.slice(0, 6).map((mark) => clean(mark.text)).concat(near.length > 6 ? [`and ${near.length - 6} more`] : []));
      else tip.hide();
    } else if (!small && x < g.gutter && y < g.top + g.h) {
      const row = d.rows[Math.floor(rowAt(y))];
      if (row) tip.show(event.clientX, event.clientY, rowName(row, d.names), [row.group ? "Click to unfold." : "Click to select."]);
    } else tip.hide();
    on.hover?.(found, found ? cursor.step : null);
  }

  function cellRows(found) {
    const rows = [[found.first === found.last ? "step" : "steps", found.first === found.last ? whole(found.first) : `${whole(found.first)}–${whole(found.last)}`], [d.unit ? `value (${d.unit})` : "value", number(found.mean)]];
    if (found.first !== found.last || found.to > found.from + 1) rows[1][0] = "mean", rows.push(["smallest", number(found.min)], ["largest", number(found.max)]);
    return rows;
  }

  const leave = () => {
    cursor = null;
    tip.hide();
    if (g && d) point();
    on.hover?.(null, null);
  };
  over.addEventListener("pointerleave", leave);

  function clamp([a, b], [low, high], least) {
    const size = Math.min(Math.max(b - a, least), high - low);
    const start = Math.min(Math.max((a + b) / 2 - size / 2, low), high - size);
    return [start, start + size];
  }
  const leastRows = () => Math.min(d.rows.length, Math.max(3, g.h / ROW));
  const setSteps = (range) => {
    const next = clamp(range, d.full, Math.min(3, d.full[1] - d.full[0]));
    on.steps(next[1] - next[0] >= (d.full[1] - d.full[0]) * 0.9999 ? null : next);
  };
  const setRows = (range) => {
    const next = clamp(range, [0, d.rows.length], leastRows());
    on.rows(next[1] - next[0] >= d.rows.length - 1e-6 ? null : next);
  };
  const around = ([a, b], at, factor) => [at - (at - a) * factor, at + (b - at) * factor];

  function zoom(factor, { steps = true, rows = true, x, y } = {}) {
    if (!d || !g) return;
    if (steps) setSteps(around(d.window, x == null ? (cursor?.step ?? (d.window[0] + d.window[1]) / 2) : stepAt(x), factor));
    if (rows) setRows(around(d.span, y == null ? (cursor?.row ?? (d.span[0] + d.span[1]) / 2) : rowAt(y), factor));
  }
  function pan(dx, dy) {
    if (!d || !g) return;
    if (dx) setSteps(d.window.map((s) => s + dx * (d.window[1] - d.window[0])));
    if (dy) setRows(d.span.map((r) => r + dy * (d.span[1] - d.span[0])));
  }

  if (small) over.addEventListener("pointermove", eachFrame(hover));
  else interact();

  function interact() {
    const touches = new Map();
    let drag = null;
    let pinch = null;
    let armed = false; // the wheel belongs to the map after a click on it; before, it scrolls the page
    over.addEventListener("wheel", (event) => {
      if (!armed && !event.ctrlKey && !event.metaKey) return on.hint?.();
      event.preventDefault();
      const [x, y] = toLocal(event);
      const factor = Math.exp(Math.max(-1, Math.min(1, (event.deltaY || event.deltaX) / 300)));
      zoom(factor, { x: Math.max(x, g.gutter), y, steps: x >= g.gutter && !event.shiftKey, rows: y < g.top + g.h && !event.altKey });
      tip.hide();
    }, { passive: false });
    document.addEventListener("pointerdown", (event) => { if (!node.contains(event.target)) armed = false; });
    over.addEventListener("pointerdown", (event) => {
      if (!d || !g) return;
      armed = true;
      touches.set(event.pointerId, toLocal(event));
      if (touches.size === 2) {
        const [a, b] = [...touches.values()];
        pinch = { a, b, window: d.window, span: d.span };
        drag = null;
      } else if (event.button === 0) drag = { from: toLocal(event), window: d.window, span: d.span, moved: false };
      try { over.setPointerCapture(event.pointerId); } catch { /* the pointer is gone already */ }
    });
    const move = eachFrame((event) => {
      if (pinch && touches.size === 2) {
        const [a, b] = [...touches.values()];
        const spread = (p, q, i) => Math.max(24, Math.abs(p[i] - q[i]));
        const centre = (p, q, i) => (p[i] + q[i]) / 2;
        const fit = (range, i, start, size) => {
          const factor = spread(pinch.a, pinch.b, i) / spread(a, b, i);
          const width = (range[1] - range[0]) * factor;
          const at = range[0] + ((centre(pinch.a, pinch.b, i) - start) / size) * (range[1] - range[0]);
          const left = at - ((centre(a, b, i) - start) / size) * width;
          return [left, left + width];
        };
        setSteps(fit(pinch.window, 0, g.gutter, g.w));
        setRows(fit(pinch.span, 1, g.top, g.h));
      } else if (drag) {
        const [x, y] = toLocal(event);
        const [dx, dy] = [x - drag.from[0], y - drag.from[1]];
        if (!drag.moved && Math.hypot(dx, dy) < 4) return;
        drag.moved = true;
        tip.hide();
        node.classList.add("moving");
        if (event.shiftKey) {
          drag.box = [Math.min(x, drag.from[0]), Math.min(y, drag.from[1]), Math.abs(dx), Math.abs(dy)];
          glass.clearRect(0, 0, g.width, g.height);
          glass.strokeStyle = ready.accent;
          glass.lineWidth = 2;
          glass.strokeRect(...drag.box);
          return;
        }
        const width = drag.window[1] - drag.window[0];
        const height = drag.span[1] - drag.span[0];
        setSteps(drag.window.map((s) => s - (dx / g.w) * width));
        setRows(drag.span.map((r) => r - (dy / g.h) * height));
      } else hover(event);
    });
    over.addEventListener("pointermove", (event) => {
      if (touches.has(event.pointerId)) touches.set(event.pointerId, toLocal(event));
      move(event);
    });
    const release = (event) => {
      touches.delete(event.pointerId);
      node.classList.remove("moving");
      if (drag?.box) {
        const [x, y, w, h] = drag.box;
        const steps = [stepAt(Math.max(x, g.gutter)), stepAt(x + w)];
        const rows = [rowAt(Math.max(y, g.top)), rowAt(y + h)];
        if (w > 6) setSteps(steps);
        if (h > 6) setRows(rows);
      } else if (drag && !drag.moved && event.type === "pointerup") click(event);
      drag = null;
      if (touches.size < 2) pinch = null;
    };
    over.addEventListener("pointerup", release);
    over.addEventListener("pointercancel", release);
    over.addEventListener("dblclick", () => { on.steps(null); on.rows(null); });
    node.addEventListener("keydown", keys);
    node.addEventListener("blur", leave);
  }

  function click(event) {
    const [x, y] = toLocal(event);
    if (y < g.top) return on.marker?.(marks.filter((mark) => Math.abs(mark.x - x) < 7).flatMap((mark) => mark.all));
    if (y > g.top + g.h) return;
    const group = bracketAt(x, y);
    if (group) return on.fold(group);
    const row = d.rows[Math.floor(rowAt(y))];
    if (!row) return;
    if (row.group && x < g.gutter) return on.fold(row.group);
    if (x <= g.gutter + g.w) on.pick(row, event);
    if (event.pointerType === "touch") hover(event);
  }

  function keys(event) {
    const arrows = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (!d?.rows.length || event.ctrlKey || event.metaKey || event.altKey) return;
    const arrow = arrows[event.key];
    if (arrow && event.shiftKey) {
      const at = cursor?.row != null ? cursor : { row: Math.floor(d.span[0]), step: d.window[0] };
      const frame = d.frame;
      const t = frame?.bins ? Math.min(Math.max(binAt(frame, Math.min(Math.max(at.step, edgesOf(frame)[0]), edgesOf(frame)[frame.bins])) + arrow[0], 0), frame.bins - 1) : 0;
      cursor = { row: Math.min(Math.max(at.row + arrow[1], 0), d.rows.length - 1), step: frame?.bins ? (frame.first[t] + frame.last[t]) / 2 : d.window[0] };
      point();
      on.hover?.(cell(cursor.row, cursor.step), cursor.step);
    } else if (arrow) pan(arrow[0] * 0.15, arrow[1] * 0.15);
    else if (event.key === "+" || event.key === "=") zoom(1 / 1.4);
    else if (event.key === "-" || event.key === "_") zoom(1.4);
    else if (event.key === "0" || event.key === "Home") { on.steps(null); on.rows(null); }
    else if (event.key === "Enter" || event.key === " ") { if (cursor?.row != null) on.pick(d.rows[cursor.row], { ctrlKey: true }); }
    else if (event.key === "f") {
      const row = d.rows[cursor?.row ?? Math.floor(d.span[0])];
      const group = row.group ?? d.groups.filter((one) => one.from <= row.from && row.from < one.to && !d.hidden.has(groupKey(one))).at(-1);
      if (group) on.fold(group);
    } else if (event.key === "Escape") leave();
    else return;
    event.preventDefault();
  }

  return {
    node,
    show,
    zoom,
    pan,
    point(step) {
      cursor = step == null ? null : { step };
      if (g && d) point();
    },
    resize() {
      if (!d) return;
      g = null;
      show(d);
    },
    cellAt(clientX, clientY) {
      const [x, y] = toLocal({ clientX, clientY });
      return cellAtLocal(x, y);
    },
    // Milliseconds per redraw: the median over small pans of both axes.
    redrawMs(times = 30) {
      const kept = [d.window, d.span];
      const took = [];
      for (let i = 0; i < times; i++) {
        const shift = Math.sin(i) * 0.1;
        d.window = kept[0].map((s) => s + shift * (kept[0][1] - kept[0][0]));
        const start = performance.now();
        draw();
        paper.getImageData(0, 0, 1, 1); // waits until the pixels are there
        took.push(performance.now() - start);
      }
      [d.window, d.span] = kept;
      draw();
      return took.sort((a, b) => a - b)[times >> 1];
    },
    hoverMs(times = 30) {
      const box = node.getBoundingClientRect();
      const took = [];
      for (let i = 0; i < times; i++) {
        const start = performance.now();
        hover({ clientX: box.left + g.gutter + (g.w * (i + 0.5)) / times, clientY: box.top + g.top + (g.h * (i + 0.5)) / times });
        void tip.node.offsetWidth;
        took.push(performance.now() - start);
      }
      leave();
      return took.sort((a, b) => a - b)[times >> 1];
    },
    geometry: () => g && { left: g.gutter, top: g.top, width: g.w, height: g.h },
  };
}
