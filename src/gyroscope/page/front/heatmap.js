// The heatmap, layer × step. Values are encoded once into bytes; a redraw looks their colors up and copies pixels, so that
// panning over 1,202 layers stays within a frame.

const STRIP = 18; // height of the markers above
const AXIS = 22; // height of the time axis below
const BRACKET = 9; // width of one level of brackets
const ROW = 24; // height of a row that needs no zoom

// One tooltip for the whole page; its rows are pairs or texts.
const tip = {
	node: h("div.tip", { hidden: true }),
	show(x, y, title, rows) {
		const { node } = tip;
		node.replaceChildren(h("strong", title), ...rows.map((row) => (Array.isArray(row) ? h("div", h("span", row[0]), h("b", row[1])) : h("p", row))));
		node.hidden = false;
		const [width, height] = [node.offsetWidth, node.offsetHeight];
		node.style.transform = `translate(${x + 16 + width < innerWidth ? x + 16 : Math.max(4, x - 16 - width)}px,${Math.max(4, Math.min(y + 14, innerHeight - height - 4))}px)`;
	},
	hide: () => (tip.node.hidden = true),
};

// Rows of the tooltip for a bin.
const binRows = ({ first, last, mean, min, max, many }) => [[first === last ? "step" : "steps", range(first, last)], ...(many || first !== last ? [["mean", number(mean)], ["smallest", number(min)], ["largest", number(max)]] : [["value", number(mean)]])];

// Codes at coarser and coarser times, so that a pixel never skips values where bins outnumber pixels.
function timeLevels(codes, rows, bins, edges, width) {
	const levels = [{ codes, bins, edges }];
	while (bins > 2 * width) {
		const half = bins >> 1;
		const coarse = new Uint8Array(rows * half);
		for (let r = 0; r < rows; r++) for (let t = 0; t < half; t++) {
			const [a, b] = [codes[r * bins + 2 * t], codes[r * bins + 2 * t + 1]];
			coarse[r * half + t] = a && b ? (a + b) >> 1 : a || b;
		}
		edges = Float64Array.from({ length: half + 1 }, (_, t) => edges[t < half ? 2 * t : bins]);
		levels.push({ codes: (codes = coarse), bins: (bins = half), edges });
	}
	return levels;
}

// With more rows than pixels, a line of pixels is the mean of its rows. The last result serves while only time moves.
function squash(last, codes, bins, rows, top, each, count) {
	if (last?.codes === codes && last.top === top && last.each === each) return last;
	const lines = new Uint8Array(count * bins);
	for (let y = 0, out = 0; y < count; y++) {
		const a = Math.floor(top + y * each);
		const b = Math.min(Math.max(a + 1, Math.floor(top + (y + 1) * each)), rows);
		if (b === a + 2) for (let i = a * bins; i < (a + 1) * bins; i++, out++) {
			const p = codes[i];
			const q = codes[i + bins];
			lines[out] = p && q ? (p + q) >> 1 : p || q;
		} else for (let i = a * bins; i < (a + 1) * bins; i++, out++) {
			let sum = 0;
			let known = 0;
			for (let k = i; k < b * bins; k += bins) {
				sum += codes[k];
				if (codes[k]) known++;
			}
			if (known) lines[out] = sum / known;
		}
	}
	return { codes, top, each, lines };
}

const zoomed = ([a, b], at, factor) => [at - (at - a) * factor, at + (b - at) * factor];

// The nearest range within limits that is at least `least` long.
function clamped([a, b], [low, high], least) {
	const size = Math.min(Math.max(b - a, least), high - low);
	const start = Math.min(Math.max((a + b - size) / 2, low), high - size);
	return [start, start + size];
}

const NOTHING = { frame: null, empty: "", selected: new Set(), folded: new Set(), groups: [], severities: new Map(), markers: [] };

