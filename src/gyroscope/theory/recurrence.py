"""The norm recurrence of an optimizer, from what a run records about it.

If only the direction of a layer's weights matters, one step takes ‖w‖ to the next by a rule that depends on the
optimizer (sections 4.3 and 5.1 of Grosse's chapter; `gyroscope.theory.equilibrium` has it with momentum):

    SGD:  ‖w‖⁴ ← (1 − 4d)‖w‖⁴ + 2η²‖∇‖²‖w‖²        Adam, AdamW, RMSprop:  ‖w‖² ← (1 − 2d)‖w‖² + η²n

with d the share of the weights that decay removes, and n their number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, Literal

from gyroscope.theory.effective_rate import Kind
from gyroscope.theory.equilibrium import Memory

#: Wrappers of optimizers whose `lr` is not η but an angle, or another optimizer's step length.
CONTROLLERS = ("Layca", "Steered", "Graft")
#: Options that a recurrence depends on, besides the learning rate and weight decay, which runs hold per layer.
OPTIONS = ("momentum", "dampening", "nesterov", "betas", "alpha", "amsgrad", "centered", "decoupled_weight_decay")

Family = Literal["first order", "second order", "controlled", "unknown"]

_SECOND = ("KFAC", "QuasiDiagonal")
# In units of 1/(1 − β): the first gradients' share of the momentum is then below one percent.
_SETTLES = 5.0


@dataclass(frozen=True)
class Recurrence:
    """A recurrence of the norm, and what it depends on.

    Attributes:
        kind: "sgd", or "adamw" if the length of steps does not depend on the gradient's length.
        options: momentum (β₁ of Adam), dampening and nesterov, if the optimizer has them.
        decays: whether it includes the effect of weight decay; False if λw is divided by √v with the gradient.
        second: β₂, or `alpha` of RMSprop; None if no second moments are kept.
    """

    kind: Literal["sgd", "adamw"]
    options: Mapping[str, Any] = field(default_factory=dict)
    decays: bool = True
    second: float | None = None


def optimizers_in(meta: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the optimizers that a run records; one that is not described as `watch` does it is empty.

    >>> optimizers_in({"optimizers": [{"class": "SGD"}, "Adam"]}), optimizers_in({"optimizers": 5})
    ([{'class': 'SGD'}, {}], [])
    """
    given = meta.get("optimizers", ())
    return [one if isinstance(one, Mapping) else {} for one in given] if isinstance(given, list | tuple) else []


def recurrence_of(given: Mapping[str, Any]) -> Recurrence | None:
    """Return the recurrence of an optimizer, or None if theory has none for it.

    Args:
        given: one of `run.meta["optimizers"]`: its `class`, and the options of its groups.

    >>> recurrence_of({"class": "SGD", "momentum": 0.9}).options
    {'momentum': 0.9, 'dampening': 0.0, 'nesterov': False}
    >>> adam = recurrence_of({"class": "Adam", "betas": [0.9, 0.99]})
    >>> adam.kind, adam.decays, adam.second
    ('adamw', False, 0.99)
    >>> recurrence_of({"class": "Lion"}) is None
    True
    >>> recurrence_of({"class": "SGD", "differ": ["momentum"]}) is None    # a run does not say whose momentum
    True
    """
    if any(option in OPTIONS for option in given.get("differ", ())) or _uncovered(given):
        return None
    name, momentum = given.get("class"), float(given.get("momentum", 0.0) or 0.0)
    match name:
        case "SGD" | "SGD_AMom":
            dampening = momentum if name == "SGD_AMom" else float(given.get("dampening", 0.0))
            nesterov = bool(given.get("nesterov", False))
            return Recurrence("sgd", {"momentum": momentum, "dampening": dampening, "nesterov": nesterov})
        case "Adam" | "AdamW":
            first, second = (float(beta) for beta in given.get("betas", (0.9, 0.999)))
            decoupled = name == "AdamW" or bool(given.get("decoupled_weight_decay", False))
            return Recurrence("adamw", {"momentum": first}, decoupled, second)
        case "RMSprop":
            return Recurrence("adamw", decays=False, second=float(given.get("alpha", 0.99)))
        case _:
            return None


