"""Training curves of adaptive methods beside those of what does not adapt, but turns its layers alike.

Figure 7 of the rotation paper: SGD under Layca that copies an adaptive method's rotation, step by step and layer by
layer. Figure 6 of the paper on speed: both under Layca at the same rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.cells import Cell, title
from gyroscope_lab.papers.rotation.adaptive_columns import Column, Pair, cells_of, columns, trials_of
from gyroscope_lab.papers.study import Report, Table, Verdict
from gyroscope_lab.training.trial import Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curve = npt.NDArray[np.float64]

# Of the digits as many again are held out as are trained on: a tenth of 200 would tell nothing.
_PER_CLASS, _HELD_OUT = 40, 0.5
# In points of accuracy, on average over epochs: what the eye takes for one curve, where curves are smooth.
_SAME = 3.0


def copied(column: Column) -> list[Pair]:
    """What figure 7 (arXiv) trains for a column.

    >>> from gyroscope_lab.training.archive import Archive
    >>> [recipe.name for _, recipe in copied(columns(Lab(Archive("runs")))[0])]
    ['RMSprop', 'SGD + L2', 'SGD-Layca-AdaptCopy']
    """
    return [column.method, column.decayed, column.copied]


def copy_trials(lab: Lab) -> list[Trial]:
    """The trials of figure 7 (arXiv).

    >>> from gyroscope_lab.training.archive import Archive
    >>> len(copy_trials(Lab(Archive("runs"), "full")))
    15
    """
    return trials_of(lab, [pair for column in columns(lab) for pair in copied(column)])


def equivalents(lab: Lab, column: Column) -> list[Pair]:
    """What figure 6 (ICLR) trains for a column; of the digits some are held out, for a second curve.

    >>> from gyroscope_lab.training.archive import Archive
    >>> lab = Lab(Archive("runs"))
    >>> [recipe.name for _, recipe in equivalents(lab, columns(lab)[1])]
    ['Adam-Layca 3^-5', 'SGD_AMom-Layca 3^-5']
    """
    task = column.task
    if lab.scale != "full":
        source = replace(task.source, per_class=_PER_CLASS, validation=_HELD_OUT)
        task = replace(task, name=f"{task.name}-held-out", source=source)
    return [(task, column.controlled[1]), (task, column.plain[1])]


def equivalent_trials(lab: Lab) -> list[Trial]:
    """The trials of figure 6 (ICLR).

    >>> from gyroscope_lab.training.archive import Archive
    >>> len(equivalent_trials(Lab(Archive("runs"), "full")))
    10
    """
    return trials_of(lab, [pair for column in columns(lab) for pair in equivalents(lab, column)])


def curve(cell: Cell, which: Literal["accuracy", "validation"] = "accuracy") -> Curve:
    """Accuracy in percent, epoch by epoch: the mean over seeds, as far as all of them went.

    >>> from gyroscope_lab.training.recipe import Recipe
    >>> from gyroscope_lab.training.result import Result
    >>> from gyroscope_lab.training.tasks import task
    >>> result = Result(1.0, 0.9, loss=[1.0], layers=["a"], rotation=[[0.0]], accuracy=[0.5, 1.0])
    >>> curve(Cell(task("digits"), Recipe("SGD", 0.1), (result,))).tolist()
    [50.0, 100.0]
    """
    its: list[list[float]] = [getattr(result, which) for result in cell.results]
    epochs = min(map(len, its))
    return np.asarray(100 * np.mean([one[:epochs] for one in its], axis=0))


def distance(first: Curve, second: Curve) -> float:
    """(1/T) Σ_t |a_t − b_t| of two curves, over the T epochs that both have.

    >>> distance(np.array([50.0, 90.0, 99.0]), np.array([60.0, 90.0]))
    5.0
    """
    epochs = min(len(first), len(second))
    return float(np.abs(first[:epochs] - second[:epochs]).mean())


def lead(first: Curve, second: Curve) -> float:
    """(1/T) Σ_t (a_t − b_t): by how much the first curve is ahead.

    >>> lead(np.array([60.0, 90.0]), np.array([50.0, 90.0]))
    5.0
    """
    epochs = min(len(first), len(second))
    return float((first[:epochs] - second[:epochs]).mean())


def shake(curve: Curve) -> float:
    """(Σ_t |a_{t+1} − a_t| − |a_T − a_1|) / (T − 1): how far a curve goes back and forth in an epoch, in points.

    0 of a curve that only climbs. Two draws of one curve are about as far apart as each shakes.

    >>> shake(np.array([50.0, 60.0, 90.0])), shake(np.array([50.0, 60.0, 50.0]))
    (0.0, 10.0)
    """
    if len(curve) < 2:
        return 0.0
    return float((np.abs(np.diff(curve)).sum() - abs(curve[-1] - curve[0])) / (len(curve) - 1))


def alike(first: Curve, second: Curve) -> bool:
    """Whether two curves can be taken for one: not further apart than 3 points, or than they shake.

    >>> alike(np.array([50.0, 90.0]), np.array([54.0, 91.0])), alike(np.array([50.0, 90.0]), np.array([59.0, 91.0]))
    (True, False)
    """
    return distance(first, second) <= max(_SAME, shake(first), shake(second))


def figure7(lab: Lab) -> Report:
    """Training curves of adaptive methods, SGD with weight decay, and SGD that copies the former's rotation."""
    its = columns(lab)
    found = cells_of(lab, [pair for column in its for pair in copied(column)])
    lines, verdicts, numbers = [], [], []
    for column in its:
        method, decayed, copy = (found[pair] for pair in copied(column))
        a, b, c = curve(method), curve(decayed), curve(copy)
        faster, near, far = lead(a, b), distance(a, c), distance(a, b)
        lines.append((column.name, method.test, copy.test, decayed.test, faster, near, far))
        verdicts += [
            Verdict(
                f"{column.name} trains faster than SGD + L2",
                "significantly",
                f"{faster:+.1f} points of training accuracy, on average over epochs",
                faster > 0,
            ),
            Verdict(
                f"{column.name}: the curve of SGD-Layca-AdaptCopy is nearly the same",
                "nearly indistinguishable",
                f"{near:.1f} points apart on average; SGD + L2 is {far:.1f}",
                alike(a, c) and near < far,
            ),
        ]
        numbers.append(_numbers(column, (method, decayed, copy)))
    names = ("column", "test %", "AdaptCopy", "SGD + L2", "ahead of SGD + L2", "from AdaptCopy", "from SGD + L2")
    figure = _draw(
        [(column.name, [found[pair] for pair in copied(column)]) for column in its],
        rows=("accuracy",),
        heading="Training curves: an adaptive method, and SGD that turns its layers alike",
    )
    return Report(
        {"figure": figure},
        (Table("Training curves (distances in points, on average over epochs; the paper prints none)", names,
               tuple(lines)),),
        tuple(verdicts),
        {"columns": numbers, "same": _SAME},
    )  # fmt: skip


