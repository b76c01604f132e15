"""The rotation heatmap of a run as pixels."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import numpy.typing as npt

from gyroscope.errors import FigureError, MissingExtraError

LOG = logging.getLogger("gyroscope")

Pixels = npt.NDArray[np.uint8]


def heatmap(run: Any) -> Pixels | None:
    """Return the heatmap of `run` as `[height, width, 3]`, or None, with a line in the log, where it cannot be drawn.

    >>> from gyroscope.figures import example_run
    >>> heatmap(example_run(layers=5)).shape[2]
    3
    """
    try:
        from gyroscope.figures import rotation_heatmap
    except MissingExtraError as error:
        LOG.info("the rotation heatmap is left out: %s", error)
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    try:
        figure = rotation_heatmap(run).figure
    except FigureError as error:  # for instance a run without rotation
        LOG.info("the rotation heatmap is left out: %s", error)
        return None
    figure.set_dpi(150)
    canvas: Any = FigureCanvasAgg(figure)  # type: ignore[arg-type]
    canvas.draw()
    return np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[:, :, :3])
