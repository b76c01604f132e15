"""The share of the weights that weight decay takes in a step, αλ (equation 22 of Grosse's chapter)."""

from __future__ import annotations

from math import inf

from gyroscope.base.accepted import real
from gyroscope.errors import DynamicsError


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
