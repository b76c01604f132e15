"""The equilibrium that weight decay leads a scale-invariant layer to (section 5.1, equations 23 to 25, figure 7).

Under SGD the norm of a scale-invariant layer grows by steps at a right angle to the weights and shrinks by weight
decay. With y_k = ‖w^(k)‖², d = ηλ and g̃ the norm of the gradient at the unit vector,

    y_{k+1} = (1 − d)² y_k + η² g̃² / y_k        (23)

and the effective learning rate η/y levels off; without decay it would fall forever. `equilibrium` extends this to
momentum and AdamW.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite, log, log1p, nan, sqrt
from typing import Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from gyroscope.base.accepted import choice, real
from gyroscope.errors import DynamicsError
from gyroscope.theory.domains import count, decay_share, fraction, nonnegative, positive
from gyroscope.theory.effective_rate import Floats, Kind


class FixedPoint(NamedTuple):
    """The fixed point of the recurrence (23).

    Attributes:
        square: ‖w‖².
        rate: η/‖w‖², the effective learning rate.
        contraction: the factor by which each step multiplies a small distance from `square`; negative if steps
            overshoot.
    """

    square: float
    rate: float
    contraction: float


def norm_squares(lr: float, decay: float, steps: int, *, start: float = 1.0, gradient: float = 1.0) -> Floats:
    """Return ‖w^(k)‖² for k = 0 … `steps`: the recurrence (23).

    Args:
        lr: η.
        decay: λ; with 0 this is equation 19.
        steps: number of steps.
        start: ‖w^(0)‖.
        gradient: g̃.

    >>> norm_squares(0.5, 0.2, 2).round(4)                # (1 − 0.1)² · 1 + 0.25, and once more
    array([1.    , 1.06  , 1.0944])
    """
    share = decay_share(lr, decay)
    steps = count("steps", steps, least=0)
    positive("start", start)
    nonnegative("gradient", gradient, hint="1.0")
    keep, push = (1 - share) ** 2, (lr * gradient) ** 2
    squares = np.empty(steps + 1)
    squares[0] = y = start**2
    for k in range(1, steps + 1):
        y = keep * y + push / y
        squares[k] = y
    return squares


def fixed_point(lr: float, decay: float, *, gradient: float = 1.0) -> FixedPoint:
    """Return the exact fixed point of (23): y² = η²g̃²/(d(2 − d)) and η/y = √(d(2 − d))/g̃ with d = ηλ.

    Each step multiplies a distance from it by 2(1 − d)² − 1, which is about 1 − 4d for small d.

    Raises:
        DynamicsError: λ = 0, η = 0 or g̃ = 0, which have no fixed point.

    >>> at = fixed_point(0.1, 0.5)
    >>> round(at.square, 4), round(at.rate, 4), round(at.contraction, 3)
    (0.3203, 0.3122, 0.805)
    """
    d = _pull(lr, decay, gradient)
    rate = sqrt(d * (2 - d)) / gradient
    return FixedPoint(lr / rate, rate, 2 * (1 - d) ** 2 - 1)


def square_at_rest(lr: float, decay: float, *, gradient: float = 1.0) -> float:
    """‖w^(∞)‖² ≈ g̃ √(η/(2λ)) (equation 24): the fixed point to first order in ηλ, low by a factor √(1 − ηλ/2).

    >>> round(square_at_rest(0.1, 0.5), 4)
    0.3162
    """
    _pull(lr, decay, gradient)
    return gradient * sqrt(lr / (2 * decay))


def rate_at_rest(lr: float, decay: float, *, gradient: float = 1.0) -> float:
    """η̂_∞ = η/‖w^(∞)‖² ≈ √(2ηλ)/g̃ (equation 25).

    It depends on η through √(ηλ), and not on the norm at the start.

    >>> round(rate_at_rest(0.1, 0.5), 4)
    0.3162
    """
    _pull(lr, decay, gradient)
    return sqrt(2 * lr * decay) / gradient


def steps_to_rest(lr: float, decay: float, *, within: float = 0.5) -> float:
    """Return the steps in which a small distance from the fixed point shrinks to the share `within` of itself.

    ln(within)/ln|2(1 − d)² − 1|, the half-life by default.

    >>> round(steps_to_rest(0.1, 5e-4))                   # ln 2/(4ηλ)
    3465
    """
    if not 0 < real(within) < 1:
        raise DynamicsError(f"`within` must be a number > 0 and < 1, got {within!r:.80}. Try 0.5.")
    contraction, d = fixed_point(lr, decay).contraction, lr * decay
    if contraction == 0:
        return 1.0
    # As ln(1 − 2d(2 − d)) for small d, for which the factor itself may round to 1.
    return log(within) / (log1p(-2 * d * (2 - d)) if contraction > 0 else log(-contraction))


@dataclass(frozen=True, eq=False)
class Schedules:
    """Figure 7: effective learning rates over steps, one row per learning rate.

    Attributes:
        lr: η [R].
        decay: λ [R].
        steps: k [K + 1].
        norm: ‖w^(k)‖ [R, K + 1].
        rate: η̂_k = η/‖w^(k)‖² [R, K + 1].
        limit: η̂_∞ of equation 25 [R].
        exact: the limit of the recurrence itself [R].

    >>> found = figure7(steps=10)
    >>> found.rate.shape == found.norm.shape == (len(found.lr), 11)
    True
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
    """Simulate figure 7: effective rates of a scale-invariant layer under SGD with weight decay for several η.

    Equation 25 gives η̂_∞ = √(2ηλ). With one λ for all (`decay`, 0.01 by default) each η levels off at its own value.
    With one ηλ for all (`product`) all level off at the same value.

    Raises:
        DynamicsError: an ηλ is 0, or 1 or more.

    >>> figure = figure7([0.1, 1.0], product=1e-3, steps=4000)
    >>> figure.rate[:, -1].round(4), figure.limit.round(4)
    (array([0.0447, 0.0447]), array([0.0447, 0.0447]))
    """
    if decay is not None and product is not None:
        raise DynamicsError(
            "Only one of `decay` and `product` may be given, got both. Give λ for all rates, or ηλ for all."
        )
    if not isinstance(rates, Iterable) or not len(rates) or not all(0 < real(lr) < inf for lr in rates):
        raise DynamicsError(f"`rates` must be one or more finite numbers > 0, got {rates!r:.80}. Try [0.1, 1.0].")
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
    """Return ηλ if the recurrence has a fixed point."""
    share = decay_share(lr, decay)
    nonnegative("gradient", gradient, hint="1.0")
    reasons = {
        "decay": (decay, "without decay the norm grows forever, and the effective learning rate falls as 1/√k"),
        "lr": (lr, "nothing moves, and every norm is a fixed point"),
        "gradient": (gradient, "decay alone shrinks the weights to zero"),
    }
    for name, (value, reason) in reasons.items():
        if value == 0:
            raise DynamicsError(f"`{name}` must be > 0 for an equilibrium, got 0: {reason}.")
    if share == 0:
        raise DynamicsError(f"`lr` times `decay` must be > 0 in float64, got {lr:g} · {decay:g}: nothing decays.")
    return share


