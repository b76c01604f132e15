// One chart: lines over steps, on a canvas.

const MARGIN = { left: 54, right: 18, top: 8, bottom: 22 };

// Limits of the y axis for values from low to high.
function yLimits(low, high, look, log) {
	if (!(high >= low)) return log ? [0.1, 1] : [0, 1];
	if (log) {
		low = Math.max(low, high * 1e-8); // following tiny values down would flatten the rest
		const margin = Math.max((high / low) ** 0.05, 1.05);
		return [low / margin, high * margin];
	}
	if (look === "fraction" && low >= 0) return [0, fractionEnd(high)];
	if (look === "signed") return [-1, 1].map((sign) => sign * niceAbove(Math.max(-low, high)));
	const margin = Math.max((high - low) * 0.06, Math.abs(high) * 0.01, 1e-12);
	return [low >= 0 && low < margin ? 0 : low - margin, high + margin];
}

// Its data: x, lines [{name, values, color, width, dash, points, hidden, tell}], bands [[place of the upper line, whose
// lower line is the next, color]], look, log, window, markers, describe. Of values, null is a gap, undefined no point.
// `on` gets hover (a step), steps (a range, or null for all) and zoom (a factor, at a step).
function createChart(on = {}) {
	const [base, over] = [h("canvas", { "aria-hidden": "true" }), h("canvas", { "aria-hidden": "true" })];
	const node = h("div.plot", { role: "img", "aria-label": "Chart, not drawn yet" }, base, over);
	const [paper, glass] = [base.getContext("2d", { alpha: false }), over.getContext("2d")];
	let [data, g, cursor, near, drag] = [null, null, null, null, null];

	function measure() {
		const [width, height, ratio] = [node.clientWidth, node.clientHeight, Math.min(devicePixelRatio, 2)];
		for (const [canvas, context] of [[base, paper], [over, glass]]) {
			canvas.width = width * ratio;
			canvas.height = height * ratio;
			canvas.style.width = `${width}px`;
			canvas.style.height = `${height}px`;
			context.setTransform(ratio, 0, 0, ratio, 0, 0);
		}
		g = { width, height, w: width - MARGIN.left - MARGIN.right, h: height - MARGIN.top - MARGIN.bottom };
	}

	const bend = (v) => (data.log ? Math.log(v) : v);
	const xOf = (step) => MARGIN.left + ((step - data.window[0]) / (data.window[1] - data.window[0])) * g.w;
	const stepAt = (x) => data.window[0] + ((x - MARGIN.left) / g.w) * (data.window[1] - data.window[0]);
	const yOf = (v) => MARGIN.top + g.h - ((bend(v) - g.low) / (g.high - g.low)) * g.h;

	// Points of a line, from first to last visible one, as pixels; of several in one column, the lowest and the highest.
	function trace(values) {
		const dense = g.to - g.from > 2 * g.w;
		let [pen, column, low, high] = [false, NaN, 0, 0];
		const flush = () => { if (dense && pen && low !== high) { paper.lineTo(column, low); paper.lineTo(column, high); } };
		for (let i = g.from; i < g.to; i++) {
			const v = values[i];
			if (v === undefined) continue;
			if (v === null) {
				flush();
				pen = false;
				continue;
			}
			const [x, y] = [dense ? Math.round(xOf(data.x[i])) : xOf(data.x[i]), yOf(v)];
			if (dense && pen && x === column) {
				if (y < low) low = y;
				if (y > high) high = y;
				continue;
			}
			flush();
			if (pen) paper.lineTo(x, y);
			else {
				paper.moveTo(x, y);
				paper.lineTo(x + 0.1, y); // a value on its own is a dot
			}
			[pen, column, low, high] = [true, x, y, y];
		}
		flush();
	}

	function drawBand(upper, lower, fill) {
		paper.fillStyle = fill;
		let run = [];
		for (let i = g.from; i <= g.to; i++) {
			if (i < g.to && upper[i] === undefined) continue;
			if (i < g.to && upper[i] !== null && lower[i] !== null) run.push(i);
			else if (run.length) {
				paper.beginPath();
				for (const k of run) paper.lineTo(xOf(data.x[k]), yOf(upper[k]));
				for (const k of run.reverse()) paper.lineTo(xOf(data.x[k]), yOf(lower[k]));
				paper.fill();
				run = [];
			}
		}
	}

	function draw() {
		const { x, lines, window: [a, b], log, look } = data;
		const after = (test) => { const i = x.findIndex(test); return i < 0 ? x.length : i; };
		[g.from, g.to] = [Math.max(0, after((step) => step >= a) - 1), Math.min(x.length, after((step) => step > b) + 1)];
		let [low, high] = [Infinity, -Infinity];
		for (const line of lines) if (!line.hidden) for (let i = g.from; i < g.to; i++) {
			const v = line.values[i];
			if (v == null) continue;
			if (v < low) low = v;
			if (v > high) high = v;
		}
		const limits = yLimits(low, high, look, log);
		[g.low, g.high] = limits.map(bend);
		paper.fillStyle = color("panel");
		paper.fillRect(0, 0, g.width, g.height);
		paper.font = `11px ${fontFamily()}`;
		paper.textBaseline = "middle";
		const [grid, muted] = [color("grid"), color("muted")];
		const right = MARGIN.left + g.w;
		const bottom = MARGIN.top + g.h;
		paper.textAlign = "right";
		const marks = log ? logTicks(...limits, 6) : ticks(...limits, 5);
		const texts = tickTexts(marks);
		for (const [i, v] of marks.entries()) {
			paper.fillStyle = grid;
			paper.fillRect(MARGIN.left, Math.round(yOf(v)), g.w, 1);
			paper.fillStyle = muted;
			paper.fillText(texts[i], MARGIN.left - 6, yOf(v));
		}
		paper.textAlign = "center";
		for (const step of ticks(a, b, Math.max(2, g.w / 80), 1)) {
			paper.fillStyle = grid;
			paper.fillRect(Math.round(xOf(step)), MARGIN.top, 1, g.h + 4);
			paper.fillStyle = muted;
			paper.fillText(whole(step), xOf(step), bottom + 13);
		}
		paper.save();
		paper.beginPath();
		paper.rect(MARGIN.left, 0, g.w + 1, bottom + 1);
		paper.clip();
		paper.globalAlpha = 0.5;
		for (const { kind, severity, step } of data.markers ?? []) if (kind !== "event") upright(paper, xOf(step), color(severity && severity !== "note" ? severity : "muted"), severity ? [] : [2, 4]);
		paper.globalAlpha = 1;
		for (const [i, fill] of data.bands ?? []) drawBand(lines[i].values, lines[i + 1].values, fill);
		paper.lineJoin = paper.lineCap = "round";
		for (const line of lines) {
			if (line.hidden) continue;
			paper.strokeStyle = paper.fillStyle = line.color;
			paper.lineWidth = line.width ?? 1.25;
			paper.setLineDash(line.dash ?? []);
			paper.beginPath();
			trace(line.values);
			paper.stroke();
			if (line.points || x.length < 3) for (let i = g.from; i < g.to; i++) if (line.values[i] != null) paper.fillRect(xOf(x[i]) - 2, yOf(line.values[i]) - 2, 4, 4);
		}
		paper.restore();
		paper.fillStyle = muted;
		if (!(high >= low)) paper.fillText("no values", MARGIN.left + g.w / 2, MARGIN.top + g.h / 2);
		point();
	}

	function upright(context, x, stroke, dash) {
		context.lineWidth = 1;
		context.strokeStyle = stroke;
		context.setLineDash(dash);
		context.beginPath();
		context.moveTo(Math.round(x) + 0.5, MARGIN.top);
		context.lineTo(Math.round(x) + 0.5, MARGIN.top + g.h);
		context.stroke();
	}

	// The cursor that all charts share, the nearest value, and the steps that are being selected.
	function point() {
		glass.clearRect(0, 0, g.width, g.height);
		const x = xOf(cursor ?? NaN);
		if (x >= MARGIN.left && x <= MARGIN.left + g.w) upright(glass, x, color("muted"), []);
		if (near) {
			glass.fillStyle = near.line.color;
			glass.beginPath();
			glass.arc(near.x, near.y, 4, 0, 7);
			glass.fill();
		}
		glass.fillStyle = color("shade");
		if (drag) glass.fillRect(drag.from, MARGIN.top, drag.to - drag.from, g.h);
	}

	// Name the line that is nearest to the pointer.
	function hover({ offsetX, offsetY, clientX, clientY }) {
		if (!g?.to) return;
		const step = stepAt(offsetX);
		let i = g.from;
		while (i < g.to - 1 && Math.abs(data.x[i + 1] - step) <= Math.abs(data.x[i] - step)) i++;
		near = null;
		for (const line of data.lines) {
			const y = line.hidden || line.values[i] == null ? NaN : yOf(line.values[i]);
			if (Math.abs(y - offsetY) < (near?.away ?? 28)) near = { line, x: xOf(data.x[i]), y, away: Math.abs(y - offsetY) };
		}
		cursor = step;
		point();
		on.hover?.(step);
		if (near) tip.show(clientX, clientY, near.line.name, near.line.tell?.(i) ?? binRows({ first: data.x[i], last: data.x[i], mean: near.line.values[i] }));
		else tip.hide();
	}

	function leave() {
		cursor = near = drag = null;
		tip.hide();
		if (g) point();
		on.hover?.(null);
	}

	const clip = (x) => Math.min(Math.max(x, MARGIN.left), MARGIN.left + g.w);
	over.addEventListener("pointermove", eachFrame((event) => {
		if (!drag) return hover(event);
		drag.to = clip(event.offsetX);
		tip.hide();
		point();
	}));
	over.addEventListener("pointerleave", leave);
	over.addEventListener("pointercancel", leave);
	if (on.steps) {
		over.addEventListener("pointerdown", (event) => {
			if (!g || event.button) return;
			drag = { from: clip(event.offsetX), to: clip(event.offsetX) };
			over.setPointerCapture(event.pointerId);
		});
		over.addEventListener("pointerup", (event) => {
			const { from, to } = drag ?? {};
			drag = null;
			if (Math.abs(to - from) > 5) on.steps([Math.min(from, to), Math.max(from, to)].map(stepAt));
			else hover(event);
		});
		over.addEventListener("dblclick", () => on.steps(null));
		over.addEventListener("wheel", (event) => {
			if (!event.ctrlKey && !event.metaKey) return;
			event.preventDefault();
			on.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300))), stepAt(event.offsetX));
		}, { passive: false });
	}

	function show(next) {
		data = next;
		node.setAttribute("aria-label", data.describe);
		if (!node.clientWidth) return;
		if (g?.width !== node.clientWidth) measure();
		near = null;
		draw();
	}
	return {
		node,
		show,
		resize: () => data && show(data),
		// Show the step at which the pointer is elsewhere.
		point(step) {
			if (cursor === step) return;
			cursor = step;
			near = null;
			if (g) point();
		},
	};
}
