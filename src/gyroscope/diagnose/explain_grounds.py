"""Where the theory stops: why nothing can be said of a layer's norm and its learning rate."""

from __future__ import annotations

import numpy as np

from gyroscope.diagnose.explain_evidence import ENOUGH, Evidence
from gyroscope.diagnose.explain_statement import Verdict, number
from gyroscope.theory.law import Floats

# How far apart the relative lengths of nine in ten steps may be, where they are said not to depend on the norm.
_STEADY = 0.05


def stopped(layer: Evidence, invariant: bool | None) -> tuple[Verdict, str] | None:
    """Why nothing can be said of the norm and its learning rate, or None where something can."""
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
        but = ", but for its damping" if rule.damps else ""
        return (
            "does not apply",
            f"because {rule.name} undoes a rescaling of the weights{but}: its steps grow as they do.",
        )
    if rule.family == "unknown":
        return "undecided", untold(layer)
    return None


#: Of a layer that is frozen.
UNSTEPPED = "because no optimizer steps it."


def untold(layer: Evidence) -> str:
    """Why there is no theory."""
    why = layer.optimizer.why or "known are SGD, Adam, AdamW and RMSprop"
    return f"There is no theory for {layer.optimizer.name}: {why}."


def controlled(layer: Evidence) -> tuple[Verdict, str]:
    """What a controller does instead: said where the norm is held, or where the angle does not depend on it."""
    rule, turns = layer.optimizer, layer.angle[layer.since :]
    turns = turns[np.isfinite(turns)]
    rate = f"{number(_mean(turns))} rad a step" if len(turns) else "an angle a step"
    makes = "makes the learning rate a relative length" if rule.relative else "sets the length of steps"
    if layer.held:
        kept = f"and its norm is held at {number(float(layer.norms.mean()))}"
        return "does not apply", f"because {rule.name} {makes}: the layer turns by {rate}, {kept}."
    if rule.relative and _steady(layer):
        words = f"because {rule.name} {makes}: the layer turns by {rate} whatever its norm, {course(layer)}."
        return "does not apply", words
    if len(turns) < 2 or len(layer.norms) < 2:
        return "undecided", f"{rule.name} {makes}, and what follows from it was not measured at two steps."
    part = max(1, len(turns) // 10)
    turned = (
        f"it turned by {number(_mean(turns[:part]))} rad a step at first and {number(_mean(turns[-part:]))} at last"
    )
    return (
        "undecided",
        f"There is no theory for {rule.name}: it {makes} and leaves the norm free, {course(layer)}; {turned}.",
    )


def course(layer: Evidence) -> str:
    """How the norm went."""
    return f"which went from {number(float(layer.norms[0]))} to {number(float(layer.norms[-1]))}"


def _mean(turns: Floats) -> float:
    return float(np.sqrt(np.square(turns).mean()))


def _steady(layer: Evidence) -> bool:
    """Whether tan θ was the same share of the learning rate at all steps."""
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.tan(layer.angle[layer.since :]) / layer.lr[layer.since :]
    share = share[np.isfinite(share)]
    if len(share) < ENOUGH or len(layer.norms) < 2:
        return False
    low, middle, high = np.quantile(share, [0.05, 0.5, 0.95])
    return bool(high - low <= _STEADY * middle)


def taken(layer: Evidence) -> str | None:
    """Why weight decay has no theory where it takes all of the weights in a step; None where it does not.

    λw goes into steps as it is under SGD, preconditioned or not, and under AdamW; and the last αλ above 0 counts.
    """
    rule, part = layer.optimizer, slice(layer.since, None)
    if not (rule.family == "second order" or (rule.family == "first order" and rule.decays)):
        return None
    shares = layer.lr[part] * layer.decay[part]
    shares = shares[shares > 0]
    if not len(shares) or shares[-1] < 1:
        return None
    return f"because αλ is {number(float(shares[-1]))}: a step would take all of the weights, and αλ must be below 1."


def unruled(layer: Evidence) -> str | None:
    """Why the recurrence of the norm is not known, where an effective learning rate is; None where it is."""
    rule = layer.optimizer
    if not rule.orthogonal:
        return f"There is no theory for the norm under {rule.name}, whose steps are not orthogonal to the weights."
    if layer.decayed and rule.grafted:
        return f"There is no theory for weight decay under {rule.name}: it is a part of a length, or of a direction."
    if layer.decayed and not rule.decays:
        return (
            f"There is no theory for the weight decay of {rule.name}, which is divided by √v with the gradient "
            "(AdamW's is not)."
        )
    return None


def supposed(layer: Evidence) -> str:
    """That what the recurrence of the norm takes for constant was not."""
    sgd = layer.optimizer.kind == "sgd"
    return "‖∇‖‖w‖ did not stay the same" if sgd else "steps across the weights, over α, did not stay as long"


def quarters(found: tuple[float, float]) -> str:
    """How far it went, by `unsteady`."""
    return f"in quarters it was {number(found[0])} to {number(found[1])}"


def broke(layer: Evidence) -> str:
    """A sentence for a layer that diverged."""
    return "" if layer.broken is None else f" Its norm is not finite from step {layer.broken:,} on."


def ended(layer: Evidence) -> str:
    """Since when there is nothing left to measure, as a clause; "" where there is."""
    if layer.broken is not None and layer.broken <= (layer.ungraded or layer.broken):
        return f"its norm is not finite from step {layer.broken:,} on"
    return "" if layer.ungraded is None else f"it has no finite gradient from step {layer.ungraded:,} on"


def after(layer: Evidence) -> str:
    """Where the run was resumed, what is said is of what came after."""
    if not layer.since:
        return ""
    return f" since the run was resumed at step {layer.resumed:,} (the optimizer before is not recorded)"
