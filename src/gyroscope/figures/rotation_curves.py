"""Layer rotation curves: one line a layer, from 0 (where it started) to 1 (at a right angle to that)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gyroscope.figures.depth import depth_colours


def rotation_curves(
    curves: npt.ArrayLike,
    x: npt.ArrayLike | None = None,
    *,
    ax: Axes | None = None,
    title: str | None = None,
    xlabel: str | None = "epoch",
    ylabel: str | None = "rotation (cosine distance)",
) -> Axes:
    """Draw `curves` [times, layers] against `x` [times] and return the axes; dark lines are first layers.

    Without `x` the times are 0, 1, 2, …; without `ax` the axes of a new figure are used (`ax.figure`).

    >>> ax = rotation_curves([[0.0, 0.0], [0.3, 0.6], [0.5, 0.9]])
    >>> len(ax.lines), [float(limit) for limit in ax.get_ylim()]
    (2, [0.0, 1.0])
    """
    y = np.asarray(curves, dtype=float)
    if y.ndim != 2:
        raise ValueError(f"curves has shape {y.shape}; it must be [times, layers]")
    times = np.arange(len(y)) if x is None else np.asarray(x, dtype=float)
    if times.shape != y.shape[:1]:
        raise ValueError(f"x has shape {times.shape}; for curves of shape {y.shape} it must be ({len(y)},)")
    if ax is None:
        ax = Figure(figsize=(4, 3), layout="constrained").subplots()

    for layer, colour in enumerate(depth_colours(y.shape[1])):
        ax.plot(times, y[:, layer], color=colour, linewidth=1.4)
    ax.set_ylim(0, 1)
    if len(times) > 1:
        ax.set_xlim(times[0], times[-1])
    ax.spines[["top", "right"]].set_visible(False)
    if title is not None:
        ax.set_title(title)
    if xlabel is not None:
        ax.set_xlabel(xlabel)
    if ylabel is not None:
        ax.set_ylabel(ylabel)
    return ax
