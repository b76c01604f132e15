"""Where weight decay leads a scale-invariant layer, and how fast it turns there (section 5.1 of Grosse's chapter)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite, log, log1p, nan, sqrt
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gyroscope.base.accepted import real
from gyroscope.errors import DynamicsError
from gyroscope.theory.domains import check_share, count
from gyroscope.theory.effective_rate import Floats, Kind


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


_NOTHING_DECAYS = "The equilibrium does not apply because nothing decays: αλ is 0, and the norm only grows."


class Equilibrium(NamedTuple):
    """Where weight decay takes a scale-invariant layer: angle a step, norm, and steps to halve the distance to it."""

    rate: float
    norm: float
    half_life: float


@dataclass(frozen=True)
class Memory:
    """An optimizer's momentum: its step is −η Σ_j c_j ∇_{k−j}, and its weight decay may go through it too.

    Attributes:
        total: Σ c_j; a gradient moves the weights by η times as much in the end.
        square: Σ c_j²; the square of a step's length, where successive gradients are unrelated.
        coupled: whether weight decay is added to the gradient (SGD), and not to the step (AdamW).
    """

    total: float
    square: float
    coupled: bool

    @classmethod
    def of(cls, kind: Kind, momentum: float = 0.0, *, dampening: float = 0.0, nesterov: bool = False) -> Memory:
        """The memory of torch's SGD or AdamW (`momentum` is then β₁).

        >>> Memory.of("sgd", 0.5).total
        2.0
        """
        if kind not in ("sgd", "adamw"):
            raise DynamicsError(f"kind is {kind!r}; accepted are 'sgd' (also with momentum) and 'adamw'.")
        _check_share("momentum", momentum)
        _check_share("dampening", dampening)
        if kind == "adamw":
            return cls(1.0, (1 - momentum) / (1 + momentum), coupled=False)
        take, square = 1 - dampening if momentum else 1.0, 1 / (1 - momentum**2)  # torch dampens momentum alone
        if nesterov and momentum:
            square = (1 + momentum) ** 2 + momentum**4 * square
        return cls(take / (1 - momentum), take**2 * square, coupled=True)

    def shrinkage(self, lr: Any, decay: Any) -> Any:
        """The share d of themselves that the weights lose in a step, by weight decay alone."""
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
    """The state in which weight decay takes away as much norm as the steps add (equations 23 to 25, and beyond).

    With steps −η Σ_j c_j ∇_{k−j} and a share d of the weights lost in a step, for small d:

        SGD:    ‖w‖⁴ ← (1 − 4d)‖w‖⁴ + 2η²(Σc)²g̃²        AdamW:  ‖w‖² ← (1 − 2d)‖w‖² + η²n
        rate = √(2d Σc²)/Σc,    ‖w‖⁴ = η²(Σc)²g̃²/(2d)   or   ‖w‖² = η²n/(2d),    half-life ln 2/(4d)   or   ln 2/(2d)

    | | Σc | Σc² | d | rate |
    |---|---|---|---|---|
    | SGD | 1 | 1 | ηλ | √(2ηλ) |
    | momentum β | 1/(1−β) | 1/(1−β²) | ηλ/(1−β) | √(2ηλ/(1+β)) |
    | AdamW, β₁ | 1 | (1−β₁)/(1+β₁) | ηλ | √(2ηλ(1−β₁)/(1+β₁)) |

    That gradients are orthogonal to w is all that the rate of SGD depends on, with momentum or without: successive
    gradients may agree or not. (Without momentum the angle is arccos(1−ηλ) exactly.) The norm, and Nesterov's rate,
    take successive gradients to be unrelated. For AdamW the gradient divided by √v is taken to be orthogonal to w too,
    with n = number of elements as its squared norm, and the half-life to be longer than the memory 1/(1−β₂) of v.

    Args:
        lr: η.
        decay: λ, as given to the optimizer.
        momentum: β of SGD, β₁ of AdamW.
        kind: "sgd" or "adamw".
        dampening: SGD's.
        nesterov: SGD's.
        gradient: g̃ = ‖∇‖‖w‖ for SGD, √n for AdamW; without it the norm is NaN.

    Returns:
        rate: the angle by which the layer turns in a step, in radians.
        norm: ‖w‖ there.
        half_life: steps after which ‖w‖⁴ (AdamW: ‖w‖²) has gone half of the way to it.

    Raises:
        DynamicsError: ηλ is 0, and nothing decays, or 1 and more, and a step would take all of the weights.

    >>> at = equilibrium(0.1, 5e-4, gradient=1.0)
    >>> round(at.rate, 4), round(at.norm, 3), round(at.half_life)
    (0.01, 3.162, 3466)
    """
    memory = Memory.of(kind, momentum, dampening=dampening, nesterov=nesterov)
    if not check_share(lr, decay) > 0:
        raise DynamicsError(_NOTHING_DECAYS)
    shrinkage = float(memory.shrinkage(lr, decay))
    rate = sqrt(2 * shrinkage * memory.square) / memory.total
    norm = nan
    if gradient is not None:
        if not 0 <= real(gradient) < inf:
            raise DynamicsError(f"gradient is {gradient!r}; accepted are finite norms from 0, or None.")
        square = (lr * memory.total * gradient) ** 2 / (2 * shrinkage)
        norm = square ** (0.25 if kind == "sgd" else 0.5)
    return Equilibrium(rate, norm, log(2) / ((4 if kind == "sgd" else 2) * shrinkage))


def approach(at: Equilibrium, steps: npt.ArrayLike, *, start: float, kind: Kind = "sgd") -> Floats:
    """‖w‖ after so many steps, on the way from `start` to an equilibrium.

    With p = 4 for SGD and 2 for AdamW, ‖w_k‖^p = ‖w_∞‖^p + (‖w_0‖^p − ‖w_∞‖^p) 2^(−k/h), h the half-life. The angle a
    step goes with it: for SGD it is rate · (‖w_∞‖/‖w_k‖)², for AdamW rate · ‖w_∞‖/‖w_k‖, once momentum and second
    moments have settled, which takes 1/(1−β) steps of its own.

    Args:
        at: what `equilibrium` returned, given `gradient`.
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
    """The time to equilibrium: after how many steps ‖w‖ is within a share of its value there, coming from `start`.

    >>> at = equilibrium(0.1, 5e-4, gradient=1.0)
    >>> round(steps_until(at, start=1.0))
    8373
    >>> steps_until(at, start=3.1)
    0.0
    """
    if not 0 < real(within) < 1:
        raise DynamicsError(f"within is {within!r}; accepted are shares between 0 and 1.")
    y, near = _distance(at, start, kind), abs((1 + (within if start > at.norm else -within)) ** _power(kind) - 1)
    return at.half_life * log(abs(y) / near) / log(2) if abs(y) > near else 0.0


def _distance(at: Equilibrium, start: float, kind: Kind) -> float:
    """(‖w_0‖^p − ‖w_∞‖^p)/‖w_∞‖^p."""
    if not 0 < real(start) < inf:
        raise DynamicsError(f"start is {start!r}; accepted are finite norms above 0.")
    if not isfinite(at.half_life):
        raise DynamicsError(_NOTHING_DECAYS)
    if not isfinite(at.norm):
        raise DynamicsError("The norm at equilibrium is not known; give `gradient` to equilibrium().")
    return float((start / at.norm) ** _power(kind) - 1)


def _power(kind: Kind) -> int:
    if kind not in ("sgd", "adamw"):
        raise DynamicsError(f"kind is {kind!r}; accepted are 'sgd' (also with momentum) and 'adamw'.")
    return 4 if kind == "sgd" else 2


def _check_share(name: str, value: float) -> None:
    if not 0.0 <= real(value) < 1.0:
        raise DynamicsError(f"{name} is {value!r}; accepted are values from 0 to below 1.")
