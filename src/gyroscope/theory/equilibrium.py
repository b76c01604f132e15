"""Where weight decay leads a scale-invariant layer, and how fast it turns there (section 5.1 of Grosse's chapter)."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite, log, nan, sqrt
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gyroscope.base.accepted import real
from gyroscope.errors import DynamicsError
from gyroscope.theory.law import Floats, Kind
from gyroscope.theory.share import check_share

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
