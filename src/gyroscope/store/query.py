"""Queries to the file of a run, which may be finished, killed, or being written by another process.

`Query` opens the file and runs queries. `History` decides which of its rows count. `read_series` and `measured_steps`
read the rows of a quantity and check them.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from gyroscope.errors import StoreError
from gyroscope.store import lock, schema
from gyroscope.store.connect import FAILURES, connect, damaged, in_words
from gyroscope.store.database import checksum, unpack
from gyroscope.store.journal import META
from gyroscope.store.record import LayerInfo, Steps, Values

_FINISHED = "ro&immutable=1"
# A private copy: the folder for temporary files may have no file locks either.
_OWN = "rw&vfs=unix-none" if os.name == "posix" else "ro"
# In a folder that cannot be written, on a file system without file locks, or after a kill in the middle of a commit,
# which whoever opens the file to write undoes.
_NOT_ALLOWED = (
    "SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_READONLY_DIRECTORY", "SQLITE_READONLY_CANTINIT", "SQLITE_IOERR_LOCK",
    "SQLITE_READONLY_ROLLBACK",
)  # fmt: skip
#: Values of one quantity that are read at a time: 4 GB. A row of equal values is short, so a small file may hold more.
_MOST = 1 << 30
#: Steps that are fetched at a time; SQLite takes no more than 999 values with a query.
_PIECE = 500


class State(NamedTuple):
    """The process and the state of the run's files, which a connection depends on.

    Attributes:
        process: the process's number.
        finished: True if the run has neither a rollback journal nor anything in a write-ahead file.
        held: True if a writer holds the run's lock.
        file: which file it is and, of a finished run, its size and the time of its last change.
    """

    process: int
    finished: bool
    held: bool
    file: tuple[int, ...]


class Query:
    """Queries to a run's file. The file is opened at the first query, and again after a fork or after `close`.

    A finished run is opened as immutable: that leaves no files behind, and works in a folder that cannot be written.
    Any other run is opened under SQLite's locks.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._log, _, self._journal = schema.sidecars(file)
        self._connection: sqlite3.Connection | None = None
        self._opened: State | None = None
        self._locks = False  # of SQLite, which keep what is read from being changed meanwhile
        self._copy: TemporaryDirectory[str] | None = None
        self._lock = threading.RLock()

    def __call__(self, question: str, *given: Any) -> list[Any]:
        """Return all rows of the answer.

        Raises:
            StoreError: there is no run, or it cannot be read; the message names the file and says what to do.
        """
        with self._lock:
            try:
                while True:
                    try:
                        rows = self._open().execute(question, given).fetchall()
                    except FAILURES:
                        if self._opened == self._seen():
                            raise
                    else:
                        if self._locks or self._opened == self._seen():
                            return rows
                    # The run was resumed, or its writer killed, since it was opened or while it was read.
            except FAILURES as error:
                raise in_words(error, self.file) from error

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            if self._copy is not None:
                self._copy.cleanup()
                self._copy = None

    def __del__(self) -> None:
        self.close()

    def _open(self) -> sqlite3.Connection:
        seen = self._seen()
        if self._connection is not None and self._opened == seen:
            return self._connection
        self.close()
        self._opened, self._locks = seen, not seen.finished
        if seen.finished:
            self._connection = self._checked(self.file, _FINISHED)
            if not seen.held or not self._is_shared(self._connection):
                return self._connection
            self.close()
            self._locks = True
        try:
            self._connection = self._checked(self.file, "ro")
        except sqlite3.OperationalError as error:
            if getattr(error, "sqlite_errorname", "") not in _NOT_ALLOWED:
                raise
            # A killed run that SQLite can only read if it may write or lock files.
            self._copy, self._locks = TemporaryDirectory(), False
            for path in (self.file, self._log, self._journal):
                if path is self.file or path.exists():
                    shutil.copyfile(path, Path(self._copy.name) / path.name)
            self._connection = self._checked(Path(self._copy.name) / self.file.name, _OWN)
        return self._connection

    def _checked(self, file: Path, mode: str) -> sqlite3.Connection:
        connection = connect(file, mode)
        try:
            if mode == _OWN:
                connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # needs no shared memory
            schema.check(connection, self.file)
        except BaseException:
            connection.close()
            raise
        return connection

    def _is_shared(self, connection: sqlite3.Connection) -> bool:
        """Return True if the run was last written where machines share the file system.

        If a writer there has it now, its journal need not be seen here: machines may remember for a while which names a
        folder has. Locks are not remembered.
        """
        try:
            return bool(connection.execute("SELECT 1 FROM meta WHERE key = ?", (META,)).fetchall())
        except FAILURES:  # it is being changed
            return True

    def _seen(self) -> State:
        try:
            state = os.stat(self.file)
        except OSError:
            raise StoreError(_absent(self.file)) from None
        held = lock.is_held(self.file.parent)
        if self._journal.exists() or _size(self._log) > 0:
            return State(os.getpid(), False, held, (state.st_ino,))
        return State(os.getpid(), True, held, (state.st_ino, state.st_size, state.st_mtime_ns))


