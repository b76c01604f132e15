// Where the data come from: embedded in the document (a report) or a server (a live page). Both have one interface.

class SourceError extends Error {
	constructor(sentence, status = 0) {
		super(sentence);
		this.status = status;
	}
}

function embeddedSource(config) {
	const parsed = new Promise((resolve) => (document.readyState === "loading" ? document.addEventListener("DOMContentLoaded", resolve) : resolve()));
	const heads = new Map();
	async function text(id) {
		await parsed;
		const node = document.getElementById(id);
		if (!node) throw new SourceError("This file does not hold the data of the run: it may be truncated. Make the report again.");
		return node.textContent;
	}
	async function run(id) {
		const broken = config.runs.find((one) => one.id === id)?.error;
		if (broken) throw new SourceError(broken);
		if (!heads.has(id)) heads.set(id, JSON.parse(await text(`run-${id}`)));
		return heads.get(id);
	}
	return {
		runs: async () => config.runs,
		run,
		async series(id, quantity) {
			const place = (await run(id)).quantities.findIndex((one) => one.name === quantity);
			return decodeFrame(fromBase64(await text(`run-${id}-${place}`)));
		},
		follow() {},
		sample: null,
	};
}

function fromBase64(text) {
	if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
	const raw = atob(text);
	const bytes = new Uint8Array(raw.length);
	for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
	return bytes;
}

function liveSource() {
	async function ask(path, options) {
		let answer;
		try {
			answer = await fetch(path, options);
		} catch {
			throw new SourceError("The server does not answer.");
		}
		if (answer.ok) return answer;
		const said = await answer.json().catch(() => ({})); // the answer of a proxy is not JSON
		throw new SourceError(said.error ?? `The server answered with status ${answer.status}.`, answer.status);
	}
	const home = (id) => `api/run/${encodeURIComponent(id)}`;
	return {
		windows: true,
		runs: async () => (await ask("api/runs")).json(),
		run: async (id) => (await ask(home(id))).json(),
		async series(id, quantity, { bins = 512, from, to } = {}) {
			const query = new URLSearchParams({ bins });
			if (from != null) query.set("from", Math.floor(from));
			if (to != null) query.set("to", Math.ceil(to));
			const answer = await ask(`${home(id)}/series/${encodeURIComponent(quantity)}?${query}`);
			return decodeFrame(await answer.arrayBuffer());
		},
		sample: (id, steps) => ask(`${home(id)}/sample`, { method: "POST", headers: { "X-Gyroscope": "1", "Content-Type": "application/json" }, body: JSON.stringify({ steps }) }),
		follow: (callback) => followServer(ask, callback),
	};
}

// Server-sent events; where they do not come through (a proxy, a server that restarts), ask every second.
function followServer(ask, callback) {
	let [open, gone, polling, since] = [false, false, false, null];
	const say = (now) => {
		if (now !== gone) callback({ gone: (gone = now) });
	};
	async function poll() {
		if (open || document.hidden) return (polling = false);
		try {
			const changes = await (await ask(`api/changes?since=${since ?? 0}`, { headers: { Accept: "application/json" } })).json();
			if (gone || since == null) callback({ all: true });
			else if (changes.runs.length || changes.list) callback(changes);
			say(false);
			since = changes.now;
		} catch (error) {
			if (error.status && error.status < 500) callback({ refused: error.message });
			else say(true);
		}
		setTimeout(poll, gone ? 2000 : 1000);
	}
	let events = null;
	function fallBack(delay) {
		if (!polling) setTimeout(poll, delay);
		polling = true;
	}
	function listen() {
		if (document.hidden || events) return;
		events = new EventSource("api/changes");
		events.onopen = () => {
			if (gone || polling) callback({ all: true });
			open = true;
			say(false);
		};
		events.onmessage = (event) => callback(JSON.parse(event.data));
		events.onerror = () => {
			open = false;
			since = null;
			fallBack(700);
			if (events?.readyState !== EventSource.CLOSED) return;
			events = null;
			setTimeout(listen, 5000);
		};
		setTimeout(() => { if (!open) fallBack(0); }, 3000); // some proxies keep an answer back until it is complete
	}
	// Browsers open six connections to a server at most, so pages that nobody sees hold none.
	document.addEventListener("visibilitychange", () => {
		if (document.hidden) {
			events?.close();
			events = null;
			open = false;
		} else {
			listen();
			callback({ all: true });
		}
	});
	listen();
}

