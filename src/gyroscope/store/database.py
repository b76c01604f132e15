"""The rows of a run's file: numbers as bytes, taken up by an attempt and added to in batches."""

from __future__ import annotations

import json
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from gyroscope.errors import StoreError
from gyroscope.store import journal, schema
from gyroscope.store.arguments import step_of
from gyroscope.store.connect import PATIENCE, connect
from gyroscope.store.record import Event, LayerInfo, QuantityInfo, Record, Rows, Scalars, Values

_LOG = logging.getLogger("gyroscope")
_SERIES = "INSERT OR REPLACE INTO series (attempt, step, quantity, part, crc, data) VALUES (?, ?, ?, ?, ?, ?)"
_SCALARS = "INSERT OR REPLACE INTO scalars (attempt, step, name, value) VALUES (?, ?, ?, ?)"
_EVENTS = "INSERT INTO events (attempt, step, time, kind, text) VALUES (?, ?, ?, ?, ?)"
_UNKNOWN = np.full(1, np.nan, dtype=np.float32)


@dataclass
class Batch:
    """Rows of the tables, to be written together."""

    series: list[tuple[Any, ...]] = field(default_factory=list)
    scalars: list[tuple[Any, ...]] = field(default_factory=list)
    events: list[tuple[Any, ...]] = field(default_factory=list)


class Database:
    """A run's file, open for one attempt. Used by one thread at a time.

    Attributes:
        file: the file.
        attempt: the number of the attempt, from 1; 0 before it has begun.
        waits: called when readers have kept a transaction from being committed for as long as a connection waits; True
            keeps trying. Only a rollback journal has such readers.

    Raises:
        StoreError: the file is not a run, or the run has other layers; nothing was changed.
    """

    def __init__(self, file: Path, layers: Sequence[LayerInfo], its_journal: journal.Journal) -> None:
        self.file = file
        self.attempt = 0
        self.waits: Callable[[], bool] = lambda: False
        self._journal = its_journal
        self._connection = connect(file, "rw")
        self._said = False
        self._ids: dict[str, int] = {}
        self._widths = Counter(layer.part for layer in layers)
        try:
            journal.prepare(self._connection, self._journal.kind)
            schema.check(self._connection, file)
            _same(schema.layers_from(self._connection.execute(schema.LAYERS), file), layers, file)
            journal.adopt(self._connection, self._journal.kind, file)
        except BaseException:
            self._connection.close()
            raise

    def begin(self, step: int, quantities: Mapping[str, QuantityInfo], meta: Mapping[str, Any]) -> None:
        """Start an attempt at `step`."""
        with self._transaction() as change:
            (last,) = change.execute("SELECT coalesce(max(attempt), 0) FROM attempts").fetchone()
            change.execute("INSERT INTO attempts VALUES (?, ?, ?, NULL)", (last + 1, step, time.time()))
            change.execute("DELETE FROM meta WHERE key = ?", (journal.META,))  # of a run that was moved
            told = {journal.META: self._journal._asdict()} if self._journal.kind == "rollback" else {}
            pairs = ((key, json.dumps(value, allow_nan=False)) for key, value in {**meta, **told}.items())
            change.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", pairs)
            self._register(quantities)
        self.attempt = last + 1

    def add(self, record: Record, to: Batch) -> None:
        """Add a record to a batch.

        Raises:
            StoreError: it does not belong to this run; the batch is unchanged.
        """
        match record:
            case Rows():
                to.series += list(self._rows(record))
            case Scalars():
                step = step_of(record.step)
                to.scalars += [(self.attempt, step, _text(k), float(v)) for k, v in record.values.items()]
            case Event():
                when = (self.attempt, step_of(record.step), float(record.time))
                to.events.append((*when, _text(record.kind), _text(record.text)))
            case _:
                raise StoreError(f"A record must be Rows, Scalars or an Event, got {type(record).__name__}.")

    def commit(self, batch: Batch) -> None:
        """Write all of a batch or nothing; it is on the disk when this returns."""
        with self._transaction() as change:
            # The rows of a quantity are adjacent on the disk, because they are read together.
            change.executemany(_SERIES, sorted(batch.series, key=itemgetter(2)))
            change.executemany(_SCALARS, batch.scalars)
            change.executemany(_EVENTS, batch.events)

    def register(self, quantities: Mapping[str, QuantityInfo]) -> None:
        """Register quantities, so that their rows can be written."""
        with self._transaction():
            self._register(quantities)

    def close(self, *, ended: bool, failed: bool = False) -> None:
        """Move everything into one file, unless writing has `failed`; `ended` records that the run came to its end."""
        try:
            if ended and not failed:
                now = (time.time(), self.attempt)
                self._connection.execute("UPDATE attempts SET ended = ? WHERE attempt = ?", now)
            if not failed:
                journal.merge(self._connection, self._journal.kind)
        finally:
            self._connection.close()

    def _transaction(self) -> _Transaction:
        return _Transaction(self._connection, self._keeps_trying)

    def _keeps_trying(self) -> bool:
        if not self.waits():
            return False
        if not self._said:
            self._said = True
            _LOG.warning(
                "%s has been read without a pause for %.0f s. Records wait until that reader is done; training "
                "continues (reported once).", self.file, PATIENCE,
            )  # fmt: skip
        return True

    def _register(self, quantities: Mapping[str, QuantityInfo]) -> None:
        for name, about in quantities.items():
            given = (name, about.unit, about.meaning)
            self._connection.execute(
                "INSERT INTO quantities (name, unit, meaning) VALUES (?, ?, ?) "
                "ON CONFLICT (name) DO UPDATE SET unit = excluded.unit, meaning = excluded.meaning",
                given,
            )
        self._ids = dict(self._connection.execute("SELECT name, id FROM quantities"))

    def _rows(self, record: Rows) -> Iterable[tuple[Any, ...]]:
        if record.part not in self._widths:
            raise StoreError(f"`part` must be one of the run's parts {sorted(self._widths)}, got {record.part}.")
        steps = _steps(record.steps)
        shape = (len(steps), self._widths[record.part])
        for name, given in record.values.items():
            values = np.asarray(given, dtype=np.float32)
            if name not in self._ids:
                raise StoreError(f"The quantity {name!r} is not registered. Call add_quantities first.")
            if values.shape != shape:
                raise StoreError(
                    f"Values of {name!r} must have shape {shape} ({shape[0]} steps, {shape[1]} layers of part "
                    f"{record.part}), got {values.shape}."
                )
            for step, data in zip(steps, pack(values), strict=True):
                key = (self.attempt, step, self._ids[name], record.part)
                yield *key, checksum(*key, data), data


