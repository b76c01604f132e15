// The application: state, address, views, theme, and what the server reports.

// Sets of numbers as ranges, such as 1-4,9.
const toRanges = (numbers) => [...numbers].sort((a, b) => a - b).reduce((out, n) => {
	const last = out.at(-1);
	if (last?.[1] === n - 1) last[1] = n;
	else out.push([n, n]);
	return out;
}, []).map(([a, b]) => (a === b ? `${a}` : `${a}-${b}`)).join();
function fromRanges(text) {
	const out = new Set();
	for (const part of text.split(",")) {
		const [a, b = a] = part.split("-").map(Number);
		for (let i = a; i <= b && out.size < 1e5; i++) out.add(i);
	}
	return out;
}
const pairText = (pair) => pair.join("~");
function toPair(text) {
	const pair = text.split("~").map(Number);
	return pair[1] > pair[0] ? pair : null;
}
const sortText = ({ key, down }) => (down ? "-" : "") + key;
const toSort = (text) => ({ key: text.replace(/^-/, ""), down: text.startsWith("-") });

// The state: its value at first, its text in the address (if it has one), and back. Some belong to a run, some to others.
const STATE = {
	run: [() => null, String, String],
	compare: [() => [], (ids) => JSON.stringify(ids), toList],
	pair: [() => [], (ids) => JSON.stringify(ids), toList, "compare"],
	metric: [() => null, String, String, "others"],
	list: [() => ({}), sortText, toSort, "list"],
	q: [() => "rotation", String, String, "views"],
	scale: [() => null, String, (text) => (["linear", "log", "quantile"].includes(text) ? text : null), "views"],
	steps: [() => null, pairText, toPair, "run"],
	rows: [() => null, pairText, toPair, "run"],
	layers: [() => new Set(), toRanges, fromRanges, "run"],
	fold: [() => new Set(), (keys) => [...keys].join(), (text) => new Set(text.split(",")), "run"],
	open: [() => null, String, Number, "run"],
	shown: [() => null, (names) => names.join(), (text) => text.split(","), "run"],
	search: [() => "", String, String, "run"],
	sort: [() => ({ key: "layer", down: false }), sortText, toSort, "run"],
	find: [() => ""],
	checked: [() => new Set()],
};
function toList(text) {
	try {
		return JSON.parse(text).map(String);
	} catch {
		return [];
	}
}
const startState = () => Object.fromEntries(Object.entries(STATE).map(([key, [start]]) => [key, start()]));

function toHash(state) {
	const view = state.run != null ? "run" : state.compare.length ? "compare" : "list";
	const query = new URLSearchParams();
	for (const [key, [start, write, , where]] of Object.entries(STATE)) {
		const fits = !where || where === view || (where === "views" && view !== "list") || (where === "others" && view !== "run");
		const plain = (value) => (value instanceof Set ? [...value] : value);
		if (write && fits && !same(plain(state[key]), plain(start())) && !(key === "compare" && view === "run")) query.set(key, write(state[key]));
	}
	return query.toString();
}

