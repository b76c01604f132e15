"""Axes that suit a quantity, and names that fit next to a figure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import ceil

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes

from gyroscope.figures.log_axis import log_ticks
from gyroscope.store.labels import Look, limits, literal


def frame(ax: Axes, look: Look, values: npt.ArrayLike, *, close: bool = False) -> None:
    """Set the scale and the limits of the y axis of `ax` to suit settled `values`; see `limits`.

    >>> from matplotlib.figure import Figure
    >>> from gyroscope.store.labels import look_of
    >>> ax = Figure().subplots()
    >>> frame(ax, look_of("weight_norm"), [1.0, 10.0])
    >>> ax.get_yscale()
    'log'
    """
    low, high = limits(look, values, close=close)
    if look.scale == "log":
        ax.set_yscale("log")
        margin = (high / low) ** 0.05
        ax.set_ylim(low / margin, high * margin)
        log_ticks(ax.yaxis, low, high)
    elif look.scale == "linear":
        margin = 0.05 * (high - low)
        ax.set_ylim(low - margin, high + margin)
    else:
        ax.set_ylim(low, high)
    if look.scale == "fraction" and high > 1:
        ax.axhline(1, color="0.6", linewidth=0.8, linestyle=":", zorder=1)


_LONGEST = 26


def short_names(names: Sequence[str], *, longest: int = _LONGEST) -> list[str]:
    """Return `names` without a common ending ".weight", and long ones shortened so that they can still be told apart.

    Long names lose the parts that all names share, and then their first parts, except numbers of blocks. If that makes
    several equal, parts are abbreviated.

    >>> short_names(["conv1.weight", "fc.weight"])
    ['conv1', 'fc']
    >>> short_names([f"transformer.h.{i}.attention.c_proj" for i in (1, 2)], longest=20)
    ['…1…', '…2…']
    >>> short_names([f"encoder.layers.{i}.attention.out_proj.weight" for i in (1, 2)] + ["head.weight", "position"])
    ['…1.attention.out_proj', '…2.attention.out_proj', 'head.weight', 'position']
    >>> short_names([f"features.denseblock{i}.denselayer16.conv1" for i in (1, 2)] + ["classifier"], longest=19)
    ['…dens1.dens16.conv1', '…dens2.dens16.conv1', 'classifier']
    """
    if not names:
        return []
    if all(name.endswith(".weight") for name in names):
        names = [name.removesuffix(".weight") for name in names]
    long = [name for name in names if len(name) > longest]
    best: list[str] = []
    for briefs in (_differing(names), _abbreviated(names, 4), _abbreviated(names, 2)):
        shortened = _fitting([brief for brief, name in zip(briefs, names, strict=True) if len(name) > longest], longest)
        found = dict(zip(long, shortened, strict=True))
        short = [found.get(name, name) for name in names]
        best = short if len(set(short)) > len(set(best)) else best
    return [literal(name) for name in best]


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` of `count` positions, evenly spread from the first to the last.

    >>> spread(5, 10), spread(100, 4)
    ([0, 1, 2, 3, 4], [0, 33, 66, 99])
    """
    if count <= most:
        return list(range(count))
    return [int(i) for i in np.linspace(0, count - 1, max(most, 2))]


def stride(count: int, most: int) -> list[int]:
    """Return at most `most` of `count` positions at equal distances, starting with the first.

    >>> stride(5, 10), stride(100, 4)
    ([0, 1, 2, 3, 4], [0, 25, 50, 75])
    """
    return list(range(0, count, max(ceil(count / max(most, 1)), 1)))


def _differing(names: Sequence[str]) -> list[str]:
    """Return `names` without the parts that all share; a name that consists of these keeps one."""
    split = [name.split(".") for name in names]
    begin, end = (0, 0) if len(names) == 1 else (_alike(split), _alike([parts[::-1] for parts in split]))
    kept = [".".join(parts[begin : max(len(parts) - end, begin + 1)]) for parts in split]
    return [f"{'…' * bool(begin)}{part}{'…' * bool(end)}" for part in kept]


def _alike(split: Sequence[Sequence[str]]) -> int:
    """Return the number of leading parts that all names share, at most all but one of the shortest."""
    least = min(len(parts) for parts in split) - 1
    return next((i for i in range(least) if len({parts[i] for parts in split}) > 1), max(least, 0))


def _abbreviated(names: Sequence[str], letters: int) -> list[str]:
    # A number at the end of a part is kept in full: it distinguishes blocks.
    stems = [[(part, part.rstrip("0123456789")) for part in name.removesuffix(".weight").split(".")] for name in names]
    return [".".join(stem[:letters] + part[len(stem) :] for part, stem in parts) for parts in stems]


# The first part of a name that has no number and is not the last, with the dots around it.
_FIRST = re.compile(r"(^|\.|…)[^.…\d]+\.")


def _fitting(names: Sequence[str], longest: int) -> list[str]:
    """Return `names` without as many first parts as needed, and if that is not enough, without their middles."""
    names = [name.removesuffix(".weight") for name in names]
    while dropped := {first[0] for name in names if len(name) > longest and (first := _FIRST.search(name))}:
        names = [_FIRST.sub("…", n, count=1) if (f := _FIRST.search(n)) and f[0] in dropped else n for n in names]
    return [name if len(name) <= longest else _cut(name, longest) for name in names]


def _cut(name: str, longest: int) -> str:
    head = longest // 2
    return f"{name[:head]}…{name[len(name) - (longest - 1 - head) :]}"
