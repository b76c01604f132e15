"""Noisy curves of many layers: their moving means, over the range of single values."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes

from gyroscope.figures.depth import DEPTH
from gyroscope.figures.lines import NAMED, draw_lines
from gyroscope.figures.looks import Look
from gyroscope.figures.smooth import moving_mean, window

Values = npt.NDArray[np.float64]

# Noise of more layers than this covers them all.
_FEW = 4
# What changes by less than this share from one value to the next needs no smoothing.
_CALM = 0.02


def draw_course(ax: Axes, steps: npt.ArrayLike, values: Values, *, depth: Values, look: Look) -> int:
    """Draw `values` [times, layers] as one line a layer, and return how many values a point is the mean of.

    Lines of a few layers go through every value. Noise of many layers would cover them all: there, lines are
    moving means, on shades that span the single values: one a layer, or one for all of very many.

    >>> from gyroscope.figures.lines import own_axes
    >>> from gyroscope.figures.looks import look_of
    >>> ax, noise = own_axes(), np.random.default_rng(0).random((1000, 30))
    >>> draw_course(ax, np.arange(1000), noise, depth=np.linspace(0, 1, 30), look=look_of("rate"))
    21
    >>> len(ax.lines), len(ax.collections)
    (30, 1)
    """
    log = look.scale == "log"
    known = np.where(values > 0, values, np.nan) if log else values
    width = window(len(values)) if look.noisy and len(depth) > _FEW and not _calm(known, log) else 1
    if width > 1 and len(depth) <= NAMED:
        for layer, where in enumerate(depth):
            _shade(ax, steps, known[:, layer : layer + 1], width, DEPTH(float(where)), alpha=0.2)
    elif width > 1:
        _shade(ax, steps, known, max(width // 4, 1), "0.88")
    lines = moving_mean(values, width, log=log)
    draw_lines(ax, steps, lines, depth=depth, linewidth=1.0 if width > 1 else 1.4, positive=log)
    return width


def said(width: int) -> str:
    """Return what stands below the x axis of a course.

    >>> said(1), said(21)
    ('step', 'step (moving means of 21; shaded: single values)')
    """
    return "step" if width == 1 else f"step (moving means of {width:,}; shaded: single values)"


def _calm(values: Values, log: bool) -> bool:
    change = np.abs(np.diff(np.log(values) if log else values, axis=0))
    known = change[~np.isnan(change)]
    return not known.size or bool(np.median(known) < _CALM)


def _shade(ax: Axes, steps: npt.ArrayLike, values: Values, width: int, colour: Any, alpha: float = 1.0) -> None:
    """Fill from the smallest to the largest of each `width` values, over all layers."""
    some = ~np.isnan(values).all(axis=1)
    at, known = np.asarray(steps, dtype=float)[some], values[some]
    starts = np.arange(0, len(at), width)
    if not len(starts):
        return
    low = np.minimum.reduceat(np.nanmin(known, axis=1), starts)
    high = np.maximum.reduceat(np.nanmax(known, axis=1), starts)
    middle = (at[starts] + at[np.append(starts[1:], len(at)) - 1]) / 2
    # To both ends of the lines, and not only to the middle of the first and the last.
    x = np.concatenate([at[:1], middle, at[-1:]])
    ax.fill_between(
        x, np.pad(low, 1, "edge"), np.pad(high, 1, "edge"), color=colour, alpha=alpha, linewidth=0, zorder=0.5
    )
