"""Building blocks of figures, also for custom ones: one line per layer colored by depth, keys, moving means."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from io import BytesIO
from typing import Any, Literal, TypeVar

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from gyroscope.errors import FigureError
from gyroscope.figures.log_axis import edged, log_ticks, say
from gyroscope.figures.looks import short_names
from gyroscope.figures.over_depth import SAYS, Color, Dash, Line, Mark, colors, draw_marked
from gyroscope.store.labels import Look, Scale, limits, look_of

Style = Literal["-", "--", ":"]
Corner = Literal["best", "upper left", "lower left"]

#: Above this many, lines are thin and translucent, and rasterized in vector formats.
MANY = 60
#: Up to this many layers a legend names them; beyond, a color bar numbers them.
NAMED = 10


def own_axes(given: Axes | None = None, *, width: float = 5.4, height: float = 3.2) -> Axes:
    """Return the given axes, or those of a new figure that pyplot does not know.

    >>> own_axes().figure.get_size_inches().tolist()
    [5.4, 3.2]
    """
    if given is not None:
        if not isinstance(given, Axes):
            raise FigureError(
                f"`ax` must be matplotlib axes, got {given!r:.80}. Try figure.subplots(), or leave it out."
            )
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
    """Draw `values` [times, layers] as one line per layer, colored by depth, and return the lines.

    Gaps are bridged: a sampled quantity has values at some steps only. A single value is a dot. With `positive`, for a
    logarithmic axis, values <= 0 are gaps as well. `dark` lines stand out from the lines they belong to, and from many
    others. `log_steps` is for a logarithmic axis of steps.

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
        color = DEPTH(float(where))
        line = Line2D(  # `ax.plot` takes three times as long
            x[here, layer],
            y[here, layer],
            color=_darker(color) if dark else color,
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


def _darker(color: tuple[float, float, float, float]) -> tuple[float, float, float]:
    red, green, blue, _ = color
    return 0.55 * red, 0.55 * green, 0.55 * blue


def emphasize(line: Line2D, linewidth: float = 1.4) -> None:
    """Make `line` stand out from many others.

    >>> [line] = draw_lines(own_axes(), [0, 1], [[0.0], [1.0]], depth=[0.0], alpha=0.2)
    >>> emphasize(line)
    >>> line.get_alpha()
    1.0
    """
    line.set(alpha=1.0, linewidth=linewidth, rasterized=False, zorder=3)
    line.set_path_effects([withStroke(linewidth=linewidth + 1.2, foreground="white")])


def finish(ax: Axes, *, xlabel: str = "step", ylabel: str = "", title: str | None = None) -> None:
    """Set the labels of `ax` and remove the spines that carry no information.

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
    """Limit the x axis of `ax` to the times, with few ticks; a single time is in the middle.

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
    """Explain next to `ax` which color is which layer: by name for a few, by number for many.

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
    """Add a color bar next to (or `below`) `ax`, one or several, that numbers `total` layers from 1.

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
    """Explain once, below all `axes` of a figure, which color is which layer: by name for a few, by number for many.

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
    # In inches, estimated without a renderer.
    wide = 0.65 + 0.075 * max(map(len, short))
    columns = max(min(len(short), 5, int(figure.get_figwidth() / wide)), 1)
    figure.legend(handles, short, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def style_key(ax: Axes, styles: Sequence[tuple[str, Style]], *, loc: Corner) -> None:
    """Explain inside `ax` what its line styles mean, in addition to a legend it may already have.

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
        before.set_clip_on(False)  # otherwise the layout treats it as part of the drawing and reserves no space


# Viridis ends in a yellow that is invisible on white.
_LIGHTEST = 0.92

#: Viridis from its dark end to the lightest color that is readable on white.
DEPTH = ListedColormap(matplotlib.colormaps["viridis"](np.linspace(0, _LIGHTEST, 256)), name="depth")


def depth_colors(count: int) -> list[tuple[float, float, float, float]]:
    """Return one color per layer, in order of depth.

    >>> first, last = depth_colors(2)
    >>> bool(sum(first[:3]) < sum(last[:3]))
    True
    """
    return [DEPTH(position) for position in np.linspace(0, 1, count)]


Drawn = TypeVar("Drawn", Figure, Axes)


def as_picture(drawn: Drawn) -> Drawn:
    """Make notebooks show `drawn`, a figure or axes, as a picture when it is the value of a cell, and return it.

    IPython shows objects that have a `_repr_png_`. Figures of matplotlib have none: a formatter shows them, which
    exists once `%matplotlib inline` has been run and then takes precedence, and axes are not shown at all. The method
    is set on the object, because tools such as wandb and Streamlit recognize figures by the name of their class.

    >>> as_picture(Figure())._repr_png_()[:4]
    b'\\x89PNG'
    """
    vars(drawn)["_repr_png_"] = partial(_png, drawn)
    return drawn


def _png(drawn: Figure | Axes) -> bytes:
    figure: Any = drawn.get_figure(root=True)
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi="figure")
    return picture.getvalue()


