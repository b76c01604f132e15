"""Statements of section 4.3: is the layer scale-invariant, and what is its learning rate really."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gyroscope.diagnose.explain_evidence import ENOUGH, Evidence
from gyroscope.diagnose.explain_grounds import after, broke, ended, stopped
from gyroscope.diagnose.explain_measure import INVARIANT, RELATED, Orthogonality
from gyroscope.diagnose.explain_statement import Statement, Verdict, number, record, sentence, times
from gyroscope.theory.invariance_result import LayerInvariance


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
    """Whether a layer is scale-invariant, in words and as "unit", "tensor", "yes", "no" or "undecided: why"."""

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
        return said("yes", f"{words} {only if told else unit}.", told or "yes")
    if found.found is False or told == "no":
        return said("no", f"Its norm matters to the loss: {seen}, where a scale-invariant layer has zero.", "no")
    if found.count < ENOUGH and (why := ended(layer)):
        before = f"before, its gradient was measured at {times(found.count)}, and {ENOUGH} are needed"
        return said("undecided", sentence(f"{why}; {before}"), "undecided: not finite")
    if found.count < ENOUGH and (dead := int((layer.gradient == 0).sum())):
        words = (
            f"Its gradient was zero at {times(dead)}, and had a direction at {times(found.count)}, where {ENOUGH} are "
            "needed: its units are dead or saturated, or the loss does not depend on it."
        )
        return said("undecided", words, "undecided: zero gradient")
    if not found.count:
        why = record(["invariance"]) if layer.missing("invariance") else "it had no gradient at any measured step"
        return said("undecided", sentence(why), f"undecided: {why.split(';')[0]}")
    if found.count < ENOUGH:
        words = (
            f"Gradients were measured at {times(found.count)}, and {ENOUGH} are needed: record longer, or at every "
            "step by watch(budget=None)."
        )
        return said("undecided", words, "undecided: too few steps")
    if found.median > RELATED:
        words = (
            "Its first gradient was orthogonal to its weights, and later ones were not. Gradients that add up over "
            "steps look like this: call optimizer.zero_grad() before each backward pass."
        )
        return said("undecided", words, "undecided: orthogonal at first")
    words = (
        f"{seen[0].upper()}{seen[1:]}: neither zero (nine in ten below {INVARIANT}) nor that of a layer whose norm "
        f"matters (a median above {RELATED}). A bias before a normalizer, an ε as large as the activations or a norm "
        "at its optimum look like this: give model, loss and batch to tell them apart."
    )
    return said("undecided", words, "undecided: nearly orthogonal")


def change(layer: Evidence) -> Change | None:
    """What became of the learning rate, explicit and effective, or None where that was not recorded."""
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
    """Explicit against effective learning rate."""

    def said(verdict: Verdict, words: str, source: str = "section 4.3") -> Statement:
        return Statement(layer.info.name, "effective learning rate", verdict, words, source)

    reason = stopped(layer, invariant)
    if reason is not None:
        return said(*reason)
    if moved is None:
        lacks = layer.missing("lr", "weight_norm")
        few = f"fewer than two steps were measured{after(layer)} at which it had a learning rate"
        why = record(lacks) if lacks else few
        return said("undecided", sentence(why))
    sgd = layer.optimizer.kind == "sgd"
    symbol = "α/‖w‖²" if sgd else "α/‖w‖ (its steps are as long whatever the gradient)"
    (a, b), (k, end) = moved.lr, moved.steps
    explicit = "stayed at" if abs(b / a - 1) < 1e-6 else f"went from {number(a)} to"
    how = "fell" if moved.implicit < 1 else "rose"
    first, last = (number(one) for one in moved.effective)
    went = f"{how if b == a else 'went'} from {first} to {last}"
    if number(moved.implicit) == "1":
        by = "the norm stayed and changed nothing of it"
        went = f"stayed at {last}" if b == a else went
    else:
        grew = "growth" if moved.implicit < 1 else "shrinking"
        by = f"the {grew} of the norm alone multiplied it by {number(moved.implicit)}"
    words = f"From step {k:,} to {end:,} α {explicit} {number(b)}, while {symbol} {went}: {by}.{broke(layer)}"
    return said("yes", words, "section 4.3, equation 18")
