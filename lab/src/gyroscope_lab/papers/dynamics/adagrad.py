"""Adagrad's implicit schedule in a real training (section 2 of Grosse's chapter).

Adagrad divides a gradient by √f_k with the sum f_k = Σ g², RMSprop by √s_k with a moving average s_k. If gradients keep
their scale, f_k ≈ k s_k, and Adagrad's updates are those of RMSprop times about 1/√k: an implicit decay of the learning
rate. Along a training with Adagrad both are measured on the same gradients, with weights that are held and with weights
that learn. In training gradients get smaller, which a schedule of 1/√k does not know: f_k then grows more slowly, and
s_k falls. RMSprop at the rates η/√k is trained too, and compared with Adagrad and with RMSprop at a constant rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, RMSprop

from gyroscope_lab.data.source import Source
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.at_hand import pixels
from gyroscope_lab.papers.chance import gain
from gyroscope_lab.papers.dynamics.measurements import Arm, best, followed, kept, training_of
from gyroscope_lab.papers.study import Report, Study, Table, Verdict, no_trials
from gyroscope_lab.training.recipe import OPTIMIZERS, Recipe, register
from gyroscope_lab.training.schedule import Schedule
from gyroscope_lab.training.task import Task
from gyroscope_lab.training.training import Training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Method = Literal["Adagrad", "RMSprop", "RMSprop, η/√k"]
_OPTIMIZERS: dict[str, str] = {"Adagrad": "adagrad", "RMSprop": "rmsprop", "RMSprop, η/√k": "rmsprop-root"}
_COLORS = {"Adagrad": "C0", "RMSprop": "C1", "RMSprop, η/√k": "C2"}
# The decay of RMSprop's average; it remembers about ten steps, and exponents are fitted from there on.
_DECAY, _FROM = OPTIMIZERS["rmsprop"][1]["alpha"], 10
# "As 1/√k" is taken to mean: an exponent within this of −1/2.
_NEAR = 0.1
# The number of steps that are measured, evenly spread over a logarithmic axis.
_MEASURED = 30


def _root(recipe: Recipe, model: nn.Module) -> Optimizer:
    """RMSprop at the rates η/√k."""
    optimizer = RMSprop(model.parameters(), lr=recipe.rate, **OPTIMIZERS["rmsprop"][1])
    steps = 1

    def lower(*_: object) -> None:
        nonlocal steps
        steps += 1
        optimizer.param_groups[0]["lr"] = recipe.rate / steps**0.5

    optimizer.register_step_post_hook(lower)
    return optimizer


register("rmsprop-root", _root, own_rates=True)


@dataclass(frozen=True)
class Plan:
    """The trainings of a scale: data, a network, a schedule, the rates of each method, and the seeds."""

    source: Source
    model: str
    schedule: Schedule
    rates: dict[str, tuple[float, ...]]
    seeds: int


def _rates(least: float, count: int) -> tuple[float, ...]:
    return tuple(least * 10 ** (place / 2) for place in range(count))


PLANS = {
    "smoke": Plan(
        Source("digits"), "mlp-3x16", Schedule(epochs=15, batch=50, cuts=()),
        {"Adagrad": (0.03,), "RMSprop": (0.003,), "RMSprop, η/√k": (0.03,)}, 1,
    ),
    "small": Plan(
        Source("digits"), "mlp-4x32", Schedule(epochs=100, batch=50, cuts=()),
        {"Adagrad": _rates(0.003, 5), "RMSprop": _rates(0.0003, 5), "RMSprop, η/√k": _rates(0.001, 5)}, 10,
    ),
    "full": Plan(
        Source("mnist"), "mlp-5x256", Schedule(epochs=10, batch=128, cuts=(), drop_last=True),
        {"Adagrad": _rates(0.001, 5), "RMSprop": _rates(0.0001, 5), "RMSprop, η/√k": _rates(0.001, 5)}, 3,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """Everything that one training depends on; at a rate of 0 weights are held."""

    source: Source
    model: str
    schedule: Schedule
    method: Method
    rate: float
    seed: int


class Second:
    """Second moments of the gradients of a training with Adagrad: its sum f_k, and RMSprop's average ŝ_k.

    ŝ_k is corrected for its start at 0. Weights whose gradients were all 0, such as those of empty pixels, do not
    count.

    Args:
        training: the training; its steps are seen by hooks.
        steps: the steps to measure, counted from 1.
    """

    def __init__(self, training: Training, steps: Sequence[int]) -> None:
        self.steps, self.rate, self.ratio = list(steps), list[float](), list[float]()
        self._wanted, self._step = set(steps), 0
        self._average: dict[Tensor, Tensor] = {}
        training.optimizer.register_step_pre_hook(self._add)
        training.optimizer.register_step_post_hook(self._look)

    @torch.no_grad()
    def _add(self, optimizer: Optimizer, *_: object) -> None:
        for weight in optimizer.param_groups[0]["params"]:
            squares = weight.grad.square()
            self._average[weight] = _DECAY * self._average.get(weight, 0.0) + (1 - _DECAY) * squares

    @torch.no_grad()
    def _look(self, optimizer: Optimizer, *_: object) -> None:
        self._step += 1
        if self._step not in self._wanted:
            return
        sums = torch.cat([optimizer.state[weight]["sum"].flatten() for weight in self._average])
        average = torch.cat([one.flatten() for one in self._average.values()]) / (1 - _DECAY**self._step)
        known = sums > 0
        self.rate.append(float(sums[known].rsqrt().median()))
        self.ratio.append(float((average[known] / sums[known]).sqrt().median()))


def trained(lab: Lab, setting: Setting) -> dict[str, Any]:
    """The loss of every epoch; of Adagrad also the medians over weights of 1/√f_k and √(ŝ_k/f_k)."""

    def measure() -> dict[str, Any]:
        task = Task("adagrad", setting.source, setting.model, pixels(setting.source), setting.schedule)
        recipe = Recipe(setting.method, setting.rate, _OPTIMIZERS[setting.method])
        its = training_of(lab, task, recipe, seed=setting.seed)
        if setting.method != "Adagrad":
            return {**followed(its)}
        count = setting.schedule.epochs * setting.schedule.steps(len(its.split.x_train))
        steps = np.unique(np.geomspace(1, count, _MEASURED).round().astype(int)).tolist()
        second = Second(its, steps)
        return {**followed(its), "steps": second.steps, "rate": second.rate, "ratio": second.ratio}

    return kept(lab, "adagrad", setting, measure)


def exponent(steps: Sequence[int], values: Sequence[float]) -> float:
    """Return the exponent of a power of k that is fitted to the values, from the tenth step on.

    >>> round(exponent([1, 10, 100, 1000], [9.0, 1.0, 0.1, 0.01]), 6)
    -1.0
    """
    at = np.array(steps)
    return float(np.polyfit(np.log(at[at >= _FROM]), np.log(np.array(values)[at >= _FROM]), 1)[0])


def exponents(arm: Arm, name: str) -> list[float]:
    """The exponent of a measurement, seed by seed; NaN where a training diverged."""
    return [nan if None in run["loss"] else exponent(run["steps"], run[name]) for run in arm.runs]


def apart(these: Arm, those: Arm) -> list[float]:
    """The mean over epochs of |ln a − ln b| of the two losses, seed by seed; NaN where a training diverged."""
    pairs = [[np.array(run["loss"], dtype=float) for run in pair] for pair in zip(these.runs, those.runs, strict=True)]
    return [float(np.abs(np.log(a) - np.log(b)).mean()) if len(a) == len(b) else nan for a, b in pairs]


def arms(lab: Lab) -> tuple[dict[str, Arm], Arm]:
    """Return every method at the best of its rates by its mean loss, and Adagrad at held weights."""
    plan = PLANS[lab.scale]

    def at(method: Any, rate: float) -> Arm:
        settings = [Setting(plan.source, plan.model, plan.schedule, method, rate, seed) for seed in range(plan.seeds)]
        return Arm(method, rate, [trained(lab, one) for one in settings])

    found = {method: best(at(method, rate) for rate in rates) for method, rates in plan.rates.items()}
    return found, at("Adagrad", 0.0)


def report(found: dict[str, Arm], held: Arm) -> Report:
    """The figure, the tables and the verdicts."""
    adagrad, constant, root = (found[method] for method in _OPTIMIZERS)
    rows = tuple(
        (name, _listed(exponents(arm, "rate")), _listed(exponents(arm, "ratio")), "-0.5")
        for name, arm in (("held", held), ("trained", adagrad))
    )
    lines = tuple((one.name, one.rate, one.area, float(one.loss[-1])) for one in found.values())
    return Report(
        {"figure": _figure(found, held)},
        (
            Table("Exponents of k, seed by seed", ("weights", "of 1/√f", "of √(s/f)", "chapter"), rows),
            Table("Training", ("method", "best rate", "mean loss", "last loss"), lines),
        ),
        (*_of_exponents(adagrad, held), _of_curves(adagrad, root, constant)),
        {
            "methods": [{"method": one.name, "rate": one.rate, "loss": one.loss.tolist()} for one in found.values()],
            "held": held.runs[0],
            "trained": adagrad.runs[0],
        },
    )


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def _of_exponents(adagrad: Arm, held: Arm) -> list[Verdict]:
    found = []
    for says, arm, name in (
        ("if gradients keep their scale, Adagrad's updates fall as 1/√k compared with RMSprop's", held, "ratio"),
        ("in training, Adagrad's updates fall as 1/√k compared with RMSprop's on the same gradients", adagrad, "ratio"),
        ("in training, Adagrad's effective learning rates η/√f_k fall as 1/√k", adagrad, "rate"),
    ):
        its = exponents(arm, name)
        here = f"as k^{np.mean(its):.2f}" + (f", k^{min(its):.2f} to k^{max(its):.2f} over seeds" if its[1:] else "")
        holds = bool(abs(np.mean(its) + 0.5) <= _NEAR) if np.isfinite(its).all() else None
        found.append(Verdict(says, "a factor of O(1/√k)", here, holds))
    return found


def _of_curves(adagrad: Arm, root: Arm, constant: Arm) -> Verdict:
    near, far = apart(adagrad, root), apart(adagrad, constant)
    nearer = gain(far, near)
    return Verdict(
        "RMSprop at the rates η/√k trains more like Adagrad than RMSprop at a constant rate does",
        "Adagrad implements an implicit decay of the learning rate",
        f"{np.mean(near):.2f} nats from Adagrad's losses, at a constant rate {np.mean(far):.2f}: nearer by "
        f"{nearer.told}, each at its best rate",
        nearer.above,
    )


def _figure(found: dict[str, Arm], held: Arm) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, arm, dash in (("held", held, "--"), ("trained", found["Adagrad"], "-")):
        run = arm.runs[0]
        ratio, rate = (np.array(run[measured], dtype=float) for measured in ("ratio", "rate"))
        steps = np.array(run["steps"])[: len(ratio)]  # a training that diverged has fewer
        left.loglog(steps, ratio / ratio[0], f"C0{dash}", label=f"√(s/f), weights {name}")
        left.loglog(steps, rate / rate[0], f"C3{dash}", label=f"1/√f, weights {name}")
    left.loglog(steps, steps**-0.5, ":", color="0.5", label="1/√k")
    left.set(xlabel="step k", ylabel="median over weights, relative to the first", title="Adagrad's second moments")
    for method, arm in found.items():
        label = f"{method}, η = {arm.rate:.2g}"
        right.semilogy(range(1, len(arm.loss) + 1), arm.loss, color=_COLORS[method], label=label)
    right.set(xlabel="epoch", ylabel="training loss", title="Training loss at the best rates")
    for ax in (left, right):
        ax.legend(fontsize=7)
        ax.title.set_fontsize(10)
        ax.spines[["top", "right"]].set_visible(False)
    return figure


def conclude(lab: Lab) -> Report:
    """Report exponents of Adagrad's second moments, and the losses of all methods."""
    return report(*arms(lab))


STUDIES = (
    Study("dynamics/adagrad", "Section 2: Adagrad's implicit 1/√k in a real training", no_trials, conclude,
          seeds={scale: plan.seeds for scale, plan in PLANS.items()}),
)  # fmt: skip
