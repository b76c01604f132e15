"""Safe text for the terminal: names in a run come from anywhere, and may contain escape sequences."""

from __future__ import annotations

import re

import typer
from rich.console import Console
from rich.text import Text

# Control characters except tab and newline, DEL, C1, marks that change text direction, and lone surrogates.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(words: object) -> str:
    r"""Return `words` with the characters that a terminal would act on written as escapes.

    >>> print(plain("w\x1b[2J"))
    w\u001b[2J
    """
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", str(words))


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
