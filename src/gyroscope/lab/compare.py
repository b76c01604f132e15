"""Recorded runs side by side: what each was trained with, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, isnan, nan
from os.path import commonpath, relpath

import numpy as np

from gyroscope.recurrence import optimizers_in
from gyroscope.store import Run

#: The logged numbers that tell how good a network is, the most telling first, and by which names they go.
ACCURACIES: dict[str, tuple[str, ...]] = {
    "test": ("test_accuracy", "test_acc"),
    "validation": ("validation_accuracy", "val_accuracy", "valid_accuracy", "val_acc"),
    "train": ("train_accuracy", "train_acc", "accuracy", "acc"),
}


@dataclass(frozen=True)
class Compared:
    """A run in a row of numbers; None for what it does not hold.

    Attributes:
        name: what it is called beside the others.
        optimizer: what trained it.
        rate: the learning rate it began with, or ρ.
        steps: how many there were.
        rotation: of the least rotated layer, on average, and of the most rotated layer, at the end.
        loss: the last that was logged, nan where training diverged.
        accuracies: the last that were logged, by the keys of `ACCURACIES`.
        state: "running", "ended" or "interrupted".
    """

    name: str
    optimizer: str | None
    rate: float | None
    steps: int | None
    rotation: tuple[float, float, float] | None
    loss: float | None
    accuracies: dict[str, float]
    state: str


def compared(runs: Sequence[Run]) -> list[Compared]:
    """Return the rows of runs, in order.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder, write_example(f"{folder}/first") as run:
    ...     [row] = compared([run])
    >>> row.name, row.steps, [round(value, 3) for value in row.rotation], row.loss
    ('first', 40, [0.4, 0.6, 0.8], 0.25)
    """
    return [_row(run, name) for run, name in zip(runs, names(runs), strict=True)]


def names(runs: Sequence[Run]) -> list[str]:
    """Return what to call runs: their folders' names, and as much of the path as it takes to tell them apart.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     names([write_example(f"{folder}/{name}") for name in ("a/seed-0", "b/seed-0")])
    ['a/seed-0', 'b/seed-0']
    """
    short = [run.name for run in runs]
    if len(set(short)) == len({run.path for run in runs}):
        return short
    root = commonpath([run.path for run in runs])
    return [relpath(run.path, root) for run in runs]


def shared_accuracy(runs: Sequence[Run]) -> str | None:
    """Return the most telling number that all runs have logged, or None if there is none.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder, write_example(folder) as run:
    ...     shared_accuracy([run])
    'loss'
    """
    known = [name for several in ACCURACIES.values() for name in several]
    return next((name for name in [*known, "loss"] if all(_last(run, name) is not None for run in runs)), None)


def in_words(rows: Sequence[Compared]) -> str:
    """Return how rotation and accuracy go together over the rows; nothing if that cannot be told.

    >>> turned = [Compared(str(i), None, None, 7, (0.0, i / 9, 1.0), None, {"test": i / 10}, "ended") for i in range(4)]
    >>> in_words(turned)
    'Mean rotation and test accuracy have a rank correlation of +1.00 over these 4 runs.'
    """
    from gyroscope.figures.compare import rank_correlation

    kind = next((kind for kind in ACCURACIES if all(kind in row.accuracies for row in rows)), None)
    turned = [row.rotation[1] for row in rows if row.rotation is not None]
    if kind is None or len(turned) < len(rows):
        return ""
    correlation = rank_correlation(turned, [row.accuracies[kind] for row in rows])
    if isnan(correlation):
        return ""
    return (
        f"Mean rotation and {kind} accuracy have a rank correlation of {correlation:+.2f} over these {len(rows)} runs."
    )


def _row(run: Run, name: str) -> Compared:
    optimizer, rate = _trained_with(run)
    found = {kind: [_last(run, one) for one in several] for kind, several in ACCURACIES.items()}
    accuracies = {kind: next((value for value in values if value is not None), None) for kind, values in found.items()}
    return Compared(
        name=name,
        optimizer=optimizer,
        rate=rate,
        steps=int(run.steps[-1]) if len(run.steps) else None,
        rotation=_rotation(run),
        loss=float(run.scalars["loss"].values[-1]) if "loss" in run.scalars else None,
        accuracies={kind: value for kind, value in accuracies.items() if value is not None},
        state=run.state,
    )


def _trained_with(run: Run) -> tuple[str | None, float | None]:
    """The name of the laboratory's recipe, or the classes of the optimizer; and the rate."""
    trial = run.meta.get("trial")
    recipe = trial.get("recipe") if isinstance(trial, dict) else None  # others call other things a trial
    if isinstance(recipe, dict) and {"name", "rate"} <= recipe.keys():
        return str(recipe["name"]), float(recipe["rate"])
    optimizers = [one for one in optimizers_in(run.meta) if "class" in one]
    if not optimizers:
        return None, None
    said = [f"{one['class']}({one['inner']})" if "inner" in one else str(one["class"]) for one in optimizers]
    rate = optimizers[0].get("lr")
    return " + ".join(dict.fromkeys(said)), float(rate) if isinstance(rate, int | float) else None


def _rotation(run: Run) -> tuple[float, float, float] | None:
    if "rotation" not in run.quantities or not len(run.where("rotation")):
        return None
    values = run.series("rotation", steps=run.where("rotation")).astype(float)
    # A layer that was not measured in the end counts with its last value.
    final = np.array([column[np.isfinite(column)][-1] if np.isfinite(column).any() else nan for column in values.T])
    known = final[np.isfinite(final)]
    return (float(known.min()), float(known.mean()), float(known.max())) if known.size else None


def _last(run: Run, scalar: str) -> float | None:
    """The last finite value of a logged number, None if there is none."""
    if scalar not in run.scalars:
        return None
    values = [float(value) for value in run.scalars[scalar].values if isfinite(value)]
    return values[-1] if values else None
