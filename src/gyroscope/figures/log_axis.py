"""Logarithmic axes: readable numbers along them, and rows at their edges for zero and infinity."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, floor, log, log10

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

# Up to this many decades, ticks at 1, 2 and 5 fit in each.
_FEW = 2.5


def log_ticks(axis: Axis, low: float, high: float) -> None:
    """Set ticks of a logarithmic `axis` from `low` to `high` at 1, 2, 5 or at powers of ten.

    >>> from gyroscope.figures.drawing import own_axes
    >>> ax = own_axes()
    >>> ax.set_yscale("log"); ax.set_ylim(0.01, 0.3)
    (0.01, 0.3)
    >>> log_ticks(ax.yaxis, 0.01, 0.3)
    >>> [plain(tick) for tick in ax.get_yticks() if 0.01 <= tick <= 0.3]
    ['0.01', '0.02', '0.05', '0.1', '0.2']
    """
    few = log10(high / low) <= _FEW
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,), numticks=9))
    in_full = low >= 5e-4 and high < 1e5
    axis.set_major_formatter(FuncFormatter(lambda value, place: plain(value) if in_full else power(value)))
    axis.set_minor_locator(NullLocator() if few else LogLocator(subs=(2.0, 5.0), numticks=99))
    axis.set_minor_formatter(NullFormatter())


def plain(value: float) -> str:
    """Return a number in full.

    >>> plain(0.02), plain(500), plain(20_000)
    ('0.02', '500', '20,000')
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


def power(value: float) -> str:
    r"""Return a positive number as a power of ten, or a multiple of one.

    >>> power(1e-6), power(2e-6)
    ('$10^{-6}$', '$2{\\times}10^{-6}$')
    """
    exponent = floor(log10(value) + 1e-9)
    digits = f"{value / 10.0**exponent:.3g}"
    return f"$10^{{{exponent}}}$" if digits == "1" else f"${digits}{{\\times}}10^{{{exponent}}}$"


# An axis spans at least this factor; otherwise rounding would fill it.
_LEAST = 4.0
# Shares of the axis height: margin beyond the values, margin before rows at an edge, and a row.
_MARGIN, _MORE = 0.05, 0.08
_ROW = 0.045
# Logarithm of the largest value around which matplotlib can still place ticks.
_FARTHEST = 240 * log(10)


@dataclass(frozen=True)
class Edges:
    """Positions of the rows at the edges of an axis, from the values outwards."""

    above: tuple[float, ...]
    below: tuple[float, ...]


def edged(ax: Axes, values: npt.ArrayLike, *, above: int = 0, below: int = 0) -> Edges:
    """Give `ax` a logarithmic y axis around all positive `values`, and return the positions of the edge rows.

    Beyond the values, after a dotted line, there are rows: `above` of them for ∞, and `below` of them at the other end.
    Tick labels stand next to the values only.

    >>> from gyroscope.figures.drawing import own_axes
    >>> ax = own_axes()
    >>> rows = edged(ax, [1.0, 0.0, 1e12, np.inf], above=1)
    >>> ax.get_yscale(), rows.above[0] > 1e12, rows.below
    ('log', True, ())
    """
    every = np.asarray(values, dtype=float)
    known = every[np.isfinite(every) & (every > 0)]
    low, high = (float(known.min()), float(known.max())) if known.size else (1.0, 1.0)
    middle, half = log(low) / 2 + log(high) / 2, max(log(high) - log(low), log(_LEAST)) / 2
    over, under = _MORE if above else _MARGIN, _MORE if below else _MARGIN
    whole = 2 * half / (1 - over - under - _ROW * (above + below))
    begin = max(middle - half - (under + _ROW * below) * whole, -_FARTHEST)
    end = min(middle + half + (over + _ROW * above) * whole, _FARTHEST)
    ax.set_yscale("log")
    ax.set_ylim(exp(begin), exp(end))
    if known.size:
        _ticks(ax, exp(middle - half if below else begin), exp(middle + half if above else end))
    else:
        ax.yaxis.set_major_locator(NullLocator())
        ax.yaxis.set_minor_locator(NullLocator())
    for rows, edge, inwards in ((above, end, -whole), (below, begin, whole)):
        if rows:
            ax.axhline(exp(edge + inwards * _ROW * rows), color="0.75", linewidth=0.7, linestyle=":", zorder=1)
    return Edges(
        above=tuple(exp(end - (above - row - 0.5) * _ROW * whole) for row in range(above)),
        below=tuple(exp(begin + (below - row - 0.5) * _ROW * whole) for row in range(below)),
    )


def say(ax: Axes, text: str, rows: tuple[float, ...]) -> None:
    """Write `text` next to the y axis at the position of `rows`, like a tick label; nothing without rows.

    >>> from gyroscope.figures.drawing import own_axes
    >>> ax = own_axes()
    >>> say(ax, "∞", edged(ax, [1.0], above=2).above)
    >>> ax.texts[0].get_text()
    '∞'
    """
    if rows:
        ax.annotate(
            text,
            (0, float(np.exp(np.log(rows).mean()))),
            xycoords=("axes fraction", "data"),
            xytext=(-6, 0),
            textcoords="offset points",
            ha="right",
            va="center",
        )


def _ticks(ax: Axes, low: float, high: float) -> None:
    axis = ax.yaxis
    log_ticks(axis, low, high)
    # Fixed; otherwise tick labels would stand next to the rows at the edges.
    major, minor = axis.get_majorticklocs(), axis.get_minorticklocs()
    axis.set_major_locator(FixedLocator([tick for tick in major if low * 0.99 <= tick <= high * 1.01]))
    axis.set_minor_locator(FixedLocator([tick for tick in minor if low * 0.99 <= tick <= high * 1.01]))
