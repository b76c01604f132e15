"""A table of recorded runs: the optimizer and options of each, and its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan, nan
from typing import Any

import numpy as np
import numpy.typing as npt

from gyroscope.errors import StoreError
from gyroscope.store import Run
from gyroscope.store.find import distinct_names
from gyroscope.theory.recurrence import optimizers_in

#: Names of logged accuracies by kind, the most informative kind first.
ACCURACIES: dict[str, tuple[str, ...]] = {
    "test": ("test_accuracy", "test_acc"),
    "validation": ("validation_accuracy", "val_accuracy", "valid_accuracy", "val_acc"),
    "train": ("train_accuracy", "train_acc", "accuracy", "acc"),
}
# Steps that are read at a time, from the end, for final values.
_PIECE = 50


@dataclass(frozen=True)
class Compared:
    """One row of the table; None for numbers that a run does not hold.

    Attributes:
        name: its label, or the part of its path that distinguishes it.
        optimizer: the name of its optimizer.
        rate: the initial learning rate η, or ρ.
        weight_decay: the initial weight decay, the smallest and the largest over layers.
        momentum: the momentum, or Adam's β₁.
        steps: the number of steps.
        rotation: of the least rotated layer, on average, and of the most rotated layer, at the end.
        loss: the last logged loss, NaN if training diverged.
        accuracies: the last logged accuracies, by the keys of `ACCURACIES`.
        state: "running", "ended" or "interrupted".
    """

    name: str
    optimizer: str | None = None
    rate: float | None = None
    weight_decay: tuple[float, float] | None = None
    momentum: float | None = None
    steps: int | None = None
    rotation: tuple[float, float, float] | None = None
    loss: float | None = None
    accuracies: Mapping[str, float] = field(default_factory=dict)
    state: str = "ended"


def compared(runs: Sequence[Run], *, labels: Sequence[str] | None = None) -> list[Compared]:
    """Return the rows of runs, in order.

    Args:
        runs: the runs.
        labels: one label per run; their names, distinguished by their paths, if None.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder, write_example(f"{folder}/first") as run:
    ...     [row] = compared([run])
    >>> row.name, row.steps, [round(value, 3) for value in row.rotation], row.loss
    ('first', 40, [0.4, 0.6, 0.8], 0.25)
    """
    called = distinct_names(runs) if labels is None else labels
    if len(called) != len(runs):
        raise StoreError(f"`labels` must have one label per run, got {len(called)} for {len(runs)} runs.")
    return [_row(run, name) for run, name in zip(runs, called, strict=True)]


def shared_accuracy(runs: Sequence[Run]) -> str | None:
    """Return the most informative number that all runs have logged, or None if there is none.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder, write_example(folder) as run:
    ...     shared_accuracy([run])
    'loss'
    """
    known = [name for several in ACCURACIES.values() for name in several]
    return next((name for name in [*known, "loss"] if all(_last(run, name) is not None for run in runs)), None)


def in_words(rows: Sequence[Compared]) -> str:
    """Return the rank correlation of rotation and accuracy over the rows, as a sentence; "" if it is not known.

    >>> turned = [Compared(str(i), rotation=(0.0, i / 9, 1.0), accuracies={"test": i / 10}) for i in range(4)]
    >>> in_words(turned)
    'Mean rotation and test accuracy have a rank correlation of +1.00 over these 4 runs.'
    """
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
    recipe, optimizers = _recipe(run), [one for one in optimizers_in(run.meta) if "class" in one]
    first = optimizers[0] if optimizers else {}
    classes = [f"{one['class']}({one['inner']})" if "inner" in one else str(one["class"]) for one in optimizers]
    found = {kind: [_last(run, one) for one in several] for kind, several in ACCURACIES.items()}
    accuracies = {kind: next((value for value in values if value is not None), None) for kind, values in found.items()}
    return Compared(
        name=name,
        optimizer=str(recipe["name"]) if recipe else " + ".join(dict.fromkeys(classes)) or None,
        rate=_number(recipe["rate"] if recipe else first.get("lr")),
        weight_decay=_weight_decay(run, recipe or first),
        momentum=_momentum(first or recipe),
        steps=int(run.steps[-1]) if len(run.steps) else None,
        rotation=_rotation(run),
        loss=float(run.scalars["loss"].values[-1]) if "loss" in run.scalars else None,
        accuracies={kind: value for kind, value in accuracies.items() if value is not None},
        state=run.state,
    )


def _recipe(run: Run) -> Mapping[str, Any]:
    """Return the laboratory's recipe of a run; {} for other runs."""
    trial = run.meta.get("trial")
    recipe = trial.get("recipe") if isinstance(trial, dict) else None  # others may use the key for something else
    return recipe if isinstance(recipe, dict) and {"name", "rate"} <= recipe.keys() else {}


def _weight_decay(run: Run, given: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the smallest and the largest over layers, which may be in different groups, or the optimizer's option."""
    if "weight_decay" in run.quantities and len(where := run.where("weight_decay")):
        by_layer = run.series("weight_decay", steps=where[:1])
        if len(known := by_layer[np.isfinite(by_layer)]):
            return float(known.min()), float(known.max())
    decay = _number(given.get("weight_decay"))
    return None if decay is None else (decay, decay)


def _momentum(given: Mapping[str, Any]) -> float | None:
    if {"momentum", "betas"}.intersection(given.get("differ", ())):  # between groups
        return None
    betas = given.get("betas")
    return _number(betas[0] if isinstance(betas, list) and betas else given.get("momentum"))


def _number(given: Any) -> float | None:
    return float(given) if isinstance(given, int | float) else None


def _rotation(run: Run) -> tuple[float, float, float] | None:
    final = final_values(run, "rotation") if "rotation" in run.quantities else np.empty(0)
    known = final[np.isfinite(final)]
    return (float(known.min()), float(known.mean()), float(known.max())) if known.size else None


def final_values(run: Run, quantity: str) -> npt.NDArray[np.float64]:
    """Return the last known value of each layer; NaN for a layer that has none.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder, write_example(folder) as run:
    ...     final_values(run, "rotation").round(3).tolist()
    [0.4, 0.6, 0.8]
    """
    where, final = run.where(quantity), np.full(len(run.layers), nan)
    while len(where) and not np.isfinite(final).all():
        where, last = where[:-_PIECE], where[-_PIECE:]
        for row in run.series(quantity, steps=last)[::-1]:
            final = np.where(np.isfinite(final), final, row)
    return final


def _last(run: Run, scalar: str) -> float | None:
    """Return the last finite value of a logged number, or None."""
    if scalar not in run.scalars:
        return None
    values = run.scalars[scalar].values
    known = values[np.isfinite(values)]
    return float(known[-1]) if len(known) else None


def rank_correlation(x: npt.ArrayLike, y: npt.ArrayLike) -> float:
    """Return Spearman's rank correlation; nan if there are fewer than three points or one side is constant.

    >>> rank_correlation([1, 2, 3], [10, 20, 25])
    1.0
    """
    x, y = np.asarray(x), np.asarray(y)
    if len(x) < 3 or min(len(np.unique(x)), len(np.unique(y))) < 2:
        return nan
    return round(float(np.corrcoef(_ranks(x), _ranks(y))[0, 1]), 12)


def _ranks(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the rank of each value; equal ones share the mean of their ranks."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[which]