// Return a heatmap. `on` gets what the reader does: steps, rows, hover, pick, fold, marker. Without `on` it is small: it
// has no names and does not move.
function createHeatmap(on = null) {
	const small = !on;
	const [base, over, image] = ["canvas", "canvas", "canvas"].map((tag) => h(tag, { "aria-hidden": "true" }));
	const node = h(small ? "div.heat.small" : "div.heat", small ? { role: "img" } : { tabindex: 0, role: "application", "aria-roledescription": "heatmap", "aria-describedby": "heat-summary" }, base, over);
	const [paper, glass, pixels] = [base.getContext("2d", { alpha: false }), over.getContext("2d"), image.getContext("2d")];
	let buffer = null;
	let squashed = null;
	let d = null; // what is shown
	let g = null; // geometry
	let ink = null; // codes and colors
	let cursor = {}; // row, step or group under the pointer
	let marks = []; // markers and their places

	function measure() {
		const width = node.clientWidth;
		const ratio = Math.min(devicePixelRatio, 2);
		const longest = small ? 0 : d.short.reduce((most, name) => Math.max(most, name.length), 0);
		const left = small ? 0 : Math.round(Math.min(longest * 5.9 + 56, width * (width < 600 ? 0.36 : 0.18)));
		const tall = small ? node.classList.contains("large") ? 200 : 96 : Math.max(280, Math.min(600, innerHeight * 0.62));
		const height = small ? tall : Math.max(48, Math.min(d.rows.length * ROW, tall));
		g = { width, left, top: small ? 0 : STRIP, w: width - left - (small ? 0 : 8), h: height, ratio, whole: height + AXIS + (small ? 0 : STRIP) };
		for (const [canvas, context] of [[base, paper], [over, glass]]) {
			canvas.width = width * ratio;
			canvas.height = g.whole * ratio;
			canvas.style.width = `${width}px`;
			canvas.style.height = node.style.height = `${g.whole}px`;
			context.setTransform(ratio, 0, 0, ratio, 0, 0);
		}
	}

	// Show data: frame, rows, names, short, scale, window and full (steps), span (rows). Codes are made again only if needed.
	function show(next) {
		const old = d;
		d = { ...NOTHING, ...next };
		if (!node.clientWidth) return;
		const resized = g?.width !== node.clientWidth || old?.rows !== d.rows;
		if (resized) measure();
		if (resized || old?.frame !== d.frame || old.scale !== d.scale || ink?.theme !== theme()) {
			ink = { theme: theme(), rowOf: new Int32Array(d.rows.at(-1)?.to ?? 0), font: `11px ${fontFamily()}`, levels: [] };
			for (const name of ["ink", "muted", "panel", "line", "accent", "serious", "warning", "none"]) ink[name] = color(name);
			ink.note = ink.muted;
			ink.colors = palette(d.scale.signed, ink.none);
			if (d.frame?.bins) ink.levels = timeLevels(d.scale.encode(rowValues(d.frame, d.rows)), d.rows.length, d.frame.bins, d.frame.edges, g.w * g.ratio);
			d.rows.forEach(({ from, to }, r) => ink.rowOf.fill(r, from, to));
			ink.open = d.groups.filter((group) => d.rows[ink.rowOf[group.from]].to < group.to); // neither folded nor within a folded one
		}
		draw();
		point();
	}

	const xOf = (step) => g.left + ((step - d.window[0]) / (d.window[1] - d.window[0])) * g.w;
	const yOf = (row) => g.top + ((row - d.span[0]) / (d.span[1] - d.span[0])) * g.h;
	const stepAt = (x) => d.window[0] + ((x - g.left) / g.w) * (d.window[1] - d.window[0]);
	const rowAt = (y) => d.span[0] + ((y - g.top) / g.h) * (d.span[1] - d.span[0]);
	const clip = (y) => Math.min(Math.max(y, g.top), g.top + g.h);

	function drawCells() {
		const [[s0, s1], [r0, r1]] = [d.window, d.span];
		const width = Math.max(1, Math.round(g.w * g.ratio));
		const all = ink.levels[0];
		const perPixel = (all.bins * (s1 - s0)) / (all.edges[all.bins] - all.edges[0]) / width;
		const { codes, bins, edges } = ink.levels[Math.min(ink.levels.length - 1, Math.max(0, Math.ceil(Math.log2(perPixel) - 0.01)))];
		const columns = new Int32Array(width);
		for (let x = 0, t = 0; x < width; x++) {
			const step = s0 + ((x + 0.5) / width) * (s1 - s0);
			while (t < bins && edges[t + 1] < step) t++;
			columns[x] = t < bins && step >= edges[0] ? t : -1;
		}
		const crowded = r1 - r0 > g.h * g.ratio;
		const top = crowded ? r0 : Math.floor(r0);
		const count = crowded ? Math.round(g.h * g.ratio) : Math.ceil(r1) - top;
		const each = crowded ? (r1 - r0) / count : 1;
		if (buffer?.width !== width || buffer.height !== count) {
			buffer = new ImageData((image.width = width), (image.height = count));
		}
		const lines = crowded ? (squashed = squash(squashed, codes, bins, d.rows.length, top, each, count)).lines : codes.subarray(top * bins);
		const out = new Uint32Array(buffer.data.buffer);
		const { colors } = ink;
		const [from, to] = [columns.findIndex((t) => t >= 0), columns.findLastIndex((t) => t >= 0) + 1]; // pixels with values
		if (to - from < width) out.fill(colors[0]);
		for (let y = 0; y < count && to; y++) for (let x = from, at = y * bins, i = y * width + from; x < to; x++, i++) out[i] = colors[lines[at + columns[x]]];
		pixels.putImageData(buffer, 0, 0);
		paper.imageSmoothingEnabled = false;
		paper.drawImage(image, 0, r0 - top, width, crowded ? count : r1 - r0, g.left, g.top, g.w, g.h);
	}

	function draw() {
		paper.fillStyle = ink.panel;
		paper.fillRect(0, 0, g.width, g.whole);
		paper.font = ink.font;
		if (ink.levels.length && d.rows.length) drawCells();
		else {
			paper.fillStyle = ink.none;
			paper.fillRect(g.left, g.top, g.w, g.h);
			write(d.empty, g.left + g.w / 2, g.top + g.h / 2, ink.ink, "center");
		}
		for (const step of ticks(...d.window, Math.max(2, g.w / 80), 1)) {
			const x = xOf(step);
			paper.fillStyle = ink.line;
			paper.fillRect(Math.round(x), g.top + g.h, 1, 4);
			const half = paper.measureText(whole(step)).width / 2;
			write(whole(step), Math.min(Math.max(x, g.left + half), g.width - half - 1), g.top + g.h + 12, ink.muted, "center");
		}
		if (small) return;
		write("step", g.left - 8, g.top + g.h + 12, ink.muted, "right");
		paper.save();
		paper.beginPath();
		paper.rect(0, g.top, g.width, g.h);
		paper.clip();
		drawRows();
		paper.restore();
		drawMarkers();
	}

	function write(text, x, y, fill, align) {
		paper.fillStyle = fill;
		paper.textAlign = align;
		paper.textBaseline = "middle";
		paper.fillText(text, x, y);
	}

	const isSelected = ({ from, to }) => {
		for (let l = from; l < to; l++) if (!d.selected.has(l)) return false;
		return true;
	};
	const placeOf = (group) => [yOf(ink.rowOf[group.from]), yOf(ink.rowOf[group.to - 1] + 1)];
	const nameOf = (row) => (row.group ? `${row.group.name} (mean over ${row.to - row.from} layers)` : clean(d.names[row.from]));

	// Names, brackets of groups, selection.
	function drawRows() {
		const height = g.h / (d.span[1] - d.span[0]);
		const [first, last] = [Math.max(0, Math.floor(d.span[0])), Math.min(d.rows.length, Math.ceil(d.span[1]))];
		const inner = g.left - 2 * BRACKET - 10;
		const letters = Math.floor(inner / 5.9);
		const label = (row, y) => {
			let severity;
			for (let l = row.from; l < row.to; l++) severity ??= d.severities.get(l);
			const text = shorten(row.group ? `▸ ${row.group.name}` : d.short[row.from], letters - (severity ? 2 : 0));
			write(text, inner, y, isSelected(row) ? ink.accent : ink.ink, "right");
			if (severity) write("●", inner - paper.measureText(text).width - 4, y, ink[severity], "right");
		};
		const inside = (y) => (every > 1 ? Math.min(Math.max(y, g.top + 7), g.top + g.h - 7) : y);
		const depth = [3, 2, 1, 0].find((level) => {
			const sizes = ink.open.filter((group) => group.depth === level).map((group) => { const [a, b] = placeOf(group); return b - a; });
			const total = sizes.reduce((a, b) => a + b, 0);
			return total / sizes.length >= 13 && total > 0.8 * height * d.rows.length;
		});
		const every = height >= 11 ? 1 : depth == null ? Math.ceil(14 / height) : 0;
		if (every) for (let r = Math.ceil(first / every) * every; r < last; r += every) label(d.rows[r], inside(yOf(r + 0.5)));
		for (const group of ink.open) {
			const [a, b] = placeOf(group);
			if (b < g.top || a > g.top + g.h) continue;
			if (!every && group.depth === depth && clip(b) - clip(a) >= 11) write(shorten(group.name, letters), inner, (clip(a) + clip(b)) / 2, ink.ink, "right");
			if (group.depth > 1 || b - a < 8) continue;
			const x = inner + 5.5 + group.depth * BRACKET;
			paper.strokeStyle = cursor.group === group ? ink.accent : ink.muted;
			paper.beginPath();
			for (const [dx, y] of [[4, a + 2.5], [0, a + 2.5], [0, b - 2.5], [4, b - 2.5]]) paper.lineTo(x + dx, y);
			paper.stroke();
			paper.fillStyle = ink.panel;
			if (group.depth === 0 && height > 4) for (const y of [a, b]) paper.fillRect(g.left, y - 0.5, g.w, 1);
		}
		paper.fillStyle = ink.accent;
		if (d.selected.size) for (let r = first; r < last; r++) if (isSelected(d.rows[r])) paper.fillRect(g.left - 5, yOf(r), 4, Math.max(height, 1));
	}

	// A line that can be seen on all colors.
	function upright(context, x) {
		for (const [shift, stroke] of [[0.5, "#000c"], [1.5, "#fffc"]]) {
			context.strokeStyle = stroke;
			context.beginPath();
			context.moveTo(Math.round(x) + shift, g.top);
			context.lineTo(Math.round(x) + shift, g.top + g.h);
			context.stroke();
		}
	}

	function drawMarkers() {
		marks = [];
		for (const marker of d.markers) {
			const x = xOf(marker.step);
			if (x < g.left - 1 || x > g.left + g.w + 1) continue;
			const near = marks.find((one) => Math.abs(one.x - x) < 5 && one.kind === marker.kind);
			if (near) near.all.push(marker);
			else marks.push({ x, kind: marker.kind, severity: marker.severity, all: [marker] });
		}
		for (const { x, kind, severity } of marks) {
			paper.setLineDash([2, 4]);
			if (kind === "schedule") upright(paper, x);
			paper.setLineDash([]);
			write({ schedule: "╷", event: "◆", finding: "▼" }[kind], x, 10, ink[severity ?? "muted"], "center");
		}
	}

	// The pointer: a line at the step and a frame around the row.
	function point() {
		glass.clearRect(0, 0, g.width, g.whole);
		const x = xOf(cursor.step ?? NaN);
		if (x >= g.left && x <= g.left + g.w) upright(glass, x);
		const [a, b] = [clip(yOf(cursor.row)), clip(yOf(cursor.row + 1))];
		if (!(b > a)) return;
		glass.strokeStyle = "#fffc";
		glass.strokeRect(g.left + 0.5, a - 0.5, g.w - 1, Math.max(b - a, 2) + 1);
		glass.strokeStyle = "#000c";
		glass.strokeRect(g.left + 1.5, a + 0.5, g.w - 3, Math.max(b - a - 1, 1));
	}

	// The cell at a row and a step: its layers, steps and values.
	function cell(row, step) {
		const t = d.frame && d.rows[row] ? binAt(d.frame, step) : -1;
		if (t < 0) return null;
		const { from, to } = d.rows[row];
		const [mean, min, max] = ["mean", "min", "max"].map((which) => gather(d.frame[which], d.frame.bins, from, to, t, which));
		return { row, from, to, name: nameOf(d.rows[row]), first: d.frame.first[t], last: d.frame.last[t], mean, min, max, many: to > from + 1 };
	}

	// What lies under the pointer.
	function under(event) {
		const box = node.getBoundingClientRect();
		const [x, y] = [event.clientX - box.left, event.clientY - box.top];
		const inRows = y >= g.top && y < g.top + g.h;
		const found = { x, y, step: stepAt(x), row: inRows ? Math.floor(rowAt(y)) : null };
		if (inRows && x >= g.left && x <= g.left + g.w) found.cell = cell(found.row, found.step);
		const depth = Math.floor((x - (g.left - 2 * BRACKET - 8)) / BRACKET);
		const layer = d.rows[found.row]?.from;
		if (!small && depth >= 0 && x < g.left - 4) found.group = ink.open.find((group) => group.depth === depth && group.from <= layer && layer < group.to);
		if (!small && y < g.top) found.marks = marks.filter((mark) => Math.abs(mark.x - x) < 7).flatMap((mark) => mark.all);
		return found;
	}

	function hover(event) {
		if (!g) return;
		const found = under(event);
		const moved = cursor.group !== found.group;
		cursor = found.cell ? { row: found.row, step: found.step } : { group: found.group };
		over.style.cursor = !small && found.x < g.left && found.row != null ? "pointer" : "";
		if (moved && !small) draw();
		point();
		const row = d.rows[found.row];
		const say = (title, rows) => tip.show(event.clientX, event.clientY, title, rows);
		if (found.cell) say(found.cell.name, binRows(found.cell));
		else if (found.group) say(found.group.name, [`Click to fold ${found.group.to - found.group.from} layers into their mean.`]);
		else if (found.marks?.length) say(steps(found.marks[0].step, found.marks[0].step), [...found.marks.slice(0, 6).map((mark) => clean(mark.text)), ...(found.marks.length > 6 ? [`and ${found.marks.length - 6} more`] : [])]);
		else if (row && !small && found.x < g.left) say(nameOf(row), [row.group ? "Click to unfold." : "Click to select."]);
		else tip.hide();
		on?.hover(found.cell, found.cell ? found.step : null);
	}

	function leave() {
		cursor = {};
		tip.hide();
		if (g) point();
		on?.hover(null, null);
	}
	over.addEventListener("pointerleave", leave);

	const setSteps = (next) => {
		const [a, b] = clamped(next, d.full, 3);
		on.steps(b - a >= (d.full[1] - d.full[0]) * 0.9999 ? null : [a, b]);
	};
	const setRows = (next) => {
		const [a, b] = clamped(next, [0, d.rows.length], Math.max(3, g.h / ROW));
		on.rows(b - a > d.rows.length - 1e-6 ? null : [a, b]);
	};
	function zoom(factor, { x, y, inSteps = true, inRows = true } = {}) {
		if (!g) return;
		const middle = ([a, b]) => (a + b) / 2;
		if (inSteps) setSteps(zoomed(d.window, x == null ? cursor.step ?? middle(d.window) : stepAt(x), factor));
		if (inRows) setRows(zoomed(d.span, y == null ? cursor.row ?? middle(d.span) : rowAt(y), factor));
	}
	function pan(dx, dy) {
		if (dx && g) setSteps(d.window.map((s) => s + dx * (d.window[1] - d.window[0])));
		if (dy && g) setRows(d.span.map((r) => r + dy * (d.span[1] - d.span[0])));
	}

	if (small) over.addEventListener("pointermove", eachFrame(hover));
	else interact();

	function interact() {
		const fingers = new Map();
		let grip = null; // where the fingers or the mouse took hold
		let armed = false; // after a click the wheel belongs to the map; before, it scrolls the page
		const place = (event) => [event.clientX, event.clientY];
		const listen = (name, act, options) => over.addEventListener(name, act, options);
		document.addEventListener("pointerdown", (event) => { armed = node.contains(event.target); });
		listen("wheel", (event) => {
			if (!armed && !event.ctrlKey && !event.metaKey) return on.hint();
			event.preventDefault();
			const { x, y } = under(event);
			zoom(Math.exp(Math.max(-1, Math.min(1, (event.deltaY || event.deltaX) / 300))), { x: Math.max(x, g.left), y, inSteps: x >= g.left && !event.shiftKey, inRows: y < g.top + g.h && !event.altKey });
			tip.hide();
		}, { passive: false });
		const hold = () => (grip = g && fingers.size ? { at: [...fingers.values()], window: d.window, span: d.span, moved: grip?.moved ?? false } : null);
		listen("pointerdown", (event) => {
			if (event.button) return;
			fingers.set(event.pointerId, place(event));
			grip = null;
			hold();
			try { over.setPointerCapture(event.pointerId); } catch { /* the pointer is gone already */ }
		});
		const drag = eachFrame((event) => {
			if (!grip) return hover(event);
			const now = [...fingers.values()];
			if (!grip.moved && now.length === 1 && Math.hypot(now[0][0] - grip.at[0][0], now[0][1] - grip.at[0][1]) < 4) return;
			grip.moved = true;
			tip.hide();
			// The values under the fingers stay under the fingers; one finger moves, two also stretch.
			const box = node.getBoundingClientRect();
			const fit = ([a, b], i, start, size) => {
				const middle = (list) => list.reduce((sum, p) => sum + p[i], 0) / list.length - start;
				const spread = (list) => (list.length > 1 ? Math.max(30, Math.abs(list[0][i] - list[1][i])) : 1);
				const width = ((b - a) * spread(grip.at)) / spread(now);
				const left = a + (middle(grip.at) / size) * (b - a) - (middle(now) / size) * width;
				return [left, left + width];
			};
			setSteps(fit(grip.window, 0, box.left + g.left, g.w));
			setRows(fit(grip.span, 1, box.top + g.top, g.h));
		});
		listen("pointermove", (event) => {
			if (fingers.has(event.pointerId)) fingers.set(event.pointerId, place(event));
			drag(event);
		});
		const release = (event) => {
			if (!fingers.delete(event.pointerId)) return;
			if (grip && !grip.moved && event.type === "pointerup") click(event);
			hold();
		};
		listen("pointerup", release);
		listen("pointercancel", release);
		listen("dblclick", all);
		node.addEventListener("keydown", keys);
		node.addEventListener("blur", leave);
	}
	function all() {
		on.steps(null);
		on.rows(null);
	}

	function click(event) {
		const { x, row, group, marks: near } = under(event);
		if (near) return on.marker(near);
		const target = d.rows[row];
		if (group) on.fold(group);
		else if (target?.group && x < g.left) on.fold(target.group);
		else if (target) on.pick(target, event);
		if (event.pointerType === "touch") hover(event);
	}

	function keys(event) {
		const [dx, dy] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key] ?? [0, 0];
		if (!g || !d.rows.length || event.ctrlKey || event.metaKey || event.altKey) return;
		const row = d.rows[cursor.row ?? Math.floor(d.span[0])];
		if ((dx || dy) && event.shiftKey && d.frame) {
			const { bins, edges, centers } = d.frame;
			const t = binAt(d.frame, Math.min(Math.max(cursor.step ?? d.window[0], edges[0]), edges[bins])) + (cursor.step == null ? 0 : dx);
			cursor = { row: Math.min(Math.max((cursor.row ?? Math.floor(d.span[0]) - dy) + dy, 0), d.rows.length - 1), step: centers[Math.min(Math.max(t, 0), bins - 1)] };
			point();
			on.hover(cell(cursor.row, cursor.step), cursor.step);
		} else if (dx || dy) pan(dx * 0.15, dy * 0.15);
		else if ("+=".includes(event.key)) zoom(1 / 1.4);
		else if ("-_".includes(event.key)) zoom(1.4);
		else if (event.key === "0" || event.key === "Home") all();
		else if (event.key === "Enter" && cursor.row != null) on.pick(row, { ctrlKey: true });
		else if (event.key === "f") on.fold(row.group ?? d.groups.findLast((one) => one.from <= row.from && row.from < one.to));
		else if (event.key === "Escape") leave();
		else return;
		event.preventDefault();
	}

	// The median time of `act`, which waits until its pixels are there.
	function timed(times, act) {
		const took = Array.from({ length: times }, (_, i) => {
			const start = performance.now();
			act((i + 0.5) / times);
			paper.getImageData(0, 0, 1, 1);
			return performance.now() - start;
		});
		return took.sort((a, b) => a - b)[times >> 1];
	}

	return {
		node,
		show,
		zoom,
		pan,
		point(step) {
			cursor = { step };
			if (g) point();
		},
		resize() {
			g = null;
			if (d) show(d);
		},
		cellAt: (clientX, clientY) => (g ? under({ clientX, clientY }).cell ?? null : null),
		geometry: () => g,
		redrawMs(times = 30) {
			const { window, span } = d;
			const took = timed(times, (u) => {
				d.window = window.map((s) => s + (u - 0.5) * 0.2 * (window[1] - window[0]));
				d.span = [span[0] + u, span[1] - 1 + u];
				draw();
			});
			Object.assign(d, { window, span });
			draw();
			return took;
		},
		hoverMs(times = 30) {
			const box = node.getBoundingClientRect();
			const took = timed(times, (u) => hover({ clientX: box.left + g.left + g.w * u, clientY: box.top + g.top + g.h * u }));
			leave();
			return took;
		},
	};
}
