// The application: state, address, views, theme, and what the server reports.

const START = () => ({ run: null, compare: [], pair: [], metric: null, q: "rotation", scale: null, steps: null, rows: null, layers: new Set(), fold: new Set(), open: null, shown: null, search: "", sort: { key: "layer", down: false }, list: { key: null, down: false }, find: "", checked: new Set() });

// Ranges such as 1-4,9 for sets of numbers.
function toRanges(numbers) {
  const sorted = [...numbers].sort((a, b) => a - b);
  const out = [];
  for (let i = 0, j; i < sorted.length; i = j) {
    for (j = i + 1; j < sorted.length && sorted[j] === sorted[j - 1] + 1; j++);
    out.push(j - i > 1 ? `${sorted[i]}-${sorted[j - 1]}` : `${sorted[i]}`);
  }
  return out.join(",");
}
function fromRanges(text) {
  const out = new Set();
  for (const part of text.split(",")) {
    const [a, b] = part.split("-").map(Number);
    for (let i = a; i <= (b ?? a) && out.size < 1e5; i++) out.add(i);
  }
  return out;
}

function toHash(state) {
  const q = new URLSearchParams();
  if (state.run != null) q.set("run", state.run);
  else for (const id of state.compare) q.append("compare", id);
  if (state.run != null || state.compare.length) {
    if (state.q && state.q !== "rotation") q.set("q", state.q);
    if (state.scale) q.set("scale", state.scale);
  }
  if (state.run != null) {
    if (state.steps) q.set("steps", state.steps.join("~"));
    if (state.rows) q.set("rows", state.rows.join("~"));
    if (state.layers.size) q.set("layers", toRanges(state.layers));
    if (state.fold.size) q.set("fold", [...state.fold].join(","));
    if (state.open != null) q.set("open", state.open);
    if (state.shown) q.set("shown", [...state.shown].join(","));
    if (state.search) q.set("search", state.search);
    if (state.sort.key !== "layer" || state.sort.down) q.set("sort", (state.sort.down ? "-" : "") + state.sort.key);
  } else {
    for (const id of state.pair) q.append("pair", id);
    if (state.metric) q.set("metric", state.metric);
    if (state.list.key && !state.compare.length) q.set("list", (state.list.down ? "-" : "") + state.list.key);
  }
  return q.toString();
}