def figure6_of_speed(lab: Lab) -> Report:
    """Training and validation curves of adaptive methods and of their equivalents, all under Layca."""
    its = columns(lab)
    found = cells_of(lab, [pair for column in its for pair in equivalents(lab, column)])
    lines, verdicts, numbers = [], [], []
    for column in its:
        method, plain = (found[pair] for pair in equivalents(lab, column))
        whole = curve(method), curve(plain)
        tested = curve(method, "validation"), curve(plain, "validation")
        train, held_out = distance(*whole), distance(*tested)
        both = method.recipe.name, plain.recipe.name
        lines.append((column.task.name, *both, train, held_out, method.test, plain.test))
        verdicts.append(
            Verdict(
                f"{column.task.name}: {' and '.join(both)} have the same curves",
                "indistinguishable",
                f"training {train:.1f}, validation {held_out:.1f} points apart on average; "
                f"they shake by {max(map(shake, whole)):.1f} and {max(map(shake, tested)):.1f}",
                alike(*whole) and alike(*tested),
            )
        )
        numbers.append(_numbers(column, (method, plain)))
    names = ("task", "adaptive", "equivalent", "training", "validation", "test % adaptive", "test % equivalent")
    figure = _draw(
        [(column.name, [found[pair] for pair in equivalents(lab, column)]) for column in its],
        rows=("accuracy", "validation"),
        heading="Adaptive methods and their equivalents under Layca",
    )
    return Report(
        {"figure": figure},
        (Table("Curves (distances in points, on average over epochs; the paper prints none)", names, tuple(lines)),),
        tuple(verdicts),
        {"columns": numbers, "same": _SAME},
    )


def _numbers(column: Column, its: Sequence[Cell]) -> dict[str, Any]:
    curves = {
        cell.recipe.name: {
            "accuracy": [round(float(value), 3) for value in curve(cell)],
            "validation": [round(float(value), 3) for value in curve(cell, "validation")],
        }
        for cell in its
    }
    return {"column": column.name, "curves": curves, "cells": [cell.numbers() for cell in its]}


_LABELS = {"accuracy": "training accuracy (%)", "validation": "validation accuracy (%)"}
_STYLES = (("C0", "-", 1.6), ("C1", "-", 1.6), ("C2", "--", 1.6))


def _draw(
    its: Sequence[tuple[str, Sequence[Cell]]], *, rows: Sequence[Literal["accuracy", "validation"]], heading: str
) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.0 + 2.7 * len(its), 0.9 + 2.3 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), len(its), squeeze=False, sharey="row", sharex="col")
    for place, (name, cells) in enumerate(its):
        for row, which in enumerate(rows):
            _lines(axes[row, place], cells, which)
            if place == 0:
                axes[row, place].set_ylabel(_LABELS[which], fontsize=9)
        axes[0, place].set_title(name, fontsize=9)
        axes[-1, place].set_xlabel("epoch", fontsize=9)
        axes[0, place].legend(fontsize=7, loc="lower right")
    figure.suptitle(heading, fontsize=11)
    return figure


def _lines(ax: Axes, cells: Sequence[Cell], which: Literal["accuracy", "validation"]) -> None:
    styles = _STYLES if len(cells) == len(_STYLES) else (_STYLES[0], _STYLES[2])
    for cell, (colour, style, width) in zip(cells, styles, strict=True):
        its = curve(cell, which)
        ax.plot(range(1, len(its) + 1), its, color=colour, linestyle=style, linewidth=width, label=title(cell.recipe))
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=8)
