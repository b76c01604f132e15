"""Trainings with the lengths of one optimizer and the directions of another, and how their losses compare.

Losses are compared on a log scale: two curves are at the distance mean_k |ln a_k − ln b_k|, and the gap between two
optimizers is ln(a/b) of their losses in the end. SGD has the momentum of Adam, 0.9, so that the two differ in the
diagonal alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite, log
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (the name torch's own documentation uses)
from torch.optim import Optimizer

from gyroscope.control import Graft
from gyroscope_lab import models
from gyroscope_lab.data.source import Source
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.dynamics.loop import device_of, dtype_of, kept, split_of

_GLOROT = (("biases", True), ("init", "glorot_uniform"))
#: The networks by name: the one that is easy for both, one whose layers feed into batch normalization or do not, and
#: one whose signals shrink from layer to layer, which SGD hardly trains.
NETWORKS: dict[str, tuple[str, tuple[tuple[str, Any], ...]]] = {
    "3 layers": ("mlp-3x64", _GLOROT),
    "4 layers, batch norm": ("mlp-4x64", (*_GLOROT, ("batch_norm", True), ("affine", True))),
    "8 layers": ("mlp-8x64", (("biases", True), ("init", "uniform"))),
}
#: What is trained with: whose lengths, whose directions, and compared over what.
METHODS: dict[str, tuple[str, str, str]] = {
    "SGD": ("SGD", "SGD", "tensor"),
    "Adam": ("Adam", "Adam", "tensor"),
    "Adam's lengths, SGD's directions": ("Adam", "SGD", "tensor"),
    "SGD's lengths, Adam's directions": ("SGD", "Adam", "tensor"),
    "Adam's length, SGD's direction, global": ("Adam", "SGD", "global"),
    "SGD's length, Adam's direction, global": ("SGD", "Adam", "global"),
}


@dataclass(frozen=True)
class Plan:
    """What a scale trains: which networks, at which rates of whoever gives the lengths, how long, how often."""

    networks: tuple[str, ...]
    rates: Mapping[str, tuple[float, ...]]
    steps: int
    every: int
    seeds: int
    batch: int
    source: Source
    inputs: int


_RATES = {"SGD": (0.003, 0.01, 0.03, 0.1, 0.3), "Adam": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)}
_ONE = {"SGD": (0.1,), "Adam": (3e-3,)}
_DIGITS = Source("digits", per_class=100)
PLANS = {
    "smoke": Plan(("8 layers",), _ONE, 80, 10, seeds=1, batch=64, source=_DIGITS, inputs=64),
    "small": Plan(tuple(NETWORKS), _RATES, 250, 10, seeds=3, batch=64, source=_DIGITS, inputs=64),
    "full": Plan(
        tuple(NETWORKS), _RATES, 2000, 50, seeds=5, batch=128, source=Source("mnist", per_class=1000), inputs=784
    ),
}


@dataclass(frozen=True)
class Setting:
    """One training: a network, a method, the rate of whoever gives the lengths, a seed; and the plan's."""

    model: str
    options: tuple[tuple[str, Any], ...]
    lengths: str
    directions: str
    over: str
    rate: float
    seed: int
    steps: int
    every: int
    batch: int
    source: Source


@dataclass(frozen=True, eq=False)
class Curves:
    """Losses of every method at every rate on one network: {method: [rates, seeds, looks]}; inf once not finite."""

    rates: dict[str, tuple[float, ...]]
    losses: dict[str, npt.NDArray[np.float64]]
    every: int

    def end(self, method: str) -> npt.NDArray[np.float64]:
        """The loss at the end for each rate, the geometric mean over seeds."""
        return np.asarray(np.exp(np.log(self.losses[method][:, :, -1]).mean(axis=1)))

    def best(self, method: str) -> int:
        """Which rate ends lowest."""
        return int(np.argmin(self.end(method)))

    def logs(self, method: str, rate: int | None = None) -> npt.NDArray[np.float64]:
        """ln of the losses [seeds, looks] at a rate: unless given, the best of the optimizer whose lengths it takes."""
        place = self.best(METHODS[method][0]) if rate is None else rate
        return np.asarray(np.log(self.losses[method][place]))

    def distance(self, one: str, other: str) -> float:
        """The mean of |ln a − ln b| over looks and seeds, each at the best rate of whose lengths it takes."""
        return float(np.abs(self.logs(one) - self.logs(other)).mean())

    def gap(self, worse: str, better: str) -> tuple[float, float]:
        """ln(a/b) of the losses in the end, each method at its own best rate: the mean over seeds and its error."""
        ends = self.logs(worse, self.best(worse))[:, -1] - self.logs(better, self.best(better))[:, -1]
        return float(ends.mean()), float(ends.std(ddof=1) / len(ends) ** 0.5) if len(ends) > 1 else inf


