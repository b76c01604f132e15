"""Checkpoints of a training: one file, there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gyroscope.base import read_whole, require_whole
from gyroscope.monitor import Monitor
from gyroscope_lab.errors import LabError

FILE = "checkpoint.pt"


def save(folder: Path, state: dict[str, Any]) -> None:
    """Write `state` to the folder's checkpoint; the one before is kept until this one is on disk.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(Path(folder), {"key": "a", "epoch": 3})
    ...     load(Path(folder), key="a")["epoch"]
    3
    """
    new = folder / f"{FILE}.new"
    try:
        with new.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(folder / FILE)
    except (OSError, RuntimeError) as error:  # torch says the latter of a disk that is full
        raise LabError(f"{new} cannot be written ({error}); the checkpoint before it, if any, is kept") from error


def load(folder: Path, *, key: str) -> dict[str, Any] | None:
    """Return what `save` wrote, None if there is nothing; nothing in the file is executed."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        state = read(path)
        found = state["key"]
    except Exception as error:
        raise LabError(
            f"{path} cannot be read ({type(error).__name__}: {error}); delete it to train from the start"
        ) from error
    if found != key:
        raise LabError(f"{path} belongs to another trial; delete it to train from the start")
    return state


def epoch(folder: Path) -> int:
    """Return how many epochs the folder's checkpoint holds: 0 if there is none, or it cannot be read.

    >>> epoch(Path("nowhere"))
    0
    """
    try:
        require_whole(folder / FILE)
        # Mapped, so that the weights are not read.
        return int(torch.load(folder / FILE, map_location="cpu", weights_only=True, mmap=True)["epoch"])
    except Exception:
        return 0


def read(path: Path) -> dict[str, Any]:
    """Return what `torch.save` wrote to a file, if it is all there; nothing in the file is executed."""
    found: dict[str, Any] = read_whole(path)
    return found


def recorded(monitor: Monitor) -> None:
    """Return when the run of a monitor is on disk: what it lacks, a training that goes on from here would not add."""
    try:
        monitor.flush()
        if monitor.error is not None:
            raise monitor.error
    except Exception as error:
        raise LabError(f"the run in {monitor.path} cannot be recorded ({type(error).__name__}: {error})") from error


@contextmanager
def resumed(folder: Path) -> Iterator[None]:
    """Say which checkpoint it is that a training cannot go on from, as one that was written by another version.

    >>> with resumed(Path("runs/a")):
    ...     {}["epoch"]
    Traceback (most recent call last):
    gyroscope_lab.errors.LabError: runs/a/checkpoint.pt cannot be gone on from (KeyError: 'epoch'); delete it to ...
    """
    try:
        yield
    except Exception as error:
        raise LabError(
            f"{folder / FILE} cannot be gone on from ({type(error).__name__}: {error}); delete it to train from the "
            "start"
        ) from error
