"""Adaptive gradient methods and layer rotation (section 5.4 of the rotation paper, 5.2 of the paper on speed).

RMSprop, Adam and Adagrad train fast and generalize worse than SGD with weight decay. The papers explain both by the
rotation rate that they give to each layer. Under Layca, which sets these rates, they generalize as well as SGD does.
SGD that turns its layers as far, step by step, as an adaptive method did (AdaptCopy) trains as fast as that method.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.cells import Cell, cells
from gyroscope_lab.papers.chance import all_hold
from gyroscope_lab.papers.rotation import paper
from gyroscope_lab.papers.rotation.best_layca import in_training
from gyroscope_lab.papers.rotation.panels import title
from gyroscope_lab.papers.rotation.recipes import (
    adapt_copy,
    adaptive,
    adaptive_layca,
    layca,
    over_seeds,
    sgd,
    sgd_decayed,
)
from gyroscope_lab.papers.study import Report, Study, Table, Verdict, on_task
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.task import Task
from gyroscope_lab.training.trial import Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: A recipe on a task, whose schedule may be the recipe's own.
Pair = tuple[Task, Recipe]
# A task that stands in for five shows all their methods, at the rates that the papers tuned.
_STAND_INS = {"rmsprop": ("RMSprop", -6), "adam": ("Adam", -5), "adagrad": ("Adagrad", -4)}
# Plain SGD is best at 3^-1, except on this task.
_SGD_POWERS = {"c100-wrn": -2}
#: Table 6 (arXiv): training accuracies of the adaptive methods, without and with Layca.
TABLE6: dict[str, tuple[float, float]] = dict(
    zip(paper.TASKS, ((100.0, 100.0), (100.0, 99.7), (100.0, 99.2), (100.0, 100.0), (99.9, 100.0)), strict=True)
)
#: Table 4 (ICLR): training accuracies of the adaptive methods.
TABLE4: dict[str, float] = dict(zip(paper.TASKS, (100.0, 99.98, 99.97, 98.72, 99.92), strict=True))
#: Figure 5 (ICLR): differences Δη as in figure 6 (arXiv), except for C10-CNN2, which had dropout, and 92.33 % at best.
FIGURE5: dict[str, float] = paper.ADAPTIVE | {"c10-cnn2": -1.14}
REFERENCE5: dict[str, float] = paper.REFERENCE | {"c10-cnn2": 92.33}
# In points: the difference between two trainings of one recipe, and the most that the paper's "on par" spans.
_PAR = 2.0
Curve = npt.NDArray[np.float64]
Which = Literal["accuracy", "validation", "test_accuracies"]
# As many digits are held out as are trained on: a tenth of 200 would say nothing.
_PER_CLASS, _HELD_OUT = 40, 0.5
# Points of accuracy, on average over epochs, within which smooth curves look like one.
_SAME = 3.0


_LABELS = {
    "accuracy": "training accuracy (%)",
    "validation": "validation accuracy (%)",
    "test_accuracies": "test accuracy (%)",
}
_STYLES = (("C0", "-", 1.6), ("C1", "-", 1.6), ("C2", "--", 1.6))


@dataclass(frozen=True)
class Column:
    """A task and all its recipes.

    Attributes:
        method: the adaptive method.
        controlled: the same under Layca.
        plain: the same without adaptation, under Layca: SGD, or for Adam SGD with its momentum.
        copied: the same as `plain`, with each layer turned as far as under the adaptive method.
        best: Layca's best configuration, which differences Δη refer to.
        decayed: SGD with weight decay.
        sgd: SGD alone, at its best rate.
    """

    task: Task
    method: Pair
    controlled: Pair
    plain: Pair
    copied: Pair
    best: Pair
    decayed: Pair
    sgd: Pair

    @property
    def name(self) -> str:
        """The task and the method."""
        return f"{self.task.name}: {self.method[1].name}"


def columns(lab: Lab) -> list[Column]:
    """Return the columns at the laboratory's scale: one per task in the papers, one per method for a stand-in.

    >>> from gyroscope_lab.training.archive import Archive
    >>> [column.name for column in columns(Lab(Archive("runs"), "full"))][:2]
    ['c10-cnn1: RMSprop', 'c100-resnet: Adam']
    >>> [column.name for column in columns(Lab(Archive("runs")))]
    ['digits: RMSprop', 'digits: Adam']
    """
    found = [column(task) for task in lab.tasks(paper.TASKS)]
    if lab.scale == "full":
        return found
    kinds = list(_STAND_INS)[:2] if lab.scale == "smoke" else list(_STAND_INS)
    return [standing_in(one, kind) for one in found for kind in kinds]


def speed_columns(lab: Lab) -> list[Column]:
    """Return the columns of the speed paper, whose C10-CNN2 kept the dropout of the original.

    >>> from gyroscope_lab.training.archive import Archive
    >>> [dict(column.method[0].options) for column in speed_columns(Lab(Archive("runs"), "full"))][3]
    {'dropout': True}
    """
    return [_dropping_out(one) if one.task.name == "c10-cnn2" else one for one in columns(lab)]


def _dropping_out(column: Column) -> Column:
    def with_dropout(pair: Pair) -> Pair:
        task, recipe = pair
        return replace(task, options=(*task.options, ("dropout", True))), recipe

    names = ("method", "controlled", "plain", "best", "sgd")
    return replace(
        column,
        task=with_dropout((column.task, column.best[1]))[0],
        **{name: with_dropout(getattr(column, name)) for name in names},
    )


def column(task: Task) -> Column:
    """Return the column of a task, with the papers' method.

    >>> from gyroscope_lab.training.tasks import task
    >>> column(task("c100-resnet")).plain[1].name, column(task("tiny-cnn")).plain[1].name
    ('SGD_AMom-Layca 3^-5', 'SGD-Layca 3^-3')
    """
    _, recipe = method = adaptive(task)
    return Column(
        task,
        method=method,
        controlled=(task, adaptive_layca(task)),
        plain=(task, plain(recipe.optimizer)),
        copied=adapt_copy(task),
        best=(task, layca(-3)),
        decayed=sgd_decayed(task),
        sgd=(task, sgd(task, _SGD_POWERS.get(task.name, -1))),
    )


def plain(kind: str) -> Recipe:
    """Return an adaptive method without adaptation, under Layca: Adam keeps its momentum, and so has a lower rate.

    >>> plain("rmsprop").name, plain("adam").optimizer
    ('SGD-Layca 3^-3', 'sgd-amom')
    """
    if kind != "adam":
        return replace(layca(-3), name="SGD-Layca 3^-3")
    return Recipe("SGD_AMom-Layca 3^-5", rate=3.0**-5, optimizer="sgd-amom", control="layca")


def standing_in(column: Column, kind: str) -> Column:
    """Return the same column with another adaptive method.

    >>> from gyroscope_lab.training.tasks import task
    >>> digits = column(task("digits"))
    >>> standing_in(digits, "rmsprop") == digits, standing_in(digits, "adam").copied[1].optimizer
    (True, 'sgd-amom')
    """
    name, power = _STAND_INS[kind]
    (its, method), (_, controlled), (_, copied) = column.method, column.controlled, column.copied
    method = replace(method, name=name, rate=3.0**power, optimizer=kind)
    slow = -5 if kind == "adam" else -3
    controlled = replace(controlled, name=f"{name}-Layca 3^{slow}", rate=3.0**slow, optimizer=kind)
    copied = replace(copied, optimizer="sgd-amom" if kind == "adam" else "sgd", copies=method)
    return replace(
        column,
        method=(its, method),
        controlled=(column.task, controlled),
        plain=(column.task, plain(kind)),
        copied=(its, copied),
    )


def trials_of(lab: Lab, pairs: Iterable[Pair]) -> list[Trial]:
    """Return the trials of every recipe, each once, from every seed of the laboratory.

    >>> from gyroscope_lab.training.archive import Archive
    >>> lab = Lab(Archive("runs"))
    >>> [trial.recipe.name for trial in trials_of(lab, [one.method for one in columns(lab)])]
    ['RMSprop', 'Adam']
    """
    return [trial for task, recipe in dict.fromkeys(pairs) for trial in over_seeds(task, [recipe], lab.seeds)]


def cells_of(lab: Lab, pairs: Sequence[Pair]) -> dict[Pair, Cell]:
    """Return the results of each recipe."""
    return {(cell.task, cell.recipe): cell for cell in cells(lab, trials_of(lab, pairs))}


def compared(column: Column) -> list[Pair]:
    """Return the recipes of a column of figure 6 (arXiv): with and without Layca, and those to compare with.

    >>> from gyroscope_lab.training.archive import Archive
    >>> [recipe.name for _, recipe in compared(columns(Lab(Archive("runs")))[0])]
    ['RMSprop', 'RMSprop-Layca 3^-3', 'Layca 3^-3', 'SGD + L2', 'SGD 3^-1']
    """
    return [column.method, column.controlled, column.best, column.decayed, column.sgd]


def alone(column: Column) -> list[Pair]:
    """Return the recipes of a column of figure 5 (ICLR).

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
    """Report rotation curves and test accuracies of adaptive methods, without Layca and with it."""
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
        method, controlled, best, decayed, _ = (found[pair] for pair in compared(column))
        own = [*_worse(column, method, best, paper.ADAPTIVE), _par(column, method, controlled, decayed)]
        verdicts += on_task(column.task.name, own)
    verdicts.append(_last([(column, found[column.method], found[column.sgd]) for column in its]))
    figure = _panels(rows, found, "Adaptive methods, without Layca (above) and with it (below)")
    return Report(
        {"figure": figure},
        (_table("Test accuracy", lines),),
        tuple(verdicts),
        {"cells": [cell.numbers() for cell in found.values()]},
    )


