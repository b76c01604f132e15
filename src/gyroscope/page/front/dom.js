// Elements, numbers and names. Names and notes are untrusted: they reach the document as text only.

// Return an element: h("p.muted", {title: "…"}, "text"). Keys that begin with "on" are listeners; null and false are left out.
function h(spec, ...rest) {
	const [tag, ...classes] = spec.split(".");
	const node = document.createElement(tag);
	if (classes.length) node.className = classes.join(" ");
	const props = rest[0]?.constructor === Object ? rest.shift() : {};
	for (const [key, value] of Object.entries(props)) {
		if (value == null || value === false) continue;
		if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
		else if (key === "value" || key === "checked" || key === "disabled") node[key] = value;
		else node.setAttribute(key, value === true ? "" : value);
	}
	node.append(...rest.flat(2).filter((child) => child != null && child !== false));
	return node;
}

function svg(tag, props, ...children) {
	const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
	for (const key in props) if (props[key] != null) node.setAttribute(key, props[key]);
	node.append(...children);
	return node;
}

// A button; `label` is for those whose text is only a sign.
const button = (text, onclick, { label, kind, ...more } = {}) =>
	h("button" + (kind ? `.${kind}` : ""), { type: "button", title: label, "aria-label": label, onclick, ...more }, text);

// A list of choices [value, text, group, disabled].
function select(label, choices, value, onchange) {
	const box = h("select", { "aria-label": label, onchange: () => onchange(box.value) });
	for (const [key, text, group, disabled] of choices) {
		let home = group ? [...box.children].find((child) => child.label === group) : box;
		if (!home) box.append((home = h("optgroup", { label: group })));
		home.append(h("option", { value: key, disabled }, text));
	}
	box.value = value;
	return box;
}

const fold = (summary, ...children) => h("details.words", h("summary", summary), ...children);
const popup = (label, texts) => h("details.mini", h("summary", { "aria-label": label }, "?"), h("div.pop", texts.map((text) => h("p", text))));
const facts = (pairs) => h("dl.facts", pairs.map(([term, text]) => h("div", h("dt", clean(term)), h("dd", text))));

// Replace what is in a node by new controls, and keep the focus on the control of the same name.
function refill(node, ...children) {
	const old = node.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
	node.replaceChildren(...children.flat().filter((child) => child != null && child !== false));
	if (old) [...node.querySelectorAll("[aria-label]")].find((one) => one.getAttribute("aria-label") === old)?.focus({ preventScroll: true });
}

const FORMAT = new Intl.NumberFormat("en-US", { maximumFractionDigits: 1 });
const whole = (x) => (x == null || x !== x ? "–" : FORMAT.format(x));
const plural = (n, noun) => `${whole(n)} ${noun}${n === 1 ? "" : "s"}`;
const percent = (x) => (x == null || x !== x ? "–" : `${(100 * x).toFixed(1)}\u00a0%`);

function number(x, digits = 4) {
	if (x == null || x !== x) return "no value";
	if (x - x !== 0) return x > 0 ? "∞" : "−∞";
	const size = Math.abs(Number(x.toPrecision(digits)));
	const text = size >= 1e6 || (size < 1e-3 && size) ? size.toExponential().replace("e+", "e").replace("-", "−") : size >= 1e4 ? FORMAT.format(size) : String(size);
	return (x < 0 ? "−" : "") + text;
}

// Control characters and marks that reorder text are shown as a box: a name must not rewrite the line it stands in.
const clean = (text) => String(text ?? "").replace(/[\0-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, "▯") || "(no name)";

function shorten(text, longest) {
	if (text.length <= longest) return text;
	const tail = Math.ceil((longest - 1) * 0.6);
	return text.slice(0, Math.max(longest - 1 - tail, 1)) + "…" + text.slice(-tail);
}

const range = (first, last) => (first === last ? whole(first) : `${whole(first)}–${whole(last)}`);
const steps = (first, last) => `${first === last ? "step" : "steps"} ${range(first, last)}`;

// Round numbers from low to high, about `count` of them.
function ticks(low, high, count, least = 0) {
	const raw = (high - low) / count;
	if (!(raw > 0 && raw < Infinity)) return [low];
	const unit = 10 ** Math.floor(Math.log10(raw));
	const step = Math.max([1, 2, 5, 10].find((digit) => digit * unit >= raw * 0.999) * unit, least);
	const out = [];
	for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9 && out.length < 99; i++) out.push(Number((i * step).toPrecision(12)));
	return out;
}

