"""Exit codes, and the one-line error of a command that fails: no traceback."""

from __future__ import annotations

from typing import NoReturn

import typer

from gyroscope.cli.printed import echo

FAILED = 1
BAD_ARGUMENT = 2
INTERRUPTED = 130


def fail(message: str, *, code: int) -> NoReturn:
    """Print `message` on standard error and exit with `code`.

    >>> try:
    ...     fail("nothing to do", code=BAD_ARGUMENT)
    ... except typer.Exit as end:
    ...     print(end.exit_code)
    2
    """
    echo(f"gyroscope: {message}", err=True)
    raise typer.Exit(code)