def figure5_of_speed(lab: Lab) -> Report:
    """Report rotation curves and test accuracies of adaptive methods."""
    its = speed_columns(lab)
    found = cells_of(lab, [pair for column in its for pair in alone(column)])
    told = {name: REFERENCE5[name] + difference for name, difference in FIGURE5.items()}
    lines = [_line(column, found[column.method], told.get(column.task.name)) for column in its]
    verdicts = []
    for column in its:
        method, best, _ = (found[pair] for pair in alone(column))
        verdicts += on_task(column.task.name, _worse(column, method, best, FIGURE5))
    verdicts.append(_last([(column, found[column.method], found[column.sgd]) for column in its]))
    figure = _panels([[(column, found[column.method]) for column in its]], found, "Adaptive methods")
    return Report(
        {"figure": figure},
        (_table("Test accuracy", lines),),
        tuple(verdicts),
        {"cells": [cell.numbers() for cell in found.values()]},
    )


def table6(lab: Lab) -> Report:
    """Report training accuracies of adaptive methods, without Layca and with it."""
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
    """Report training accuracies of adaptive methods."""
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
    """Return (late − early) / (late + early) of the mean rotations of the two halves of the layers; −1 to 1.

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
    return (column.task.name, cell.recipe.name, cell.test_told, told, difference, cell.train, cell.mean_rotation,
            cell.unevenness, tilt(cell))  # fmt: skip


def _table(name: str, lines: list[tuple[object, ...]]) -> Table:
    columns = ("task", "method", "test % here", "paper", "difference", "train %", "mean rotation", "unevenness", "tilt")
    return Table(name, columns, tuple(dict.fromkeys(lines)))


def _worse(column: Column, method: Cell, best: Cell, differences: dict[str, float]) -> list[Verdict]:
    told = differences.get(column.task.name)
    return [
        Verdict(
            f"{column.name} generalizes worse than Layca at its best",
            "by 1.3 to 13.2 points" if told is None else f"{told:+.2f} points",
            f"{method.ahead_of(best).told} points",
            best.ahead_of(method).above,
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


def _last(pairs: Sequence[tuple[Column, Cell, Cell]]) -> Verdict:
    """The verdict on a tendency over all tasks, from the adaptive method and SGD of each."""
    more = sum(tilt(method) > tilt(sgd) for _, method, sgd in pairs)
    return Verdict(
        "adaptive methods tend to turn the last layers more than SGD does",
        f"adaptive methods seem to favor the last layers, SGD usually the first; tilt within epochs 1 and 50 in the "
        f"authors' records of SGD: {_recorded_tilts()}",
        "tilt " + ", ".join(f"{tilt(method):+.2f} against {tilt(sgd):+.2f} ({one.name})" for one, method, sgd in pairs),
        2 * more > len(pairs),
    )


def _recorded_tilts() -> str:
    """The tilts of the authors' own records: SGD does not favor the first layers of C100-resnet there either."""
    return ", ".join(
        f"{first:+.2f}" + ("" if later is None else f" and {later:+.2f}") + f" ({task})"
        for task, (first, later) in paper.SGD_TILT.items()
    )


