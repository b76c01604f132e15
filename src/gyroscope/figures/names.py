"""Layer names that fit beside a figure."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np

_LONGEST = 26


def short_names(names: Sequence[str], *, longest: int = _LONGEST) -> list[str]:
    """Return `names` without a ".weight" that all end in, and with the middle of long ones left out.

    >>> short_names(["conv1.weight", "fc.weight"])
    ['conv1', 'fc']
    >>> short_names(["transformer.h.11.attention.c_proj"], longest=20)
    ['transforme…on.c_proj']
    """
    if all(name.endswith(".weight") for name in names):
        names = [name.removesuffix(".weight") for name in names]
    return [_shortened(name, longest) for name in names]


def spread(count: int, room: int) -> list[int]:
    """Return at most `room` of `count` positions, evenly spread from the first to the last.

    >>> spread(5, 10), spread(100, 4)
    ([0, 1, 2, 3, 4], [0, 33, 66, 99])
    """
    if count <= room:
        return list(range(count))
    return [int(i) for i in np.linspace(0, count - 1, max(room, 2))]


def stride(count: int, room: int) -> list[int]:
    """Return at most `room` of `count` positions at equal distances, from the first on.

    >>> stride(5, 10), stride(100, 4)
    ([0, 1, 2, 3, 4], [0, 25, 50, 75])
    """
    return list(range(0, count, max(ceil(count / max(room, 1)), 1)))


def _shortened(name: str, longest: int) -> str:
    if len(name) <= longest:
        return name
    head = longest // 2
    return f"{name[:head]}…{name[len(name) - (longest - 1 - head) :]}"
