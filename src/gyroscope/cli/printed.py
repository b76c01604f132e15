"""Safe text for the terminal: names in a run come from anywhere, and may contain escape sequences."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.text import Text

from gyroscope.base.markup import plain as plain


def text(words: object = "", style: str = "") -> Text:
    """Return `words` for a table or a page, safe to print.

    >>> text("w\x07").plain
    'w\\\\u0007'
    """
    return Text(plain(words), style=style)


def console(unbounded: int) -> Console:
    """Return a console for standard output, `unbounded` characters wide if that is a pipe or a file.

    >>> console(150).width >= 1
    True
    """
    found = Console()
    return found if found.is_terminal else Console(width=unbounded)


def echo(words: object, *, err: bool = False) -> None:
    """Print `words` safely."""
    typer.echo(plain(words), err=err)