def _par(column: Column, method: Cell, controlled: Cell, decayed: Cell) -> Verdict:
    task = column.task.name
    told = [one.get(task) for one in (paper.ADAPTIVE_LAYCA, paper.WEIGHT_DECAY, paper.ADAPTIVE)]
    says = "within 2.0 points, in all five tasks"
    if told[0] is not None and told[1] is not None and told[2] is not None:
        says = f"{told[0] - told[1]:+.2f} points to SGD + L2, {told[0] - told[2]:+.2f} to without"
    to_decayed, to_method = controlled.ahead_of(decayed), controlled.ahead_of(method)
    return Verdict(
        f"{column.name} under Layca generalizes on par with SGD + L2, and better than without",
        says,
        f"{to_decayed.told} points to SGD + L2, {to_method.told} to without",
        all_hold([to_decayed.exceeds(-_PAR), to_method.above]),
    )


def _panels(rows: list[list[tuple[Column, Cell]]], found: dict[Pair, Cell], heading: str) -> Figure:
    """Rotation curves over epochs, or over the share of a training where trainings differ in length."""
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


def copied(column: Column) -> list[Pair]:
    """Return the recipes of a column of figure 7 (arXiv).

    >>> from gyroscope_lab.training.archive import Archive
    >>> [recipe.name for _, recipe in copied(columns(Lab(Archive("runs")))[0])]
    ['RMSprop', 'SGD + L2', 'SGD-Layca-AdaptCopy']
    """
    return [column.method, column.decayed, column.copied]