def make(lengths: str, directions: str, over: str, model: nn.Module, rate: float) -> Optimizer:
    """The optimizer: SGD, Adam, or one grafted onto the other.

    The rate of the one that gives directions has no effect.

    >>> make("SGD", "SGD", "tensor", nn.Linear(2, 2), 0.1).param_groups[0]["momentum"]
    0.9
    >>> make("Adam", "SGD", "global", nn.Linear(2, 2), 0.1).granularity
    'global'
    """

    def one(name: str) -> Optimizer:
        parameters = list(model.parameters())
        if name == "SGD":
            return torch.optim.SGD(parameters, lr=rate, momentum=0.9)
        return torch.optim.Adam(parameters, lr=rate)

    if lengths == directions:
        return one(lengths)
    return Graft(one(lengths), one(directions), granularity="global" if over == "global" else "tensor")


def course(lab: Lab, setting: Setting) -> list[float]:
    """The training loss over steps, of all examples that are trained on; inf from where it is not finite."""

    def measured() -> dict[str, Any]:
        split, dtype = split_of(lab, setting.source), dtype_of(lab)
        model = models.make(setting.model, seed=setting.seed, **dict(setting.options)).to(device_of(lab), dtype)
        optimizer = make(setting.lengths, setting.directions, setting.over, model, setting.rate)
        x, y = split.inputs(split.x_train).to(dtype), split.y_train
        order = torch.Generator().manual_seed(setting.seed)
        losses = []
        for step in range(setting.steps + 1):
            if step % setting.every == 0:
                with torch.no_grad():
                    losses.append(float(F.cross_entropy(model(x), y)))
                if not isfinite(losses[-1]):
                    break
            some = torch.randint(0, len(y), (setting.batch,), generator=order).to(y.device)
            optimizer.zero_grad()
            F.cross_entropy(model(x[some]), y[some]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return {"loss": losses}

    found = kept(lab, "grafting", setting, measured)["loss"]
    looks = setting.steps // setting.every + 1
    return [inf if one is None else float(one) for one in found] + [inf] * (looks - len(found))


def settings(plan: Plan, network: str, method: str) -> list[list[Setting]]:
    """Every training of a method on a network: [rates][seeds].

    >>> [[one.rate for one in row] for row in settings(PLANS["smoke"], "8 layers", "Adam")]
    [[0.003]]
    """
    model, options = NETWORKS[network]
    lengths, directions, over = METHODS[method]
    options = (*options, ("inputs", plan.inputs))
    return [
        [
            Setting(
                model, options, lengths, directions, over, rate, seed,
                steps=plan.steps, every=plan.every, batch=plan.batch, source=plan.source,
            )
            for seed in range(plan.seeds)
        ]
        for rate in plan.rates[lengths]
    ]  # fmt: skip


def curves(lab: Lab, network: str) -> Curves:
    """All trainings of a network."""
    plan = PLANS[lab.scale]
    losses = {
        method: np.array([[course(lab, one) for one in row] for row in settings(plan, network, method)])
        for method in METHODS
    }
    return Curves({method: plan.rates[of] for method, (of, _, _) in METHODS.items()}, losses, plan.every)


def closed(found: Curves, graft: str) -> tuple[float, float, float]:
    """The gap ln(worse/better) of the two optimizers, its error, and the share of it that a graft closes.

    Every method is at its own best rate. The share is 1 where the graft ends as the better one does.
    """
    ends = {name: log(float(found.end(name).min())) for name in ("SGD", "Adam", graft)}
    worse, better = ("SGD", "Adam") if ends["SGD"] >= ends["Adam"] else ("Adam", "SGD")
    gap, error = found.gap(worse, better)
    return gap, error, (ends[worse] - ends[graft]) / (ends[worse] - ends[better]) if gap else 0.0
