// Where the data come from: embedded in the document (a report) or a server (a live page). Both have one interface.

class SourceError extends Error {
  constructor(sentence, status = 0) {
    super(sentence);
    this.status = status;
  }
}

const openSource = (config) => (config.mode === "live" ? liveSource() : embeddedSource(config));

function embeddedSource(config) {
  const parsed = new Promise((resolve) => {
    if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", resolve, { once: true });
    else resolve();
  });
  const heads = new Map();
  async function text(id) {
    await parsed;
    const node = document.getElementById(id);
    if (!node) throw new SourceError("This file does not hold the data of the run: it may be truncated. Make the report again.");
    return node.textContent;
  }
  async function run(id) {
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
    windows: false,
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
    let sentence;
    try {
      sentence = (await answer.json()).error;
    } catch { /* the answer of a proxy is not JSON */ }
    throw new SourceError(sentence || `The server answered with status ${answer.status}.`, answer.status);
  }
  const home = (id) => `api/run/${encodeURIComponent(id)}`;
  return {
    runs: async () => (await ask("api/runs")).json(),
    run: async (id) => (await ask(home(id))).json(),
    async series(id, quantity, { bins = 512, from, to } = {}) {
      const query = new URLSearchParams({ bins });
      if (from != null) query.set("from", Math.floor(from));
      if (to != null) query.set("to", Math.ceil(to));
      const answer = await ask(`${home(id)}/series/${encodeURIComponent(quantity)}?${query}`);
      return decodeFrame(new Uint8Array(await answer.arrayBuffer()));
    },
    follow: (callback) => followServer(ask, callback),
    windows: true,
    sample: async (id, steps) => {
      await ask(`${home(id)}/sample`, { method: "POST", headers: { "X-Gyroscope": "1", "Content-Type": "application/json" }, body: JSON.stringify({ steps }) });
    },
  };
}

// Server-sent events; where they do not come through (a proxy, a server that restarts), ask every second or so.
function followServer(ask, callback) {
  let open = false;
  let gone = false;
  let polls = 0;
  let since = null;
  const say = (nowGone) => {
    if (nowGone !== gone) callback({ gone: (gone = nowGone) });
  };
  async function poll() {
    if (open) return (polls = 0);
    try {
      const query = since == null ? "0" : String(since);
      const changes = await (await ask(`api/changes?since=${query}`, { headers: { Accept: "application/json" } })).json();
      const back = gone;
      say(false);
      if (back || since == null) callback({ runs: [], list: true, all: true });
      else if (changes.runs.length || changes.list) callback(changes);
      since = changes.now;
    } catch (error) {
      if (error.status === 0 || error.status >= 500) say(true);
      else callback({ refused: error.message });
    }
    setTimeout(poll, gone ? 2000 : 1000);
  }
  function listen() {
    const events = new EventSource("api/changes");
    events.onopen = () => {
      const back = gone || polls;
      open = true;
      say(false);
      if (back) callback({ runs: [], list: true, all: true });
    };
    events.onmessage = (event) => callback(JSON.parse(event.data));
    events.onerror = () => {
      open = false;
      since = null;
      if (!polls++) setTimeout(poll, 500);
      if (events.readyState === EventSource.CLOSED) setTimeout(listen, 5000);
    };
  }
  listen();
}

// Decode a frame: see the contract of the format in page/data.py. Values are layer-major; NaN where unknown.
async function decodeFrame(packed) {
  if (typeof DecompressionStream === "undefined") {
    throw new SourceError("This browser cannot unpack the measurements: it has no DecompressionStream. Use Chrome 80, Firefox 113, Safari 16.4, or a newer one.");
  }
  let buffer;
  try {
    buffer = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
  } catch {
    throw new SourceError("The measurements cannot be unpacked: the data are damaged.");
  }
  const size = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
  const { layers, bins, exact } = header;
  const count = layers * bins;
  let at = Math.ceil((4 + size) / 8) * 8;
  const take = (Kind, length) => {
    const array = new Kind(buffer, at, length);
    at += array.byteLength;
    return array;
  };
  const frame = { quantity: header.quantity, layers, bins, exact, clipped: header.clipped, first: take(Float64Array, bins), last: take(Float64Array, bins) };
  if (header.encoding === "float32") {
    frame.mean = take(Float32Array, count);
    frame.min = exact ? frame.mean : take(Float32Array, count);
    frame.max = exact ? frame.mean : take(Float32Array, count);
    frame.precision = "float32";
  } else {
    const values = new Float32Array(4096);
    const { low, high } = header;
    for (let c = 1; c < 4096; c++) values[c] = header.scale === "log" ? low * (high / low) ** ((c - 1) / 4094) : low + ((c - 1) / 4094) * (high - low);
    values[0] = NaN;
    const plane = () => [take(Uint8Array, count), take(Uint8Array, count)];
    const codes = new Uint16Array(count);
    const [small, large] = plane();
    frame.mean = new Float32Array(count);
    for (let l = 0, i = 0; l < layers; l++) {
      for (let t = 0, code = 0; t < bins; t++, i++) {
        code = (code + small[i] + (large[i] << 8)) & 65535;
        codes[i] = code;
        frame.mean[i] = values[code];
      }
    }
    for (const [key, sign] of exact ? [] : [["min", -1], ["max", 1]]) {
      const [less, more] = plane();
      const out = (frame[key] = new Float32Array(count));
      for (let i = 0; i < count; i++) out[i] = values[codes[i] + sign * (less[i] + (more[i] << 8))];
    }
    if (exact) frame.min = frame.max = frame.mean;
    frame.precision = header.scale === "log" ? `to ${(100 * (Math.exp(Math.log(high / low) / 8188) - 1)).toPrecision(1)} %` : `to ${number((high - low) / 8188, 2)}`;
  }
  return frame;
}

// The bin of a frame that holds a step; −1 outside. Between two bins, the nearer one.
function binAt(frame, step) {
  const edges = edgesOf(frame);
  if (!frame.bins || step < edges[0] || step > edges[frame.bins]) return -1;
  let low = 0;
  let high = frame.bins - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (edges[middle] <= step) low = middle;
    else high = middle - 1;
  }
  return low;
}

// Edges between the bins, half-way between the last step of one and the first step of the next.
function edgesOf(frame) {
  if (frame.edges) return frame.edges;
  const { first, last, bins } = frame;
  const edges = new Float64Array(bins + 1);
  for (let t = 1; t < bins; t++) edges[t] = (last[t - 1] + first[t]) / 2;
  if (bins) {
    const half = bins > 1 ? Math.min((last[bins - 1] - first[0]) / (bins - 1) / 2, (edges[1] - first[0]) || 0.5) : 0.5;
    edges[0] = first[0] - half;
    edges[bins] = last[bins - 1] + half;
  }
  return (frame.edges = edges);
}
