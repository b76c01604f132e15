"""Text for the terminal: names in a run come from anywhere, and may hold escape sequences."""

from __future__ import annotations

import re

import typer
from rich.text import Text

# Control characters but tab and newline, DEL, C1, marks that change the direction of text, and lone surrogates.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(words: object) -> str:
    r"""Return `words` with what a terminal would act on written out.

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


def echo(words: object, *, err: bool = False) -> None:
    """Print `words`, safely."""
    typer.echo(plain(words), err=err)
