"""The noise of batch normalization, by batch size (sections 4.4 and 6 of Grosse's chapter).

Each example is normalized with the statistics of the batch it is in, which depend on what else is in that batch: a
stochastic regularization, whose amount depends on the batch size. It is measured at held weights, as the variance of an
example's outputs over random batches; a statistic of |B| examples has a variance in proportion to 1/|B|. In training
the batch size also changes the noise of gradients. So here every step takes the gradient of all examples, which are
normalized in random groups (ghost batches): the size of the groups changes the noise of normalization alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from gyroscope_lab.data.source import Source
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.at_hand import examples
from gyroscope_lab.papers.chance import gain
from gyroscope_lab.papers.dynamics.layer_norm import LayerNorm, with_norms
from gyroscope_lab.papers.dynamics.measurements import Perceptron, dtype_of, followed, kept, split_of, training_of
from gyroscope_lab.papers.study import Report, Study, Table, Verdict, no_trials
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.schedule import Schedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# "In proportion to 1/|B|" is taken to mean: an exponent within this of −1.
_NEAR = 0.1


class GhostNorm(nn.BatchNorm1d):
    """Batch normalization without gain and bias, over groups of a batch; 0 for the whole batch.

    Examples are grouped in the order that they come in, which is random. A batch that is no multiple of the size has
    one smaller group.

    >>> norm = GhostNorm(1, size=2)
    >>> norm(torch.tensor([[0.0], [2.0], [10.0], [14.0]])).round(decimals=3).flatten().tolist()
    [-1.0, 1.0, -1.0, 1.0]
    """

    def __init__(self, width: int, *, size: int) -> None:
        super().__init__(width, affine=False)
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        """Normalize each group with its own statistics; in evaluation, all examples with the running averages."""
        if not self.training or not self.size:
            return super().forward(x)
        return torch.cat([super(GhostNorm, self).forward(one) for one in torch.split(x, self.size)])


@dataclass(frozen=True)
class Plan(Perceptron):
    """The measurements and trainings of a scale.

    Attributes:
        sizes: the batch sizes at held weights.
        draws: the number of times that all images are dealt into batches.
        groups: the sizes of groups in training; 0 for all examples.
        epochs: steps of training, on all examples each.
        rate: their learning rate.
        seeds: the seeds of the weights and of the groups.
    """

    sizes: tuple[int, ...]
    draws: int
    groups: tuple[int, ...]
    epochs: int
    rate: float
    seeds: int


PLANS = {
    "smoke": Plan(Source("digits"), 3, 16, (8, 16, 32, 64), 6, (0, 10), 20, 0.3, 1),
    "small": Plan(Source("digits"), 4, 48, (8, 16, 32, 64, 128), 20, (0, 100, 50, 20, 10, 5), 200, 0.3, 10),
    "full": Plan(Source("mnist", per_class=1000), 4, 256, (8, 16, 32, 64, 128, 256), 20,
                 (0, 1000, 200, 50, 20, 10), 300, 0.3, 5),
}  # fmt: skip


@dataclass(frozen=True)
class Setting(Perceptron):
    """Everything that one training and its measurements depend on."""

    sizes: tuple[int, ...]
    draws: int
    group: int
    epochs: int
    rate: float
    seed: int


def network(setting: Setting) -> nn.Sequential:
    """Return the perceptron, normalized over groups before every ReLU."""
    its = setting.network(setting.seed, batch_norm=True)
    return with_norms(its, lambda: GhostNorm(setting.width, size=setting.group))


@torch.no_grad()
def noise(model: nn.Module, x: Tensor, size: int, *, draws: int, seed: int) -> float:
    """Return the variance of an example's outputs over random batches, as a share of that over examples.

    >>> noise(nn.Identity(), torch.randn(40, 3), 4, draws=3, seed=0)
    0.0
    """
    draw, found = torch.Generator().manual_seed(seed), []
    for _ in range(draws):
        order = torch.randperm(len(x), generator=draw)[: len(x) // size * size]
        outputs = torch.cat([model(x[chosen]) for chosen in torch.split(order, size)])
        row = outputs.new_full((len(x), outputs.shape[1]), torch.nan)
        row[order] = outputs
        found.append(row)
    every = torch.stack(found)
    whole = every[:, ~every.isnan().any(2).any(0)]
    return float(whole.var(0).mean() / whole.mean(0).var(0).mean())


def noises(model: nn.Module, x: Tensor, setting: Setting) -> list[float]:
    """Return the noise at every batch size, of a network in training mode, which is left as it was."""
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    sizes = [(module, module.size) for module in model.modules() if isinstance(module, GhostNorm)]
    for module, _ in sizes:
        module.size = 0
    model.train()
    found = [noise(model, x, size, draws=setting.draws, seed=setting.seed) for size in setting.sizes]
    for module, size in sizes:
        module.size = size
    model.load_state_dict(saved)
    return found


def trained(lab: Lab, setting: Setting) -> dict[str, Any]:
    """Return the last loss and the test accuracy; without groups also the noise, before and after training."""

    def measure() -> dict[str, Any]:
        split = split_of(lab, setting.source)
        x = split.inputs(split.x_test).to(dtype_of(lab))
        schedule = Schedule(setting.epochs, batch=examples(setting.source), cuts=())
        task = setting.task("ghost", schedule)
        model = network(setting)
        its = training_of(lab, task, Recipe("SGD", setting.rate), seed=setting.seed, network=model)
        if setting.group:
            return {"loss": followed(its)["loss"][-1], "test": 100 * its.finish().test_accuracy}
        start = noises(its.model, x, setting)
        losses = followed(its)["loss"]
        end = noises(its.model, x, setting)
        layered = with_norms(network(setting).to(x), LayerNorm)
        without = noise(layered, x, setting.sizes[0], draws=2, seed=0)
        test = 100 * its.finish().test_accuracy
        return {"start": start, "end": end, "layer": without, "loss": losses[-1], "test": test}

    return kept(lab, "ghost-batches", setting, measure)


def exponent(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Return the exponent of the power of |B| that is fitted to the noise.

    >>> round(exponent([8, 16, 32], [4.0, 2.0, 1.0]), 6)
    -1.0
    """
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def report(sizes: Sequence[int], runs: Mapping[int, Sequence[dict[str, Any]]]) -> Report:
    """The figure, the tables and the verdicts, from the runs of all seeds by the size of groups; 0 is no groups."""
    whole = runs[0]
    fits = {when: float(np.mean([exponent(sizes, run[when]) for run in whole])) for when in ("start", "end")}
    layer = max(run["layer"] for run in whole)
    gains = {size: gain(_tests(its), _tests(whole)) for size, its in runs.items() if size}
    # Not the best: of several sizes one would be better by chance.
    middle, least = sorted(gains)[len(gains) // 2], min(gains)
    by_size = tuple(
        (size, *(float(np.mean([run[when][place] for run in whole])) for when in ("start", "end")))
        for place, size in enumerate(sizes)
    )
    by_group = tuple(
        (size or "all", float(np.mean([run["loss"] for run in its])), float(np.mean(_tests(its))),
         gains[size].told if size else None)
        for size, its in runs.items()
    )  # fmt: skip
    return Report(
        {"figure": _figure(sizes, runs)},
        (
            Table("Noise at held weights: variance over batches, as a share of that over examples",
                  ("batch size", "at the start", "after training"), by_size),
            Table("Training on all examples, normalized in groups", ("group", "last loss", "test %", "points gained"),
                  by_group),
        ),
        (
            Verdict("the noise of batch normalization falls as 1/B, B the batch size", "the batch size affects it",
                    f"as B^{fits['start']:.2f} at the start, B^{fits['end']:.2f} after training",
                    all(abs(value + 1) <= _NEAR for value in fits.values())),
            Verdict("layer normalization has no such noise", "independent of the batch",
                    f"{layer:.1g} of the variance over examples", layer < 1e-12),
            Verdict("the noise regularizes: test accuracy is higher with it", "a stochastic regularization effect",
                    f"{gains[middle].told} points in groups of {middle}", gains[middle].above),
            Verdict("also in the smallest groups", "–", f"{gains[least].told} points in groups of {least}",
                    gains[least].above),
        ),
        {"sizes": list(sizes), "runs": {str(size): list(its) for size, its in runs.items()}},
    )  # fmt: skip


def _tests(runs: Sequence[dict[str, Any]]) -> list[float]:
    return [run["test"] for run in runs]


def _figure(sizes: Sequence[int], runs: Mapping[int, Sequence[dict[str, Any]]]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for when, color in (("start", "C0"), ("end", "C3")):
        for run in runs[0]:
            left.loglog(sizes, run[when], "o-", color=color, markersize=3, linewidth=0.8, alpha=0.6)
        left.plot([], [], color=color, label=f"{when} of training")
    left.loglog(sizes, runs[0][0]["start"][0] * sizes[0] / np.array(sizes), ":", color="0.5", label="1/|B|")
    left.set(xlabel="batch size |B|", ylabel="share of the variance", title="Noise of the outputs at held weights")
    left.legend(fontsize=8)
    for place, its in enumerate(runs.values()):
        right.plot([place] * len(its), _tests(its), "o", color="C0", markersize=3, alpha=0.5)
        right.plot(place, np.mean(_tests(its)), "_", color="black", markersize=14)
    right.set_xticks(range(len(runs)), [str(size or "all") for size in runs])
    right.set(xlabel="examples normalized together", ylabel="test accuracy (%)", title="Trained on all examples")
    for ax in (left, right):
        ax.title.set_fontsize(10)
        ax.spines[["top", "right"]].set_visible(False)
    return figure


def conclude(lab: Lab) -> Report:
    """Report the noise by batch size, and test accuracies by the size of groups."""
    plan = PLANS[lab.scale]
    told = (plan.source, plan.depth, plan.width, plan.sizes, plan.draws)
    runs = {
        group: [trained(lab, Setting(*told, group, plan.epochs, plan.rate, seed)) for seed in range(plan.seeds)]
        for group in plan.groups
    }
    return report(plan.sizes, runs)


STUDIES = (
    Study("dynamics/bn-noise", "Sections 4.4 and 6: the noise of batch normalization, by batch size", no_trials,
          conclude, seeds={scale: plan.seeds for scale, plan in PLANS.items()}),
)  # fmt: skip
