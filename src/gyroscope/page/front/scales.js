// Color scales: a value becomes a code from 1 to 255 (0 is no value), a code becomes a color.

// Anchor colors, dark to light, with steadily growing lightness: readable for the color-blind and in gray.
const SEQUENTIAL = "440154 482878 3e4a89 31688e 26838f 1f9e89 35b779 6ece58 b5de2b fde725".split(" ");
// Blue to orange, which color-blind readers tell apart; the middle is near the background.
const DIVERGING = { light: "0b3c73 2a6fb0 74acd9 b9d5ea efefef f6cf9f e59a45 b96312 713600".split(" "), dark: "a9d4ff 62a8e6 2f75b5 1d466e 2a2d31 6f4312 b5701d eba64c ffdca6".split(" ") };
// Colors of things without an order, such as runs.
const CATEGORIES = { light: "#0072b2 #b8520a #007f5f #b0457f #8a6d00 #3f8fc4 #5b4bb5 #5f6670".split(" "), dark: "#5cb3ea #f0944d #3cc7a0 #e58fbb #e3c13f #9fd6f5 #a99bf0 #b4bcc6".split(" ") };

const theme = () => document.documentElement.dataset.theme;
const channels = (hex) => [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16));

function mix(anchors, u) {
	const place = u * (anchors.length - 1);
	const i = Math.min(Math.floor(place), anchors.length - 2);
	const [a, b] = [channels(anchors[i]), channels(anchors[i + 1])];
	return a.map((x, c) => Math.round(x + (b[c] - x) * (place - i)));
}
const anchorsOf = (signed) => (signed ? DIVERGING[theme()] : SEQUENTIAL);

// Color of a layer by its depth, dark first and light last, kept away from the background.
function depthColor(layer, layers) {
	const u = layers > 1 ? layer / (layers - 1) : 0.4;
	return `rgb(${mix(SEQUENTIAL, theme() === "dark" ? 0.3 + 0.7 * u : 0.9 * u)})`;
}

// The colors of the codes as 32-bit pixels.
function palette(signed, missing) {
	const pack = ([r, g, b]) => (255 << 24) | (b << 16) | (g << 8) | r;
	return Uint32Array.from({ length: 256 }, (_, c) => pack(c ? mix(anchorsOf(signed), (c - 1) / 254) : channels(missing.slice(1))));
}

// Sorted sample of the finite values, with the true smallest and largest.
function sampleOf(arrays) {
	const every = Math.floor(arrays.reduce((sum, values) => sum + values.length, 0) / 20000) | 1;
	const kept = [];
	let [least, most] = [Infinity, -Infinity];
	for (const values of arrays) for (let i = 0; i < values.length; i++) {
		const v = values[i];
		if (v - v !== 0) continue;
		if (v < least) least = v;
		if (v > most) most = v;
		if (i % every === 0) kept.push(v);
	}
	if (least <= most) kept.push(least, most);
	return { sorted: Float64Array.from(kept).sort(), least, most };
}
const quantile = (sorted, u) => sorted[Math.round(u * (sorted.length - 1))];

function niceAbove(x) {
	if (!(x > 0)) return 1;
	const unit = 10 ** Math.floor(Math.log10(x));
	return Number(([1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].find((digit) => digit * unit >= x * 0.9999) * unit).toPrecision(3));
}
// The end of an axis of fractions: 1 where values come close, and little beyond it where a cosine distance does.
const fractionEnd = (most) => (most > 0.5 && most <= 1.005 ? 1 : most > 1 && most < 2 ? Math.ceil(10 * most) / 10 : niceAbove(most));

const usualScale = (info) => (info?.scale === "log" ? "log" : "linear");

