"""The effective learning rate of a layer whose scale does not matter (section 4.3 of Grosse's chapter).

Without weight decay the norm of such a layer grows, and its effective learning rate falls: by equation 19 exactly, and
about as 1/√(1 + k/k₀). `gyroscope.theory.law` fits that to runs in which learning rates change and weights decay.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, nan
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gyroscope.base.accepted import real
from gyroscope.errors import DynamicsError
from gyroscope.theory.given import count, numbers
from gyroscope.theory.law import Floats, Law, along, decay_law


def effective_lr(lr: npt.ArrayLike, weight_norm: npt.ArrayLike, *, momentum: float = 0.0) -> Floats:
    """The effective learning rate η/‖w‖², and η/((1−β)‖w‖²) with momentum β (section 4.3); NaN where ‖w‖ is zero.

    It is the rate at which the direction w/‖w‖ of a scale-invariant layer is trained, whatever its norm.

    >>> effective_lr(0.1, [1.0, 2.0]).tolist()
    [0.1, 0.025]
    """
    if not 0.0 <= real(momentum) < 1.0:
        raise DynamicsError(f"momentum is {momentum!r}; accepted are values from 0 to below 1.")
    rate, norm = numbers("lr", lr), numbers("weight_norm", weight_norm)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(norm > 0, rate / ((1.0 - momentum) * norm * norm), nan), dtype=np.float64)


def norm_growth(lr: npt.ArrayLike, steps: int, *, norm: float = 1.0, gradient: npt.ArrayLike = 1.0) -> Floats:
    """The norm of a scale-invariant layer under SGD, step by step (equation 19).

        ‖w_{k+1}‖² = ‖w_k‖² + α²‖∇J(ŵ_k)‖²/‖w_k‖²

    Exact for any scale-invariant layer, given what ‖∇J(ŵ_k)‖ was.

    Args:
        lr: α, one number or one a step.
        steps: how many.
        norm: ‖w₀‖.
        gradient: ‖∇J(ŵ_k)‖ = ‖∇J(w_k)‖‖w_k‖, one number or one a step.

    Returns:
        ‖w_k‖ for k = 0 … steps.

    >>> (norm_growth(2.0, 2) ** 2).round(6).tolist()
    [1.0, 5.0, 5.8]
    """
    steps = count("steps", steps, least=0)
    if not 0 < real(norm) < inf:
        raise DynamicsError(f"norm is {norm!r}; accepted are finite numbers above 0: without a norm, no direction.")
    added = (_series("lr", lr, steps) * _series("gradient", gradient, steps)) ** 2
    squares = [float(norm) ** 2]
    for one in added.tolist():
        squares.append(squares[-1] + one / squares[-1])
    return np.asarray(np.sqrt(squares))


def decay_time(lr: float, *, norm: float = 1.0, gradient: float = 1.0) -> float:
    """k₀ = ‖w₀‖⁴/(2α²‖∇J(ŵ)‖²), the steps in which ‖w‖⁴ grows by as much as it was; inf where nothing moves.

    From equation 19: ‖w_{k+1}‖⁴ = ‖w_k‖⁴ + 2α²g̃² + O(α⁴), so ‖w_k‖⁴ ≈ ‖w₀‖⁴ (1 + k/k₀).

    >>> decay_time(0.1), decay_time(0.1, norm=2.0)
    (49.99999999999999, 799.9999999999999)
    """
    for name, value in (("lr", lr), ("norm", norm), ("gradient", gradient)):
        if not 0 <= real(value) < inf:
            raise DynamicsError(f"{name} is {value!r}; accepted are finite numbers from 0.")
    square = (lr * gradient) ** 2
    return norm**4 / (2 * square) if square else np.inf


def implicit_decay(steps: npt.ArrayLike, k0: float, *, start: float = 1.0) -> Floats:
    """The schedule that a scale-invariant layer's effective learning rate follows by itself: α̂_k = α̂₀/√(1 + k/k₀).

    The norm goes as ‖w_k‖ = ‖w₀‖ (1 + k/k₀)^¼ beside it.

    >>> implicit_decay([0, 75], 25.0, start=0.1).tolist()
    [0.1, 0.05]
    """
    if not real(k0) > 0:
        raise DynamicsError(f"k0 is {k0!r}; accepted are numbers above 0, and inf for no decay.")
    return np.asarray(numbers("start", start) / np.sqrt(1 + numbers("steps", steps) / k0))


def fit_norms(steps: npt.ArrayLike, norms: npt.ArrayLike, *, lr: npt.ArrayLike = 1.0) -> Law:
    """Fit k₀ to a series of norms: `decay_law` of η/‖w‖².

    >>> k = np.arange(200)
    >>> round(fit_norms(k, (1 + k / 40) ** 0.25, lr=0.1).k0, 6)
    40.0
    """
    sizes = numbers("norms", norms)
    rate = along("lr", lr, sizes)
    return decay_law(steps, effective_lr(rate, sizes), lr=rate)


class Growth(NamedTuple):
    """Figure 6: norms and effective learning rates over steps, for several explicit learning rates.

    Attributes:
        steps: k, [S].
        lr: α, [A].
        norms: ‖w_k‖, [A, S].
        rates: α̂_k = α/‖w_k‖², [A, S].
    """

    steps: npt.NDArray[np.int64]
    lr: Floats
    norms: Floats
    rates: Floats


def figure6(lr: Sequence[float] = (0.01, 0.1, 1.0, 10.0), steps: int = 10_000) -> Growth:
    """Simulate figure 6: ‖w₀‖ = 1 and ‖∇J(ŵ_k)‖ = 1 for all k.

    Whatever α is, α̂_k comes to lie on 1/√(2k): the explicit learning rate decides about the transient alone, which
    takes k₀ = 1/(2α²) steps where α is small, and α²/2 where it is so large that the first step is most of the norm.
    Which α and how many steps the chapter draws is not said; these are ours.

    >>> found = figure6(steps=1000)
    >>> (found.rates[:, -1] * np.sqrt(2 * 1000)).round(3).tolist()
    [0.408, 0.976, 0.999, 0.976]
    """
    alphas = numbers("lr", lr)
    if alphas.ndim != 1 or not (np.isfinite(alphas) & (alphas > 0)).all():
        raise DynamicsError(f"lr is {lr!r}; accepted are learning rates above 0.")
    norms = np.stack([norm_growth(alpha, steps) for alpha in alphas.tolist()]) if len(alphas) else np.empty((0, steps))
    return Growth(np.arange(steps + 1), alphas, norms, effective_lr(alphas[:, None], norms))


def _series(name: str, given: npt.ArrayLike, steps: int) -> Floats:
    values = numbers(name, given)
    if values.shape not in ((), (steps,)) or not (np.isfinite(values) & (values >= 0)).all():
        raise DynamicsError(
            f"{name} has shape {values.shape}; accepted are one number from 0, or one for each of the {steps} steps."
        )
    return np.asarray(np.broadcast_to(values, (steps,)))
