"""Layer rotation: curves of a run, panels of many runs, and a heatmap of every layer at every step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, isfinite
from os import PathLike
from textwrap import fill
from typing import Any, cast

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from gyroscope.base.accepted import listed, real
from gyroscope.errors import FigureError
from gyroscope.figures.drawing import DEPTH, as_picture, depth_bar, depth_key, draw_lines, finish, own_axes, span
from gyroscope.figures.log_axis import log_ticks
from gyroscope.figures.looks import frame, short_names, stride
from gyroscope.figures.run_data import Layers, RunLike, Series, as_run, at_least_one, find, flag, numbers
from gyroscope.store.labels import Look, limits, look_of, settle
from gyroscope.store.labels import limits as limits_of


def rotation_curves(
    run: RunLike | npt.ArrayLike,
    x: npt.ArrayLike | None = None,
    *,
    ax: Axes | None = None,
    layers: Layers = None,
    legend: bool | None = None,
    title: str | None = None,
    xlabel: str | None = None,
    ylabel: str | None = None,
) -> Axes:
    """Draw how far each layer has rotated from its reference, 1 − cos(w, w₀), and return the axes.

    Dark lines are first layers. The axis goes from 0 to 1, and further, up to 2, if a layer does.

    Args:
        run: a run or its path, or curves as an array [times, layers].
        x: times of an array, by default 0, 1, 2, …; for a run, numbers to show in place of its steps.
        ax: axes to draw on; by default those of a new figure (`ax.figure`).
        layers: glob pattern or patterns on the names of a run's layers; all by default.
        legend: whether to explain which color is which layer; by default for runs on new axes.
        title: title above the axes.
        xlabel: label of the x axis, by default "step" for a run and "epoch" for an array.
        ylabel: label of the y axis.

    >>> ax = rotation_curves([[0.0, 0.0], [0.3, 0.6], [0.5, 0.9]])
    >>> len(ax.lines), [float(limit) for limit in ax.get_ylim()]
    (2, [0.0, 1.0])
    >>> from gyroscope.figures import example_run
    >>> rotation_curves(example_run()).get_xlabel()
    'step'
    """
    names: tuple[str, ...] = ()
    if isinstance(run, str | PathLike) or hasattr(run, "series"):
        measured = as_run(cast(RunLike, run))
        series = find(measured, "rotation", layers=layers)
        times, y, depth = series.steps.astype(float), series.values, series.depth
        names, total = series.layers, len(measured.layers)
        if x is not None:
            times = _times(x, len(measured.steps), f"a run of {len(measured.steps)} steps")[
                np.isin(measured.steps, series.steps)
            ]
    else:
        y = numbers(run, "curves")
        if y.ndim != 2:
            raise FigureError(f"`curves` must be [times, layers], got shape {y.shape}.")
        times, total = (
            np.arange(len(y), dtype=float) if x is None else _times(x, len(y), f"curves of shape {y.shape}"),
            y.shape[1],
        )
        depth = np.linspace(0, 1, total)

    own = ax is None
    ax = own_axes(ax)
    draw_lines(ax, times, y, depth=depth)
    frame(ax, look_of("rotation"), y)
    span(ax, times)
    if flag(legend, "legend", default=own and bool(names)):
        if names:
            depth_key(ax, names, depth, total)
        else:
            depth_bar(ax, total)
    finish(
        ax,
        xlabel=xlabel if xlabel is not None else "step" if names else "epoch",
        ylabel=ylabel if ylabel is not None else look_of("rotation").drawn,
        title=title,
    )
    return ax


def _times(x: npt.ArrayLike, count: int, of: str) -> npt.NDArray[np.float64]:
    times = numbers(x, "x")
    if times.shape != (count,):
        raise FigureError(f"`x` must have shape ({count},) for {of}, got {times.shape}.")
    if not np.isfinite(times).all():
        raise FigureError("`x` must be finite numbers, one per row of the curves, got some that are not.")
    return times


# Characters of a heading per inch.
_PER_INCH = 11


@dataclass(frozen=True)
class Panel:
    """One run: its curves [times, layers], a title above them and a note inside.

    >>> Panel("SGD", [[0.0], [0.4]], note="94.6 %").x is None
    True
    """

    title: str
    curves: npt.ArrayLike
    x: npt.ArrayLike | None = None
    note: str = ""


def rotation_panels(
    panels: Sequence[Panel], *, columns: int = 5, title: str | None = None, xlabel: str = "epoch"
) -> Figure:
    """Draw one panel per run, all on the same axes, with a color bar for depth, as the rotation paper's figure 1.

    >>> figure = rotation_panels([Panel("slow", [[0.0], [0.1]]), Panel("fast", [[0.0], [0.8]])])
    >>> [ax.get_title() for ax in figure.axes[:2]]
    ['slow', 'fast']
    """
    panels = listed(panels)
    if not panels:
        raise FigureError("`panels` must be at least one Panel, got none. Try [Panel('SGD', curves)].")
    wrong = [one for one in panels if not isinstance(one, Panel)]
    if wrong:
        raise FigureError(f"`panels` must be a list of Panel, got {wrong[0]!r:.80}. Try [Panel('SGD', curves)].")
    columns = min(at_least_one(columns, "columns"), len(panels))
    rows = ceil(len(panels) / columns)
    figure = as_picture(Figure(figsize=(2.1 * columns + 1.2, 2.1 * rows + 0.6), layout="constrained"))
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)

    axes = list(grid.flat)
    for index, (ax, panel) in enumerate(zip(axes, panels, strict=False)):
        rotation_curves(panel.curves, panel.x, ax=ax, xlabel="", ylabel="")
        ax.set_title(panel.title, fontsize=9)
        _note(ax, panel)
        # Shared axes have labels under the last row only, which may be incomplete.
        ax.tick_params(labelbottom=index + columns >= len(panels))
    for ax in axes[len(panels) :]:
        ax.remove()
    # Axes are shared, so the last panel drawn would set the limits for all.
    drawn = [np.asarray(panel.curves, dtype=float) for panel in panels]
    times = [np.arange(len(c)) if p.x is None else np.asarray(p.x) for c, p in zip(drawn, panels, strict=True)]
    span(axes[0], np.concatenate(times))
    axes[0].set_ylim(limits(look_of("rotation"), np.concatenate([curves.ravel() for curves in drawn])))

    figure.supxlabel(xlabel, fontsize=10)
    whole = " to initialization" if rows > 1 else ""  # a single row is not high enough for it
    figure.supylabel(f"rotation (cosine distance{whole})", fontsize=10)
    if title is not None:
        figure.suptitle(fill(str(title), round(_PER_INCH * figure.get_figwidth())), fontsize=11)
    mappable = ScalarMappable(cmap=DEPTH)
    bar = figure.colorbar(mappable, ax=axes[: len(panels)], aspect=40, pad=0.01, label="layer: first → last")
    bar.set_ticks([])
    return figure


def _note(ax: Axes, panel: Panel) -> None:
    """Write the note away from the curves: below if they are high, above if they are low, on a white background."""
    curves = np.asarray(panel.curves, dtype=float)
    high = bool(np.nanmean(curves[len(curves) // 2 :]) > 0.5) if np.isfinite(curves).any() else False
    x, y, ha, va = (0.96, 0.05, "right", "bottom") if high else (0.05, 0.95, "left", "top")
    paper = {"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1.0}
    ax.text(x, y, panel.note, transform=ax.transAxes, ha=ha, va=va, fontsize=9, bbox=paper)


_COLUMNS = 1000
_MIXED = 300
_INCHES_PER_LABEL = 0.14


def rotation_heatmap(
    run: RunLike,
    *,
    quantity: str = "rotation",
    ax: Axes | None = None,
    layers: Layers = None,
    limits: tuple[float | None, float | None] | None = None,
    title: str | None = None,
) -> Axes:
    """Draw a quantity of every layer over the steps as a picture, first layer on top, and return the axes.

    This figure suits hundreds of layers. A column is as wide as the steps it stands for, so unevenly spaced steps are
    in the right place. Norms and rates are on a logarithmic scale; gray is not measured.

    Args:
        run: a run or its path.
        quantity: name of the quantity.
        ax: axes to draw on; by default those of a new figure, high enough for the layers.
        layers: glob pattern or patterns on the layers' names; all by default.
        limits: values at both ends of the colors; chosen to suit the quantity by default, or at an end that is None.
            The same limits, such as (0, 1), make pictures of several runs comparable.
        title: title above the axes.

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
        raise FigureError(
            f"`limits` must satisfy 0 < low < high, because {quantity} is on a logarithmic scale, got {limits!r:.80}."
        )
    edges = _edges(series.steps)
    colors = matplotlib.colormaps["RdBu_r" if look.scale == "signed" else "magma"].with_extremes(bad="0.85")
    image = ax.imshow(
        np.ma.masked_invalid(_visible(_resampled(series, edges), look, low).T),
        aspect="auto",
        # Rows smaller than a pixel are mixed, so that regular networks show no moiré; larger rows have edges.
        interpolation="auto" if count > _MIXED else "nearest",
        extent=(edges[0], edges[-1], count - 0.5, -0.5),
        cmap=colors,
        norm=(LogNorm if look.scale == "log" else Normalize)(low, high, clip=True),
    )
    figure = ax.get_figure()
    assert isinstance(figure, Figure)
    bar = figure.colorbar(image, ax=ax, pad=0.02, aspect=20, label=look.drawn)
    if look.scale == "log":
        log_ticks(bar.ax.yaxis, low, high)
    height = ax.get_window_extent().height / figure.dpi
    rows, names = stride(count, int(height / _INCHES_PER_LABEL)), short_names(series.layers)
    ax.set_yticks(rows, [names[row] for row in rows], fontsize=7)
    ax.tick_params(axis="y", length=2)
    span(ax, series.steps)
    ax.set_xlim(edges[0], edges[-1])
    finish(ax, title=title)
    return ax


def _ends(limits: Any) -> tuple[float | None, ...]:
    given = list(limits) if isinstance(limits, Iterable) else []
    ends = tuple(None if end is None else real(end) for end in given)
    if len(ends) != 2 or not all(end is None or isfinite(end) for end in ends):
        raise FigureError(f"`limits` must be two finite numbers, or None for either, got {limits!r:.80}. Try (0, 1).")
    return ends


def _edges(steps: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    # A step stands for the time halfway to its neighbors; the outer steps reach out by half the smallest gap.
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
    # Zero has no logarithm: it is shown as the smallest value.
    return np.maximum(values, low) if look.scale == "log" else values
