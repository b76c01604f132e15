"""Learning-rate warm-ups (section 5.3 of the rotation paper: figure 4 and table 5).

A residual network of 110 layers, trained with SGD and weight decay at a rate of 3⁻¹, does not start to learn: its
layers turn abruptly, and the turns improve nothing. A rate that climbs to 3⁻¹ over the first epochs avoids these turns.
Under Layca, which allows no abrupt turns, the network needs no warm-up.

The conditioning paper explains the same failure otherwise: the last linear layer is badly conditioned, and batch
normalization before it (LastBN) cures that. `lastbn` compares the three cures under the schedule of figure 4. The
rotation paper's network leaves no place for LastBN, so the conditioning paper's ResNet-110 is trained with and without
it: that one has affine batch normalization, identity shortcuts and a bias in its classifier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isfinite

import numpy as np
import numpy.typing as npt

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.cells import Cell, cells, some
from gyroscope_lab.papers.chance import all_exceed
from gyroscope_lab.papers.rotation.panels import Storeys, draw_storeys, title
from gyroscope_lab.papers.rotation.recipes import layca, over_seeds, sgd_decayed
from gyroscope_lab.papers.study import Report, Study, Table, Verdict
from gyroscope_lab.training.result import Result
from gyroscope_lab.training.trial import Trial

#: The epochs of warm-up of the first four columns of figure 4.
WARMUPS = (0, 5, 10, 15)
#: Figure 4 and table 5: test and training accuracy by epochs of warm-up, in percent; None is for Layca.
PAPER: dict[int | None, tuple[float, float]] = {
    0: (83.58, 96.67), 5: (92.43, 99.76), 10: (92.09, 99.85), 15: (92.30, 99.68), None: (92.09, 99.85),
}  # fmt: skip
#: The epochs that figure 4 shows.
SHOWN = 25
#: Training accuracies, in percent, at which a network has learned nothing, as in the authors' code, and has learned.
NOTHING, LEARNS = 20.0, 50.0
#: A training accuracy falls if it is lower than an epoch before by more than this.
FALL = 0.05
#: The names of the conditioning paper's networks without LastBN and with it, up to their depth.
PLAIN, LASTBN = "resnet-", "resnet-lastbn-"
#: The epochs of warm-up that LastBN is compared with.
COMPARED = 5
# Networks on digits. Those of 20 layers learn without a warm-up, those of 56 not even with one. 44 layers were chosen
# when three seeds had shown that they learn with each of the cures, and hardly without.
_SHALLOWER = {"smoke": "resnet-8", "small": "resnet-44"}
_SMOKE_WARMUPS = (0, 5)
# Test accuracies are on par down to this many points less.
_ON_PAR = 1.0


def warmups(lab: Lab) -> list[Trial]:
    """Return the trials of figure 4 and table 5.

    >>> from gyroscope_lab.training.archive import Archive
    >>> [(trial.recipe.name, trial.schedule.warmup) for trial in warmups(Lab(Archive("runs"), "full"))][2:]
    [('SGD + L2', 10.0), ('SGD + L2', 15.0), ('Layca 3^-3', 0.0)]
    """
    [task] = lab.tasks(["c10-resnet110"])
    if lab.scale in _SHALLOWER:
        task = replace(task, model=_SHALLOWER[lab.scale])
    trials = []
    for epochs in _SMOKE_WARMUPS if lab.scale == "smoke" else WARMUPS:
        slow, recipe = sgd_decayed(replace(task, schedule=replace(task.schedule, warmup=float(epochs))))
        trials += over_seeds(slow, [recipe], lab.seeds)
    return trials + over_seeds(task, [layca(-3)], lab.seeds)


def cures(lab: Lab) -> list[Trial]:
    """SGD without a cure, with a warm-up and under Layca; and the conditioning paper's network without and with LastBN.

    >>> from gyroscope_lab.training.archive import Archive
    >>> [(trial.task.model, trial.schedule.warmup) for trial in cures(Lab(Archive("runs"), "full"))][1:]
    [('resnet-110', 5.0), ('resnet-110', 0.0), ('resnet-110', 0.0), ('resnet-lastbn-110', 0.0)]
    """
    known = [trial for trial in warmups(lab) if trial.recipe.control or trial.schedule.warmup in (0, COMPARED)]
    first = next(trial for trial in known if not trial.recipe.control)
    options = tuple(pair for pair in first.task.options if pair[0] != "keras")
    depth = first.task.model.removeprefix(PLAIN)
    for kind in (PLAIN, LASTBN):
        task = replace(first.task, name=f"{first.task.source.name}-{kind}{depth}", model=kind + depth, options=options)
        known += over_seeds(task, [first.recipe], lab.seeds)
    return known


def figure4(lab: Lab) -> Report:
    """Report rotation and training accuracy over the first epochs, and the test accuracy in the end."""
    found = some(cells(lab, warmups(lab)))
    storeys = [_storeys(cell) for cell in found]
    epochs = max(len(one.rotation[0]) for one in storeys) - 1
    heading = f"Warm-ups of {found[0].task.model}: the first {epochs} epochs"
    figure = draw_storeys(storeys, heading=heading, xlabel="epoch")
    lines = []
    for cell in found:
        told = _told(lab, cell)
        difference = None if told is None else cell.test - told[0]
        early = float(training_accuracy(cell)[:SHOWN][-1])
        lines.append((_name(cell), cell.test_told, told and told[0], difference, early, _largest(cell)))
    columns = ("warm-up", "test % here", "paper", "difference", f"train % by epoch {SHOWN}", "largest turn in an epoch")
    table = Table(found[0].task.name, columns, tuple(lines))
    return Report({"figure": figure}, (table,), tuple(_verdicts(lab, found)), _numbers(found))


def table5(lab: Lab) -> Report:
    """Report training accuracies in the end."""
    found = some(cells(lab, warmups(lab)))
    lines = []
    for cell in found:
        told = _told(lab, cell)
        lines.append((_name(cell), float(training_accuracy(cell)[-1]), told and told[1], cell.train))
    table = Table(found[0].task.name, ("warm-up", "train % here", "paper", "of the tested weights"), tuple(lines))
    if len(found) < _wanted(lab):
        return Report({}, (table,), (), _numbers(found))
    plain, *others = found
    worst = min(cell.train for cell in others)
    says = Verdict(
        "without a warm-up SGD does not learn its training set as well as with one, or as under Layca",
        "96.67 % against 99.68 % and more",
        f"{plain.train:.2f} % against {worst:.2f} % and more",
        _only_deep(lab, plain.train < worst),
    )
    return Report({}, (table,), (says,), _numbers(found))


def _storeys(cell: Cell) -> Storeys:
    """The rotation and the training accuracy of a cell over the first epochs."""
    rotation, accuracy = cell.rotation[: SHOWN + 1], training_accuracy(cell)[:SHOWN]
    epochs = np.arange(max(len(rotation), len(accuracy) + 1), dtype=float)
    return Storeys(
        _title(cell),
        (epochs[: len(rotation)], rotation),
        (epochs[1 : len(accuracy) + 1], accuracy),
        note=f"test: {cell.test:.1f} %",
    )


def training_accuracy(cell: Cell) -> npt.NDArray[np.float64]:
    """Return the training accuracy measured during each epoch, in percent: the mean over seeds."""
    return np.asarray(100 * cell.by_epoch("accuracy"))


def _warmup(cell: Cell) -> int | None:
    return None if cell.recipe.control else int(cell.task.schedule.warmup)


def _name(cell: Cell) -> str:
    epochs = _warmup(cell)
    return f"{cell.recipe.name}, none" if not epochs else f"{cell.recipe.name}, {epochs} epochs"


def _has_lastbn(cell: Cell) -> bool:
    return cell.task.model.startswith(LASTBN)


def _title(cell: Cell) -> str:
    epochs = _warmup(cell)
    return f"{title(cell.recipe)}\n" + (f"warm-up: {epochs} epochs" if epochs else "no warm-up")


def _told(lab: Lab, cell: Cell) -> tuple[float, float] | None:
    return PAPER[_warmup(cell)] if lab.scale == "full" else None


def _largest(cell: Cell) -> float:
    """The furthest that the layers turned on average in one of the first epochs."""
    turn = np.abs(np.diff(cell.rotation[: SHOWN + 1], axis=0)).mean(axis=1)
    return float(np.nan_to_num(turn).max())


def turns(result: Result) -> tuple[list[float], list[float]]:
    """Return the mean turn of the layers where the training accuracy fell, and elsewhere in the first epochs.

    It fell in an epoch whose accuracy is below that of the epoch before by more than `FALL`. A turn may show at once or
    in the next epoch, so of both the larger counts. Weights of a training that diverged have none.

    >>> steady = [[0.0], [0.1], [0.2], [0.7], [0.75]]
    >>> result = Result(1.0, 0.9, [0.1] * 4, ["a"], rotation=steady, accuracy=[0.3, 0.8, 0.5, 0.9])
    >>> [[round(turn, 2) for turn in where] for where in turns(result)]
    [[0.5], [0.1, 0.5]]
    """
    epochs = min(SHOWN, len(result.accuracy))
    turn = np.abs(np.diff(np.array(result.rotation), axis=0)).mean(axis=1)
    fell: list[float] = []
    others: list[float] = []
    for epoch in range(1, epochs):
        falls = result.accuracy[epoch] < result.accuracy[epoch - 1] - FALL
        if isfinite(larger := float(turn[epoch - 1 : epoch + 1].max())):
            (fell if falls else others).append(larger)
    return fell, others


def _only_deep(lab: Lab, holds: bool | None) -> bool | None:
    """Leave verdicts undecided below full scale, where networks are shallower and warm-ups have fewer steps."""
    return holds if lab.scale == "full" else None


def _wanted(lab: Lab) -> int:
    """The number of cells where all trainings are known: verdicts are about all of them."""
    return len({(trial.task, trial.recipe) for trial in warmups(lab)})


def lastbn(lab: Lab) -> Report:
    """Report the three cures: rotation and training accuracy over the first epochs, and the final test accuracy."""
    wanted = dict.fromkeys((trial.task, trial.recipe) for trial in cures(lab))
    found = some(cells(lab, cures(lab)))
    storeys = [replace(_storeys(cell), title=f"{_network(cell)}\n{_title(cell)}") for cell in found]
    rows = tuple(
        (_network(cell), _name(cell), cell.test_told, float(training_accuracy(cell)[:SHOWN][-1]), _largest(cell))
        for cell in found
    )
    columns = ("network", "warm-up", "test % here", f"train % by epoch {SHOWN}", "largest turn in an epoch")
    table = Table("Three cures for a deep network that does not start to learn", columns, rows)
    heading = "A warm-up, Layca and LastBN: the first epochs"
    return Report(
        {"figure": draw_storeys(storeys, heading=heading, xlabel="epoch")},
        (table,),
        tuple(_of_lastbn(lab, found)) if len(found) == len(wanted) else (),
        _numbers(found),
    )


def _network(cell: Cell) -> str:
    """The network in words; the rotation paper's is named after the library that it was written for."""
    if dict(cell.task.options).get("keras"):
        return f"{cell.task.model} (Keras)"
    return f"{cell.task.model.replace('-lastbn', '')}" + (" with LastBN" if _has_lastbn(cell) else "")


