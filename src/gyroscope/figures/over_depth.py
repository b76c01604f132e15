"""Values over depth, with layers along the x axis: bars of percentiles, and lines with marks for zero and infinity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from gyroscope.figures.log_axis import edged, say
from gyroscope.figures.looks import short_names

Values = npt.NDArray[np.float64]

#: Up to this many layers each has its own bar; beyond, bars merge into a band.
BARS = 40
_NAMED = 12
_MARKERS = "os^Dv"


def colors(count: int) -> list[tuple[float, float, float, float]]:
    """Return `count` colors that also differ in lightness, from dark to light.

    >>> len(colors(3))
    3
    """
    return [matplotlib.colormaps["cividis"](place) for place in np.linspace(0.1, 0.8, count)]


def draw_bars(ax: Axes, low: Values, middle: Values, high: Values, *, place: int = 0, places: int = 1) -> None:
    """Draw one set of percentiles, [layers] each, as `place` of `places` sets side by side.

    >>> from gyroscope.figures.drawing import own_axes
    >>> ax = own_axes()
    >>> draw_bars(ax, np.array([1.0, 2.0]), np.array([2.0, 3.0]), np.array([3.0, 4.0]))
    >>> ax.lines[0].get_ydata().tolist()
    [2.0, 3.0]
    """
    at = np.arange(1, len(middle) + 1, dtype=float)
    color, marker = colors(places)[place], _MARKERS[place % len(_MARKERS)]
    if len(at) > BARS:
        ax.fill_between(at, low, high, color=color, alpha=0.25, linewidth=0)
        ax.plot(at, middle, color=color, linewidth=1, marker=marker, markevery=max(len(at) // 12, 1), markersize=4)
        return
    at += 0.5 * ((place + 0.5) / places - 0.5)
    ax.plot(at, middle, color=color, linestyle="", marker=marker, markersize=4)
    ax.errorbar(
        at, middle, yerr=np.abs([middle - low, high - middle]), fmt="none", ecolor=color, elinewidth=1, capsize=2
    )


def layer_axis(ax: Axes, names: Sequence[str]) -> None:
    """Label the layers along the x axis of `ax`: a few by name, many by number.

    >>> from gyroscope.figures.drawing import own_axes
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


#: A mark at the edge of a plot, for a value that is off the axis.
Mark = Literal["^", "v", "x"]
#: Red, green, blue and opacity, each from 0 to 1.
Color = tuple[float, float, float, float]
#: A style of line, as matplotlib names it.
Dash = Literal["-", "--", ":", "-.", ""]

#: Meaning of the marks at the edges.
SAYS: dict[Mark, str] = {
    "^": r"infinite: $\lambda_p=0$",
    "v": "zero",
    "x": r"undefined: $\lambda_{\max}$ is 0 or not finite",
}
_GRAY = (0.25, 0.25, 0.25, 1.0)
_THROUGHOUT: dict[Mark, str] = {"^": "infinite throughout", "v": "0 throughout", "x": "undefined throughout"}


@dataclass(frozen=True)
class Line:
    """One value per layer, NaN where undefined, of one of several `network`s.

    >>> Line(np.array([1.0, np.inf]), 0, colors(1)[0], "-", "o").network
    0
    """

    values: Values
    network: int
    color: Color
    dash: Dash
    marker: str


def draw_marked(ax: Axes, lines: Sequence[Line]) -> list[Mark]:
    """Draw `lines` over the layers 1, 2, … on a logarithmic axis, and return the marks at its edges.

    Infinite values are in rows above, one per line. Zeros and undefined values are in rows below, one per network,
    because they are the same for every p. Lines are interrupted there.

    >>> from gyroscope.figures.drawing import own_axes
    >>> draw_marked(own_axes(), [Line(np.array([1.0, np.inf, 2.0, np.nan]), 0, (0, 0, 0, 1), "-", "o")])
    ['^', 'x']
    """
    above = [(line.color, np.isposinf(line.values)) for line in lines if np.isposinf(line.values).any()]
    below = [*_rows(lines, "v"), *_rows(lines, "x")]
    marks: list[Mark] = ["^"] if above else []
    marks += dict.fromkeys(mark for *_, mark in below)
    edges = edged(ax, np.concatenate([line.values for line in lines]), above=len(above), below=len(below))
    for line in lines:
        _draw(ax, line)
    for (color, where), y in zip(above, edges.above, strict=True):
        _row(ax, color, where, "^", y)
    for (color, where, mark), y in zip(below, edges.below, strict=True):
        _row(ax, color, where, mark, y)
    say(ax, "∞", edges.above)
    say(ax, "0", tuple(y for (*_, mark), y in zip(below, edges.below, strict=True) if mark == "v"))
    if not any((np.isfinite(line.values) & (line.values > 0)).any() for line in lines):
        says = ", or ".join(_THROUGHOUT[mark] for mark in marks)
        ax.text(0.5, 0.5, says, transform=ax.transAxes, ha="center", va="center", color="0.5", fontsize=9)
    return marks


def _rows(lines: Sequence[Line], mark: Mark) -> list[tuple[Color, npt.NDArray[np.bool_], Mark]]:
    """Return the layers of each network to be marked below, for the networks that have any."""
    found: dict[int, tuple[Color, npt.NDArray[np.bool_], Mark]] = {}
    alone = len({line.network for line in lines}) == 1
    for line in lines:
        where = line.values == 0 if mark == "v" else np.isnan(line.values)
        if where.any() and line.network not in found:
            found[line.network] = (_GRAY if alone else line.color, where, mark)
    return list(found.values())


def _row(ax: Axes, color: Color, where: npt.NDArray[np.bool_], mark: Mark, y: float) -> None:
    at = np.flatnonzero(where) + 1
    size = float(np.clip(200 / len(where), 2, 4.5))
    ax.plot(at, np.full(len(at), y), color=color, linestyle="", marker=mark, markersize=size, clip_on=False)


def _draw(ax: Axes, line: Line) -> None:
    count = len(line.values)
    at = np.arange(1, count + 1)
    y = np.where(np.isfinite(line.values) & (line.values > 0), line.values, np.nan)
    few = count <= BARS
    ax.plot(at, y, color=line.color, linestyle=line.dash, linewidth=1.3 if few else 1.0)
    unknown = np.isnan(np.pad(y, 1, constant_values=np.nan))
    alone = unknown[:-2] & unknown[2:]
    marked = ~unknown[1:-1] & ((at % (1 if few else max(count // 12, 1)) == 0) | alone)
    # A line without points would be placed in the corner of the page, and the layout would reserve space.
    if marked.any():
        x, y = at[marked], y[marked]
        ax.plot(x, y, color=line.color, linestyle="", marker=line.marker, markersize=3.5, clip_on=False)
