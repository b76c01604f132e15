"""Checkpoints of a training: one file, there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from gyroscope.lab.errors import LabError

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
    with new.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(folder / FILE)


def load(folder: Path, *, key: str) -> dict[str, Any] | None:
    """Return what `save` wrote, None if there is nothing; nothing in the file is executed."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        found = state["key"]
    except Exception as error:
        raise LabError(
            f"{path} cannot be read ({type(error).__name__}: {error}); delete it to train from the start"
        ) from error
    if found != key:
        raise LabError(f"{path} belongs to another trial; delete it to train from the start")
    return state
