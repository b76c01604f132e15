"""Covariate shift put back after batch normalization, and its effect on training (section 4.2 of the chapter).

If batch normalization helped by centering and scaling the inputs of the next layer, random means and scales after it,
redrawn for every batch, should undo the benefit. Santurkar et al. (2018) found that they hardly matter. The chapter's
explanation: the normalization of the next layer removes the added noise. This cannot hold after the last normalization,
because no other follows, so a separate network has no noise there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from gyroscope.theory import knock_out
from gyroscope_lab.data.source import Source
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.chance import Estimate, all_exceed, gain, opposite
from gyroscope_lab.papers.dynamics.measurements import (
    Arm,
    Perceptron,
    best,
    device_of,
    dtype_of,
    followed,
    kept,
    training_of,
)
from gyroscope_lab.papers.study import Report, Study, Table, Verdict, no_trials
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.schedule import Schedule

# Noise "hardly matters" if it costs less than this share of the gain of batch normalization.
_SHARE = 0.25
# Means move as far as without normalization if they do so within this factor.
_FACTOR = 2.0
_COLORS = {"no BN": "C0", "BN": "C3", "BN + noise": "C1", "BN + noise, not behind the last": "C2"}


def report(arms: list[Arm], bound: float) -> Report:
    """The figure, the table and the verdicts."""
    columns = ("network", "best rate", f"epochs to a loss of {bound:g}", "mean loss", "last loss", "test %",
               "means move by")  # fmt: skip
    rows = tuple(
        (one.name, one.rate, one.epochs(bound), one.area, float(one.loss[-1]), one.mean("test"), one.mean("drift"))
        for one in arms
    )
    numbers = [
        {"kind": one.name, "rate": one.rate, "area": one.area, "epochs": one.epochs(bound), "drifts": one.all("drift"),
         "tests": one.all("test"), "loss": one.loss.tolist()}
        for one in arms
    ]  # fmt: skip
    return Report(
        {"figure": _figure(arms)},
        (Table("Training; movement of the means of pre-activations in standard deviations per step", columns, rows),),
        verdicts(arms, bound),
        {"arms": numbers},
    )


def verdicts(arms: Sequence[Arm], bound: float) -> tuple[Verdict, ...]:
    """Return the verdicts on the chapter's statements."""
    plain, normal, noisy, spared = (next(arm for arm in arms if arm.name == kind) for kind in _COLORS)
    moves = {arm.name: np.array(arm.all("drift")) for arm in arms}
    more, near = gain(moves[noisy.name], moves[normal.name]), gain(moves[noisy.name], moves[plain.name] / _FACTOR)
    faster, still = gain(plain.logs, normal.logs), gain(plain.logs, noisy.logs)
    return (
        Verdict(
            "noise after batch normalization puts covariate shift back",
            "as in training without it",
            f"means move by {noisy.mean('drift'):.2f} standard deviations from batch to batch, "
            f"{normal.mean('drift'):.2f} without noise ({more.told}) and {plain.mean('drift'):.2f} without batch "
            f"normalization ({near.told} compared with half of that)",
            all_exceed((more, near)),
        ),
        Verdict(
            "batch normalization speeds up training",
            "works amazingly well",
            f"mean loss {normal.area:.3g}; without it {plain.area:.3g}, {faster.as_ratio}, each at its best rate",
            faster.above,
        ),
        _unhurt("with this noise after every normalization, training is hardly worse", "almost no effect", noisy,
                normal, plain, bound),
        _unhurt("with this noise only before another normalization, training is hardly worse",
                "shifts are undone by the next one", spared, normal, plain, bound),
        Verdict(
            "networks with noise still train better than those without batch normalization",
            "not degraded to that level",
            f"mean loss {noisy.area:.3g}; without batch normalization {plain.area:.3g}, {still.as_ratio}",
            still.above,
        ),
    )  # fmt: skip