function fromHash(text) {
	const state = startState();
	for (const [key, value] of new URLSearchParams(text.replace(/^#/, ""))) if (STATE[key]?.[2]) state[key] = STATE[key][2](value) ?? state[key];
	return state;
}

const app = {
	config: JSON.parse(document.getElementById("gyroscope").textContent),
	runs: [],
	state: startState(),
	view: null,

	// A sentence above the page; null takes it away.
	say(text) {
		const banner = document.getElementById("banner");
		banner.hidden = !text;
		refill(banner, text && [h("span", clean(text)), button("×", () => app.say(null), { label: "Dismiss", kind: "plain" })]);
	},

	// Change the state. Another view is a new entry of the history; the rest replaces the address.
	set(patch, push = false) {
		const changed = new Set(Object.keys(patch).filter((key) => app.state[key] !== patch[key] && (patch[key] instanceof Set || !same(app.state[key], patch[key]))));
		if (!changed.size) return;
		Object.assign(app.state, patch);
		if (push) location.hash = toHash(app.state);
		else {
			remember();
			app.view?.update(changed);
		}
	},
};

let remembering = null;
function remember() {
	clearTimeout(remembering);
	const before = location.hash;
	remembering = setTimeout(() => {
		if (location.hash !== before) return; // a link was followed, and its view is not open yet
		try {
			history.replaceState(null, "", `#${toHash(app.state)}`);
		} catch { /* a frame without an address of its own */ }
	}, 150);
}

// Light or dark: as the reader chose, else as the system says. Paper is light.
function themeButton() {
	const media = matchMedia("(prefers-color-scheme: dark)");
	let chosen = null;
	try { chosen = localStorage.getItem("gyroscope-theme"); } catch { /* storage is off */ }
	const wanted = () => chosen ?? (media.matches ? "dark" : "light");
	const toggle = button("", () => {
		chosen = wanted() === "dark" ? "light" : "dark";
		try { localStorage.setItem("gyroscope-theme", chosen); } catch { /* the choice lasts as long as the page */ }
		apply();
	});
	function apply(now = wanted()) {
		if (document.documentElement.dataset.theme === now) return;
		document.documentElement.dataset.theme = now;
		toggle.textContent = now === "dark" ? "☀" : "☾";
		toggle.title = now === "dark" ? "Use light colors" : "Use dark colors";
		toggle.setAttribute("aria-label", toggle.title);
		app.view?.redraw();
	}
	apply();
	media.addEventListener("change", () => apply());
	addEventListener("beforeprint", () => apply("light"));
	addEventListener("afterprint", () => apply());
	return toggle;
}

function fillTop(toggle) {
	const live = app.config.mode === "live";
	const several = live || app.runs.length > 1;
	const sound = app.runs.filter((run) => run.state !== "unreadable");
	const mark = svg("svg", { viewBox: "0 0 24 24", width: 20, height: 20, "aria-hidden": "true" }, svg("circle", { cx: 12, cy: 12, r: 10 }), svg("ellipse", { cx: 12, cy: 12, rx: 10, ry: 3.6 }), svg("ellipse", { cx: 12, cy: 12, rx: 3.6, ry: 10 }));
	refill(document.getElementById("top"), h("span.brand", mark, "gyroscope"), several && h("a", { href: "#", "aria-current": app.state.run == null && !app.state.compare.length ? "page" : null }, "Runs"),
		several && app.state.run != null && select("Run", sound.map((run) => [run.id, shorten(clean(run.name), 60)]), app.state.run, (run) => app.set({ ...startState(), q: app.state.q, scale: app.state.scale, run }, true)), h("span.grow"), live && h("span.live", { id: "live" }, "live"), toggle);
}

async function start() {
	const { config } = app;
	const toggle = themeButton();
	document.body.append(tip.node);
	app.source = config.mode === "live" ? liveSource() : embeddedSource(config);
	const main = document.getElementById("main");
	document.getElementById("foot").textContent = `gyroscope ${config.version}${config.made ? ` · made ${new Date(config.made).toLocaleString([], { dateStyle: "medium", timeStyle: "short" })}` : ""}`;
	let turn = 0;

	// Show the view that the address asks for.
	async function route() {
		const mine = ++turn;
		const old = app.state;
		const state = (app.state = { ...fromHash(location.hash), checked: old.checked, find: old.find });
		const [only] = app.runs;
		if (state.run == null && !state.compare.length && app.runs.length === 1 && config.mode !== "live" && only.state !== "unreadable") state.run = only.id;
		const chosen = app.runs.filter((run) => state.compare.includes(run.id));
		app.say(null);
		let view = state.run != null ? createRunPage(app, state.run) : chosen.length > 1 ? createCompare(app, chosen) : createRuns(app);
		try {
			await view.ready();
		} catch (error) {
			if (mine !== turn) return;
			state.run = null;
			view = createRuns(app);
			app.say(wordsOf(error, "This run cannot be shown: its data are not what the page expects."));
		}
		if (mine !== turn) return;
		fillTop(toggle);
		app.view?.destroy();
		app.view = view;
		tip.hide();
		main.replaceChildren(view.node);
		document.title = `${view.model ? `${clean(view.model.head.name)} · ` : ""}${clean(config.title || "gyroscope")}`;
		if (old.run !== state.run) scrollTo(0, 0);
		if (mine > 1) main.focus({ preventScroll: true });
		await view.shown();
	}

	const readRuns = async () => { app.runs = await app.source.runs(); };
	let failed = null;
	await readRuns().catch((error) => (failed = error));
	addEventListener("hashchange", route);
	let width = innerWidth;
	addEventListener("resize", eachFrame(() => {
		if (innerWidth !== width) app.view?.resize();
		width = innerWidth;
	}));
	await route();
	if (failed) app.say(wordsOf(failed));
	app.source.follow(createFollower(readRuns));
}

function wordsOf(error, otherwise = "The data are not what the page expects.") {
	if (error instanceof SourceError) return error.message;
	console.error(error);
	return otherwise;
}

// Wait until no button is pressed: a link that is replaced between press and release is not followed.
let pressed = false;
for (const [kind, down] of [["pointerdown", true], ["pointerup", false], ["pointercancel", false], ["dragend", false]]) addEventListener(kind, () => { pressed = down; }, true);
async function released() {
	// The click comes after the release, and a release outside of the window is not reported.
	for (let i = 0; !i || (pressed && i < 250); i++) await new Promise((go) => setTimeout(go, 20));
}

// What the server reports: changed runs are read again, one after the other, and at most about twice per second.
function createFollower(readRuns) {
	let [waiting, busy] = [null, false];
	async function work() {
		if (busy || !waiting) return;
		busy = true;
		const { runs, all } = waiting;
		waiting = null;
		try {
			await readRuns();
			await released();
			const { run } = app.state;
			if (run != null && !app.runs.some((one) => one.id === run)) app.say("This run was deleted or moved. Shown is what was read last.");
			else if (run == null || all || runs.has(run)) await app.view.changed(runs);
		} catch (error) {
			app.say(`${wordsOf(error)} Shown is what was read last.`);
		}
		setTimeout(() => { busy = false; work(); }, 400);
	}
	return (change) => {
		const light = document.getElementById("live");
		if (change.gone != null) {
			light?.classList.toggle("gone", change.gone);
			if (light) light.textContent = change.gone ? "offline" : "live";
			return app.say(change.gone ? "The server does not answer. Shown is what was read last; the page tries again every two seconds." : null);
		}
		if (change.refused) return app.say(change.refused);
		waiting = { runs: new Set([...(waiting?.runs ?? []), ...(change.runs ?? [])]), all: waiting?.all || change.all };
		work();
	};
}

const ready = start();
ready.catch((error) => app.say(wordsOf(error, "This page cannot be shown: its data are not what it expects.")));

// For tests: what is shown.
window.gyroscope = {
	ready,
	view: () => JSON.parse(JSON.stringify(app.state, (_, value) => (value instanceof Set ? [...value] : value))),
	// The bin {first, last, mean, min, max} shown for a layer (its name or place) at a step; null where there is none.
	async value(layer, step, quantity) {
		const { model } = app.view;
		const place = typeof layer === "number" ? layer : model.head.layers.findIndex((one) => one.name === layer);
		const frame = await model.load(quantity);
		const t = frame.first.findIndex((first, i) => first <= step && step <= frame.last[i]);
		const at = place * frame.bins + t;
		return t < 0 ? null : { first: frame.first[t], last: frame.last[t], mean: frame.mean[at], min: frame.min[at], max: frame.max[at] };
	},
	heatmap: Object.fromEntries(["cellAt", "geometry", "redrawMs", "hoverMs"].map((name) => [name, (...given) => app.view.heat?.[name](...given)])),
};
