"""The command line: `gyroscope`."""

import sys
from importlib.util import find_spec
from io import TextIOWrapper

from gyroscope.errors import MissingExtraError

if find_spec("typer") is None or find_spec("rich") is None:
    raise MissingExtraError(
        "The gyroscope command needs typer and rich, which are not installed: pip install 'gyroscope[cli]'"
    )

from gyroscope.cli import fail, printed
from gyroscope.cli.app import app


def main() -> None:
    """Run the command line.

    >>> sys.argv = ["gyroscope", "--version"]
    >>> try:
    ...     main()
    ... except SystemExit as end:
    ...     print(end.code)
    gyroscope ...
    0
    """
    if isinstance(sys.stdout, TextIOWrapper):
        # If the system's encoding has no letter ρ, a question mark is better than a traceback.
        sys.stdout.reconfigure(errors="replace")
    app()


__all__ = ["app", "fail", "main", "printed"]
