"""Fewer points than were measured, with nothing lost that could be seen."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def thin(steps: npt.ArrayLike, values: npt.ArrayLike, *, keep: int = 1000, log: bool = False) -> tuple[Array, Array]:
    """Return about `keep` of the times of `values` [times, layers] as (x, y), both [kept, layers].

    Times are cut into equal runs; of each, every layer keeps its smallest and its largest value, so that a
    spike of one step is still there. The first and the last time are always kept. NaN is kept only where
    there is nothing else. For a `log`arithmic axis of times, runs become longer as it goes.

    >>> noise = np.zeros((10_000, 1))
    >>> noise[4321] = 7.0
    >>> x, y = thin(np.arange(10_000), noise, keep=100)
    >>> x.shape, float(y.max()), float(x[-1, 0])
    ((102, 1), 7.0, 9999.0)
    >>> np.unique(thin(np.arange(10_000), noise, keep=100, log=True)[0])[:4].tolist()
    [0.0, 1.0, 2.0, 3.0]
    """
    x, y = np.asarray(steps, dtype=float), np.asarray(values, dtype=float)
    times, layers = y.shape
    if times <= keep:
        return np.broadcast_to(x[:, None], y.shape), y
    buckets = max(keep // 2, 1)
    if log:
        starts = np.unique(np.geomspace(1, times, buckets, endpoint=False).astype(int)) - 1
    else:
        starts = np.arange(0, times, -(-times // buckets))
    rows = [np.zeros(layers, dtype=int), np.full(layers, times - 1)]
    for start, end in zip(starts, [*starts[1:], times], strict=True):
        some = y[start:end]
        unknown = np.isnan(some)
        rows.append(start + np.where(unknown, np.inf, some).argmin(axis=0))
        rows.append(start + np.where(unknown, -np.inf, some).argmax(axis=0))
    order = np.sort(rows, axis=0)
    return x[order], np.take_along_axis(y, order, axis=0)
