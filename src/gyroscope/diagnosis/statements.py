"""Statements about a layer, one per topic: the verdict, the reason, and the equation behind it.

Scale invariance, effective learning rate and implicit decay are those of section 4.3 of Grosse's chapter; equilibrium
and weight decay those of section 5. Each rests on the ones before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan
from typing import Literal, NamedTuple

import numpy as np

from gyroscope.diagnosis.evidence import Balance, Evidence, Fit, balance, fitted, unsteady
from gyroscope.diagnosis.scale_invariance import ENOUGH, INVARIANT, RELATED, Orthogonality
from gyroscope.theory.effective_rate import Floats
from gyroscope.theory.invariance_result import LayerInvariance
from gyroscope.theory.recurrence import Optimizer

Verdict = Literal["yes", "no", "does not apply", "undecided"]
Topic = Literal["scale invariance", "effective learning rate", "implicit decay", "equilibrium", "weight decay"]

#: In the order in which they are made: each rests on those before it.
TOPICS: tuple[Topic, ...] = (
    "scale invariance",
    "effective learning rate",
    "implicit decay",
    "equilibrium",
    "weight decay",
)
# R² of the law from which it is said to hold.
_FITS = 0.9
# And how far it may be from the effective learning rate, on average: R² is near 1 for anything that grows steadily.
_OFF = 0.1
# The share of ‖w‖⁴ that steps must have added to tell the law from a straight line: a third is added after k₀/2 steps.
_GROWN = 1 / 3
# The largest share of the weights lost per step for which the theory, which assumes small shares, is taken to hold.
_SMALL = 0.1
# The largest relative spread of nine in ten steps' relative lengths for which they are independent of the norm.
_STEADY = 0.05
#: Said of a frozen layer.
UNSTEPPED = "because no optimizer steps it."


@dataclass(frozen=True)
class Statement:
    """A statement about one layer on one topic.

    Attributes:
        layer: its name.
        topic: one of `TOPICS`.
        verdict: "yes" or "no" if a measurement decides it; "does not apply" if the theory does not cover such a layer
            or optimizer; "undecided" if something was not measured, or not often enough.
        words: a sentence or two; "because ..." if it does not apply.
        source: the equation or section of Grosse's chapter behind it.

    >>> print(Statement("conv1", "equilibrium", "does not apply", "because nothing decays.", "equation 23"))
    equilibrium: does not apply because nothing decays. (equation 23)
    """

    layer: str
    topic: Topic
    verdict: Verdict
    words: str
    source: str

    def __str__(self) -> str:
        joined = " " if self.verdict == "does not apply" else ". "
        return f"{self.topic}: {self.verdict}{joined}{self.words} ({self.source})"


def number(value: float) -> str:
    """Format a number with three digits; "–" if it is not known.

    >>> number(0.012345), number(123456.0), number(2.0), number(3e38), number(float("nan"))
    ('0.0123', '123,456', '2', '3e+38', '–')
    """
    if not isfinite(value):
        return "∞" if value == float("inf") else "–"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"


def times(count: int) -> str:
    """Format a number of steps.

    >>> times(1), times(2000)
    ('1 step', '2,000 steps')
    """
    return f"{count:,} step" if count == 1 else f"{count:,} steps"


def record(names: Sequence[str]) -> str:
    """Say how to record missing series.

    >>> record(["rate"])
    'the run has no series rate; gyroscope.watch records it unless quantities= leaves it out'
    """
    it = "it" if len(names) == 1 else "them"
    return f"the run has no series {', '.join(names)}; gyroscope.watch records {it} unless quantities= leaves {it} out"


def sentence(words: str) -> str:
    """Return a clause with a capital and a full stop.

    >>> sentence("the run has no series rate")
    'The run has no series rate.'
    """
    return f"{words[0].upper()}{words[1:]}."


# Section 4.3: is the layer scale-invariant, and what is its effective learning rate.


class Change(NamedTuple):
    """Change of the learning rate, explicit and effective, from the first to the last step at which it is above 0.

    Attributes:
        lr: η at both.
        effective: η/‖w‖² at both; η/‖w‖ for Adam-like optimizers, whose step length does not depend on the gradient's.
        implicit: the factor by which the norm alone changed the effective learning rate.
        steps: k at both.
    """

    lr: tuple[float, float]
    effective: tuple[float, float]
    implicit: float
    steps: tuple[int, int]


def scale_statement(layer: Evidence, found: Orthogonality, model: LayerInvariance | None) -> tuple[Statement, str]:
    """State whether a layer is scale-invariant, in words and as "unit", "tensor", "yes", "no" or "undecided: why"."""

    def said(verdict: Verdict, words: str, short: str) -> tuple[Statement, str]:
        return Statement(layer.info.name, "scale invariance", verdict, words, "equation 16"), short

    told = None if model is None or model.scale_invariant.startswith("undecided") else model.scale_invariant
    if found.count:
        seen = (
            f"√n·|⟨w,∇⟩|/(‖w‖‖∇‖) has a median of {number(found.median)} and a 90th percentile of "
            f"{number(found.most)} over {found.count:,} measured steps"
        )
    else:
        seen = "its gradient was not recorded"
    if found.found is not None and told is not None and found.found != (told != "no"):
        words = (
            f"In the run, {seen}; the given model says the opposite. Pass the model in the mode it was trained in, "
            "and the loss it was trained with."
        )
        return said("undecided", words, "undecided: run and model disagree")
    if told == "unit":
        units = model.units if model else 0
        return said("yes", f"The model shows that each of its {units} units is invariant on its own; {seen}.", "unit")
    if told == "tensor":
        words = f"The model shows that only its weights as a whole can be rescaled, not single units; {seen}."
        return said("yes", words, "tensor")
    if found.found:
        words = (
            f"Its gradients are orthogonal to its weights: {seen}; for unrelated directions the median is 0.67. A run "
            "cannot tell whether each unit is invariant on its own; pass model, loss and batch to find out."
        )
        return said("yes", words, "yes")
    if found.found is False:
        return said("no", f"Its norm matters to the loss: {seen}; for a scale-invariant layer both are zero.", "no")
    if told == "no":
        return said("no", f"The model shows that its norm matters to the loss; {seen}.", "no")
    if found.count < ENOUGH and (why := ended(layer)):
        before = f"before that, its gradient was measured at {times(found.count)}, and {ENOUGH} are needed"
        return said("undecided", sentence(f"{why}; {before}"), "undecided: not finite")
    if found.count < ENOUGH and (dead := int((layer.gradient == 0).sum())):
        words = (
            f"Its gradient was zero at {times(dead)} and nonzero at {times(found.count)}; {ENOUGH} are needed. Its "
            "units are dead or saturated, or the loss does not depend on it."
        )
        return said("undecided", words, "undecided: zero gradient")
    if not found.count:
        why = record(["invariance"]) if layer.missing("invariance") else "it had no gradient at any measured step"
        return said("undecided", sentence(why), f"undecided: {why.split(';')[0]}")
    if found.count < ENOUGH:
        words = (
            f"Gradients were measured at {times(found.count)}, and {ENOUGH} are needed. Train for longer, or record "
            "every step with watch(budget=None)."
        )
        return said("undecided", words, "undecided: too few steps")
    if found.median > RELATED:
        words = (
            "Its first gradient was orthogonal to its weights, and later ones were not. Gradients that accumulate "
            "over steps look like this: call optimizer.zero_grad() before each backward pass."
        )
        return said("undecided", words, "undecided: orthogonal at first")
    words = (
        f"{seen[0].upper()}{seen[1:]}. That is neither zero (a 90th percentile below {INVARIANT}) nor typical of a "
        f"layer whose norm matters (a median above {RELATED}). A bias before a normalizer, an ε as large as the "
        "activations or a norm at its optimum can be the cause; pass model, loss and batch to find out."
    )
    return said("undecided", words, "undecided: nearly orthogonal")


def change(layer: Evidence) -> Change | None:
    """Return the change of the learning rate, explicit and effective, or None if it was not recorded."""
    rows = np.flatnonzero((layer.lr > 0) & (layer.norm > 0) & np.isfinite(layer.norm))
    rows = rows[rows >= layer.since]
    if len(rows) < 2 or layer.optimizer.kind is None:
        return None
    a, b = int(rows[0]), int(rows[-1])
    power = 2 if layer.optimizer.kind == "sgd" else 1
    rates = [float(layer.lr[i] / layer.norm[i] ** power) for i in (a, b)]
    implicit = float((layer.norm[a] / layer.norm[b]) ** power)
    lr = float(layer.lr[a]), float(layer.lr[b])
    return Change(lr, (rates[0], rates[1]), implicit, (int(layer.steps[a]), int(layer.steps[b])))


def rate_statement(layer: Evidence, invariant: bool | None, moved: Change | None) -> Statement:
    """State the explicit and the effective learning rate."""

    def said(verdict: Verdict, words: str, source: str = "section 4.3") -> Statement:
        return Statement(layer.info.name, "effective learning rate", verdict, words, source)

    reason = stopped(layer, invariant)
    if reason is not None:
        return said(*reason)
    if moved is None:
        lacks = layer.missing("lr", "weight_norm")
        few = f"fewer than two steps with a learning rate above 0 were measured{after(layer)}"
        why = record(lacks) if lacks else few
        return said("undecided", sentence(why))
    sgd = layer.optimizer.kind == "sgd"
    symbol = "η/‖w‖²" if sgd else "η/‖w‖ (the length of its steps does not depend on the gradient's)"
    (a, b), (k, end) = moved.lr, moved.steps
    explicit = "stayed at" if abs(b / a - 1) < 1e-6 else f"went from {number(a)} to"
    how = "fell" if moved.implicit < 1 else "rose"
    first, last = (number(one) for one in moved.effective)
    went = f"{how if b == a else 'went'} from {first} to {last}"
    if number(moved.implicit) == "1":
        by = "the norm stayed the same and did not change it"
        went = f"stayed at {last}" if b == a else went
    else:
        grew = "growth" if moved.implicit < 1 else "shrinking"
        by = f"the {grew} of the norm alone multiplied it by {number(moved.implicit)}"
    words = f"From step {k:,} to {end:,}, η {explicit} {number(b)} while {symbol} {went}: {by}.{broke(layer)}"
    return said("yes", words, "section 4.3, equation 18")


# Section 4.3: the implicit decay of the effective learning rate.


def law_statement(layer: Evidence, invariant: bool | None) -> tuple[Statement, float, float]:
    """State whether the effective learning rate decays as 1/√(1 + k/k₀); with k₀ and R², NaN if they are not stated."""

    def said(
        verdict: Verdict, words: str, k0: float = nan, r2: float = nan, source: str = "equation 19"
    ) -> tuple[Statement, float, float]:
        return Statement(layer.info.name, "implicit decay", verdict, words, source), k0, r2

    reason = stopped(layer, invariant)
    if reason is not None:
        return said(*reason)
    lacks = layer.missing("lr", "weight_norm", "weight_decay")
    if lacks:
        return said("undecided", sentence(record(lacks)))
    if (all_of_it := taken(layer)) is not None:
        return said("does not apply", all_of_it)
    if (why := unruled(layer)) is not None:
        return said("undecided", why)
    known, law = len(layer.norms), fitted(layer)
    if not isfinite(law.off):
        return said("undecided", f"The norm was measured at {times(known)}{after(layer)}, and {ENOUGH} are needed.")
    if layer.held:
        words = (
            f"because its norm stayed at {number(float(layer.norms.mean()))}: the weights are renormalized, or stuck."
        )
        return said("does not apply", words)
    if law.k0 == inf:
        alone = layer.decayed and law.off <= _OFF
        words = f"because steps did not add to its norm, which {course(layer)}"
        return said("does not apply", f"{words}; decay alone explains that." if alone else f"{words}.")
    if law.grown >= _GROWN and (law.r2 < _FITS or law.off > _OFF):
        best = f"The best fit, k₀ = {number(law.k0)} steps{_at(layer)}, does not describe the {len(layer.norms):,}"
        off = f"measured norms: R² {law.r2:.3f}, off by {100 * law.off:.0f} %"
        words = f"{best} {off}. {_why_not(layer)}{broke(layer)}"
        return said("no", words, nan, law.r2)
    if layer.decayed and 1 / law.k0 <= law.fall and layer.norms[-1] < layer.norms[0]:
        return said(*_from_above(layer, law), nan, law.r2 if law.grown >= _GROWN else nan, "equation 23")
    if law.grown < _GROWN:
        few = f"{_span(layer):,} steps are too few to determine k₀: so early, any slow growth looks the same"
        more = broke(layer) or ("" if _at(layer) else f" Record {number(law.k0)} steps or more.")
        return said("undecided", f"{_fit(layer, law)}, but {few}.{more}")
    return said("yes", f"{_goes(layer, law)}{after(layer)}.{broke(layer)}", law.k0, law.r2)


def _fit(layer: Evidence, law: Fit) -> str:
    how = "with" if law.r2 >= _FITS else "best, with"
    return f"k₀ = {number(law.k0)} steps{_at(layer)} fits {len(layer.norms):,} measured norms {how} R² {law.r2:.3f}"


def _goes(layer: Evidence, law: Fit) -> str:
    """Return what the law says about a norm that grows."""
    if layer.decayed:
        levels = "The effective learning rate starts like 1/√(1 + k/k₀) and levels off with weight decay (equation 23)"
        return f"{levels}: {_fit(layer, law)}"
    if _at(layer):
        return f"The growth of the norm divides the effective learning rate by √(1 + k/k₀): {_fit(layer, law)}"
    decays = "The effective learning rate decays on its own as 1/√(1 + k/k₀)"
    return f"{decays}: {_fit(layer, law)}, so it halves in {3 * law.k0:,.0f} steps"


def _from_above(layer: Evidence, law: Fit) -> tuple[Verdict, str]:
    """Return what it says about a norm above its equilibrium, where k₀, a time of growth, means nothing."""
    first, last = (number(float(layer.norms[i])) for i in (0, -1))
    down = (
        f"the norm comes down from above its equilibrium, from {first} to {last}: decay took more of it at first than "
        "steps added"
    )
    if law.grown < _GROWN:
        power = "‖w‖⁴" if layer.optimizer.kind == "sgd" else "‖w‖²"
        few = f"Steps account for {number(max(0.0, law.grown))} of {power} so far, too little to identify the law"
        return "undecided", f"{sentence(down)} {few}.{broke(layer)}"
    fits = f"Equation 23 fits {len(layer.norms):,} measured norms with R² {law.r2:.3f}{after(layer)}, but {down}"
    felt = "" if _at(layer) else ", so the effective learning rate rises"
    return "no", f"{fits}{felt}.{broke(layer)}"


def _rates(layer: Evidence) -> np.ndarray:
    lr = layer.lr[layer.since :]
    return np.asarray(lr[lr > 0])


def _at(layer: Evidence) -> str:
    """Return at which learning rate k₀ counts steps, if there are several."""
    lr = _rates(layer)
    if np.ptp(lr) <= 1e-6 * lr.max():
        return ""
    top = number(float(lr.max()))
    return f" at the largest η, {top} (a step at η counts as (η/{top})² steps)"


def _span(layer: Evidence) -> int:
    part = layer.steps[layer.since :][np.isfinite(layer.norm[layer.since :])]
    return int(part[-1] - part[0])


def _why_not(layer: Evidence) -> str:
    found = unsteady(layer)
    if found is None:
        return "The run does not show why."
    what = varied(layer)
    return f"{what[0].upper()}{what[1:]}, which the law assumes: {quarters(found)}."


# Section 5: weight decay.


def equilibrium_statement(layer: Evidence, invariant: bool | None) -> tuple[Statement, Balance | None]:
    """State whether weight decay takes as much norm as steps add, and whether the layer turns at the predicted rate."""

    def said(
        verdict: Verdict, words: str, found: Balance | None = None, source: str = "equations 23 to 25"
    ) -> tuple[Statement, Balance | None]:
        return Statement(layer.info.name, "equilibrium", verdict, words, source), found

    all_of_it = taken(layer)
    if all_of_it is not None and layer.stepped:
        return said("does not apply", all_of_it, source="equation 22")
    reason = stopped(layer, invariant)
    if reason is not None:
        return said(*reason)
    lacks = layer.missing("lr", "weight_decay", "weight_norm")
    if not {"rate", "update_ratio"} & layer.recorded:
        lacks.append("rate")
    if lacks:
        return said("undecided", sentence(record(lacks)))
    if not layer.decayed:
        return said("does not apply", "because weight decay is zero: nothing stops the growth of the norm.")
    if (why := unruled(layer)) is not None:
        return said("undecided", why)
    found = balance(layer)
    if found is None:
        return said("undecided", _too_few(layer) + broke(layer))
    if found.shrinkage > _SMALL:
        words = f"Decay takes {number(found.shrinkage)} of the weights per step; the theory assumes small shares."
        return said("undecided", words)
    adapted = "" if layer.optimizer.kind == "sgd" else ", adapted to steps of constant length"
    return said(*_judged(layer, found), found, f"equations 23 to 25{adapted}")


def _too_few(layer: Evidence) -> str:
    """Return what was measured too seldom, and how to measure enough."""
    rule, longest = layer.optimizer, 0
    for one in layer.stretches:
        if layer.decay[one.start] > 0:
            longest = max(longest, int(layer.steps[one.stop - 1] - layer.steps[one.start]))
    words = (
        f"No stretch of constant learning rate and weight decay{after(layer)} was measured often enough: its later "
        f"half must contain {ENOUGH} measured steps"
    )
    if rule.settles:
        words += f", after the {rule.settles:,} steps that {rule.name} takes to settle"
    words += f"; the longest stretch lasts {times(longest)}."
    if layer.broken is not None:
        return words
    needed = max(2 * ENOUGH, rule.settles + ENOUGH)
    if longest >= needed:
        return f"{words} Record every step with watch(budget=None)."
    return f"{words} The learning rate must stay constant for {needed:,} steps or more."


def _judged(layer: Evidence, found: Balance) -> tuple[Verdict, str]:
    at = found.predicted
    formula = _formula(layer)
    where = f"steps {found.first:,} to {found.last:,}, at η = {number(found.lr)} and λ = {number(found.decay)}"
    rates = (
        f"it turns by {number(found.rate)} rad per step (±{100 * found.error:.0f} %; predicted: {number(at.rate)} = "
        f"{formula})"
    )
    norms = f" at a norm of {number(found.norm)}"
    norms += f" (predicted: {number(at.norm)})" if isfinite(at.norm) else ""
    if broke(layer):
        return "no", f"{broke(layer).strip()} Over {where}, {rates}{norms}."
    if found.verdict == "noisy":
        return "undecided", f"Over {where}, {rates}. That is too noisy to decide. Record more steps."
    if found.verdict == "there":
        half = f" The approach to it has a half-life of {number(at.half_life)} steps."
        return "yes", f"Steps and decay balance: over {where}, {rates}{norms}.{half}"
    if found.verdict == "near":
        within = "The norm is constant, and the rate is within two standard errors (±) of the predicted one"
        return "undecided", f"Over {where}, {rates}{norms}. {within}. Record more steps."
    if found.verdict == "elsewhere":
        why = _why_elsewhere(layer, found)
        return (
            "no",
            f"Over {where}, {rates}{norms}. The norm is constant, but the rate is not the predicted one: {why}.",
        )
    moves = f"the norm still {'grows' if found.verdict == 'growing' else 'shrinks'} by {number(abs(found.drift))} of "
    moves += f"itself per step (decay alone takes {number(found.shrinkage)})"
    left = f" About {number(found.left)} more steps get it there." if found.arrives else ""
    return "no", f"Not yet or no longer: over {where}, {moves}; {rates}{norms}.{left}"


def _why_elsewhere(layer: Evidence, found: Balance) -> str:
    """Return why the norm is constant at a rate that is not the predicted one: failed assumptions come first."""
    changed = None if layer.held else unsteady(layer, began=found.began)
    if changed is not None:
        return f"{varied(layer)}, which the prediction assumes: {quarters(changed)}"
    if layer.optimizer.tolerance > 0.1:
        return "the prediction assumes unrelated successive gradients, and steps orthogonal to the weights"
    return "something other than decay and steps holds it"


def _formula(layer: Evidence) -> str:
    rule = layer.optimizer
    beta = rule.options.get("momentum", 0.0)
    if rule.kind == "adamw":
        return "√(2ηλ(1−β₁)/(1+β₁))" if beta else "√(2ηλ)"
    plain = not rule.options.get("nesterov") and not rule.options.get("dampening")
    return "√(2ηλ)" if not beta else "√(2ηλ/(1+β))" if plain else "√(2dΣc²)/Σc"


def _jacobian(rule: Optimizer) -> str:
    """Return what the penalty is if C is near the Gauss-Newton matrix; exact under the chapter's assumptions."""
    if rule.family != "second order":
        return ""
    return (
        " If C is the Gauss-Newton matrix, this is the norm of the network's Jacobian for squared errors and networks "
        "without biases and normalizers, and similar to it otherwise."
    )


