"""The folder of a run, before it is written to: what may be in it."""

from __future__ import annotations

import os
from pathlib import Path

from gyroscope.errors import StoreError
from gyroscope.store import lock, schema


def run_file(folder: Path) -> Path:
    """Where the run in `folder` is.

    >>> run_file(Path("runs/first")).name
    'run.sqlite'
    """
    return folder / schema.FILE


def refuse_foreign(folder: Path) -> None:
    """Refuse a folder that holds other things and no run, so that a run never ends up amid a user's files.

    Raises:
        StoreError: says what is there.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise StoreError(f"{folder} is a file; a run is a folder. Give the path of a new or an empty one.")
    if run_file(folder).exists():
        return
    # What a writer leaves that is killed before it has made its file; hidden files are of the system.
    ours = (lock.FILE, f"{schema.FILE}.new", f"{schema.FILE}-")
    others = sorted(name for name in os.listdir(folder) if not name.startswith((*ours, ".")))
    if others:
        raise StoreError(
            f"{folder} holds {', '.join(others[:3])}{' ...' if len(others) > 3 else ''} and no run. Give the path of a "
            f"new or an empty folder, such as {folder / 'run'}."
        )
