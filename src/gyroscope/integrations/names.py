"""Names that a tool accepts, and that stay apart from each other."""

from __future__ import annotations

import re
from collections.abc import Callable
from zlib import crc32

# MLflow takes 250 characters for a quantity, a slash and a layer.
_LONGEST = 120

Clean = Callable[[str], str]


def as_it_is(name: str) -> str:
    """Return `name`: for tools that take any.

    >>> as_it_is("encoder/0:weight")
    'encoder/0:weight'
    """
    return name


def one_part(name: str) -> str:
    """Return `name` in letters, digits, `_`, `.` and `-`, without slashes, which group things in these tools.

    >>> one_part("encoder/0:weight"), one_part(".."), len(one_part(300 * "x"))
    ('encoder_0_weight', '__', 120)
    """
    safe = re.sub(r"[^A-Za-z0-9_.-]", "_", name) or "_"
    if set(safe) == {"."}:  # a folder, for tools that keep a file a name
        safe = "_" * len(safe)
    if len(safe) > _LONGEST:
        return f"{safe[: _LONGEST - 9]}_{crc32(name.encode(errors='replace')):08x}"
    return safe


def grouped(name: str) -> str:
    """Return `name` in the characters of `one_part` and slashes, none of them doubled, first or last.

    >>> grouped("/train//top-5 accuracy")
    'train/top-5_accuracy'
    """
    return one_part("") if not name.strip("/") else "/".join(one_part(part) for part in name.split("/") if part)


class Names:
    """Cleaned names, the same each time, and different for different names.

    >>> names = Names(one_part)
    >>> [names(name) for name in ("a/b", "a:b", "a_b", "a/b")]
    ['a_b', 'a_b_2', 'a_b_3', 'a_b']
    """

    def __init__(self, clean: Clean) -> None:
        self._clean = clean
        self._chosen: dict[str, str] = {}
        self._taken: set[str] = set()

    def __call__(self, name: str) -> str:
        """Return the name to use for `name`."""
        if name not in self._chosen:
            clean = chosen = self._clean(name)
            count = 1
            while chosen in self._taken:
                count += 1
                chosen = f"{clean}_{count}"
            self._taken.add(chosen)
            self._chosen[name] = chosen
        return self._chosen[name]
