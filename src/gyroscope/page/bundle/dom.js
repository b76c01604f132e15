// Elements, numbers and names. Names and notes are untrusted: they reach the document as text only.

// Return an element. Keys that begin with "on" are listeners; null, undefined and false are left out.
function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (value == null || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "text") node.textContent = value;
    else if (key in PROPERTIES) node[key] = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child != null && child !== false));
  return node;
}
const PROPERTIES = { value: 1, checked: 1, disabled: 1, indeterminate: 1 };

function svg(tag, props = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(props)) if (value != null) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

const button = (text, label, onclick, more = {}) =>
  el("button", { type: "button", title: label === text ? null : label, "aria-label": label === text ? null : label, onclick, text, ...more });

function select(label, choices, value, onchange) {
  const box = el("select", { "aria-label": label, onchange: () => onchange(box.value) });
  for (const { value: key, text, group, disabled } of choices) {
    const option = el("option", { value: key, text, disabled });
    if (!group) box.append(option);
    else {
      let home = [...box.children].find((child) => child.label === group);
      if (!home) box.append((home = el("optgroup", { label: group })));
      home.append(option);
    }
  }
  box.value = value;
  return box;
}

// A foldable paragraph, for the words next to a panel.
const fold = (summary, ...children) => el("details", { class: "words" }, el("summary", { text: summary }), ...children);

const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 1 });
const whole = (x) => (x == null || Number.isNaN(x) ? "–" : WHOLE.format(x));
const plural = (n, noun, nouns = noun + "s") => `${whole(n)} ${n === 1 ? noun : nouns}`;

function number(x, digits = 4) {
  if (x == null || Number.isNaN(x)) return "no value";
  if (x === 0) return "0";
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
  const size = Math.abs(x);
  let text;
  if (size >= 1e6 || size < 1e-3) {
    const [digitsOf, power] = size.toExponential(digits - 2).split("e");
    text = `${trimmed(digitsOf)}e${power.replace("+", "").replace("-", "−")}`;
  } else if (size >= 1e4) text = WHOLE.format(Number(size.toPrecision(digits)));
  else text = trimmed(size.toPrecision(digits));
  return (x < 0 ? "−" : "") + text;
}
const trimmed = (text) => (text.includes(".") ? text.replace(/\.?0+$/, "") : text);
const percent = (x) => (x == null || Number.isNaN(x) ? "–" : `${(100 * x).toFixed(1)} %`);

// Control characters and marks that reorder text are shown as a box: a name must not rewrite the line it stands in.
const clean = (text) => String(text ?? "").replace(/[\u0000-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, "▯") || "(no name)";

function shorten(text, longest) {
  if (text.length <= longest) return text;
  const tail = Math.ceil((longest - 1) * 0.6);
  return text.slice(0, Math.max(longest - 1 - tail, 1)) + "…" + text.slice(-tail);
}

// A step range in words: "step 12" or "steps 1,001–1,020".
const stepsText = (first, last) => (first === last ? `step ${whole(first)}` : `steps ${whole(first)}–${whole(last)}`);

// Ticks at round numbers, about `count` of them.
function ticks(low, high, count, least = 0) {
  const raw = (high - low) / Math.max(count, 1);
  if (!(raw > 0) || !Number.isFinite(raw)) return [low];
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = Math.max([1, 2, 5, 10].find((digit) => digit * unit >= raw * 0.999) * unit, least);
  const result = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9 && result.length < 100; i++) result.push(Number((i * step).toPrecision(12)));
  return result;
}

function logTicks(low, high, count) {
  const decades = Math.log10(high / low);
  if (!(decades > 0)) return [low];
  if (decades < 1.2) return ticks(low, high, count).filter((x) => x > 0);
  const every = Math.max(1, Math.round(decades / count));
  const result = [];
  for (let p = Math.ceil(Math.log10(low) - 1e-9); p <= Math.log10(high) + 1e-9; p++) {
    if (p % every === 0) result.push(Number(`1e${p}`));
    if (decades < count / 2.5) for (const digit of [2, 5]) if (digit * 10 ** p < high) result.push(Number(`${digit}e${p}`));
  }
  if (decades < count / 2.5) for (const digit of [2, 5]) {
    const x = Number(`${digit}e${Math.ceil(Math.log10(low) - 1e-9) - 1}`);
    if (x > low) result.push(x);
  }
  return result.length ? result : [low, high];
}

// A small line with its range shaded, for tables: values are any list with NaN or null where unknown.
function sparkline(values, { width = 96, height = 20, low, high, band, label, log } = {}) {
  const n = values.length;
  const at = (v) => (v == null || !Number.isFinite(v) || (log && v <= 0) ? NaN : log ? Math.log(v) : v);
  let least = Infinity;
  let most = -Infinity;
  for (const list of band ? [values, ...band] : [values]) for (let i = 0; i < n; i++) {
    const v = at(list[i]);
    if (v < least) least = v;
    if (v > most) most = v;
  }
  if (low != null) least = at(low);
  if (high != null) most = at(high);
  const image = svg("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label ?? "course over time", preserveAspectRatio: "none" });
  if (!(most >= least)) return image;
  const x = (i) => (n > 1 ? 1 + (i * (width - 2)) / (n - 1) : width / 2).toFixed(1);
  const y = (v) => (most > least ? height - 2 - ((v - least) / (most - least)) * (height - 4) : height / 2).toFixed(1);
  if (band) {
    const known = [...Array(n).keys()].filter((i) => at(band[0][i]) === at(band[0][i]) && at(band[1][i]) === at(band[1][i]));
    const edge = [...known.map((i) => `${x(i)},${y(at(band[1][i]))}`), ...known.reverse().map((i) => `${x(i)},${y(at(band[0][i]))}`)];
    if (edge.length > 2) image.append(svg("polygon", { points: edge.join(" "), class: "band" }));
  }
  let path = "";
  let pen = false;
  for (let i = 0; i < n; i++) {
    const v = at(values[i]);
    if (v === v) {
      const lone = !pen && !(at(values[i + 1]) === at(values[i + 1]));
      path += `${pen ? "L" : "M"}${x(i)},${y(v)}${lone ? "h1.5" : ""}`;
    }
    pen = v === v;
  }
  image.append(svg("path", { d: path, class: "line" }));
  return image;
}

function glob(pattern) {
  const plain = pattern.trim().toLowerCase();
  if (!/[*?]/.test(plain)) return (name) => name.toLowerCase().includes(plain);
  const rule = new RegExp(`^${plain.replace(/[.+^${}()|[\]\\]/g, "\\$&").replace(/\*+/g, ".*").replace(/\?/g, ".")}$`, "s");
  return (name) => rule.test(name.toLowerCase());
}

// Call at most once per frame, with the last arguments.
function eachFrame(work) {
  let waiting = null;
  return (...given) => {
    if (!waiting) requestAnimationFrame(() => { const last = waiting; waiting = null; work(...last); });
    waiting = given;
  };
}

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
