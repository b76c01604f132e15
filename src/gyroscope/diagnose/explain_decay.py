"""Statements of section 5: does weight decay hold the layer at an equilibrium, and by which mechanism can it act."""

from __future__ import annotations

from math import isfinite

from gyroscope.diagnose.explain_evidence import ENOUGH, Evidence
from gyroscope.diagnose.explain_grounds import (
    UNSTEPPED,
    after,
    broke,
    course,
    quarters,
    stopped,
    supposed,
    taken,
    unruled,
    untold,
)
from gyroscope.diagnose.explain_measure import Balance, balance, unsteady
from gyroscope.diagnose.explain_optimizer import Optimizer
from gyroscope.diagnose.explain_statement import Statement, Verdict, number, record, sentence, times

# The share of the weights lost in a step up to which the theory, of small shares, is taken to hold.
_SMALL = 0.1


def equilibrium_statement(layer: Evidence, invariant: bool | None) -> tuple[Statement, Balance | None]:
    """Whether weight decay takes as much norm as the steps add, and the layer turns at the rate that follows."""

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
        words = f"Decay takes {number(found.shrinkage)} of the weights in a step; the theory is of small shares."
        return said("undecided", words)
    carried = "" if layer.optimizer.kind == "sgd" else ", carried over to steps of constant length"
    return said(*_judged(layer, found), found, f"equations 23 to 25{carried}")


def _too_few(layer: Evidence) -> str:
    """What there is too little of, and what helps: measuring more of the steps only where there are enough of them."""
    rule, longest = layer.optimizer, 0
    for one in layer.stretches:
        if layer.decay[one.start] > 0:
            longest = max(longest, int(layer.steps[one.stop - 1] - layer.steps[one.start]))
    words = (
        f"In no stretch of constant learning rate and weight decay{after(layer)} is there enough: its later half has "
        f"to have {ENOUGH} single steps measured"
    )
    if rule.settles:
        words += f", after the {rule.settles:,} that {rule.name} takes to settle"
    words += f"; the longest lasts {times(longest)}."
    if layer.broken is not None:
        return words
    needed = max(2 * ENOUGH, rule.settles + ENOUGH)
    if longest >= needed:
        return f"{words} Record every step, by watch(budget=None)."
    return f"{words} It takes a rate that stays for {needed:,} steps or more."


def _judged(layer: Evidence, found: Balance) -> tuple[Verdict, str]:
    at = found.predicted
    formula = _formula(layer)
    where = f"steps {found.first:,} to {found.last:,}, at α = {number(found.lr)} and λ = {number(found.decay)}"
    rates = (
        f"it turns by {number(found.rate)} rad a step (±{100 * found.error:.0f} %), predicted {number(at.rate)} = "
        f"{formula}"
    )
    norms = f", at a norm of {number(found.norm)}"
    norms += f", predicted {number(at.norm)}" if isfinite(at.norm) else ""
    if broke(layer):
        return "no", f"{broke(layer).strip()} Over {where}, {rates}{norms}."
    if found.verdict == "noisy":
        return "undecided", f"Over {where}, {rates}: too noisy to tell. Record more steps."
    if found.verdict == "there":
        half = f" Half of a way to it takes {number(at.half_life)} steps."
        return "yes", f"Steps and decay balance: over {where}, {rates}{norms}.{half}"
    if found.verdict == "near":
        within = "the norm rests, and the rate is within two of its standard errors (±) of the predicted one"
        return "undecided", f"Over {where}, {rates}{norms}: {within}. Record more steps."
    if found.verdict == "elsewhere":
        why = _why_elsewhere(layer, found)
        return "no", f"Over {where}, {rates}{norms}: the norm rests, but not at the predicted rate: {why}."
    moves = f"the norm still {'grows' if found.verdict == 'growing' else 'shrinks'}, by {number(abs(found.drift))} of "
    moves += f"itself a step where decay alone takes {number(found.shrinkage)}"
    left = f" About {number(found.left)} more steps get it there." if found.arrives else ""
    return "no", f"Not yet, or not any more: over {where}, {moves}; {rates}{norms}.{left}"


def _why_elsewhere(layer: Evidence, found: Balance) -> str:
    """Why a norm rests where the rate is not the predicted one: what the prediction takes for granted comes first."""
    changed = None if layer.held else unsteady(layer, began=found.began)
    if changed is not None:
        return f"{supposed(layer)}, which the prediction takes for granted: {quarters(changed)}"
    if layer.optimizer.tolerance > 0.1:
        return "the prediction takes successive gradients for unrelated, and the step for orthogonal to the weights"
    return "something other than decay and steps holds it"


