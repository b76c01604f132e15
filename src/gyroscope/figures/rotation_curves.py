"""Layer rotation curves: one line a layer, from 0 (where it started) to 1 (at a right angle to that)."""

from __future__ import annotations

from os import PathLike
from typing import cast

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes

from gyroscope.errors import FigureError
from gyroscope.figures.given import Layers, RunLike, as_run, find, flag, numbers
from gyroscope.figures.lines import depth_bar, depth_key, draw_lines, finish, own_axes, span
from gyroscope.figures.looks import frame, look_of


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
        x: the times of an array, 0, 1, 2, … if not given; for a run, what to show in place of its steps.
        ax: axes to draw on; those of a new figure if not given (`ax.figure`).
        layers: glob pattern or patterns on the names of a run's layers; all if not given.
        legend: whether to say which colour is which layer; by default on a run's own axes.
        title: text above.
        xlabel: text below, "step" for a run and "epoch" for an array unless given.
        ylabel: text beside.

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
            raise FigureError(f"curves has shape {y.shape}; it must be [times, layers]")
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
        ylabel=ylabel if ylabel is not None else look_of("rotation").label,
        title=title,
    )
    return ax


def _times(x: npt.ArrayLike, count: int, of: str) -> npt.NDArray[np.float64]:
    times = numbers(x, "x")
    if times.shape != (count,):
        raise FigureError(f"x has shape {times.shape}; for {of} it must be ({count},)")
    if not np.isfinite(times).all():
        raise FigureError("x holds values that are not finite; give the time of each row of the curves as a number")
    return times
