"""The schedule that weight decay gives the effective learning rate (section 5.1, equations 23 to 25, figure 7).

Under SGD the norm of a scale-invariant layer grows by steps at a right angle and shrinks by weight decay. With
y_k = ‖w^(k)‖², d = αλ and g̃ the norm of the gradient at the unit vector,

    y_{k+1} = (1 − d)² y_k + α² g̃² / y_k        (23)

and the effective learning rate α/y levels off, where without decay it would fall for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, log, log1p, sqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gyroscope.base.accepted import real
from gyroscope.errors import DynamicsError
from gyroscope.theory.given import count
from gyroscope.theory.share import check_share

Floats = npt.NDArray[np.float64]


class FixedPoint(NamedTuple):
    """Where the recurrence stays: ‖w‖², the effective learning rate there, and by what a distance to it is multiplied.

    Attributes:
        square: ‖w‖².
        rate: α/‖w‖².
        contraction: a small distance from `square` is multiplied by it in every step; negative where steps overshoot.
    """

    square: float
    rate: float
    contraction: float


def norm_squares(lr: float, decay: float, steps: int, *, start: float = 1.0, gradient: float = 1.0) -> Floats:
    """‖w^(k)‖² for k = 0 … `steps`: the recurrence (23).

    Args:
        lr: α.
        decay: λ; with 0 this is equation 19.
        steps: how many.
        start: ‖w^(0)‖.
        gradient: g̃.

    >>> norm_squares(0.5, 0.2, 2).round(4)                # (1 − 0.1)² · 1 + 0.25, and once more
    array([1.    , 1.06  , 1.0944])
    """
    share = check_share(lr, decay)
    steps = count("steps", steps, least=0)
    if not 0 < real(start) < inf:
        raise DynamicsError(
            f"start is {start!r}; accepted are finite norms above 0, since a zero vector has no direction."
        )
    if not 0 <= real(gradient) < inf:
        raise DynamicsError(f"gradient is {gradient!r}; accepted are finite norms from 0.")
    keep, push = (1 - share) ** 2, (lr * gradient) ** 2
    squares = np.empty(steps + 1)
    squares[0] = y = start**2
    for k in range(1, steps + 1):
        y = keep * y + push / y
        squares[k] = y
    return squares


def fixed_point(lr: float, decay: float, *, gradient: float = 1.0) -> FixedPoint:
    """Where the recurrence (23) stays, exactly: y² = α²g̃²/(d(2 − d)) and α/y = √(d(2 − d))/g̃ with d = αλ.

    A distance from it shrinks by the factor 2(1 − d)² − 1 in a step: slowly, as 1 − 4d, for small d.

    Raises:
        DynamicsError: there is none, for λ = 0, α = 0 or g̃ = 0.

    >>> at = fixed_point(0.1, 0.5)
    >>> round(at.square, 4), round(at.rate, 4), round(at.contraction, 3)
    (0.3203, 0.3122, 0.805)
    """
    d = _pull(lr, decay, gradient)
    rate = sqrt(d * (2 - d)) / gradient
    return FixedPoint(lr / rate, rate, 2 * (1 - d) ** 2 - 1)


def square_at_rest(lr: float, decay: float, *, gradient: float = 1.0) -> float:
    """‖w^(∞)‖² ≈ g̃ √(α/(2λ)) (equation 24): the fixed point to first order in αλ, too small by a factor √(1 − αλ/2).

    >>> round(square_at_rest(0.1, 0.5), 4)
    0.3162
    """
    _pull(lr, decay, gradient)
    return gradient * sqrt(lr / (2 * decay))


def rate_at_rest(lr: float, decay: float, *, gradient: float = 1.0) -> float:
    """α̂_∞ = α/‖w^(∞)‖² ≈ √(2αλ)/g̃ (equation 25).

    It depends on α, by the root of αλ; what it does not depend on is where the norm starts.

    >>> round(rate_at_rest(0.1, 0.5), 4)
    0.3162
    """
    _pull(lr, decay, gradient)
    return sqrt(2 * lr * decay) / gradient


def steps_to_rest(lr: float, decay: float, *, within: float = 0.5) -> float:
    """The steps after which a small distance from the fixed point is `within` of itself: ln(within)/ln|2(1 − d)² − 1|.

    >>> round(steps_to_rest(0.1, 5e-4))                   # ln 2/(4αλ)
    3465
    """
    if not 0 < real(within) < 1:
        raise DynamicsError(f"within is {within!r}; accepted are shares between 0 and 1.")
    contraction, d = fixed_point(lr, decay).contraction, lr * decay
    if contraction == 0:
        return 1.0
    # As ln(1 − 2d(2 − d)) for small d, where the factor itself may round to 1.
    return log(within) / (log1p(-2 * d * (2 - d)) if contraction > 0 else log(-contraction))


@dataclass(frozen=True, eq=False)
class Schedules:
    """Figure 7: effective learning rates over steps, a row a learning rate.

    Attributes:
        lr: α [R].
        decay: λ [R].
        steps: k [K + 1].
        norm: ‖w^(k)‖ [R, K + 1].
        rate: α̂_k = α/‖w^(k)‖² [R, K + 1].
        limit: α̂_∞ of equation 25 [R].
        exact: where the recurrence itself ends [R].
    """

    lr: Floats
    decay: Floats
    steps: npt.NDArray[np.int64]
    norm: Floats
    rate: Floats
    limit: Floats
    exact: Floats


def figure7(
    rates: Sequence[float] = (1e-3, 1e-2, 1e-1, 1.0),
    *,
    decay: float | None = None,
    product: float | None = None,
    steps: int = 10_000,
    start: float = 1.0,
    gradient: float = 1.0,
) -> Schedules:
    """The effective learning rates of a scale-invariant layer under SGD with weight decay, for several α (figure 7).

    Equation 25 has α̂_∞ = √(2αλ). With one λ for all (`decay`, 0.01 unless told) each α levels off at a value of its
    own; with one αλ for all (`product`) they level off at the same value, whatever α.

    Raises:
        DynamicsError: an αλ is 0, or 1 and more.

    >>> figure = figure7([0.1, 1.0], product=1e-3, steps=4000)
    >>> figure.rate[:, -1].round(4), figure.limit.round(4)
    (array([0.0447, 0.0447]), array([0.0447, 0.0447]))
    """
    if decay is not None and product is not None:
        raise DynamicsError("decay and product were both given; give λ for all rates, or αλ for all.")
    if not isinstance(rates, Iterable) or not len(rates) or not all(0 < real(lr) < inf for lr in rates):
        raise DynamicsError(f"rates is {rates!r}; accepted are one or more finite numbers above 0.")
    strength = 0.01 if decay is None else decay
    pairs = [(lr, strength if product is None else product / lr) for lr in rates]
    squares = np.stack([norm_squares(lr, d, steps, start=start, gradient=gradient) for lr, d in pairs])
    lrs, decays = (np.array(column, dtype=np.float64) for column in zip(*pairs, strict=True))
    return Schedules(
        lr=lrs,
        decay=decays,
        steps=np.arange(steps + 1),
        norm=np.sqrt(squares),
        rate=lrs[:, None] / squares,
        limit=np.array([rate_at_rest(lr, d, gradient=gradient) for lr, d in pairs]),
        exact=np.array([fixed_point(lr, d, gradient=gradient).rate for lr, d in pairs]),
    )


def _pull(lr: float, decay: float, gradient: float) -> float:
    """αλ, where the recurrence has a fixed point."""
    share = check_share(lr, decay)
    if not 0 <= real(gradient) < inf:
        raise DynamicsError(f"gradient is {gradient!r}; accepted are finite norms above 0.")
    reasons = {
        "λ is 0: without decay the norm grows for ever, and the effective learning rate falls as 1/√k": decay,
        "α is 0: nothing moves, and every norm is a fixed point": lr,
        "the gradient is 0: decay alone shrinks the weights to nothing": gradient,
    }
    for reason, value in reasons.items():
        if value == 0:
            raise DynamicsError(f"The equilibrium of weight decay does not apply because {reason}. It must be above 0.")
    if share == 0:
        raise DynamicsError(f"αλ is below the smallest float64 (α = {lr:g}, λ = {decay:g}): nothing decays.")
    return share