_NOTHING_DECAYS = "`lr` times `decay` must be > 0 for an equilibrium, got 0: nothing decays, and the norm only grows."


class Equilibrium(NamedTuple):
    """Equilibrium of a scale-invariant layer: angle per step, norm, and half-life of the distance to it, in steps.

    >>> found = equilibrium(0.1, 5e-4)
    >>> round(found.rate, 5), round(found.half_life)
    (0.01, 3466)
    """

    rate: float
    norm: float
    half_life: float


@dataclass(frozen=True)
class Memory:
    """An optimizer's momentum: its step is −η Σ_j c_j ∇_{k−j}, and its weight decay may go through it as well.

    Attributes:
        total: Σ c_j; a gradient moves the weights by η times this in the end.
        square: Σ c_j²; the squared length of a step if successive gradients are uncorrelated.
        coupled: whether weight decay is added to the gradient (SGD) instead of to the step (AdamW).
    """

    total: float
    square: float
    coupled: bool

    @classmethod
    def of(cls, kind: Kind, momentum: float = 0.0, *, dampening: float = 0.0, nesterov: bool = False) -> Memory:
        """Return the memory of torch's SGD or AdamW (`momentum` is then β₁).

        >>> Memory.of("sgd", 0.5).total
        2.0
        """
        choice(kind, "kind", get_args(Kind), DynamicsError)
        fraction("momentum", momentum)
        fraction("dampening", dampening)
        if kind == "adamw":
            return cls(1.0, (1 - momentum) / (1 + momentum), coupled=False)
        take, square = 1 - dampening if momentum else 1.0, 1 / (1 - momentum**2)  # torch only dampens momentum
        if nesterov and momentum:
            square = (1 + momentum) ** 2 + momentum**4 * square
        return cls(take / (1 - momentum), take**2 * square, coupled=True)

    def shrinkage(self, lr: Any, decay: Any) -> Any:
        """Return d, the share of the weights that weight decay removes in a step."""
        return lr * decay * (self.total if self.coupled else 1.0)