def decay_statement(layer: Evidence, invariant: bool | None) -> tuple[Statement, tuple[str, ...]]:
    """State by which of the three mechanisms weight decay can act on the layer."""
    name, rule = layer.info.name, layer.optimizer

    def said(verdict: Verdict, words: str, source: str, *which: str) -> tuple[Statement, tuple[str, ...]]:
        return Statement(name, "weight decay", verdict, words, source), which

    if layer.missing("weight_decay"):
        return said("undecided", sentence(record(["weight_decay"])), "section 5")
    if not layer.stepped:
        return said("does not apply", UNSTEPPED, "equation 22")
    if rule.family == "controlled" and layer.held:
        words = f"because {rule.name} takes only the direction from the inner optimizer: the norm does not decay."
        return said("does not apply", words, "section 5")
    if not layer.decayed:
        return said("does not apply", "because weight decay is zero.", "equation 22")
    if rule.family == "controlled" or rule.grafted:
        norm = f"; the norm {course(layer)}" if len(layer.norms) else ""
        words = f"There is no theory for weight decay under {rule.name}: it enters a length or a direction{norm}."
        return said("undecided", words, "section 5")
    if (all_of_it := taken(layer)) is not None:
        return said("does not apply", all_of_it, "equation 22")
    if invariant is None:
        words = "The mechanism depends on whether the layer is scale-invariant, which is undecided."
        return said("undecided", words, "section 5")
    if (kept := _kept(layer, invariant)) is not None:
        return said(*kept, "section 5")
    if not invariant:
        norm = f"C = {rule.penalty}" if rule.penalty else "a C that depends on the optimizer"
        words = (
            f"It can act as a regularizer: it penalizes ‖w‖²_C with {norm}.{_jacobian(rule)} It cannot act through the "
            "effective learning rate or the damping: both require a layer whose norm does not matter."
        )
        return said("yes", words, "section 5.3, equation 27", "regularization")
    ruled = "It cannot act as a regularizer: the loss does not depend on the norm"
    if rule.family == "second order" and not rule.damps:
        words = f"None of the three mechanisms applies: the steps of {rule.name} do not depend on the norm. {ruled}."
        return said("no", words, "section 5")
    if rule.family == "second order":
        words = (
            "It can act through the damping: curvature goes as 1/‖w‖², and decay keeps the norm from growing until "
            f"only the damping is left. It cannot act through the effective learning rate. {ruled}."
        )
        return said("yes", words, "section 5.2, equation 26", "damping")
    if rule.family == "unknown":
        which = untold(layer)
        if not rule.why:
            which = (
                "It acts through the effective learning rate or the damping, depending on whether "
                f"{rule.name} preconditions by the curvature."
            )
        return said("undecided", f"{which} {ruled}.", "section 5")
    grown = f"It can act through the effective learning rate, which is higher for a smaller norm. {ruled}"
    return said("yes", f"{grown}. There is no damping.", "section 5.1", "effective learning rate")


