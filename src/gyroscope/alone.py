"""While one instrument runs a model for itself, others that hang on it do not look."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_OWNER: ContextVar[tuple[object, ...] | None] = ContextVar("gyroscope_alone", default=None)


@contextmanager
def alone(*owners: object) -> Iterator[None]:
    """Inside, only the hooks of `owners` act.

    >>> with alone("one", "two"):
    ...     listens("one"), listens("three")
    (True, False)
    """
    token = _OWNER.set(owners)
    try:
        yield
    finally:
        _OWNER.reset(token)


def listens(who: object) -> bool:
    """Whether hooks of this one act.

    >>> listens("anybody")
    True
    """
    owners = _OWNER.get()
    return owners is None or any(who is one for one in owners)
