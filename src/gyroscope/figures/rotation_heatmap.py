"""Every layer at every step as one picture: a row a layer, first layer on top, colour for the value."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from gyroscope.base.accepted import real
from gyroscope.errors import FigureError
from gyroscope.figures.given import Layers, RunLike, Series, as_run, find
from gyroscope.figures.lines import finish, own_axes, span
from gyroscope.figures.looks import Look, look_of, settle
from gyroscope.figures.looks import limits as limits_of
from gyroscope.figures.names import short_names, stride
from gyroscope.figures.ticks import log_ticks

_COLUMNS = 1000
_MIXED = 300
_INCHES_A_LABEL = 0.14


def rotation_heatmap(
    run: RunLike,
    *,
    quantity: str = "rotation",
    ax: Axes | None = None,
    layers: Layers = None,
    limits: tuple[float | None, float | None] | None = None,
    title: str | None = None,
) -> Axes:
    """Draw a quantity of every layer over the steps, and return the axes.

    The one picture for hundreds of layers. A column is as wide as the steps it stands for, so unevenly
    spaced steps are where they belong. Norms and rates are on a logarithmic scale; grey is not measured.

    Args:
        run: a run or its path.
        quantity: the name of what is shown.
        ax: axes to draw on; those of a new figure, high enough for the layers, if not given.
        layers: glob pattern or patterns on the layers' names; all if not given.
        limits: the values at both ends of the colours; what suits the quantity if not given, or at an end that is
            None. The same limits, such as (0, 1), make pictures of several runs comparable.
        title: text above.

    >>> from gyroscope.figures import example_run
    >>> ax = rotation_heatmap(example_run(layers=34))
    >>> ax.images[0].get_array().shape
    (34, 101)
    """
    ends = None if limits is None else _ends(limits)
    run = as_run(run)
    series = find(run, quantity, layers=layers)
    look = settle(look_of(quantity, run.quantities[quantity]), series.values)
    count = len(series.layers)
    ax = own_axes(ax, width=6.4, height=float(np.clip(1.1 + 0.15 * count, 2.7, 6.2)))

    suits = limits_of(look, series.values, close=True)
    low, high = suits if ends is None else (own if end is None else end for own, end in zip(suits, ends, strict=True))
    if look.scale == "log" and not 0 < low < high:
        raise FigureError(f"limits={limits!r}; {quantity} is on a logarithmic scale here, which goes up from above 0")
    edges = _edges(series.steps)
    colours = matplotlib.colormaps["RdBu_r" if look.scale == "signed" else "magma"].with_extremes(bad="0.85")
    image = ax.imshow(
        np.ma.masked_invalid(_visible(_resampled(series, edges), look, low).T),
        aspect="auto",
        # Rows of less than a pixel are mixed, so that regular networks make no moiré; larger ones have edges.
        interpolation="auto" if count > _MIXED else "nearest",
        extent=(edges[0], edges[-1], count - 0.5, -0.5),
        cmap=colours,
        norm=(LogNorm if look.scale == "log" else Normalize)(low, high, clip=True),
    )
    figure = ax.get_figure()
    assert isinstance(figure, Figure)
    bar = figure.colorbar(image, ax=ax, pad=0.02, aspect=20, label=look.label)
    if look.scale == "log":
        log_ticks(bar.ax.yaxis, low, high)
    height = ax.get_window_extent().height / figure.dpi
    rows = stride(count, int(height / _INCHES_A_LABEL))
    ax.set_yticks(rows, [short_names(series.layers)[row] for row in rows], fontsize=7)
    ax.tick_params(axis="y", length=2)
    span(ax, series.steps)
    ax.set_xlim(edges[0], edges[-1])
    finish(ax, title=title)
    return ax


def _ends(limits: Any) -> tuple[float | None, ...]:
    given = list(limits) if isinstance(limits, Iterable) else []
    ends = tuple(None if end is None else real(end) for end in given)
    if len(ends) != 2 or not all(end is None or isfinite(end) for end in ends):
        raise FigureError(f"limits={limits!r}; it must be two numbers, such as (0, 1), or None for either")
    return ends


def _edges(steps: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    # A step stands for the time half way to its neighbours; the outer ones reach outwards as little as any.
    outward = np.diff(steps).min() / 2 if len(steps) > 1 else 0.5
    return np.concatenate([steps[:1] - outward, (steps[:-1] + steps[1:]) / 2, steps[-1:] + outward])


def _resampled(series: Series, edges: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the values in columns of equal width, as an image needs them: [columns, layers]."""
    steps, values = series.steps, _held(series.values)
    gaps = np.unique(np.diff(steps))
    if len(gaps) <= 1 and len(steps) <= _COLUMNS:
        return values
    centres = np.linspace(edges[0], edges[-1], 2 * _COLUMNS + 1)[1::2]
    return values[np.clip(np.searchsorted(edges, centres) - 1, 0, len(steps) - 1)]


def _held(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return `values` with each gap between two known values filled with the first of them."""
    known = ~np.isnan(values)
    rows = np.where(known, np.arange(len(values))[:, None], 0)
    latest = np.take_along_axis(values, np.maximum.accumulate(rows, axis=0), axis=0)
    more_to_come = np.logical_or.accumulate(known[::-1], axis=0)[::-1]
    return np.where(more_to_come, latest, np.nan)


def _visible(values: npt.NDArray[np.float64], look: Look, low: float) -> npt.NDArray[np.float64]:
    # A logarithm has no place for zero: it is shown as the smallest there is.
    return np.maximum(values, low) if look.scale == "log" else values
