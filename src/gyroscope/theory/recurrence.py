"""What theory knows of an optimizer, from how a run remembers it: whose recurrence of the norm it follows.

Where only the direction of a layer's weights matters, one step takes ‖w‖ to the next by a rule that depends on the
optimizer (sections 4.3 and 5.1 of Grosse's chapter; `gyroscope.theory.equilibrium` has it with momentum):

    SGD:  ‖w‖⁴ ← (1 − 4d)‖w‖⁴ + 2η²‖∇‖²‖w‖²        Adam, AdamW, RMSprop:  ‖w‖² ← (1 − 2d)‖w‖² + η²n

with d the share of the weights that decay takes, and n their number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, Literal

from gyroscope.theory.effective_rate import Kind
from gyroscope.theory.equilibrium import Memory

#: Optimizers around others, whose learning rate is no η: it is an angle, or another optimizer's length.
CONTROLLERS = ("Layca", "Graft")
#: The options that a recurrence depends on, besides the learning rate and weight decay, which runs hold by layer.
OPTIONS = ("momentum", "dampening", "nesterov", "betas", "alpha", "amsgrad", "centered", "decoupled_weight_decay")

Family = Literal["first order", "second order", "controlled", "unknown"]

_SECOND = ("KFAC", "QuasiDiagonal")
# Steps of the summed momentum after which what the first gradients left in it is below one percent.
_SETTLES = 5.0


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


@dataclass(frozen=True)
class Optimizer:
    """An optimizer as the theory sees it, of one layer.

    Attributes:
        name: its class, with that of the optimizer within it.
        family: "first order" where sections 4.3 and 5.1 apply, "second order" for preconditioners whose steps grow with
            the weights (section 5.2), "controlled" where the learning rate is an angle or a length, else "unknown".
        kind: whose recurrence of the norm holds, "sgd" or "adamw"; None where there is none.
        options: momentum, dampening and nesterov, as `Memory.of` and `equilibrium` take them.
        decays: whether the recurrence knows what its weight decay does.
        penalty: the C of equation 27 in words: weight decay penalizes ‖w‖²_C.
        settles: the steps after which averages that the optimizer keeps have forgotten where they started.
        why: why there is no theory for it, where something is known of that.
        relative: whether steps that it controls are a share of the weights long.
        unseen: whether it has weight decay of which the run has no series: within Layca, and of Graft's direction.
        grafted: whether lengths and directions of its steps are of two optimizers.
        orthogonal: whether steps on a scale-invariant layer are orthogonal to the weights where its gradients are, or
            taken for that.
        damps: whether it adds to the curvature what does not fall with it as the weights grow.
    """

    name: str
    family: Family
    kind: Kind | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    decays: bool = True
    penalty: str = ""
    settles: int = 0
    why: str = ""
    relative: bool = False
    unseen: bool = False
    grafted: bool = False
    orthogonal: bool = True
    damps: bool = False

    @property
    def tolerance(self) -> float:
        """How far a rate may be from the predicted one: that of SGD follows from orthogonality alone, others do not."""
        return 0.1 if self.kind == "sgd" and not self.options.get("nesterov") else 0.2

    @property
    def memory(self) -> Memory:
        """Its momentum, where it has a kind."""
        return Memory.of(self.kind or "sgd", **self.options)


def optimizer_of(given: Mapping[str, Any], *, steered: bool = True, layer: str = "") -> Optimizer:
    """What is known of an optimizer that a run remembers by its class and its options.

    Args:
        given: one of `run.meta["optimizers"]`.
        steered: whether a controller such as Layca sets the steps of the layer in question, or leaves them to its inner
            optimizer.
        layer: the layer's name; a preconditioner passes some through.

    >>> known = optimizer_of({"class": "SGD", "momentum": 0.9})
    >>> known.kind, round(known.memory.total, 6), known.settles
    ('sgd', 10.0, 50)
    >>> optimizer_of({"class": "Layca", "inner": "SGD"}).family
    'controlled'
    """
    name, inner = str(given.get("class") or "an optimizer that was not recorded"), given.get("inner")
    full = f"{name} around {inner}" if inner else name
    if name == "Graft":
        return _grafted(given, full, layer)
    if name in CONTROLLERS and (steered or not inner):
        relative = given.get("law", {}).get("scale") == "relative"
        return Optimizer(full, "controlled", relative=relative, unseen=_decays(given))
    if name in CONTROLLERS:
        return optimizer_of(_within(given), layer=layer)
    differ = [option for option in given.get("differ", ()) if option in OPTIONS]
    if differ:
        return Optimizer(full, "unknown", why=f"its groups differ in {', '.join(differ)}")
    if name in _SECOND or "kfac" in name.lower():
        return _preconditioned(given, full, layer)
    rule = recurrence_of(given)
    if rule is None:
        return Optimizer(full, "unknown")
    divided = rule.kind == "adamw" and rule.decays
    penalty = "√v, the diagonal that it divides by" if divided else "I, the Euclidean norm"
    return Optimizer(full, "first order", rule.kind, rule.options, rule.decays, penalty, _settles(rule))


def _within(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a run remembers of the inner optimizer; its options are those of the outer one."""
    return {**given, "inner": None, **given.get("within", {}), "class": given.get("inner")}


def _decays(given: Mapping[str, Any]) -> bool:
    return bool(given.get("decays", given.get("weight_decay", 0.0)))


def _grafted(given: Mapping[str, Any], full: str, layer: str) -> Optimizer:
    """Graft's steps are as long as its magnitude's: how they go with the norm is as there, but nothing decays."""
    lengths = optimizer_of(_within(given), layer=layer)
    if given.get("direction"):
        full += f", in the directions of {given['direction']}"
    if given.get("granularity") != "tensor":
        lengths = Optimizer(full, "unknown", why="its lengths are not known to be those of single layers")
    return replace(lengths, name=full, decays=False, unseen=_decays(given), grafted=True)


def _preconditioned(given: Mapping[str, Any], full: str, layer: str) -> Optimizer:
    """A preconditioner divides by the curvature, which falls as 1/‖w‖² with the square of the gradient.

    So steps of SGD along its directions grow as the weights do, if it knows the scale of the gradients; steps of Adam
    are as long as they are whatever the direction's length.
    """
    name, within = given.get("class"), optimizer_of(_within(given), layer=layer)
    module, _, attribute = layer.rpartition(".")
    passed = module in given.get("unsupported", {}) or attribute != "weight"
    if name not in _SECOND or "layers" not in given or not (passed or module in given["layers"]):
        return Optimizer(full, "unknown", why="whether it preconditions this layer was not recorded")
    if passed:
        return replace(within, name=f"{within.name} (whose gradient {name} passes through)")
    if within.family != "first order":
        return Optimizer(full, "unknown", why=within.why)
    if not given.get("labels", True):
        penalty = "the moments of activations that it preconditions by" if within.kind == "sgd" else ""
        return replace(within, name=full, penalty=penalty, orthogonal=False)
    if within.kind != "sgd":
        why = f"{within.name} makes its steps as long as they are whatever the curvature that they are divided by"
        return Optimizer(full, "unknown", why=why)
    damps = name == "KFAC" and bool(given.get("damping"))
    return Optimizer(full, "second order", penalty="the curvature that it preconditions by", damps=damps)


def _settles(rule: Recurrence) -> int:
    momentum = rule.options.get("momentum", 0.0)
    first = _SETTLES / (1 - momentum) if momentum else 0.0
    second = 0.0 if rule.second is None else 1 / (1 - rule.second)
    return ceil(round(max(first, second), 6))
