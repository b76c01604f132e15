"""How a job that runs elsewhere is asked to look at its next steps in detail: by a file in the folder of its run."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

#: What the file is called. It may hold the number of steps.
SIGNAL = "sample"
_STEPS = 5
#: Bytes that are read of it.
_DIGITS = 18


def ask(run: Path, steps: int) -> None:
    """Ask for so many steps.

    Raises:
        OSError: nothing can be written there.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ask(Path(folder), 20)
    ...     take(Path(folder)), take(Path(folder))
    (20, 0)
    """
    request = run / f".{SIGNAL}"
    request.write_text(f"{steps}\n")
    request.replace(run / SIGNAL)  # whole or not at all: somebody is looking for it


def take(run: Path) -> int:
    """How many steps are asked for, once; 0 if nobody asks. What is no regular file is left alone."""
    file = run / SIGNAL
    try:
        found = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a named pipe would wait for a writer
    except OSError:
        return 0
    try:
        if not stat.S_ISREG(os.fstat(found).st_mode):
            return 0
        text = os.read(found, _DIGITS).decode(errors="replace").strip()
    finally:
        os.close(found)
    with suppress(OSError):
        os.unlink(file)
    return int(text) if text.isdecimal() and int(text) > 0 else _STEPS