def _unhurt(says: str, told: str, noisy: Arm, normal: Arm, plain: Arm, bound: float) -> Verdict:
    """The verdict on the share of the gain of batch normalization that noise takes; None unless that gain is sure."""
    taken = _taken(noisy, normal, plain)
    error = "" if taken.error is None else f" ± {100 * taken.error:.0f}"
    share = f", {100 * taken.mean:.0f}{error} % of the gain of batch normalization" if isfinite(taken.mean) else ""
    here = (
        f"mean loss {noisy.area:.3g} against {normal.area:.3g}{share}; {noisy.learned_in(bound)} epochs to a loss of "
        f"{bound:g} against {normal.learned_in(bound)}; test {noisy.mean('test') - normal.mean('test'):+.1f} points"
    )
    return Verdict(says, told, here, opposite(taken.exceeds(_SHARE)))


def _taken(noisy: Arm, normal: Arm, plain: Arm) -> Estimate:
    """Return the share of the gain of batch normalization that noise takes; NaN unless that gain is above chance.

    The share is a ratio of means over seeds, E c / E g with c the loss by noise and g the gain. It exceeds a bound b if
    E[c − b g] > 0, so its error is that of (c − b g) / E g.
    """
    gains, losses = plain.areas - normal.areas, noisy.areas - normal.areas
    if not (gain(plain.logs, normal.logs).above and gains.mean() > 0):
        return Estimate(nan, None, 0)
    return gain(losses / gains.mean(), _SHARE * (gains / gains.mean() - 1))


