"""Writing a run from its own thread, so that training never waits for the disk.

`Writer` is the public class. `Mailbox` is the bounded queue between the threads that measure and the thread that
writes. `Scribe` does the work of that thread: it resolves records, commits them and mirrors them to the sinks.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import nan
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn
from weakref import WeakSet

import numpy as np

from gyroscope.errors import StoreError
from gyroscope.store.arguments import check_quantities, check_run, path_of, step_of
from gyroscope.store.connect import FAILURES, in_words
from gyroscope.store.database import Batch, Database
from gyroscope.store.folder import open_run, run_file
from gyroscope.store.lock import Lock
from gyroscope.store.reader import Run
from gyroscope.store.record import Deferred, Event, LayerInfo, QuantityInfo, Record, Rows, Scalars, Sink, Values

_LOG = logging.getLogger("gyroscope")
#: Small items that may wait in addition to the others. A run logs few of them, and they cannot be recovered.
SMALL = 65536


class Writer:
    """Writes a run. A new folder is a new run; an existing run is resumed at `step`, as a new attempt.

    Args:
        path: the run's folder.
        layers: its layers, in forward order; an existing run must have the same.
        quantities: descriptions of the series, by name.
        meta: anything about the run that JSON can hold; on resuming, it is merged with the existing metadata.
        step: the step that this attempt starts from. Rows that earlier attempts wrote after it are no longer shown.
        sinks: places that the run is mirrored to.
        queue: number of records, not counting scalars and events, that may wait to be written.
        on_tick: called from the writer's thread each time it wakes.
        tick: the longest time between two wakes of the thread, in seconds.
        lock: the lock on the run, if `folder.reserve` has taken it before.

    Attributes:
        path: the run's folder.
        attempt: the number of this attempt, from 1.
        error: the error that made writing fail, or None. It is logged once, and `put` returns False from then on.
        busy_seconds: CPU seconds that the thread has used.

    Raises:
        StoreError: the folder cannot be written, holds other files, or holds a run of other layers, from a newer
            Gyroscope, or that is being written by another writer. Nothing was changed.

    >>> import tempfile, numpy as np, gyroscope.store as store
    >>> layers = [store.LayerInfo("conv", "conv", (8, 3, 3, 3)), store.LayerInfo("head", "linear", (10, 8))]
    >>> about = {"rotation": store.QuantityInfo("rotation", "1", "cosine distance to initialization")}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Writer(f"{folder}/first", layers, about) as writer:
    ...         writer.put(store.Rows(0, np.array([0, 1]), {"rotation": np.array([[0, 0], [0.25, 0.5]])}))
    ...         writer.put(store.Scalars(1, {"loss": 2.3}))
    ...     store.load(f"{folder}/first").series("rotation")
    True
    True
    array([[0.  , 0.  ],
           [0.25, 0.5 ]], dtype=float32)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        layers: Sequence[LayerInfo],
        quantities: Mapping[str, QuantityInfo],
        *,
        meta: Mapping[str, Any] = MappingProxyType({}),
        step: int = 0,
        sinks: Sequence[Sink] = (),
        queue: int = 256,
        on_tick: Callable[[], None] | None = None,
        tick: float = 0.25,
        lock: Lock | None = None,
    ) -> None:
        self.path = path_of(path).absolute()
        self.error: StoreError | None = None
        self.busy_seconds = 0.0
        check_run(layers, quantities, meta, queue, tick)
        step = step_of(step)
        self._lock, database = open_run(self.path, layers, lock)
        try:
            database.begin(step, quantities, meta)
        except BaseException as error:
            database.close(ended=False, failed=True)
            self._lock.release()
            if isinstance(error, FAILURES):
                raise in_words(error, run_file(self.path)) from error
            raise
        self.attempt = database.attempt
        self._file = run_file(self.path)
        self._identity = _identity(self._file)
        self._scribe = Scribe(database, step, sinks, (tuple(layers), dict(quantities), dict(meta)))
        if self.attempt > 1:
            self._scribe.latest = _earlier(self.path)
        self._on_tick, self._tick = on_tick, tick
        self._mail = Mailbox(queue)
        database.waits = lambda: self._mail.open
        self._inherited = False  # by a forked child
        self._interrupted = False
        # A daemon, because Python waits for other threads before it calls what is registered with atexit.
        self._thread = threading.Thread(target=self._work, name=f"gyroscope writer {self.path.name}", daemon=True)
        atexit.register(self._at_exit)
        _writers.add(self)
        self._thread.start()

    def put(self, record: Record | Deferred) -> bool:
        """Queue a record without waiting; return False if the queue is full or writing has ended."""
        small = isinstance(record, Scalars | Event) or (isinstance(record, Deferred) and record.small)
        return not self._inherited and self._mail.put(record, small=small)

    @property
    def open(self) -> bool:
        """True if records are accepted as long as the queue is not full."""
        return not self._inherited and self._mail.open

    @property
    def latest(self) -> Latest:
        """The newest of what is on disk, in a few numbers; reading it does not wait."""
        return self._scribe.latest

    def add_quantities(self, quantities: Mapping[str, QuantityInfo]) -> None:
        """Register more quantities, for records that are put from now on."""
        check_quantities(quantities)
        if not self._inherited:
            self._mail.put(dict(quantities), small=True)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything that was put before is on the disk.

        Raises:
            StoreError: writing has failed or took longer than `timeout` seconds, or records that were put since the
                last flush could not be computed or do not belong to this run.
        """
        if self._inherited:
            raise StoreError(f"{self.path} is written by the process that opened it, not by its forked children.")
        if threading.current_thread() is self._thread:
            raise StoreError("flush() was called from the writer's own thread, which cannot wait for itself.")
        in_time = self._mail.wait(timeout)
        if self.error is not None:
            raise StoreError(str(self.error)) from self.error
        if (gone := self._gone()) is not None:
            raise StoreError(gone)
        if not in_time:
            raise StoreError(f"{self.path} was not written within {timeout} s; the writer keeps trying.")
        if (why := self._scribe.missing()) is not None:
            raise StoreError(
                f"{self.path} lacks records that were put since the last flush: {why}. All others are on disk."
            )

    def close(self, *, interrupted: bool = False) -> None:
        """Write the remaining records, move everything into one file, and end. Called at the end of the program.

        Args:
            interrupted: True if the training did not come to its end; the run is then "interrupted".
        """
        if self._inherited:
            return
        self._interrupted = interrupted
        self.finish()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def finish(self) -> None:
        """Accept no more records, and let the thread write the rest and end, without waiting for it."""
        if not self._inherited:
            self._mail.close()

    def _at_exit(self) -> None:
        self.close(interrupted=hasattr(sys, "last_value"))  # where an exception has ended the program

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(interrupted=kind is not None)

    def __repr__(self) -> str:
        return f"Writer({str(self.path)!r}, attempt={self.attempt})"

    def __reduce__(self) -> NoReturn:
        raise StoreError(
            "A Writer cannot be copied or pickled: it owns a thread and an open file. Exclude it from what is copied "
            "or sent to another process."
        )

    def _work(self) -> None:
        """Run the thread: write the queued items until closing."""
        try:
            self._attempted(self._scribe.open)
            closing = False
            while not closing:
                items, upto, closing = self._mail.take(self._tick)
                if self.error is None:
                    self._attempted(self._scribe.write, items, partial(self._mail.done, upto))
                items.clear()  # where writing failed
                if self._on_tick is not None:
                    self._scribe.attempted(self._on_tick, of="on_tick")
                self.busy_seconds = time.thread_time()
            self._attempted(self._scribe.close, self.error is not None, self._interrupted)
            if self.error is None and (gone := self._gone()) is not None:
                self.error = StoreError(gone)
                _LOG.error("%s", gone)
        except BaseException as error:  # for example of `on_tick`
            self._failed(error)
            self._attempted(self._scribe.close, True, True)
        finally:
            self._lock.release()
            atexit.unregister(self._at_exit)  # not before: the program's end waits for this
            self.busy_seconds = time.thread_time()

    def _gone(self) -> str | None:
        """Return what happened to the file if it is no longer the one being written; None if it is."""
        if self._identity == (now := _identity(self._file)):
            return None
        what = "removed" if now is None else "replaced by another file"
        return (
            f"{self._file} was {what} while it was written, and the records are lost. Close the monitor and "
            "start a new run."
        )

    def _attempted(self, act: Callable[..., None], *given: Any) -> None:
        try:
            act(*given)
        except BaseException as error:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        """Record the error, whatever it is, and wake those who wait in flush()."""
        if self.error is None:
            gone = self._gone()
            self.error = in_words(error, self._file) if gone is None else StoreError(gone)
            _LOG.error("Recording has stopped, training continues: %s", self.error)
        self._mail.fail()


def _identity(file: Path) -> tuple[int, int] | None:
    """Return the identity of the file that has this name now; the number of an open file is not reused."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _earlier(path: Path) -> Latest:
    """Return what earlier attempts have recorded, as far as it is still shown."""
    with suppress(StoreError), Run(path) as run:  # a run whose events are damaged can still be resumed
        return Latest(events=Counter(event.kind for event in run.events))
    return Latest()


