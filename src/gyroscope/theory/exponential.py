"""Weight decay replaced by a learning rate that grows exponentially (section 4.3; Li and Arora, 2020).

For a scale-invariant J, SGD with weight decay λ visits the same functions as SGD without it at the rates

    η̃_t = η a^{−(2t+1)},        a = 1 − ηλ without momentum.

Write w_t = aᵗ w̃_t. Since ∇J(aᵗ w̃) = a^{−t} ∇J(w̃), the step w_{t+1} = a w_t − η∇J(w_t) becomes
w̃_{t+1} = w̃_t − η a^{−(2t+1)} ∇J(w̃_t): the two runs differ only by the scale aᵗ, on which J does not depend. With
momentum β (torch's: v ← βv + ∇J + λw, w ← w − ηv) the same holds with

    a² − (1 + β − ηλ) a + β = 0,        the larger root,

the same β, and a first buffer ṽ₀ = v₀ − (1 − a)/(ηa) w₀ in place of v₀.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import exp, isfinite, log, log1p, sqrt
from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gyroscope.base.accepted import real, whole
from gyroscope.errors import DynamicsError
from gyroscope.theory.domains import count, fraction, nonnegative, numbers
from gyroscope.theory.effective_rate import Floats

_LARGEST = 700.0  # its exponential is still a float64
_SUMS = log(2.0**24)  # log of the largest sum of squared activations expected if squared weights are 1


def shrinkage(lr: float, decay: float, *, momentum: float = 0.0) -> float:
    """Return 1 − a: the share of its scale that weight decay removes from a run of SGD each step.

        1 − a = ηλ,        with momentum β        1 − a = (c − √(c² − 4ηλ))/2 ≈ ηλ/(1 − β),  c = 1 − β + ηλ

    Args:
        lr: η.
        decay: λ.
        momentum: β.

    Raises:
        DynamicsError: ηλ is above (1 − √β)². The larger root is then not real: weights would oscillate through zero.

    >>> shrinkage(0.5, 0.1), round(shrinkage(0.1, 0.01, momentum=0.9), 4)
    (0.05, 0.0111)
    """
    nonnegative("lr", lr)
    nonnegative("decay", decay)
    fraction("momentum", momentum)
    pull, bound = lr * decay, (1 - sqrt(momentum)) ** 2
    if pull > bound or pull >= 1:
        raise DynamicsError(
            f"`lr` times `decay` must be at most (1 − √momentum)² = {bound:.4g} and below 1, got {pull:.4g}: the decay "
            "would remove more than all of the weights. Try a smaller `decay`."
        )
    # b = 1 − a solves b² − (1 − β + ηλ) b + ηλ = 0: the smaller root, in a form without cancellation.
    half = (1 - momentum + pull) / 2
    return pull / (half + sqrt(max(0.0, half * half - pull)))


def exponential_rates(lr: npt.ArrayLike, decay: float, steps: int, *, momentum: float = 0.0) -> Floats:
    """Return the learning rates η̃_t, t = 0 … steps − 1, that replace weight decay.

        η̃_t = η a^{−(2t+1)},    for rates that change    η̃_t = η_t/(P_t P_{t+1}),  P_t = Π_{s<t} (1 − η_s λ)

    Args:
        lr: η, one number; without momentum also one number per step.
        decay: λ.
        steps: number of steps.
        momentum: β.

    >>> exponential_rates(0.5, 1.0, 3).round(9).tolist()
    [1.0, 4.0, 16.0]
    """
    steps = count("steps", steps, least=0)
    rates = numbers("lr", lr)
    if rates.shape not in ((), (steps,)):
        raise DynamicsError(f"`lr` must be one number, or one for each of {steps} steps, got shape {rates.shape}.")
    if rates.ndim and momentum:
        raise DynamicsError(
            "`lr` must be one number if there is momentum, got one per step. No schedule is known for that."
        )
    each = np.broadcast_to(rates, (steps,))
    logs = {float(one): -log1p(-shrinkage(float(one), decay, momentum=momentum)) for one in np.unique(each)}
    lost = np.asarray([logs[float(one)] for one in each])
    grown = 2 * np.cumsum(lost) - lost
    beyond = np.flatnonzero(grown > _LARGEST)
    if len(beyond):
        raise DynamicsError(
            f"The rate of step {beyond[0]} is beyond float64. Give at most {beyond[0]} steps, or rescale the weights."
        )
    return np.asarray(each * np.exp(grown))


class ExponentialRates(LRScheduler):
    """A scheduler for torch's SGD with the rates η̃_t = η a^{−(2t+1)} for some parameter groups; others are unchanged.

    `undo_decay` makes one from an optimizer that has weight decay. Step it once after every step of the optimizer. It
    ends when a rate exceeds the range of the group's parameter type, or when the factor a^{−2t}, by which the rate and
    squared weights have grown, leaves no headroom for sums of squares, which may be 2²⁴ times larger: after about
    36/(1 − a) steps in float32, 345/(1 − a) in float64 and 4/(1 − a) in float16.

    Args:
        optimizer: an SGD.
        shrinkage: 1 − a for each of its groups; 0 leaves a group's rate unchanged.
        last_epoch: as in torch's schedulers.

    Raises:
        DynamicsError: when stepped to a rate beyond the range of the parameters' type.

    >>> sgd = SGD([torch.ones(2, requires_grad=True)], lr=0.5)
    >>> schedule = ExponentialRates(sgd, [0.5])
    >>> rates = []
    >>> for _ in range(3):
    ...     rates.append(schedule.get_last_lr()[0]); sgd.step(); schedule.step()
    >>> [round(rate, 9) for rate in rates]
    [1.0, 4.0, 16.0]
    """

    def __init__(self, optimizer: Optimizer, shrinkage: Collection[float], last_epoch: int = -1) -> None:
        if not isinstance(optimizer, Optimizer):
            raise DynamicsError(f"`optimizer` must be a torch.optim.Optimizer, got a {type(optimizer).__name__}.")
        if not isinstance(shrinkage, Collection) or not all(isfinite(real(share)) for share in shrinkage):
            raise DynamicsError(f"`shrinkage` must be a list of one number per group, got {shrinkage!r:.80}.")
        self.shrinkage = [float(share) for share in shrinkage]
        if len(self.shrinkage) != len(optimizer.param_groups) or not all(0 <= share < 1 for share in self.shrinkage):
            raise DynamicsError(
                f"`shrinkage` must be one number ≥ 0 and < 1 for each of the {len(optimizer.param_groups)} groups, "
                f"got {self.shrinkage}."
            )
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return η̃_t of every group."""
        groups = self.optimizer.param_groups
        if len(groups) != len(self.shrinkage):
            raise DynamicsError(
                f"The optimizer has {len(groups)} groups, but the schedule was made for {len(self.shrinkage)}. Add "
                "groups before undo_decay, or make a new schedule."
            )
        logs = [-(2 * self.last_epoch + 1) * log1p(-share) for share in self.shrinkage]
        for i, (base, grown, group) in enumerate(zip(self.base_lrs, logs, groups, strict=True)):
            dtype = _narrowest(group["params"])
            range_of = log(torch.finfo(dtype).max)
            # A small rate may still be finite when the squares of activations, which a normalizer sums, are not.
            headroom = range_of - min(_SUMS, range_of / 4)
            if grown > min(_LARGEST, headroom) or grown + (log(float(base)) if base else 0.0) > min(_LARGEST, range_of):
                raise DynamicsError(
                    f"The rate of step {self.last_epoch} has grown by e^{grown:.0f}, and so have squared weights: the "
                    f"rate, or sums of squares of activations, may be beyond {dtype}, the type of the parameters in "
                    f"group {i}. Stop here, or rescale the weights to their initial norms, restore weight decay, and "
                    "undo it again."
                )
        return [base * exp(grown) for base, grown in zip(self.base_lrs, logs, strict=True)]


