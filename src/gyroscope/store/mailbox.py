"""A bounded queue between those who measure and the thread that writes, and the waiting for what is on the disk."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

#: Small things that may wait beside the others. A run logs few of them, and nobody could make them again.
SMALL = 65536


class Mail(NamedTuple):
    """What was waiting: `upto` is how many have been put since the beginning, with these."""

    items: Sequence[Any]
    upto: int
    closing: bool


class Mailbox:
    """Takes up to `limit` items, and beside them small ones; one thread empties it.

    >>> box = Mailbox(1)
    >>> box.put("a"), box.put("b"), box.put("c", small=True)
    (True, False, True)
    >>> list(box.take(timeout=0).items)
    ['a', 'c']
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: deque[Any] = deque()
        self._small = 0
        self._put = self._asked = self._done = 0
        self._closing = self._failed = False
        # Reentrant, because the handler of a signal may flush while its thread is in `put`.
        guard = threading.RLock()
        self._wake, self._progress = threading.Condition(guard), threading.Condition(guard)

    @property
    def open(self) -> bool:
        """Whether items are taken where there is room."""
        return not (self._closing or self._failed)

    def put(self, item: Any, *, small: bool = False) -> bool:
        """Leave an item, or False if there is no room or no more are taken; never waits."""
        with self._wake:
            large = len(self._items) - self._small
            if not self.open or (self._small >= SMALL if small else large >= self._limit):
                return False
            self._items.append(item)
            self._put += 1
            self._small += small
            if self._pressing():
                self._wake.notify()
        return True

    def take(self, timeout: float) -> Mail:
        """Everything that waits, after `timeout` seconds or as soon as it is half full, asked for, or closing."""
        with self._wake:
            if not self._pressing():
                self._wake.wait(timeout)
            items, self._items = self._items, deque()
            self._small = 0
            return Mail(items, self._put, self._closing)

    def done(self, upto: int) -> None:
        """Say that the first `upto` items have been dealt with."""
        with self._wake:
            self._done = upto
            self._progress.notify_all()

    def wait(self, timeout: float | None) -> bool:
        """Wait until everything that was put before is dealt with, or never will be; False if it took too long."""
        with self._wake:
            mine = self._put
            self._asked = max(self._asked, mine)
            self._wake.notify()
            return self._progress.wait_for(lambda: self._done >= mine or self._failed, timeout)

    def close(self) -> None:
        """Take no more."""
        with self._wake:
            self._closing = True
            self._wake.notify()

    def fail(self) -> None:
        """Take no more, drop what is there, and let those go who wait."""
        with self._wake:
            self._failed = True
            self._items.clear()
            self._small = 0
            self._progress.notify_all()

    def _pressing(self) -> bool:
        if self._failed:
            return self._closing
        half_full = 2 * (len(self._items) - self._small) >= self._limit or 2 * self._small >= SMALL
        return half_full or self._closing or self._asked > self._done
