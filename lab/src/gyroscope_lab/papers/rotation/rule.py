"""The rule of thumb as a number: the larger the layer rotations, the better the generalization (rotation paper, 4.2).

The paper states its rule in words, over figures of a few configurations each. Here all configurations that it trains on
a task are ordered by the final rotation of their layers, and by test accuracy; Kendall's τ and Spearman's ρ measure how
well the two orders agree. The rule is about networks that learned their training set, so only those count: with a
training accuracy of 99 % or more, and, to see the effect of this threshold, of 90 % or more, and of any. Rotation is
the mean over layers, and that of the least rotated layer.

A p-value is the probability that two unrelated orders agree as well. Configurations were chosen, not drawn, so it tells
order from chance and no more than that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from typing import TYPE_CHECKING, Any

import numpy as np

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.cells import LEARNED, Cell, cells
from gyroscope_lab.papers.rotation import paper
from gyroscope_lab.papers.rotation.alpha_and_rate import COLUMNS, SWEPT, recipes_of_sweep
from gyroscope_lab.papers.rotation.recipes import adaptive, adaptive_layca, lars, over_seeds, sgd, sgd_decayed
from gyroscope_lab.papers.rotation.sgd_rates import POWERS as SGD_POWERS
from gyroscope_lab.papers.study import Report, Study, Table, Verdict, on_task
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.task import Task
from gyroscope_lab.training.trial import Trial

if TYPE_CHECKING:
    from matplotlib.figure import Figure


#: The kinds of configurations.
KINDS = ("Layca, ρ(0)", "Layca, α", "LARS", "SGD", "SGD + L2", "adaptive", "adaptive + Layca")
#: A network has fit its training set from this training accuracy on, in percent.
FITS = 99.0
#: The thresholds under which correlations are computed, by name; verdicts are about the first.
THRESHOLDS = {
    f"train ≥ {FITS:g} %": FITS,
    f"train ≥ {100 * LEARNED:g} %": 100 * LEARNED,
    "all that did not diverge": 0.0,
}
#: An order is told from chance below this p-value, and with this many configurations or more.
P, FEWEST = 0.05, 5
#: The markers of the kinds of configurations in the figure.
MARKS = dict(zip(KINDS, "oDPsX^v", strict=True))
# A layer counts as at a cosine distance of 1 from here; "nearly all" layers are this share.
_ONE, _NEARLY_ALL = 0.9, 0.75
# The least rotation that is drawn.
_NONE = 1e-7


@dataclass(frozen=True)
class Configuration:
    """A recipe on a task, and its kind."""

    kind: str
    task: Task
    recipe: Recipe

    @property
    def told(self) -> float | None:
        """The paper's test accuracy."""
        return paper.told(self.task.name, self.recipe.name)


def configurations(lab: Lab, task: Task) -> list[Configuration]:
    """Return all configurations of a task; a smoke test takes some of them.

    >>> from gyroscope_lab.training.archive import Archive
    >>> from gyroscope_lab.training.tasks import task
    >>> len(configurations(Lab(Archive("runs"), "full"), task("c10-cnn1")))
    29
    """
    name, known = task.name, task.name in paper.TASKS
    swept = [*recipes_of_sweep(lab), *COLUMNS] if name in SWEPT or not known else list(COLUMNS)
    found = [
        Configuration("Layca, α" if recipe.alpha else "Layca, ρ(0)", task, recipe) for recipe in dict.fromkeys(swept)
    ]
    for power in (-4, -1, 0) if lab.scale == "smoke" else SGD_POWERS:
        found.append(Configuration("SGD", task, sgd(task, power)))
    found.append(Configuration("SGD + L2", *sgd_decayed(task)))
    found.append(Configuration("adaptive", *adaptive(task)))
    found.append(Configuration("adaptive + Layca", task, adaptive_layca(task)))
    if name in paper.LARS or not known:
        found.append(Configuration("LARS", task, lars()))
    return found


@dataclass(frozen=True)
class Correlation:
    """The agreement of two orders of `count` things, and the p-values of unrelated ones.

    >>> round(correlation([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 4.0, 3.0]).kendall, 3)
    0.667
    """

    count: int
    kendall: float = nan
    kendall_p: float = nan
    spearman: float = nan
    spearman_p: float = nan


def correlation(x: Sequence[float], y: Sequence[float]) -> Correlation:
    """Return Kendall's τ (b, which allows for ties) and Spearman's ρ; nan for fewer than three, or a constant side."""
    from scipy.stats import kendalltau, spearmanr  # takes a while to load

    if len(x) < 3 or min(len(set(x)), len(set(y))) < 2:
        return Correlation(len(x))
    tau, rho = kendalltau(x, y), spearmanr(x, y)
    return Correlation(len(x), *map(float, (tau.statistic, tau.pvalue, rho.statistic, rho.pvalue)))


