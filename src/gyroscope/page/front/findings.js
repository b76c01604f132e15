// Findings of the diagnosis, and what was recorded.

const SIGNS = { serious: "▲", warning: "◆", note: "●" };
const severityOf = (text) => (Object.hasOwn(SIGNS, text) ? text : "note");
const badge = (severity, count = "") => h(`span.badge.${severityOf(severity)}`, h("span", { "aria-hidden": "true" }, `${SIGNS[severityOf(severity)]} `), `${count} ${severityOf(severity)}`.trim());

// The address of a document, if it is one that can be followed safely.
function documentLink(base, link) {
	if (!base || !link) return null;
	try {
		const address = new URL(link, new URL(base, location.href));
		return /^https?:$/.test(address.protocol) ? address.href : null;
	} catch {
		return null;
	}
}

function said(value) {
	if (typeof value === "number") return number(value);
	if (value == null) return "–";
	if (Array.isArray(value)) return value.map(said).join(", ");
	return typeof value === "object" ? Object.entries(value).map(([key, one]) => `${clean(key)}: ${said(one)}`).join("; ") : clean(value);
}

// `go(finding)` selects its layers and goes to its step.
function findingsList({ diagnosis: { headline, missing, findings } }, docs, go, active) {
	const cards = findings.map((finding) => {
		const { kind, severity, layers, since, sentence, evidence = {}, remedy, link } = finding;
		const address = documentLink(docs, link);
		return h(`li.finding.${severityOf(severity)}`, { class: `finding ${severityOf(severity)} ${active === finding.sentence ? "active" : ""}` },
			h("div.row", badge(severity), h("strong", clean(kind).replaceAll("_", " ")), h("span.muted", `${layers.length ? plural(layers.length, "layer") : "whole network"} · ${since == null ? "from the beginning" : `since step ${whole(since)}`}`), button("Show", () => go(finding), { label: `Show in the heatmap and the curves: ${clean(sentence)}`, kind: "small" })),
			h("p", clean(sentence)),
			h("details", h("summary", remedy ? "What to try, and the evidence" : "Evidence"), remedy && h("p", clean(remedy)), facts(Object.entries(evidence).map(([key, value]) => [key.replaceAll("_", " "), said(value)])),
				layers.length > 0 && h("p.muted", `Layers: ${layers.slice(0, 12).map(clean).join(", ")}${layers.length > 12 ? ` and ${layers.length - 12} more` : ""}.`),
				address && h("a", { href: address, target: "_blank", rel: "noopener noreferrer" }, "About this finding")));
	});
	return [h("p", clean(headline)), cards.length > 0 && h("ul.findings", cards), missing.length > 0 && h("ul.muted", missing.map((text) => h("li", clean(text))))].filter(Boolean);
}

function recordedList({ recorded, notes, options, meta, attempts, events, events_left_out: left, started, ended }) {
	const when = (seconds) => (seconds == null ? "–" : new Date(seconds * 1000).toLocaleString());
	const list = (title, map) => Object.keys(map ?? {}).length > 0 && h("details", h("summary", title), facts(Object.entries(map).map(([key, value]) => [key, said(value)])));
	return [h("p", clean(recorded)), ...notes.map((text) => h("p.muted", clean(text))), list("Hyperparameters", options), list("About the run", meta),
		h("details", h("summary", `Times and ${plural(events.length + left, "event")}`), facts([["started", when(started)], ["ended", when(ended)], ...(attempts.length > 1 ? attempts.map((one, i) => [`attempt ${i + 1}`, `from step ${whole(one.start_step)}, ${when(one.time)}`]) : [])]),
			h("ul.events", events.slice(-200).map((event) => h("li", h("span.muted", `step ${whole(event.step)} · ${clean(event.kind)} `), clean(event.text)))), left > 0 && h("p.muted", `${plural(left, "earlier event")} left out.`))].filter(Boolean);
}
