"""LARS compared with Layca (appendix A.4 of the rotation paper: figure 12; A.2 of the speed paper: figure 9).

LARS has two of Layca's four operations: it scales a step to the length of the weights, and takes it. It does not
project the step before that, nor the weights after it. In many dimensions a step is nearly at a right angle to the
weights anyway, so layers rotate as they do under Layca, and test accuracies are nearly the same. The authors let the
norm of a layer grow by no more than 10⁻⁴ of its initial value in a step, and started from weights a quarter of the
usual size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.cells import Cell, cells, some
from gyroscope_lab.papers.rotation import paper
from gyroscope_lab.papers.rotation.best_layca import BEST_LAYCA, compared_with_layca, in_training, noted
from gyroscope_lab.papers.rotation.panels import by_task
from gyroscope_lab.papers.rotation.recipes import lars, over_seeds
from gyroscope_lab.papers.study import Report, Study, Table, Verdict, on_task
from gyroscope_lab.training.trial import Trial

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The tasks of the figure.
TASKS = ("c10-cnn1", "c100-resnet", "tiny-cnn")
#: Training accuracies of the last epoch, in percent, as the authors' files have them.
TRAIN: dict[str, float] = {"c10-cnn1": 99.93, "c100-resnet": 99.09, "tiny-cnn": 98.91}
#: Each layer's rotation under LARS at the start of the last epoch, as the authors' files have it: layers in order.
ROTATION: dict[str, tuple[float, ...]] = {
    "c10-cnn1": (
        0.8253, 0.9878, 0.9671, 0.9771, 0.9701, 0.9731, 0.9761, 0.9915, 0.9894, 0.9871, 0.9936, 0.9878, 0.9911,
        1.0019, 0.9919, 0.9931, 0.9924, 0.9929, 0.9975, 0.9955, 0.9950, 0.9949, 0.9938, 0.9953, 0.7002,
    ),
    "c100-resnet": (
        0.8673, 0.9838, 0.9306, 0.9614, 0.9676, 0.9611, 0.9253, 0.9938, 0.9123, 0.9311, 0.9497, 0.9551,
        0.9482, 0.8928, 0.9792, 0.9716, 0.9860, 0.9829, 0.9756, 0.9814, 0.9763, 0.9696, 0.9688,
        0.9830, 1.0216, 0.9812, 0.9788, 0.9799, 0.9855, 0.9881, 0.9903, 0.9919, 0.9829, 0.8857,
    ),
    "tiny-cnn": (
        0.7801, 0.9428, 0.9566, 0.9784, 0.9853, 0.9893, 0.9910, 0.9954, 0.9958, 0.9981, 0.9233,
    ),
}  # fmt: skip
# Test accuracies are nearly the same within this many points, rotations within this share of their mean over layers.
_SAME_TEST, _SAME_ROTATION = 1.0, 0.2


def both(lab: Lab) -> list[Trial]:
    """Return the trials of the figure: LARS and Layca at ρ(0) = 3⁻³.

    >>> from gyroscope_lab.training.archive import Archive
    >>> [trial.recipe.name for trial in both(Lab(Archive("runs"), "full", only=("tiny-cnn",)))]
    ['LARS 3^-3', 'Layca 3^-3']
    """
    return [trial for task in lab.tasks(TASKS) for trial in over_seeds(task, [lars(), BEST_LAYCA], lab.seeds)]


def figure(lab: Lab) -> Report:
    """Report rotation curves and test accuracies of LARS, above those of Layca."""
    rows = [(row[0], reference) for row, reference in some(compared_with_layca(cells(lab, both(lab))))]
    lines = []
    for cell, reference in rows:
        name = cell.task.name
        told, best = paper.LARS.get(name), paper.REFERENCE.get(name)
        tests = (
            cell.test_told,
            told,
            cell.test - reference.test,
            None if told is None or best is None else told - best,
        )
        trained = (in_training(cell), TRAIN.get(name))
        lines.append((name, *tests, *trained, cell.mean_rotation, _mean(name), reference.mean_rotation))
    columns = (
        "task", "test % here", "paper", "Δη here", "Δη paper", "train % here", "paper",
        "mean rotation here", "paper", "under Layca",
    )  # fmt: skip
    return Report(
        {"figure": _draw(rows)},
        (Table("LARS", columns, tuple(lines)), *(_by_layer(*row) for row in rows)),
        tuple(verdict for row in rows for verdict in on_task(row[0].task.name, _verdicts(*row))),
        {"cells": [cell.numbers() for row in rows for cell in row]},
    )


def _mean(name: str) -> float | None:
    return float(np.mean(ROTATION[name])) if name in ROTATION else None


def _by_layer(cell: Cell, reference: Cell) -> Table:
    told = ROTATION.get(cell.task.name, (None,) * len(cell.final_rotation))
    here, layca = cell.final_rotation.tolist(), reference.final_rotation.tolist()
    lines = tuple(zip(cell.results[0].layers, here, told, layca, strict=True))
    columns = ("layer", "rotation under LARS here", "paper", "under Layca here")
    return Table(f"{cell.task.name}: rotation by layer", columns, lines)


def _verdicts(cell: Cell, reference: Cell) -> list[Verdict]:
    name = cell.task.name
    told = ROTATION.get(name)
    apart = _apart(cell.final_rotation, reference.final_rotation)
    found = [
        Verdict(
            f"{name}: LARS generalizes as Layca does",
            "by +0.06 to +0.11 points",
            f"{cell.ahead_of(reference).told} points",
            cell.ahead_of(reference).within(_SAME_TEST),
        ),
        Verdict(
            f"{name}: under LARS layers rotate as under Layca",
            "indistinguishable",
            f"{apart:.3f} apart on average, of {reference.mean_rotation:.3f}",
            apart <= _SAME_ROTATION * reference.mean_rotation,
        ),
    ]
    if told is not None:
        from_paper = _apart(cell.final_rotation, told)
        found.append(
            Verdict(
                f"{name}: each layer's final rotation is that of the authors' run",
                f"{np.mean(told):.3f} on average",
                f"{cell.mean_rotation:.3f} on average, {from_paper:.3f} apart",
                from_paper <= _SAME_ROTATION * float(np.mean(told)),
            )
        )
    return found


def _apart(a: Any, b: Any) -> float:
    return float(np.mean(np.abs(np.asarray(a) - np.asarray(b))))


def _draw(rows: list[tuple[Cell, Cell]]) -> Figure:
    from gyroscope.figures.drawing import DEPTH

    known = any(cell.task.name in ROTATION for cell, _ in rows)
    drawn = by_task(
        [[cell for cell, _ in rows], [reference for _, reference in rows]],
        heading="Layer rotation under LARS and under Layca" + (" (circles: the authors' LARS)" if known else ""),
        note=noted([([cell], reference) for cell, reference in rows]),
    )
    for ax, (cell, _) in zip(drawn.axes, rows, strict=False):
        told = ROTATION.get(cell.task.name, ())
        places = np.linspace(0, 1, len(told))
        for place, value in zip(places, told, strict=True):
            end = len(cell.rotation) - 1
            ax.plot(end, value, "o", color=DEPTH(float(place)), markersize=3, markerfacecolor="white", clip_on=False)
    return drawn


STUDIES = (
    Study("rotation/fig12", "Figure 12: rotation curves and test accuracy of LARS", both, figure),
    Study("speed/fig9", "Figure 9: rotation curves and test accuracy of LARS", both, figure),
)
