"""Plateaus of the training loss (figure 11 of the rotation paper, figures 3 and 10 of the speed paper).

While the rate is not cut, the training loss settles on a plateau: the higher, the faster and the more uniformly the
layers turn. Its height here is the mean loss over the last tenth of the epochs before the first cut. The papers'
curves, decoded from their figures, are drawn with ours.

The digits learn at rates three times as high as the papers' tasks can take, and have no plateau at 3⁻³; what
stands in for these tasks is therefore trained around 3⁻².
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gyroscope_lab.engine.laboratory import Lab, Scale
from gyroscope_lab.papers.cells import Cell, cells
from gyroscope_lab.papers.rotation import paper
from gyroscope_lab.papers.rotation.alpha_and_rate import SWEPT
from gyroscope_lab.papers.rotation.recipes import layca, over_seeds
from gyroscope_lab.papers.rotation.rule import FEWEST, P, correlation
from gyroscope_lab.papers.study import Report, Study, Table, Verdict, on_task
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.schedule import Schedule
from gyroscope_lab.training.task import Task
from gyroscope_lab.training.tasks import task as task_called
from gyroscope_lab.training.trial import Trial

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIRST, LAST, RATE = "α ≤ 0: first layers faster", "α ≥ 0: last layers faster", "ρ(0), α = 0"
#: The columns of each task's row, figure by figure.
FIG11 = dict.fromkeys(SWEPT, (FIRST, LAST, RATE))
FIG3 = {"tiny-cnn": (LAST, RATE)}
FIG10 = {"c10-cnn1": (FIRST, RATE), "c100-resnet": (LAST, RATE)}
#: |α| along a column of α, and what is subtracted from log₃ ρ(0) along the other; a smoke test takes the ends.
SIZES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.6)
STEPS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)

Layout = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Column:
    """One panel: a title, and recipes from the one with the highest plateau on."""

    title: str
    recipes: tuple[Recipe, ...]


#: A task, its panels, and loss curves by name.
Row = tuple[str, Sequence[Column], Mapping[str, npt.ArrayLike]]


def height(loss: npt.ArrayLike, schedule: Schedule) -> float:
    """Return the height of a loss curve's plateau: its mean over the last tenth of the epochs before the rate is cut.

    >>> height([2.0] * 70 + [0.5, 0.3] * 5 + [0.01] * 20, Schedule(epochs=100, cuts=(0.8, 0.9)))
    0.4
    """
    first = min(schedule.milestones, default=schedule.epochs)
    before = np.asarray(loss, dtype=np.float64)[:first]
    return float(np.mean(before[-max(1, first // 10) :]))


@cache
def paper_curves() -> dict[str, dict[str, list[float]]]:
    """The paper's loss curves (figure 11), by task and by recipe's name.

    >>> paper_curves()["c10-cnn1"]["Layca 3^-3"][0]
    2.0004
    """
    text = files("gyroscope_lab.papers.rotation").joinpath("plateau_curves.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, list[float]]] = json.loads(text)
    return found


def columns(scale: Scale, titles: Sequence[str]) -> list[Column]:
    """Return the panels of a row.

    >>> [recipe.name for recipe in columns("full", [RATE])[0].recipes][:2]
    ['Layca 3^-3', 'Layca 3^-3.2']
    """
    top = -3 if scale == "full" else -2
    sizes, steps = ((0.0, 0.6), (0.0, 1.0, 2.0)) if scale == "smoke" else (SIZES, STEPS)
    made = {
        FIRST: tuple(layca(top, alpha=0.0 - size) for size in sizes),
        LAST: tuple(layca(top, alpha=size) for size in sizes),
        RATE: tuple(layca(round(top - step, 1)) for step in steps),
    }
    return [Column(title, made[title]) for title in titles]


def trials(lab: Lab, layout: Layout) -> list[Trial]:
    """Return the trials of a figure.

    >>> from gyroscope_lab.training.archive import Archive
    >>> len(trials(Lab(Archive("runs"), "full"), FIG3))
    11
    """
    return [trial for task, row in _rows(lab, layout) for trial in over_seeds(task, _recipes(row), lab.seeds)]


def conclude(lab: Lab, layout: Layout, *, indicates: bool = False) -> Report:
    """Report loss curves; with `indicates`, also whether high plateaus come with good generalization."""
    by_task: dict[str, dict[str, Cell]] = {}
    for cell in cells(lab, trials(lab, layout)):
        by_task.setdefault(cell.task.name, {})[cell.recipe.name] = cell
    rows = [(task, row, by_task[task.name]) for task, row in _rows(lab, layout)]
    verdicts = [_verdict(task, column, its) for task, row, its in rows for column in row]
    if indicates:
        verdicts += [verdict for task, _, its in rows for verdict in on_task(task.name, [_indicates(task, its)])]
    here = [(task.name, row, {name: cell.loss for name, cell in its.items()}) for task, row, its in rows]
    there = [(name, columns("full", titles), paper_curves()[name]) for name, titles in layout.items()]
    numbers = [{**cell.numbers(), "plateau": _height(cell)} for _, _, its in rows for cell in its.values()]
    return Report(
        {"figure": _draw(here, dotted=paper_curves()), "paper": _draw(there, dotted={})},
        tuple(_table(task, its) for task, _, its in rows),
        tuple(verdicts),
        {"cells": numbers},
    )


def _rows(lab: Lab, layout: Layout) -> list[tuple[Task, list[Column]]]:
    # A stand-in for several tasks has the row of the first of them.
    first = next(iter(layout.values()))
    return [(task, columns(lab.scale, layout.get(task.name, first))) for task in lab.tasks(list(layout))]


def _recipes(row: Sequence[Column]) -> list[Recipe]:
    return list(dict.fromkeys(recipe for column in row for recipe in column.recipes))


def _height(cell: Cell) -> float:
    return height(cell.loss, cell.task.schedule)


def _paper_height(name: str, recipe: str) -> float | None:
    curve = paper_curves().get(name, {}).get(recipe)
    return None if curve is None else height(curve, task_called(name).schedule)


def _table(task: Task, its: Mapping[str, Cell]) -> Table:
    lines = [
        (name, _height(cell), _paper_height(task.name, name), cell.test_told, paper.told(task.name, name), cell.train)
        for name, cell in its.items()
    ]
    heads = ("configuration", "plateau here", "paper", "test % here", "paper", "train %")
    return Table(task.name, heads, tuple(lines))


def _verdict(task: Task, column: Column, its: Mapping[str, Cell]) -> Verdict:
    here = [_height(its[recipe.name]) for recipe in column.recipes]
    told = [_paper_height(task.name, recipe.name) for recipe in column.recipes]
    why = "the faster all layers turn" if column.title == RATE else "the more uniformly layers turn"
    known = [value for value in told if value is not None]
    return Verdict(
        f"{task.name}, {column.title}: {why}, the higher the plateau",
        _listed(known) if known else "in all three tasks",
        _listed(here),
        here[0] == max(here) and _fall(here),
        over=lambda trial: trial.task.name == task.name and trial.recipe in column.recipes,
    )


def _listed(heights: Sequence[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in heights)


def _fall(heights: Sequence[float]) -> bool:
    """Whether the heights fall rather than rise, by Kendall's τ."""
    from scipy.stats import kendalltau  # takes a while to load

    return bool(kendalltau(range(len(heights)), heights).statistic < 0)


