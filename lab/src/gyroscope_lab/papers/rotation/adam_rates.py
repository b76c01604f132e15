"""Adam under Layca by rate: which one does figure 6 of the rotation paper show?

The authors' code names ρ = 3⁻⁵ for Adam under Layca. A training of C100-resnet at that rate stays nine points below
the 58.16 % of their figure, and its layers rotate much more slowly than in their panel. Figure 6 shows the best of a
grid search, so the rate that they plotted may be a higher one.

Theory says the same. With momentum β successive steps overlap, and layers rotate as far as without momentum when

    ρ_β = ρ √((1 − β) / (1 + β)).

For β = 0.9 the best rate of Layca around SGD, 3⁻³, becomes 3⁻⁴·³⁴.

The study trains the same network at four rates. It asks which of them rotates as the authors' panel does, whether that
rate meets their accuracy, and which rate is best by accuracy on validation data.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, log, sqrt
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.cells import Cell, accuracy_error, cells, some
from gyroscope_lab.papers.chance import Estimate, all_exceed
from gyroscope_lab.papers.rotation import paper
from gyroscope_lab.papers.rotation.best_layca import BEST_LAYCA
from gyroscope_lab.papers.rotation.recipes import over_seeds
from gyroscope_lab.papers.rotation.tuned_rates import best_by_validation, validation
from gyroscope_lab.papers.study import Report, Study, Table, Verdict
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.trial import Trial

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TASK = "c100-resnet"
#: log₃ of the rates. The first is the one that the authors' code names.
POWERS = (-5.0, -4.5, -4.3, -4.0)
#: The mean rotation by epoch of the authors' panel, read off it. Their plots show an epoch up to one too late.
ROTATION: dict[int, float] = {2: 0.34, 4: 0.52, 6: 0.66, 10: 0.82, 20: 0.94}
#: The first-order momentum of Adam, and log₃ of the rate at which it rotates layers as Layca at 3⁻³ does without.
BETA = 0.9
EQUIVALENT = -3.0 + log(sqrt((1 - BETA) / (1 + BETA)), 3)
# A smoke test has two rates: the authors' and the one that theory gives.
_SMOKE_POWERS = (-5.0, -4.3)
# Test accuracies agree within this many points, and rotations within this share: neighboring rates differ by more.
_SAME_TEST, _SAME_ROTATION = 2.0, 0.2
# Rotation curves rise until this share of the final rotation; from there they saturate.
_RISING = 2 / 3
# The images that are held out of CIFAR-100 for validation.
_VALIDATED = 5_000
# The epochs of rotation that the figure shows.
_SHOWN = 30


def adam_layca(power: float) -> Recipe:
    """Adam under Layca at ρ(0) = 3^power.

    >>> adam_layca(-4.3).name, round(adam_layca(-5).rate, 5)
    ('Adam-Layca 3^-4.3', 0.00412)
    """
    return Recipe(f"Adam-Layca 3^{power:g}", rate=3.0**power, optimizer="adam", control="layca")


def trials(lab: Lab) -> list[Trial]:
    """Adam under Layca at each rate, and Layca around SGD at 3⁻³.

    >>> from gyroscope_lab.training.archive import Archive
    >>> [trial.recipe.name for trial in trials(Lab(Archive("runs"), "full"))][1:3]
    ['Adam-Layca 3^-4.5', 'Adam-Layca 3^-4.3']
    """
    [task] = lab.tasks([TASK])
    return over_seeds(task, [*map(adam_layca, _powers(lab)), BEST_LAYCA], lab.seeds)


def _powers(lab: Lab) -> tuple[float, ...]:
    return _SMOKE_POWERS if lab.scale == "smoke" else POWERS


def conclude(lab: Lab) -> Report:
    """Report rotation and accuracy by rate, compared with the authors' panel."""
    found = {cell.recipe: cell for cell in cells(lab, trials(lab))}
    by_rate = {power: found[adam_layca(power)] for power in _powers(lab) if adam_layca(power) in found}
    some(list(by_rate))
    at_full_scale = lab.scale == "full"
    told = paper.absolute(TASK, paper.ADAPTIVE_LAYCA[TASK]) if at_full_scale else None
    verdicts = _of_paper(by_rate, told) if told is not None else []
    if BEST_LAYCA in found and -4.3 in by_rate:
        verdicts.append(_equivalent(by_rate[-4.3], found[BEST_LAYCA]))
    return Report(
        {"figure": _draw(by_rate, found.get(BEST_LAYCA), told)},
        (_table(by_rate, told),),
        tuple(verdicts),
        {
            "cells": [cell.numbers() for cell in found.values()],
            "mean_rotation": {cell.recipe.name: np.round(_mean(cell), 4).tolist() for cell in found.values()},
            "from_paper": {f"3^{power:g}": apart(cell) for power, cell in by_rate.items()} if at_full_scale else {},
        },
    )


def apart(cell: Cell) -> float:
    """The mean distance of a cell's mean rotation from the authors' at the epochs of `ROTATION`.

    >>> from gyroscope_lab.training.result import Result
    >>> from gyroscope_lab.training.tasks import task
    >>> rotation = [[ROTATION.get(epoch, 0.0) + 0.1] for epoch in range(21)]
    >>> result = Result(1.0, 0.5, loss=[0.1] * 20, layers=["a"], rotation=rotation)
    >>> round(apart(Cell(task("c100-resnet"), adam_layca(-5), (result,))), 3)
    0.1
    """
    curve = _mean(cell)
    # A training that ended early keeps the rotation of its end.
    return float(np.mean([abs(curve[min(epoch, len(curve) - 1)] - value) for epoch, value in ROTATION.items()]))


