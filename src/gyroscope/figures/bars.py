"""Percentiles by layer: the layers along the x axis, a bar from low to high with a mark in the middle."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from gyroscope.figures.names import short_names

Values = npt.NDArray[np.float64]

#: Up to here each layer has a bar of its own; beyond, bars run together into a band.
BARS = 40
_NAMED = 12
_MARKERS = "os^Dv"


def colours(count: int) -> list[tuple[float, float, float, float]]:
    """Return `count` colours that differ in lightness too, dark to light.

    >>> len(colours(3))
    3
    """
    return [matplotlib.colormaps["cividis"](place) for place in np.linspace(0.1, 0.8, count)]


def draw_bars(ax: Axes, low: Values, middle: Values, high: Values, *, place: int = 0, places: int = 1) -> None:
    """Draw one set of percentiles, [layers] each; `place` of `places` sets that stand side by side.

    >>> from gyroscope.figures.lines import own_axes
    >>> ax = own_axes()
    >>> draw_bars(ax, np.array([1.0, 2.0]), np.array([2.0, 3.0]), np.array([3.0, 4.0]))
    >>> ax.lines[0].get_ydata().tolist()
    [2.0, 3.0]
    """
    at = np.arange(1, len(middle) + 1, dtype=float)
    colour, marker = colours(places)[place], _MARKERS[place % len(_MARKERS)]
    if len(at) > BARS:
        ax.fill_between(at, low, high, color=colour, alpha=0.25, linewidth=0)
        ax.plot(at, middle, color=colour, linewidth=1, marker=marker, markevery=max(len(at) // 12, 1), markersize=4)
        return
    at += 0.5 * ((place + 0.5) / places - 0.5)
    ax.plot(at, middle, color=colour, linestyle="", marker=marker, markersize=4)
    ax.errorbar(
        at, middle, yerr=np.abs([middle - low, high - middle]), fmt="none", ecolor=colour, elinewidth=1, capsize=2
    )


def layer_axis(ax: Axes, names: Sequence[str]) -> None:
    """Mark the layers along the x axis of `ax`: by name for a few, by number for many.

    >>> from gyroscope.figures.lines import own_axes
    >>> ax = own_axes()
    >>> layer_axis(ax, ["conv.weight", "fc.weight"])
    >>> [label.get_text() for label in ax.get_xticklabels()]
    ['conv', 'fc']
    """
    ax.set_xlim(0.5, len(names) + 0.5)
    if len(names) <= _NAMED:
        turned = len(names) > 4
        ax.set_xticks(
            range(1, len(names) + 1),
            short_names(names, longest=18),
            rotation=40 if turned else 0,
            ha="right" if turned else "center",
            fontsize=8,
        )
    else:
        ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
