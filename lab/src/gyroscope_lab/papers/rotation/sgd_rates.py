"""SGD's learning rate (section 5.1 of the rotation paper: figures 2 and 10, table 3).

The paper trains its five tasks with plain SGD at rates of 3⁻⁴ to 3⁰. Test accuracy grows with the rate, and with it the
layers' rotation, up to a point where rotation becomes abrupt; at no rate do the layers rotate as far and as evenly as
under Layca, and at none does SGD generalise as well. Figure 10 looks at the first epoch at 3⁰ step by step: there
layers turn far in single steps, which improve nothing.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.cells import Cell, cells, grid
from gyroscope_lab.papers.rotation import paper
from gyroscope_lab.papers.rotation.beside_layca import BEST_LAYCA, FAR, beside_layca, in_training, noted, numbers, some
from gyroscope_lab.papers.rotation.first_steps import figure10, first_epoch
from gyroscope_lab.papers.rotation.recipes import over_seeds, sgd
from gyroscope_lab.papers.study import Report, Study, Table, Verdict
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.task import Task
from gyroscope_lab.training.trial import Trial

#: The five columns of figure 2, as powers of 3.
POWERS = (-4, -3, -2, -1, 0)
#: Table 3: training accuracies in percent, by power of 3.
TRAIN: dict[str, tuple[float, ...]] = {
    "c10-cnn1": (100.0, 100.0, 100.0, 100.0, 100.0),
    "c100-resnet": (87.8, 100.0, 100.0, 100.0, 99.7),
    "tiny-cnn": (100.0, 100.0, 100.0, 100.0, 100.0),
    "c10-cnn2": (99.8, 99.9, 100.0, 100.0, 83.7),
    "c100-wrn": (100.0, 100.0, 100.0, 100.0, 57.4),
}


def rates(lab: Lab) -> list[Trial]:
    """What figure 2 and table 3 train: SGD at every rate, and the best of Layca to compare with.

    >>> from gyroscope_lab.training.archive import Archive
    >>> len(rates(Lab(Archive("runs"), "full")))
    30
    """
    return [
        trial
        for task in lab.tasks(paper.TASKS)
        for trial in over_seeds(task, [*(sgd(task, power) for power in _powers(lab)), BEST_LAYCA], lab.seeds)
    ]


def _powers(lab: Lab) -> tuple[int, ...]:
    return (-4, -1, 0) if lab.scale == "smoke" else POWERS


def power_of(task: Task, recipe: Recipe) -> int | None:
    """The power of 3 that the rate of a recipe of `sgd` is.

    >>> from gyroscope_lab.training.tasks import task
    >>> power_of(task("c10-cnn1"), sgd(task("c10-cnn1"), -2))
    -2
    """
    return next((power for power in POWERS if recipe == sgd(task, power)), None)


def figure2(lab: Lab) -> Report:
    """Rotation curves and test accuracies by rate."""
    rows = some(beside_layca(cells(lab, rates(lab))))
    heading = "Layer rotation under SGD, and test accuracy: Δη is to Layca's at $3^{-3}$"
    figure = grid([row for row, _ in rows], heading=heading, note=noted(rows))
    return Report(
        {"figure": figure},
        tuple(_accuracies(*row) for row in rows),
        tuple(verdict for row, best in rows for verdict in _verdicts(lab, row, best)),
        numbers(rows),
    )


def table3(lab: Lab) -> Report:
    """Training accuracies by rate."""
    rows = some(beside_layca(cells(lab, rates(lab))))
    columns = ("configuration", "train % here", "paper", "of the tested weights")
    tables = []
    for row, _ in rows:
        lines = tuple((cell.recipe.name, in_training(cell), _train(cell), cell.train) for cell in row)
        tables.append(Table(row[0].task.name, columns, lines))
    every = [cell for row, _ in rows for cell in row]
    learned = sum(cell.learned for cell in every)
    known = [value for values in TRAIN.values() for value in values]
    share = sum(value >= 90 for value in known) / len(known)
    says = Verdict(
        "(nearly) every rate learns its training set",
        f"{share * len(known):.0f} of {len(known)}",
        f"{learned} of {len(every)}",
        learned >= share * len(every) if all(len(row) == len(_powers(lab)) for row, _ in rows) else None,
    )
    return Report({}, tuple(tables), (says,), numbers(rows))


def _train(cell: Cell) -> float | None:
    power, told = power_of(cell.task, cell.recipe), TRAIN.get(cell.task.name)
    return None if power is None or told is None else told[POWERS.index(power)]


def _accuracies(row: list[Cell], reference: Cell) -> Table:
    name = reference.task.name
    lines: list[tuple[Any, ...]] = []
    for cell in row:
        power = power_of(cell.task, cell.recipe)
        told = None if power is None else paper.SGD_RATES.get(name, {}).get(power)
        tests = (cell.test, paper.absolute(name, told), cell.test - reference.test, told)
        lines.append((cell.recipe.name, *tests, cell.train, cell.mean_rotation))
    best = (reference.test, paper.REFERENCE.get(name), None, None, reference.train, reference.mean_rotation)
    lines.append((reference.recipe.name, *best))
    columns = ("configuration", "test % here", "paper", "Δη here", "Δη paper", "train %", "mean rotation")
    return Table(name, columns, tuple(lines))


def _verdicts(lab: Lab, row: list[Cell], reference: Cell) -> list[Verdict]:
    if len(row) < len(_powers(lab)):
        return []
    name = reference.task.name
    place = max(range(len(row)), key=lambda index: row[index].test)
    best, slowest, fastest = row[place], row[0], row[-1]
    climbs = all(a.test <= b.test + 0.5 for a, b in pairwise(row[: place + 1]))
    short = reference.mean_rotation < FAR
    uneven, even = best.unevenness, reference.unevenness
    return [
        Verdict(
            f"{name}: the higher the rate, the further layers rotate and the better it is, up to a tipping point",
            "up to 3^-1 or 3^-2",
            "; ".join(f"{cell.recipe.name}: {cell.mean_rotation:.2f}, {cell.test:.1f} %" for cell in row),
            climbs and best.mean_rotation > slowest.mean_rotation,
        ),
        Verdict(
            f"{name}: beyond that point a higher rate is worse",
            "by 0.3 to 26 points at 3^0",
            f"{fastest.recipe.name}: {fastest.test - best.test:+.1f} points",
            # A stand-in may have its tipping point beyond the last rate.
            True if fastest.test < best.test else False if lab.scale == "full" else None,
        ),
        Verdict(
            f"{name}: at its best rate SGD stays below Layca",
            "by 1.7 to 14.3 points",
            f"{best.recipe.name}: {best.test - reference.test:+.1f} points",
            best.test < reference.test,
        ),
        Verdict(
            f"{name}: under SGD layers stop rotating short of a cosine distance of 1",
            "in all five tasks",
            f"{best.mean_rotation:.2f} on average, {reference.mean_rotation:.2f} under Layca",
            None if short else best.mean_rotation < reference.mean_rotation,
        ),
        Verdict(
            f"{name}: under SGD layers rotate unevenly",
            "in all five tasks",
            f"they differ by {100 * uneven:.0f} % of their mean, under Layca by {100 * even:.0f} %",
            None if short else uneven > even,
        ),
    ]


STUDIES = (
    Study("rotation/fig2", "Figure 2: rotation curves and test accuracy of SGD by learning rate", rates, figure2),
    Study("rotation/fig10", "Figure 10: the first epoch of SGD at a high rate, step by step", first_epoch, figure10),
    Study("rotation/table3", "Table 3: training accuracies of figure 2", rates, table3),
)