def _mean(cell: Cell) -> npt.NDArray[np.float64]:
    """Rotation by epoch, the mean over layers."""
    return np.asarray(cell.rotation.mean(axis=1))


def _of_paper(by_rate: Mapping[float, Cell], told: float) -> list[Verdict]:
    """Verdicts about the authors' panel."""
    closest = min(by_rate, key=lambda power: apart(by_rate[power]))
    chosen = best_by_validation(by_rate)
    named, cell = by_rate.get(POWERS[0]), by_rate[closest]
    by_name = "" if named is None else f", 3^{POWERS[0]:g} {apart(named):.3f} apart"
    return [
        Verdict(
            "the panel of figure 6 has a higher rate than the 3^-5 of the authors' code",
            ", ".join(f"{value:.2f}" for value in ROTATION.values()) + " at epochs " + ", ".join(map(str, ROTATION)),
            f"closest is 3^{closest:g}, {apart(cell):.3f} apart{by_name}",
            closest > POWERS[0],
        ),
        Verdict(
            "the rate that rotates as in figure 6 reaches its test accuracy",
            f"{told:.2f} %",
            f"3^{closest:g}: {cell.test:.2f} %, {cell.tested.plus(-told).told} points",
            cell.tested.plus(-told).within(_SAME_TEST),
        ),
        Verdict(
            "the rate of figure 6 is the best by validation accuracy",
            "the best of a grid search",
            f"3^{chosen:g} with {validation(by_rate[chosen]):.2f} %; rotating as in figure 6 {validation(cell):.2f} %",
            all_exceed([_validated(cell) - _validated(one) for power, one in by_rate.items() if power != closest]),
        ),
    ]


def _validated(cell: Cell) -> Estimate:
    """The best validation accuracy with its standard error: over seeds, or for a single seed over the images."""
    over_seeds = cell.over_seeds(lambda result: 100 * result.best_validation)
    if over_seeds.error is not None:
        return over_seeds
    return Estimate(over_seeds.mean, accuracy_error(over_seeds.mean / 100, _VALIDATED), inf)


def _equivalent(adam: Cell, sgd: Cell) -> Verdict:
    """Compare the first part of both curves: later they saturate, whatever the rate."""
    a, b = _mean(adam), _mean(sgd)
    epochs = min(len(a), int(np.argmax(b > _RISING * b[-1])) + 1)
    share = float(np.sum(np.abs(a[:epochs] - b[:epochs])) / np.sum(b[:epochs]))
    return Verdict(
        f"with a momentum of {BETA:g}, a rate of 3^{EQUIVALENT:.2f} rotates layers as 3^-3 does without",
        "theory: ρ √((1 − β) / (1 + β))",
        f"3^-4.3 and Layca around SGD are {100 * share:.0f} % apart over {epochs - 1} epochs",
        share <= _SAME_ROTATION,
        over=lambda trial: trial.recipe in (adam_layca(-4.3), BEST_LAYCA),
    )


def _table(by_rate: Mapping[float, Cell], told: float | None) -> Table:
    rows = []
    for power, cell in by_rate.items():
        difference, from_paper = (None, None) if told is None else (cell.test - told, apart(cell))
        measured = (cell.test_told, told, difference, validation(cell), cell.train)
        rows.append((f"3^{power:g}", *measured, cell.mean_rotation, from_paper))
    columns = ("rate", "test % here", "paper", "difference", "validation %", "train %", "mean rotation",
               "rotation from the paper's")  # fmt: skip
    return Table(f"{next(iter(by_rate.values())).task.name}: Adam under Layca by rate", columns, tuple(rows))


def _draw(by_rate: Mapping[float, Cell], sgd: Cell | None, told: float | None) -> Figure:
    """Mean rotation by epoch, and accuracy by rate, with the authors' numbers where there are any."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for place, (power, cell) in enumerate(by_rate.items()):
        color = matplotlib.colormaps["viridis"](0.85 * place / max(1, len(by_rate) - 1))
        left.plot(_mean(cell)[: _SHOWN + 1], color=color, label=f"$3^{{{power:g}}}$")
    if sgd is not None:
        left.plot(_mean(sgd)[: _SHOWN + 1], "--", color="0.5", label="SGD, $3^{-3}$")
    powers = list(by_rate)
    right.plot(powers, [cell.test for cell in by_rate.values()], "o-", color="C0", markersize=4, label="test")
    right.plot(powers, [cell.train for cell in by_rate.values()], "x:", color="C0", markersize=4, label="train")
    if told is not None:
        left.plot(list(ROTATION), list(ROTATION.values()), "o", color="black", markersize=4, label="paper")
        right.axhline(told, color="black", linewidth=0.8, label="test, paper")
    left.set(xlabel="epoch", ylabel="rotation (mean over layers)", ylim=(0, None if told is None else 1))
    right.set(xlabel="rate", ylabel="accuracy (%)", xticks=powers, xticklabels=[f"$3^{{{one:g}}}$" for one in powers])
    for ax in (left, right):
        ax.legend(fontsize=8)
        ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"Adam under Layca, by rate ({next(iter(by_rate.values())).task.name})")
    return figure


STUDIES = (
    Study(
        "rotation/adam-layca-rates",
        "Figure 6 again: Adam under Layca by rate, and which rate the paper shows",
        trials,
        conclude,
    ),
)
