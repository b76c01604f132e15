"""Neurons within layers: the fraction that is never or always active, and how unequally neurons rotate."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from gyroscope.base.accepted import choice
from gyroscope.errors import FigureError
from gyroscope.figures.drawing import MANY, Style, depth_key, draw_lines, finish, own_axes, span, style_key
from gyroscope.figures.looks import frame
from gyroscope.figures.over_depth import BARS, colors, draw_bars, layer_axis
from gyroscope.figures.run_data import Layers, Measured, RunLike, as_run, described, find, flag, held, holds
from gyroscope.store.labels import look_of

Show = Literal["activity", "rotation"]

_STYLES: tuple[tuple[str, Style], ...] = (("dying", "-"), ("full", "--"))
_QUANTILES = ("neuron_p0", "neuron_p10", "neuron_p50", "neuron_p90", "neuron_p100")


def neurons(
    run: RunLike,
    show: Show | None = None,
    *,
    ax: Axes | None = None,
    layers: Layers = None,
    legend: bool | None = None,
    title: str | None = None,
) -> Axes:
    """Draw the activity or the rotation of the neurons within each layer, and return the axes.

    "activity": the fraction of dying (never active, solid) and of full neurons (always active, dashed) over the steps.
    "rotation": how far the neurons of each layer have rotated at the last step: the median, the range from the 10th to
    the 90th percentile, and a thinner line from the least to the most rotated neuron.

    Args:
        run: a run or its path; activity is sampled, rotation is recorded with `watch(..., neurons=True)`.
        show: "activity" or "rotation"; by default the first of them that the run holds.
        ax: axes to draw on; by default those of a new figure.
        layers: glob pattern or patterns on the layers' names; all by default.
        legend: whether to explain which color is which layer; by default on new axes only.
        title: title above the axes.

    >>> from gyroscope.figures import example_run
    >>> neurons(example_run()).get_ylabel()
    'fraction of neurons'
    >>> neurons(example_run(), "rotation").get_xlabel()
    'layer, in forward order'
    """
    run = as_run(run)
    if show is not None:
        choice(show, "show", get_args(Show), FigureError)
    active = [name for name, _ in _STYLES if name in run.quantities]
    turned = all(name in run.quantities for name in _QUANTILES)
    if show != "rotation" and active:
        return _activity(run, ax, layers, legend, title)
    if show != "activity" and turned:
        return _rotation(run, ax, layers, title)
    wanted = "dying or full" if show == "activity" else "neuron_p0 … neuron_p100" if show else "quantities of neurons"
    raise FigureError(
        f"{described(run)} has no {wanted}; it holds {held(run)}. "
        "Dying and full neurons are recorded on sampled steps, their rotation with watch(..., neurons=True)."
    )


def _activity(run: Measured, ax: Axes | None, layers: Layers, legend: bool | None, title: str | None) -> Axes:
    own = ax is None
    ax = own_axes(ax)
    drawn: list[tuple[str, Style]] = []
    steps, largest = [], 0.0
    there = [name for name, _ in _STYLES if holds(run, name, layers=layers)]
    for name, style in _STYLES:
        if name in there or (name in run.quantities and not there):
            series = find(run, name, layers=layers)
            draw_lines(ax, series.steps, series.values, depth=series.depth, linestyle=style)
            drawn.append((f"{name} ({'never' if name == 'dying' else 'always'} active)", style))
            steps.append(series.steps)
            largest = max(largest, float(np.nanmax(series.values)))
    # Most fractions are small: the axis ends slightly above the largest, but not below 5 %.
    ax.set_ylim(0, min(1.02, max(1.15 * largest, 0.05)))
    span(ax, np.concatenate(steps))
    if flag(legend, "legend", default=own):
        depth_key(ax, series.layers, series.depth, len(run.layers))
    style_key(ax, drawn, loc="best" if len(ax.lines) <= MANY else "upper left")
    finish(ax, ylabel="fraction of neurons", title=title)
    return ax


def _rotation(run: Measured, ax: Axes | None, layers: Layers, title: str | None) -> Axes:
    series = [find(run, name, layers=layers) for name in _QUANTILES]
    names, step = series[2].layers, int(series[2].steps[-1])
    least, low, middle, high, most = (s.at(step)[1] for s in series)
    ax = own_axes(ax, width=float(np.clip(2.6 + 0.28 * len(names), 4.2, 7)))
    [color] = colors(1)
    at = np.arange(1, len(names) + 1)
    if len(names) > BARS:
        ax.fill_between(at, least, most, color=color, alpha=0.12, linewidth=0)
    else:
        ax.vlines(at, least, most, color=color, alpha=0.4, linewidth=0.8)
    draw_bars(ax, low, middle, high)
    frame(ax, look_of("rotation"), most, close=True)
    layer_axis(ax, names)
    handles = [
        Line2D([], [], color=color, marker="o", markersize=4, linestyle=""),
        Line2D([], [], color=color, linewidth=2),
        Line2D([], [], color=color, linewidth=0.8, alpha=0.4),
    ]
    ax.legend(handles, ["median", "p10 – p90", "least – most"], loc="best", fontsize=8, framealpha=0.8)
    ylabel = f"rotation of neurons at step {step:,}"
    finish(ax, xlabel="layer, in forward order", ylabel=ylabel, title=title)
    return ax
