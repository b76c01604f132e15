"""Whose recurrence of the norm an optimizer follows, from how a run remembers it: by its class and its options.

Where only the direction of a layer's weights matters, one step takes ‖w‖ to the next by a rule that depends on the
optimizer (sections 4.3 and 5.1 of Grosse's chapter; `gyroscope.theory.equilibrium` has it with momentum):

    SGD:  ‖w‖⁴ ← (1 − 4d)‖w‖⁴ + 2η²‖∇‖²‖w‖²        Adam, AdamW, RMSprop:  ‖w‖² ← (1 − 2d)‖w‖² + η²n

with d the share of the weights that decay takes, and n their number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

#: Optimizers around others, whose learning rate is no η: it is an angle, or another optimizer's length.
CONTROLLERS = ("Layca", "Graft")
#: The options that a recurrence depends on, besides the learning rate and weight decay, which runs hold by layer.
OPTIONS = ("momentum", "dampening", "nesterov", "betas", "alpha", "amsgrad", "centered", "decoupled_weight_decay")


@dataclass(frozen=True)
class Recurrence:
    """A recurrence of the norm, with what it depends on.

    Attributes:
        kind: "sgd", or "adamw" where steps are as long as they are whatever the gradient's length.
        options: momentum (β₁ of Adam), dampening and nesterov, where the optimizer has them.
        decays: whether it knows what weight decay does; not so where λw is divided by √v with the gradient.
        second: β₂, or α of RMSprop; None where no second moments are kept.
    """

    kind: Literal["sgd", "adamw"]
    options: Mapping[str, Any] = field(default_factory=dict)
    decays: bool = True
    second: float | None = None


def optimizers_in(meta: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The optimizers that a run remembers; nothing is known of one that is not described as `watch` does.

    >>> optimizers_in({"optimizers": [{"class": "SGD"}, "Adam"]}), optimizers_in({"optimizers": 5})
    ([{'class': 'SGD'}, {}], [])
    """
    given = meta.get("optimizers", ())
    return [one if isinstance(one, Mapping) else {} for one in given] if isinstance(given, list | tuple) else []


def recurrence_of(given: Mapping[str, Any]) -> Recurrence | None:
    """The recurrence of an optimizer, or None where theory has none for it.

    Args:
        given: one of `run.meta["optimizers"]`: its `class`, and the options of its groups.

    >>> recurrence_of({"class": "SGD", "momentum": 0.9}).options
    {'momentum': 0.9, 'dampening': 0.0, 'nesterov': False}
    >>> adam = recurrence_of({"class": "Adam", "betas": [0.9, 0.99]})
    >>> adam.kind, adam.decays, adam.second
    ('adamw', False, 0.99)
    >>> recurrence_of({"class": "Lion"}) is None
    True
    >>> recurrence_of({"class": "SGD", "differ": ["momentum"]}) is None    # whose momentum it is, a run does not say
    True
    """
    if any(option in OPTIONS for option in given.get("differ", ())):
        return None
    name, momentum = given.get("class"), float(given.get("momentum", 0.0) or 0.0)
    match name:
        case "SGD" | "SGD_AMom":
            dampening = momentum if name == "SGD_AMom" else float(given.get("dampening", 0.0))
            nesterov = bool(given.get("nesterov", False))
            return Recurrence("sgd", {"momentum": momentum, "dampening": dampening, "nesterov": nesterov})
        case "Adam" | "AdamW" if not given.get("amsgrad", False):
            first, second = (float(beta) for beta in given.get("betas", (0.9, 0.999)))
            decoupled = name == "AdamW" or bool(given.get("decoupled_weight_decay", False))
            return Recurrence("adamw", {"momentum": first}, decoupled, second)
        case "RMSprop" if not momentum and not given.get("centered", False):
            return Recurrence("adamw", decays=False, second=float(given.get("alpha", 0.99)))
        case _:
            return None
