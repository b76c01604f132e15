"""SGD's learning rate (section 5.1 of the rotation paper: figures 2 and 10, table 3).

The paper trains its five tasks with plain SGD at rates of 3⁻⁴ to 3⁰. Test accuracy grows with the rate, and with it the
layers' rotation, up to a point where rotation becomes abrupt; at no rate do the layers rotate as far and as evenly as
under Layca, and at none does SGD generalize as well. Figure 10 shows the first epoch at 3⁰ step by step: there
layers turn far in single steps, which improve nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from gyroscope.store import Run
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.cells import Cell, cells, recorded, some
from gyroscope_lab.papers.chance import all_exceed, all_hold
from gyroscope_lab.papers.rotation import paper
from gyroscope_lab.papers.rotation.best_layca import BEST_LAYCA, FAR, compared_with_layca, in_training, noted, numbers
from gyroscope_lab.papers.rotation.panels import Curve, Storeys, draw_storeys, grid
from gyroscope_lab.papers.rotation.recipes import over_seeds, sgd
from gyroscope_lab.papers.study import Report, Study, Table, Verdict, on_task
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
#: A step that turns a layer by more than this angle is abrupt: it is five times that of Layca's steps at 3⁻³.
ABRUPT = 0.2
# The epochs that stand for the paper's first one; an epoch of digits has 7 steps, the paper's some 350.
_FIRST = {"smoke": 8, "small": 50, "full": 1}
# In points: a fall of accuracy that does not count.
_NOISE = 0.5
# Batches before and after a step whose accuracies are compared.
_AROUND = 5


def rates(lab: Lab) -> list[Trial]:
    """Return the trials of figure 2 and table 3: SGD at every rate, and the best of Layca to compare with.

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
    """Return the power of 3 of the learning rate of a recipe of `sgd`.

    >>> from gyroscope_lab.training.tasks import task
    >>> power_of(task("c10-cnn1"), sgd(task("c10-cnn1"), -2))
    -2
    """
    return next((power for power in POWERS if recipe == sgd(task, power)), None)


def figure2(lab: Lab) -> Report:
    """Report rotation curves and test accuracies by rate."""
    rows = some(compared_with_layca(cells(lab, rates(lab))))
    heading = "Layer rotation under SGD, and test accuracy: Δη is to Layca's at $3^{-3}$"
    figure = grid([row for row, _ in rows], heading=heading, note=noted(rows))
    return Report(
        {"figure": figure},
        tuple(_accuracies(*row) for row in rows),
        tuple(verdict for row, best in rows for verdict in on_task(best.task.name, _verdicts(lab, row, best))),
        numbers(rows),
    )


def table3(lab: Lab) -> Report:
    """Report training accuracies by rate."""
    rows = some(compared_with_layca(cells(lab, rates(lab))))
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
        learned >= share * len(every),
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
        tests = (cell.test_told, paper.absolute(name, told), cell.test - reference.test, told)
        lines.append((cell.recipe.name, *tests, cell.train, cell.mean_rotation))
    best = (reference.test_told, paper.REFERENCE.get(name), None, None, reference.train, reference.mean_rotation)
    lines.append((reference.recipe.name, *best))
    columns = ("configuration", "test % here", "paper", "Δη here", "Δη paper", "train %", "mean rotation")
    return Table(name, columns, tuple(lines))


