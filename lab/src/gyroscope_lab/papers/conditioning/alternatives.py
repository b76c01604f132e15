"""Alternatives to batch normalization before the last layer (section 5.1 of the conditioning paper).

The input of the last layer of a ResNet grows with depth (`very_deep`), which ResNet_LastBN prevents. Section 5.1 says
of three other networks, without numbers:

- dividing that input by a constant also helps, but the constant has to be finely tuned for each depth;
- batch normalization before the average over pixels has similar effects as after it, before the last layer;
- the network of Bjorck et al. (2018), with that normalization alone, trains at 110 layers, but always fails at 1202.

Networks of several depths are trained from the same kernels at a constant rate, as in figures 6 and 7, and compared by
their mean training loss. Without normalization within its blocks a network doubles the second moment of its activations
about once per block, so the one of 1202 layers leaves the range of float32. No learning rate can change that, but
smaller initial weights can, so they are tried too; the paper does not say which hyper-parameters it tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, inf, isfinite, log
from typing import TYPE_CHECKING, Any

import numpy as np

from gyroscope.diagnosis import MARGIN
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.cells import LEARNED, Cell, cells, some
from gyroscope_lab.papers.chance import estimate, gain, reproduced
from gyroscope_lab.papers.conditioning.by_depth import SGD, Network, of_network
from gyroscope_lab.papers.study import Report, Study, Table, Verdict
from gyroscope_lab.training.result import Result
from gyroscope_lab.training.trial import Trial

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLAIN, LAST, POOL = "ResNet", "LastBN", "BN before pooling"
SINGLE = "one BN"
# The paper's "similar effects" is taken to mean: at least this share of LastBN's gain, in the logarithm of the loss.
_SHARE = 0.5
_COLORS = {PLAIN: "0.35", LAST: "C3", POOL: "C0"}


@dataclass(frozen=True)
class Plan:
    """The trainings of a scale.

    Attributes:
        depths: the depths of the networks whose last input is divided or normalized.
        divisors: the constants.
        epochs: their epochs.
        single: two depths of networks with one normalization: Bjorck's, with the paper's schedule, and the deepest.
        deepest: the epochs of the deepest.
        rates: the learning rates of the networks with one normalization.
        scales: the factors of the initial weights of the deepest of them.
        seeds: the seeds of all.
    """

    depths: tuple[int, ...]
    divisors: tuple[float, ...]
    epochs: int
    single: tuple[int, int]
    deepest: int
    rates: tuple[float, ...]
    scales: tuple[float, ...]
    seeds: tuple[int, ...]


PLANS = {
    "smoke": Plan((8, 14), (3.0,), 2, (8, 602), 1, (0.01,), (1.0,), (1,)),
    "small": Plan(
        (20, 56, 110), (2.0, 4.0, 8.0, 16.0, 32.0), 30, (110, 1202), 10, (0.1, 0.01, 0.001), (1.0, 0.5), (1, 2, 3)
    ),
    "full": Plan(
        (56, 110, 1202), (3.0, 10.0, 30.0, 100.0), 6, (110, 1202), 6, (0.1, 0.01, 0.001), (1.0, 0.5), (1, 2, 3)
    ),
}


def divided(divisor: float) -> str:
    """Return the name of a network whose last input is divided by a constant.

    >>> divided(30.0)
    'divided by 30'
    """
    return f"divided by {divisor:g}"


def _options(variant: str) -> tuple[tuple[str, Any], ...]:
    named: dict[str, tuple[tuple[str, Any], ...]] = {
        PLAIN: (), LAST: (("last_norm", True),), POOL: (("pool_norm", True),),
        SINGLE: (("batch_norm", False), ("pool_norm", True)),
    }  # fmt: skip
    return named[variant] if variant in named else (("divisor", float(variant.removeprefix("divided by "))),)


def variants(plan: Plan) -> list[str]:
    """Return the names of all networks with normalization in their blocks."""
    return [PLAIN, *map(divided, plan.divisors), POOL, LAST]


def trials(lab: Lab) -> list[Trial]:
    """Return the trials.

    >>> from gyroscope_lab.training.archive import Archive
    >>> found = trials(Lab(Archive("runs"), "full"))
    >>> len(found), found[-1].task.name, found[-1].recipe.name
    (90, 'c10-resnet-1202, one BN', 'SGD 0.001, weights × 0.5')
    """
    plan = PLANS[lab.scale]
    several = [_trial(lab, one, depth, seed) for depth in plan.depths for one in variants(plan) for seed in plan.seeds]
    shallow, deep = plan.single
    single = [_trial(lab, SINGLE, shallow, seed, rate=rate) for rate in plan.rates for seed in plan.seeds]
    return several + single + [
        _trial(lab, SINGLE, deep, seed, rate=rate, scale=scale)
        for scale in plan.scales
        for rate in plan.rates
        for seed in plan.seeds
    ]  # fmt: skip


def _trial(lab: Lab, variant: str, depth: int, seed: int, *, rate: float = SGD.rate, scale: float = 1.0) -> Trial:
    plan = PLANS[lab.scale]
    task = of_network(lab, "c10-deep", Network("ResNet", depth))
    # Bjorck's network is trained whole, the others for a few epochs without cuts, which would be shares of them.
    whole = variant == SINGLE and depth == plan.single[0] and lab.scale != "smoke"
    epochs = plan.deepest if variant == SINGLE and depth == plan.single[1] else plan.epochs
    schedule = task.schedule if whole else replace(task.schedule, epochs=epochs, cuts=())
    task = replace(task, name=f"{task.name}, {variant}", options=(*task.options, *_options(variant)), schedule=schedule)
    name = f"SGD {rate:g}" + (f", weights × {scale:g}" if scale != 1 else "")
    return Trial(task, replace(SGD, name=name, rate=rate, scale=scale), seed)


@dataclass(frozen=True)
class Named:
    """A cell, with the network it trained."""

    variant: str
    depth: int
    cell: Cell

    @property
    def logs(self) -> list[float]:
        """ln of the mean training loss, seed by seed; inf where it is not finite."""
        means = [float(np.mean(result.loss)) for result in self.cell.results]
        return [log(mean) if isfinite(mean) else inf for mean in means]

    @property
    def mean(self) -> float:
        """The geometric mean over seeds of the mean training loss."""
        return exp(float(np.mean(self.logs)))

    @property
    def start(self) -> float:
        """The loss of the first epoch, the mean over seeds."""
        return float(np.mean([result.loss[0] for result in self.cell.results]))

    @property
    def last(self) -> float:
        """The loss of the last epoch, the mean over seeds; nan if it is not finite."""
        return float(np.mean([result.loss[-1] for result in self.cell.results]))

    @property
    def fails(self) -> int:
        """The number of seeds that learned nothing."""
        return sum(learned_nothing(result, self.classes) for result in self.cell.results)

    @property
    def classes(self) -> int:
        """The number of classes."""
        return int(dict(self.cell.task.options).get("classes", 10))


def learned_nothing(result: Result, classes: int = 10) -> bool:
    """Return whether the loss is not finite, or not below that of a guess, ln C, by more than the margin of stalls.

    >>> of = lambda loss: Result(0.1, 0.1, loss=[loss], layers=[], rotation=[])
    >>> learned_nothing(of(2.3)), learned_nothing(of(float("nan"))), learned_nothing(of(1.0))
    (True, True, False)
    """
    last = result.loss[-1]
    return not last < (1 - MARGIN) * log(classes)


def conclude(lab: Lab) -> Report:
    """Report losses by network and depth, and the networks with one normalization by rate and initial weights."""
    found = []
    for cell in some(cells(lab, trials(lab))):
        variant = cell.task.name.partition(", ")[2]
        found.append(Named(variant, int(cell.task.model.rpartition("-")[2]), cell))
    return report(found, PLANS[lab.scale])


def report(found: Sequence[Named], plan: Plan) -> Report:
    """Return the figure, the tables and the verdicts on the cells that there are."""
    several = [one for one in found if one.variant != SINGLE]
    single = [one for one in found if one.variant == SINGLE]
    rows = tuple(
        (one.depth, one.variant, f"{one.start:.3g}", f"{one.mean:.3g}", f"{one.last:.3g}", one.cell.test,
         len(one.cell.results))
        for one in several
    )  # fmt: skip
    columns = ("layers", "network", "loss of the first epoch", "mean loss", "last loss", "test %", "seeds")
    single_rows = tuple(
        (one.depth, one.cell.recipe.name, f"{one.last:.3g}", one.cell.train, one.cell.test,
         f"{one.fails} of {len(one.cell.results)}")
        for one in single
    )  # fmt: skip
    single_columns = ("layers", "recipe", "last loss", "train %", "test %", "seeds that learned nothing")
    return Report(
        {"figure": draw(several, plan)},
        (
            Table("The input of the last layer, divided or normalized", columns, rows),
            Table("Networks with one batch normalization, before the average over pixels", single_columns, single_rows),
        ),
        (*_of_inputs(several, plan), *_of_single(single, plan)),
        {"cells": [{"variant": one.variant, "depth": one.depth, **_numbers(one.cell)} for one in found]},
    )


def _numbers(cell: Cell) -> dict[str, Any]:
    """The numbers of a cell without its rotations, of which a network of 1202 layers has many."""
    return {name: value for name, value in cell.numbers().items() if "rotation" not in name}


def _of_inputs(found: Sequence[Named], plan: Plan) -> list[Verdict]:
    by_depth = {
        depth: its
        for depth in plan.depths
        if len(its := {one.variant: one for one in found if one.depth == depth}) == len(variants(plan))
    }
    verdicts = []
    for depth, its in by_depth.items():
        best = min(map(divided, plan.divisors), key=lambda name: its[name].mean)
        better = gain(its[PLAIN].logs, its[best].logs)
        verdicts.append(
            Verdict(
                f"{depth} layers: dividing the input of the last layer by a constant benefits the training",
                "it also benefits the training",
                f"mean loss {better.as_factor} with the best constant, {best.removeprefix('divided by ')}",
                better.exceeds(0.0, tests=len(plan.divisors)),
                over=_at(depth),
            )
        )
    verdicts.append(_tuned(by_depth, plan))
    for depth, its in by_depth.items():
        last, pool = (np.subtract(its[PLAIN].logs, its[name].logs) for name in (LAST, POOL))
        verdicts.append(
            Verdict(
                f"{depth} layers: batch normalization before the average has similar effects as before the last layer",
                "similar effects",
                f"mean loss {estimate(pool).as_factor} before the average, {estimate(last).as_factor} before the last "
                "layer",
                reproduced(last, pool, share=_SHARE),
                over=_at(depth),
            )
        )
    return verdicts


def _at(depth: int) -> Callable[[Trial], bool]:
    return lambda trial: trial.task.model == f"resnet-{depth}" and SINGLE not in trial.task.name


def _tuned(by_depth: dict[int, dict[str, Named]], plan: Plan) -> Verdict:
    """The verdict on whether one constant serves all depths.

    True if each constant is worse than another at some depth, above chance. False if one is the best at all depths.
    """
    names = list(map(divided, plan.divisors))
    tests = len(plan.depths) * (len(names) - 1)

    def worse(one: Named, best: Named) -> bool | None:
        return gain(one.logs, best.logs).exceeds(0.0, tests=tests)

    bests, served, told = [], [], []
    for depth, its in by_depth.items():
        best = min(names, key=lambda name: its[name].mean)
        bests.append(best)
        served.append({name for name in names if isfinite(its[name].mean) and not worse(its[name], its[best])})
        constants = ", ".join(name.removeprefix("divided by ") for name in names if name in served[-1])
        told.append(f"{depth} layers: {constants}")
    enough = len(served) == len(plan.depths) and len(plan.seeds) > 1
    none, same = enough and not set.intersection(*served), enough and len(set(bests)) == 1
    return Verdict(
        "the constant has to be tuned for each depth",
        "finely tuned on networks with different depths",
        "the best constant and those that may be as good by chance: " + "; ".join(told),
        True if none else False if same else None,
        over=lambda trial: SINGLE not in trial.task.name,
    )


def _of_single(found: Sequence[Named], plan: Plan) -> list[Verdict]:
    shallow, deep = plan.single
    verdicts = []
    if its := [one for one in found if one.depth == shallow]:
        best = max(its, key=lambda one: one.cell.train)
        verdicts.append(
            Verdict(
                f"{shallow} layers: a network with one batch normalization, before the average, can be trained",
                "good results (Bjorck et al.)",
                f"{best.cell.train:.1f} % of the training set and {best.cell.test:.1f} % of the test set at the best "
                f"rate, {best.cell.recipe.rate:g}",
                best.cell.train >= 100 * LEARNED,
                over=lambda trial: SINGLE in trial.task.name and trial.task.model == f"resnet-{shallow}",
            )
        )
    for scale in plan.scales:
        its = [one for one in found if one.depth == deep and one.cell.recipe.scale == scale]
        if not its:
            continue
        failed, total = sum(one.fails for one in its), sum(len(one.cell.results) for one in its)
        diverged = sum(result.diverged for one in its for result in one.cell.results)
        best = min(its, key=lambda one: one.last if isfinite(one.last) else inf)
        left = f"; last loss {best.last:.3g} at a rate of {best.cell.recipe.rate:g}" if failed < total else ""
        verdicts.append(
            Verdict(
                f"{deep} layers: it fails at every rate"
                + (f", also from initial weights multiplied by {scale:g}" if scale != 1 else ""),
                "always fails with various hyper-parameters",
                f"{failed} of {total} trainings learn nothing ({diverged} with a loss that is not finite){left}",
                failed == total,
                over=_from(deep, scale),
            )
        )
    return verdicts


def _from(depth: int, scale: float) -> Callable[[Trial], bool]:
    return lambda trial: (
        SINGLE in trial.task.name and trial.task.model == f"resnet-{depth}" and trial.recipe.scale == scale
    )


def draw(found: Sequence[Named], plan: Plan) -> Figure:
    """Draw the mean loss by the constant, with a line for each normalization: one panel per depth, a point per seed."""
    from matplotlib.figure import Figure

    from gyroscope.figures.drawing import log_ticks

    depths = [depth for depth in plan.depths if any(one.depth == depth for one in found)]
    figure = Figure(figsize=(1.6 + 3.2 * len(depths), 3.3), layout="constrained")
    axes = figure.subplots(1, len(depths), squeeze=False, sharey=True)[0]
    constants = {PLAIN: 1.0} | {divided(value): value for value in plan.divisors}
    for depth, ax in zip(depths, axes, strict=True):
        its = {one.variant: one for one in found if one.depth == depth}
        there = [name for name in constants if name in its]
        label = "divided by a constant (1: ResNet)"
        ax.plot([constants[name] for name in there], [its[name].mean for name in there], color=_COLORS[PLAIN],
                marker="o", markersize=4, label=label)  # fmt: skip
        for name in there:
            ax.plot([constants[name]] * len(its[name].logs), np.exp(its[name].logs), color=_COLORS[PLAIN],
                    linestyle="", marker=".", markersize=3, alpha=0.6)  # fmt: skip
        for name, style in ((LAST, "--"), (POOL, ":")):
            if name in its:
                ax.axhline(its[name].mean, color=_COLORS[name], linestyle=style, linewidth=1.4, label=name)
                ax.axhspan(*np.exp([min(its[name].logs), max(its[name].logs)]), color=_COLORS[name], alpha=0.12)
        ax.set(xscale="log", yscale="log")
        ax.set_xticks(list(constants.values()), [f"{value:g}" for value in constants.values()])
        ax.minorticks_off()
        ax.set_title(f"{depth} layers", fontsize=9)
        ax.set_xlabel("constant", fontsize=9)
        ax.tick_params(labelsize=8)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("mean training loss", fontsize=9)
    log_ticks(axes[0].yaxis, *axes[0].get_ylim())
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize=8)
    figure.suptitle("The input of the last layer, divided by a constant or normalized", fontsize=11)
    return figure


STUDIES = (
    Study(
        "conditioning/alternatives",
        "Section 5.1: alternatives to batch normalization before the last layer, and a network with one normalization",
        trials,
        conclude,
    ),
)
