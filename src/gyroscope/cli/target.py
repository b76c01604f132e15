"""Where a command writes what it makes: a file, or a folder that gets one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer


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

    @contextmanager
    def made(self) -> Iterator[None]:
        """The folder it is in, which is made if it is not there, and taken away again if nothing comes of it.

        Raises:
            OSError: it cannot be made.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as here, target(f"{here}/new/").made():
        ...     os.path.isdir(f"{here}/new")
        True
        """
        folder = self.path if self.folder else self.path.parent
        new = not folder.exists()
        if new:
            folder.mkdir(parents=True)
        try:
            yield
        except BaseException:
            if new:
                with suppress(OSError):
                    folder.rmdir()
            raise


def target(given: str) -> Target:
    """Read --out; a path alone cannot tell a folder that is not there from a file.

    >>> target("figures/").folder, target("figures.png").folder
    (True, False)
    """
    return Target(Path(given), os.path.isdir(given) or given.endswith(("/", os.sep)))


def is_run(path: Path) -> bool:
    """Whether to load this path as a run; else it is a folder that may have runs in it.

    What is neither is left to `load`, which says what is wrong with it.

    >>> is_run(Path("nowhere")), is_run(Path("x" * 300)), is_run(Path.cwd())
    (True, True, False)
    """
    return not os.path.isdir(path) or os.path.exists(path / "run.sqlite")  # a name that is too long is neither


def out_option(what: str, default: str) -> Any:
    """The option --out of a command, for a `Target`.

    >>> out_option("File to write", "no file").help
    'File to write, or folder to write into; a new folder ends in /.'
    """
    return typer.Option(
        parser=target,
        metavar="<path>",
        help=f"{what}, or folder to write into; a new folder ends in /.",
        show_default=default,
    )