def _uncovered(given: Mapping[str, Any]) -> list[str]:
    """Return the options in use for which there is no recurrence, although there is one without them."""
    options = {"Adam": ("amsgrad",), "AdamW": ("amsgrad",), "RMSprop": ("momentum", "centered")}
    return [option for option in options.get(str(given.get("class")), ()) if given.get(option)]


@dataclass(frozen=True)
class Optimizer:
    """An optimizer as theory sees it, for one layer.

    Attributes:
        name: its class, with that of the optimizer within it.
        family: "first order" if sections 4.3 and 5.1 apply, "second order" for preconditioners whose steps grow with
            the weights (section 5.2), "controlled" if the learning rate is an angle or a length, else "unknown".
        kind: the recurrence of the norm that holds, "sgd" or "adamw"; None if there is none.
        options: momentum, dampening and nesterov, as `Memory.of` and `equilibrium` take them.
        decays: whether the recurrence includes the effect of its weight decay.
        penalty: the C of equation 27 in words: weight decay penalizes ‖w‖²_C.
        settles: the steps after which the optimizer's running averages have forgotten their start.
        why: why theory does not cover it, if known.
        relative: whether the steps that it controls are proportional to the weights.
        unseen: whether it has weight decay that the run has no series of: within Layca, and of Graft's direction.
        grafted: whether lengths and directions of its steps come from two optimizers.
        orthogonal: whether steps on a scale-invariant layer are orthogonal to the weights, exactly or by assumption,
            if gradients are.
        damps: whether it adds a constant to the curvature, which does not fall as the weights grow.
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
        """Accepted relative error of a predicted rate: that of SGD follows from orthogonality alone, others do not."""
        return 0.1 if self.kind == "sgd" and not self.options.get("nesterov") else 0.2

    @property
    def memory(self) -> Memory:
        """Its momentum, if it has a kind."""
        return Memory.of(self.kind or "sgd", **self.options)


def optimizer_of(given: Mapping[str, Any], *, steered: bool = True, layer: str = "") -> Optimizer:
    """Return what is known about an optimizer from the class and options that a run records.

    Args:
        given: one of `run.meta["optimizers"]`.
        steered: whether a controller such as Layca sets the steps of the layer in question, or leaves them to its inner
            optimizer.
        layer: the layer's name; a preconditioner leaves some layers out.

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
        options = " and ".join(_uncovered(given))
        return Optimizer(full, "unknown", why=options and f"it covers {name} only without {options}")
    divided = rule.kind == "adamw" and rule.decays
    penalty = "√v, the diagonal that it divides by" if divided else "I, the Euclidean norm"
    return Optimizer(full, "first order", rule.kind, rule.options, rule.decays, penalty, _settles(rule))


def _within(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recorded description of the inner optimizer; its options are those of the outer one."""
    return {**given, "inner": None, **given.get("within", {}), "class": given.get("inner")}


def _decays(given: Mapping[str, Any]) -> bool:
    return bool(given.get("decays", given.get("weight_decay", 0.0)))


def _grafted(given: Mapping[str, Any], full: str, layer: str) -> Optimizer:
    """Describe Graft: its steps scale with the norm as those of its magnitude optimizer do, and nothing decays."""
    lengths = optimizer_of(_within(given), layer=layer)
    if given.get("direction"):
        full += f", in the directions of {given['direction']}"
    if given.get("granularity") != "tensor":
        lengths = Optimizer(full, "unknown", why="its lengths are not known to be those of single layers")
    return replace(lengths, name=full, decays=False, unseen=_decays(given), grafted=True)


def _preconditioned(given: Mapping[str, Any], full: str, layer: str) -> Optimizer:
    """Describe a preconditioner: it divides by the curvature, which falls as 1/‖w‖² with the square of the gradient.

    So the steps of SGD along its directions grow with the weights, if it knows the scale of the gradients. The length
    of Adam's steps does not depend on the direction's length.
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
