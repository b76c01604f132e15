"""The command `gyroscope`, which is also `python -m gyroscope`."""

import sys

from gyroscope.errors import MissingExtraError


def main() -> None:
    """Run the command line, or say in one line what to install for it."""
    try:
        from gyroscope import cli
    except MissingExtraError as error:
        sys.exit(f"gyroscope: {error}")
    cli.main()


if __name__ == "__main__":
    main()
