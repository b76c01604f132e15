"""Initial weights of another size (figure 7 of the speed paper): a rotation rate means the same, a step does not.

The initial weights of every layer are multiplied by f. Layca turns a layer by arctan ρ, whatever its weights' norm, so
the same rates are good for every f. Block-normalized SGD moves a layer by ρ, which turns it by about ρ/(f‖w‖): its
good rates move along with f. Those of SGD move along with f², since gradients of layers before a batch normalization
shrink by f while the weights grow by it.

The paper does not give its factors, and its authors' code for this figure is not published. Here they are powers of 3,
as are the rates, so that a shift by f is one by whole places of the grid; the rates are those of the paper's searches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.cells import Cell, cells
from gyroscope_lab.papers.chance import Estimate, smaller_at_worst
from gyroscope_lab.papers.rotation.recipes import layca, over_seeds, sgd
from gyroscope_lab.papers.rotation.tuned_rates import best_by_validation
from gyroscope_lab.papers.study import Report, Study, Table, Verdict
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.task import Task
from gyroscope_lab.training.trial import Trial

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The lighter version of C10-CNN1, with half as many layers a stage and half as many filters.
TASK = "c10-cnn1-light"
LAYCA, BLOCK, SGD = "Layca", "Block-normalized SGD", "SGD"
#: The rate that the paper says is best for Layca at every f, as a power of 3.
PAPER = {LAYCA: -3}


@dataclass(frozen=True)
class Plan:
    """The trainings of a scale: log₃ f, and log₃ of the rates of each method."""

    factors: tuple[int, ...]
    rates: Mapping[str, tuple[int, ...]]


#: By scale. A place of the coarser grids is a factor 9, and so is f.
PLANS = {
    "smoke": Plan((0, 2), {LAYCA: (-5, -3, -1), BLOCK: (-3, -1, 1), SGD: (-1, 1)}),
    "small": Plan((-2, 0, 2), {LAYCA: (-7, -5, -3, -1), BLOCK: (-5, -3, -1, 1, 3), SGD: (-5, -3, -1, 1, 3)}),
    "full": Plan((-1, 0, 1), dict.fromkeys((LAYCA, BLOCK, SGD), tuple(range(-7, 3)))),
}


def recipe(task: Task, method: str, power: int, factor: int) -> Recipe:
    """Return a method at the rate 3^power, its initial weights multiplied by 3^factor.

    >>> from gyroscope_lab.training.tasks import task
    >>> recipe(task("digits"), BLOCK, -1, 2).name, recipe(task("digits"), LAYCA, -3, 0) == layca(-3)
    ('Block-normalized SGD 3^-1, f 3^2', True)
    """
    made = {
        LAYCA: layca(power),
        BLOCK: Recipe(f"{BLOCK} 3^{power}", rate=3.0**power, control="block"),
        SGD: sgd(task, power),
    }[method]
    return replace(made, name=f"{made.name}, f 3^{factor}", scale=3.0**factor) if factor else made


def trials(lab: Lab) -> list[Trial]:
    """Return the trials of the figure.

    >>> from gyroscope_lab.training.archive import Archive
    >>> len(trials(Lab(Archive("runs"), "full")))
    90
    """
    [task], plan = lab.tasks([TASK]), PLANS[lab.scale]
    recipes = [
        recipe(task, method, power, factor)
        for method, powers in plan.rates.items()
        for factor in plan.factors
        for power in powers
    ]
    return over_seeds(task, recipes, lab.seeds)


Lines = dict[str, dict[int, dict[int, Cell]]]


def figure7(lab: Lab) -> Report:
    """Report accuracies over rates, method by method and factor by factor."""
    [task], plan = lab.tasks([TASK]), PLANS[lab.scale]
    known = {cell.recipe: cell for cell in cells(lab, trials(lab))}
    lines: Lines = {
        method: {f: {power: known[recipe(task, method, power, f)] for power in powers} for f in plan.factors}
        for method, powers in plan.rates.items()
    }
    return Report(
        {"figure": _draw(lines)},
        (_table(task, lines),),
        _verdicts(lines),
        {
            "cells": [cell.numbers() for cell in known.values()],
            "best": {
                method: {f"3^{f}": best_by_validation(line) for f, line in its.items()} for method, its in lines.items()
            },
            "regret": {method: regret(its) for method, its in lines.items()},
        },
    )


def costs(lines: Mapping[int, Mapping[int, Cell]]) -> list[Estimate]:
    """Return what it costs, in points of test accuracy, to take the best rate of each f for every other."""
    bests = {factor: best_by_validation(line) for factor, line in lines.items()}
    return [
        Estimate(0.0, 0.0, inf) if power == bests[factor] else line[bests[factor]].ahead_of(line[power])
        for factor, line in lines.items()
        for power in bests.values()
    ]


def regret(lines: Mapping[int, Mapping[int, Cell]]) -> float:
    """Return the highest of the `costs`."""
    return max(cost.mean for cost in costs(lines))


def _table(task: Task, lines: Lines) -> Table:
    rows = []
    for method, its in lines.items():
        for factor, line in its.items():
            power = best_by_validation(line)
            told = f"3^{PAPER[method]}" if method in PAPER else None
            rows.append((method, f"3^{factor}", f"3^{power}", told, line[power].test_told, line[power].train))
    heads = ("method", "f", "best rate here", "paper", "test % there", "train %")
    return Table(f"{task.name}: the best rates", heads, tuple(rows))


def _verdicts(lines: Lines) -> tuple[Verdict, ...]:
    bests = {method: [best_by_validation(its[factor]) for factor in sorted(its)] for method, its in lines.items()}
    most = {method: regret(its) for method, its in lines.items()}
    moves = all(a <= b for a, b in pairwise(bests[BLOCK])) and bests[BLOCK][0] < bests[BLOCK][-1]
    return (
        Verdict(
            "Layca: the optimal rate is the same for every f",
            "3^-3 in all cases",
            _listed(bests[LAYCA]),
            len(set(bests[LAYCA])) == 1,
        ),
        Verdict(
            "block-normalized SGD: the optimal rate grows with f",
            "shifts every time f is increased",
            _listed(bests[BLOCK]),
            moves,
        ),
        Verdict(
            "the rate that is best at one f serves Layca at every other, and not block-normalized SGD",
            "the difference is striking",
            f"it costs up to {most[LAYCA]:.1f} and {most[BLOCK]:.1f} points ({most[SGD]:.1f} with SGD)",
            smaller_at_worst(costs(lines[LAYCA]), costs(lines[BLOCK])),
        ),
    )


def _listed(powers: list[int]) -> str:
    return ", ".join(f"3^{power}" for power in powers) + " for growing f"


def _draw(lines: Lines) -> Figure:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(9.6, 3.2), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    for ax, (method, its) in zip(axes, lines.items(), strict=True):
        for place, (factor, line) in enumerate(its.items()):
            color = matplotlib.colormaps["viridis"](0.85 * place / max(1, len(its) - 1))
            rates = [3.0**power for power in line]
            tests, trains = [cell.test for cell in line.values()], [cell.train for cell in line.values()]
            ax.plot(rates, tests, "o-", color=color, markersize=4, label=f"$f = 3^{{{factor}}}$")
            ax.plot(rates, trains, ":", color=color)
        ax.set_xscale("log", base=3)
        ax.set_title(method, fontsize=10)
        ax.set_xlabel("ρ(0)" if method == LAYCA else "initial learning rate", fontsize=9)
    axes[0].set_ylabel("accuracy (%)", fontsize=9)
    kinds = [Line2D([], [], color="0.4", label="test"), Line2D([], [], color="0.4", linestyle=":", label="train")]
    handles = [*axes[0].get_legend_handles_labels()[0], *kinds]
    axes[-1].legend(handles=handles, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


STUDIES = (
    Study("speed/fig7", "Figure 7: accuracy over rates when all initial weights are multiplied by f", trials, figure7),
)
