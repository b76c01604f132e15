"""Connections to the file of a run, and messages for their failures."""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path

from gyroscope.errors import StoreError

#: Seconds to wait for another program that has locked the database, such as a viewer.
PATIENCE = 30.0
_SALVAGE = "Restore it from a copy, or salvage what is still readable with: sqlite3 {file} .recover"

#: Exceptions of a failing file. A message that quotes from a damaged file may not be text.
FAILURES = (sqlite3.Error, OSError, UnicodeDecodeError)


def connect(file: Path, mode: str) -> sqlite3.Connection:
    """Open `file`; `mode` is "ro", "rw", "rwc" or "ro&immutable=1" (for a file that nobody is writing).

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "what? 100 %.sqlite"
    ...     connect(file, "rwc").close()
    ...     file.exists()
    True
    """
    # As a URI, in which a ? or % of the path is quoted. Never open the file by other means: when a process closes any
    # handle to a file, it loses all locks it has on it, including SQLite's.
    uri = f"{file.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=PATIENCE)


def in_words(error: BaseException, file: Path) -> StoreError:
    """Return the error with a message that names the file and says what to do.

    >>> print(in_words(PermissionError(13, "Permission denied"), Path("run.sqlite")))
    run.sqlite cannot be written or read: Permission denied. Check the permissions of the folder, or use another.
    """
    name = getattr(error, "sqlite_errorname", "")
    said = str(error.strerror or error) if isinstance(error, OSError) else str(error)
    if name == "SQLITE_NOTADB":
        text = f"{file} is not a run: it is not an SQLite database, or its beginning is damaged. Use another folder."
    elif name.startswith(("SQLITE_CORRUPT", "SQLITE_IOERR_SHORT_READ")) or "decode" in said:  # the latter: cut off
        text = f"{file} is damaged: {said}. {_SALVAGE.format(file=file)}"
    elif name == "SQLITE_FULL" or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        text = f"{file} cannot be written: the disk is full. Free some space and resume the run."
    elif name.startswith(("SQLITE_IOERR", "SQLITE_PROTOCOL")):
        text = f"{file} cannot be written or read: {said}. Check the disk (full? removed?), then resume the run."
    elif name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        text = f"{file} has been locked by another program for {PATIENCE:.0f} s. Close it there, then resume the run."
    elif isinstance(error, OSError) or name.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PERM")):
        text = f"{file} cannot be written or read: {said}. Check the permissions of the folder, or use another."
    else:
        text = f"{file} cannot be written or read: {type(error).__name__}: {said}"
    return StoreError(text)


def damaged(file: Path, what: str) -> StoreError:
    """Return the error for a file whose content is not what was written."""
    return StoreError(f"{file} is damaged: {what}. {_SALVAGE.format(file=file)}")
