"""Statements of section 4.3: is the layer scale-invariant, and what became of its learning rate."""

from __future__ import annotations

from math import isfinite, nan
from typing import NamedTuple

import numpy as np

from gyroscope.dynamics.explain_evidence import Evidence
from gyroscope.dynamics.explain_grounds import after, divided, stopped
from gyroscope.dynamics.explain_measure import ENOUGH, INVARIANT, RELATED, Orthogonality, fitted
from gyroscope.dynamics.explain_statement import Statement, Verdict, number, record, sentence
from gyroscope.dynamics.invariance_result import LayerInvariance

# R² of the law from which it is said to hold.
_FITS = 0.9
# And how far it may be from the effective learning rate, on average: R² is near 1 for anything that grows steadily.
_OFF = 0.1
# How much of ‖w‖⁴ steps must have added for the law to be told from a straight line: a third is added after k₀/2 steps.
_GROWN = 1 / 3


class Change(NamedTuple):
    """Learning rates at the first and the last step at which there were any, and what the norm's growth did to them.

    Attributes:
        lr: α at both.
        effective: α/‖w‖² at both; α/‖w‖ for Adam and its kin, whose steps are as long whatever the gradient.
        implicit: the factor on the effective rate that is due to the norm alone.
        steps: k at both.
    """

    lr: tuple[float, float]
    effective: tuple[float, float]
    implicit: float
    steps: tuple[int, int]


def scale_statement(layer: Evidence, found: Orthogonality, model: LayerInvariance | None) -> tuple[Statement, str]:
    """Whether a layer is scale-invariant, in words and as "unit", "tensor", "no" or "undecided: why"."""

    def said(verdict: Verdict, words: str, short: str) -> tuple[Statement, str]:
        return Statement(layer.info.name, "scale invariance", verdict, words, "equation 16"), short

    told = None if model is None or model.scale_invariant.startswith("undecided") else model.scale_invariant
    if found.count:
        seen = (
            f"√n·|⟨w,∇⟩|/(‖w‖‖∇‖) has a median of {number(found.median)} and is below {number(found.most)} at nine in "
            f"ten of {found.count:,} measured steps"
        )
    else:
        seen = "no gradient of it was recorded"
    if found.found is not None and told is not None and found.found != (told != "no"):
        words = (
            f"In the run, {seen}; the model that was given says the opposite. Give the model in the mode it was "
            "trained in, and its loss."
        )
        return said("undecided", words, "undecided: run and model disagree")
    if told == "unit":
        words = (
            f"Each of its {model.units if model else 0} units can be rescaled by itself, as the model shows; {seen}."
        )
        return said("yes", words, "unit")
    if found.found or told == "tensor":
        only = "Only its weights as a whole can be rescaled, and not a unit at a time, as the model shows"
        unit = "Whether each unit is so by itself a run does not say: give model, loss and batch"
        words = (
            f"Its gradients are orthogonal to its weights: {seen}, where unrelated directions have a median of 0.67."
        )
        return said("yes", f"{words} {only if told else unit}.", "tensor")
    if found.found is False or told == "no":
        return said("no", f"Its norm matters to the loss: {seen}, where a scale-invariant layer has zero.", "no")
    if not found.count:
        why = record(["invariance"]) if layer.missing("invariance") else "it had no gradient at any measured step"
        return said("undecided", sentence(why), f"undecided: {why.split(';')[0]}")
    if found.count < ENOUGH:
        words = f"Gradients were measured at {found.count} steps, and {ENOUGH} are needed: record more often or longer."
        return said("undecided", words, "undecided: too few steps")
    words = (
        f"{seen[0].upper()}{seen[1:]}: neither zero (below {INVARIANT}) nor that of a layer whose norm matters (a "
        f"median above {RELATED}). A bias before a normalizer, an ε as large as the activations or a norm at its "
        "optimum look like this; gyroscope.invariance on the model tells them apart."
    )
    return said("undecided", words, "undecided: nearly orthogonal")


def change(layer: Evidence) -> Change | None:
    """What became of the learning rate, explicit and effective, or None where that was not recorded."""
    rows = np.flatnonzero((layer.lr > 0) & (layer.norm > 0) & np.isfinite(layer.norm))
    if len(rows) < 2 or layer.optimizer.kind is None:
        return None
    a, b = int(rows[0]), int(rows[-1])
    power = 2 if layer.optimizer.kind == "sgd" else 1
    rates = [float(layer.lr[i] / layer.norm[i] ** power) for i in (a, b)]
    implicit = float((layer.norm[a] / layer.norm[b]) ** power)
    lr = float(layer.lr[a]), float(layer.lr[b])
    return Change(lr, (rates[0], rates[1]), implicit, (int(layer.steps[a]), int(layer.steps[b])))


def rate_statement(layer: Evidence, invariant: bool | None, moved: Change | None) -> Statement:
    """Explicit against effective learning rate."""

    def said(verdict: Verdict, words: str, source: str = "section 4.3") -> Statement:
        return Statement(layer.info.name, "effective learning rate", verdict, words, source)

    reason = stopped(layer, invariant)
    if reason is not None:
        return said(*reason)
    if moved is None:
        lacks = layer.missing("lr", "weight_norm")
        why = record(lacks) if lacks else "fewer than two steps were measured at which it had a learning rate"
        return said("undecided", sentence(why))
    sgd = layer.optimizer.kind == "sgd"
    symbol = "α/‖w‖²" if sgd else "α/‖w‖ (its steps are as long whatever the gradient)"
    (a, b), (k, end) = moved.lr, moved.steps
    explicit = "stayed at" if abs(b / a - 1) < 1e-6 else f"went from {number(a)} to"
    how = "fell" if moved.implicit < 1 else "rose"
    grew = "growth" if moved.implicit < 1 else "shrinking"
    if number(moved.implicit) == "1":
        by = "the norm stayed and changed nothing of it"
    else:
        by = f"the {grew} of the norm alone multiplied it by {number(moved.implicit)}"
    words = (
        f"From step {k:,} to {end:,} α {explicit} {number(b)}, while {symbol} {how if b == a else 'went'} from "
        f"{number(moved.effective[0])} to {number(moved.effective[1])}: {by}."
    )
    return said("yes", words, "section 4.3, equation 18")


def law_statement(layer: Evidence, invariant: bool | None) -> tuple[Statement, float, float]:
    """Whether the effective learning rate decays as 1/√(1 + k/k₀), with k₀ and R²; NaN where that is not said."""

    def said(verdict: Verdict, words: str, k0: float = nan, r2: float = nan) -> tuple[Statement, float, float]:
        return Statement(layer.info.name, "implicit decay", verdict, words, "equation 19"), k0, r2

    reason = stopped(layer, invariant)
    if reason is not None:
        return said(reason[0], reason[1])
    lacks = layer.missing("lr", "weight_norm", "weight_decay")
    if lacks:
        return said("undecided", sentence(record(lacks)))
    if layer.decayed and not layer.optimizer.decays:
        return said("undecided", sentence(divided(layer)))
    part = layer.steps[layer.since :][np.isfinite(layer.norm[layer.since :])]
    law = fitted(layer)
    if not isfinite(law.off):
        return said("undecided", f"The norm was measured at {len(part)} steps{after(layer)}, and {ENOUGH} are needed.")
    span = int(part[-1] - part[0])
    if law.k0 == float("inf"):
        words = "decay alone accounts for it" if layer.decayed else "the weights are renormalized, or rest"
        return said("does not apply", f"because its norm did not grow by its steps in {span:,} of them: {words}.")
    fit = f"k₀ = {number(law.k0)} steps fits {len(part):,} measured norms with R² {law.r2:.3f}"
    if law.grown < _GROWN:
        words = (
            f"{fit}, but {span:,} steps are too few for k₀: so early, any slow growth looks like it. Record "
            f"{number(law.k0)} steps or more."
        )
        return said("undecided", words)
    if law.r2 < _FITS or law.off > _OFF:
        words = f"{fit}, off by {100 * law.off:.0f} %: ‖∇‖‖w‖ did not stay the same, which the law takes for granted."
        return said("no", words, nan, law.r2)
    if layer.decayed:
        words = f"With weight decay it starts like 1/√(1 + k/k₀) and levels off (equation 23): {fit}"
    else:
        words = f"It decays by itself as 1/√(1 + k/k₀): {fit}, and {3 * law.k0:,.0f} steps halve it"
    return said("yes", words + after(layer) + ".", law.k0, law.r2)
