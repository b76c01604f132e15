// Short explanations: what a panel or a quantity is, and what good and bad look like.

const PANEL_WORDS = {
	runs: "One row per recorded training. Sort by a column, open a run by its name, or check several and compare them. The line is the mean rotation of the layers over time.",
	findings: "What the diagnosis found in the measurements, the most important first. Serious: training is broken or wasted. Warning: it likely costs quality. Note: worth knowing, and no alarm. “Show” selects the layers and goes to the step. The first alarm is the likeliest cause; others may be its consequences.",
	heatmap: "One row per layer, the first at the top; time runs to the right; color is the value. In a healthy run colors change smoothly along both axes. A single row in another color is a layer that behaves differently from its neighbors; a vertical edge is a moment when everything changed, such as a new learning rate. ▼ marks findings, ◆ events, dotted lines changes of the learning rate.",
	curves: "The same numbers as lines on one time axis, colored by depth from the first layer (dark) to the last (bright). Healthy layers move as a bundle. A line that leaves the bundle, or a kink in all lines at once, deserves a look. Drag over a chart to zoom.",
	layers: "One row per layer with the last value of each quantity. Search by text or with * and ?, sort by a column, check layers to filter the curves, open a layer by its name.",
	compare: "Several runs next to each other. A color means the same value in all of them.",
	difference: "The second run minus the first, layer by layer, at the same steps. For quantities on a logarithmic scale it is the ratio, in powers of ten. The middle color means equal.",
	scatter: "One point per run: how far its layers have rotated in the mean at the end, and how well it generalizes. In the rotation papers the two rise together among configurations that all fit their training data. The rank correlation is +1 if both axes order the runs alike, and 0 if they are unrelated; few runs say little.",
	options: "Hyperparameters that are not the same in all of these runs, and where the runs ended.",
	recorded: "What was measured, how often, and what this page shows of it.",
};

// By the beginning of a quantity's name: what good looks like, and what bad looks like. What it is comes with the run.
const QUANTITY_WORDS = {
	rotation: "rises quickly, then flattens, at similar heights in all layers|a layer near 0 keeps its initialization while others move",
	rate: "similar in all layers, falling with the learning rate|a layer ten times below the others hardly trains; spikes are steps that threw the weights around",
	weight_norm: "changes slowly, or settles where weight decay and gradients balance|steady growth lowers the effective learning rate; a change by orders of magnitude is a broken layer",
	gradient_norm: "layers lie within one or two powers of ten|a slope over depth: gradients vanish or explode; a line that falls to 0 is cut off from the loss",
	update_norm: "follows the learning rate|spikes, or layers far below the others",
	update_ratio: "about 10⁻³ to 10⁻², similar in all layers|above 0.1 the weights are overwritten; below 10⁻⁵ the layer stands still",
	effective_lr: "falls smoothly as norms grow, or settles, near its dashed prediction|layers that differ by orders of magnitude learn at different speeds under one learning rate",
	alignment: "near 0 without momentum, between 0 and 1 with it|near −1: each step undoes the one before; the learning rate is too high",
	invariance: "0 for layers followed by a normalization|far from 0 where you expect a scale-invariant layer",
	lr: "the schedule that you meant|a jump or a zero that you did not mean",
	weight_decay: "the decay that you meant|decay on layers that you meant to leave out",
	moment: "percentiles that fall together|a tenth percentile at 0: units that receive no gradient",
	neuron: "percentiles that lie close together: all neurons turn|a wide spread: some neurons keep their initial weights",
	dying: "near 0|rising towards 1: units that no sample activates receive no gradient",
	full: "away from 1|near 1: units that are always active act linearly",
	kappa: "small, and similar between layers|many powers of ten: gradient descent is slow along most directions",
	lambda: "steady after the first steps|sudden growth: the largest stable learning rate shrinks with it",
	rank: "close to the width|far below the width: the layer passes little on",
	domination: "similar in all layers|below 0.01 and far below the others: the weight is too large for its gradient to move it",
	input: "around 0, about 1 in size|orders of magnitude away: normalize the input",
};

const labelOf = (info) => (info.label && !/[$\\]/.test(info.label) ? clean(info.label) : clean(info.name).replaceAll("_", " "));

function quantityWords(info) {
	const key = Object.keys(QUANTITY_WORDS).filter((start) => `${info.name}_`.startsWith(`${start}_`)).sort((a, b) => b.length - a.length)[0];
	const says = clean(info.meaning || labelOf(info));
	const [good, bad] = key ? QUANTITY_WORDS[key].split("|") : [];
	return [`${says[0].toUpperCase()}${says.slice(1)}.`, ...(key ? [`Good: ${good}.`, `Bad: ${bad}.`] : [])];
}

const GLOSSARY = [
	["layer", "l", "a weight that multiplies: of a convolution, a linear map, an embedding"],
	["rotation", "1 − cos∠(w, w₀)", "cosine distance of a layer’s weights to their initialization: 0 unchanged, 1 at a right angle"],
	["rotation rate", "θ", "the angle between the weights before and after a step, in radians per step"],
	["rate of Layca", "ρ = tan θ", "what Layca’s lr sets"],
	["learning rate", "η", "the optimizer’s lr"],
	["effective learning rate", "η/‖w‖²", "the learning rate that a scale-invariant layer feels"],
	["scale-invariant", "", "multiplying the weights by a number changes nothing, because a normalization follows"],
	["step, epoch", "k", "an optimizer update; a pass over the data"],
	["bin", "", "consecutive measured steps shown as one: their mean, smallest and largest value"],
	["run", "", "a recorded training"],
	["finding", "", "one statement of the diagnosis: what, which layers, since when, the evidence, what to try"],
];

const GROUPS = { rotation: "Rotation", rates: "Rates", norms: "Norms", gradients: "Gradients", moments: "Second moments", neurons: "Neurons", conditioning: "Conditioning", other: "Other" };
// Drawn as curves at first; the others are one click away.
const USUAL = "rotation rate_per_step weight_norm update_ratio effective_lr gradient_norm moment_p50 neuron_p50 dying kappa_f_p50 lambda_f domination merged_rotation".split(" ");

// A panel with its title, its words and what is in it.
const panel = (key, title, ...children) => h("section.panel", { "aria-labelledby": `${key}-title`, id: `panel-${key}` }, h("div.row.head", h("h2", { id: `${key}-title` }, title), fold("What is this?", h("p", PANEL_WORDS[key]))), ...children);

const glossary = () => h("details.panel", h("summary", h("h2", "Glossary")), h("dl.glossary", GLOSSARY.map(([term, symbol, meaning]) => h("div", h("dt", term, h("span.muted", ` ${symbol}`)), h("dd", meaning)))));
