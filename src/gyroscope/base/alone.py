"""While one instrument runs a model for itself, others that hang on it do not look."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

# Not a context variable: the threads of a backward pass, where checkpoints run modules again, would not have it.
_OWNERS: list[tuple[object, ...]] = []


@contextmanager
def alone(*owners: object) -> Iterator[None]:
    """Inside, only the hooks of `owners` act.

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
    """Whether hooks of this one act.

    >>> listens("anybody")
    True
    """
    return not _OWNERS or any(who is one for one in _OWNERS[-1])
