"""What the theory of scale-invariant layers knows of an optimizer, from how a run remembers it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Literal

from gyroscope.dynamics.equilibrium import Memory
from gyroscope.dynamics.law import Kind
from gyroscope.recurrence import CONTROLLERS, Recurrence, recurrence_of

Family = Literal["first order", "second order", "controlled", "unknown"]

_SECOND = ("KFAC", "QuasiDiagonal")
# What a group may have of its own that the recurrence of the norm depends on.
_MATTERS = ("momentum", "dampening", "nesterov", "betas", "alpha", "amsgrad", "centered", "decoupled_weight_decay")
# Steps of the summed momentum after which what the first gradients left in it is below a percent.
_SETTLES = 5.0


@dataclass(frozen=True)
class Optimizer:
    """An optimizer as the theory sees it.

    Attributes:
        name: its class, with that of the optimizer within it.
        family: "first order" where sections 4.3 and 5.1 apply, "second order" for preconditioners (section 5.2),
            "controlled" where the learning rate is an angle or a length, else "unknown".
        kind: whose recurrence of the norm holds, "sgd" or "adamw"; None where there is none.
        options: momentum, dampening and nesterov, as `Memory.of` and `equilibrium` take them.
        decays: whether the recurrence knows what its weight decay does.
        penalty: the C of equation 27 in words: weight decay penalizes ‖w‖²_C.
        settles: the steps after which averages that the optimizer keeps have forgotten where they started.
    """

    name: str
    family: Family
    kind: Kind | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    decays: bool = True
    penalty: str = ""
    settles: int = 0

    @property
    def tolerance(self) -> float:
        """How far a rate may be from the predicted one: that of SGD follows from orthogonality alone, others do not."""
        return 0.1 if self.kind == "sgd" and not self.options.get("nesterov") else 0.2

    @property
    def memory(self) -> Memory:
        """Its momentum, where it has a kind."""
        return Memory.of(self.kind or "sgd", **self.options)


def optimizer_of(given: Mapping[str, Any], *, steered: bool = True) -> Optimizer:
    """What is known of an optimizer that a run remembers by its class and its options.

    Args:
        given: one of `run.meta["optimizers"]`.
        steered: whether a controller such as Layca sets the steps of the layer in question, or leaves them to its inner
            optimizer.

    >>> known = optimizer_of({"class": "SGD", "momentum": 0.9})
    >>> known.kind, round(known.memory.total, 6), known.settles
    ('sgd', 10.0, 50)
    >>> optimizer_of({"class": "Layca", "inner": "SGD"}).family
    'controlled'
    """
    name, inner = str(given.get("class") or "an optimizer that was not recorded"), given.get("inner")
    full = f"{name} around {inner}" if inner else name
    if name in CONTROLLERS and (steered or name == "Graft"):
        return Optimizer(full, "controlled")
    if name in CONTROLLERS and inner:
        return optimizer_of({**given, "class": inner, "inner": None})
    differ = [option for option in given.get("differ", ()) if option in _MATTERS]
    if differ:
        return Optimizer(f"{full}, whose groups differ in {', '.join(differ)},", "unknown")
    if name in _SECOND or "kfac" in name.lower():
        return Optimizer(full, "second order", penalty="the curvature that it preconditions by")
    rule = recurrence_of(given)
    if rule is None:
        return Optimizer(full, "unknown")
    divided = rule.kind == "adamw" and rule.decays
    penalty = "√v, the diagonal that it divides by" if divided else "I, the Euclidean norm"
    return Optimizer(full, "first order", rule.kind, rule.options, rule.decays, penalty, _settles(rule))


def _settles(rule: Recurrence) -> int:
    momentum = rule.options.get("momentum", 0.0)
    first = _SETTLES / (1 - momentum) if momentum else 0.0
    second = 0.0 if rule.second is None else 1 / (1 - rule.second)
    return ceil(round(max(first, second), 6))