_writers: WeakSet[Writer] = WeakSet()


def _disown() -> None:
    """Disable writers in a forked child: the threads are gone, and the files and locks belong to the parent."""
    for writer in _writers:
        writer._inherited = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown)


About = tuple[Sequence[LayerInfo], Mapping[str, QuantityInfo], Mapping[str, Any]]


@dataclass(frozen=True)
class Latest:
    """The newest of what a run holds.

    Attributes:
        scalars: the last value of every logged number.
        rows: the last values of the layers of a part, by part and quantity.
        events: the number of events of each kind.
    """

    scalars: Mapping[str, float] = field(default_factory=dict)
    rows: Mapping[tuple[int, str], Values] = field(default_factory=dict)
    events: Mapping[str, int] = field(default_factory=dict)

    def after(self, records: Iterable[Record]) -> Latest:
        """Return what is the newest after these records.

        >>> then = Latest().after([Scalars(1, {"loss": 2.0}), Rows(0, np.array([1]), {"rate": np.array([[1, 3]])})])
        >>> then.scalars, then.mean("rate")
        ({'loss': 2.0}, 2.0)
        """
        scalars, rows, events = dict(self.scalars), dict(self.rows), Counter(self.events)
        for record in records:
            if isinstance(record, Scalars):
                scalars |= {str(name): float(value) for name, value in record.values.items()}
            elif isinstance(record, Event):
                events[record.kind] += 1
            elif len(record.steps):
                rows |= {(record.part, name): np.array(values[-1]) for name, values in record.values.items()}
        return Latest(scalars, rows, events)

    def mean(self, quantity: str) -> float:
        """Return the mean of a quantity over the layers for which it is known; NaN if there are none."""
        known = [values[np.isfinite(values)] for (_, name), values in self.rows.items() if name == quantity]
        found = np.concatenate(known) if known else np.empty(0)
        return float(found.mean()) if len(found) else nan


