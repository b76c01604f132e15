"""Batch normalization before or after the ReLU (section 4.2 of Grosse's chapter).

If batch normalization worked by removing internal covariate shift, it should be applied after the activation function:
only there does it center the activations. Applied before a ReLU it leaves them positive. The chapter reports that it
generally works better there nevertheless. Perceptrons with normalization in either place, and without any, are trained
from the same weights, each at the best of its rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import nn

from gyroscope_lab.data.source import Source
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.chance import gain
from gyroscope_lab.papers.dynamics.measurements import Arm, Perceptron, best, followed, kept, training_of
from gyroscope_lab.papers.study import Report, Study, Table, Verdict, no_trials
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.schedule import Schedule
from gyroscope_lab.training.training import Training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Place = Literal["none", "before", "after"]
PLACES: dict[Place, str] = {"none": "C0", "before": "C3", "after": "C2"}
# Activations are centered if at most this share of their second moment is that of their mean.
_CENTERED = 1e-6


@dataclass(frozen=True)
class Plan(Perceptron):
    """The trainings of a scale: the perceptron, a schedule, the rates of all, and the seeds."""

    schedule: Schedule
    rates: tuple[float, ...]
    seeds: int


PLANS = {
    "smoke": Plan(Source("digits"), 3, 16, Schedule(epochs=8, batch=50, cuts=()), (0.3,), 1),
    "small": Plan(Source("digits"), 5, 48, Schedule(epochs=60, batch=50, cuts=()), (0.03, 0.1, 0.3, 1.0, 3.0), 10),
    "full": Plan(
        Source("mnist"), 8, 256, Schedule(epochs=20, batch=128, cuts=(), drop_last=True), (0.03, 0.1, 0.3, 1.0, 3.0), 3
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Setting(Perceptron):
    """Everything that one training depends on."""

    schedule: Schedule
    place: Place
    rate: float
    seed: int


def network(setting: Setting) -> nn.Sequential:
    """Return the perceptron; wherever the normalization is, the weights are the same.

    >>> plan = PLANS["smoke"]
    >>> [name for name, _ in network(Setting(plan.source, 2, 4, plan.schedule, "after", 0.3, 0)).named_children()]
    ['flatten', 'linear1', 'relu1', 'norm1', 'linear2']
    """
    model = setting.network(setting.seed, batch_norm=setting.place != "none")
    if setting.place != "after":
        return model
    its = dict(model.named_children())
    order = ["flatten"]
    for number in range(1, setting.depth):
        order += [f"linear{number}", f"relu{number}", f"norm{number}"]
    swapped = nn.Sequential()
    for name in (*order, f"linear{setting.depth}"):
        swapped.add_module(name, its[name])
    return swapped


@torch.no_grad()
def mean_share(training: Training) -> float:
    """Return ‖E x‖²/E‖x‖² of the inputs of the inner layers, over all training examples as one batch: the mean."""
    model, split = training.model, training.split
    shares, x = [], split.inputs(split.x_train)
    averages = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    for name, module in model.named_children():
        if isinstance(module, nn.Linear) and name != "linear1":
            shares.append(float(x.mean(0).square().sum() / x.square().sum(1).mean()))
        x = module(x)
    model.load_state_dict(averages)  # without what this batch added to the running averages
    return float(np.mean(shares))


def trained(lab: Lab, setting: Setting) -> dict[str, Any]:
    """Return the loss of every epoch, the test accuracy, and the share of the mean in the activations."""

    def measure() -> dict[str, Any]:
        task = setting.task("placement", setting.schedule)
        recipe = Recipe(setting.place, setting.rate)
        its = training_of(lab, task, recipe, seed=setting.seed, network=network(setting))
        found, share = followed(its), mean_share(its)
        return {**found, "share": share, "test": 100 * its.finish().test_accuracy}

    return kept(lab, "placement", setting, measure)


def arms(lab: Lab) -> dict[Place, Arm]:
    """Return every place at the best of its rates."""
    plan = PLANS[lab.scale]

    def at(place: Place, rate: float) -> Arm:
        told = (plan.source, plan.depth, plan.width, plan.schedule, place, rate)
        return Arm(place, rate, [trained(lab, Setting(*told, seed)) for seed in range(plan.seeds)])

    return {place: best(at(place, rate) for rate in plan.rates) for place in PLACES}


def report(found: dict[Place, Arm]) -> Report:
    """The figure, the table and the verdicts."""
    none, before, after = (found[place] for place in PLACES)
    rows = tuple(
        (place, arm.rate, arm.area, arm.mean("test"), f"{100 * arm.mean('share'):.2g} %")
        for place, arm in found.items()
    )
    columns = ("normalization", "best rate", "mean loss", "test %", "share of the mean in activations")
    faster = {place: gain(none.logs, found[place].logs) for place in ("before", "after")}
    known = bool(np.isfinite([*after.all("share"), *before.all("share")]).all())
    quicker, better = gain(after.logs, before.logs), gain(before.all("test"), after.all("test"))
    return Report(
        {"figure": _figure(found)},
        (Table("Batch normalization and the ReLU", columns, rows),),
        (
            Verdict(
                "batch normalization centers the activations only if it is applied after the ReLU",
                "guaranteed to be uncentered before it",
                f"the mean has {100 * max(after.all('share')):.2g} % of their second moment at most after it, "
                f"{100 * min(before.all('share')):.2g} % at least before it",
                max(after.all("share")) <= _CENTERED < min(before.all("share")) if known else None,
            ),
            Verdict("it trains faster before the ReLU than after it", "generally works better before",
                    f"mean loss {quicker.as_ratio} after it, each at its best rate", quicker.above),
            Verdict("it generalizes better before the ReLU than after it", "generally works better before",
                    f"{better.told} points of test accuracy", better.above),
            *(
                Verdict(f"{place} the ReLU it trains faster than no normalization", "works amazingly well",
                        f"mean loss {one.as_ratio} without it", one.above)
                for place, one in faster.items()
            ),
        ),
        {"arms": [{"place": place, "rate": arm.rate, "runs": arm.runs} for place, arm in found.items()]},
    )  # fmt: skip


def _figure(found: dict[Place, Arm]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 3.6), layout="constrained")
    ax = figure.subplots()
    names: Sequence[str] = ("no normalization", "before the ReLU", "after the ReLU")
    for (place, arm), name in zip(found.items(), names, strict=True):
        for run in arm.runs:
            ax.semilogy(range(1, len(run["loss"]) + 1), run["loss"], color=PLACES[place], linewidth=0.6, alpha=0.5)
        ax.semilogy(range(1, len(arm.loss) + 1), arm.loss, color=PLACES[place], label=f"{name}, rate {arm.rate:g}")
    ax.set_xlabel("epoch", fontsize=9)
    ax.set_ylabel("training loss", fontsize=9)
    ax.set_title("Batch normalization before and after the ReLU", fontsize=10)
    ax.legend(fontsize=8)
    ax.spines[["top", "right"]].set_visible(False)
    return figure


def conclude(lab: Lab) -> Report:
    """Report losses and test accuracies by the place of the normalization."""
    return report(arms(lab))


STUDIES = (
    Study("dynamics/bn-placement", "Section 4.2: batch normalization before or after the ReLU", no_trials,
          conclude, seeds={scale: plan.seeds for scale, plan in PLANS.items()}),
)  # fmt: skip
