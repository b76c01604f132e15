"""The effective learning rate of a layer whose scale does not matter (section 4.3 of Grosse's chapter)."""

from __future__ import annotations

from math import nan

import numpy as np
import numpy.typing as npt

from gyroscope.dynamics.errors import DynamicsError
from gyroscope.dynamics.law import Floats


def effective_lr(lr: npt.ArrayLike, weight_norm: npt.ArrayLike, *, momentum: float = 0.0) -> Floats:
    """The effective learning rate η/‖w‖², and η/((1−β)‖w‖²) with momentum β (section 4.3); NaN where ‖w‖ is zero.

    It is the rate at which the direction w/‖w‖ of a scale-invariant layer is trained, whatever its norm.

    >>> effective_lr(0.1, [1.0, 2.0]).tolist()
    [0.1, 0.025]
    """
    if not 0.0 <= momentum < 1.0:
        raise DynamicsError(f"momentum is {momentum}; accepted are values from 0 to below 1.")
    rate, norm = np.asarray(lr, dtype=np.float64), np.asarray(weight_norm, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(norm > 0, rate / ((1.0 - momentum) * norm * norm), nan), dtype=np.float64)
