"""Files that are written completely or not at all, and files of `torch.save` that are checked before they are read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from uuid import uuid4
from zipfile import ZIP_STORED, ZipFile


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a path to write to, which replaces `path` at the end; on an error the old file stays.

    A link stays a link and its target is replaced. Anything that is not a regular file, such as a pipe, is written
    directly, and so is a file in a folder where no new file can be made. If several processes write the same file at
    once, the last one wins.

    Raises:
        OSError: the file cannot be written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with whole_file(Path(folder, "a.txt")) as new:
    ...         _ = new.write_text("all of it")
    ...         there = Path(folder, "a.txt").exists()
    ...     there, Path(folder, "a.txt").read_text(), len(list(Path(folder).iterdir()))
    (False, 'all of it', 1)
    """
    new = _next_to(path)
    if new is None:
        yield path
        return
    target = Path(os.path.realpath(path))
    try:
        yield new
        with new.open("rb+") as file:
            os.fsync(file.fileno())
        if target.is_file():
            with suppress(OSError):  # some file systems have no permissions
                shutil.copymode(target, new)
        new.replace(target)
    finally:
        new.unlink(missing_ok=True)


def _next_to(path: Path) -> Path | None:
    """Return a new file next to the target of `path`, or None if the target is to be written directly."""
    if path.exists() and not path.is_file() and not path.is_dir():
        return None
    target = Path(os.path.realpath(path))
    # The ending identifies leftovers of a killed process. Long names are cut: file systems limit their length.
    new = target.with_name(f"{target.stem[:40]}-{uuid4().hex}.new")
    try:
        new.open("x").close()
    except OSError as error:
        if target.is_file():
            return None
        raise OSError(error.errno, error.strerror, str(path)) from None
    return new


def write_whole(path: Path, text: str) -> None:
    """Write a text file (UTF-8) and create its folder; see `whole_file`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_whole(Path(folder, "dynamics", "a.json"), "{}")
    ...     Path(folder, "dynamics", "a.json").read_text()
    '{}'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as new:
        new.write_text(text, encoding="utf-8")


if TYPE_CHECKING:
    from torch import Tensor

File = str | os.PathLike[str] | IO[bytes]


def read_whole(path: File) -> Any:
    """Return the content of a `torch.save` file if it is undamaged; nothing in the file is executed.

    Raises:
        ValueError: the file is damaged, or would take more memory than `torch.save` ever stores in that many bytes.
        Exception: anything else that torch raises.
    """
    import torch  # takes seconds to load, and only these files need it

    require_whole(path)
    found = torch.load(path, map_location="cpu", weights_only=True)
    for tensor in _tensors(found):
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} in it has fewer numbers than that")
    return found


def require_whole(path: File) -> None:
    """Raise ValueError for a damaged `torch.save` file: torch.load does not verify the checksums.

    `torch.save` does not compress. A file that is compressed, or whose parts overlap, may be small and still fill the
    memory when it is read. The position of an open file is restored.
    """
    opened = None if isinstance(path, str | os.PathLike) else path
    at = 0 if opened is None else opened.tell()
    with ZipFile(path) as file:
        _require_stored(file)
        damaged = file.testzip()
    if damaged is not None:
        raise ValueError(f"{damaged} in it is damaged")
    if opened is not None:
        opened.seek(at)


def _require_stored(file: ZipFile) -> None:
    assert file.fp is not None
    size = file.fp.seek(0, os.SEEK_END)
    entries = file.infolist()
    unpacked = sum(max(one.file_size, one.compress_size) for one in entries)
    if any(one.compress_type != ZIP_STORED for one in entries) or unpacked > size:
        raise ValueError(f"{size} bytes would unpack to {unpacked}, and torch.save does not compress")


def _tensors(found: Any) -> Iterator[Tensor]:
    import torch

    if isinstance(found, torch.Tensor):
        if found.layout == torch.strided:
            yield found
    elif isinstance(found, dict | list | tuple):
        for one in found.values() if isinstance(found, dict) else found:
            yield from _tensors(one)