def _narrowest(parameters: Sequence[torch.Tensor]) -> torch.dtype:
    """Return the type with the smallest range; a complex type has the range of its parts."""
    types = {parameter.real.dtype if parameter.is_complex() else parameter.dtype for parameter in parameters}
    return min(types, key=lambda dtype: torch.finfo(dtype).max, default=torch.float64)


def undo_decay(optimizer: SGD, *, groups: Collection[int] | None = None) -> ExponentialRates:
    """Replace the weight decay of an SGD with the equivalent exponential schedule.

    The training visits the same functions as before, up to rounding, if every parameter of the groups belongs to a
    scale-invariant layer (`gyroscope.theory.invariance`). Put those parameters in groups of their own, and give the
    other groups no weight decay, or leave them out of `groups`: their rates and their decay stay unchanged. With
    momentum, buffers are shifted as the equivalence requires. Norms grow by 1/a per step, so float32 lasts for about
    36/(1 − a) steps, which is about 36(1 − β)/(ηλ): `shrinkage` gives 1 − a. The schedule then raises an error.

    Args:
        optimizer: torch's SGD, with or without momentum. Nesterov momentum and dampening have no such schedule. The
            optimizer may have taken steps already.
        groups: positions of the groups; by default all with weight decay.

    Returns:
        The scheduler, to be stepped after every step of the optimizer.

    >>> w = torch.tensor([3.0, 4.0], requires_grad=True)
    >>> sgd = SGD([w], lr=0.5, weight_decay=1.0)
    >>> schedule = undo_decay(sgd)
    >>> sgd.param_groups[0]["weight_decay"], schedule.get_last_lr()
    (0.0, [1.0])
    """
    if not isinstance(optimizer, SGD):
        raise DynamicsError(f"`optimizer` must be a torch.optim.SGD, got a {type(optimizer).__name__}.")
    held: list[dict[str, Any]] = optimizer.param_groups
    chosen = [i for i, group in enumerate(held) if group["weight_decay"]]
    if groups is not None:
        if not isinstance(groups, Collection) or not all(whole(i) in range(len(held)) for i in groups):
            raise DynamicsError(f"`groups` must be positions from 0 to {len(held) - 1}, got {groups!r:.80}.")
        chosen = list(dict.fromkeys(map(index, groups)))
    for i in chosen:
        if held[i]["nesterov"] or held[i]["dampening"] or held[i].get("maximize"):
            raise DynamicsError(
                f"Group {i} has Nesterov momentum, dampening or maximize, for which no schedule is known. Use plain "
                "SGD or SGD with momentum."
            )
    shares = [0.0] * len(held)
    for i in chosen:  # before anything is changed, because this may raise
        shares[i] = shrinkage(float(held[i]["lr"]), float(held[i]["weight_decay"]), momentum=held[i]["momentum"])
    for i in chosen:
        group = held[i]
        if group["momentum"] and shares[i]:
            _move_buffers(optimizer, group["params"], shares[i] / (float(group["lr"]) * (1 - shares[i])))
        group["weight_decay"] = 0.0
    for group in held:
        group.pop("initial_lr", None)  # left by another schedule
    return ExponentialRates(optimizer, shares)


@torch.no_grad()
def _move_buffers(optimizer: SGD, parameters: list[torch.Tensor], times: float) -> None:
    """ṽ₀ = v₀ − times·w₀."""
    for parameter in parameters:
        state = optimizer.state[parameter]
        buffer = state.get("momentum_buffer")
        state["momentum_buffer"] = -times * parameter if buffer is None else buffer - times * parameter
