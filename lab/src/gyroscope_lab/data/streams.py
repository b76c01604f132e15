"""Reading files whose checksum comes last."""

from __future__ import annotations

from typing import Protocol

_BLOCK = 2**20


class Readable(Protocol):
    """What gives bytes."""

    def read(self, size: int, /) -> bytes:
        """Return up to so many."""


def to_the_end(stream: Readable) -> None:
    """Read what is left of a compressed stream: its checksum stands at the very end, and is compared when it is read.

    >>> import io
    >>> stream = io.BytesIO(b"abc")
    >>> to_the_end(stream)
    >>> stream.tell()
    3
    """
    while stream.read(_BLOCK):
        continue
