"""The command `gyroscope-lab`, which is also `python -m gyroscope_lab`."""

import sys
from io import TextIOWrapper


def main() -> None:
    """Run the command line of the laboratory."""
    from gyroscope_lab.cli.commands import app

    if isinstance(sys.stdout, TextIOWrapper):
        # If the system's encoding lacks the letter ρ, print a question mark instead of raising an error.
        sys.stdout.reconfigure(errors="replace")
    app()


if __name__ == "__main__":
    main()
