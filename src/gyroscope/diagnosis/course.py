"""The course of a run, as rules read it: the series of its layers, its loss, and what was known about its objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import nan
from typing import Any

import numpy as np
import numpy.typing as npt

from gyroscope.store import LayerInfo, Run

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

#: The series that rules read.
SERIES = (
    "rotation", "rate_per_step", "weight_norm", "weight_norm_before", "gradient_norm", "update_norm", "update_ratio",
    "alignment", "lr", "weight_decay",
)  # fmt: skip
#: The series of sampled steps that rules read.
DETAILS = (
    "dying_channels", "moment_p50", "input_mean", "input_rms", "input_low", "input_high", "gradient_carried",
    "norm_evaluates", "softmax_twice", "output_information", "domination", "lambda_x",
)  # fmt: skip
#: The scalar that is recorded where the weights of data-parallel ranks differ, relative to their norm.
RANKS_DIFFER = "ranks_differ"
#: The scalars that may be the training loss, the best first.
LOSS_NAMES = ("batch_loss", "loss", "train_loss", "train/loss", "training_loss")
#: The most rows that rules read, and the most sampled ones; of longer runs, rows are left out evenly between the first
#: and the last ones.
MOST = 512


@dataclass(frozen=True, eq=False)
class Course:
    """The input of the rules.

    Attributes:
        layers: the layers, in forward order.
        steps: the measured steps [S], ascending.
        series: the values [S, L] of each series; unknown values are NaN.
        loss_steps, loss: the loss of the whole network where it was recorded.
        apart: the steps and values of the scalar "ranks_differ", which is recorded where data-parallel ranks differ.
        meta: the run's meta: the optimizers, and under "facts" what was known about the objects.

    >>> layers = (LayerInfo("fc1.weight", "linear", (8, 4)), LayerInfo("fc2.weight", "linear", (2, 8)))
    >>> steps = np.arange(3)
    >>> course = Course(layers, steps, {"lr": np.full((3, 2), 0.1)}, steps, np.array([3.0, 2.0, 1.0]))
    >>> course.names, course.known("lr"), course.known("rotation"), course["rotation"].shape
    (('fc1.weight', 'fc2.weight'), True, False, (3, 2))
    """

    layers: tuple[LayerInfo, ...]
    steps: Ints
    series: Mapping[str, Floats]
    loss_steps: Ints
    loss: Floats
    meta: Mapping[str, Any] = field(default_factory=dict)
    apart: tuple[tuple[int, float], ...] = ()

    def __getitem__(self, name: str) -> Floats:
        """Return a series [S, L]; all NaN if it was not recorded."""
        found = self.series.get(name)
        return np.full((len(self.steps), len(self.layers)), nan) if found is None else found

    def known(self, name: str) -> bool:
        """Return True if the series has a value."""
        return name in self.series and bool(np.isfinite(self.series[name]).any())

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the layers."""
        return tuple(layer.name for layer in self.layers)

    @cached_property
    def facts(self) -> Mapping[str, Any]:
        """Facts about the objects when the run began: names of layers by fact."""
        found = self.meta.get("facts")
        return found if isinstance(found, Mapping) else {}

    def fact(self, name: str) -> Mask:
        """Return the layers that a fact names [L]."""
        named = self.facts.get(name)
        return np.isin(self.names, named if isinstance(named, list) else [])

    @cached_property
    def _waits(self) -> Mask:
        """True while a layer that did not train when the run began has had no update [S, L]."""
        moved = np.logical_or.accumulate(self["update_norm"] > 0, axis=0)
        return np.asarray((self.fact("frozen") | self.fact("unheld")) & ~moved)

    @cached_property
    def untrained(self) -> Mask:
        """Layers that no optimizer stepped, or that needed no gradient [L].

        Layers that begin to train during the run, such as those unfrozen later, do not count. If updates were not
        recorded, what was known when the run began decides.
        """
        return np.asarray(self._waits[-1:].any(0))

    @cached_property
    def rates(self) -> Floats:
        """The rates per step [S, L]; NaN while a layer does not train."""
        return np.where(self._waits, nan, self["rate_per_step"])

    @cached_property
    def weights(self) -> Mask:
        """Layers that are neither embeddings nor vectors [L]: those that have a depth and neighbors."""
        return np.array([layer.kind != "embedding" and len(layer.shape) > 1 for layer in self.layers], dtype=bool)

    @cached_property
    def fan_out(self) -> Ints:
        """The number of outputs of each layer [L]; 0 for a vector."""
        return np.array([layer.shape[0] if len(layer.shape) > 1 else 0 for layer in self.layers], dtype=np.int64)

    def optimizer(self, part: int) -> Mapping[str, Any]:
        """Return what is known about the optimizer of a part."""
        found = self.meta.get("optimizers")
        known = found[part] if isinstance(found, list) and part < len(found) else {}
        return known if isinstance(known, Mapping) else {}

    def option(self, name: str, default: float = 0.0) -> Floats:
        """Return a numerical option of each layer's optimizer [L]; `default` if it has none."""

        def of(known: Mapping[str, Any]) -> float:
            value = known.get(name, default)
            return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else default

        return np.array([of(self.optimizer(layer.part)) for layer in self.layers])


def course_of(run: Run) -> Course:
    """Return the course of a recorded run.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder, write_example(folder) as run:
    ...     course = course_of(run)
    >>> course.steps.tolist(), course.known("rotation"), course.known("weight_norm")
    ([0, 10, 20, 30, 40], True, False)
    """
    recorded = [name for name in (*SERIES, *DETAILS) if name in run.quantities]
    sampled = np.unique(np.concatenate([run.steps[:0], *(run.where(one) for one in DETAILS if one in run.quantities)]))
    chosen = np.unique(np.concatenate([some[thinned(len(some))] for some in (run.steps, sampled)])).astype(np.int64)
    series = {name: np.asarray(run.series(name, steps=chosen), dtype=np.float64) for name in recorded}
    loss_steps, loss = loss_of({name: (curve.steps, curve.values) for name, curve in run.scalars.items()})
    curve = run.scalars.get(RANKS_DIFFER)
    apart = () if curve is None else tuple(zip(curve.steps.tolist(), curve.values.tolist(), strict=True))
    return Course(tuple(run.layer_table), chosen, series, loss_steps, loss, run.meta, apart=apart)


def thinned(count: int, most: int = MOST) -> Ints:
    """Return the rows to keep of `count`: the first and the last quarter of `most`, and evenly those between.

    >>> thinned(5).tolist(), len(thinned(10_000))
    ([0, 1, 2, 3, 4], 512)
    """
    if count <= most:
        return np.arange(count)
    between = np.linspace(most // 4, count - most // 4 - 1, most - 2 * (most // 4)).astype(np.int64)
    return np.unique(np.concatenate([np.arange(most // 4), between, np.arange(count - most // 4, count)]))


def loss_of(scalars: Mapping[str, tuple[Any, Any]]) -> tuple[Ints, Floats]:
    """Return the steps and values of the training loss: that of batches where it was recorded.

    >>> loss_of({"val_loss": ([1], [3.0]), "loss": ([1, 2], [2.0, 1.0])})[1].tolist()
    [2.0, 1.0]
    """
    for name in LOSS_NAMES:
        if name in scalars and len(scalars[name][0]):
            steps, values = scalars[name]
            return np.asarray(steps, dtype=np.int64), np.asarray(values, dtype=np.float64)
    return np.empty(0, dtype=np.int64), np.empty(0)
