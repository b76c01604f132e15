"""The records of a run: values of the layers at some steps, scalars, and events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import time
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Steps = npt.NDArray[np.int64]
Values = npt.NDArray[np.float32]


@dataclass(frozen=True)
class LayerInfo:
    """A layer as a run remembers it.

    Attributes:
        name: the layer's name.
        kind: its kind, such as "conv".
        shape: the shape of its weight.
        part: the optimizer that steps it, counted from 0; layers of one part are recorded together.

    >>> LayerInfo("conv1.weight", "conv", (8, 3, 3, 3)).part
    0
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    part: int = 0


@dataclass(frozen=True)
class QuantityInfo:
    """Description of a series: its name, its unit and its meaning in one line.

    >>> QuantityInfo("rotation", "1", "cosine distance of the weights to their reference").unit
    '1'
    """

    name: str
    unit: str
    meaning: str


@dataclass(frozen=True)
class Rows:
    """Series of the layers of one part: `values[quantity]` is `[steps, layers of the part]`; NaN means unknown.

    >>> rows = Rows(0, np.array([0, 1]), {"rotation": np.array([[0.0, 0.0], [0.25, 0.5]], np.float32)})
    >>> rows.values["rotation"].shape
    (2, 2)
    """

    part: int
    steps: Steps
    values: Mapping[str, Values]


@dataclass(frozen=True)
class Scalars:
    """Numbers of the whole network at one step, such as the loss.

    >>> Scalars(10, {"loss": 2.3, "accuracy": 0.1}).values["loss"]
    2.3
    """

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True)
class Event:
    """Something that happened at a step.

    `kind` is "note" for a user's text, otherwise "start", "resume", "stop", "interval", "error", "finding", ...

    >>> event = Event(10, "note", "learning rate divided by 5")
    >>> event.step, event.kind
    (10, 'note')
    """

    step: int
    kind: str
    text: str
    time: float = field(default_factory=time)


Record = Rows | Scalars | Event


@dataclass(frozen=True)
class Deferred:
    """A record that the writer's thread still has to compute, for example because a device is working on it.

    Deferred records that share the same `resolve` and wait together are computed together, in order. `small` ones have
    their own places in the queue.

    >>> losses = Deferred(lambda given: [Scalars(step, {"loss": loss}) for step, loss in given], (10, 2.3))
    >>> list(losses.resolve([losses.payload]))
    [Scalars(step=10, values={'loss': 2.3})]
    """

    resolve: Callable[[Sequence[Any]], Iterable[Record]]
    payload: Any
    small: bool = False


class Sink(Protocol):
    """A place that a run is mirrored to, in addition to its folder. All methods are called from the writer's thread.

    A class with these three methods is one:

    >>> class Losses:
    ...     def open(self, layers, quantities, meta): self.seen = []
    ...     def write(self, record):
    ...         if isinstance(record, Scalars):
    ...             self.seen.append(record.values["loss"])
    ...     def close(self, run): pass
    >>> sink = Losses()  # for gyroscope.watch(model, optimizer, sinks=[sink])
    >>> sink.open([], {}, {}); sink.write(Scalars(1, {"loss": 2.3})); sink.seen
    [2.3]
    """

    def open(
        self, layers: Sequence[LayerInfo], quantities: Mapping[str, QuantityInfo], meta: Mapping[str, Any]
    ) -> None:
        """Begin or resume a run."""

    def write(self, record: Record) -> None:
        """Mirror one record."""

    def close(self, run: Any) -> None:
        """End the run; `run` is the `Run` that was written, for example to draw figures from."""