def trials(lab: Lab) -> list[Trial]:
    """Return the trials of every configuration of every task.

    >>> from gyroscope_lab.training.archive import Archive
    >>> len(trials(Lab(Archive("runs"), "full")))
    113
    """
    return [
        trial
        for task in lab.tasks(paper.TASKS)
        for one in configurations(lab, task)
        for trial in over_seeds(one.task, [one.recipe], lab.seeds)
    ]


Row = list[tuple[Configuration, Cell]]


def conclude(lab: Lab) -> Report:
    """Report rank correlations task by task, with every configuration and whether it counted."""
    known = {(cell.task, cell.recipe): cell for cell in cells(lab, trials(lab))}
    rows: dict[str, Row] = {
        task.name: [
            (one, known[one.task, one.recipe])
            for one in configurations(lab, task)
            if not lab.known or (one.task, one.recipe) in known
        ]
        for task in lab.tasks(paper.TASKS)
    }
    found = {name: correlations(row) for name, row in rows.items()}
    verdicts = [
        verdict for name, row in rows.items() for verdict in on_task(name, _verdicts(lab, name, row, found[name]))
    ]
    if len(found) > 1:
        verdicts.append(_everywhere(lab, found))
    return Report(
        {"figure": _draw(rows, found)},
        (_summary(found), *(_table(name, row) for name, row in rows.items())),
        tuple(verdicts),
        {
            "fits from": FITS,
            "learned from": 100 * LEARNED,
            "correlations": {name: _as_numbers(its) for name, its in found.items()},
            "cells": [
                {"kind": one.kind, "counted": counts(cell, FITS), **cell.numbers()}
                for row in rows.values()
                for one, cell in row
            ],
        },
    )


def counts(cell: Cell, threshold: float) -> bool:
    """Return whether a configuration counts: it reached the training accuracy, and its rotations are finite.

    >>> from gyroscope_lab.training.recipe import Recipe
    >>> from gyroscope_lab.training.result import Result
    >>> from gyroscope_lab.training.tasks import task
    >>> result = Result(0.95, 0.9, loss=[0.1], layers=["a"], rotation=[[0.0], [0.2]])
    >>> cell = Cell(task("digits"), Recipe("SGD", 0.1), (result,))
    >>> counts(cell, 90.0), counts(cell, 99.0)
    (True, False)
    """
    return cell.train >= threshold and isfinite(cell.mean_rotation)


#: By threshold, and by rotation: the "mean" over layers or that of the "least" rotated.
Correlations = dict[tuple[str, str], Correlation]


def correlations(row: Row) -> Correlations:
    """Return the correlations of rotation and test accuracy under every threshold."""
    found = {}
    for words, threshold in THRESHOLDS.items():
        counted = [cell for _, cell in row if counts(cell, threshold)]
        tests = [cell.test for cell in counted]
        found[words, "mean"] = correlation([cell.mean_rotation for cell in counted], tests)
        found[words, "least"] = correlation([least(cell) for cell in counted], tests)
    return found


def least(cell: Cell) -> float:
    """Return the final rotation of the least rotated layer.

    >>> from gyroscope_lab.training.recipe import Recipe
    >>> from gyroscope_lab.training.result import Result
    >>> from gyroscope_lab.training.tasks import task
    >>> result = Result(1.0, 0.9, loss=[0.1], layers=["a", "b"], rotation=[[0.0, 0.0], [0.4, 0.2]])
    >>> least(Cell(task("digits"), Recipe("SGD", 0.1), (result,)))
    0.2
    """
    return float(np.min(cell.final_rotation))


def _as_numbers(found: Correlations) -> list[dict[str, Any]]:
    return [{"configurations": words, "rotation": which, **vars(one)} for (words, which), one in found.items()]


def _summary(found: Mapping[str, Correlations]) -> Table:
    lines = [
        (name, words, which, one.count, one.kendall, f"{one.kendall_p:.1g}", one.spearman, f"{one.spearman_p:.1g}")
        for name, its in found.items()
        for (words, which), one in its.items()
    ]
    heads = ("task", "configurations", "rotation", "number", "Kendall's τ", "p", "Spearman's ρ", "p")
    return Table("Rotation and test accuracy: rank correlations", heads, tuple(lines))


def _table(name: str, row: Row) -> Table:
    lines = [
        (
            one.recipe.name,
            one.kind,
            cell.mean_rotation,
            least(cell),
            cell.test_told,
            one.told,
            cell.train,
            "yes" if counts(cell, FITS) else "no",
            "yes" if counts(cell, 100 * LEARNED) else "no",
        )
        for one, cell in sorted(row, key=lambda pair: -pair[1].test)
    ]
    heads = (
        "configuration",
        "kind",
        "mean rotation",
        "least",
        "test % here",
        "paper",
        "train %",
        *list(THRESHOLDS)[:2],
    )
    return Table(f"{name}: every configuration, the best first", heads, tuple(lines))


