"""The course of noisy curves: a moving mean, and the range that single steps reach."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]

#: A moving mean covers this share of the run.
SHARE = 0.02


def window(times: int) -> int:
    """Return how many of `times` a moving mean covers: an odd number, 1 if there are few.

    >>> window(50), window(1000)
    (1, 21)
    """
    return 1 if times < 100 else 2 * int(SHARE * times / 2) + 1


def moving_mean(values: Values, width: int, *, log: bool = False) -> Values:
    """Return the mean of `width` times around each, [times, layers]; with `log` the geometric mean.

    What is not known (or not positive, with `log`) is left out of the mean, and stays unknown.

    >>> moving_mean(np.array([[0.0], [3.0], [6.0], [0.0]]), 3)[:, 0].tolist()
    [1.5, 3.0, 3.0, 3.0]
    >>> moving_mean(np.array([[1.0], [100.0]]), 3, log=True).round(6)[:, 0].tolist()
    [10.0, 10.0]
    """
    if width <= 1:
        return values
    known = values > 0 if log else ~np.isnan(values)
    terms = np.where(known, values, 1.0 if log else 0.0)
    sums, counts = _sums(np.log(terms) if log else terms, width), _sums(known.astype(float), width)
    mean = np.divide(sums, counts, out=np.full_like(sums, np.nan), where=known)
    return np.exp(mean) if log else mean


def _sums(values: Values, width: int) -> Values:
    # Differences of running sums cost the same for every width.
    times, half = len(values), width // 2
    running = np.concatenate([np.zeros((1, values.shape[1])), values.cumsum(axis=0)])
    at = np.arange(times)
    sums: Values = running[np.minimum(at + half + 1, times)] - running[np.maximum(at - half, 0)]
    return sums
