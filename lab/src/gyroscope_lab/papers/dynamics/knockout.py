"""Covariate shift put back behind batch normalization, and what that does to training (section 4.2 of the chapter).

If batch normalization helped by centring and scaling what the next layer is given, random means and scales behind it,
drawn anew for every batch, should undo the help. Santurkar et al. (2018) found that they hardly matter. The chapter's
reason: the next layer's own normalization takes away what was added. Only behind the last normalization, where none
follows, this cannot be; so that one is also left alone, in a network of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD

from gyroscope.theory import knock_out
from gyroscope_lab.data.source import Source
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.models.mlp import mlp
from gyroscope_lab.papers.dynamics.knockout_report import Arm, report
from gyroscope_lab.papers.dynamics.loop import accuracy, device_of, dtype_of, kept, mean_curve, split_of, train
from gyroscope_lab.papers.study import Report, Study
from gyroscope_lab.training.schedule import Schedule
from gyroscope_lab.training.trial import Trial

Kind = Literal["no BN", "BN", "BN + noise", "BN + noise, not behind the last"]
KINDS: tuple[Kind, ...] = ("no BN", "BN", "BN + noise", "BN + noise, not behind the last")
_PIXELS = {"digits": 64, "mnist": 784}
# Of the noise: half the width of its means, and the range of its scales, in standard deviations of a unit.
_SHIFT, _GAIN = 0.5, (0.5, 1.5)


@dataclass(frozen=True)
class Plan:
    """What a scale trains.

    Attributes:
        source: the data.
        depth, width: of the perceptron.
        schedule: of the trainings.
        rates: all networks are trained at these, and shown at the best for each.
        seeds: of the weights and the order of examples.
        bound: a loss that counts as learned.
    """

    source: Source
    depth: int
    width: int
    schedule: Schedule
    rates: tuple[float, ...]
    seeds: int
    bound: float


PLANS = {
    "smoke": Plan(Source("digits"), 4, 32, Schedule(epochs=10, batch=50, cuts=()), (0.3,), 1, 0.5),
    "small": Plan(
        Source("digits"), 5, 48, Schedule(epochs=60, batch=50, cuts=()), (0.03, 0.1, 0.3, 1.0, 3.0), 3, 0.1
    ),
    "full": Plan(
        Source("mnist"), 8, 256, Schedule(epochs=20, batch=128, cuts=(), drop_last=True), (0.03, 0.1, 0.3, 1.0, 3.0), 3,
        0.05,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """All that one training depends on."""

    source: Source
    depth: int
    width: int
    schedule: Schedule
    kind: Kind
    rate: float
    seed: int
    shift: float = _SHIFT
    gain: tuple[float, float] = _GAIN


def network(lab: Lab, setting: Setting) -> nn.Sequential:
    """The network of its kind; all kinds start from the same weights.

    >>> from gyroscope_lab.training.archive import Archive
    >>> plan = PLANS["smoke"]
    >>> setting = Setting(plan.source, 4, 32, plan.schedule, "BN + noise, not behind the last", 0.3, 0)
    >>> [name for name, _ in network(Lab(Archive("runs")), setting).named_modules() if "knockout" in name]
    ['norm1.knockout', 'norm2.knockout']
    """
    model = mlp(
        setting.seed, depth=setting.depth, width=setting.width, inputs=_PIXELS[setting.source.name],
        batch_norm=setting.kind != "no BN", biases=True, init="glorot_uniform",
    ).to(device_of(lab), dtype_of(lab))  # fmt: skip
    if "noise" in setting.kind:
        generator = torch.Generator(device_of(lab)).manual_seed(setting.seed)
        spared = 1 if "last" in setting.kind else 0
        for number in range(1, setting.depth - spared):
            its = f"norm{number}"
            knock_out(model, shift=setting.shift, gain=setting.gain, generator=generator, include=its)
    return model


class Drift:
    """How far the mean of a unit's pre-activations moves from batch to batch, in its standard deviations.

    What is looked at is what goes into every ReLU: E_j |μ_j(t+1) − μ_j(t)| / σ_j(t), over units, layers and steps.

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
                # Units that are dead have nowhere to move from.
                alive = unit > 0
                self._sum = self._sum + float(((mean - was).abs()[alive] / unit[alive]).sum())
                self._count += int(alive.sum())
            self._before[name] = mean, deviation

        return look

    @property
    def mean(self) -> float:
        """The mean over all that was seen."""
        return self._sum / self._count if self._count else float("nan")


def trained(lab: Lab, setting: Setting) -> dict[str, Any]:
    """The loss of every epoch, accuracies in the end, and how far means moved."""

    def measure() -> dict[str, Any]:
        split, model = split_of(lab, setting.source), network(lab, setting)
        drift = Drift(model)
        found = train(
            model, SGD(model.parameters(), lr=setting.rate), split, setting.schedule, seed=setting.seed
        )  # fmt: skip
        return {
            **found,
            "drift": drift.mean,
            "test": accuracy(model, split),
            "train": accuracy(model, split, part="train"),
        }

    return kept(lab, "knockout", setting, measure)


def arms(lab: Lab) -> list[Arm]:
    """Every kind at the best of its rates."""
    plan, found = PLANS[lab.scale], []
    for kind in KINDS:
        tried = []
        for rate in plan.rates:
            runs = [
                trained(lab, Setting(plan.source, plan.depth, plan.width, plan.schedule, kind, rate, seed))
                for seed in range(plan.seeds)
            ]
            loss = mean_curve([run["loss"] for run in runs], plan.schedule.epochs)
            drifts = [float("nan") if run["drift"] is None else run["drift"] for run in runs]
            tried.append(Arm(kind, rate, loss, drifts, [run["test"] for run in runs], plan.bound))
        found.append(min(tried, key=lambda arm: arm.area))
    return found


def trials(lab: Lab) -> list[Trial]:
    """None of the laboratory's own: these trainings have no recipes."""
    return []


def conclude(lab: Lab) -> Report:
    """The loss of every kind."""
    return report(arms(lab))


STUDIES = (
    Study("dynamics/knockout", "Section 4.2: covariate shift put back behind batch normalization", trials, conclude),
)
