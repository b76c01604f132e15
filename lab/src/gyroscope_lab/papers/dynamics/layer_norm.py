"""Layer normalization and the outliers of the curvature (section 4.4 of Grosse's chapter, a question it leaves open).

Batch normalization removes the outlier eigenvalues that uncentered activations cause (`ics`). Layer normalization
centers too, over the units of a layer: s = (h − μ)/σ, with μ and σ of each example. The chapter says that this does not
eliminate the outliers, and asks whether it attenuates them. Here the curvature of a layer that is followed by layer
normalization is measured with derivatives through all of it; with μ held constant, so that centering has no part in the
derivatives; and with σ held constant too. All three compute the same function. The curvature without a mean is
measured after the mean of the layer's inputs is moved into its bias.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import exp, log
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the name torch's own documentation uses)

from gyroscope.conditioning import outliers
from gyroscope_lab.data.source import Source
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.chance import all_exceed, gain
from gyroscope_lab.papers.dynamics.ics import centered_at
from gyroscope_lab.papers.dynamics.measurements import Perceptron, dtype_of, followed, kept, split_of, training_of
from gyroscope_lab.papers.study import Report, Study, Table, Verdict, no_trials
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.schedule import Schedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: What derivatives are taken through, by name: (through μ, through σ).
WAYS = {"all of it": (True, True), "μ held": (False, True), "μ and σ held": (False, False)}
CENTERED = "inputs centered"
_WHEN = ("start", "end")
_LAYER, _NORM = "linear2", "norm2"
# The factor between two eigenvalues from which on they differ.
_APART = 1.1
_EPS = 1e-5


class LayerNorm(nn.Module):
    """Layer normalization without gain and bias, whose statistics may be held constant in derivatives.

    >>> norm = LayerNorm()
    >>> norm(torch.tensor([[1.0, 3.0]])).round(decimals=3)
    tensor([[-1.,  1.]])
    """

    def __init__(self) -> None:
        super().__init__()
        self.through = WAYS["all of it"]

    def forward(self, h: Tensor) -> Tensor:
        """Return (h − μ)/σ, example by example."""
        centers, scales = self.through
        deviation, mean = torch.std_mean(h, dim=1, correction=0, keepdim=True)
        mean = mean if centers else mean.detach()
        # σ of the deviations from a μ that is held moves with h, unless it is held too.
        deviation = (h - mean).square().mean(1, keepdim=True).add(_EPS).sqrt() if scales else deviation.detach()
        return (h - mean) / deviation


@dataclass(frozen=True)
class Plan(Perceptron):
    """The trainings and measurements of a scale."""

    examples: int
    schedule: Schedule
    rate: float
    seeds: int


PLANS = {
    "smoke": Plan(Source("digits"), 3, 12, 60, Schedule(epochs=10, batch=50, cuts=()), 0.3, 1),
    "small": Plan(Source("digits"), 4, 24, 200, Schedule(epochs=40, batch=50, cuts=()), 0.3, 10),
    "full": Plan(Source("mnist"), 5, 50, 1000, Schedule(epochs=10, batch=128, cuts=(), drop_last=True), 0.1, 5),
}


@dataclass(frozen=True)
class Setting(Perceptron):
    """Everything that one measurement depends on."""

    examples: int
    schedule: Schedule
    rate: float
    seed: int


def network(setting: Setting) -> nn.Sequential:
    """Return a perceptron with layer normalization before every ReLU.

    >>> plan = PLANS["smoke"]
    >>> [name for name, _ in network(Setting(plan.source, 3, 12, 60, plan.schedule, 0.3, 0)).named_children()][:4]
    ['flatten', 'linear1', 'norm1', 'relu1']
    """
    return with_norms(setting.network(setting.seed, batch_norm=True), LayerNorm)


def with_norms(model: nn.Sequential, make: Callable[[], nn.Module]) -> nn.Sequential:
    """Replace every batch normalization by what `make` returns."""
    for name, module in list(model.named_children()):
        if isinstance(module, nn.BatchNorm1d):
            model.set_submodule(name, make())
    return model


def largest(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    """Return the largest eigenvalue of the curvature of the second layer: in each way, and with centered inputs."""
    own, found = deepcopy(model).eval(), {}
    norm = own.get_submodule(_NORM)
    assert isinstance(norm, LayerNorm)
    for name, through in WAYS.items():
        norm.through = through
        told = outliers(own, F.cross_entropy, (x, y), _LAYER, count=1)
        found[name] = float(told.measured[0])
    norm.through = WAYS["all of it"]
    other, layer = centered_at(own, _LAYER, told.mean)
    found[CENTERED] = float(outliers(other, F.cross_entropy, (x, y), layer, count=1).measured[0])
    return found


def measured(lab: Lab, setting: Setting) -> dict[str, Any]:
    """Return the largest eigenvalues before and after training, and the last loss."""

    def measure() -> dict[str, Any]:
        split = split_of(lab, setting.source)
        inputs = split.inputs(split.x_train[: setting.examples]).to(dtype_of(lab))
        labels = split.y_train[: setting.examples]
        task = setting.task("layer-norm", setting.schedule)
        its = training_of(lab, task, Recipe("SGD", setting.rate), seed=setting.seed, network=network(setting))
        start = largest(its.model, inputs, labels)
        loss = followed(its)["loss"][-1]
        return {"start": start, "end": largest(its.model, inputs, labels), "loss": loss}

    return kept(lab, "layer-norm", setting, measure)


def report(runs: Sequence[dict[str, Any]]) -> Report:
    """The figure, the table and the verdicts, from the measurements of all seeds."""
    names = (*WAYS, CENTERED)
    rows = tuple(
        (when, *(float(np.exp(np.mean([np.log(run[when][name]) for run in runs]))) for name in names)) for when in _WHEN
    )
    columns = ("when", *(f"derivatives through {name}" if name == "all of it" else name for name in names))
    return Report(
        {"figure": _figure(runs)},
        (Table("Largest eigenvalue of the second layer, the geometric mean over seeds", columns, rows),),
        (
            _verdict(
                runs, "layer normalization does not eliminate the outliers of uncentered activations",
                "you can check that it does not", "with centered inputs the largest eigenvalue is",
                ("all of it", CENTERED),
            ),
            _verdict(
                runs, "its centering step attenuates them", "an open question",
                "through the centering the largest eigenvalue is", ("μ held", "all of it"),
            ),
            _verdict(
                runs, "its scaling step attenuates them", "not asked",
                "through the scaling the largest eigenvalue is", ("μ and σ held", "μ held"),
            ),
        ),
        {"runs": list(runs)},
    )  # fmt: skip


def _verdict(runs: Sequence[dict[str, Any]], says: str, paper: str, words: str, names: tuple[str, str]) -> Verdict:
    """The verdict on whether the first eigenvalue is larger than the second, before and after training."""
    logs = {name: [[float(np.log(run[when][name])) for run in runs] for when in _WHEN] for name in names}
    gains = [gain(*pair) for pair in zip(logs[names[0]], logs[names[1]], strict=True)]
    factors = [exp(one.mean) for one in gains]
    here = f"{words} {factors[0]:.2f} times smaller at the start, {factors[1]:.2f} at the end"
    # A difference must be more than a tenth, beyond chance.
    return Verdict(says, paper, here, all_exceed(gains, log(_APART)))


def _figure(runs: Sequence[dict[str, Any]]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    names = (*WAYS, CENTERED)
    for ax, when in zip(figure.subplots(1, 2, sharey=True), _WHEN, strict=True):
        for run in runs:
            ax.semilogy(range(len(names)), [run[when][name] for name in names], "o-", color="C0", markersize=4)
        ax.set_xticks(range(len(names)), ["through\nall", "μ held", "μ, σ held", "inputs\ncentered"], fontsize=8)
        ax.set_title(f"At the {when} of training", fontsize=10)
        ax.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("largest eigenvalue of a layer", fontsize=9)
    figure.suptitle("Layer normalization and outliers of the curvature, seed by seed", fontsize=11)
    return figure


def conclude(lab: Lab) -> Report:
    """Report the largest eigenvalues of a layer before layer normalization."""
    plan = PLANS[lab.scale]
    told = (plan.source, plan.depth, plan.width, plan.examples, plan.schedule, plan.rate)
    return report([measured(lab, Setting(*told, seed)) for seed in range(plan.seeds)])


STUDIES = (
    Study("dynamics/layer-norm", "Section 4.4: layer normalization and the outliers of the curvature", no_trials,
          conclude, seeds={scale: plan.seeds for scale, plan in PLANS.items()}),
)  # fmt: skip
