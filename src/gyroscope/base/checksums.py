"""Files of `torch.save`, looked at before they are believed."""

from __future__ import annotations

import os
from typing import IO
from zipfile import ZipFile


def require_whole(path: str | os.PathLike[str] | IO[bytes]) -> None:
    """Refuse a file of `torch.save` that is not as it was written: torch.load does not look at the checksums.

    An open file is left at the place where it was.
    """
    opened = None if isinstance(path, str | os.PathLike) else path
    at = 0 if opened is None else opened.tell()
    with ZipFile(path) as file:
        damaged = file.testzip()
    if damaged is not None:
        raise ValueError(f"{damaged} in it is damaged")
    if opened is not None:
        opened.seek(at)
