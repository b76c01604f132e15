"""Noisy curves of many layers: their moving means, over the range that single values reach."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes

from gyroscope.figures.lines import NAMED, draw_lines
from gyroscope.figures.looks import Look
from gyroscope.figures.smooth import moving_mean, window
from gyroscope.figures.thin import thin

Values = npt.NDArray[np.float64]


def draw_course(
    ax: Axes, steps: npt.ArrayLike, values: Values, *, depth: Values, look: Look, count: int | None = None
) -> int:
    """Draw `values` [times, layers] as one line a layer, and return how many values a point is the mean of.

    Lines of a few layers go through every value. Noise of many layers would cover them all: there, lines are
    moving means, and a grey band spans the smallest and the largest single value. `count` is the number of
    layers on the axes in the end, if these are not all.

    >>> from gyroscope.figures.lines import own_axes
    >>> from gyroscope.figures.looks import look_of
    >>> ax, noise = own_axes(), np.random.default_rng(0).random((1000, 30))
    >>> draw_course(ax, np.arange(1000), noise, depth=np.linspace(0, 1, 30), look=look_of("rate"))
    21
    >>> len(ax.lines), len(ax.collections)
    (30, 1)
    """
    log = look.scale == "log"
    width = window(len(values)) if look.noisy and (count or len(depth)) > NAMED else 1
    if width > 1:
        _band(ax, steps, values, log)
    lines = moving_mean(values, width, log=log)
    draw_lines(ax, steps, lines, depth=depth, linewidth=1.0 if width > 1 else 1.4, positive=log)
    return width


def said(width: int) -> str:
    """Return what stands below the x axis of a course.

    >>> said(1), said(21)
    ('step', 'step (moving means of 21; grey: single values)')
    """
    return "step" if width == 1 else f"step (moving means of {width:,}; grey: single values)"


def _band(ax: Axes, steps: npt.ArrayLike, values: Values, log: bool) -> None:
    known = np.where(values > 0, values, np.nan) if log else values
    some = ~np.isnan(known).all(axis=1)
    if not some.any():
        return
    at, known = np.asarray(steps)[some], known[some]
    x, low = thin(at, np.nanmin(known, axis=1)[:, None])
    x_high, high = thin(at, np.nanmax(known, axis=1)[:, None])
    # Both ends of the band, each with its own extremes, at the times of both.
    both = np.union1d(x[:, 0], x_high[:, 0])
    bottom, top = np.interp(both, x[:, 0], low[:, 0]), np.interp(both, x_high[:, 0], high[:, 0])
    ax.fill_between(both, bottom, top, color="0.88", linewidth=0, zorder=0.5)
