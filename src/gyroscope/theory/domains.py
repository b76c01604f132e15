"""Domains of the arguments of this subpackage's functions: each check returns the value or raises DynamicsError.

They need no torch, so that the laws of a run can be evaluated without it.
"""

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


def nonnegative(name: str, given: Any, *, hint: str = "0.1") -> float:
    """Return a finite number ≥ 0.

    >>> nonnegative("lr", float("nan"))
    Traceback (most recent call last):
    gyroscope.errors.DynamicsError: `lr` must be a finite number ≥ 0, got nan. Try 0.1.
    """
    if not 0 <= real(given) < inf:
        raise DynamicsError(f"`{name}` must be a finite number ≥ 0, got {given!r:.80}. Try {hint}.")
    return real(given)


def positive(name: str, given: Any, *, hint: str = "1.0") -> float:
    """Return a finite number > 0.

    >>> positive("norm", 2)
    2.0
    """
    if not 0 < real(given) < inf:
        raise DynamicsError(f"`{name}` must be a finite number > 0, got {given!r:.80}. Try {hint}.")
    return real(given)


def fraction(name: str, given: Any, *, hint: str = "0.9") -> float:
    """Return a number in [0, 1).

    >>> fraction("momentum", 0.9)
    0.9
    """
    if not 0 <= real(given) < 1:
        raise DynamicsError(f"`{name}` must be a number ≥ 0 and < 1, got {given!r:.80}. Try {hint}.")
    return real(given)


def count(name: str, given: Any, *, least: int) -> int:
    """Return a whole number ≥ `least`, of Python, NumPy or torch.

    >>> import numpy as np
    >>> count("steps", np.int64(3), least=0)
    3
    """
    found = whole(given, least)
    if found is None:
        raise DynamicsError(f"`{name}` must be a whole number ≥ {least}, got {given!r:.80}. Try {max(least, 1)}.")
    return found


def integral(given: Any, *, least: int) -> int | None:
    """Return a whole number ≥ `least`, also one given as a float; None for anything else.

    >>> integral(3, least=1), integral(3.0, least=1), integral(3.5, least=1), integral("3", least=1)
    (3, 3, None, None)
    """
    found = real(given)
    return int(found) if found.is_integer() and found >= least else None


def numbers(name: str, given: Any) -> npt.NDArray[np.float64]:
    """Return one number or a series of numbers, in float64.

    >>> numbers("lr", [1, 2])
    array([1., 2.])
    """
    try:
        found = np.asarray(given.detach().cpu() if hasattr(given, "detach") else given)
        if found.size and found.dtype.kind not in "biuf":  # numpy would parse text
            raise ValueError
        return found.astype(np.float64)
    except (TypeError, ValueError, RuntimeError):
        raise DynamicsError(f"`{name}` must be a number or a series of numbers, got {given!r:.80}.") from None


def decay_share(lr: float, decay: float) -> float:
    """Return ηλ, the share of the weights that weight decay removes in a step; it must be below 1 (equation 22).

    >>> decay_share(0.1, 5.0)
    0.5
    >>> decay_share(0.5, 2.0)
    Traceback (most recent call last):
    gyroscope.errors.DynamicsError: `lr` times `decay` must be < 1, got 0.5 · 2 = 1: ...
    """
    nonnegative("lr", lr)
    nonnegative("decay", decay)
    if lr * decay >= 1:
        raise DynamicsError(
            f"`lr` times `decay` must be < 1, got {lr:g} · {decay:g} = {lr * decay:.4g}: a step would remove all of "
            "the weights or reverse their sign. Try a smaller `decay`."
        )
    return lr * decay


def generator(seed: Any) -> torch.Generator:
    """Return a random generator on the host.

    >>> generator(5).initial_seed()
    5
    """
    import torch

    return torch.Generator().manual_seed(accepted.seed(seed, DynamicsError))
