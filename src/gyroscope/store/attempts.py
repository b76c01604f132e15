"""Attempts: which of the rows that a run holds are part of its history.

A run that is resumed at step s starts an attempt there. What earlier attempts wrote after step s led nowhere: it stays
in the file, and is not shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Attempt(NamedTuple):
    """One stretch of writing, from `start_step` on.

    Times are in seconds since 1970; `ended` is None if the writer was not closed, or is still writing.
    """

    number: int
    start_step: int
    time: float
    ended: float | None


class History:
    """Which attempt counts at which step.

    >>> history = History([Attempt(1, 0, 0.0, None), Attempt(2, 500, 9.0, None)])
    >>> history.shows(1, 500), history.shows(1, 501), history.shows(2, 501)
    (True, False, True)
    """

    def __init__(self, attempts: Sequence[Attempt]) -> None:
        self._last: dict[int, float] = {}
        end = float("inf")
        for attempt in sorted(attempts, reverse=True):
            self._last[attempt.number] = end
            end = min(end, attempt.start_step)

    def shows(self, attempt: int, step: int) -> bool:
        """Whether what `attempt` wrote at `step` counts: no later attempt has started before it."""
        last = self._last.get(attempt)
        return last is not None and step <= last