class Scribe:
    """Writes to a database and to sinks. Errors of the database are raised; those of sinks and callbacks are logged."""

    def __init__(self, database: Database, step: int, sinks: Sequence[Sink], about: About) -> None:
        self._database = database
        self._sinks = list(sinks)
        self._about = about
        self._last_step = step
        self.latest = Latest()
        self._reported: set[str] = set()
        self._missing: deque[str] = deque()  # why records are not in the run, until it is reported
        self._notes: list[Event] = []

    def open(self) -> None:
        """Open the sinks; drop those that fail."""
        self._sinks = [s for s in self._sinks if self.attempted(lambda s=s: s.open(*self._about), of=s)]

    def write(self, items: deque[Any], committed: Callable[[], None]) -> None:
        """Write records, deferred records and quantities (as dicts), and call `committed` when they are on the disk.

        The items are released before `committed` is called. They may hold page-locked memory, and torch marks such
        memory with an event of its stream when it is freed: whoever flushes before capturing a CUDA graph must not
        find that event in the graph.
        """
        records = self._commit(self._resolved(items))
        items.clear()
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
        """Return why records given since the last call are not in the run; None if all are."""
        why = self._missing.popleft() if self._missing else None
        while self._missing:
            self._missing.popleft()
        return why

    def attempted(self, act: Callable[..., Any], *given: Any, of: object, loses: bool = False) -> bool:
        """Call a sink or a callback. A failure is reported once, in the log and in the run, and stops nothing.

        Args:
            act: the function to call.
            *given: its arguments.
            of: the object to name if it fails.
            loses: True if the run then lacks records, which `missing` reports.
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
                _LOG.warning("%s: %s (reported once; recording continues)", self._database.file.parent, text)
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
            self.latest = self.latest.after([*kept, *notes])
        return [*kept, *notes]


def _last_step(record: Record) -> int:
    if isinstance(record, Rows):
        return max(map(int, record.steps), default=0)
    return int(record.step)


class Mail(NamedTuple):
    """The items that were waiting; `upto` counts all items put since the beginning, including these."""

    items: deque[Any]
    upto: int
    closing: bool


class Mailbox:
    """A queue of up to `limit` items, plus small ones; one thread empties it.

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
        """True if items are accepted as long as the queue is not full."""
        return not (self._closing or self._failed)

    def put(self, item: Any, *, small: bool = False) -> bool:
        """Add an item without waiting; return False if the queue is full or closed."""
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
        """Return all waiting items, after `timeout` seconds or once the queue is half full, flushed or closing."""
        with self._wake:
            if not self._pressing():
                self._wake.wait(timeout)
            items, self._items = self._items, deque()
            self._small = 0
            return Mail(items, self._put, self._closing)

    def done(self, upto: int) -> None:
        """Record that the first `upto` items have been handled."""
        with self._wake:
            self._done = upto
            self._progress.notify_all()

    def wait(self, timeout: float | None) -> bool:
        """Wait until everything put before has been handled, or never will be; return False if it took too long."""
        with self._wake:
            mine = self._put
            self._asked = max(self._asked, mine)
            self._wake.notify()
            return self._progress.wait_for(lambda: self._done >= mine or self._failed, timeout)

    def close(self) -> None:
        """Accept no more items."""
        with self._wake:
            self._closing = True
            self._wake.notify()

    def fail(self) -> None:
        """Accept no more items, drop the waiting ones, and wake those who wait."""
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
