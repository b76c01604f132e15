"""The folder of a run: what it may hold, and how a new one is created."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryFile

from gyroscope.errors import StoreError
from gyroscope.store import journal, schema
from gyroscope.store.connect import FAILURES, connect, in_words
from gyroscope.store.database import Database
from gyroscope.store.lock import FILE as LOCK_FILE
from gyroscope.store.lock import Lock
from gyroscope.store.record import LayerInfo

#: The file that asks the job that writes a run to look at its next steps in detail. It may hold the number of steps.
REQUEST = "sample"
#: Free bytes on the disk that resuming a run needs: SQLite's own files take 32 KB before the first row.
_SPACE = 1 << 20


def is_file(path: Path) -> bool:
    """Return True if the file exists; False also for a name that no file can have.

    >>> is_file(Path("x" * 10_000))
    False
    """
    try:
        return path.is_file()
    except OSError:
        return False


def is_dir(path: Path) -> bool:
    """Return True if the folder exists; False also for a name that no folder can have."""
    try:
        return path.is_dir()
    except OSError:
        return False


def run_file(folder: Path) -> Path:
    """Return the file of the run in `folder`.

    >>> run_file(Path("runs/first")).name
    'run.sqlite'
    """
    return folder / schema.FILE


def reserve(folder: Path) -> Lock:
    """Lock the run in `folder` for a writer that is opened later, and check that it can be written.

    Raises:
        StoreError: another writer has locked it, it cannot be written, or the disk is full.
    """
    file = run_file(folder)
    try:
        held = Lock(folder)
        try:
            _check_space(folder)
            with closing(connect(file, "rw")) as connection:
                journal.prepare(connection, journal.journal_for(folder).kind)
                connection.execute("BEGIN IMMEDIATE")  # fails if the file is read-only or locked
                connection.execute("ROLLBACK")
            return held
        except BaseException:
            held.release()
            raise
    except FAILURES as error:
        raise in_words(error, file) from error


def _check_space(folder: Path) -> None:
    """Raise the disk's error if there is not enough space, by taking some and releasing it."""
    with TemporaryFile(dir=folder) as probe:
        probe.write(bytes(_SPACE))
        probe.flush()
        os.fsync(probe.fileno())


def open_run(folder: Path, layers: Sequence[LayerInfo], lock: Lock | None = None) -> tuple[Lock, Database]:
    """Open the run in `folder`, created if needed, with the lock on it: `lock` if it is held, or a new one.

    Raises:
        StoreError: it cannot be created or written, or is another run; nothing was changed.
    """
    file = run_file(folder)
    try:
        _refuse_foreign(folder)
        its_journal = journal.journal_for(folder)
        held = lock if lock is not None and lock.held else _lock_new(folder)
        try:
            if not file.exists():
                _create(file, layers)
            return held, Database(file, layers, its_journal)
        except BaseException:
            held.release()
            raise
    except FAILURES as error:
        raise in_words(error, file) from error


def _lock_new(folder: Path) -> Lock:
    """Create a folder, if needed, and lock it; a new folder that cannot be locked is removed."""
    new = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return Lock(folder)
    except BaseException:
        with suppress(OSError):  # another process has put something there
            for one in new:
                one.rmdir()
        raise


def _refuse_foreign(folder: Path) -> None:
    """Reject a folder that holds other files and no run, so that a run is never mixed with a user's files.

    Raises:
        StoreError: the folder holds other files; the message names some.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise StoreError(f"{folder} is a file; a run is a folder. Pass the path of a new or an empty one.")
    if run_file(folder).exists():
        return
    # Leftovers of a writer that was killed before it had created its file; hidden files belong to the system.
    ours = (LOCK_FILE, f"{schema.FILE}.new")
    others = sorted(name for name in os.listdir(folder) if not name.startswith((*ours, ".")))
    if others:
        raise StoreError(
            f"{folder} holds {', '.join(others[:3])}{' ...' if len(others) > 3 else ''} and no run. Pass the path of a "
            f"new or an empty folder, such as {folder / 'run'}."
        )


def _create(file: Path, layers: Sequence[LayerInfo]) -> None:
    """Create the file of a new run under another name and rename it, so that it appears whole or not at all."""
    new = file.with_name(f"{file.name}.new")
    for leftover in (new, *schema.sidecars(new)):
        leftover.unlink(missing_ok=True)
    connection = connect(new, "rwc")
    try:
        connection.execute(f"PRAGMA page_size = {schema.PAGE}")
        connection.execute("PRAGMA auto_vacuum = NONE")
        connection.execute("BEGIN")
        schema.create(connection)
        schema.write_layers(connection, layers)
        connection.execute("COMMIT")
    finally:
        connection.close()
    os.replace(new, file)
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names of the files in `folder` are on the disk."""
    if os.name == "posix":
        file = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def request(run: Path, steps: int) -> None:
    r"""Ask the job that writes the run in `run` to look at its next `steps` steps in detail.

    Raises:
        OSError: the folder cannot be written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     request(Path(folder), 20)
    ...     (Path(folder) / REQUEST).read_text()
    '20\n'
    """
    new = run / f".{REQUEST}"
    new.unlink(missing_ok=True)
    with new.open("x") as file:  # a new file: if the folder is of unknown origin, a link could lead to any other
        file.write(f"{steps}\n")
    new.replace(run / REQUEST)  # whole or not at all: somebody is looking for it
