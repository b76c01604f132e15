"""Where the theory stops: why nothing can be said of a layer's norm and its learning rate."""

from __future__ import annotations

import numpy as np

from gyroscope.dynamics.explain_evidence import Evidence
from gyroscope.dynamics.explain_statement import Verdict, number


def stopped(layer: Evidence, invariant: bool | None) -> tuple[Verdict, str] | None:
    """Why nothing can be said of the norm and its learning rate, or None where something can."""
    rule = layer.optimizer
    if rule.family == "controlled":
        return "does not apply", controlled(layer)
    if invariant is None:
        return "undecided", "It is undecided whether the layer is scale-invariant."
    if not invariant:
        return "does not apply", "because the layer is not scale-invariant: its norm matters to the loss."
    if rule.family == "second order":
        words = (
            f"because {rule.name} undoes a rescaling of the weights, but for its damping: its steps grow as they do."
        )
        return "does not apply", words
    if rule.family == "unknown":
        return "undecided", f"There is no theory for {rule.name}: known are SGD, Adam, AdamW and RMSprop."
    return None


def controlled(layer: Evidence) -> str:
    """What a controller does instead."""
    turns = layer.angle[np.isfinite(layer.angle)]
    rate = f"{number(float(np.sqrt(np.square(turns).mean())))} rad a step" if len(turns) else "an angle a step"
    norm = f"its norm is held at {number(float(np.nanmean(layer.norm)))}" if layer.held else "its norm is left free"
    return (
        f"because {layer.optimizer.name} makes the learning rate a relative length: the layer turns by {rate} whatever "
        f"its norm, and {norm}."
    )


def divided(layer: Evidence) -> str:
    """Why weight decay that goes through second moments has no theory."""
    return (
        f"There is no theory for the weight decay of {layer.optimizer.name}, which is divided by √v with the gradient "
        "(AdamW's is not)"
    )


def after(layer: Evidence) -> str:
    """Where the run was resumed, what is said is of what came after."""
    if not layer.since:
        return ""
    return f" since the run was resumed at step {layer.resumed:,} (the optimizer before is not recorded)"
