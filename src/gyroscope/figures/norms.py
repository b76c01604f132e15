"""How long each layer's weights, gradients or updates are."""

from __future__ import annotations

from typing import Literal, get_args

from matplotlib.axes import Axes

from gyroscope.errors import FigureError
from gyroscope.figures.curves import curves
from gyroscope.figures.given import Layers, RunLike

Which = Literal["weight", "gradient", "update"]


def norms(
    run: RunLike,
    which: Which = "weight",
    *,
    relative: bool = False,
    ax: Axes | None = None,
    layers: Layers = None,
    legend: bool | None = None,
    title: str | None = None,
) -> Axes:
    """Draw the norm of each layer's weights, gradients or updates, and return the axes.

    Args:
        run: a run or its path.
        which: "weight", "gradient" or "update".
        relative: whether to divide each layer's norms by its first, which shows growth and decay.
        ax: axes to draw on; those of a new figure if not given.
        layers: glob pattern or patterns on the layers' names; all if not given.
        legend: whether to say which colour is which layer; by default on own axes.
        title: text above.

    >>> from gyroscope.figures import example_run
    >>> norms(example_run(), "gradient").get_ylabel()
    'gradient norm ‖g‖'
    """
    if not isinstance(which, str) or which not in get_args(Which):
        raise FigureError(f"which={which!r} is not known; use one of {', '.join(map(repr, get_args(Which)))}")
    return curves(run, f"{which}_norm", relative=relative, ax=ax, layers=layers, legend=legend, title=title)
