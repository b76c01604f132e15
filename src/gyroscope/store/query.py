"""Questions to the file of a run that may be finished, killed, or being written by another process just now."""

from __future__ import annotations

import os
import shutil
import sqlite3
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gyroscope.errors import StoreError
from gyroscope.store import schema
from gyroscope.store.connect import FAILURES, connect, in_words

_FINISHED = "ro&immutable=1"
# A copy that nobody else knows of: the folder for temporary files may have no file locks either.
_OWN = "rw&vfs=unix-none" if os.name == "posix" else "ro"
# In a folder that cannot be written, or on a file system without file locks.
_NOT_ALLOWED = (
    "SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_READONLY_DIRECTORY", "SQLITE_READONLY_CANTINIT", "SQLITE_IOERR_LOCK",
)  # fmt: skip


class Query:
    """Asks a run's file. The file is opened when it is asked, and again after a fork or after `close`.

    A finished run has an empty write-ahead file or none, and is opened as one that does not change: that leaves no
    files behind, and works in a folder that cannot be written. Any other is opened under SQLite's locks.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._connection: sqlite3.Connection | None = None
        self._opened: tuple[Any, ...] = ()
        self._copy: TemporaryDirectory[str] | None = None
        self._lock = threading.RLock()

    def __call__(self, question: str, *given: Any) -> list[Any]:
        """All rows of the answer.

        Raises:
            StoreError: there is no run there, or it cannot be read; says which file and what to do.
        """
        with self._lock:
            try:
                try:
                    return self._open().execute(question, given).fetchall()
                except FAILURES:
                    # Resumed since it was opened, or while it was read.
                    if self._opened == self._seen():
                        raise
                    return self._open().execute(question, given).fetchall()
            except FAILURES as error:
                raise in_words(error, self.file) from error

    def close(self) -> None:
        """Let go of the file."""
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
        self._opened = seen
        try:
            self._connection = self._checked(self.file, seen[1])
        except sqlite3.OperationalError as error:
            if seen[1] == _FINISHED or getattr(error, "sqlite_errorname", "") not in _NOT_ALLOWED:
                raise
            # A killed run where SQLite cannot write or lock files, which it needs to see the last steps.
            self._copy = TemporaryDirectory()
            for name in (self.file.name, f"{self.file.name}-wal"):
                shutil.copyfile(self.file.with_name(name), Path(self._copy.name) / name)
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

    def _seen(self) -> tuple[Any, ...]:
        """What must be as it was for the connection to be good: the process, how to open the file, and its state."""
        try:
            state = os.stat(self.file)
        except OSError:
            raise StoreError(_absent(self.file)) from None
        try:
            unfinished = os.stat(f"{self.file}-wal").st_size > 0
        except OSError:
            unfinished = False
        if unfinished:
            return os.getpid(), "ro", state.st_ino
        return os.getpid(), _FINISHED, state.st_ino, state.st_size, state.st_mtime_ns


def _absent(file: Path) -> str:
    folder = file.parent
    found = "there is no such folder" if not folder.exists() else f"there is no {file.name} in it"
    return (
        f"There is no run at {folder}: {found}. A run is a folder that gyroscope.watch has written; "
        "`gyroscope runs FOLDER` lists those within a folder."
    )
