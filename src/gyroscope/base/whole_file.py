"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path to write to, which becomes `path` at the end; what was there stays if that is not reached.

    A link stays one, and what it leads to is exchanged. What is no file, such as a pipe, is written to as it is, and so
    is a file beside which none may be made. Of those who write the same file at once the last has it.

    Raises:
        OSError: it cannot be written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with whole_file(Path(folder, "a.txt")) as new:
    ...         _ = new.write_text("all of it")
    ...         there = Path(folder, "a.txt").exists()
    ...     there, Path(folder, "a.txt").read_text(), len(list(Path(folder).iterdir()))
    (False, 'all of it', 1)
    """
    new = _beside(path)
    if new is None:
        yield path
        return
    target = Path(os.path.realpath(path))
    try:
        yield new
        with new.open("rb+") as file:
            os.fsync(file.fileno())
        if target.is_file():
            with suppress(OSError):  # there are disks without permissions
                shutil.copymode(target, new)
        new.replace(target)
    finally:
        new.unlink(missing_ok=True)


def _beside(path: Path) -> Path | None:
    """A new file beside the one that `path` leads to; None if that is to be written to as it is."""
    if path.exists() and not path.is_file() and not path.is_dir():
        return None
    target = Path(os.path.realpath(path))
    # Known by its ending where a process was killed; of long names a part, for there is a limit.
    new = target.with_name(f"{target.stem[:40]}-{uuid4().hex}.new")
    try:
        new.open("x").close()
    except OSError as error:
        if target.is_file():
            return None
        raise OSError(error.errno, error.strerror, str(path)) from None
    return new


def write_whole(path: Path, text: str) -> None:
    """Write a file of text (UTF-8), and its folder; see `whole_file`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_whole(Path(folder, "dynamics", "a.json"), "{}")
    ...     Path(folder, "dynamics", "a.json").read_text()
    '{}'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as new:
        new.write_text(text, encoding="utf-8")
