"""The command line: `gyroscope`."""

from importlib.util import find_spec

from gyroscope.errors import MissingExtraError

if find_spec("typer") is None or find_spec("rich") is None:
    raise MissingExtraError(
        "the gyroscope command needs typer and rich, which are not installed: pip install 'gyroscope[lab]'"
    )

from gyroscope.cli.app import app


def main() -> None:
    """Run the command line.

    >>> import sys
    >>> sys.argv = ["gyroscope", "--version"]
    >>> try:
    ...     main()
    ... except SystemExit as end:
    ...     print(end.code)
    gyroscope ...
    0
    """
    app()


__all__ = ["app", "main"]
