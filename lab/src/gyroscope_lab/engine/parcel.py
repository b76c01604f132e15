"""The files of a finished trial, carried from a machine that does not see the archive."""

from __future__ import annotations

from pathlib import Path

from gyroscope.store import lock, schema
from gyroscope_lab.training import checkpoint
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.trial import Trial

#: The files by name.
Parcel = dict[str, bytes]

# What a training that was interrupted may have left; a database must not meet the journal of another.
_LEFT = (checkpoint.FILE, schema.FILE, f"{schema.FILE}-wal", f"{schema.FILE}-shm")


def pack(folder: Path) -> Parcel:
    """Read the files of a trial's folder: its result, its run, and what else it keeps.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "result.json").write_text("{}")
    ...     pack(Path(folder))
    {'result.json': b'{}'}
    """
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.name != lock.FILE}


def deliver(parcel: Parcel, trial: Trial, archive: Archive) -> None:
    """Write the files into the archive, unless a result has come there meanwhile; the result last, and whole.

    >>> import tempfile
    >>> from gyroscope_lab.training.recipe import Recipe
    >>> from gyroscope_lab.engine.run_one import run_one
    >>> from gyroscope_lab.training.tasks import task
    >>> trial = Trial(task("digits").lasting(1), Recipe("SGD", 0.1))
    >>> with tempfile.TemporaryDirectory() as there, tempfile.TemporaryDirectory() as here:
    ...     result = run_one(trial, Archive(there))
    ...     deliver(pack(Archive(there).folder(trial)), trial, Archive(here))
    ...     Archive(here).result(trial) == result
    True
    """
    with archive.claimed(trial) as folder:
        if archive.result(trial) is not None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        for name in _LEFT:
            (folder / name).unlink(missing_ok=True)
        for name in sorted(parcel, key=lambda name: name == "result.json"):
            new = folder / f"{name}.new"
            new.write_bytes(parcel[name])
            new.replace(folder / name)
