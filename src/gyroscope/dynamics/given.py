"""Numbers as they are given: anything else is no number, rather than an error of Python's."""

from __future__ import annotations

from math import isfinite
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import numpy.typing as npt

from gyroscope.dynamics.errors import DynamicsError

if TYPE_CHECKING:
    import torch


def finite(value: Any) -> bool:
    """Whether this is one finite real number, of Python, numpy or torch.

    >>> import numpy as np
    >>> finite(0.1), finite(np.float32(0.1)), finite(float("nan")), finite("0.1"), finite(None)
    (True, True, False, False, False)
    """
    try:
        return isfinite(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return False


def whole(value: Any, least: int) -> TypeGuard[int]:
    """Whether this is a whole number, of Python or numpy, from `least` on.

    >>> import numpy as np
    >>> whole(3, 1), whole(np.int64(3), 1), whole(0, 1), whole(3.0, 1), whole(True, 1)
    (True, True, False, False, False)
    """
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= least


def numbers(name: str, given: Any) -> npt.NDArray[np.float64]:
    """One number or a series of them, in float64.

    >>> numbers("lr", [1, 2])
    array([1., 2.])
    """
    try:
        found = np.asarray(given.detach().cpu() if hasattr(given, "detach") else given)
        if found.size and found.dtype.kind not in "biuf":  # numpy would take text for numbers
            raise ValueError
        return found.astype(np.float64)
    except (TypeError, ValueError, RuntimeError):
        raise DynamicsError(f"{name} is {given!r}; accepted are a number, or a series of numbers.") from None


def generator(seed: Any) -> torch.Generator:
    """What random numbers are drawn from, on the host.

    >>> generator(5).initial_seed()
    5
    """
    import torch  # which the laws of a run, in numpy alone, do without

    check_seed(seed)
    return torch.Generator().manual_seed(int(seed))


def check_seed(seed: Any) -> None:
    """Refuse what is no seed of torch's.

    >>> check_seed(5)
    """
    if not whole(seed, -(2**63)) or int(seed) >= 2**64:
        raise DynamicsError(f"seed is {seed!r}; accepted are whole numbers from −2⁶³ to 2⁶⁴ − 1.")
