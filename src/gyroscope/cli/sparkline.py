"""A curve in one line of text."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BLOCKS = "▁▂▃▄▅▆▇█"


def sparklines(steps: npt.ArrayLike, values: npt.ArrayLike, *, width: int = 24, log: bool = False) -> list[str]:
    """Return one line of block characters a column of `values` [steps, layers], all on one scale.

    Each character is the mean of the values within its share of the steps; where there are none the last
    value before goes on. The scale begins at 0 for values that are never negative; with `log`, positive
    values that span more than a hundredfold are on a logarithmic one.

    >>> sparklines([0, 1, 2, 3], [[0.0, 0.0], [0.1, 0.5], [0.2, 0.8], [0.3, 1.0]], width=4)
    ['▁▁▂▃', '▁▅▇█']
    """
    x, y = np.asarray(steps, dtype=float), np.asarray(values, dtype=float)
    y = np.where(np.isfinite(y), y, np.nan)
    cells = _cells(x, y, min(width, len(x)))
    known = cells[~np.isnan(cells)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 0.0)
    if log and low > 0 and high > 100 * low:
        cells, low, high = np.log(cells), float(np.log(low)), float(np.log(high))
    else:
        low = min(low, 0.0)
    level = 0.0 * cells if low == high else (cells - low) / (high - low)  # what is not known stays so
    return ["".join(_block(value) for value in column) for column in level.T]


def _cells(x: npt.NDArray[np.float64], y: npt.NDArray[np.float64], width: int) -> npt.NDArray[np.float64]:
    span = max(float(x[-1] - x[0]), 1.0) if len(x) else 1.0
    cell = np.minimum(((x - x[0]) / span * width).astype(int), width - 1) if len(x) else np.array([], dtype=int)
    means = np.full((width, y.shape[1]), np.nan)
    last = np.full(y.shape[1], np.nan)
    for place in range(width):
        inside = y[cell == place]
        counts = (~np.isnan(inside)).sum(axis=0)
        sums = np.nansum(inside, axis=0)
        last = np.where(counts > 0, sums / np.maximum(counts, 1), last)
        means[place] = last
    return means


def _block(level: float) -> str:
    return " " if np.isnan(level) else BLOCKS[min(int(level * len(BLOCKS)), len(BLOCKS) - 1)]