def _of_lastbn(lab: Lab, found: Sequence[Cell]) -> list[Verdict]:
    _, warmed, controlled, without, cured = found
    early = {id(cell): float(training_accuracy(cell)[:SHOWN][-1]) for cell in found}
    return [
        Verdict(
            "with LastBN the network starts to learn without a warm-up",
            "the conditioning paper: LastBN stabilizes very deep networks",
            f"{early[id(cured)]:.1f} % by epoch {SHOWN}, {early[id(without)]:.1f} % without LastBN",
            _only_deep(lab, early[id(cured)] > early[id(without)] + 5.0),
        ),
        Verdict(
            "with LastBN the network generalizes as it does with a warm-up or under Layca",
            "no comparison in the papers",
            f"{cured.test:.2f} %, {warmed.test:.2f} % with a warm-up, {controlled.test:.2f} % under Layca",
            _only_deep(lab, all_exceed([cured.ahead_of(other) for other in (warmed, controlled)], -_ON_PAR)),
        ),
    ]


def _verdicts(lab: Lab, found: Sequence[Cell]) -> list[Verdict]:
    if len(found) < _wanted(lab):
        return []
    plain, *warmed, controlled = found
    early = [float(training_accuracy(cell)[:SHOWN][-1]) for cell in found]
    best = max(warmed, key=lambda cell: cell.test)
    return [
        Verdict(
            f"without a warm-up SGD learns nothing in the first {SHOWN} epochs, with one it learns",
            "75 % with one, no improvement without",
            f"{early[0]:.1f} % without, {min(early[1:-1]):.1f} % and more with one",
            _only_deep(lab, early[0] <= NOTHING and min(early[1:-1]) >= LEARNS),
        ),
        Verdict(
            "without a warm-up SGD generalizes worse",
            "83.58 % against 92.09 % and more",
            f"{plain.test:.2f} % against {min(cell.test for cell in warmed):.2f} % and more",
            _only_deep(lab, all_exceed([cell.ahead_of(plain) for cell in warmed])),
        ),
        _synchronized([plain, *warmed]),
        Verdict(
            "Layca generates no abrupt turns, without a warm-up",
            "it does not",
            f"by up to {_largest(controlled):.3f} in an epoch, SGD by up to {_largest(plain):.3f}",
            _largest(controlled) < _largest(plain),
        ),
        Verdict(
            "Layca generalizes without a warm-up as SGD does with one",
            "92.09 %, SGD 92.43 % at best",
            f"{controlled.test:.2f} %, SGD {best.test:.2f} % at best, {controlled.ahead_of(best).told} points",
            all_exceed([controlled.ahead_of(cell) for cell in warmed], -_ON_PAR),
        ),
    ]


