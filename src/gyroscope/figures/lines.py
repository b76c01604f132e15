"""One line a layer: what rotation curves, rates and norms have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from gyroscope.errors import FigureError
from gyroscope.figures.depth import DEPTH
from gyroscope.figures.names import short_names
from gyroscope.figures.notebook import as_picture
from gyroscope.figures.thin import thin

Style = Literal["-", "--", ":"]
Corner = Literal["best", "upper left", "lower left"]

#: From here on lines are thin and translucent, and drawn as an image in vector formats.
MANY = 60
#: Up to here a legend names the layers; beyond, a colour bar numbers them.
NAMED = 10


def own_axes(given: Axes | None = None, *, width: float = 5.4, height: float = 3.2) -> Axes:
    """Return the axes that were given, or those of a new figure, which pyplot does not know.

    >>> own_axes().figure.get_size_inches().tolist()
    [5.4, 3.2]
    """
    if given is not None:
        if not isinstance(given, Axes):
            raise FigureError(f"ax must be matplotlib axes, got {given!r:.80}; try figure.subplots(), or leave it out")
        return given
    figure = as_picture(Figure(figsize=(width, height), layout="constrained"))
    return as_picture(figure.add_subplot())


def draw_lines(
    ax: Axes,
    steps: npt.ArrayLike,
    values: npt.ArrayLike,
    *,
    depth: Sequence[float] | npt.NDArray[np.float64],
    linestyle: Style = "-",
    linewidth: float = 1.4,
    alpha: float = 1.0,
    positive: bool = False,
    dark: bool = False,
    log_steps: bool = False,
) -> list[Line2D]:
    """Draw `values` [times, layers], one line a layer coloured by its depth, and return the lines.

    Gaps are bridged: a quantity that is sampled has a value at some steps only. A single value is a dot.
    With `positive`, for a logarithmic axis, values of zero and below are gaps too. `dark` lines can
    be seen on those they belong to, and on many others. `log_steps` is for a logarithmic axis of steps.

    >>> lines = draw_lines(own_axes(), [0, 1, 2], [[0.0], [np.nan], [0.5]], depth=[0.0])
    >>> lines[0].get_xdata().tolist()
    [0.0, 2.0]
    """
    many = len(depth) > MANY
    x, y = thin(steps, values, keep=400 if many else 1000, log=log_steps)
    shown = y > 0 if positive else ~np.isnan(y)
    if many:
        linewidth, alpha = 0.4 * linewidth, 0.5 * alpha
    lines = []
    for layer, where in enumerate(depth):
        here = shown[:, layer]
        colour = DEPTH(float(where))
        line = Line2D(  # `ax.plot` takes three times as long
            x[here, layer],
            y[here, layer],
            color=_darker(colour) if dark else colour,
            linestyle=linestyle,
            linewidth=linewidth,
            alpha=alpha,
            marker="o" if here.sum() == 1 else "",
            markersize=3,
            rasterized=many,
        )
        if dark:
            line.set_zorder(4)
        lines.append(ax.add_line(line))
    return lines


def _darker(colour: tuple[float, float, float, float]) -> tuple[float, float, float]:
    red, green, blue, _ = colour
    return 0.55 * red, 0.55 * green, 0.55 * blue


def emphasise(line: Line2D, linewidth: float = 1.4) -> None:
    """Let `line` stand out from many others.

    >>> [line] = draw_lines(own_axes(), [0, 1], [[0.0], [1.0]], depth=[0.0], alpha=0.2)
    >>> emphasise(line)
    >>> line.get_alpha()
    1.0
    """
    line.set(alpha=1.0, linewidth=linewidth, rasterized=False, zorder=3)
    line.set_path_effects([withStroke(linewidth=linewidth + 1.2, foreground="white")])


def finish(ax: Axes, *, xlabel: str = "step", ylabel: str = "", title: str | None = None) -> None:
    """Give `ax` its labels and take away the lines around it that carry nothing.

    >>> ax = own_axes()
    >>> finish(ax, ylabel="rotation")
    >>> ax.get_xlabel(), ax.get_ylabel()
    ('step', 'rotation')
    """
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    if title is not None:
        ax.set_title(title, fontsize=10)


def span(ax: Axes, times: npt.ArrayLike) -> None:
    """Let the x axis of `ax` end where the times do, with no more ticks than there is room for; one is in the middle.

    >>> ax = own_axes()
    >>> span(ax, [5, 10, 20])
    >>> [float(end) for end in ax.get_xlim()]
    [5.0, 20.0]
    """
    known = np.asarray(times, dtype=float)
    if known.size > 1 and known.min() < known.max():
        ax.set_xlim(known.min(), known.max())
    elif known.size:
        ax.set_xlim(known[0] - 1, known[0] + 1)
    whole = bool((known == known.round()).all())
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=whole))
    if whole:
        ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def depth_key(ax: Axes, names: Sequence[str], depth: Sequence[float] | npt.NDArray[np.float64], total: int) -> None:
    """Say beside `ax` which colour is which layer: by name for a few, by number for many.

    >>> ax = own_axes()
    >>> depth_key(ax, ["conv1.weight", "fc.weight"], [0.0, 1.0], 2)
    >>> [text.get_text() for text in ax.get_legend().get_texts()]
    ['conv1', 'fc']
    """
    if len(names) <= NAMED:
        handles = [Line2D([], [], color=DEPTH(float(where)), linewidth=2) for where in depth]
        ax.legend(
            handles,
            short_names(names),
            loc="upper left",
            bbox_to_anchor=(1.01, 1.02),
            frameon=False,
            fontsize=8,
            title="layer, first to last" if len(names) > 1 else "layer",
            title_fontsize=8,
            alignment="left",
        )
        return
    depth_bar(ax, total)


def depth_bar(ax: Axes | list[Axes], total: int, *, below: bool = False) -> None:
    """Put a colour bar beside (or `below`) `ax`, one or several, that numbers `total` layers from 1.

    >>> ax = own_axes()
    >>> depth_bar(ax, 34)
    >>> ax.figure.axes[-1].get_ylabel()
    'layer, in forward order'
    """
    figure = (ax[0] if isinstance(ax, list) else ax).get_figure()
    assert isinstance(figure, Figure)
    bar = figure.colorbar(
        ScalarMappable(Normalize(1, total), cmap=DEPTH),
        ax=ax,
        location="bottom" if below else "right",
        aspect=60 if below else 30,
        shrink=0.5 if below else 1.0,
        pad=0.02,
        label="layer, in forward order",
    )
    if not below:
        bar.ax.invert_yaxis()
    inner = [tick for tick in MaxNLocator(5, integer=True).tick_values(1, total) if 0.08 < tick / total < 0.93]
    bar.set_ticks([1, *(tick for tick in inner if tick > 1), total], labels=None)
    bar.set_ticklabels([f"{int(tick):,}" for tick in bar.get_ticks()])


def page_key(
    axes: list[Axes], names: Sequence[str], depth: Sequence[float] | npt.NDArray[np.float64], total: int
) -> None:
    """Say once, below all the `axes` of a figure, which colour is which layer: by name for a few, by number for many.

    >>> axes = [own_axes()]
    >>> page_key(axes, ["conv1.weight", "fc.weight"], [0.0, 1.0], 2)
    >>> [text.get_text() for text in axes[0].figure.legends[0].get_texts()]
    ['conv1', 'fc']
    """
    if len(names) > NAMED:
        depth_bar(axes, total, below=True)
        return
    figure = axes[0].get_figure()
    assert isinstance(figure, Figure)
    handles = [Line2D([], [], color=DEPTH(float(where)), linewidth=2) for where in depth]
    short = short_names(names)
    # In inches, close enough without asking a renderer.
    wide = 0.65 + 0.075 * max(map(len, short))
    columns = max(min(len(short), 5, int(figure.get_figwidth() / wide)), 1)
    figure.legend(handles, short, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def style_key(ax: Axes, styles: Sequence[tuple[str, Style]], *, loc: Corner) -> None:
    """Say inside `ax` what its line styles mean, beside the legend it may already have.

    >>> ax = own_axes()
    >>> style_key(ax, [("measured", "-"), ("predicted", "--")], loc="lower left")
    >>> [text.get_text() for text in ax.get_legend().get_texts()]
    ['measured', 'predicted']
    """
    before = ax.get_legend()
    handles = [Line2D([], [], color="black", linewidth=1.2, linestyle=style) for _, style in styles]
    ax.legend(handles, [says for says, _ in styles], loc=loc, fontsize=8, framealpha=0.8)
    if before is not None:
        ax.add_artist(before)
        before.set_clip_on(False)  # or it is taken for part of the drawing, and the layout leaves no room for it
