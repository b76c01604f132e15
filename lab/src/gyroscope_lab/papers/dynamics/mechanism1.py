"""Weight decay as a schedule of effective learning rates (section 5.1, mechanism 1; Zhang et al. 2019).

With batch normalization the size of a layer's weights does not matter, and weight decay cannot regularize; it keeps
norms from growing, and with them the effective learning rate from falling. If that is all it does, a run without decay
whose learning rates are raised, layer by layer and step by step, to the effective ones of a run with decay must gain
what that gained:

    α'_k = α_k (‖w'_k‖/‖w_k‖)² / (1 − α_k λ)    for SGD, whose steps go with the gradient, which goes with 1/‖w‖
    α'_k = α_k ‖w'_k‖/‖w_k‖ / (1 − α_k λ)       for Adam, whose steps do not

w' the weights of the run that copies, w those of the one copied. For SGD without momentum this is exact: the networks
compute the same, step by step. With momentum, and for Adam, it holds as far as norms change slowly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from gyroscope.layers import layers
from gyroscope_lab import models
from gyroscope_lab.data.augment import Augmentation
from gyroscope_lab.data.source import Source
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.dynamics.loop import accuracy, device_of, dtype_of, kept, norms, split_of, train
from gyroscope_lab.papers.dynamics.mechanism1_report import Arm, report
from gyroscope_lab.papers.study import Report, Study
from gyroscope_lab.training.schedule import Schedule
from gyroscope_lab.training.trial import Trial

Rule = Literal["SGD", "Adam"]
Decayed = Literal["none", "all", "normalized", "last", "copied"]
ARMS: tuple[Decayed, ...] = ("none", "all", "normalized", "last", "copied")


@dataclass(frozen=True)
class Method:
    """An optimizer, and its rate and decay."""

    rule: Rule
    rate: float
    decay: float
    momentum: float = 0.0


@dataclass(frozen=True)
class Plan:
    """What a scale trains: the chapter's networks have batch normalization, and their last layer none after it."""

    source: Source
    model: str
    options: tuple[tuple[str, Any], ...]
    schedule: Schedule
    augmentation: Augmentation | None
    methods: tuple[Method, ...]
    seeds: int


_MLP = (("batch_norm", True), ("inputs", 64), ("init", "glorot_uniform"))
_DIGITS = Schedule(epochs=40, batch=20, cuts=(0.6, 0.85), factor=10.0)
PLANS = {
    "smoke": Plan(
        Source("digits"), "mlp-3x16", _MLP, Schedule(epochs=6, batch=50, cuts=(0.7,), factor=10.0), None,
        (Method("SGD", 0.3, 3e-2), Method("Adam", 3e-3, 3.0)), 1,
    ),
    "small": Plan(
        Source("digits"), "digits-cnn", (), _DIGITS, None,
        (Method("SGD", 0.01, 3e-2, momentum=0.9), Method("Adam", 1e-3, 3.0)), 3,
    ),
    # The authors' rates and decays for VGG16; this network has one linear layer more, normalized as the others.
    "full": Plan(
        Source("cifar-10", normalization="channel"), "c10-cnn2", (),
        Schedule(epochs=200, batch=128, cuts=(0.3, 0.6, 0.9), factor=10.0), Augmentation(),
        (Method("SGD", 0.1, 1e-3, momentum=0.9), Method("Adam", 3e-4, 1.0)), 1,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """All that one training depends on."""

    source: Source
    model: str
    options: tuple[tuple[str, Any], ...]
    schedule: Schedule
    augmentation: Augmentation | None
    method: Method
    decayed: Decayed
    seed: int


def optimizer_of(method: Method, model: nn.Module, decayed: Decayed) -> Optimizer:
    """The optimizer, each layer a group of its own; all layers but the last are followed by a normalization.

    >>> model = models.make("mlp-3x16", seed=0, batch_norm=True)
    >>> groups = optimizer_of(Method("SGD", 0.1, 0.5), model, "normalized").param_groups
    >>> [group["weight_decay"] for group in groups]
    [0.5, 0.5, 0.0]
    """
    its = layers(model)
    chosen = {"none": (), "copied": (), "all": its, "normalized": its[:-1], "last": its[-1:]}[decayed]
    names = {layer.name for layer in chosen}
    groups = [
        {"params": [layer.parameter], "weight_decay": method.decay if layer.name in names else 0.0} for layer in its
    ]
    mine = {id(layer.parameter) for layer in its}
    others = [p for p in model.parameters() if id(p) not in mine]
    if others:
        groups.append({"params": others, "weight_decay": 0.0})
    if method.rule == "SGD":
        return SGD(groups, lr=method.rate, momentum=method.momentum)
    return AdamW(groups, lr=method.rate)


def copied_rate(method: Method, rate: float, norm: float, copied: float) -> float:
    """α' of a layer of norm `norm` that has the effective rate of one under decay, of norm `copied`, at the rate α.

    >>> copied_rate(Method("SGD", 0.1, 0.0), 0.1, 2.0, 1.0), copied_rate(Method("Adam", 0.1, 0.0), 0.1, 2.0, 1.0)
    (0.4, 0.2)
    """
    grown: float = (norm / copied) ** (2 if method.rule == "SGD" else 1)
    return rate * grown / (1 - rate * method.decay)


def trained(lab: Lab, setting: Setting) -> dict[str, Any]:
    """Loss, test accuracy, effective rates over epochs; and the norms at every step, where others are to copy them."""

    def measure() -> dict[str, Any]:
        table: list[list[float]] | None = None
        if setting.decayed == "copied":
            table = trained(lab, replace(setting, decayed="normalized"))["norms"]
        return _run(lab, setting, table)

    return kept(lab, "wd-mechanism-1", setting, measure)


def _run(lab: Lab, setting: Setting, table: list[list[float]] | None) -> dict[str, Any]:
    split, method = split_of(lab, setting.source), setting.method
    model = models.make(setting.model, seed=setting.seed, **dict(setting.options)).to(device_of(lab), dtype_of(lab))
    weights: list[Tensor] = [layer.parameter.data for layer in layers(model)][:-1]
    optimizer = optimizer_of(method, model, setting.decayed)
    recorded: list[list[float]] = []

    def before(step: int) -> None:
        now = torch.stack([weight.detach().norm() for weight in weights]).tolist()
        if table is not None:
            for group, norm, copied in zip(optimizer.param_groups, now, table[step], strict=False):
                group["lr"] = copied_rate(method, group["lr"], norm, copied)
        elif setting.decayed == "normalized":
            recorded.append(now)

    def look() -> dict[str, Any]:
        rates = [group["lr"] for group in optimizer.param_groups[: len(weights)]]
        power = 2 if method.rule == "SGD" else 1
        return {"effective": [rate / norm**power for rate, norm in zip(rates, norms(weights), strict=True)]}

    found = train(
        model, optimizer, split, setting.schedule, seed=setting.seed, augmentation=setting.augmentation, look=look,
        before=before,
    )  # fmt: skip
    return {**found, "norms": recorded, "test": accuracy(model, split)}


def arms(lab: Lab) -> list[Arm]:
    """Every method with every kind of decay."""
    plan, found = PLANS[lab.scale], []
    for method in plan.methods:
        for decayed in ARMS:
            runs = [
                trained(lab, Setting(plan.source, plan.model, plan.options, plan.schedule, plan.augmentation, method,
                                     decayed, seed))
                for seed in range(plan.seeds)
            ]  # fmt: skip
            found.append(Arm.of(method.rule, decayed, runs))
    return found


def trials(lab: Lab) -> list[Trial]:
    """None of the laboratory's own: copied rates have no recipes."""
    return []


def conclude(lab: Lab) -> Report:
    """Test accuracies and effective rates of all."""
    return report(arms(lab), PLANS[lab.scale].schedule)


STUDIES = (
    Study("dynamics/wd-mechanism-1", "Section 5.1: weight decay as a schedule of effective learning rates", trials,
          conclude),
)  # fmt: skip
