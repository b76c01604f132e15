"""Adaptive gradient methods and layer rotation (section 5.4 of the rotation paper, 5.2 of the paper on speed).

RMSprop, Adam and Adagrad train fast and generalise worse than SGD with weight decay. The papers' account of both: they
set each layer's rate of rotation. With Layca around them, which sets it anew, they generalise as well as SGD does; and
SGD that turns its layers as far, step by step, as an adaptive method did (AdaptCopy) trains as fast as that one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.cells import Cell, title
from gyroscope_lab.papers.rotation import paper
from gyroscope_lab.papers.rotation.adaptive_columns import Column, Pair, cells_of, columns, speed_columns, trials_of
from gyroscope_lab.papers.rotation.adaptive_curves import copy_trials, equivalent_trials, figure6_of_speed, figure7
from gyroscope_lab.papers.rotation.beside_layca import in_training
from gyroscope_lab.papers.study import Report, Study, Table, Verdict
from gyroscope_lab.training.trial import Trial

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Table 6 (arXiv): training accuracies of the adaptive methods, and of these under Layca.
TABLE6: dict[str, tuple[float, float]] = dict(
    zip(paper.TASKS, ((100.0, 100.0), (100.0, 99.7), (100.0, 99.2), (100.0, 100.0), (99.9, 100.0)), strict=True)
)
#: Table 4 (ICLR): training accuracies of the adaptive methods.
TABLE4: dict[str, float] = dict(zip(paper.TASKS, (100.0, 99.98, 99.97, 98.72, 99.92), strict=True))
#: Figure 5 (ICLR): differences Δη as in figure 6 (arXiv), but for C10-CNN2, which had dropout, and 92.33 % at best.
FIGURE5: dict[str, float] = paper.ADAPTIVE | {"c10-cnn2": -1.14}
REFERENCE5: dict[str, float] = paper.REFERENCE | {"c10-cnn2": 92.33}
# In points: what two trainings of one recipe may differ by, and the most that the paper's "on par" spans.
_PAR = 2.0


def compared(column: Column) -> list[Pair]:
    """What figure 6 (arXiv) trains for a column: with and without Layca, and what that is held against.

    >>> from gyroscope_lab.training.archive import Archive
    >>> [recipe.name for _, recipe in compared(columns(Lab(Archive("runs")))[0])]
    ['RMSprop', 'RMSprop-Layca 3^-3', 'Layca 3^-3', 'SGD + L2', 'SGD 3^-1']
    """
    return [column.method, column.controlled, column.best, column.decayed, column.sgd]


def alone(column: Column) -> list[Pair]:
    """What figure 5 (ICLR) trains for a column.

    >>> from gyroscope_lab.training.archive import Archive
    >>> [recipe.name for _, recipe in alone(columns(Lab(Archive("runs")))[0])]
    ['RMSprop', 'Layca 3^-3', 'SGD 3^-1']
    """
    return [column.method, column.best, column.sgd]


def _compared(lab: Lab) -> list[Trial]:
    return trials_of(lab, [pair for column in columns(lab) for pair in compared(column)])


def _alone(lab: Lab) -> list[Trial]:
    return trials_of(lab, [pair for column in speed_columns(lab) for pair in alone(column)])


def _both(lab: Lab) -> list[Trial]:
    return trials_of(lab, [pair for column in columns(lab) for pair in (column.method, column.controlled)])


def _methods(lab: Lab) -> list[Trial]:
    return trials_of(lab, [column.method for column in speed_columns(lab)])


def figure6(lab: Lab) -> Report:
    """Rotation curves and test accuracies of adaptive methods, without Layca and with it."""
    its = columns(lab)
    found = cells_of(lab, [pair for column in its for pair in compared(column)])
    rows = [[(column, found[column.method]) for column in its], [(column, found[column.controlled]) for column in its]]
    lines = []
    for column in its:
        told = (paper.ADAPTIVE.get(column.task.name), paper.ADAPTIVE_LAYCA.get(column.task.name))
        for pair, difference in zip((column.method, column.controlled), told, strict=True):
            lines.append(_line(column, found[pair], paper.absolute(column.task.name, difference)))
        reference, decay = paper.REFERENCE.get(column.task.name), paper.WEIGHT_DECAY.get(column.task.name)
        lines.append(_line(column, found[column.best], reference))
        lines.append(_line(column, found[column.decayed], paper.absolute(column.task.name, decay)))
    verdicts = []
    for column in its:
        method, controlled, best, decayed, sgd = (found[pair] for pair in compared(column))
        verdicts += [
            *_worse(column, method, best, paper.ADAPTIVE),
            _last(column, method, sgd),
            _par(column, method, controlled, decayed),
        ]
    figure = _panels(rows, found, "Adaptive methods, without Layca (above) and with it (below)")
    return Report(
        {"figure": figure},
        (_table("Test accuracy", lines),),
        tuple(verdicts),
        {"cells": [cell.numbers() for cell in found.values()]},
    )


def figure5_of_speed(lab: Lab) -> Report:
    """Rotation curves and test accuracies of adaptive methods."""
    its = speed_columns(lab)
    found = cells_of(lab, [pair for column in its for pair in alone(column)])
    told = {name: REFERENCE5[name] + difference for name, difference in FIGURE5.items()}
    lines = [_line(column, found[column.method], told.get(column.task.name)) for column in its]
    verdicts = []
    for column in its:
        method, best, sgd = (found[pair] for pair in alone(column))
        verdicts += [*_worse(column, method, best, FIGURE5), _last(column, method, sgd)]
    figure = _panels([[(column, found[column.method]) for column in its]], found, "Adaptive methods")
    return Report(
        {"figure": figure},
        (_table("Test accuracy", lines),),
        tuple(verdicts),
        {"cells": [cell.numbers() for cell in found.values()]},
    )


def table6(lab: Lab) -> Report:
    """Training accuracies of adaptive methods, without Layca and with it."""
    its = columns(lab)
    found = cells_of(lab, [pair for column in its for pair in (column.method, column.controlled)])
    lines = []
    for column in its:
        told = TABLE6.get(column.task.name, (None, None))
        for pair, number in zip((column.method, column.controlled), told, strict=True):
            cell = found[pair]
            lines.append((column.task.name, cell.recipe.name, in_training(cell), number, cell.train))
    return _learned(lines, list(found.values()), "10 of 10")


def table4_of_speed(lab: Lab) -> Report:
    """Training accuracies of adaptive methods."""
    its = speed_columns(lab)
    found = cells_of(lab, [column.method for column in its])
    lines = []
    for column in its:
        cell = found[column.method]
        told = TABLE4.get(column.task.name)
        lines.append((column.task.name, cell.recipe.name, in_training(cell), told, cell.train))
    return _learned(lines, list(found.values()), "5 of 5")


def _learned(lines: Sequence[tuple[object, ...]], found: Sequence[Cell], paper_says: str) -> Report:
    learned = sum(cell.learned for cell in found)
    says = Verdict("adaptive methods learn their training sets", paper_says, f"{learned} of {len(found)}",
                   learned == len(found))  # fmt: skip
    heads = ("task", "method", "train % here", "paper", "of the tested weights")
    table = Table("Training accuracy", heads, tuple(lines))
    return Report({}, (table,), (says,), {"cells": [cell.numbers() for cell in found]})


def tilt(cell: Cell) -> float:
    """Which layers turn further: (late − early) / (late + early) of the mean rotations of the two halves; −1 to 1.

    The layer in the middle of an odd number belongs to neither half.

    >>> from gyroscope_lab.training.result import Result
    >>> from gyroscope_lab.papers.rotation.recipes import layca
    >>> from gyroscope_lab.training.tasks import task
    >>> result = Result(1.0, 0.9, loss=[0.1], layers=["a", "b", "c"], rotation=[[0.1, 0.9, 0.3]])
    >>> round(tilt(Cell(task("digits"), layca(-3), (result,))), 2)
    0.5
    """
    its = cell.final_rotation
    half = len(its) // 2
    early, late = float(its[:half].mean()), float(its[-half:].mean())
    return (late - early) / (late + early) if late + early else 0.0


def _line(column: Column, cell: Cell, told: float | None) -> tuple[object, ...]:
    difference = None if told is None else cell.test - told
    return (column.task.name, cell.recipe.name, cell.test, told, difference, cell.train, cell.mean_rotation,
            cell.unevenness, tilt(cell))  # fmt: skip


def _table(name: str, lines: list[tuple[object, ...]]) -> Table:
    columns = ("task", "method", "test % here", "paper", "difference", "train %", "mean rotation", "unevenness", "tilt")
    return Table(name, columns, tuple(dict.fromkeys(lines)))


def _worse(column: Column, method: Cell, best: Cell, differences: dict[str, float]) -> list[Verdict]:
    told = differences.get(column.task.name)
    return [
        Verdict(
            f"{column.name} generalises worse than Layca at its best",
            "by 1.3 to 13.2 points" if told is None else f"{told:+.2f} points",
            f"{method.test - best.test:+.2f} points",
            method.test < best.test,
        ),
        Verdict(
            f"{column.name} turns layers less",
            "small and/or non-uniform rotations",
            f"mean {method.mean_rotation:.2f} against {best.mean_rotation:.2f}",
            method.mean_rotation < best.mean_rotation,
        ),
        Verdict(
            f"{column.name} turns layers less evenly",
            "small and/or non-uniform rotations",
            f"unevenness {method.unevenness:.2f} against {best.unevenness:.2f}",
            method.unevenness > best.unevenness,
        ),
    ]


def _last(column: Column, method: Cell, sgd: Cell) -> Verdict:
    return Verdict(
        f"{column.name} turns the last layers more than SGD does",
        "adaptive methods favour the last layers, SGD usually the first",
        f"tilt {tilt(method):+.2f} against {tilt(sgd):+.2f}",
        tilt(method) > tilt(sgd),
    )


def _par(column: Column, method: Cell, controlled: Cell, decayed: Cell) -> Verdict:
    task = column.task.name
    told = [one.get(task) for one in (paper.ADAPTIVE_LAYCA, paper.WEIGHT_DECAY, paper.ADAPTIVE)]
    says = "within 2.0 points, in all five tasks"
    if told[0] is not None and told[1] is not None and told[2] is not None:
        says = f"{told[0] - told[1]:+.2f} points to SGD + L2, {told[0] - told[2]:+.2f} to without"
    return Verdict(
        f"{column.name} under Layca generalises on par with SGD + L2, and better than without",
        says,
        f"{controlled.test - decayed.test:+.2f} points to SGD + L2, {controlled.test - method.test:+.2f} to without",
        controlled.test > decayed.test - _PAR and controlled.test > method.test,
    )


def _panels(rows: list[list[tuple[Column, Cell]]], found: dict[Pair, Cell], heading: str) -> Figure:
    """Rotation curves: over epochs, or over the share of a training where these last for different numbers of them."""
    from gyroscope.figures import Panel, rotation_panels

    shown = [one for row in rows for one in row]
    in_epochs = len({len(cell.rotation) for _, cell in shown}) == 1
    panels = []
    for column, cell in shown:
        accuracy = f"{cell.test:.2f} % ({cell.test - found[column.best].test:+.2f})"
        x = None if in_epochs else np.linspace(0, 100, len(cell.rotation))
        panels.append(Panel(f"{column.task.name}\n{title(cell.recipe)}\n{accuracy}", cell.rotation, x))
    xlabel = "epoch" if in_epochs else "share of the training (%)"
    figure = rotation_panels(panels, columns=max(map(len, rows)), title=heading, xlabel=xlabel)
    if len(rows) == 1:  # too low for the whole label
        figure.supylabel("rotation (cosine distance)", fontsize=10)
    return figure


STUDIES = (
    Study("rotation/fig6", "Figure 6: adaptive methods without and with Layca", _compared, figure6),
    Study("rotation/table6", "Table 6: training accuracies of figure 6", _both, table6),
    Study("rotation/fig7", "Figure 7: training curves of SGD that copies adaptive methods", copy_trials, figure7),
    Study("speed/fig5", "Figure 5: adaptive methods' rotation and test accuracy", _alone, figure5_of_speed),
    Study("speed/fig6", "Figure 6: adaptive methods and what they are without adapting, under Layca",
          equivalent_trials, figure6_of_speed),
    Study("speed/table4", "Table 4: training accuracies of figure 5", _methods, table4_of_speed),
)  # fmt: skip
