// Color scales: a value becomes a code from 1 to 255 (0 is no value), a code becomes a color.

// Anchor colors, dark to light, with monotone lightness: readable for the color-blind and in gray.
const SEQUENTIAL = ["#440154", "#482878", "#3e4a89", "#31688e", "#26838f", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725"];
// Blue to orange, which color-blind readers tell apart; the middle is the background's gray.
const DIVERGING = {
  light: ["#0b3c73", "#2a6fb0", "#74acd9", "#b9d5ea", "#efefef", "#f6cf9f", "#e59a45", "#b96312", "#713600"],
  dark: ["#a9d4ff", "#62a8e6", "#2f75b5", "#1d466e", "#2a2d31", "#6f4312", "#b5701d", "#eba64c", "#ffdca6"],
};
// Colors of a few things that have no order, for instance runs: told apart by the color-blind.
const CATEGORIES = { light: ["#0072b2", "#b8520a", "#007f5f", "#b0457f", "#8a6d00", "#3f8fc4", "#5b4bb5", "#5f6670"], dark: ["#5cb3ea", "#f0944d", "#3cc7a0", "#e58fbb", "#e3c13f", "#9fd6f5", "#a99bf0", "#b4bcc6"] };

const channels = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));

function mix(anchors, u) {
  const place = Math.min(Math.max(u, 0), 1) * (anchors.length - 1);
  const i = Math.min(Math.floor(place), anchors.length - 2);
  const [a, b] = [channels(anchors[i]), channels(anchors[i + 1])];
  return a.map((x, c) => Math.round(x + (b[c] - x) * (place - i)));
}
const rgb = ([r, g, b]) => `rgb(${r},${g},${b})`;

const themeName = () => document.documentElement.dataset.theme ?? "light";
const anchorsOf = (signed) => (signed ? DIVERGING[themeName()] : SEQUENTIAL);

// Color of a layer by its depth, dark first and light last, kept away from the background.
const depthColor = (layer, layers) => {
  const u = layers > 1 ? layer / (layers - 1) : 0.4;
  return rgb(mix(SEQUENTIAL, themeName() === "dark" ? 0.3 + 0.7 * u : 0.9 * u));
};

// The colors of the codes as 32-bit pixels.
function palette(signed, missing) {
  const table = new Uint32Array(256);
  const pack = ([r, g, b]) => (255 << 24) | (b << 16) | (g << 8) | r;
  table[0] = pack(channels(missing));
  for (let c = 1; c < 256; c++) table[c] = pack(mix(anchorsOf(signed), (c - 1) / 254));
  return table;
}