def copy_trials(lab: Lab) -> list[Trial]:
    """Return the trials of figure 7 (arXiv).

    >>> from gyroscope_lab.training.archive import Archive
    >>> len(copy_trials(Lab(Archive("runs"), "full")))
    15
    """
    return trials_of(lab, [pair for column in columns(lab) for pair in copied(column)])


def equivalents(lab: Lab, column: Column) -> list[Pair]:
    """Return the recipes of a column of figure 6 (ICLR), whose trainings measure the test accuracy after every epoch.

    As of the papers' tasks, some of the digits are held out.

    >>> from gyroscope_lab.training.archive import Archive
    >>> lab = Lab(Archive("runs"))
    >>> [recipe.name for _, recipe in equivalents(lab, columns(lab)[1])]
    ['Adam-Layca 3^-5', 'SGD_AMom-Layca 3^-5']
    """
    task = column.task
    if lab.scale != "full":
        source = replace(task.source, per_class=_PER_CLASS, validation=_HELD_OUT)
        task = replace(task, name=f"{task.name}-held-out", source=source)
    task = replace(task, test_curve=True)
    return [(task, column.controlled[1]), (task, column.plain[1])]


def equivalent_trials(lab: Lab) -> list[Trial]:
    """Return the trials of figure 6 (ICLR).

    >>> from gyroscope_lab.training.archive import Archive
    >>> len(equivalent_trials(Lab(Archive("runs"), "full")))
    10
    """
    return trials_of(lab, [pair for column in speed_columns(lab) for pair in equivalents(lab, column)])