function fromHash(text) {
  const q = new URLSearchParams(text.replace(/^#/, ""));
  const state = START();
  const pair = (key) => {
    const range = q.get(key)?.split("~").map(Number);
    return range?.length === 2 && range.every(Number.isFinite) && range[1] > range[0] ? range : null;
  };
  const order = (key, otherwise) => (q.has(key) ? { key: q.get(key).replace(/^-/, ""), down: q.get(key).startsWith("-") } : otherwise);
  state.run = q.get("run");
  state.compare = q.getAll("compare");
  state.pair = q.getAll("pair");
  state.metric = q.get("metric");
  state.q = q.get("q") ?? "rotation";
  state.scale = ["linear", "log", "quantile"].includes(q.get("scale")) ? q.get("scale") : null;
  state.steps = pair("steps");
  state.rows = pair("rows");
  if (q.get("layers")) state.layers = fromRanges(q.get("layers"));
  if (q.get("fold")) state.fold = new Set(q.get("fold").split(",").filter((part) => /^\d+-\d+$/.test(part)));
  state.open = /^\d+$/.test(q.get("open") ?? "") ? Number(q.get("open")) : null;
  state.shown = q.has("shown") ? new Set(q.get("shown").split(",").filter(Boolean)) : null;
  state.search = q.get("search") ?? "";
  state.sort = order("sort", state.sort);
  state.list = order("list", state.list);
  return state;
}

const remembered = {
  get: (key) => { try { return localStorage.getItem(key); } catch { return null; } },
  set: (key, value) => { try { localStorage.setItem(key, value); } catch { /* storage is off: the choice lasts as long as the page */ } },
};

function startTheme(redraw) {
  const media = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  let chosen = remembered.get("gyroscope-theme");
  const apply = (theme) => {
    root.dataset.theme = theme;
    toggle.textContent = theme === "dark" ? "☀" : "☾";
    toggle.setAttribute("aria-label", theme === "dark" ? "Use light colors" : "Use dark colors");
    toggle.title = toggle.getAttribute("aria-label");
  };
  const wanted = () => chosen ?? (media.matches ? "dark" : "light");
  const toggle = el("button", { type: "button", class: "theme", onclick: () => {
    chosen = wanted() === "dark" ? "light" : "dark";
    remembered.set("gyroscope-theme", chosen);
    apply(chosen);
    redraw();
  } });
  apply(wanted());
  media.addEventListener("change", () => { if (!chosen) { apply(wanted()); redraw(); } });
  addEventListener("beforeprint", () => { if (wanted() === "dark") { apply("light"); redraw(); } });
  addEventListener("afterprint", () => { if (wanted() === "dark") { apply("dark"); redraw(); } });
  return toggle;
}

const app = {
  config: JSON.parse(document.getElementById("gyroscope").textContent),
  source: null,
  runs: [],
  state: START(),
  view: null,

  // A sentence above the page; null takes it away.
  say(text, kind = "") {
    const banner = document.getElementById("banner");
    banner.hidden = !text;
    banner.className = kind;
    banner.replaceChildren(...(text ? [el("span", { text: clean(text) }), button("×", "Dismiss", () => app.say(null), { class: "plain" })] : []));
  },

  // Change the state. A new view is a new entry of the history; the rest replaces the address.
  set(patch, push = false) {
    const changed = new Set();
    for (const [key, value] of Object.entries(patch)) {
      if (app.state[key] === value || (Array.isArray(value) && sameValue(app.state[key], value))) continue;
      app.state[key] = value;
      changed.add(key);
    }
    if (!changed.size) return;
    if (push) return void (location.hash = toHash(app.state));
    app.remember();
    app.view?.update(changed);
  },

  remember: (() => {
    let timer = null;
    return () => {
      clearTimeout(timer);
      timer = setTimeout(() => {
        try {
          history.replaceState(null, "", `#${toHash(app.state)}`);
        } catch { /* a frame without an address of its own */ }
      }, 150);
    };
  })(),
};

function fillTop(toggle) {
  const mark = svg("svg", { viewBox: "0 0 24 24", width: 20, height: 20, "aria-hidden": "true" }, svg("circle", { cx: 12, cy: 12, r: 10 }), svg("ellipse", { cx: 12, cy: 12, rx: 10, ry: 3.6 }), svg("ellipse", { cx: 12, cy: 12, rx: 3.6, ry: 10 }), svg("circle", { cx: 12, cy: 12, r: 1.6, class: "dotted" }));
  const several = app.runs.length > 1 || app.config.mode === "live";
  const readable = app.runs.filter((run) => run.state !== "unreadable");
  const top = document.getElementById("top");
  const home = el(several ? "a" : "span", { class: "brand", href: several ? "#" : null, "aria-label": several ? "gyroscope: list of runs" : null }, mark, "gyroscope");
  const picker = several && app.state.run != null && readable.length ? select("Run", readable.map((run) => ({ value: run.id, text: shorten(clean(run.name), 60) })), app.state.run, (id) => app.set({ run: id, steps: null, rows: null, layers: new Set(), fold: new Set(), open: null, search: "" }, true)) : null;
  top.replaceChildren(home, several ? el("a", { href: "#", text: "Runs", "aria-current": app.state.run == null && !app.state.compare.length ? "page" : null }) : "", picker ?? "", el("span", { class: "grow" }), app.config.mode === "live" ? el("span", { class: "live", id: "live" }, "live") : "", toggle);
}

async function start() {
  const { config } = app;
  const toggle = startTheme(() => { if (app.view) app.view.redraw(); });
  document.body.append(tip.node);
  app.source = openSource(config);
  const main = document.getElementById("main");
  const made = config.made ? ` · made ${new Date(config.made).toLocaleString([], { dateStyle: "medium", timeStyle: "short" })}` : "";
  document.getElementById("foot").textContent = `gyroscope ${config.version}${config.mode === "live" ? "" : made}`;
  let turn = 0;

  async function route() {
    const mine = ++turn;
    const kept = app.state;
    app.state = fromHash(location.hash);
    Object.assign(app.state, { checked: kept.checked, find: kept.find });
    if (app.state.run == null && !app.state.compare.length && app.runs.length === 1 && config.mode !== "live" && app.runs[0].state !== "unreadable") app.state.run = app.runs[0].id;
    fillTop(toggle);
    const chosen = app.runs.filter((run) => app.state.compare.includes(run.id));
    let view = app.state.run != null ? createRunPage(app, app.state.run) : chosen.length > 1 ? createCompare(app, chosen) : createRuns(app);
    app.say(null);
    try {
      if (app.state.run != null) await view.ready();
    } catch (error) {
      if (mine !== turn) return;
      if (!(error instanceof SourceError)) console.error(error);
      view = createRuns(app);
      app.state.run = null;
      app.say(error instanceof SourceError ? error.message : "This run cannot be shown: its data are not what the page expects.", "error");
    }
    if (mine !== turn) return;
    app.view?.destroy();
    tip.hide();
    app.view = view;
    main.replaceChildren(view.node);
    document.title = `${view.model ? `${clean(view.model.head.name)} · ` : ""}${clean(config.title || "gyroscope")}`;
    if (app.state.run == null) await view.ready();
    else await view.shown();
    if (kept.run !== app.state.run) scrollTo(0, 0);
  }

  async function readRuns() {
    app.runs = await app.source.runs();
  }

  try {
    await readRuns();
  } catch (error) {
    document.getElementById("loading")?.remove();
    app.say(error.message, "error");
  }
  addEventListener("hashchange", () => {
    if (location.hash.replace(/^#/, "") !== toHash(app.state) || !app.view) route();
    else route();
  });
  let width = innerWidth;
  addEventListener("resize", eachFrame(() => {
    if (innerWidth === width) return;
    width = innerWidth;
    app.view?.resize();
  }));
  await route();
  app.source.follow(createFollower(readRuns, route));
}

// What the server reports: changed runs are read again, one after the other, and at most twice per second.
function createFollower(readRuns, route) {
  let waiting = null;
  let busy = false;
  async function work() {
    if (busy || !waiting) return;
    busy = true;
    const change = waiting;
    waiting = null;
    try {
      await readRuns();
      const { run } = app.state;
      if (run == null) await app.view.changed();
      else if (change.all || change.runs.includes(run) || change.list) {
        if (!app.runs.some((one) => one.id === run)) app.say("This run was deleted or moved. Shown is what was read last.", "error");
        else await app.view.changed();
      }
    } catch (error) {
      if (!(error instanceof SourceError)) console.error(error);
      app.say(error instanceof SourceError ? `${error.message} Shown is what was read last.` : "The newest data cannot be shown.", "error");
    }
    setTimeout(() => { busy = false; work(); }, 400);
  }
  return (change) => {
    const light = document.getElementById("live");
    if ("gone" in change) {
      light?.classList.toggle("gone", change.gone);
      if (light) light.textContent = change.gone ? "offline" : "live";
      app.say(change.gone ? "The server does not answer. Shown is what was read last; the page tries again every two seconds." : null, "error");
      return;
    }
    if (change.refused) return app.say(change.refused, "error");
    waiting = { runs: [...(waiting?.runs ?? []), ...(change.runs ?? [])], list: waiting?.list || change.list, all: waiting?.all || change.all };
    work();
  };
}

const ready = start();
window.gyroscope = {
  ready,
  view: () => ({ ...app.state, layers: [...app.state.layers], fold: [...app.state.fold], shown: app.state.shown && [...app.state.shown], checked: [...app.state.checked] }),
  // The value that is shown for a layer (its name or place) at a step; null where there is none.
  async value(layer, step, quantity) {
    const { model } = app.view;
    const place = typeof layer === "number" ? layer : model.head.layers.findIndex((one) => one.name === layer);
    const frame = await model.load(quantity);
    for (let t = 0; t < frame.bins; t++) if (frame.first[t] <= step && step <= frame.last[t]) {
      const at = place * frame.bins + t;
      return { first: frame.first[t], last: frame.last[t], mean: frame.mean[at], min: frame.min[at], max: frame.max[at] };
    }
    return null;
  },
  heatmap: {
    cellAt: (x, y) => app.view.parts?.heat.cellAt(x, y) ?? null,
    redrawMs: (times) => app.view.parts.heat.redrawMs(times),
    hoverMs: (times) => app.view.parts.heat.hoverMs(times),
    geometry: () => app.view.parts.heat.geometry(),
  },
};
ready.catch((error) => {
  console.error(error);
  app.say("This page cannot be shown: its data are not what it expects.", "error");
});
