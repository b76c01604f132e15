"""Names beside points, where they do not cover each other if that can be helped."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from gyroscope.figures.names import short_names

_SIZE = 7.5
# Offsets in points from the mark, and the side of the text that is put there.
_PLACES = [(5, 0, "left"), (-5, 0, "right"), (0, 10, "center"), (0, -10, "center")]
_PLACES += [(dx, dy, "left" if dx > 0 else "right") for dy in (10, -10, 20, -20, 30, -30) for dx in (5, -5)]

Box = tuple[float, float, float, float]


def place_labels(ax: Axes, x: npt.ArrayLike, y: npt.ArrayLike, names: Sequence[str]) -> None:
    """Write `names` beside the points (x, y) of `ax`, each at the first place that is still free.

    >>> from gyroscope.figures.lines import own_axes
    >>> ax = own_axes()
    >>> place_labels(ax, [0.5, 0.5], [1.0, 1.0], ["one", "two"])
    >>> len({text.get_position() for text in ax.texts})
    2
    """
    figure = ax.get_figure()
    assert isinstance(figure, Figure)
    ax.autoscale_view()
    points = ax.transData.transform(np.column_stack([np.asarray(x, float), np.asarray(y, float)]))
    points *= 72 / figure.dpi
    frame = ax.get_window_extent()
    left, right = frame.x0 * 72 / figure.dpi, frame.x1 * 72 / figure.dpi
    taken: list[Box] = [(px - 3, py - 3, px + 3, py + 3) for px, py in points]
    for (px, py), at_x, at_y, name in zip(points, np.asarray(x), np.asarray(y), short_names(names), strict=True):
        boxes = [(_box(px + dx, py + dy, side, name), dx, dy, side) for dx, dy, side in _PLACES]
        costs = [_cost(box, taken, left, right) for box, *_ in boxes]
        box, dx, dy, side = boxes[int(np.argmin(costs))]
        taken.append(box)
        ax.annotate(
            name,
            (at_x, at_y),
            xytext=(dx, dy),
            textcoords="offset points",
            ha=side,
            va="center",
            fontsize=_SIZE,
            path_effects=[withStroke(linewidth=2, foreground="white")],
            arrowprops={"arrowstyle": "-", "color": "0.7", "linewidth": 0.5} if abs(dy) > 10 else None,
        )


def _box(x: float, y: float, side: str, name: str) -> Box:
    # Close enough without asking a renderer: a letter is about 0.58 of the font size wide.
    width = 0.58 * _SIZE * len(name)
    start = x if side == "left" else x - width if side == "right" else x - width / 2
    return start, y - 0.6 * _SIZE, start + width, y + 0.6 * _SIZE


def _cost(box: Box, taken: list[Box], left: float, right: float) -> float:
    outside = max(left - box[0], 0) + max(box[2] - right, 0)
    return outside * _SIZE + sum(
        max(min(box[2], t[2]) - max(box[0], t[0]), 0) * max(min(box[3], t[3]) - max(box[1], t[1]), 0) for t in taken
    )
