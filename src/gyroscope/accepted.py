"""What counts as a number where users give one. Each room refuses the rest in words of its own."""

from __future__ import annotations

import math
from operator import index
from typing import Any


def whole(value: Any, least: int | None = None) -> int | None:
    """What was given as an int; None if it is no whole number, or below `least`.

    Integers of NumPy and torch are, also in arrays of no dimension; truth values and floats are not.

    >>> import numpy as np
    >>> whole(3), whole(np.int64(3)), whole(np.array(3)), whole(3.0), whole(True), whole("3"), whole(3, least=4)
    (3, 3, 3, None, None, None, None)
    """
    if _is_truth(value):
        return None
    try:
        found = index(value)
    except TypeError:
        return None
    return found if least is None or found >= least else None


def seed(value: Any) -> int | None:
    """What a generator of torch's takes for a seed, as a number from 0 on; None if it is none.

    >>> seed(5), seed(-1) == 2**64 - 1, seed(2**64), seed("5")
    (5, True, None, None)
    """
    found = whole(value, -(2**63))
    return None if found is None or found >= 2**64 else found % 2**64


def real(value: Any) -> float:
    """What was given as a float; not a number if it is none. A tensor on an accelerator is waited for.

    Arrays and tensors of one element are numbers; text and complex numbers are not.

    >>> import numpy as np
    >>> real(0.5), real(np.float32(0.5)), real(np.array([0.5])), real("0.5"), real(None), real(1j), real([0.5])
    (0.5, 0.5, 0.5, nan, nan, nan, nan)
    """
    if isinstance(value, str | bytes | bytearray) or _is_truth(value):
        return math.nan
    try:
        # Arrays and tensors, of one element or none; item() of a tensor that needs a gradient does not warn.
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan


def _is_truth(value: Any) -> bool:
    return isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))