def _verdicts(lab: Lab, name: str, row: Row, found: Correlations) -> list[Verdict]:
    main = next(iter(THRESHOLDS))
    words = {"mean": "the mean over layers", "least": "the least rotated layer"}
    verdicts = [
        Verdict(
            f"{name}: the larger the layer rotations, the better the generalization ({words[which]}, {main})",
            "in words",
            _said(found[main, which], len(row)),
            _holds(found[main, which], whole=_is_whole(lab)),
        )
        for which in words
    ]
    counted = [cell for _, cell in row if counts(cell, FITS)]
    if counted:
        best = max(counted, key=lambda cell: cell.test)
        far = int(np.sum(best.final_rotation >= _ONE))
        many = len(best.final_rotation)
        verdicts.append(
            Verdict(
                f"{name}: with the best configuration nearly all layers reach a cosine distance of 1",
                "in all five tasks",
                f"{best.recipe.name}: {far} of {many} layers at {_ONE:g} or more, {best.mean_rotation:.2f} on average",
                far >= _NEARLY_ALL * many if lab.scale == "full" else None,
            )
        )
    return verdicts


def _everywhere(lab: Lab, found: Mapping[str, Correlations]) -> Verdict:
    main = next(iter(THRESHOLDS))
    values = {name: its[main, "mean"] for name, its in found.items()}
    held = [_holds(one, whole=_is_whole(lab)) for one in values.values()]
    return Verdict(
        "the rule applies across the tasks",
        "all five",
        ", ".join(f"{name}: {_tau(one)}" for name, one in values.items()),
        None if any(one is None for one in held) else all(held),
    )


def _tau(one: Correlation) -> str:
    return f"τ = {one.kendall:+.2f}" if isfinite(one.kendall) else "too few count"


def _said(one: Correlation, of: int) -> str:
    if not isfinite(one.kendall):
        return f"{one.count} of {of} count, too few to order"
    kendall = f"Kendall's τ = {one.kendall:+.2f} (p = {one.kendall_p:.1g})"
    return f"{kendall}, Spearman's ρ = {one.spearman:+.2f} (p = {one.spearman_p:.1g}), {one.count} of {of} count"


def _is_whole(lab: Lab) -> bool:
    return lab.scale == "full" and not lab.known


def _holds(one: Correlation, *, whole: bool) -> bool | None:
    """True if larger goes with better, False if the orders agree no better than by chance.

    None where there are few configurations, or not all of the paper's (`whole`).
    """
    if one.count < FEWEST or (not whole and not one.kendall_p < P):
        return None
    return one.kendall > 0 and one.kendall_p < P


def _draw(rows: Mapping[str, Row], found: Mapping[str, Correlations]) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    main = next(iter(THRESHOLDS))
    panels = {"mean": "final rotation, mean over layers", "least": "final rotation, least rotated layer"}
    figure = Figure(figsize=(3.4 * len(rows) + 1.6, 6.0), layout="constrained")
    axes = figure.subplots(2, len(rows), squeeze=False, sharey="col")
    for column, (name, row) in zip(axes.T, rows.items(), strict=True):
        for ax, (which, label) in zip(column, panels.items(), strict=True):
            for one, cell in row:
                place = cell.mean_rotation if which == "mean" else least(cell)
                color = f"C{KINDS.index(one.kind)}"
                face = color if counts(cell, FITS) else "none"
                # Rounding may leave a layer that did not turn a little on either side of 0.
                ax.plot(max(place, _NONE), cell.test, MARKS[one.kind], color=color, markerfacecolor=face, markersize=6)
            its = found[name][main, which]
            numbers = f"Kendall's τ {its.kendall:+.2f}, Spearman's ρ {its.spearman:+.2f}"
            ax.set_title(f"{name}, {its.count} of {len(row)} count\n{numbers}", fontsize=9)
            if name in paper.TASKS:
                ax.set_xlim(-0.03, max(1.06, ax.get_xlim()[1]))
            else:  # a stand-in is trained briefly, and its layers rotate little
                ax.set_xscale("log")
            ax.set_xlabel(label, fontsize=9)
    for ax in axes[:, 0]:
        ax.set_ylabel("test accuracy (%)", fontsize=9)
    handles = [
        Line2D([], [], linestyle="", marker=mark, color=f"C{place}", label=kind)
        for place, (kind, mark) in enumerate(MARKS.items())
    ]
    handles.append(
        Line2D([], [], linestyle="", marker="o", color="0.4", markerfacecolor="none", label=f"open: train < {FITS:g} %")
    )
    figure.legend(handles=handles, loc="outside right center", fontsize=8)
    return figure


STUDIES = (
    Study(
        "rotation/rule",
        "The rule of thumb as a number: rank correlation of final rotation and test accuracy over all configurations",
        trials,
        conclude,
    ),
)
