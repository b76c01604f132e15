"""Files of `torch.save`, looked at before they are believed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import IO, Any
from zipfile import ZIP_STORED, ZipFile

import torch
from torch import Tensor

File = str | os.PathLike[str] | IO[bytes]


def read_whole(path: File) -> Any:
    """Return what `torch.save` wrote, if it is as it was written; nothing in the file is executed.

    Raises:
        ValueError: the file is damaged, or would take more memory than `torch.save` ever stores in so many bytes.
        Exception: whatever else torch raises.
    """
    require_whole(path)
    found = torch.load(path, map_location="cpu", weights_only=True)
    for tensor in _tensors(found):
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} in it has fewer numbers than that")
    return found


def require_whole(path: File) -> None:
    """Refuse a file of `torch.save` that is not as it was written: torch.load does not look at the checksums.

    `torch.save` does not compress. A file that is compressed, or whose parts overlap, may be small and fill the memory
    when it is read. An open file is left at the place where it was.
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
    if isinstance(found, Tensor):
        if found.layout == torch.strided:
            yield found
    elif isinstance(found, dict | list | tuple):
        for one in found.values() if isinstance(found, dict) else found:
            yield from _tensors(one)