def _figure(arms: Sequence[Arm]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.6, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for arm in arms:
        epochs = np.arange(1, len(arm.loss) + 1)
        label = f"{arm.name} (rate {arm.rate:g})"
        left.semilogy(epochs, arm.loss, color=_COLORS[arm.name], linewidth=1.4, label=label)
    left.set(xlabel="epoch", ylabel="training loss", title="Training, at the best rate for each")
    left.legend(fontsize=7.5)
    names = [arm.name.replace(", ", ",\n") for arm in arms]
    right.barh(names, [arm.mean("drift") for arm in arms], color=[_COLORS[arm.name] for arm in arms], height=0.6)
    right.invert_yaxis()
    right.set(xlabel="standard deviations per step", title="Movement of the means of units")
    for ax in (left, right):
        ax.title.set_fontsize(10)
        ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Knock-out: random means and scales after batch normalization")
    return figure


Kind = Literal["no BN", "BN", "BN + noise", "BN + noise, not behind the last"]
KINDS: tuple[Kind, ...] = ("no BN", "BN", "BN + noise", "BN + noise, not behind the last")
# The noise: half the width of its means, and the range of its scales, in standard deviations of a unit.
_SHIFT, _GAIN = 0.5, (0.5, 1.5)


@dataclass(frozen=True)
class Plan(Perceptron):
    """The trainings of a scale.

    Attributes:
        schedule: the schedule of the trainings.
        rates: the rates of all networks; each is shown at its best.
        seeds: the seeds of the weights and of the order of examples.
        bound: the loss that counts as learned.
    """

    schedule: Schedule
    rates: tuple[float, ...]
    seeds: int
    bound: float


PLANS = {
    "smoke": Plan(Source("digits"), 4, 32, Schedule(epochs=10, batch=50, cuts=()), (0.3,), 1, 0.5),
    "small": Plan(
        Source("digits"), 5, 48, Schedule(epochs=60, batch=50, cuts=()), (0.03, 0.1, 0.3, 1.0, 3.0), 10, 0.1
    ),
    "full": Plan(
        Source("mnist"), 8, 256, Schedule(epochs=20, batch=128, cuts=(), drop_last=True), (0.03, 0.1, 0.3, 1.0, 3.0), 3,
        0.05,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Setting(Perceptron):
    """Everything that one training depends on."""

    schedule: Schedule
    kind: Kind
    rate: float
    seed: int
    shift: float = _SHIFT
    gain: tuple[float, float] = _GAIN


def network(lab: Lab, setting: Setting) -> nn.Sequential:
    """The network of the setting's kind; all kinds start from the same weights.

    >>> from gyroscope_lab.training.archive import Archive
    >>> plan = PLANS["smoke"]
    >>> setting = Setting(plan.source, 4, 32, plan.schedule, "BN + noise, not behind the last", 0.3, 0)
    >>> [name for name, _ in network(Lab(Archive("runs")), setting).named_modules() if "knockout" in name]
    ['norm1.knockout', 'norm2.knockout']
    """
    model = setting.network(setting.seed, batch_norm=setting.kind != "no BN").to(device_of(lab), dtype_of(lab))
    if "noise" in setting.kind:
        generator = torch.Generator(device_of(lab)).manual_seed(setting.seed)
        spared = 1 if "last" in setting.kind else 0
        for number in range(1, setting.depth - spared):
            its = f"norm{number}"
            knock_out(model, shift=setting.shift, gain=setting.gain, generator=generator, include=its)
    return model


class Drift:
    """The movement of a unit's mean pre-activation from batch to batch, in standard deviations of the unit.

    It is measured at the input of every ReLU: E_j |μ_j(t+1) − μ_j(t)| / σ_j(t), over units, layers and steps.

    Args:
        model: the network.

    >>> model = nn.Sequential(nn.ReLU())
    >>> drift = Drift(model)
    >>> for x in (torch.tensor([[-1.0], [1.0]]), torch.tensor([[0.0], [2.0]])):
    ...     _ = model(x)
    >>> drift.mean
    1.0
    """

    def __init__(self, model: nn.Module) -> None:
        self._before: dict[str, tuple[Tensor, Tensor]] = {}
        self._sum, self._count = 0.0, 0
        for name, module in model.named_modules():
            if isinstance(module, nn.ReLU):
                module.register_forward_pre_hook(self._hook(name))

    def _hook(self, name: str) -> Callable[[nn.Module, Any], None]:
        def look(module: nn.Module, args: Any) -> None:
            if not module.training:
                return
            deviation, mean = torch.std_mean(args[0].detach(), dim=0, correction=0)
            if name in self._before:
                was, unit = self._before[name]
                # Dead units have no standard deviation.
                alive = unit > 0
                self._sum = self._sum + float(((mean - was).abs()[alive] / unit[alive]).sum())
                self._count += int(alive.sum())
            self._before[name] = mean, deviation

        return look

    @property
    def mean(self) -> float:
        """The mean over all measurements."""
        return self._sum / self._count if self._count else float("nan")


def trained(lab: Lab, setting: Setting) -> dict[str, Any]:
    """The loss of every epoch, the final accuracies, and the movement of means."""

    def measure() -> dict[str, Any]:
        model = network(lab, setting)
        drift = Drift(model)
        task = setting.task("knockout", setting.schedule)
        its = training_of(lab, task, Recipe(setting.kind, setting.rate), seed=setting.seed, network=model)
        found, result = followed(its), its.finish()
        accuracies = {"test": 100 * result.test_accuracy, "train": 100 * result.train_accuracy}
        return {**found, "drift": drift.mean, **accuracies}

    return kept(lab, "knockout", setting, measure)


def arms(lab: Lab) -> list[Arm]:
    """Every kind at the best of its rates."""
    plan = PLANS[lab.scale]

    def at(kind: Kind, rate: float) -> Arm:
        told = (plan.source, plan.depth, plan.width, plan.schedule, kind, rate)
        return Arm(kind, rate, [trained(lab, Setting(*told, seed)) for seed in range(plan.seeds)])

    return [best(at(kind, rate) for rate in plan.rates) for kind in KINDS]


def conclude(lab: Lab) -> Report:
    """Report the loss of every kind."""
    return report(arms(lab), PLANS[lab.scale].bound)


STUDIES = (
    Study("dynamics/knockout", "Section 4.2: covariate shift put back behind batch normalization", no_trials, conclude,
          seeds={scale: plan.seeds for scale, plan in PLANS.items()}),
)  # fmt: skip
