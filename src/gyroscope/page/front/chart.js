// One chart: lines over steps, drawn by uPlot.

// Its data: x, lines [{name, values, color, width, dash, points, hidden, tell}], bands [[place of the upper line, whose
// lower line is the next, color]], look, log, window, markers, describe. Of values, null is a gap, undefined no point.
// `on` gets hover (a step), steps (a range, or null for all) and zoom (a factor, at a step).
function createChart(on = {}) {
	const empty = h("p.muted.empty", { hidden: true }, "no values");
	const node = h("div.plot", { role: "img", "aria-label": "Chart, not drawn yet" }, empty);
	const [link, dot] = [h("div.link", { hidden: true }), h("div.dot", { hidden: true })];
	let [plot, data, kind] = [null, null, ""];

	function yRange(_, low, high) {
		if (low == null || high - low !== high - low) return data.log ? [0.1, 1] : [0, 1];
		if (data.log) {
			low = Math.max(low, high * 1e-8); // following tiny values down would flatten the rest
			const margin = Math.max((high / low) ** 0.05, 1.05);
			return [low / margin, high * margin];
		}
		if (data.look === "fraction" && low >= 0) return [0, fractionEnd(high)];
		if (data.look === "signed") return [-1, 1].map((sign) => sign * niceAbove(Math.max(-low, high)));
		const margin = Math.max((high - low) * 0.06, Math.abs(high) * 0.01, 1e-12);
		return [low >= 0 && low < margin ? 0 : low - margin, high + margin];
	}

	function make() {
		plot?.destroy();
		const axis = { stroke: color("muted"), grid: { stroke: color("grid"), width: 1 }, ticks: { stroke: color("grid"), size: 4 }, font: `11px ${fontFamily()}`, gap: 4, filter: (_, all) => all };
		plot = new uPlot({
			width: node.clientWidth,
			height: data.height ?? 190,
			legend: { show: false },
			padding: [8, 18, 0, 0],
			scales: { x: { time: false, range: () => data.window }, y: { distr: data.log ? 3 : 1, range: yRange } },
			series: [{}, ...data.lines.map((line) => ({ stroke: line.color, width: line.width ?? 1.25, dash: line.dash, auto: !line.hidden, points: { show: !line.hidden && (line.points || data.x.length < 3), size: 4, fill: line.color } }))],
			bands: data.bands?.map(([i, fill]) => ({ series: [i + 1, i + 2], fill })),
			axes: [
				{ ...axis, size: 26, splits: (u, _, low, high) => ticks(low, high, Math.max(2, u.width / 80), 1), values: (_, all) => all.map(whole) },
				{ ...axis, size: 54, splits: (u, _, low, high) => (data.log ? logTicks(low, high, 6) : ticks(low, high, 5)), values: (_, all) => tickTexts(all) },
			],
			cursor: { x: false, y: false, points: { show: false }, drag: { x: true, y: false, setScale: false }, bind: { dblclick: () => () => on.steps?.(null) } },
			hooks: { setSelect: [selected], setCursor: [moved], drawAxes: [drawMarkers] },
		}, columns(), node);
		plot.over.append(link, dot);
		plot.over.addEventListener("mouseleave", () => { dot.hidden = true; tip.hide(); on.hover?.(null); });
		plot.over.addEventListener("wheel", (event) => {
			if (!on.zoom || !(event.ctrlKey || event.metaKey)) return; // the page scrolls
			event.preventDefault();
			on.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300))), plot.posToVal(event.offsetX, "x"));
		}, { passive: false });
	}
	const columns = () => [data.x, ...data.lines.map((line) => line.values)];

	function selected() {
		const { left, width } = plot.select;
		if (width > 5) on.steps?.([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
		if (width) plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
	}

	// Name the line that is nearest to the pointer.
	function moved() {
		const { left, top, idx } = plot.cursor;
		if (idx == null || left < 0 || !plot.over.matches(":hover")) return;
		let near = { away: 28 };
		for (const line of data.lines) {
			const y = line.values[idx] == null || line.hidden ? NaN : plot.valToPos(line.values[idx], "y");
			if (Math.abs(y - top) < near.away) near = { line, y, away: Math.abs(y - top) };
		}
		on.hover?.(plot.posToVal(left, "x"));
		dot.hidden = !near.line;
		if (!near.line) return tip.hide();
		dot.style.transform = `translate(${plot.valToPos(data.x[idx], "x")}px,${near.y}px)`;
		const box = plot.over.getBoundingClientRect();
		tip.show(box.left + left, box.top + top, near.line.name, near.line.tell?.(idx) ?? binRows({ first: data.x[idx], last: data.x[idx], mean: near.line.values[idx] }));
	}

	function drawMarkers({ ctx, bbox }) {
		ctx.save();
		ctx.lineWidth = devicePixelRatio;
		ctx.globalAlpha = 0.6;
		for (const { kind: what, severity, step } of data.markers ?? []) {
			if (what === "event" || step < data.window[0] || step > data.window[1]) continue;
			const x = Math.round(plot.valToPos(step, "x", true));
			ctx.strokeStyle = color(severity && severity !== "note" ? severity : "muted");
			ctx.setLineDash(severity ? [] : [2, 4]);
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
			empty.hidden = data.lines.some((line) => !line.hidden && line.values.some((v) => v != null));
			if (!node.clientWidth) return;
			const now = JSON.stringify([theme(), data.log, data.look, data.x.length < 3, data.bands, data.lines.map((line) => [line.color, line.dash, line.width])]);
			if (now !== kind) {
				kind = now;
				make();
			} else {
				plot.setData(columns(), false);
				plot.setScale("x", { min: data.window[0], max: data.window[1] });
			}
		},
		point(step) {
			const x = step == null || !plot ? -1 : plot.valToPos(step, "x");
			link.hidden = !(x >= 0 && x <= plot.over.clientWidth);
			link.style.transform = `translateX(${x}px)`;
		},
		resize: () => plot?.setSize({ width: node.clientWidth, height: plot.height }),
		destroy: () => plot?.destroy(),
	};
}