def curve(cell: Cell, which: Which = "accuracy") -> Curve:
    """Return the accuracy in percent by epoch: the mean over seeds, as far as all of them went.

    >>> from gyroscope_lab.training.recipe import Recipe
    >>> from gyroscope_lab.training.result import Result
    >>> from gyroscope_lab.training.tasks import task
    >>> result = Result(1.0, 0.9, loss=[1.0], layers=["a"], rotation=[[0.0]], accuracy=[0.5, 1.0])
    >>> curve(Cell(task("digits"), Recipe("SGD", 0.1), (result,))).tolist()
    [50.0, 100.0]
    """
    return np.asarray(100 * cell.by_epoch(which))


def distance(first: Curve, second: Curve) -> float:
    """Return (1/T) Σ_t |a_t − b_t| of two curves, over the T epochs that both have.

    >>> distance(np.array([50.0, 90.0, 99.0]), np.array([60.0, 90.0]))
    5.0
    """
    epochs = min(len(first), len(second))
    return float(np.abs(first[:epochs] - second[:epochs]).mean())


def lead(first: Curve, second: Curve) -> float:
    """Return (1/T) Σ_t (a_t − b_t), the lead of the first curve.

    >>> lead(np.array([60.0, 90.0]), np.array([50.0, 90.0]))
    5.0
    """
    epochs = min(len(first), len(second))
    return float((first[:epochs] - second[:epochs]).mean())


def shake(curve: Curve) -> float:
    """Return (Σ_t |a_{t+1} − a_t| − |a_T − a_1|) / (T − 1): how far a curve goes back and forth per epoch, in points.

    It is 0 for a curve that only climbs. Two draws of one curve are about as far apart as each shakes.

    >>> shake(np.array([50.0, 60.0, 90.0])), shake(np.array([50.0, 60.0, 50.0]))
    (0.0, 10.0)
    """
    if len(curve) < 2:
        return 0.0
    return float((np.abs(np.diff(curve)).sum() - abs(curve[-1] - curve[0])) / (len(curve) - 1))


def alike(first: Curve, second: Curve) -> bool:
    """Return whether two curves are the same: not further apart than 3 points, or than they shake.

    >>> alike(np.array([50.0, 90.0]), np.array([54.0, 91.0])), alike(np.array([50.0, 90.0]), np.array([59.0, 91.0]))
    (True, False)
    """
    return distance(first, second) <= max(_SAME, shake(first), shake(second))


