"""When a training saves again: not so often that saving takes much of its time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

# A checkpoint of a thousand layers takes two seconds; twice a minute they would be a fifteenth of the training.
_APART = 50


class Pace:
    """Whether something is due again: some seconds after the last time, and fifty times as many as that took.

    Args:
        every: seconds; 0 for always.

    Attributes:
        took: seconds that the last time took; 0 before the first.

    >>> pace = Pace(0.0)
    >>> with pace.taken():
    ...     pass
    >>> pace.due, Pace(60.0).due
    (True, False)
    """

    def __init__(self, every: float) -> None:
        self._every = self._apart = every
        self._last = time.perf_counter()
        self.took = 0.0

    @property
    def due(self) -> bool:
        """Whether the time has come."""
        return time.perf_counter() - self._last >= self._apart

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Do it within this."""
        began = time.perf_counter()
        yield
        self._last = time.perf_counter()
        self.took = self._last - began
        self._apart = max(self._every, _APART * self.took) if self._every else 0.0
