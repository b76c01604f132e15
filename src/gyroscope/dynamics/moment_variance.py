"""How much of the spread of second moments lies between layers rather than within them (section 2.2).

Adam divides the step of every element by √v. If v differs mostly from layer to layer, a diagonal preconditioner is, in
the main, a learning rate for each layer. The variance of log v says how far that goes: it is the sum of the variance of
the layers' means and the mean of the variances within layers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gyroscope.dynamics.errors import DynamicsError

#: [layers, 3]: the 10th, 50th and 90th percentile of v.
Percentiles = npt.NDArray[np.float64]

# Of a normal distribution the 10th and the 90th percentile are so many standard deviations apart.
_APART = 2.5631


def share_between(percentiles: Percentiles) -> float:
    """The share of the variance of log v that lies between layers, B / (B + W).

    B is the variance over layers of the median m_l of log v, and W the mean over layers of the variance s_l² within,
    which the percentiles tell if log v is normal there: s_l = (log p90 − log p10) / 2.5631. Layers count alike.

    >>> share_between(np.array([[1.0, 10.0, 100.0], [1.0, 10.0, 100.0]]))
    0.0
    >>> share_between(np.array([[1.0, 1.0, 1.0], [5.0, 5.0, 5.0]]))
    1.0
    """
    logs = np.log(_positive(percentiles))
    between = float(logs[:, 1].var())
    within = float((((logs[:, 2] - logs[:, 0]) / _APART) ** 2).mean())
    return between / (between + within) if between + within > 0 else float("nan")


def spans(percentiles: Percentiles) -> tuple[float, float]:
    """Between layers the largest median over the smallest; within them p90 / p10, in the middle layer.

    >>> spans(np.array([[1.0, 2.0, 4.0], [10.0, 20.0, 40.0], [100.0, 200.0, 400.0]]))
    (100.0, 4.0)
    """
    known = _positive(percentiles)
    return float(known[:, 1].max() / known[:, 1].min()), float(np.median(known[:, 2] / known[:, 0]))


def _positive(percentiles: Percentiles) -> Percentiles:
    """The layers of which at least nine in ten elements have had a gradient."""
    known: Percentiles = percentiles[(percentiles > 0).all(axis=1)]
    if not len(known):
        raise DynamicsError("no layer has second moments above zero in nine of ten elements; was the network trained?")
    return known
