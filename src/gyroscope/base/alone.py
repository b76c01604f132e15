"""A switch that silences the hooks of other instruments while one instrument runs a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

# Not a context variable: the threads of a backward pass, in which checkpointing runs modules again, would not see it.
_OWNERS: list[tuple[object, ...]] = []


@contextmanager
def alone(*owners: object) -> Iterator[None]:
    """Let only the hooks of `owners` act within the block.

    >>> with alone("one", "two"):
    ...     listens("one"), listens("three")
    (True, False)
    """
    _OWNERS.append(owners)
    try:
        yield
    finally:
        _OWNERS.remove(owners)


def listens(who: object) -> bool:
    """Return whether the hooks of `who` act now.

    >>> listens("anybody")
    True
    """
    return not _OWNERS or any(who is one for one in _OWNERS[-1])
