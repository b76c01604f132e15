// Short explanations: what a panel or a quantity is, and what good and bad look like.

const PANEL_WORDS = {
  runs: "One row per recorded training. Sort by a column, open a run by its name, or check several and compare them. The line is the mean rotation of its layers over time.",
  findings: "What the rules of the diagnosis found in the measurements, the most important first. Serious: training is broken or wasted. Warning: it likely costs quality. Note: worth knowing, and no alarm. “Show” selects the layers and goes to the step. An alarm often has consequences that other rules see too; the first one is the likeliest cause.",
  heatmap: "One row per layer, from the first at the top to the last at the bottom; time runs to the right; color is the value. In a healthy run, colors change smoothly along both axes. A single row in another color is a layer that behaves differently from its neighbors; a vertical edge is a moment when everything changed, such as a change of the learning rate; gray is no value.",
  curves: "The same numbers as lines on one time axis. Lines are colored by depth, from the first layer (dark) to the last (bright). Healthy layers move together in a bundle; a line that leaves the bundle, or a kink in all lines at once, deserves a look.",
  table: "One row per layer with the last value of each quantity. Search by text or with * and ?, sort by a column, check layers to filter the curves, and open a layer by its name.",
  detail: "Every quantity of one layer: the mean over time, with the smallest and largest values shaded where steps were gathered into bins, and the last value.",
  compare: "Several runs next to each other. Colors have the same meaning in all of them, so that brightness can be compared between runs.",
  difference: "The second run minus the first, layer by layer, at the same steps. For quantities on a logarithmic scale it is the ratio, in powers of ten. The middle color means equal.",
  scatter: "One point per run: how far its layers have rotated in the mean at the end, and how well it generalizes. In the rotation papers the two rise together among configurations that all fit their training data. The rank correlation is +1 if the order of the runs is the same on both axes, and 0 if the two are unrelated; few runs say little.",
  options: "Hyperparameters that are not the same in all of these runs.",
  recorded: "What was measured, how often, and what this page shows of it.",
};

// Quantity: what good looks like, then what bad looks like. What it is comes with the run.
const QUANTITY_WORDS = {
  rotation: ["rises quickly, then flattens, at similar heights in all layers", "a layer that stays near 0 keeps its initialization; one near 1 has forgotten it early while others have not moved"],
  rate: ["similar in all layers and falling with the learning rate", "a layer ten times below the others hardly trains; spikes are steps that threw weights around"],
  weight_norm: ["changes slowly, or settles when weight decay and gradients balance", "steady growth lowers the effective learning rate; a collapse to 0 or growth by orders of magnitude is a broken layer"],
  gradient_norm: ["the layers lie within one or two powers of ten", "a slope over depth means that gradients vanish or explode; a line that falls to 0 is a layer cut off from the loss"],
  update_norm: ["follows the learning rate", "spikes, or layers far below the others"],
  update_ratio: ["about 10⁻³ to 10⁻² in most trainings, and similar in all layers", "above 0.1 the weights are overwritten; below 10⁻⁵ the layer stands still"],
  effective_lr: ["falls smoothly as norms grow, or settles; near its dashed prediction", "layers that differ by orders of magnitude learn at different speeds, although they share one learning rate"],
  effective_lr_measured: ["agrees with η/‖w‖² for scale-invariant layers under SGD", "a disagreement: momentum, preconditioning, or a layer that is not scale-invariant"],
  alignment: ["between 0 and 1 with momentum; near 0 without", "near −1: every step undoes the one before, the learning rate is too high"],
  invariance: ["0 for layers followed by a normalization", "far from 0 in a layer that should be scale-invariant: the normalization does not act on it"],
  lr: ["the schedule that you meant", "a jump or a zero that you did not mean"],
  weight_decay: ["the same for all weights, or as grouped by you", "decay on layers that you meant to leave out"],
  moment: ["percentiles that fall together", "a tenth percentile at 0: units that never receive a gradient"],
  neuron: ["percentiles that lie close together: all neurons of a layer turn", "a wide spread: some neurons keep their initial weights while others turn fully"],
  dying: ["near 0", "rising towards 1: units that no sample activates receive no gradient"],
  full: ["away from 0 and 1", "near 1: units that are always active act linearly"],
  kappa: ["small, and similar between layers", "many powers of ten: gradient descent is slow along most directions"],
  lambda: ["steady after the first steps", "sudden growth: the largest stable learning rate shrinks with it"],
  rank: ["close to the width", "far below the width: the layer passes little information on"],
  domination: ["similar in all layers", "below 0.01 and far below the others: the weight is too large for its gradient to move it"],
  input: ["about 1 in size, around 0", "orders of magnitude above or below: normalize the input"],
};

function quantityWords(info) {
  const key = Object.keys(QUANTITY_WORDS).filter((start) => info.name === start || info.name.startsWith(`${start}_`)).sort((a, b) => b.length - a.length)[0];
  const says = (info.meaning || info.label || info.name).replace(/\.$/, "");
  const what = `${says[0].toUpperCase()}${says.slice(1)}.`;
  const known = Object.hasOwn(QUANTITY_WORDS, key ?? "") ? QUANTITY_WORDS[key] : null;
  return known ? [what, `Good: ${known[0]}.`, `Bad: ${known[1]}.`] : [what];
}

const GLOSSARY = [
  ["layer", "l", "a weight that multiplies: of a convolution, a linear map, an embedding"],
  ["rotation", "1 − cos∠(w, w₀)", "cosine distance of a layer’s weights to their initialization: 0 unchanged, 1 at a right angle"],
  ["rotation rate", "θ", "the angle between the weights before and after a step, in radians per step"],
  ["rate of Layca", "ρ = tan θ", "what Layca’s lr sets"],
  ["learning rate", "η", "the optimizer’s lr"],
  ["effective learning rate", "η/‖w‖²", "the learning rate that a scale-invariant layer feels"],
  ["update ratio", "‖Δw‖/‖w‖", "length of a step compared with the length of the weights"],
  ["scale-invariant", "", "a layer followed by a normalization: multiplying its weights by a number changes nothing"],
  ["step, epoch", "k", "an optimizer update; a pass over the data"],
  ["bin", "", "consecutive measured steps shown as one: their mean, smallest and largest value"],
  ["run", "", "a recorded training"],
  ["finding", "", "one statement of the diagnosis: what, which layers, since when, the evidence, what to try"],
];

const GROUPS = { rotation: "Rotation", norms: "Norms", rates: "Learning rates", gradients: "Gradients", moments: "Second moments", neurons: "Neurons", conditioning: "Conditioning", other: "Other" };
// Shown at first; the others are one click away.
const USUAL = new Set(["rotation", "rate_per_step", "weight_norm", "update_ratio", "effective_lr", "gradient_norm", "moment_p50", "neuron_p50", "dying", "kappa_f_p50", "kappa_x_p50", "lambda_f", "domination", "merged_rotation"]);

const explain = (key) => fold("What is this?", el("p", { text: PANEL_WORDS[key] }));

function glossaryPanel() {
  const rows = GLOSSARY.map(([term, symbol, meaning]) => el("div", {}, el("dt", {}, term, symbol ? el("span", { class: "muted", text: ` ${symbol}` }) : null), el("dd", { text: meaning })));
  return el("section", { class: "panel", id: "glossary", "aria-labelledby": "glossary-title" },
    el("details", {}, el("summary", {}, el("h2", { id: "glossary-title", text: "Glossary" })), el("dl", { class: "glossary" }, rows)));
}

const labelOf = (info) => (/[$\\]/.test(info.label ?? "$") ? info.name.replaceAll("_", " ") : info.label);