def _kept(layer: Evidence, invariant: bool) -> tuple[Verdict, str] | None:
    """Return the verdict on decay if the norm stayed although decay acts at every step; None if decay can act."""
    if not layer.held:
        return None
    stayed = f"its norm stayed at {number(float(layer.norms.mean()))}"
    found = balance(layer) if invariant and layer.optimizer.kind is not None and unruled(layer) is None else None
    if found is None:
        return (
            "undecided",
            f"{stayed[0].upper()}{stayed[1:]}. The run does not show whether decay or something else holds it.",
        )
    if found.verdict == "elsewhere":
        return "does not apply", f"because {stayed}, and something other than decay and steps holds it."
    if found.verdict == "there":
        return None
    why = "its rate is too noisy" if found.verdict in ("near", "noisy") else "decay has taken too little of it"
    return "undecided", f"{stayed[0].upper()}{stayed[1:]}: {why} to tell what holds it."


# Where the theory stops.


def stopped(layer: Evidence, invariant: bool | None) -> tuple[Verdict, str] | None:
    """Return why the theory does not cover the norm and its learning rate, or None if it does."""
    rule = layer.optimizer
    if not layer.stepped:
        return "does not apply", UNSTEPPED
    if rule.family == "controlled":
        return controlled(layer)
    if invariant is None:
        return "undecided", "It is undecided whether the layer is scale-invariant."
    if not invariant:
        return "does not apply", "because the layer is not scale-invariant: its norm matters to the loss."
    if rule.family == "second order":
        but = ", except for its damping" if rule.damps else ""
        words = f"because {rule.name} undoes a rescaling of the weights{but}: its steps grow in proportion to them."
        return "does not apply", words
    if rule.family == "unknown":
        return "undecided", untold(layer)
    return None


