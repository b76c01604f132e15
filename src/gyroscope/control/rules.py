"""What Gyroscope knows of torch's optimizers: how each turns a gradient into a displacement.

Three facts decide how a displacement can be had without losing digits:

- how weight decay enters: `"coupled"` adds λw to the gradient, `"decoupled"` subtracts ηλw from the weights;
- whether the rule reads the weights otherwise: if not, it can write its displacement into a buffer of zeros;
- whether a kernel of ours does the same arithmetic: then the rule runs inside the pass that takes the dots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from gyroscope.control.sgd_amom import SGD_AMom

Group = dict[str, Any]
Decay = Literal["none", "coupled", "decoupled"]


@dataclass(frozen=True)
class Rule:
    """How one optimizer class proposes its displacement.

    Attributes:
        decay: how weight decay enters, unless the group says `decoupled_weight_decay`.
        reads_weights: whether the rule needs the weights' values for more than weight decay.
        kernel: the name of the fused kernel's rule, if there is one.
        first: state of the fused rule: the running mean of gradients, if it keeps one.
        second: state of the fused rule: the running mean (or sum) of squares, if it keeps one.
    """

    decay: Decay = "coupled"
    reads_weights: bool = False
    kernel: str | None = None
    first: str | None = None
    second: str | None = None


_RULES: dict[type[Optimizer], Rule] = {
    torch.optim.SGD: Rule(kernel="sgd", first="momentum_buffer"),
    SGD_AMom: Rule(kernel="sgd_amom", first="momentum_buffer"),
    torch.optim.Adam: Rule(kernel="adam", first="exp_avg", second="exp_avg_sq"),
    torch.optim.AdamW: Rule(decay="decoupled", kernel="adam", first="exp_avg", second="exp_avg_sq"),
    torch.optim.RMSprop: Rule(kernel="rmsprop", second="square_avg"),
    torch.optim.Adagrad: Rule(kernel="adagrad", second="sum"),
    torch.optim.NAdam: Rule(),
    torch.optim.RAdam: Rule(),
    torch.optim.Adadelta: Rule(),
    torch.optim.Adamax: Rule(),
    torch.optim.Rprop: Rule(decay="none"),
}
if hasattr(torch.optim, "Muon"):  # torch 2.9
    _RULES[torch.optim.Muon] = Rule(decay="decoupled")

UNKNOWN = Rule(reads_weights=True)


def rule_of(optimizer: Optimizer) -> Rule:
    """What is known of the optimizer's class; a subclass may do anything, so only exact classes are known.

    >>> rule_of(torch.optim.NAdam([torch.zeros(2, 2)])).reads_weights
    False
    """
    return _RULES.get(type(optimizer), UNKNOWN)


def decay_of(rule: Rule, group: Group) -> tuple[Decay, float]:
    """How much weight decay a group has, and how it enters."""
    amount = float(group.get("weight_decay", 0.0) or 0.0)
    if amount == 0.0 or rule.decay == "none":
        return "none", 0.0
    return ("decoupled" if group.get("decoupled_weight_decay", False) else rule.decay), amount


def kernel_of(rule: Rule, group: Group) -> str | None:
    """The fused kernel for this group's options, or None: then the optimizer's own step is taken."""
    if rule.kernel is None or group.get("differentiable") or group.get("amsgrad") or group.get("centered"):
        return None
    if isinstance(group.get("weight_decay"), torch.Tensor):
        return None
    if rule.kernel == "rmsprop" and group.get("momentum", 0.0) > 0:
        return None
    if rule.kernel == "sgd":
        momentum = group["momentum"]
        if isinstance(momentum, torch.Tensor):
            return None
        return "momentum" if momentum != 0 else "sgd"
    if rule.kernel == "adam" and any(isinstance(beta, torch.Tensor) for beta in group["betas"]):
        return None
    return rule.kernel
