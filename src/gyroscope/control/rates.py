"""Rates over layers and over time: α multipliers and warm-up; recorded rates and their replay under the same roof."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from gyroscope.base.accepted import real, whole
from gyroscope.control.recorded import Rates, Recorder, Replay, record, replay, tangent
from gyroscope.control.refusals import check_optimizer, few
from gyroscope.errors import ControlError

__all__ = [
    "Rates",
    "Recorder",
    "Replay",
    "alpha_multipliers",
    "checked_multipliers",
    "record",
    "replay",
    "tangent",
    "warmup",
]


def alpha_multipliers(alpha: float, n_layers: int) -> list[float]:
    """The layer-wise multipliers of equation 1 of the layer-rotation paper, first layer first.

        α > 0:  (1 − α)^(5 (L−1−l)/(L−1))        α ≤ 0:  (1 + α)^(5 l/(L−1))

    The factor 5 in the exponent is in the authors' code, and in the paper's first version. α = 0 is uniform; for
    |α| = 0.6 the slowest layer turns at 0.01 of the rate; at the limits α = ±1 only the last (first) layer turns. A
    single layer always has multiplier 1.

    >>> [round(m, 4) for m in alpha_multipliers(-0.6, 3)]
    [1.0, 0.1012, 0.0102]
    """
    given, alpha = alpha, real(alpha)
    if not -1.0 <= alpha <= 1.0:
        raise ControlError(
            f"alpha is {given!r}; accepted are values from -1 (only the first layer turns) to 1 (only the last)."
        )
    if whole(n_layers, 1) is None:
        raise ControlError(
            f"`n_layers` must be a whole number >= 1, got {n_layers!r}. Try len(gyroscope.layers(model))."
        )
    if n_layers == 1:
        return [1.0]
    last = n_layers - 1
    if alpha > 0:
        return [(1.0 - alpha) ** (5 * (last - l) / last) for l in range(n_layers)]  # noqa: E741
    return [(1.0 + alpha) ** (5 * l / last) for l in range(n_layers)]  # noqa: E741


def checked_multipliers(given: Sequence[float] | Tensor | None, alpha: float, n_layers: int) -> Tensor:
    """The multipliers as a float64 tensor, from what a user gave."""
    if given is None:
        values = alpha_multipliers(alpha, n_layers)
    else:
        values = _numbers(given, n_layers)
        if alpha != 0.0:
            raise ControlError("Both alpha and multipliers were given; alpha is one choice of multipliers. Give one.")
        if len(values) != n_layers:
            raise ControlError(f"{len(values)} multipliers were given for {n_layers} layers; give one a layer.")
        if not all(0.0 <= m < math.inf for m in values):
            raise ControlError(f"Multipliers must be finite and not negative; given [{few(values)}].")
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def _numbers(given: Any, n_layers: int) -> list[float]:
    try:
        if isinstance(given, str | bytes | Mapping | Set):
            raise TypeError
        return [float(m) for m in (given.tolist() if isinstance(given, Tensor) else given)]
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last of tensors without values
        raise ControlError(
            f"multipliers is {given!r}; accepted is a sequence of numbers, one a layer in forward order, such as "
            f"{[1.0] * min(n_layers, 3)} for {min(n_layers, 3)} layers. This optimizer controls {n_layers}."
        ) from None


def warmup(optimizer: Optimizer, steps: int, *, start: float = 0.1) -> LambdaLR:
    """A scheduler for the papers' warm-up: linear from a tenth of the rate to the rate over `steps` steps.

    lr_t = lr (f + start (1 − f)) with f = t/steps for t < steps, and lr afterwards. Call its `step()` after each
    `optimizer.step()`; compose it with others by `torch.optim.lr_scheduler.ChainedScheduler`.

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    >>> schedule = warmup(optimizer, 2)
    >>> rates = [schedule.get_last_lr()[0]]
    >>> for _ in range(3):
    ...     optimizer.step(); schedule.step(); rates += schedule.get_last_lr()
    >>> [round(r, 3) for r in rates]
    [0.1, 0.55, 1.0, 1.0]
    """
    check_optimizer(optimizer)
    if not 0 <= real(steps) < math.inf:
        raise ControlError(f"steps is {steps!r}; accepted are values from 0 (no warm-up).")
    if not 0.0 <= real(start) <= 1.0:
        raise ControlError(f"start is {start!r}; accepted are shares of the rate, from 0 to 1.")

    last, begin = real(steps), real(start)

    def factor(t: int) -> float:
        return 1.0 if t >= last else t / last + begin * (1.0 - t / last)

    return LambdaLR(optimizer, factor)
