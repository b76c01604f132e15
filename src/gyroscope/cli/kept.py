"""A run whose series are read once, for a page that is made of many of them."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from gyroscope.store import Run
from gyroscope.store.record import Steps, Values

#: Bytes of series that are kept; what is beyond is read again whenever it is asked for.
_MOST = 1 << 28


class Kept(Run):
    """A run that keeps what it has read until it is refreshed.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_example(folder).close()
    ...     with Kept(folder) as run:
    ...         run.series("rotation")[-1], run.series("rotation", steps=[40, 7])[:, 0]
    (array([0.4, 0.6, 0.8], dtype=float32), array([0.4, nan], dtype=float32))
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._kept: dict[str, Values] = {}

    def series(self, name: str, *, steps: Sequence[int] | Steps | None = None) -> Values:
        """As `Run.series`; whoever asks may change what is returned."""
        if steps is not None and not np.array_equal(steps, self.steps):
            return super().series(name, steps=steps)
        if name in self._kept:
            return self._kept[name].copy()
        values = super().series(name)
        if sum(kept.nbytes for kept in self._kept.values()) + values.nbytes <= _MOST:
            self._kept[name] = values.copy()
        return values

    def refresh(self) -> None:
        """Forget what was read, so that it is read again."""
        super().refresh()
        self._kept.clear()
