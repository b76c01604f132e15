"""Exit codes, and the one-line error of a command that fails: no traceback."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import typer

from gyroscope.cli.printed import echo
from gyroscope.errors import GyroscopeError

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


@contextmanager
def reported(*, code: int = FAILED, writes: object = None) -> Iterator[None]:
    """End the command with one line if Gyroscope raises an error, on Ctrl-C, and if `writes` cannot be written.

    >>> try:
    ...     with reported(code=BAD_ARGUMENT):
    ...         raise GyroscopeError("nothing to do")
    ... except typer.Exit as end:
    ...     print(end.exit_code)
    2
    """
    try:
        yield
    except KeyboardInterrupt:
        fail("Interrupted.", code=INTERRUPTED)
    except GyroscopeError as error:
        fail(str(error), code=code)
    except OSError as error:
        if writes is None:
            raise
        fail(f"{writes} cannot be written: {error.strerror or error}.", code=FAILED)


def fail_if(problems: Sequence[GyroscopeError]) -> None:
    """Print the problems of a command that did the rest of its work, and exit if there are any.

    >>> fail_if([])
    """
    for problem in problems:
        echo(f"gyroscope: {problem}", err=True)
    if problems:
        raise typer.Exit(FAILED)
