"""Layer names that fit beside a figure."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np

_LONGEST = 26


def short_names(names: Sequence[str], *, longest: int = _LONGEST) -> list[str]:
    """Return `names` without a ".weight" that all end in, and with the middle of long ones left out.

    Where that leaves the same of several, what all begin and end with is left out instead, or parts are abbreviated.

    >>> short_names(["conv1.weight", "fc.weight"])
    ['conv1', 'fc']
    >>> short_names(["transformer.h.11.attention.c_proj"], longest=20)
    ['transforme…on.c_proj']
    >>> short_names([f"transformer.h.{i}.attention.c_proj" for i in (1, 2)], longest=20)
    ['…1…', '…2…']
    >>> short_names(["transformer.layers.1.attention.c_proj", "transformer.layers.2.attention.c_proj", "lm_head"])
    ['tran.laye.1.atte.c_pr', 'tran.laye.2.atte.c_pr', 'lm_head']
    >>> short_names([f"features.denseblock{i}.denselayer16.conv1" for i in (1, 2)] + ["classifier"])
    ['feat.dens1.dens16.conv1', 'feat.dens2.dens16.conv1', 'classifier']
    """
    if all(name.endswith(".weight") for name in names):
        names = [name.removesuffix(".weight") for name in names]
    best = [_shortened(name, longest) for name in names]
    for other in (_differing, _abbreviated, _initials):
        if len(set(best)) < len(set(names)):
            pairs = zip(names, other(names), strict=True)
            short = [name if len(name) <= longest else _shortened(brief, longest) for name, brief in pairs]
            best = short if len(set(short)) > len(set(best)) else best
    return [literal(name) for name in best]


def literal(name: str) -> str:
    r"""Return `name` so that matplotlib writes it as it is, and takes no part of it for a formula.

    Bytes of a folder's name that are no letters are written as what they stand for.

    >>> print(literal("$x$"), literal("\udcff"))
    \$x\$ \udcff
    """
    return name.encode("utf-8", "backslashreplace").decode().replace("$", r"\$")


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


def _differing(names: Sequence[str]) -> list[str]:
    split = [name.split(".") for name in names]
    begin, end = _alike(split), _alike([parts[::-1] for parts in split])
    # Of a name that is all beginning and end, its last part.
    kept = [".".join(parts[begin : max(len(parts) - end, begin + 1)]) for parts in split]
    return [f"{'…' * bool(begin)}{part}{'…' * bool(end)}" for part in kept]


def _abbreviated(names: Sequence[str], letters: int = 4) -> list[str]:
    # A number at the end of a part is kept whole: it tells blocks apart.
    stems = [[(part, part.rstrip("0123456789")) for part in name.split(".")] for name in names]
    return [".".join(stem[:letters] + part[len(stem) :] for part, stem in parts) for parts in stems]


def _initials(names: Sequence[str]) -> list[str]:
    return _abbreviated(names, letters=2)


def _alike(split: Sequence[Sequence[str]]) -> int:
    """How many parts all begin with, at most all but one of the shortest."""
    least = min(len(parts) for parts in split) - 1
    return next((i for i in range(least) if len({parts[i] for parts in split}) > 1), max(least, 0))


def _shortened(name: str, longest: int) -> str:
    if len(name) <= longest:
        return name
    head = longest // 2
    return f"{name[:head]}…{name[len(name) - (longest - 1 - head) :]}"
