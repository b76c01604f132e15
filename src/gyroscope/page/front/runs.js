// The list of runs.

const stateTag = (state) => h(`span.state.${/^\w+$/.test(state) ? state : ""}`, clean(state));
const mainAccuracy = (run) => run.accuracies?.[accuracyNames([run])[0]];
const RUN_COLUMNS = [["name", "run", "name"], ["state", "state"], ["findings", "findings"], ["model", "model", "wide"], ["layers", "layers", "number wide"], ["steps", "steps", "number"], ["loss", "loss", "number"], ["accuracy", "accuracy", "number"], ["rotation", "rotation", "number"], [null, "over time"], ["started", "started", "wide"]];

function runValue(run, key) {
	if (key === "accuracy") return mainAccuracy(run);
	if (key === "rotation") return run.rotation?.[1];
	if (key === "findings") return (run.findings?.serious ?? 0) * 1e6 + (run.findings?.warning ?? 0) * 1e3 + (run.findings?.note ?? 0);
	return typeof run[key] === "string" ? run[key].toLowerCase() : run[key];
}

function createRuns(app) {
	const search = h("input", { type: "search", placeholder: "run name", "aria-label": "Search runs by text or pattern", oninput: () => app.set({ find: search.value }) });
	const [tools, head, body, empty, scatter] = [h("div.tools"), h("tr"), h("tbody"), h("p.muted"), h("div")];
	const table = h("div.scroll-x", { tabindex: 0, role: "region", "aria-label": "Table of runs" }, h("table.runs", h("caption.hidden", "Runs"), h("thead", head), body));
	const about = (app.config.about ?? []).map((text) => h("p.about", clean(text)));
	const node = h("div.page", h("section.run-head", h("h1", clean(app.config.title || "Runs")), about.slice(0, 1), about.length > 1 && h("details", h("summary", "More about these runs"), about.slice(1))), panel("runs", "Runs", h("div.tools", search, tools), table, empty), scatter, glossary());

	function row(run, highest) {
		const broken = run.state === "unreadable";
		const checked = app.state.checked.has(run.id);
		const toggle = () => {
			const next = new Set(app.state.checked);
			if (!next.delete(run.id)) next.add(run.id);
			app.set({ checked: next });
		};
		const found = Object.entries(run.findings ?? {}).filter(([, n]) => n);
		return h("tr", { class: checked ? "selected" : "" }, h("td.check", h("input", { type: "checkbox", "aria-label": `Compare ${clean(run.name)}`, disabled: broken, checked, onchange: toggle })),
			h("th.name", { scope: "row" }, broken ? clean(run.name) : runLink(run), run.error && h("p.error", clean(run.error))), h("td", stateTag(run.state)),
			h("td", found.map(([severity, n]) => badge(severity, n)), !found.length && !broken && h("span.muted", "none")), h("td.wide", run.model == null ? "–" : clean(run.model)), h("td.number.wide", whole(run.layers)),
			h("td.number", { title: `${whole(run.measured)} measured` }, whole(run.steps)), h("td.number", run.loss == null ? "–" : number(run.loss, 3)), h("td.number", { title: accuracyNames([run])[0] }, percent(mainAccuracy(run))),
			h("td.number", { title: run.rotation && `layers from ${number(run.rotation[0], 3)} to ${number(run.rotation[2], 3)}` }, run.rotation ? number(run.rotation[1], 3) : "–"),
			h("td", run.sparkline?.length > 0 && sparkline(run.sparkline, { low: 0, high: highest, label: "mean rotation over time" })),
			h("td.wide.muted", run.started == null ? "–" : new Date(run.started * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" })));
	}

	function update() {
		const { runs, state } = app;
		const shown = runs.filter((run) => glob(state.find)(run.name));
		const sound = runs.filter((run) => run.state !== "unreadable");
		const chosen = sound.filter((run) => state.checked.has(run.id));
		const running = runs.filter((run) => run.state === "running").length;
		const highest = runs.flatMap((run) => run.sparkline ?? []).reduce((a, b) => Math.max(a, b), 1e-9);
		refill(head, h("td.check"), sortHeads(RUN_COLUMNS, state.list, (list) => app.set({ list })));
		refill(body, (state.list.key ? sortBy(shown, (run) => runValue(run, state.list.key), state.list.down) : shown).map((run) => row(run, highest)));
		search.hidden = runs.length < 9;
		table.hidden = !runs.length;
		empty.textContent = shown.length ? "" : runs.length ? "No run matches the search." : app.config.mode === "live" ? "There are no runs in this folder yet. A run appears here as soon as a training writes its first step." : "This report holds no runs.";
		refill(tools, button(`Compare ${chosen.length || ""}`, () => app.set({ compare: chosen.map((run) => run.id) }, true), { label: "Compare the checked runs", disabled: chosen.length < 2, kind: "strong" }),
			sound.length > 1 && button(chosen.length ? "Check none" : "Check all", () => app.set({ checked: new Set(chosen.length ? [] : sound.map((run) => run.id)) }), { label: "Check all runs or none" }), h("span.muted", `${plural(runs.length, "run")}${running ? `, ${running} running` : ""}`));
		const plot = scatterPanel(runs, state.metric, (metric) => app.set({ metric }));
		if (!scatter.contains(document.activeElement) || !plot) scatter.replaceChildren(...(plot ? [plot] : []));
	}
	return { node, update, ready: async () => {}, shown: async () => update(), redraw: update, changed: async () => update(), resize() {}, destroy() {} };
}