// Decode a frame; page/frames.py describes the format. Values are layer-major, NaN where unknown.
async function decodeFrame(packed) {
	if (typeof DecompressionStream === "undefined")
		throw new SourceError("This browser cannot unpack the measurements: it has no DecompressionStream. Use Chrome 80, Firefox 113, Safari 16.4 or a newer one.");
	const buffer = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer()
		.catch(() => { throw new SourceError("The measurements cannot be unpacked: the data are damaged."); });
	const size = new DataView(buffer).getUint32(0, true);
	const { quantity, layers, bins, exact, clipped, encoding, scale, low, high } = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
	const count = layers * bins;
	let at = Math.ceil((4 + size) / 8) * 8;
	const take = (Kind, length) => {
		const array = new Kind(buffer, at, length);
		at += array.byteLength;
		return array;
	};
	const frame = { quantity, layers, bins, exact, clipped, first: take(Float64Array, bins), last: take(Float64Array, bins), precision: "" };
	if (encoding === "float32") for (const key of exact ? ["mean"] : ["mean", "min", "max"]) frame[key] = take(Float32Array, count);
	else {
		const log = scale === "log";
		const values = Float32Array.from({ length: 4096 }, (_, c) => (c === 0 ? NaN : log ? low * (high / low || 1) ** ((c - 1) / 4094) : low + ((c - 1) / 4094) * (high - low)));
		const codes = new Uint16Array(count);
		const plane = (key, act) => act(take(Uint8Array, count), take(Uint8Array, count), (frame[key] = new Float32Array(count)));
		plane("mean", (less, more, out) => {
			for (let l = 0, i = 0; l < layers; l++) for (let t = 0, code = 0; t < bins; t++, i++) {
				code = (code + less[i] + (more[i] << 8)) & 65535;
				codes[i] = code;
				out[i] = values[code];
			}
		});
		for (const [key, sign] of exact ? [] : [["min", -1], ["max", 1]]) plane(key, (less, more, out) => {
			for (let i = 0; i < count; i++) out[i] = values[codes[i] + sign * (less[i] + (more[i] << 8))];
		});
		frame.precision = log ? `to ${number(100 * (Math.exp(Math.log(high / low) / 8188) - 1), 1)} %` : `to ${number((high - low) / 8188, 1)}`;
	}
	if (exact) frame.min = frame.max = frame.mean;
	frame.edges = edgesOf(frame);
	frame.centers = Array.from(frame.first, (a, t) => (a + frame.last[t]) / 2);
	return frame;
}

// Edges between the bins, half-way between the last step of one and the first step of the next.
function edgesOf({ first, last, bins }) {
	const edges = new Float64Array(bins + 1);
	for (let t = 1; t < bins; t++) edges[t] = (last[t - 1] + first[t]) / 2;
	if (!bins) return edges;
	edges[0] = first[0] - (bins > 1 ? (first[1] - last[0]) / 2 : 0.5);
	edges[bins] = last[bins - 1] + (bins > 1 ? (first[bins - 1] - last[bins - 2]) / 2 : 0.5);
	return edges;
}

// The bin at a step, the nearer one between two; −1 outside.
function binAt({ edges, bins }, step) {
	if (!bins || !(step >= edges[0] && step <= edges[bins])) return -1;
	let [low, high] = [0, bins - 1];
	while (low < high) {
		const middle = (low + high + 1) >> 1;
		if (edges[middle] <= step) low = middle;
		else high = middle - 1;
	}
	return low;
}