// Sorted sample of the finite values, with the true smallest and largest.
function sampleOf(arrays) {
  let total = 0;
  for (const values of arrays) total += values.length;
  const every = Math.max(1, Math.floor(total / 20000)) | 1;
  const kept = [];
  let least = Infinity;
  let most = -Infinity;
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

const quantileOf = (sorted, u) => (sorted.length ? sorted[Math.round(u * (sorted.length - 1))] : NaN);

function niceAbove(x) {
  if (!(x > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(x));
  return Number(([1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((digit) => digit * unit >= x * 0.9999) * unit).toPrecision(3));
}

// Which scale a quantity gets if nobody chooses.
const usualScale = (info) => (info.scale === "log" ? "log" : "linear");

// Return a scale for `values` (a list of arrays): kind, limits, `encode`, and where values lie on the legend.
function makeScale(kind, look, arrays) {
  const { sorted, least, most } = sampleOf(arrays);
  const signed = look === "signed" || (look === "linear" && least < 0 && most > 0);
  const positive = sorted.subarray(sorted.findIndex((v) => v > 0) < 0 ? sorted.length : sorted.findIndex((v) => v > 0));
  if (kind === "log" && (signed || !positive.length)) kind = "linear";
  let low;
  let high;
  if (!sorted.length) [low, high] = [0, 1];
  else if (signed) {
    const sizes = sorted.map(Math.abs).sort();
    high = niceAbove(quantileOf(sizes, 0.998));
    low = -high;
  } else if (kind === "log") {
    high = quantileOf(positive, 0.998);
    low = Math.max(quantileOf(positive, 0.002), high * 1e-8);
    if (most / high < 10) high = most;
    if (low / positive[0] < 10) low = positive[0];
    if (!(high > low * 1.0001)) [low, high] = [low / 1.5, high * 1.5];
  } else if (look === "fraction" && least >= 0) [low, high] = [0, most > 0.5 && most <= 1.005 ? 1 : niceAbove(most)];
  else {
    [low, high] = [quantileOf(sorted, 0.002), quantileOf(sorted, 0.998)];
    if (most - high < high - low) high = most;
    if (low - least < high - low) low = least;
    if (!(high > low)) [low, high] = low ? [low - Math.abs(low) / 10, low + Math.abs(low) / 10] : [-0.5, 0.5];
  }
  const scale = { kind, signed, low, high, least, most, empty: !sorted.length };
  if (kind === "quantile") {
    const ranked = signed ? sorted.map(Math.abs).sort() : sorted;
    const steps = signed ? 127 : 254;
    const cuts = Float64Array.from({ length: steps }, (_, i) => quantileOf(ranked, (i + 0.5) / steps));
    const rank = (v) => {
      let [a, b] = [0, steps];
      while (a < b) {
        const middle = (a + b) >> 1;
        if (cuts[middle] < v) a = middle + 1;
        else b = middle;
      }
      return a;
    };
    scale.code = signed ? (v) => 128 + Math.sign(v) * rank(Math.abs(v)) : (v) => 1 + rank(v);
    scale.ticks = (signed ? [-1, -0.5, 0, 0.5, 1] : [0, 0.25, 0.5, 0.75, 1]).map((u) => ({
      u: signed ? (u + 1) / 2 : u,
      text: sorted.length ? number(signed ? Math.sign(u) * quantileOf(ranked, Math.abs(u)) : quantileOf(sorted, u), 2) : "",
    }));
  } else {
    const bend = kind === "log" ? Math.log : (v) => v;
    const [from, width] = [bend(low), bend(high) - bend(low)];
    const factor = 254 / width;
    scale.code = (v) => {
      const c = kind === "log" && v <= 0 ? 1 : 1.5 + (bend(v) - from) * factor;
      return c < 1 ? 1 : c > 255 ? 255 : c | 0;
    };
    const marks = kind === "log" ? logTicks(low, high, 6) : ticks(low, high, 5);
    scale.ticks = (scale.empty ? [] : marks).map((v) => ({ u: (bend(v) - from) / width, text: number(v, 3) }));
  }
  scale.encode = (values) => {
    const codes = new Uint8Array(values.length);
    const code = scale.code;
    for (let i = 0; i < values.length; i++) {
      const v = values[i];
      codes[i] = v === v ? code(v) : 0;
    }
    return codes;
  };
  return scale;
}

// The legend of a scale: a bar with numbers, and what lies beyond its ends.
function legendOf(scale, label) {
  const bar = el("div", { class: "bar-colors" });
  const anchors = anchorsOf(scale.signed);
  bar.style.background = `linear-gradient(to right, ${anchors.join(",")})`;
  const marks = el("div", { class: "bar-marks" });
  for (const { u, text } of scale.ticks) {
    if (u < -0.001 || u > 1.001) continue;
    const mark = el("span", { text });
    mark.style.left = `${100 * u}%`;
    if (u < 0.04) mark.className = "start";
    if (u > 0.96) mark.className = "end";
    marks.append(mark);
  }
  const beyond = [];
  if (scale.kind !== "quantile" && !scale.empty) {
    if (scale.least < scale.low * (scale.low > 0 ? 0.999 : 1.001)) beyond.push(`smallest value ${number(scale.least, 3)}`);
    if (scale.most > scale.high * (scale.high > 0 ? 1.001 : 0.999)) beyond.push(`largest value ${number(scale.most, 3)}`);
  }
  const note = scale.empty ? "no values" : [scale.kind === "quantile" ? "equal share of values per color" : scale.kind, ...beyond].join(" · ");
  return el("div", { class: "legend", role: "img", "aria-label": `Colors of ${label}, ${note}: ${scale.ticks.map((t) => t.text).join(", ")}` },
    el("div", { class: "bar-box" }, bar, marks), el("span", { class: "muted", text: note }), el("span", { class: "none" }, el("i"), "no value"));
}
