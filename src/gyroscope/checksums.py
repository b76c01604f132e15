"""Files of `torch.save`, looked at before they are believed."""

from __future__ import annotations

from pathlib import Path
from zipfile import ZipFile


def require_whole(path: str | Path) -> None:
    """Refuse a file of `torch.save` that is not as it was written: torch.load does not look at the checksums."""
    with ZipFile(path) as file:
        damaged = file.testzip()
    if damaged is not None:
        raise ValueError(f"{damaged} in it is damaged")
