"""What the writer's thread does with what it is given: works it out, writes it down, and mirrors it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gyroscope.store.database import Batch, Database
from gyroscope.store.reader import Run
from gyroscope.store.record import Deferred, Event, LayerInfo, QuantityInfo, Record, Rows, Sink

LOG = logging.getLogger("gyroscope")

About = tuple[Sequence[LayerInfo], Mapping[str, QuantityInfo], Mapping[str, Any]]


class Scribe:
    """Writes to a database and to sinks. What others provide may fail; only the database's errors are raised."""

    def __init__(self, database: Database, step: int, sinks: Sequence[Sink], about: About) -> None:
        self._database = database
        self._sinks = list(sinks)
        self._about = about
        self._last_step = step
        self._reported: set[str] = set()
        self._missing: deque[str] = deque()  # why records are not in the run, until somebody hears of it
        self._notes: list[Event] = []

    def open(self) -> None:
        """Open the sinks; one that does not open is left out."""
        self._sinks = [s for s in self._sinks if self.attempted(lambda s=s: s.open(*self._about), of=s)]

    def write(self, items: Sequence[Any], committed: Callable[[], None]) -> None:
        """Write records, deferred records and quantities (as dicts), and call `committed` when they are on the disk."""
        records = self._commit(self._resolved(items))
        committed()
        for sink in self._sinks:
            for record in records:
                self.attempted(sink.write, record, of=sink)

    def close(self, failed: bool, interrupted: bool) -> None:
        """Close the sinks and the database."""
        try:
            if self._sinks:
                self.attempted(self._close_sinks, of="reading the run")
            if self._notes and not failed:
                self._commit(iter(()))
        finally:
            self._database.close(ended=not interrupted, failed=failed)

    def missing(self) -> str | None:
        """Why records that were given since this was last asked are not in the run; None if all are."""
        why = self._missing.popleft() if self._missing else None
        while self._missing:
            self._missing.popleft()
        return why

    def attempted(self, act: Callable[..., Any], *given: Any, of: object, loses: bool = False) -> bool:
        """Call what others have provided. A failure is told once, in the log and in the run, and stops nothing.

        Args:
            act: what to call.
            *given: its arguments.
            of: what failed, if it does.
            loses: whether the run then lacks records, which `missing` tells.
        """
        try:
            act(*given)
        except Exception as error:
            name = of if isinstance(of, str) else getattr(of, "__qualname__", type(of).__qualname__)
            text = f"{name} failed: {type(error).__name__}: {error}"
            if loses:
                self._missing.append(text)
            if name not in self._reported:
                self._reported.add(name)
                self._notes.append(Event(self._last_step, "error", text))
                LOG.warning("%s: %s (told once; recording goes on)", self._database.file.parent, text)
            return False
        return True

    def _close_sinks(self) -> None:
        with Run(self._database.file.parent) as run:
            for sink in self._sinks:
                self.attempted(sink.close, run, of=sink)

    def _resolved(self, items: Sequence[Any]) -> Iterator[Record]:
        deferred: dict[Any, list[Any]] = {}
        for item in items:
            if isinstance(item, Deferred):
                deferred.setdefault(item.resolve, []).append(item.payload)
            elif isinstance(item, dict):
                self._database.register(item)
            else:
                yield item
        for resolve, payloads in deferred.items():
            found: list[Record] = []
            self.attempted(lambda r=resolve, p=payloads, to=found: to.extend(r(p)), of=resolve, loses=True)
            yield from found

    def _commit(self, records: Iterator[Record]) -> list[Record]:
        """Write the records, and return those that were written."""
        batch = Batch()
        kept: list[Record] = []
        for record in records:
            if self.attempted(self._database.add, record, batch, of=type(record).__name__, loses=True):
                kept.append(record)
                self._last_step = max(self._last_step, _last_step(record))
        notes, self._notes = self._notes, []
        for note in notes:
            self._database.add(note, batch)
        if kept or notes:
            self._database.commit(batch)
        return [*kept, *notes]


def _last_step(record: Record) -> int:
    if isinstance(record, Rows):
        return max(map(int, record.steps), default=0)
    return int(record.step)
