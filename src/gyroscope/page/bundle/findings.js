// Findings of the diagnosis, and what was recorded.

const SEVERITY = { serious: ["▲", "serious"], warning: ["◆", "warning"], note: ["●", "note"] };
const severityOf = (text) => (Object.hasOwn(SEVERITY, text) ? text : "note");

function badge(severity, count) {
  const [sign, word] = SEVERITY[severityOf(severity)];
  return el("span", { class: `badge ${severityOf(severity)}` }, el("span", { "aria-hidden": "true", text: sign }), ` ${count == null ? word : `${count} ${word}`}`);
}

// A link into the documents, if it is one: only http, https and relative addresses.
function documentLink(base, link) {
  if (!base || !link) return null;
  try {
    const address = new URL(link, new URL(base, location.href));
    return /^https?:$/.test(address.protocol) ? address.href : null;
  } catch {
    return null;
  }
}

const evidenceText = (value) => (typeof value === "number" ? number(value) : value == null ? "–" : Array.isArray(value) ? value.map(evidenceText).join(", ") : typeof value === "object" ? Object.entries(value).map(([key, one]) => `${clean(key)}: ${evidenceText(one)}`).join("; ") : clean(value));

function factList(pairs) {
  return el("dl", { class: "facts" }, pairs.map(([term, text]) => el("div", {}, el("dt", { text: clean(term) }), el("dd", { text }))));
}

// `go(finding)` selects its layers and goes to its step.
function findingsPanel(head, docs, go, active) {
  const { headline, decided, missing, findings } = head.diagnosis;
  const cards = findings.map((finding, i) => {
    const address = documentLink(docs, finding.link);
    const facts = [plural(finding.layers.length, "layer"), finding.since == null ? "from the beginning" : `since step ${whole(finding.since)}`];
    if (!finding.layers.length) facts[0] = "whole network";
    const evidence = Object.entries(finding.evidence ?? {});
    return el("li", { class: `finding ${severityOf(finding.severity)}${active === i ? " active" : ""}` },
      el("div", { class: "row" }, badge(finding.severity), el("strong", { text: clean(finding.kind).replaceAll("_", " ") }), el("span", { class: "muted", text: facts.join(" · ") }), button("Show", `Show in the heatmap and the curves: ${clean(finding.sentence)}`, () => go(finding, i), { class: "small" })),
      el("p", { text: clean(finding.sentence) }),
      el("details", {}, el("summary", { text: finding.remedy ? "What to try, and the evidence" : "Evidence" }), finding.remedy ? el("p", { text: clean(finding.remedy) }) : null, evidence.length ? factList(evidence.map(([key, value]) => [key.replaceAll("_", " "), evidenceText(value)])) : null,
        finding.layers.length ? el("p", { class: "muted", text: `Layers: ${finding.layers.slice(0, 12).map(clean).join(", ")}${finding.layers.length > 12 ? ` and ${finding.layers.length - 12} more` : ""}.` }) : null,
        address ? el("p", {}, el("a", { href: address, target: "_blank", rel: "noopener noreferrer", text: "About this finding" })) : null));
  });
  return [
    el("p", { class: findings.some((one) => one.severity !== "note") ? "" : "muted", text: clean(headline) }),
    cards.length ? el("ul", { class: "findings" }, cards) : null,
    decided && !missing.length ? null : el("ul", { class: "muted" }, missing.map((text) => el("li", { text: clean(text) }))),
  ].filter(Boolean);
}

function recordedPanel(head) {
  const when = (seconds) => (seconds == null ? "–" : new Date(seconds * 1000).toLocaleString());
  const attempts = head.attempts ?? [];
  const lists = [["Hyperparameters", head.options], ["About the run", head.meta]].filter(([, map]) => map && Object.keys(map).length);
  return [
    el("p", { text: clean(head.recorded) }),
    ...(head.notes ?? []).map((text) => el("p", { class: "muted", text: clean(text) })),
    ...lists.map(([title, map]) => el("details", {}, el("summary", { text: title }), factList(Object.entries(map).map(([key, value]) => [key, evidenceText(value)])))),
    el("details", {}, el("summary", { text: `Times and events (${(head.events ?? []).length + (head.events_left_out ?? 0)})` }),
      factList([["started", when(head.started)], ["ended", when(head.ended)], ...(attempts.length > 1 ? attempts.map((one, i) => [`attempt ${i + 1}`, `from step ${whole(one.start_step)}, ${when(one.time)}`]) : [])]),
      el("ul", { class: "events" }, (head.events ?? []).slice(0, 200).map((event) => el("li", {}, el("span", { class: "muted", text: `step ${whole(event.step)} · ${clean(event.kind)} ` }), clean(event.text)))),
      head.events_left_out ? el("p", { class: "muted", text: `${plural(head.events_left_out, "event")} left out.` }) : null),
  ];
}