def _size(file: Path) -> int:
    try:
        return os.stat(file).st_size
    except OSError:
        return 0


def _absent(file: Path) -> str:
    folder = file.parent
    found = "there is no such folder" if not folder.exists() else f"there is no {file.name} in it"
    return (
        f"There is no run at {folder}: {found}. A run is a folder that gyroscope.watch has written; "
        "`gyroscope runs FOLDER` lists those within a folder."
    )


class Attempt(NamedTuple):
    """One stretch of writing, from `start_step` on.

    Times are in seconds since 1970; `ended` is None if the writer was not closed, or is still writing.
    """

    number: int
    start_step: int
    time: float
    ended: float | None


class History:
    """The rows of a run that are part of its history.

    A run that is resumed at step s starts an attempt there. Rows that earlier attempts wrote after step s do not count:
    they stay in the file, and are not shown.

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
        """Return True if a row of `attempt` at `step` counts: no later attempt has started before that step."""
        last = self._last.get(attempt)
        return last is not None and step <= last


def read_series(ask: Query, history: History, name: str, steps: Steps, layers: Sequence[LayerInfo]) -> Values:
    """Return a quantity at `steps`, which are in order, over all layers; NaN for unknown values.

    Raises:
        StoreError: a row is not the one that was written.
    """
    if len(steps) * len(layers) > _MOST:
        raise StoreError(
            f"At most {_MOST} values are read from {ask.file} at a time, got {len(steps)} steps of {len(layers)} "
            "layers. Read fewer steps: run.series(name, steps=run.steps[-1000:])."
        )
    parts = np.array([layer.part for layer in layers])
    columns = {part: np.flatnonzero(parts == part) for part in set(parts.tolist())}
    values = np.full((len(steps), len(layers)), np.nan, dtype=np.float32)
    # Data that is longer than a row can be is not read.
    what = f"crc, CASE WHEN length(data) <= {4 * len(layers)} THEN data END"
    places = {step: i for i, step in enumerate(steps.tolist())}
    for i in range(0, len(steps), _PIECE):
        piece = steps[i : i + _PIECE].tolist()
        among = f"step IN ({', '.join('?' * len(piece))})"
        for attempt, step, quantity, part, crc, data in _rows(ask, history, name, what, among, piece):
            try:
                if checksum(attempt, step, quantity, part, data) != crc:
                    raise ValueError("another checksum")
                values[places[step], columns[part]] = unpack(data, len(columns[part]))
            except (KeyError, TypeError, ValueError) as error:
                raise damaged(ask.file, f"the values of {name!r} at step {step} are not those written") from error
    return values


def measured_steps(ask: Query, history: History, name: str, steps: Steps) -> Steps:
    """Return those of `steps`, which are in order, at which a quantity is known for any layer."""
    known: dict[tuple[int, int], bool] = {}
    for _, step, _, part, length in _rows(ask, history, name, "length(data)", "TRUE"):
        if not isinstance(length, int):
            raise damaged(ask.file, f"the values of {name!r} at step {step} are not those written")
        known[step, part] = length > 0
    found = np.unique(np.array([step for (step, _), any_known in known.items() if any_known], dtype=np.int64))
    return found[np.isin(found, steps)]


def _rows(
    ask: Query, history: History, name: str, what: str, among: str, given: Sequence[int] = ()
) -> Iterator[tuple[Any, ...]]:
    """Yield key and `what` of the rows that count; among those for one step, the latest attempt comes last."""
    question = (
        f"SELECT attempt, step, quantity, part, {what} FROM series WHERE quantity = "
        f"(SELECT id FROM quantities WHERE name = ?) AND {among} ORDER BY step, part, attempt"
    )
    for row in ask(question, name, *given):
        if history.shows(row[0], row[1]):
            yield row
