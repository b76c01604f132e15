"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from uuid import uuid4


def write_whole(path: Path, text: str) -> None:
    """Write a file of text (UTF-8), and its folder; one that was there is replaced once the new one is on disk.

    Processes that write the same file at once do not get in each other's way: the last has it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_whole(Path(folder, "dynamics", "a.json"), "{}")
    ...     Path(folder, "dynamics", "a.json").read_text()
    '{}'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.stem}-{uuid4().hex}.new")
    try:
        with new.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
