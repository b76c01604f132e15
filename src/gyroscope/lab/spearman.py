"""Do two lists of numbers rank alike?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Return Spearman's rank correlation, ties sharing their mean rank; nan if either list is constant.

    >>> spearman([1, 2, 3], [10, 100, 1000])
    1.0
    """
    a, b = _ranks(x), _ranks(y)
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale else float("nan")


def _ranks(values: Sequence[float]) -> npt.NDArray[np.float64]:
    v = np.asarray(values, dtype=np.float64)
    below = (v[None, :] < v[:, None]).sum(axis=1)
    equal = (v[None, :] == v[:, None]).sum(axis=1)
    return np.asarray(below + (equal - 1) / 2, dtype=np.float64)
