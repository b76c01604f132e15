"""That a command is getting ready, where somebody is waiting for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console


@contextmanager
def loading(console: Console | None = None, *, what: str = "Getting ready") -> Iterator[None]:
    """Say so in a terminal, for as long as it takes; what is not a terminal is left alone.

    >>> with loading():
    ...     import torch
    """
    console = Console(stderr=True) if console is None else console
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield
