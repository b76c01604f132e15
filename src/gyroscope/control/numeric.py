"""Numbers as users give them: Python's, NumPy's, or tensors of one element."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor


def as_number(given: Any) -> float:
    """What was given as a float; not a number if it is none. A tensor on an accelerator is waited for.

    >>> import torch
    >>> as_number(torch.tensor(0.5)), as_number(1), as_number("1"), as_number(torch.ones(2))
    (0.5, 1.0, nan, nan)
    """
    if isinstance(given, str | bytes):
        return math.nan
    try:
        return float(given.detach() if isinstance(given, Tensor) else given)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # several elements, a complex number, an int too large
        return math.nan


def is_rate(given: Any) -> bool:
    """Whether this can be a rate: a finite number from 0.

    Of a tensor on an accelerator only the shape is looked at, for its value would be waited for.

    >>> import torch
    >>> is_rate(0.1), is_rate(torch.tensor([0.1])), is_rate(torch.tensor(-0.1)), is_rate("0.1")
    (True, True, False, False)
    """
    if isinstance(given, Tensor) and given.device.type != "cpu":
        return given.numel() == 1
    return 0.0 <= as_number(given) < math.inf
