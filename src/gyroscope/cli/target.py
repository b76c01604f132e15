"""Where a command writes what it makes: a file, or a folder that gets one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Target:
    """What was given as --out.

    Attributes:
        path: the file or folder.
        folder: whether it is a folder: one that is there, or any that is given with a slash at its end.
    """

    path: Path
    folder: bool

    def __str__(self) -> str:
        return str(self.path)


def target(given: str) -> Target:
    """Read --out; a path alone cannot tell a folder that is not there from a file.

    >>> target("new/"), target("new")
    (Target(path=PosixPath('new'), folder=True), Target(path=PosixPath('new'), folder=False))
    """
    path = Path(given)
    return Target(path, path.is_dir() or given.endswith(("/", os.sep)))