def _verdicts(lab: Lab, row: list[Cell], reference: Cell) -> list[Verdict]:
    if len(row) < len(_powers(lab)):
        return []
    name = reference.task.name
    place = max(range(len(row)), key=lambda index: row[index].test)
    best, slowest, fastest = row[place], row[0], row[-1]
    climbs = all_exceed([b.ahead_of(a) for a, b in pairwise(row[: place + 1])], -_NOISE)
    # A stand-in may have its tipping point beyond the last rate.
    highest = False if lab.scale == "full" else None
    short = reference.mean_rotation < FAR
    uneven, even = best.unevenness, reference.unevenness
    return [
        Verdict(
            f"{name}: the higher the rate, the further layers rotate and the better it is, up to a tipping point",
            "up to 3^-1 or 3^-2",
            "; ".join(f"{cell.recipe.name}: {cell.mean_rotation:.2f}, {cell.test:.1f} %" for cell in row),
            all_hold([best.mean_rotation > slowest.mean_rotation, climbs]),
        ),
        Verdict(
            f"{name}: beyond that point a higher rate is worse",
            "by 0.3 to 26 points at 3^0",
            f"{fastest.recipe.name}: {fastest.ahead_of(best).to(1)} points",
            highest if best is fastest else best.ahead_of(fastest).exceeds(0.0, tests=len(row) - 1),
        ),
        Verdict(
            f"{name}: at its best rate SGD stays below Layca",
            "by 1.7 to 14.3 points",
            f"{best.recipe.name}: {best.ahead_of(reference).to(1)} points",
            reference.ahead_of(best).above,
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


def first_epoch(lab: Lab) -> list[Trial]:
    """Return the trials of figure 10: one epoch at a rate of 3⁰, measured in every step.

    >>> from gyroscope_lab.training.archive import Archive
    >>> [(trial.schedule.epochs, trial.every) for trial in first_epoch(Lab(Archive("runs"), "full"))]
    [(1, 1), (1, 1), (1, 1), (1, 1), (1, 1)]
    """
    # Without cuts: as shares of one epoch, some would come before its first step.
    return [
        Trial(replace(task, schedule=replace(task.schedule, epochs=_FIRST[lab.scale], cuts=())), sgd(task, 0), every=1)
        for task in lab.tasks(paper.TASKS)
    ]


@dataclass(frozen=True)
class View:
    """The steps of a run.

    Attributes:
        rotation: (steps, [steps, layers]).
        accuracy: (steps, in percent), of every batch where the run has that, else of every epoch.
        loss: (steps, values), the same.
        abrupt: the steps in which some layer turned by more than `ABRUPT` radians.
        largest: the largest angle by which a layer turned in a step, in radians.
        gain: the training accuracy gained by abrupt steps, in points: their median; None where that is not known.
    """

    rotation: Curve
    accuracy: Curve
    loss: Curve
    abrupt: list[int]
    largest: float
    gain: float | None

    @property
    def steps(self) -> int:
        """The number of steps."""
        return int(self.rotation[0][-1])


def view(run: Run) -> View:
    """Return the steps of a run.

    The accuracy of a batch is that of the weights before its step. So the gain of a step is the mean accuracy of the
    batches after it, less that of the batches up to its own.
    """
    steps = run.where("rotation")
    rotation = run.series("rotation", steps=steps).astype(float)
    angles = np.nan_to_num(run.series("rate_per_step", steps=steps).astype(float)).max(axis=1)
    abrupt = [int(step) for step in steps[angles > ABRUPT]]
    accuracy, loss = (run.scalars.get(f"batch_{name}", run.scalars[name]) for name in ("accuracy", "loss"))
    gains = [_gain(*accuracy, step) for step in abrupt] if "batch_accuracy" in run.scalars else []
    known = [gain for gain in gains if gain is not None]
    return View(
        (steps.astype(float), rotation),
        (accuracy.steps.astype(float), 100 * accuracy.values),
        (loss.steps.astype(float), loss.values),
        abrupt,
        float(angles.max()),
        float(np.median(known)) if known else None,
    )


def _gain(steps: npt.NDArray[np.int64], values: npt.NDArray[np.float64], step: int) -> float | None:
    before, after = values[steps <= step][-_AROUND:], values[steps > step][:_AROUND]
    return 100 * float(after.mean() - before.mean()) if len(before) and len(after) else None


def figure10(lab: Lab) -> Report:
    """Report rotation and training accuracy step by step."""
    trials = some(lab.held(first_epoch(lab)))
    views: dict[str, View] = {}
    for trial in trials:
        with recorded(lab, trial) as run:
            views[trial.task.name] = view(run)
    storeys = [
        Storeys(name, one.rotation, one.accuracy, note=f"largest turn in a step: {one.largest:.2f} rad")
        for name, one in views.items()
    ]
    figure = draw_storeys(storeys, heading="The first steps of SGD at a rate of $3^0$", xlabel="step")
    columns = (
        "task",
        "steps",
        f"abrupt (> {ABRUPT} rad)",
        "largest turn in a step (rad)",
        "points gained by abrupt steps",
    )
    lines = tuple((name, one.steps, len(one.abrupt), one.largest, one.gain) for name, one in views.items())
    return Report(
        {"figure": figure},
        (Table("Abrupt rotations", columns, lines),),
        tuple(verdict for name, one in views.items() for verdict in on_task(name, _step_verdicts(name, one))),
        {"views": {name: {key: _listed(value) for key, value in asdict(one).items()} for name, one in views.items()}},
    )


def _step_verdicts(name: str, one: View) -> list[Verdict]:
    return [
        Verdict(
            f"{name}: layers turn far in single steps",
            "in all five tasks",
            f"in {len(one.abrupt)} of {one.steps} steps by more than {ABRUPT} rad, at most by {one.largest:.2f}",
            len(one.abrupt) > 0,
        ),
        Verdict(
            f"{name}: these steps do not improve the training accuracy",
            "they do not",
            "not known" if one.gain is None else f"{one.gain:+.1f} points in the next {_AROUND} batches (median)",
            None if one.gain is None else one.gain < 1.0,
        ),
    ]


def _listed(value: Any) -> Any:
    return [np.round(part, 4).tolist() for part in value] if isinstance(value, tuple) else value


STUDIES = (
    Study("rotation/fig2", "Figure 2: rotation curves and test accuracy of SGD by learning rate", rates, figure2),
    Study("rotation/fig10", "Figure 10: the first epoch of SGD at a high rate, step by step", first_epoch, figure10),
    Study("rotation/table3", "Table 3: training accuracies of figure 2", rates, table3),
)