def _indicates(task: Task, its: Mapping[str, Cell]) -> Verdict:
    """The verdict on the rank correlation of plateaus and test accuracies, of networks that learned."""
    learned = [cell for cell in its.values() if cell.learned]
    here = correlation([_height(cell) for cell in learned], [cell.test for cell in learned])
    told = [(_paper_height(task.name, cell.recipe.name), paper.told(task.name, cell.recipe.name)) for cell in learned]
    known = [(plateau, test) for plateau, test in told if plateau is not None and test is not None]
    theirs = correlation([plateau for plateau, _ in known], [test for _, test in known]).kendall
    words = f"Kendall's τ = {here.kendall:+.2f} (p = {here.kendall_p:.1g})"
    return Verdict(
        f"{task.name}: high plateaus indicate good generalization",
        f"Kendall's τ = {theirs:+.2f} over {len(known)}" if len(known) > 2 else "suggested by figures 9 and 11",
        f"{words} over {len(learned)} of {len(its)} configurations, which learned",
        here.kendall > 0 if here.count >= FEWEST and here.kendall_p < P else None,
    )


def _draw(rows: Sequence[Row], *, dotted: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """Panels in rows of tasks; the curves `dotted` are the paper's."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    wide = max(len(row) for _, row, _ in rows)
    figure = Figure(figsize=(3.3 * wide + 0.4, 2.5 * len(rows) + 0.5), layout="constrained")
    axes = figure.subplots(len(rows), wide, squeeze=False, sharex="row", sharey="row")
    for line, (name, row, curves) in zip(axes, rows, strict=True):
        for ax, column in zip(line, row, strict=True):
            for place, recipe in enumerate(column.recipes):
                color = matplotlib.colormaps["viridis"](0.9 * place / max(1, len(column.recipes) - 1))
                its, told = np.asarray(curves[recipe.name]), dotted.get(name, {}).get(recipe.name, ())
                ax.plot(range(1, len(its) + 1), its, color=color, linewidth=1.3, label=_label(column, recipe))
                ax.plot(range(1, len(told) + 1), told, color=color, linewidth=1, linestyle=":")
            ax.set_title(column.title, fontsize=9)
            ax.legend(fontsize=7, loc="upper right")
            ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            if name not in paper_curves():  # a stand-in has lower plateaus, further apart
                ax.set_yscale("log")
        line[0].set_ylabel(f"{name}\ntraining loss", fontsize=9)
    for ax in axes[-1]:
        ax.set_xlabel("epoch", fontsize=9)
    if any(name in dotted for name, _, _ in rows):
        figure.suptitle("Training loss under Layca (dotted: the paper's)", fontsize=10)
    return figure


def _label(column: Column, recipe: Recipe) -> str:
    if column.title == RATE:
        return "$3^{" + recipe.name.removeprefix("Layca 3^") + "}$"
    return f"{recipe.alpha:+g}" if recipe.alpha else "0"


STUDIES = (
    Study(
        "rotation/fig11",
        "Figure 11: loss curves by α and ρ(0)",
        lambda lab: trials(lab, FIG11),
        lambda lab: conclude(lab, FIG11, indicates=True),
    ),
    Study(
        "speed/fig3",
        "Figure 3: loss curves by α and ρ(0) on tiny-CNN",
        lambda lab: trials(lab, FIG3),
        lambda lab: conclude(lab, FIG3),
    ),
    Study(
        "speed/fig10",
        "Figure 10: loss curves by α and ρ(0) on C10-CNN1 and C100-resnet",
        lambda lab: trials(lab, FIG10),
        lambda lab: conclude(lab, FIG10),
    ),
)