Values = npt.NDArray[np.float64]


def thin(steps: npt.ArrayLike, values: npt.ArrayLike, *, keep: int = 1000, log: bool = False) -> tuple[Values, Values]:
    """Return about `keep` of the times of `values` [times, layers] as (x, y), both [kept, layers].

    Times are cut into equal intervals. In each, every layer keeps its smallest and its largest value, so that a spike
    of one step is preserved. The first and the last time are always kept. NaN is kept only if there is nothing else.
    With `log`, for a logarithmic axis of times, intervals grow longer.

    >>> noise = np.zeros((10_000, 1))
    >>> noise[4321] = 7.0
    >>> x, y = thin(np.arange(10_000), noise, keep=100)
    >>> x.shape, float(y.max()), float(x[-1, 0])
    ((102, 1), 7.0, 9999.0)
    >>> np.unique(thin(np.arange(10_000), noise, keep=100, log=True)[0])[:4].tolist()
    [0.0, 1.0, 2.0, 3.0]
    """
    x, y = np.asarray(steps, dtype=float), np.asarray(values, dtype=float)
    times, layers = y.shape
    if times <= keep:
        return np.broadcast_to(x[:, None], y.shape), y
    buckets = max(keep // 2, 1)
    if log:
        starts = np.unique(np.geomspace(1, times, buckets, endpoint=False).astype(int)) - 1
    else:
        starts = np.arange(0, times, -(-times // buckets))
    rows = [np.zeros(layers, dtype=int), np.full(layers, times - 1)]
    for start, end in zip(starts, [*starts[1:], times], strict=True):
        some = y[start:end]
        unknown = np.isnan(some)
        rows.append(start + np.where(unknown, np.inf, some).argmin(axis=0))
        rows.append(start + np.where(unknown, -np.inf, some).argmax(axis=0))
    order = np.sort(rows, axis=0)
    return x[order], np.take_along_axis(y, order, axis=0)


#: Share of the run that a moving mean covers.
SHARE = 0.02


def window(times: int) -> int:
    """Return the number of `times` that a moving mean covers: an odd number, 1 if there are few.

    >>> window(50), window(1000)
    (1, 21)
    """
    return 1 if times < 100 else 2 * int(SHARE * times / 2) + 1


def moving_mean(values: Values, width: int, *, log: bool = False) -> Values:
    """Return the mean over `width` times around each, [times, layers]; with `log` the geometric mean.

    Unknown values (with `log`, also values <= 0) are left out of the mean and stay unknown.

    >>> moving_mean(np.array([[0.0], [3.0], [6.0], [0.0]]), 3)[:, 0].tolist()
    [1.5, 3.0, 3.0, 3.0]
    >>> moving_mean(np.array([[1.0], [100.0]]), 3, log=True).round(6)[:, 0].tolist()
    [10.0, 10.0]
    """
    if width <= 1:
        return values
    known = values > 0 if log else ~np.isnan(values)
    terms = np.where(known, values, 1.0 if log else 0.0)
    sums, counts = _sums(np.log(terms) if log else terms, width), _sums(known.astype(float), width)
    mean = np.divide(sums, counts, out=np.full_like(sums, np.nan), where=known)
    return np.exp(mean) if log else mean


def _sums(values: Values, width: int) -> Values:
    # The cost of differences of running sums does not depend on the width.
    times, half = len(values), width // 2
    running = np.concatenate([np.zeros((1, values.shape[1])), values.cumsum(axis=0)])
    at = np.arange(times)
    sums: Values = running[np.minimum(at + half + 1, times)] - running[np.maximum(at - half, 0)]
    return sums


# With more layers than this, noise hides the lines.
_FEW = 4
# Values that differ by less than this from the mean of their neighbors need no smoothing: their logarithms on a
# logarithmic axis, and relative to their size on a linear one.
_CALM = 0.02


def draw_course(ax: Axes, steps: npt.ArrayLike, values: Values, *, depth: Values, look: Look) -> int:
    """Draw `values` [times, layers] as one line per layer, and return the number of values that each point averages.

    Lines of a few layers pass through every value. For many layers noise would hide the lines: they are then moving
    means, over shades that span the single values, one per layer, or one for all if there are very many.

    >>> from gyroscope.store.labels import look_of
    >>> ax, noise = own_axes(), np.random.default_rng(0).random((1000, 30))
    >>> draw_course(ax, np.arange(1000), noise, depth=np.linspace(0, 1, 30), look=look_of("rate"))
    21
    >>> len(ax.lines), len(ax.collections)
    (30, 1)
    """
    log = look.scale == "log"
    known = np.where(values > 0, values, np.nan) if log else values
    width = window(len(values)) if look.noisy and len(depth) > _FEW and not _calm(known, look.scale) else 1
    if width > 1 and len(depth) <= NAMED:
        for layer, where in enumerate(depth):
            _shade(ax, steps, known[:, layer : layer + 1], width, DEPTH(float(where)), alpha=0.2)
    elif width > 1:
        _shade(ax, steps, known, max(width // 4, 1), "0.88")
    lines = moving_mean(values, width, log=log)
    draw_lines(ax, steps, lines, depth=depth, linewidth=1.0 if width > 1 else 1.4, positive=log)
    return width


def said(width: int) -> str:
    """Return the label of the x axis of a course.

    >>> said(1), said(21)
    ('step', 'step (moving mean of 21; shaded: single values)')
    """
    return "step" if width == 1 else f"step (moving mean of {width:,}; shaded: single values)"


def _calm(values: Values, scale: Scale | None) -> bool:
    values = values[~np.isnan(values).all(1)]
    if len(values) < 3:
        return True
    values = np.log(values) if scale == "log" else values
    bend = np.abs(np.diff(values, 2, axis=0)) / 2  # 0 for a trend, which is no noise
    size = np.nanmedian(np.abs(values)) if scale == "linear" else 1.0
    return not np.isfinite(bend).any() or bool(np.nanmedian(bend) <= _CALM * size)


def _shade(ax: Axes, steps: npt.ArrayLike, values: Values, width: int, color: Any, alpha: float = 1.0) -> None:
    """Fill from the smallest to the largest of each `width` values, over all layers."""
    some = ~np.isnan(values).all(axis=1)
    at, known = np.asarray(steps, dtype=float)[some], values[some]
    starts = np.arange(0, len(at), width)
    if not len(starts):
        return
    low = np.minimum.reduceat(np.nanmin(known, axis=1), starts)
    high = np.maximum.reduceat(np.nanmax(known, axis=1), starts)
    middle = (at[starts] + at[np.append(starts[1:], len(at)) - 1]) / 2
    # Extend to both ends of the lines, not only to the centers of the first and the last interval.
    x = np.concatenate([at[:1], middle, at[-1:]])
    ax.fill_between(
        x, np.pad(low, 1, "edge"), np.pad(high, 1, "edge"), color=color, alpha=alpha, linewidth=0, zorder=0.5
    )


__all__ = [
    "DEPTH",
    "SAYS",
    "Color",
    "Dash",
    "Line",
    "Mark",
    "colors",
    "depth_bar",
    "depth_colors",
    "draw_lines",
    "draw_marked",
    "edged",
    "finish",
    "limits",
    "log_ticks",
    "look_of",
    "say",
    "span",
]
