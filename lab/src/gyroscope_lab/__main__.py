"""The command `gyroscope-lab`, which is also `python -m gyroscope_lab`."""

import sys
from io import TextIOWrapper


def main() -> None:
    """Run the command line of the laboratory."""
    from gyroscope_lab.cli.commands import app

    if isinstance(sys.stdout, TextIOWrapper):
        # Where the system's encoding has no letter ρ, a question mark is better than a traceback.
        sys.stdout.reconfigure(errors="replace")
    app()


if __name__ == "__main__":
    main()