def _formula(layer: Evidence) -> str:
    rule = layer.optimizer
    beta = rule.options.get("momentum", 0.0)
    if rule.kind == "adamw":
        return "√(2αλ(1−β₁)/(1+β₁))" if beta else "√(2αλ)"
    plain = not rule.options.get("nesterov") and not rule.options.get("dampening")
    return "√(2αλ)" if not beta else "√(2αλ/(1+β))" if plain else "√(2dΣc²)/Σc"


def _jacobian(rule: Optimizer) -> str:
    """What C is where it is near the Gauss-Newton matrix; exactly so under what the chapter assumes of the network."""
    if rule.family != "second order":
        return ""
    return (
        " With the Gauss-Newton matrix for C that is the norm of the network's Jacobian, for squared errors and "
        "networks without biases and normalizers, and something like it for others."
    )


def decay_statement(layer: Evidence, invariant: bool | None) -> tuple[Statement, tuple[str, ...]]:
    """By which of the three mechanisms weight decay can act on the layer."""
    name, rule = layer.info.name, layer.optimizer

    def said(verdict: Verdict, words: str, source: str, *which: str) -> tuple[Statement, tuple[str, ...]]:
        return Statement(name, "weight decay", verdict, words, source), which

    if layer.missing("weight_decay"):
        return said("undecided", sentence(record(["weight_decay"])), "section 5")
    if not layer.stepped:
        return said("does not apply", UNSTEPPED, "equation 22")
    if rule.family == "controlled" and layer.held:
        words = f"because {rule.name} takes the direction of the inner optimizer alone: the norm does not decay."
        return said("does not apply", words, "section 5")
    if not layer.decayed:
        return said("does not apply", "because weight decay is zero.", "equation 22")
    if rule.family == "controlled" or rule.grafted:
        norm = f"; its norm {course(layer).removeprefix('which ')}" if len(layer.norms) else ""
        words = (
            f"There is no theory for weight decay under {rule.name}: it is a part of a length, or of a direction{norm}."
        )
        return said("undecided", words, "section 5")
    if (all_of_it := taken(layer)) is not None:
        return said("does not apply", all_of_it, "equation 22")
    if invariant is None:
        words = "Which mechanism can act depends on whether the layer is scale-invariant, and that is undecided."
        return said("undecided", words, "section 5")
    if (kept := _kept(layer, invariant)) is not None:
        return said(*kept, "section 5")
    if not invariant:
        norm = f"C = {rule.penalty}" if rule.penalty else "a C that depends on the optimizer"
        words = (
            f"It can act as a regularizer: it penalizes ‖w‖²_C with {norm}.{_jacobian(rule)} Effective learning rate "
            "and damping are ruled out: both are of layers whose norm does not matter."
        )
        return said("yes", words, "section 5.3, equation 27", "regularization")
    ruled = "As a regularizer it cannot act: the loss is the same whatever the norm"
    if rule.family == "second order" and not rule.damps:
        words = f"By none of the three: nothing in the steps of {rule.name} depends on the norm. {ruled}."
        return said("no", words, "section 5")
    if rule.family == "second order":
        words = (
            "It can act by way of the damping: curvature goes as 1/‖w‖², and decay keeps the norm from growing until "
            f"the damping is all that is left of it. The effective learning rate is ruled out. {ruled}."
        )
        return said("yes", words, "section 5.2, equation 26", "damping")
    if rule.family == "unknown":
        which = untold(layer)
        if not rule.why:
            which = f"Effective learning rate or damping, by whether {rule.name} preconditions by the curvature."
        return said("undecided", f"{which} {ruled}.", "section 5")
    grown = f"It can act by way of the effective learning rate, which is the higher the smaller the norm. {ruled}"
    return said("yes", f"{grown}; nothing is damped.", "section 5.1", "effective learning rate")


def _kept(layer: Evidence, invariant: bool) -> tuple[Verdict, str] | None:
    """What is said of decay where the norm stayed, though decay takes of it at every step; None where it can act."""
    if not layer.held:
        return None
    stayed = f"its norm stayed at {number(float(layer.norms.mean()))}"
    found = balance(layer) if invariant and layer.optimizer.kind is not None and unruled(layer) is None else None
    if found is None:
        return (
            "undecided",
            f"{stayed[0].upper()}{stayed[1:]}: whether decay holds it or something else, the run does not say.",
        )
    if found.verdict == "elsewhere":
        return "does not apply", f"because {stayed}, and something other than decay and steps holds it."
    if found.verdict == "there":
        return None
    why = "its rate is too noisy" if found.verdict in ("near", "noisy") else "decay has taken too little of it"
    return "undecided", f"{stayed[0].upper()}{stayed[1:]}: {why} to tell what holds it."
