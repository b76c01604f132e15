"""The first epoch of SGD at a high rate, step by step (figure 10 of the rotation paper, its appendix A.2)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

import gyroscope
from gyroscope.store import Run
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.panels import Curve, Storeys, draw_storeys
from gyroscope_lab.papers.rotation import paper
from gyroscope_lab.papers.rotation.beside_layca import some
from gyroscope_lab.papers.rotation.recipes import sgd
from gyroscope_lab.papers.study import Report, Table, Verdict
from gyroscope_lab.training.trial import Trial

#: A step that turns a layer by more than this angle is abrupt: it is five times that of Layca's steps at 3⁻³.
ABRUPT = 0.2
# Epochs that stand for the first of the paper's; the digits' have 7 steps each, the paper's some 350.
_FIRST = {"smoke": 8, "small": 50, "full": 1}
# Batches before and after a step whose accuracies are compared.
_AROUND = 5


def first_epoch(lab: Lab) -> list[Trial]:
    """What figure 10 trains: one epoch at a rate of 3⁰, measured in every step.

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
    """What a run shows of its steps.

    Attributes:
        rotation: (steps, [steps, layers]).
        accuracy: (steps, in percent), of every batch where the run has that, else of every epoch.
        loss: likewise.
        abrupt: the steps in which some layer turned by more than `ABRUPT` radians.
        largest: the largest angle that a layer turned by in a step, in radians.
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
        """How many there were."""
        return int(self.rotation[0][-1])


def view(run: Run) -> View:
    """Look at the steps of a run.

    The accuracy of a batch is that of the weights before its step. So what a step gains is the mean accuracy of the
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
    """Rotation and training accuracy step by step."""
    trials = some(lab.held(first_epoch(lab)))
    lab.run(trials)
    views: dict[str, View] = {}
    for trial in trials:
        with gyroscope.load(lab.archive.folder(lab.trial(trial))) as run:
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
        tuple(verdict for name, one in views.items() for verdict in _verdicts(name, one)),
        {"views": {name: {key: _listed(value) for key, value in asdict(one).items()} for name, one in views.items()}},
    )


def _verdicts(name: str, one: View) -> list[Verdict]:
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