def untold(layer: Evidence) -> str:
    """Return why there is no theory for the optimizer."""
    why = layer.optimizer.why or "it covers SGD, Adam, AdamW and RMSprop"
    return f"There is no theory for {layer.optimizer.name}: {why}."


def controlled(layer: Evidence) -> tuple[Verdict, str]:
    """Return what a controller does instead, if the norm is held or the angle does not depend on it."""
    rule, turns = layer.optimizer, layer.angle[layer.since :]
    turns = turns[np.isfinite(turns)]
    rate = f"{number(_mean(turns))} rad per step" if len(turns) else "a fixed angle per step"
    makes = "makes the learning rate a relative step length" if rule.relative else "sets the length of steps"
    if layer.held:
        kept = f"and its norm is held at {number(float(layer.norms.mean()))}"
        return "does not apply", f"because {rule.name} {makes}: the layer turns by {rate}, {kept}."
    if rule.relative and _steady(layer):
        words = f"because {rule.name} {makes}: the layer turns by {rate} whatever its norm, which {course(layer)}."
        return "does not apply", words
    if len(turns) < 2 or len(layer.norms) < 2:
        return "undecided", f"{rule.name} {makes}, and the effect was measured at fewer than two steps."
    part = max(1, len(turns) // 10)
    turned = f"{number(_mean(turns[:part]))} rad per step at first and {number(_mean(turns[-part:]))} at the end"
    words = (
        f"There is no theory for {rule.name}: it {makes} and leaves the norm free. The norm {course(layer)}, and the "
        f"layer turned by {turned}."
    )
    return "undecided", words


def course(layer: Evidence) -> str:
    """Return the first and the last norm, as a predicate."""
    return f"went from {number(float(layer.norms[0]))} to {number(float(layer.norms[-1]))}"


def _mean(turns: Floats) -> float:
    return float(np.sqrt(np.square(turns).mean()))


def _steady(layer: Evidence) -> bool:
    """Return True if tan θ was the same multiple of the learning rate at all steps."""
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.tan(layer.angle[layer.since :]) / layer.lr[layer.since :]
    share = share[np.isfinite(share)]
    if len(share) < ENOUGH or len(layer.norms) < 2:
        return False
    low, middle, high = np.quantile(share, [0.05, 0.5, 0.95])
    return bool(high - low <= _STEADY * middle)


def taken(layer: Evidence) -> str | None:
    """Return why weight decay has no theory if one step removes all of the weights; None if it does not.

    SGD, preconditioned or not, and AdamW add λw to their steps unscaled. The last ηλ above 0 counts.
    """
    rule, part = layer.optimizer, slice(layer.since, None)
    if not (rule.family == "second order" or (rule.family == "first order" and rule.decays)):
        return None
    shares = layer.lr[part] * layer.decay[part]
    shares = shares[shares > 0]
    if not len(shares) or shares[-1] < 1:
        return None
    return f"because ηλ is {number(float(shares[-1]))}: one step would remove all of the weights; ηλ must be below 1."


def unruled(layer: Evidence) -> str | None:
    """Return why the recurrence of the norm is not known though an effective learning rate is; None if it is known."""
    rule = layer.optimizer
    if not rule.orthogonal:
        return f"There is no theory for the norm under {rule.name}, whose steps are not orthogonal to the weights."
    if layer.decayed and rule.grafted:
        return f"There is no theory for weight decay under {rule.name}: it enters a length or a direction."
    if layer.decayed and not rule.decays:
        return (
            f"There is no theory for the weight decay of {rule.name}, which, unlike AdamW's, is divided by √v together "
            "with the gradient."
        )
    return None


def varied(layer: Evidence) -> str:
    """Return a clause: the quantity that the recurrence of the norm assumes to be constant was not."""
    sgd = layer.optimizer.kind == "sgd"
    what = "‖∇‖‖w‖" if sgd else "the length of steps across the weights, divided by η,"
    return f"{what} did not stay constant"


def quarters(found: tuple[float, float]) -> str:
    """Return the range that `unsteady` gives, as a clause."""
    return f"over quarters of the steps it ranged from {number(found[0])} to {number(found[1])}"


def broke(layer: Evidence) -> str:
    """Return a sentence for a layer that diverged, else ""."""
    return "" if layer.broken is None else f" Its norm is not finite from step {layer.broken:,} on."


def ended(layer: Evidence) -> str:
    """Return the step since which nothing can be measured, as a clause; "" if there is none."""
    if layer.broken is not None and layer.broken <= (layer.ungraded or layer.broken):
        return f"its norm is not finite from step {layer.broken:,} on"
    return "" if layer.ungraded is None else f"it has no finite gradient from step {layer.ungraded:,} on"


def after(layer: Evidence) -> str:
    """Return the clause that limits a statement to the steps after the run was resumed; "" if it was not."""
    if not layer.since:
        return ""
    return f" since the run was resumed at step {layer.resumed:,} (the optimizer before that is not recorded)"