def figure7(lab: Lab) -> Report:
    """Report training curves of adaptive methods, SGD with weight decay, and SGD that copies the methods' rotation."""
    its = columns(lab)
    found = cells_of(lab, [pair for column in its for pair in copied(column)])
    lines, numbers = [], []
    verdicts: list[Verdict] = []
    for column in its:
        method, decayed, copy = (found[pair] for pair in copied(column))
        a, b, c = curve(method), curve(decayed), curve(copy)
        faster, near, far = lead(a, b), distance(a, c), distance(a, b)
        lines.append((column.name, method.test_told, copy.test_told, decayed.test_told, faster, near, far))
        own = [
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
        verdicts += on_task(column.task.name, own)
        numbers.append(_numbers(column, (method, decayed, copy)))
    names = ("column", "test %", "AdaptCopy", "SGD + L2", "ahead of SGD + L2", "from AdaptCopy", "from SGD + L2")
    figure = _draw(
        [(column.name, [found[pair] for pair in copied(column)]) for column in its],
        rows=("accuracy",),
        heading="Training curves of adaptive methods, and of SGD that copies them",
    )
    return Report(
        {"figure": figure},
        (Table("Training curves (distances in points, on average over epochs; the paper prints none)", names,
               tuple(lines)),),
        tuple(verdicts),
        {"columns": numbers, "same": _SAME},
    )  # fmt: skip


def figure6_of_speed(lab: Lab) -> Report:
    """Report curves of adaptive methods and of their equivalents, all under Layca.

    The paper's are training and test curves. Where kept trainings have measured the test accuracy in the end only, the
    accuracy on held-out training images takes its place.
    """
    its = speed_columns(lab)
    found = cells_of(lab, [pair for column in its for pair in equivalents(lab, column)])
    every = [result for cell in found.values() for result in cell.results]
    second: Which = "test_accuracies" if all(result.test_accuracies for result in every) else "validation"
    name = _LABELS[second].split()[0]
    lines, numbers = [], []
    verdicts: list[Verdict] = []
    for column in its:
        method, plain = (found[pair] for pair in equivalents(lab, column))
        whole = curve(method), curve(plain)
        tested = curve(method, second), curve(plain, second)
        train, held_out = distance(*whole), distance(*tested)
        both = method.recipe.name, plain.recipe.name
        lines.append((column.task.name, *both, train, held_out, method.test_told, plain.test_told))
        same = Verdict(
            f"{column.task.name}: {' and '.join(both)} have the same curves",
            "indistinguishable",
            f"training {train:.1f}, {name} {held_out:.1f} points apart on average; "
            f"they shake by {max(map(shake, whole)):.1f} and {max(map(shake, tested)):.1f}; "
            f"in the end test accuracy differs by {method.ahead_of(plain).told}",
            all_hold([alike(*whole), alike(*tested), method.ahead_of(plain).within(_PAR)]),
        )
        verdicts += on_task(method.task.name, [same])
        numbers.append(_numbers(column, (method, plain), second))
    names = ("task", "adaptive", "equivalent", "training", name, "test % adaptive", "test % equivalent")
    figure = _draw(
        [(column.name, [found[pair] for pair in equivalents(lab, column)]) for column in its],
        rows=("accuracy", second),
        heading="Adaptive methods and their equivalents under Layca",
    )
    return Report(
        {"figure": figure},
        (Table("Curves (distances in points, on average over epochs; the paper prints none)", names, tuple(lines)),),
        tuple(verdicts),
        {"columns": numbers, "same": _SAME},
    )


def _numbers(column: Column, its: Sequence[Cell], second: Which = "validation") -> dict[str, Any]:
    curves = {
        cell.recipe.name: {
            "accuracy": [round(float(value), 3) for value in curve(cell)],
            second: [round(float(value), 3) for value in curve(cell, second)],
        }
        for cell in its
    }
    return {"column": column.name, "curves": curves, "cells": [cell.numbers() for cell in its]}


def _draw(its: Sequence[tuple[str, Sequence[Cell]]], *, rows: Sequence[Which], heading: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.0 + 2.7 * len(its), 0.9 + 2.3 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), len(its), squeeze=False, sharey="row", sharex="col")
    for place, (name, shown) in enumerate(its):
        for row, which in enumerate(rows):
            _lines(axes[row, place], shown, which)
            if place == 0:
                axes[row, place].set_ylabel(_LABELS[which], fontsize=9)
        axes[0, place].set_title(name, fontsize=9)
        axes[-1, place].set_xlabel("epoch", fontsize=9)
        axes[0, place].legend(fontsize=7, loc="lower right")
    figure.suptitle(heading, fontsize=11)
    return figure


def _lines(ax: Axes, shown: Sequence[Cell], which: Which) -> None:
    styles = _STYLES if len(shown) == len(_STYLES) else (_STYLES[0], _STYLES[2])
    for cell, (color, style, width) in zip(shown, styles, strict=True):
        its = curve(cell, which)
        ax.plot(range(1, len(its) + 1), its, color=color, linestyle=style, linewidth=width, label=title(cell.recipe))
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=8)


STUDIES = (
    Study("rotation/fig6", "Figure 6: adaptive methods without and with Layca", _compared, figure6),
    Study("rotation/table6", "Table 6: training accuracies of figure 6", _both, table6),
    Study("rotation/fig7", "Figure 7: training curves of SGD that copies adaptive methods", copy_trials, figure7),
    Study("speed/fig5", "Figure 5: adaptive methods' rotation and test accuracy", _alone, figure5_of_speed),
    Study("speed/fig6", "Figure 6: adaptive methods and their equivalents without adaptation, under Layca",
          equivalent_trials, figure6_of_speed),
    Study("speed/table4", "Table 4: training accuracies of figure 5", _methods, table4_of_speed),
)  # fmt: skip
