"""The run of a training outside torch: its layers by name and shape, and rows that are written as they are measured."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from gyroscope.errors import GyroscopeError, MonitorError, StoreError
from gyroscope.layers.layer import Kind
from gyroscope.monitor.quantities import Quantity
from gyroscope.monitor.resume import rank
from gyroscope.monitor.watch import folder_of
from gyroscope.store import LayerInfo, Rows, Run, Scalars, Writer, load

_LOG = logging.getLogger("gyroscope")


def is_layer(name: str, dimensions: int) -> bool:
    """Return whether a weight is a layer, by default: the biases of attention have two dimensions, and begin at zero.

    >>> is_layer("attention.query.kernel", 3), is_layer("attention.query.bias", 2), is_layer("norm.scale", 1)
    (True, False, False)
    """
    return dimensions >= 2 and _last(name) != "bias"


def layer_of(name: str, shape: Sequence[int]) -> LayerInfo:
    """Return what a run remembers of a weight, from the last part of its name and its dimensions.

    Runs have the outputs first, as torch does. Those of Flax and Keras, whose weights are called `kernel`, and of plain
    arrays are last; Equinox calls its weights `weight`, and has them first.

    >>> layer_of("Dense_0.kernel", (20, 3))
    LayerInfo(name='Dense_0.kernel', kind='linear', shape=(3, 20), part=0)
    >>> layer_of("layers.0.weight", (3, 20)).shape, layer_of("conv/kernel", (5, 5, 3, 8)).shape
    ((3, 20), (8, 5, 5, 3))
    >>> layer_of("token.embedding", (1000, 64))
    LayerInfo(name='token.embedding', kind='embedding', shape=(1000, 64), part=0)
    """
    last = _last(name)
    kinds: dict[int, Kind] = {2: "linear", 4: "conv", 5: "conv"}
    if last.startswith("embedding"):
        return LayerInfo(name, "embedding", tuple(shape))
    ordered = tuple(shape) if last == "weight" else (*shape[-1:], *shape[:-1])
    return LayerInfo(name, kinds.get(len(shape), "other"), ordered)


def _last(name: str) -> str:
    return name.replace("/", ".").rsplit(".", 1)[-1]


class Recording:
    """A run that is opened when its first row arrives, which says where the training began.

    Args:
        run: the folder to record in; None for a new one under `runs/`.
        quantities: the quantities that rows have.
        meta: what describes the training.

    Attributes:
        path: the run's folder; None on ranks other than the first, which record nothing.
        error: the error that recording has stopped with, or None.
    """

    def __init__(
        self, run: str | os.PathLike[str] | None, quantities: Sequence[Quantity], meta: Mapping[str, Any] | None
    ) -> None:
        if meta is not None and not isinstance(meta, Mapping):
            raise MonitorError(f"`meta` must be a dict, got {meta!r:.80}. Try {{'seed': 0}}.")
        self.path = folder_of(run, shared=False) if rank() == 0 else None
        self.error: GyroscopeError | None = None
        self.meta = dict(meta or {})
        self._infos = {one.info.name: one.info for one in quantities}
        self._writer: Writer | None = None
        self._closed = False

    @property
    def begun(self) -> bool:
        """True once the run is open."""
        return self._writer is not None

    def begin(self, layers: Sequence[LayerInfo], step: int) -> None:
        """Open the run, or resume it, at `step`. If that fails, training continues, and `flush` raises the error."""
        if self.path is None or self._closed or self.error is not None:
            return
        try:
            self._writer = Writer(self.path, layers, self._infos, meta=self.meta, step=step)
        except GyroscopeError as error:
            self.error = error
            _LOG.error("Nothing is recorded, training continues: %s", error)

    def row(self, step: int, values: Mapping[str, npt.ArrayLike]) -> None:
        """Write the values of all layers at a step; if the disk cannot keep up, wait for it."""
        with np.errstate(all="ignore"):
            found = {name: np.asarray(value, dtype=np.float32)[None] for name, value in values.items()}
        self._put(Rows(0, np.array([step], dtype=np.int64), found))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write numbers of the whole network at a step."""
        self._put(Scalars(step, {name: float(value) for name, value in numbers.items()}))

    def _put(self, record: Rows | Scalars) -> None:
        writer = self._writer
        if writer is not None and not writer.put(record) and writer.open:
            with suppress(StoreError):  # logged, and raised by `flush`
                writer.flush()
            writer.put(record)

    def flush(self) -> None:
        """Return when everything is on disk.

        Raises:
            StoreError: the run could not be opened or written.
        """
        if self.error is not None:
            raise self.error
        if self._writer is not None and not self._closed:
            self._writer.flush()

    def close(self, *, interrupted: bool = False) -> None:
        """Finish the run."""
        self._closed = True
        if self._writer is not None:
            self._writer.close(interrupted=interrupted)

    @property
    def run(self) -> Run:
        """The run, to read."""
        if self._writer is None or self.path is None:
            raise MonitorError("The run exists once a step has been measured. Train first.") from self.error
        return load(self.path)