// Return a scale for the values in `arrays`: kind, limits, `encode` into codes, and ticks of its legend.
function makeScale(kind, look, arrays) {
	const { sorted, least, most } = sampleOf(arrays);
	const signed = look === "signed" || (look === "linear" && least < 0 && most > 0);
	const sizes = signed ? sorted.map(Math.abs).sort() : sorted;
	const positive = sorted.filter((v) => v > 0);
	if (kind === "log" && (signed || !positive.length)) kind = "linear";
	let [low, high] = [0, 1];
	if (signed) low = -(high = sizes.length ? niceAbove(quantile(sizes, 0.998)) : 1);
	else if (kind === "log") {
		// A few values far away do not take the colors from all others: the legend names them.
		high = quantile(positive, 0.998);
		low = Math.max(quantile(positive, 0.002), high * 1e-8);
		if (most < 10 * high) high = most;
		if (low < 10 * positive[0]) low = positive[0];
		if (high < low * 1.0001) [low, high] = [low / 1.5, high * 1.5];
	} else if (look === "fraction" && least >= 0) high = fractionEnd(most);
	else if (sorted.length) {
		[low, high] = [quantile(sorted, 0.002), quantile(sorted, 0.998)];
		const width = high - low;
		if (most - high <= width) high = most;
		if (low - least <= width) low = least;
		if (low === high) [low, high] = [low - (Math.abs(low) / 10 || 0.5), high + (Math.abs(high) / 10 || 0.5)];
	}
	const scale = { kind, signed, low, high, least, most, empty: !sorted.length };
	let code;
	if (kind === "quantile" && sorted.length) {
		const levels = signed ? 127 : 254;
		const cuts = Float64Array.from({ length: levels }, (_, i) => quantile(sizes, (i + 0.5) / levels));
		const rank = (v) => {
			let [a, b] = [0, levels];
			while (a < b) {
				const middle = (a + b) >> 1;
				if (cuts[middle] < v) a = middle + 1;
				else b = middle;
			}
			return a;
		};
		code = signed ? (v) => 128 + Math.sign(v) * rank(Math.abs(v)) : (v) => 1 + rank(v);
		scale.ticks = [0, 0.25, 0.5, 0.75, 1].map((u) => [u, number(signed ? Math.sign(u - 0.5) * quantile(sizes, Math.abs(2 * u - 1)) : quantile(sorted, u), 2)]);
	} else {
		const bend = kind === "log" ? Math.log : (v) => v;
		const from = bend(low);
		const factor = 254 / (bend(high) - from);
		code = (v) => {
			const c = kind === "log" && v <= 0 ? 1 : 1.5 + (bend(v) - from) * factor;
			return c < 1 ? 1 : c > 255 ? 255 : c;
		};
		const marks = scale.empty ? [] : kind === "log" ? logTicks(low, high, 6) : ticks(low, high, 5);
		const texts = tickTexts(marks);
		scale.ticks = marks.map((v, i) => [((bend(v) - from) * factor) / 254, texts[i]]);
	}
	scale.encode = (values) => {
		const codes = new Uint8Array(values.length);
		for (let i = 0; i < values.length; i++) if (values[i] === values[i]) codes[i] = code(values[i]);
		return codes;
	};
	return scale;
}

// The legend of a scale: a bar with numbers, and what lies beyond its ends.
function legendOf(scale, label) {
	const { kind, least, most, low, high } = scale;
	const bar = h("div.bar-colors");
	bar.style.background = `linear-gradient(to right, ${anchorsOf(scale.signed).map((hex) => `#${hex}`)})`;
	const marks = scale.ticks.map(([u, text]) => {
		const mark = h(u < 0.05 ? "span.start" : u > 0.95 ? "span.end" : "span", text);
		mark.style.left = `${100 * u}%`;
		return mark;
	});
	const far = (high - low) / 1000;
	const note = scale.empty ? "no values" : kind === "quantile" ? "quantile: every color has an equal share of the values" : [kind, least < low - (kind === "log" ? low / 1000 : far) && `smallest ${number(least, 3)}`, most > high + far && `largest ${number(most, 3)}`].filter(Boolean).join(" · ");
	return h("div.legend", { role: "img", "aria-label": `Colors of ${label}, ${note}: ${scale.ticks.map(([, text]) => text).join(", ")}` }, h("div.bar-box", bar, h("div.bar-marks", marks)), h("span.muted", note), h("span.none", h("i"), "no value"));
}
