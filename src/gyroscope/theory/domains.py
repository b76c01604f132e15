"""Numbers as they are given: anything else is no number, rather than an error of Python's."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gyroscope.base import accepted
from gyroscope.base.accepted import real, whole
from gyroscope.errors import DynamicsError

if TYPE_CHECKING:
    import torch


def count(name: str, given: Any, *, least: int) -> int:
    """A whole number from `least` on, of Python, numpy or torch; what is none is refused by its name.

    >>> import numpy as np
    >>> count("steps", np.int64(3), least=0)
    3
    """
    found = whole(given, least)
    if found is None:
        raise DynamicsError(f"{name} is {given!r}; accepted are whole numbers from {least}.")
    return found


def integral(given: Any, *, least: int) -> int | None:
    """A whole number from `least` on, also as a float, for formulas that take either; None for what is none.

    >>> integral(3, least=1), integral(3.0, least=1), integral(3.5, least=1), integral("3", least=1)
    (3, 3, None, None)
    """
    found = real(given)
    return int(found) if found.is_integer() and found >= least else None


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

    return torch.Generator().manual_seed(accepted.seed(seed, DynamicsError))


def check_share(lr: float, decay: float) -> float:
    """αλ, the share of the weights that decay takes in a step; refused unless it is below 1 (equation 22).

    >>> check_share(0.1, 5.0)
    0.5
    >>> check_share(0.5, 2.0)
    Traceback (most recent call last):
    gyroscope.errors.DynamicsError: Weight decay does not apply because αλ is 1 (α = 0.5, λ = 2): ...
    """
    check_strength("lr", lr)
    check_strength("decay", decay)
    if lr * decay >= 1:
        raise DynamicsError(
            f"Weight decay does not apply because αλ is {lr * decay:.4g} (α = {lr:g}, λ = {decay:g}): a step would "
            "take away all of the weights or turn them around. αλ must be below 1; take a smaller α or λ."
        )
    return lr * decay


def check_strength(name: str, value: float) -> None:
    """Refuse what is no finite number from 0.

    >>> check_strength("decay", 0.1)
    """
    if not 0 <= real(value) < inf:
        raise DynamicsError(f"{name} is {value!r}; accepted are finite numbers from 0.")