class _Transaction:
    """A transaction: all of the changes made within, or none. `keeps_trying` says whether to wait on for readers."""

    def __init__(self, connection: sqlite3.Connection, keeps_trying: Callable[[], bool]) -> None:
        self._connection, self._keeps_trying = connection, keeps_trying

    def __enter__(self) -> sqlite3.Connection:
        self._connection.execute("BEGIN IMMEDIATE")
        return self._connection

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._commit()
        elif self._connection.in_transaction:  # some failures, such as a full disk, have rolled back already
            self._connection.execute("ROLLBACK")

    def _commit(self) -> None:
        while True:
            try:
                self._connection.execute("COMMIT")
                return
            except sqlite3.OperationalError as error:
                # The transaction is still there, and can be committed once the readers are done.
                if error.sqlite_errorname != "SQLITE_BUSY" or not self._keeps_trying():
                    raise


def _same(there: Sequence[LayerInfo], given: Sequence[LayerInfo], file: Path) -> None:
    for i, (old, new) in enumerate(zip(there, given, strict=False)):
        if old != new:
            raise StoreError(
                f"{file} is a run of other layers: its layer {i} is {_described(old)}, got {_described(new)}. Resume "
                "it with the model it was started with, or use another folder."
            )
    if len(there) != len(given):
        raise StoreError(
            f"{file} is a run of {len(there)} layers, got {len(given)}, the first of which are the same. Resume it "
            "with the model it was started with, or use another folder."
        )


def _text(given: Any) -> str:
    return str(given).encode(errors="backslashreplace").decode()  # SQLite rejects half a surrogate pair


def _described(layer: LayerInfo) -> str:
    return f"{layer.name!r} ({layer.kind}, {layer.shape}, part {layer.part})"


def _steps(given: Any) -> list[int]:
    """Return steps as numbers. Each is checked, unless they are an array of 64-bit integers."""
    if isinstance(given, np.ndarray) and given.dtype == np.int64 and given.ndim == 1:
        return list(map(int, given))
    return [step_of(step) for step in given]


def pack(values: Values) -> Iterator[bytes]:
    """Yield the bytes of each row of `values` `[steps, layers]`.

    A row is float32, little-endian, one number per layer. Two common cases are shorter: a row in which nothing is known
    (all NaN) has no bytes, and a row of equal numbers (a learning rate) has one number.

    >>> rows = np.array([[1.0, 2.0], [0.5, 0.5], [np.nan, np.nan]], dtype=np.float32)
    >>> [len(data) for data in pack(rows)]
    [8, 4, 0]
    """
    values = np.ascontiguousarray(values, dtype="<f4")
    unknown = np.all(np.isnan(values), axis=1)
    # Compared as bits, so that -0.0 stays -0.0.
    bits = values.view("<u4")
    equal = np.all(bits == bits[:, :1], axis=1)
    for i, row in enumerate(values):
        yield b"" if unknown[i] else row[:1].tobytes() if equal[i] else row.tobytes()


def checksum(attempt: int, step: int, quantity: int, part: int, data: bytes) -> int:
    """Return a number that shows whether a row is the one that was written, at the place where it was written.

    >>> checksum(1, 5, 1, 0, b"") == checksum(1, 6, 1, 0, b"")
    False
    """
    return crc32(data, crc32(b"%d %d %d %d" % (attempt, step, quantity, part)))


def unpack(data: bytes, layers: int) -> Values:
    """Return the row that `pack` made, as `[layers]` or, where all are equal, `[1]`.

    >>> [data] = pack(np.array([[1.0, 2.0]], dtype=np.float32))
    >>> unpack(data, 2)
    array([1., 2.], dtype=float32)
    """
    if len(data) not in (0, 4, 4 * layers):
        raise ValueError(f"{len(data)} bytes for {layers} layers")
    return np.frombuffer(data, dtype="<f4") if data else _UNKNOWN
