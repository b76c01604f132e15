"""Fewer points than were measured, with nothing lost that could be seen."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def thin(steps: npt.ArrayLike, values: npt.ArrayLike, *, keep: int = 1000) -> tuple[Array, Array]:
    """Return about `keep` of the times of `values` [times, layers] as (x, y), both [kept, layers].

    Times are cut into equal runs; of each, every layer keeps its smallest and its largest value, so that a
    spike of one step is still there. The first and the last time are always kept. NaN is kept only where
    there is nothing else.

    >>> noise = np.zeros((10_000, 1))
    >>> noise[4321] = 7.0
    >>> x, y = thin(np.arange(10_000), noise, keep=100)
    >>> x.shape, float(y.max()), float(x[-1, 0])
    ((102, 1), 7.0, 9999.0)
    """
    x, y = np.asarray(steps, dtype=float), np.asarray(values, dtype=float)
    times, layers = y.shape
    if times <= keep:
        return np.broadcast_to(x[:, None], y.shape), y
    buckets = max(keep // 2, 1)
    width = -(-times // buckets)
    buckets = -(-times // width)
    padded = np.full((buckets * width, layers), np.nan)
    padded[:times] = y
    folded = padded.reshape(buckets, width, layers)
    unknown = np.isnan(folded)
    start = np.arange(0, times, width)[:, None]
    smallest = start + np.where(unknown, np.inf, folded).argmin(axis=1)
    largest = start + np.where(unknown, -np.inf, folded).argmax(axis=1)
    ends = np.tile([[0], [times - 1]], layers)
    rows = np.sort(np.concatenate([smallest, largest, ends]), axis=0)
    return x[rows], np.take_along_axis(y, rows, axis=0)
