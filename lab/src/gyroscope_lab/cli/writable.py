"""Folders that commands write to, tried before there is anything to lose."""

from __future__ import annotations

import tempfile
from pathlib import Path

from gyroscope.cli.fail import BAD_ARGUMENT, fail


def make_folder(folder: Path, option: str) -> None:
    """Make a folder if it is not there, or give up if nothing can be written to it.

    >>> import typer
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     try:
    ...         make_folder(Path(file.name), "--out")
    ...     except typer.Exit as end:
    ...         print(end.exit_code)
    2
    """
    try:
        if folder.exists() and not folder.is_dir():
            fail(f"{option} {folder} is a file; give a folder", code=BAD_ARGUMENT)
        folder.mkdir(parents=True, exist_ok=True)
        # Writing a file is the only test that holds for every file system and user.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:  # the latter of names with a zero byte or half a letter
        said = getattr(error, "strerror", None) or error
        fail(f"{option} {folder} cannot be written: {said}", code=BAD_ARGUMENT)


def at_least_one(value: int | None, option: str) -> None:
    """Give up if a number is below 1.

    >>> at_least_one(3, "--seeds")
    """
    if value is not None and value < 1:
        fail(f"{option} is {value}; it must be 1 or more", code=BAD_ARGUMENT)
