"""SGD and weight decay (rotation paper, section 5.2: figure 3 and table 4; speed paper, 5.1: figure 4 and table 3).

Weight decay keeps weights small, so that a step of the same size turns them further. With it SGD does what it does
not do alone: all layers reach a cosine distance of 1 from where they started, and test accuracy is on par with Layca's.

The two papers differ. For the speed paper's figure the deep CNN has its dropout; it and the wide residual network are
trained without decay as they are with it; and tiny-CNN is trained no longer with decay than without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.cells import Cell, cells, some
from gyroscope_lab.papers.chance import all_hold
from gyroscope_lab.papers.rotation import paper
from gyroscope_lab.papers.rotation.best_layca import (
    BEST_LAYCA,
    FAR,
    Row,
    compared_with_layca,
    in_training,
    noted,
    numbers,
)
from gyroscope_lab.papers.rotation.panels import by_task
from gyroscope_lab.papers.rotation.recipes import over_seeds, sgd, sgd_decayed
from gyroscope_lab.papers.study import Report, Study, Table, Verdict, on_task
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.task import Task
from gyroscope_lab.training.trial import Trial

#: Table 4 (rotation): training accuracies of SGD with weight decay, in percent.
TRAIN: dict[str, float] = dict.fromkeys(paper.TASKS, 100.0)
#: Figure 4 (speed): what Δη refers to, and Δη without and with decay. Where the trainings are those of the rotation
#: paper, so are the numbers.
SPEED_REFERENCE: dict[str, float] = {**paper.REFERENCE, "c10-cnn2": 92.33}
SPEED_SGD: dict[str, float] = dict(zip(paper.TASKS, (-8.77, -14.28, -8.63, -4.92, -3.06), strict=True))
SPEED_DECAYED: dict[str, float] = dict(zip(paper.TASKS, (-0.30, 0.30, -1.11, 0.25, -0.24), strict=True))
#: Table 3 (speed): training accuracies without and with decay, in percent.
SPEED_TRAIN: dict[str, tuple[float, float]] = dict(
    zip(paper.TASKS, ((100.0, 100.0), (100.0, 100.0), (100.0, 89.8), (91.0, 99.5), (100.0, 100.0)), strict=True)
)
# The share of the mean rotation under Layca (at most 1) that counts as reaching it.
_REACHED = 0.9
# Test accuracies are on par within this many points: the paper's largest gap, rounded up.
_ON_PAR = 1.0


def decayed(lab: Lab) -> list[Trial]:
    """Return the trials of figure 3 and table 4.

    >>> from gyroscope_lab.training.archive import Archive
    >>> [trial.schedule.epochs for trial in decayed(Lab(Archive("runs"), "full")) if trial.recipe.weight_decay]
    [100, 100, 100, 250, 200]
    """
    found = []
    for task in lab.tasks(paper.TASKS):
        longer, recipe = sgd_decayed(task)
        found += over_seeds(longer, [recipe], lab.seeds) + over_seeds(task, [BEST_LAYCA], lab.seeds)
    return found


def with_and_without(lab: Lab) -> list[Trial]:
    """Return the trials of figure 4 and table 3 of the speed paper.

    >>> from gyroscope_lab.training.archive import Archive
    >>> [trial.recipe.name for trial in with_and_without(Lab(Archive("runs"), "full", only=("c10-cnn2",)))]
    ['SGD', 'SGD + L2', 'Layca 3^-3']
    """
    found = []
    for task in lab.tasks(paper.TASKS):
        its, (plain, regular) = speed_recipes(task)
        base = replace(task, options=its.options)
        for of, recipe in ((its, plain), (its, regular), (base, BEST_LAYCA)):
            found += over_seeds(of, [recipe], lab.seeds)
    return found


def speed_recipes(task: Task) -> tuple[Task, tuple[Recipe, Recipe]]:
    """The task as the speed paper has it, and SGD without and with decay.

    >>> from gyroscope_lab.training.tasks import task
    >>> its, (plain, regular) = speed_recipes(task("c100-wrn"))
    >>> its.schedule.epochs, plain.rate, plain.weight_decay, regular.weight_decay
    (200, 0.1, 0.0, 0.001)
    """
    longer, regular = sgd_decayed(task)
    if task.name == "c10-cnn2":
        longer = replace(longer, options=(*task.options, ("dropout", True)))
    if task.name in ("c10-cnn2", "c100-wrn"):
        return longer, (replace(regular, name="SGD", weight_decay=0.0), regular)
    return task, (sgd(task, -1), regular)


def figure3(lab: Lab) -> Report:
    """Report rotation curves and test accuracies with decay."""
    rows = some(compared_with_layca(cells(lab, decayed(lab))))
    figure = by_task(
        [[cell for row, _ in rows for cell in row]],
        heading="Layer rotation under SGD with weight decay",
        note=noted(rows),
    )
    lines, verdicts = [], []
    for [cell], reference in rows:
        name = cell.task.name
        lines.append(_line(name, cell, reference, paper.WEIGHT_DECAY.get(name), paper.REFERENCE.get(name)))
        its = [_far(name, cell, reference), _on_par(name, cell, reference, "by −0.85 to +0.30 points")]
        verdicts += on_task(name, its)
    table = Table("SGD + L2", _COLUMNS, tuple(lines))
    return Report({"figure": figure}, (table,), tuple(verdicts), numbers(rows))


def table4(lab: Lab) -> Report:
    """Report training accuracies with decay."""
    rows = some(compared_with_layca(cells(lab, decayed(lab))))
    found = [row[0] for row, _ in rows]
    lines = tuple((cell.task.name, in_training(cell), TRAIN.get(cell.task.name), cell.train) for cell in found)
    table = Table("SGD + L2", ("task", "train % here", "paper", "of the tested weights"), lines)
    says = _all_learn("with weight decay SGD learns every training set", "100 % in all five", found)
    return Report({}, (table,), (says,), numbers(rows))


def speed_figure4(lab: Lab) -> Report:
    """Report rotation curves and test accuracies without decay (first line) and with it (second line)."""
    rows = _pairs(lab)
    figure = by_task(
        [[row[0] for row, _ in rows], [row[1] for row, _ in rows]],
        heading="Layer rotation under SGD, without and with weight decay",
        note=noted(rows),
    )
    tables, verdicts = [], []
    for place, told in enumerate((SPEED_SGD, SPEED_DECAYED)):
        lines = tuple(
            _line(of.task.name, row[place], of, told.get(of.task.name), SPEED_REFERENCE.get(of.task.name))
            for row, of in rows
        )
        tables.append(Table("SGD + L2" if place else "SGD", _COLUMNS, lines))
    for (plain, regular), reference in rows:
        name = reference.task.name
        its = [
            Verdict(
                f"{name}: without decay SGD generalizes worse than Layca",
                "by 3.1 to 14.3 points",
                f"{plain.ahead_of(reference).to(1)} points",
                reference.ahead_of(plain).above,
            ),
            Verdict(
                f"{name}: with decay layers rotate further, and test accuracy is higher",
                "in all five tasks",
                f"{regular.mean_rotation:.3f} against {plain.mean_rotation:.3f}, "
                f"{regular.ahead_of(plain).to(1)} points",
                all_hold([regular.mean_rotation > plain.mean_rotation, regular.ahead_of(plain).above]),
            ),
            _far(name, regular, reference),
            _on_par(name, regular, reference, "by −1.11 to +0.30 points"),
        ]
        verdicts += on_task(name, its)
    return Report({"figure": figure}, tuple(tables), tuple(verdicts), numbers(rows))


def speed_table3(lab: Lab) -> Report:
    """Report training accuracies without and with decay."""
    rows = _pairs(lab)
    lines = []
    for row, reference in rows:
        told = SPEED_TRAIN.get(reference.task.name, (None, None))
        for cell, number in zip(row, told, strict=True):
            lines.append((cell.task.name, cell.recipe.name, in_training(cell), number, cell.train))
    columns = ("task", "configuration", "train % here", "paper", "of the tested weights")
    table = Table("SGD without and with weight decay", columns, tuple(lines))
    every = [cell for row, _ in rows for cell in row]
    says = _all_learn("without and with decay SGD learns its training set", "89.8 % and more", every, 89.8)
    return Report({}, (table,), (says,), numbers(rows))


def _pairs(lab: Lab) -> Sequence[Row]:
    """The tasks of which both, without decay and with it, are known."""
    return some([row for row in compared_with_layca(cells(lab, with_and_without(lab))) if len(row[0]) == 2])


_COLUMNS = ("task", "test % here", "paper", "Δη here", "Δη paper", "train %", "mean rotation", "under Layca")


def _line(name: str, cell: Cell, reference: Cell, told: float | None, paper_best: float | None) -> tuple[Any, ...]:
    absolute = None if told is None or paper_best is None else paper_best + told
    tests = (cell.test_told, absolute, cell.test - reference.test, told)
    return (name, *tests, cell.train, cell.mean_rotation, reference.mean_rotation)


def _far(name: str, cell: Cell, reference: Cell) -> Verdict:
    return Verdict(
        f"{name}: with decay layers reach a cosine distance of 1",
        "in all five tasks",
        f"{cell.mean_rotation:.2f} on average, {reference.mean_rotation:.2f} under Layca",
        None if reference.mean_rotation < FAR else cell.mean_rotation >= _REACHED * min(1.0, reference.mean_rotation),
    )


def _on_par(name: str, cell: Cell, reference: Cell, told: str) -> Verdict:
    return Verdict(
        f"{name}: with decay SGD is on par with Layca",
        told,
        f"{cell.ahead_of(reference).told} points",
        cell.ahead_of(reference).exceeds(-_ON_PAR),
    )


def _all_learn(says: str, told: str, found: list[Cell], least: float = 99.0) -> Verdict:
    lowest = min(cell.train for cell in found)
    return Verdict(says, told, f"{lowest:.1f} % and more", lowest >= least)


STUDIES = (
    Study("rotation/fig3", "Figure 3: rotation curves and test accuracy of SGD with weight decay", decayed, figure3),
    Study("rotation/table4", "Table 4: training accuracies of figure 3", decayed, table4),
    Study(
        "speed/fig4",
        "Figure 4: rotation curves and test accuracy of SGD without and with weight decay",
        with_and_without,
        speed_figure4,
    ),
    Study("speed/table3", "Table 3: training accuracies of figure 4", with_and_without, speed_table3),
)