function logTicks(low, high, count) {
	const decades = Math.log10(high / low);
	if (!(decades > 1.2)) return ticks(low, high, count).filter((x) => x > 0);
	const every = Math.max(1, Math.round(decades / count));
	const out = [];
	for (let p = Math.floor(Math.log10(low)); p <= Math.log10(high); p++)
		for (const digit of decades < count / 2 ? [1, 2, 5] : [1]) if (p % every === 0) out.push(Number(`${digit}e${p}`));
	return out.filter((x) => x >= low * 0.999 && x <= high * 1.001);
}

// Texts of ticks, with as many digits as it takes to tell them apart.
function tickTexts(values) {
	for (let digits = 3; ; digits++) {
		const texts = values.map((v) => number(v, digits));
		if (digits > 8 || new Set(texts).size === texts.length) return texts;
	}
}

// A small line, with a band behind it if the smallest and largest values are given.
function sparkline(values, { width = 96, height = 20, low, high, band, label = "course over time", log } = {}) {
	const at = (v) => (v == null || v - v !== 0 || (log && v <= 0) ? NaN : log ? Math.log(v) : v);
	const all = [...values, ...(band ? [...band[0], ...band[1]] : [])].map(at).filter((v) => v === v);
	const image = svg("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, preserveAspectRatio: "none" });
	if (!all.length) return image;
	const [least, most] = [low ?? all.reduce((a, b) => Math.min(a, b)), high ?? all.reduce((a, b) => Math.max(a, b))];
	const n = values.length;
	const place = (v, i) => `${(n > 1 ? 1 + (i * (width - 2)) / (n - 1) : width / 2).toFixed(1)},${(most > least ? height - 2 - ((v - least) / (most - least)) * (height - 4) : height / 2).toFixed(1)}`;
	const points = (list) => Array.from(list, at).flatMap((v, i) => (v === v ? [place(v, i)] : []));
	if (band) image.append(svg("polygon", { points: [...points(band[1]), ...points(band[0]).reverse()].join(" "), class: "band" }));
	let path = "";
	for (let i = 0, pen = false; i < n; i++) {
		const v = at(values[i]);
		if (v === v) path += (pen ? "L" : "M") + place(v, i) + (pen ? "" : "h.5");
		pen = v === v;
	}
	image.append(svg("path", { d: path, class: "line" }));
	return image;
}

// A test of names: by text, or by a pattern with * and ?.
function glob(pattern) {
	const plain = pattern.trim().toLowerCase();
	if (!/[*?]/.test(plain)) return (name) => name.toLowerCase().includes(plain);
	const rule = new RegExp(`^${plain.replace(/[.+^${}()|[\]\\]/g, "\\$&").replace(/\*+/g, ".*").replace(/\?/g, ".")}$`, "s");
	return (name) => rule.test(name.toLowerCase());
}

// Sort by `value`; what is unknown comes last.
function sortBy(list, value, down) {
	const keys = new Map(list.map((one) => [one, value(one)]));
	return [...list].sort((one, two) => {
		const [a, b] = [keys.get(one), keys.get(two)];
		if (a == null || b == null) return (a == null) - (b == null);
		return (a < b ? -1 : a > b ? 1 : 0) * (down ? -1 : 1);
	});
}

// Heads of a table, [key, text, class, title]; those with a key sort it.
const sortHeads = (columns, sort, set) => columns.map(([key, text, kind = "", title]) => {
	const active = key && sort.key === key;
	return h("th", { scope: "col", class: kind, "aria-sort": active && (sort.down ? "descending" : "ascending") }, key
		? button([text, h("span", { "aria-hidden": "true" }, active ? (sort.down ? " ↓" : " ↑") : "")], () => set({ key, down: active ? !sort.down : kind.includes("number") && key !== "layer" }), { label: title ?? `Sort by ${text}` })
		: text);
});

// Call at most once per frame, with the last arguments.
function eachFrame(work) {
	let last = null;
	return (...given) => {
		if (!last) requestAnimationFrame(() => { const now = last; last = null; work(...now); });
		last = given;
	};
}

// What two lists or objects hold, compared.
const same = (a, b) => JSON.stringify(a ?? null) === JSON.stringify(b ?? null);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const fontFamily = () => getComputedStyle(document.body).fontFamily;
