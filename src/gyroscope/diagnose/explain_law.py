"""A statement of section 4.3: does the effective learning rate decay by itself, and by which law."""

from __future__ import annotations

from math import inf, isfinite, nan

import numpy as np

from gyroscope.diagnose.explain_evidence import ENOUGH, Evidence
from gyroscope.diagnose.explain_grounds import after, broke, course, quarters, stopped, supposed, taken, unruled
from gyroscope.diagnose.explain_measure import Fit, fitted, unsteady
from gyroscope.diagnose.explain_statement import Statement, Verdict, number, record, sentence, times

# R² of the law from which it is said to hold.
_FITS = 0.9
# And how far it may be from the effective learning rate, on average: R² is near 1 for anything that grows steadily.
_OFF = 0.1
# How much of ‖w‖⁴ steps must have added for the law to be told from a straight line: a third is added after k₀/2 steps.
_GROWN = 1 / 3


def law_statement(layer: Evidence, invariant: bool | None) -> tuple[Statement, float, float]:
    """Whether the effective learning rate decays as 1/√(1 + k/k₀), with k₀ and R²; NaN where that is not said."""

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
            f"because its norm stayed at {number(float(layer.norms.mean()))}: the weights are renormalized, or rest."
        )
        return said("does not apply", words)
    if law.k0 == inf:
        alone = layer.decayed and law.off <= _OFF
        words = f"because its norm, {course(layer)}, did not grow by its steps"
        return said("does not apply", f"{words}: decay alone accounts for it." if alone else f"{words}.")
    if law.grown >= _GROWN and (law.r2 < _FITS or law.off > _OFF):
        best = f"k₀ = {number(law.k0)} steps{_at(layer)} is the best, and does not fit"
        off = f"{len(layer.norms):,} measured norms: R² {law.r2:.3f}, off by {100 * law.off:.0f} %"
        words = f"{best} {off}. {_why_not(layer)}{broke(layer)}"
        return said("no", words, nan, law.r2)
    if layer.decayed and 1 / law.k0 <= law.fall and layer.norms[-1] < layer.norms[0]:
        return said(*_from_above(layer, law), nan, law.r2 if law.grown >= _GROWN else nan, "equation 23")
    if law.grown < _GROWN:
        few = f"{_span(layer):,} steps are too few for k₀: so early, any slow growth looks like it"
        more = broke(layer) or ("" if _at(layer) else f" Record {number(law.k0)} steps or more.")
        return said("undecided", f"{_fit(layer, law)}, but {few}.{more}")
    return said("yes", f"{_goes(layer, law)}{after(layer)}.{broke(layer)}", law.k0, law.r2)


def _fit(layer: Evidence, law: Fit) -> str:
    how = "with" if law.r2 >= _FITS else "best, with"
    return f"k₀ = {number(law.k0)} steps{_at(layer)} fits {len(layer.norms):,} measured norms {how} R² {law.r2:.3f}"


def _goes(layer: Evidence, law: Fit) -> str:
    """What the law says of a norm that grows."""
    if layer.decayed:
        return f"With weight decay it starts like 1/√(1 + k/k₀) and levels off (equation 23): {_fit(layer, law)}"
    if _at(layer):
        return f"The growth of the norm divides it by √(1 + k/k₀): {_fit(layer, law)}"
    return f"It decays by itself as 1/√(1 + k/k₀): {_fit(layer, law)}, and {3 * law.k0:,.0f} steps halve it"


def _from_above(layer: Evidence, law: Fit) -> tuple[Verdict, str]:
    """What it says of one that is above its equilibrium: k₀ is the time of a growth that there is none of."""
    down = f"the norm, {course(layer)}, comes down from above: decay took more of it at first than steps added"
    if law.grown < _GROWN:
        power = "‖w‖⁴" if layer.optimizer.kind == "sgd" else "‖w‖²"
        few = f"{number(max(0.0, law.grown))} of {power} is of steps so far, too little to tell by what law they add it"
        return "undecided", f"{sentence(down)} {few}.{broke(layer)}"
    fits = f"Equation 23 fits {len(layer.norms):,} measured norms with R² {law.r2:.3f}{after(layer)}, and {down}"
    felt = "" if _at(layer) else ", so that the effective learning rate rises"
    return "no", f"{fits}{felt}.{broke(layer)}"


def _rates(layer: Evidence) -> np.ndarray:
    lr = layer.lr[layer.since :]
    return np.asarray(lr[lr > 0])


def _at(layer: Evidence) -> str:
    """At which learning rate k₀ counts steps, where there are several."""
    lr = _rates(layer)
    if np.ptp(lr) <= 1e-6 * lr.max():
        return ""
    top = number(float(lr.max()))
    return f" at α = {top}, the largest (a step at α counts (α/{top})²),"


def _span(layer: Evidence) -> int:
    part = layer.steps[layer.since :][np.isfinite(layer.norm[layer.since :])]
    return int(part[-1] - part[0])


def _why_not(layer: Evidence) -> str:
    found = unsteady(layer)
    if found is None:
        return "Why, the run does not say."
    what = supposed(layer)
    return f"{what[0].upper()}{what[1:]}, which the law takes for granted: {quarters(found)}."
