"""Names of layers in messages: networks have a thousand of them, and a message is to be read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def few(names: Sequence[object], most: int = 5) -> str:
    """The first of many names, and how many more there are.

    >>> few(["a", "b"]), few(["a", "b", "c", "d"], most=2)
    ('a, b', 'a, b and 2 more')
    """
    more = len(names) - most
    return ", ".join(map(str, names[:most])) + (f" and {more} more" if more > 0 else "")


def unlike(theirs: Sequence[Any], mine: Sequence[Any]) -> str:
    """Where two lists begin to differ.

    >>> unlike(["a", "b"], ["a", "c"]), unlike(["a"], ["a", "b"])
    ("2 and 2; number 1 is 'b' there and 'c' here", "1 and 2; number 1 is missing there and 'b' here")
    """
    k = next((k for k, (one, other) in enumerate(zip(theirs, mine, strict=False)) if one != other), None)
    k = min(len(theirs), len(mine)) if k is None else k
    there, here = (repr(one[k]) if k < len(one) else "missing" for one in (theirs, mine))
    return f"{len(theirs)} and {len(mine)}; number {k} is {there} there and {here} here"
