"""Shared parts of the commands: values of options, checks of folders and numbers, a message while loading."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from rich.console import Console

from gyroscope.cli.fail import BAD_ARGUMENT, fail

# Values of options. The laboratory has the same types, but its modules load torch, for which --help must not wait.
Scale = Literal["smoke", "small", "full"]
Engine = Literal["auto", "serial", "workers", "population", "ray"]
Precision = Literal["float32", "tf32", "bf16"]
Parallel = Literal["ddp", "fsdp"]
Device = Literal["auto", "cpu", "cuda"]


def make_folder(folder: Path, option: str) -> None:
    """Make a folder if it does not exist, or exit if it cannot be written to.

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
            fail(f"`{option}` must be a folder, got the file {folder}.", code=BAD_ARGUMENT)
        folder.mkdir(parents=True, exist_ok=True)
        # Writing a file is the only test that is valid for every file system and user.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:  # ValueError for names with a zero byte or half a letter
        said = getattr(error, "strerror", None) or error
        fail(f"{option} {folder} cannot be written: {said}.", code=BAD_ARGUMENT)


def at_least_one(value: int | None, option: str) -> None:
    """Exit if a number is below 1.

    >>> at_least_one(3, "--seeds")
    """
    if value is not None and value < 1:
        fail(f"`{option}` must be a whole number ≥ 1, got {value}.", code=BAD_ARGUMENT)


def load_laboratory() -> None:
    """Load the laboratory with a message; commands do so when they run, so that --help does not wait."""
    with loading():
        import gyroscope_lab.engine.laboratory  # noqa: F401  (says which extra is missing)


@contextmanager
def loading(console: Console | None = None, *, what: str = "Getting ready") -> Iterator[None]:
    """Show a message in a terminal while something loads; print nothing elsewhere.

    >>> with loading():
    ...     import torch
    """
    console = Console(stderr=True) if console is None else console
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield
