// The list of runs.

const STATES = { running: "running", ended: "ended", interrupted: "interrupted", unreadable: "unreadable" };
const stateTag = (state) => el("span", { class: `state ${Object.hasOwn(STATES, state) ? state : ""}`, text: clean(state) });

const mainAccuracy = (run) => {
  const name = accuracyNames([run])[0];
  return name == null ? null : { name, value: run.accuracies[name] };
};

const RUN_COLUMNS = [
  ["name", "run", (run) => run.name.toLowerCase(), ""],
  ["state", "state", (run) => run.state, ""],
  ["findings", "findings", (run) => (run.findings?.serious ?? 0) * 1e6 + (run.findings?.warning ?? 0) * 1e3 + (run.findings?.note ?? 0), ""],
  ["model", "model", (run) => run.model ?? "", "wide"],
  ["layers", "layers", (run) => run.layers, "number wide"],
  ["steps", "steps", (run) => run.steps, "number"],
  ["loss", "loss", (run) => run.loss, "number"],
  ["accuracy", "accuracy", (run) => mainAccuracy(run)?.value, "number"],
  ["rotation", "rotation", (run) => run.rotation?.[1], "number"],
  ["course", "over time", null, "course"],
  ["started", "started", (run) => run.started, "wide"],
];

function runRow(app, run, highest) {
  const accuracy = mainAccuracy(run);
  const box = el("input", { type: "checkbox", "aria-label": `Compare ${clean(run.name)}`, disabled: run.state === "unreadable", checked: app.state.checked.has(run.id), onchange: () => {
    const next = new Set(app.state.checked);
    if (!next.delete(run.id)) next.add(run.id);
    app.set({ checked: next });
  } });
  const name = run.state === "unreadable" ? el("span", { text: clean(run.name) }) : el("a", { href: `#run=${encodeURIComponent(run.id)}`, text: clean(run.name) });
  const found = Object.entries(run.findings ?? {}).filter(([, n]) => n);
  const cells = [
    el("th", { scope: "row", class: "name" }, name, run.error ? el("p", { class: "error", text: clean(run.error) }) : null),
    el("td", {}, stateTag(run.state)),
    el("td", {}, found.length ? found.map(([severity, n]) => badge(severity, n)) : el("span", { class: "muted", text: run.state === "unreadable" ? "" : "none" })),
    el("td", { class: "wide", text: run.model == null ? "–" : clean(run.model) }),
    el("td", { class: "number wide", text: whole(run.layers) }),
    el("td", { class: "number", title: `${whole(run.measured)} of them measured`, text: whole(run.steps) }),
    el("td", { class: "number", text: run.loss == null ? "–" : number(run.loss, 3) }),
    el("td", { class: "number", title: accuracy ? clean(accuracy.name) : null, text: accuracy ? percent(accuracy.value) : "–" }),
    el("td", { class: "number", title: run.rotation ? `from ${number(run.rotation[0], 3)} to ${number(run.rotation[2], 3)}` : null, text: run.rotation ? number(run.rotation[1], 3) : "–" }),
    el("td", { class: "course" }, run.sparkline?.length ? sparkline(run.sparkline, { low: 0, high: highest, label: "mean rotation over time" }) : null),
    el("td", { class: "wide muted", text: run.started == null ? "–" : new Date(run.started * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" }) }),
  ];
  return el("tr", { "data-run": run.id, class: app.state.checked.has(run.id) ? "selected" : "" }, el("td", { class: "check" }, box), ...cells);
}

function createRuns(app) {
  const node = el("div", { class: "page" });
  const search = el("input", { type: "search", placeholder: "run name", "aria-label": "Search runs by text or pattern", oninput: () => app.set({ find: search.value }) });
  const tools = el("div", { class: "tools" });
  const head = el("tr");
  const body = el("tbody");
  const table = el("div", { class: "scroll-x", tabindex: 0, role: "region", "aria-label": "Table of runs" }, el("table", { class: "runs" }, el("caption", { class: "hidden", text: "Runs" }), el("thead", {}, head), body));
  const about = (app.config.about ?? []).map((text) => el("p", { class: "about", text }));
  const empty = el("p", { class: "muted" });
  const scatter = el("div");
  node.append(el("section", { class: "run-head" }, el("h1", { text: clean(app.config.title || "Runs") }), ...about), el("section", { class: "panel", "aria-labelledby": "runs-title" }, el("div", { class: "row head" }, el("h2", { id: "runs-title", text: "Runs" }), explain("runs")), tools, table, empty), scatter, glossaryPanel());

  function update() {
    const { key, down } = app.state.list;
    const column = RUN_COLUMNS.find(([name]) => name === key) ?? RUN_COLUMNS[0];
    const match = app.state.find ? glob(app.state.find) : () => true;
    const runs = app.runs.filter((run) => match(run.name));
    if (key) runs.sort((one, two) => {
      const [a, b] = [column[2](one), column[2](two)];
      if (a == null || b == null) return (a == null) - (b == null);
      return (a < b ? -1 : a > b ? 1 : 0) * (down ? -1 : 1);
    });
    const focused = node.contains(document.activeElement) ? document.activeElement : null;
    const where = focused && [focused.closest("tr")?.dataset.run, focused.dataset.key, focused.tagName];
    head.replaceChildren(el("td", { class: "check" }), ...RUN_COLUMNS.map(([name, text, value, kind]) => el("th", { scope: "col", class: kind, "aria-sort": name === key ? (down ? "descending" : "ascending") : null }, value ? el("button", { type: "button", "data-key": name, onclick: () => app.set({ list: { key: name, down: name === key ? !down : kind.includes("number") } }) }, text, el("span", { class: "arrow", "aria-hidden": "true", text: name === key ? (down ? " ↓" : " ↑") : "" })) : text)));
    const highest = Math.max(1e-9, ...app.runs.flatMap((run) => (run.sparkline ?? []).filter((v) => v != null)));
    body.replaceChildren(...runs.map((run) => runRow(app, run, highest)));
    table.hidden = !app.runs.length;
    empty.textContent = app.runs.length ? (runs.length ? "" : "No run matches the search.") : app.config.mode === "live" ? "There are no runs in this folder yet. A run appears here as soon as a training writes its first step." : "This report holds no runs.";
    const chosen = app.runs.filter((run) => app.state.checked.has(run.id));
    const sound = app.runs.filter((run) => run.state !== "unreadable");
    const every = button(chosen.length ? "Check none" : "Check all", chosen.length ? "Check none" : "Check all", () => app.set({ checked: new Set(chosen.length ? [] : sound.map((run) => run.id)) }));
    tools.replaceChildren(...(app.runs.length > 8 ? [search] : []), button(`Compare ${chosen.length || ""}`.trim(), chosen.length < 2 ? "Compare: check at least two runs" : `Compare ${chosen.length} runs`, () => app.set({ compare: chosen.map((run) => run.id) }, true), { disabled: chosen.length < 2, class: "strong" }), ...(sound.length > 1 ? [every] : []), el("span", { class: "muted", text: `${plural(app.runs.length, "run")}${sound.some((run) => run.state === "running") ? `, ${sound.filter((run) => run.state === "running").length} running` : ""}` }));
    if (where?.[1]) head.querySelector(`[data-key="${where[1]}"]`)?.focus();
    else if (where?.[0]) [...body.children].find((row) => row.dataset.run === where[0])?.querySelector(where[2])?.focus();
    else if (focused === search) search.focus();
    else if (focused?.tagName === "BUTTON" && !focused.isConnected) tools.querySelector("button:not([disabled])")?.focus();
    if (!scatter.contains(focused)) scatter.replaceChildren(...[scatterPanel(app.runs, app.state.metric, (metric) => app.set({ metric }))].filter(Boolean));
  }
  return { node, update, ready: async () => update(), redraw: update, resize() {}, destroy() {}, changed: async () => update() };
}