def _synchronized(found: list[Cell]) -> Verdict:
    pairs = [turns(result) for cell in found for result in cell.results]
    fell, others = ([turn for pair in pairs for turn in pair[place]] for place in (0, 1))
    says = "where the training accuracy falls under SGD, layers turn abruptly"
    if not fell or not others:
        return Verdict(says, "synchronized", "it does not fall", None)
    here = (
        f"by {np.median(fell):.4f} where it falls ({len(fell)} epochs), by {np.median(others):.4f} elsewhere (medians)"
    )
    return Verdict(says, "synchronized", here, bool(np.median(fell) > 2 * np.median(others)))


def _numbers(found: Sequence[Cell]) -> dict[str, list[dict[str, object]]]:
    return {
        "cells": [
            {
                **cell.numbers(),
                "warmup": _warmup(cell),
                "accuracy": [round(float(value), 2) for value in training_accuracy(cell)],
                "first_rotation": np.round(cell.rotation[: SHOWN + 1], 4).tolist(),
            }
            for cell in found
        ]
    }


STUDIES = (
    Study("rotation/fig4", "Figure 4: the first epochs of a deep residual network with warm-ups", warmups, figure4),
    Study("rotation/table5", "Table 5: training accuracies of figure 4", warmups, table5),
    Study(
        "rotation/lastbn",
        "Figure 4 again: LastBN, in the conditioning paper's ResNet-110, next to warm-ups and Layca",
        cures,
        lastbn,
    ),
)
