"""The effective learning rate of a scale-invariant layer, and its implicit decay (section 4.3 of Grosse's chapter).

Without weight decay the norm of such a layer grows and its effective learning rate falls: by equation 19 exactly, and
approximately as 1/√(1 + k/k₀). `decay_law` fits that to runs in which learning rates change and weights decay.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, nan
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from gyroscope.base.accepted import choice, real
from gyroscope.errors import DynamicsError
from gyroscope.theory.domains import count, fraction, nonnegative, numbers, positive


def effective_lr(lr: npt.ArrayLike, weight_norm: npt.ArrayLike, *, momentum: float = 0.0) -> Floats:
    """Return the effective learning rate η/‖w‖², or η/((1−β)‖w‖²) with momentum β (section 4.3); NaN where ‖w‖ is zero.

    It is the rate at which the direction w/‖w‖ of a scale-invariant layer is trained, whatever its norm.

    >>> effective_lr(0.1, [1.0, 2.0]).tolist()
    [0.1, 0.025]
    """
    fraction("momentum", momentum)
    rate, norm = numbers("lr", lr), numbers("weight_norm", weight_norm)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(norm > 0, rate / ((1.0 - momentum) * norm * norm), nan), dtype=np.float64)


def norm_growth(lr: npt.ArrayLike, steps: int, *, norm: float = 1.0, gradient: npt.ArrayLike = 1.0) -> Floats:
    """Return the norm of a scale-invariant layer under SGD, step by step (equation 19).

        ‖w_{k+1}‖² = ‖w_k‖² + η²‖∇J(ŵ_k)‖²/‖w_k‖²

    This is exact for any scale-invariant layer, given ‖∇J(ŵ_k)‖.

    Args:
        lr: η, one number or one per step.
        steps: number of steps.
        norm: ‖w₀‖.
        gradient: ‖∇J(ŵ_k)‖ = ‖∇J(w_k)‖‖w_k‖, one number or one per step.

    Returns:
        ‖w_k‖ for k = 0 … steps.

    >>> (norm_growth(2.0, 2) ** 2).round(6).tolist()
    [1.0, 5.0, 5.8]
    """
    steps = count("steps", steps, least=0)
    positive("norm", norm)
    added = (_series("lr", lr, steps) * _series("gradient", gradient, steps)) ** 2
    squares = [float(norm) ** 2]
    for one in added.tolist():
        squares.append(squares[-1] + one / squares[-1])
    return np.asarray(np.sqrt(squares))


def decay_time(lr: float, *, norm: float = 1.0, gradient: float = 1.0) -> float:
    """Return k₀ = ‖w₀‖⁴/(2η²‖∇J(ŵ)‖²), the number of steps in which ‖w‖⁴ doubles; inf if nothing moves.

    From equation 19: ‖w_{k+1}‖⁴ = ‖w_k‖⁴ + 2η²g̃² + O(η⁴), so ‖w_k‖⁴ ≈ ‖w₀‖⁴ (1 + k/k₀).

    >>> decay_time(0.1), decay_time(0.1, norm=2.0)
    (49.99999999999999, 799.9999999999999)
    """
    for name, value in (("lr", lr), ("norm", norm), ("gradient", gradient)):
        nonnegative(name, value)
    square = (lr * gradient) ** 2
    return norm**4 / (2 * square) if square else np.inf


def implicit_decay(steps: npt.ArrayLike, k0: float, *, start: float = 1.0) -> Floats:
    """Return the implicit schedule of a scale-invariant layer's effective learning rate: η̂_k = η̂₀/√(1 + k/k₀).

    The norm grows as ‖w_k‖ = ‖w₀‖ (1 + k/k₀)^¼.

    >>> implicit_decay([0, 75], 25.0, start=0.1).tolist()
    [0.1, 0.05]
    """
    if not real(k0) > 0:
        raise DynamicsError(f"`k0` must be a number > 0, got {k0!r:.80}. Try inf for no decay.")
    return np.asarray(numbers("start", start) / np.sqrt(1 + numbers("steps", steps) / k0))


def fit_norms(steps: npt.ArrayLike, norms: npt.ArrayLike, *, lr: npt.ArrayLike = 1.0) -> Law:
    """Fit k₀ to a series of norms: `decay_law` of η/‖w‖².

    >>> k = np.arange(200)
    >>> round(fit_norms(k, (1 + k / 40) ** 0.25, lr=0.1).k0, 6)
    40.0
    """
    sizes = numbers("norms", norms)
    rate = _along("lr", lr, sizes)
    return decay_law(steps, effective_lr(rate, sizes), lr=rate)


class Growth(NamedTuple):
    """Figure 6: norms and effective learning rates over steps, for several learning rates.

    Attributes:
        steps: k, [S].
        lr: η, [A].
        norms: ‖w_k‖, [A, S].
        rates: η̂_k = η/‖w_k‖², [A, S].

    >>> found = figure6(steps=10)
    >>> found.norms.shape == (len(found.lr), len(found.steps))
    True
    """

    steps: npt.NDArray[np.int64]
    lr: Floats
    norms: Floats
    rates: Floats


def figure6(lr: Sequence[float] = (0.01, 0.1, 1.0, 10.0), steps: int = 10_000) -> Growth:
    """Simulate figure 6: ‖w₀‖ = 1 and ‖∇J(ŵ_k)‖ = 1 for all k.

    Whatever η is, η̂_k approaches 1/√(2k): the learning rate determines only the transient, which takes k₀ = 1/(2η²)
    steps if η is small, and η²/2 steps if it is so large that the first step makes up most of the norm. The chapter
    does not say which η and how many steps it draws; these are ours.

    >>> found = figure6(steps=1000)
    >>> (found.rates[:, -1] * np.sqrt(2 * 1000)).round(3).tolist()
    [0.408, 0.976, 0.999, 0.976]
    """
    lrs = numbers("lr", lr)
    if lrs.ndim != 1 or not (np.isfinite(lrs) & (lrs > 0)).all():
        raise DynamicsError(f"`lr` must be a list of finite learning rates > 0, got {lr!r:.80}. Try [0.1, 1.0].")
    norms = np.stack([norm_growth(one, steps) for one in lrs.tolist()]) if len(lrs) else np.empty((0, steps))
    return Growth(np.arange(steps + 1), lrs, norms, effective_lr(lrs[:, None], norms))


def _series(name: str, given: npt.ArrayLike, steps: int) -> Floats:
    values = numbers(name, given)
    if values.shape not in ((), (steps,)) or not (np.isfinite(values) & (values >= 0)).all():
        raise DynamicsError(
            f"`{name}` must be one finite number ≥ 0, or one for each of the {steps} steps, got {given!r:.60} of "
            f"shape {values.shape}."
        )
    return np.asarray(np.broadcast_to(values, (steps,)))


Floats = npt.NDArray[np.float64]
Kind = Literal["sgd", "adamw"]

_STILL = 4e-6  # relative variation of a float32 series that rounding alone explains


class Law(NamedTuple):
    """A fitted decay law e(k) = e₀/√(1 + k/k₀): its parameters, its R², and its values at the steps.

    >>> law = Law(25.0, 0.1, 1.0, np.array([0.1]))
    >>> implicit_decay([0, 75], law.k0, start=law.e0).tolist()
    [0.1, 0.05]
    """

    k0: float
    e0: float
    r2: float
    curve: Floats


def decay_law(
    steps: npt.ArrayLike,
    effective_lr: npt.ArrayLike,
    *,
    lr: npt.ArrayLike | None = None,
    shrinkage: npt.ArrayLike = 0.0,
    kind: Kind = "sgd",
) -> Law:
    """Fit e(k) = e₀/√(1 + k/k₀) to the effective learning rate of one layer (section 4.3 of Grosse's chapter).

    For a scale-invariant layer under SGD the norm follows ‖w‖⁴ = ‖w₀‖⁴ (1 + k/k₀) with k₀ = ‖w₀‖⁴/(2η²g̃²), as long as
    g̃ = ‖∇‖‖w‖ stays the same. So (e₀/e)² = 1 + k/k₀ is a straight line, which is fitted by least squares. Two effects
    that bend this line are taken into account. If the learning rate changes, it is divided out, and a step counts as
    (η/η₀)² steps, with η₀ the largest. If weight decay removes a share d of the weights per step, the line becomes the
    solution of y' = −4dy + 2η²g̃² for y = ‖w‖⁴, which levels off at the equilibrium. For Adam and AdamW it is ‖w‖² that
    grows by the same amount each step: e(k) = e₀/(1 + k/k₀).

    Args:
        steps: the steps [S] of the measurements; k counts from the first.
        effective_lr: η/‖w‖² at these steps; NaN where unknown.
        lr: η at these steps, or one number; if not given, η is assumed constant.
        shrinkage: d = ηλ at these steps, or one number (ηλ/(1−β) with momentum).
        kind: "sgd" or "adamw".

    Returns:
        k0 (inf if the norm does not grow), e0, R² of the straight line, and the law's curve at the steps. All are NaN
        if there are fewer than three measurements.

    >>> k = np.arange(100)
    >>> law = decay_law(k, 0.1 / np.sqrt(1 + k / 25))
    >>> round(law.k0, 6), round(law.e0, 6), round(law.r2, 6)
    (25.0, 0.1, 1.0)
    """
    choice(kind, "kind", get_args(Kind), DynamicsError)
    k, e = numbers("steps", steps), numbers("effective_lr", effective_lr)
    if k.ndim != 1 or k.shape != e.shape:
        raise DynamicsError(
            f"`steps` and `effective_lr` must be two series of equal length, got shapes {k.shape} and {e.shape}."
        )
    if not (np.diff(k) >= 0).all():
        raise DynamicsError("`steps` must be numbers in ascending order, got steps that decrease or are NaN.")
    rate = _filled(np.ones_like(e) if lr is None else _along("lr", lr, e))
    lost = _filled(_along("shrinkage", shrinkage, e))
    power = 2 if kind == "sgd" else 1
    top = float(np.max(rate, initial=0.0))
    with np.errstate(divide="ignore", invalid="ignore"):
        y = (rate / e) ** power  # ‖w‖⁴ or ‖w‖², up to a constant factor if η is not known
    known = np.isfinite(y) & (y > 0)
    if known.sum() < 3 or top <= 0 or not np.isfinite(lost).all():
        return Law(nan, nan, nan, np.full_like(e, nan))
    remains, grown = _basis(k, rate / top, 2 * power * lost)
    start, slope, r2 = _line(remains[known], grown[known], y[known])
    curve = rate / (start * remains + slope * grown) ** (1 / power)
    return Law(start / slope if slope > 0 else inf, top / start ** (1 / power), r2, curve)


def _basis(k: Floats, rate: Floats, lost: Floats) -> tuple[Floats, Floats]:
    """Solve y' = −lost·y + rate²·slope twice: from y = 1 with slope 0, and from y = 0 with slope 1.

    Between two measurements the rate and loss of the later one hold.
    """
    gap = np.diff(k, prepend=k[0])
    loss = lost * gap
    gone = np.cumsum(loss)
    with np.errstate(divide="ignore", invalid="ignore"):
        added = rate**2 * np.where(loss > 0, -np.expm1(-loss) / lost, gap)
    grown, so_far, start = np.empty_like(added), 0.0, 0
    while start < len(k):  # in stretches over which e^gone does not overflow
        end = max(start + 1, int(np.searchsorted(gone, gone[start] + 30.0, side="right")))
        within = gone[start:end] - gone[start]
        sums = so_far * np.exp(-loss[start]) + np.cumsum(added[start:end] * np.exp(within))
        grown[start:end] = np.exp(-within) * sums
        so_far, start = float(grown[end - 1]), end
    return np.exp(-gone), grown


def _line(remains: Floats, grown: Floats, y: Floats) -> tuple[float, float, float]:
    """Fit y ≈ start·remains + slope·grown by least squares, start > 0 and slope ≥ 0; return both and R²."""
    scale = max(float(grown.max()), 1e-300)
    table = np.stack([remains, grown / scale], axis=1)
    start, slope = (float(v) for v in np.linalg.lstsq(table, y, rcond=None)[0])
    if slope <= 0:
        start, slope = float(remains @ y / (remains @ remains)), 0.0
    elif start <= 0:
        start = float(y[0] / remains[0])
        slope = max(0.0, float(table[:, 1] @ (y - start * remains) / (table[:, 1] @ table[:, 1])))
    left = float(np.square(y - table @ [start, slope]).sum())
    spread = float(np.square(y - y.mean()).sum())
    if np.ptp(y) <= _STILL * float(y.mean()):
        return start, 0.0, 1.0
    return start, slope / scale, 1.0 - left / spread


def _along(name: str, given: npt.ArrayLike, like: Floats) -> Floats:
    """Return one number, or one number per element of a series, as a series.

    >>> _along("lr", [0.1], np.zeros(3))
    array([0.1, 0.1, 0.1])
    """
    values = numbers(name, given)
    if values.shape not in ((), (1,), like.shape):
        raise DynamicsError(f"`{name}` must be one number or {like.size} numbers, got shape {values.shape}.")
    if (values < 0).any():
        raise DynamicsError(f"`{name}` must be ≥ 0 at every step, got {float(values.min()):g} at one.")
    return np.asarray(np.broadcast_to(values.reshape(()) if values.size == 1 else values, like.shape))


def _filled(series: Floats) -> Floats:
    """Fill each gap with the value before it, and a gap at the beginning with the value after it."""
    known = np.flatnonzero(np.isfinite(series))
    if len(known) in (0, len(series)):
        return series
    return np.asarray(series[known[np.maximum(0, np.searchsorted(known, np.arange(len(series)), side="right") - 1)]])