def equilibrium(
    lr: float,
    decay: float,
    *,
    momentum: float = 0.0,
    kind: Kind = "sgd",
    dampening: float = 0.0,
    nesterov: bool = False,
    gradient: float | None = None,
) -> Equilibrium:
    """Return the state in which weight decay removes as much norm as the steps add (equations 23 to 25, and beyond).

    With steps −η Σ_j c_j ∇_{k−j} and a share d of the weights removed per step, for small d:

        SGD:    ‖w‖⁴ ← (1 − 4d)‖w‖⁴ + 2η²(Σc)²g̃²        AdamW:  ‖w‖² ← (1 − 2d)‖w‖² + η²n
        rate = √(2d Σc²)/Σc,    ‖w‖⁴ = η²(Σc)²g̃²/(2d)   or   ‖w‖² = η²n/(2d),    half-life ln 2/(4d)   or   ln 2/(2d)

    | | Σc | Σc² | d | rate |
    |---|---|---|---|---|
    | SGD | 1 | 1 | ηλ | √(2ηλ) |
    | momentum β | 1/(1−β) | 1/(1−β²) | ηλ/(1−β) | √(2ηλ/(1+β)) |
    | AdamW, β₁ | 1 | (1−β₁)/(1+β₁) | ηλ | √(2ηλ(1−β₁)/(1+β₁)) |

    The rate of SGD, with or without momentum, follows from gradients being orthogonal to w alone: successive gradients
    may be correlated or not. (Without momentum the angle is exactly arccos(1−ηλ).) The norm, and the rate with
    Nesterov momentum, assume uncorrelated successive gradients. For AdamW the gradient divided by √v is also
    assumed orthogonal to w, with squared norm n = the number of elements, and the half-life is assumed longer than
    the memory 1/(1−β₂) of v.

    Args:
        lr: η.
        decay: λ, as given to the optimizer.
        momentum: β of SGD, β₁ of AdamW.
        kind: "sgd" or "adamw".
        dampening: of SGD.
        nesterov: of SGD.
        gradient: g̃ = ‖∇‖‖w‖ for SGD, √n for AdamW; without it the norm is NaN.

    Returns:
        rate: the angle by which the layer turns per step, in radians.
        norm: ‖w‖ at equilibrium.
        half_life: the half-life of the distance of ‖w‖⁴ (AdamW: ‖w‖²) to its equilibrium, in steps.

    Raises:
        DynamicsError: ηλ is 0 and nothing decays, or it is 1 or more and a step would remove all of the weights.

    >>> at = equilibrium(0.1, 5e-4, gradient=1.0)
    >>> round(at.rate, 4), round(at.norm, 3), round(at.half_life)
    (0.01, 3.162, 3466)
    """
    memory = Memory.of(kind, momentum, dampening=dampening, nesterov=nesterov)
    if not decay_share(lr, decay) > 0:
        raise DynamicsError(_NOTHING_DECAYS)
    shrinkage = float(memory.shrinkage(lr, decay))
    rate = sqrt(2 * shrinkage * memory.square) / memory.total
    norm = nan
    if gradient is not None:
        nonnegative("gradient", gradient, hint="1.0")
        square = (lr * memory.total * gradient) ** 2 / (2 * shrinkage)
        norm = square ** (0.25 if kind == "sgd" else 0.5)
    return Equilibrium(rate, norm, log(2) / ((4 if kind == "sgd" else 2) * shrinkage))


def approach(at: Equilibrium, steps: npt.ArrayLike, *, start: float, kind: Kind = "sgd") -> Floats:
    """Return ‖w‖ after a number of steps on the way from `start` to an equilibrium.

    With p = 4 for SGD and 2 for AdamW, ‖w_k‖^p = ‖w_∞‖^p + (‖w_0‖^p − ‖w_∞‖^p) 2^(−k/h), h the half-life. The angle per
    step is rate · (‖w_∞‖/‖w_k‖)² for SGD and rate · ‖w_∞‖/‖w_k‖ for AdamW, once momentum and second moments have
    settled, which takes another 1/(1−β) steps.

    Args:
        at: the result of `equilibrium` with `gradient`.
        steps: k, one or many.
        start: ‖w_0‖.
        kind: "sgd" or "adamw", as given to `equilibrium`.

    >>> at = equilibrium(0.1, 5e-4, gradient=1.0)
    >>> approach(at, [0, at.half_life, 1e6], start=1.0).round(3)
    array([1.   , 2.666, 3.162])
    """
    y = _distance(at, start, kind)
    return np.asarray(
        at.norm * (1 + y * 2.0 ** (-np.asarray(steps, dtype=np.float64) / at.half_life)) ** (1 / _power(kind))
    )


def steps_until(at: Equilibrium, *, start: float, within: float = 0.05, kind: Kind = "sgd") -> float:
    """Return the number of steps after which ‖w‖, coming from `start`, is within a share of its equilibrium value.

    >>> at = equilibrium(0.1, 5e-4, gradient=1.0)
    >>> round(steps_until(at, start=1.0))
    8373
    >>> steps_until(at, start=3.1)
    0.0
    """
    if not 0 < real(within) < 1:
        raise DynamicsError(f"`within` must be a number > 0 and < 1, got {within!r:.80}. Try 0.5.")
    y, near = _distance(at, start, kind), abs((1 + (within if start > at.norm else -within)) ** _power(kind) - 1)
    return at.half_life * log(abs(y) / near) / log(2) if abs(y) > near else 0.0


def _distance(at: Equilibrium, start: float, kind: Kind) -> float:
    """(‖w_0‖^p − ‖w_∞‖^p)/‖w_∞‖^p."""
    positive("start", start)
    if not isfinite(at.half_life):
        raise DynamicsError(_NOTHING_DECAYS)
    if not isfinite(at.norm):
        raise DynamicsError("The norm at equilibrium is not known. Give `gradient` to equilibrium().")
    return float((start / at.norm) ** _power(kind) - 1)


def _power(kind: Kind) -> int:
    choice(kind, "kind", get_args(Kind), DynamicsError)
    return 4 if kind == "sgd" else 2
