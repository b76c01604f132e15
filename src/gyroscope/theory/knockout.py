"""The knock-out experiment: normalized activations are shifted and scaled again at random.

Section 4.2 of Grosse's chapter, after Santurkar et al. (2018), How does batch normalization help optimization?
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gyroscope.errors import DynamicsError
from gyroscope.theory.domains import nonnegative

_NAME = "knockout"  # name of the child module added to a batch normalization


class Knockout(nn.Module):
    """A random affine transformation of every unit, drawn anew for every batch.

        m_j ~ p_m,  γ_j ~ p_γ        for each unit j
        â_j⁽ⁱ⁾ = γ_j a_j⁽ⁱ⁾ + m_j    for each example i

    Here p_m is uniform over [−shift, shift] and p_γ over `gain`; the chapter leaves both open. After a batch
    normalization without gain and bias, â_j has exactly the mean m_j and the standard deviation γ_j: internal covariate
    shift is restored, and nothing else is lost. The chapter draws one pair per unit and batch. With `spread`, each
    example has its own, as in the experiment that the chapter simplifies: m_j⁽ⁱ⁾ uniform within `spread` of m_j,
    γ_j⁽ⁱ⁾ normal around γ_j with standard deviation `spread`.

    In evaluation mode units are transformed by the means of both distributions.

    Args:
        shift: half the width of p_m.
        gain: the smallest and the largest γ_j.
        spread: how far examples of a batch differ; 0 for not at all.
        generator: random generator on the device of the activations; torch's default if not given.

    >>> _ = torch.manual_seed(0)
    >>> moved = Knockout(shift=0.5, gain=(1.0, 2.0))(torch.tensor([[-1.0, -1.0], [1.0, 1.0]]))
    >>> moved.mean(0).abs().max() <= 0.5, moved.std(0, correction=0).min() >= 1.0
    (tensor(True), tensor(True))
    """

    def __init__(
        self,
        *,
        shift: float = 0.5,
        gain: tuple[float, float] = (0.5, 1.5),
        spread: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        try:
            low, high = (float(bound) for bound in gain)
        except (TypeError, ValueError):
            raise DynamicsError(
                f"`gain` must be two numbers, 0 < smallest ≤ largest, got {gain!r:.80}. Try (0.5, 1.5)."
            ) from None
        nonnegative("shift", shift, hint="0.5")
        nonnegative("spread", spread)
        if not 0 < low <= high < inf:
            raise DynamicsError(
                f"`gain` must be two numbers, 0 < smallest ≤ largest, got {gain!r:.80}. Try (0.5, 1.5)."
            )
        self.shift, self.gain, self.spread, self.generator = float(shift), (low, high), float(spread), generator

    def forward(self, a: Tensor) -> Tensor:
        """Return â for activations [B, D, ...]."""
        if a.dim() < 2:
            raise DynamicsError(f"The activations must be [B, D, ...], got shape {tuple(a.shape)}.")
        low, high = self.gain
        if not self.training:
            return a * ((low + high) / 2)
        units = (1, a.shape[1], *[1] * (a.dim() - 2))
        mean = self.shift * self._uniform(units, a)
        scale = (low + high) / 2 + (high - low) / 2 * self._uniform(units, a)
        if self.spread:
            examples = (a.shape[0], *units[1:])
            mean = mean + self.spread * self._uniform(examples, a)
            noise = torch.empty(examples, dtype=a.dtype, device=a.device).normal_(generator=self.generator)
            scale = scale + self.spread * noise
        return scale * a + mean

    def _uniform(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Draw uniform numbers in [−1, 1]."""
        return torch.empty(shape, dtype=like.dtype, device=like.device).uniform_(-1, 1, generator=self.generator)

    def extra_repr(self) -> str:
        """Return the arguments that the module was made with."""
        return f"shift={self.shift}, gain={self.gain}, spread={self.spread}"


def knock_out(
    model: nn.Module,
    *,
    shift: float = 0.5,
    gain: tuple[float, float] = (0.5, 1.5),
    spread: float = 0.0,
    generator: torch.Generator | None = None,
    include: str = "*",
) -> dict[str, Knockout]:
    """Add a `Knockout` after every batch normalization of a model, in place.

    Names, parameters and checkpoints of the model do not change: the normalization stays in its place and passes its
    output on. `restore` removes the knock-outs. Call this before compiling.

    Args:
        model: any module with batch normalizations.
        shift, gain, spread, generator: as in `Knockout`.
        include: glob pattern on the names of normalizations.

    Returns:
        The knock-outs, by the names of their normalizations.

    Raises:
        DynamicsError: no batch normalization has such a name, or one already has a knock-out.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 3), nn.BatchNorm1d(3))
    >>> list(knock_out(net)), list(net.state_dict())[:2]
    (['1', '4'], ['0.weight', '0.bias'])
    >>> restore(net)
    2
    """
    _check_model(model)
    if not isinstance(include, str):
        raise DynamicsError(
            f"`include` must be a glob pattern on the names of normalizations, got {include!r:.80}. Try '*'."
        )
    found = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    chosen = {name: module for name, module in found.items() if fnmatchcase(name, include)}
    if not chosen:
        there = f"its batch normalizations are {', '.join(found)}" if found else "it has no batch normalization"
        raise DynamicsError(f"No batch normalization of {type(model).__name__} matches {include!r}: {there}.")
    twice = [name for name, module in chosen.items() if _NAME in module._modules]
    if twice:
        raise DynamicsError(f"{', '.join(twice)} already has a knock-out. Call restore(model) first.")
    put: dict[str, Knockout] = {}
    for name, module in chosen.items():
        put[name] = Knockout(shift=shift, gain=gain, spread=spread, generator=generator).train(module.training)
        # A child follows the mode of the model; a hook after the normalization leaves all names unchanged.
        module.add_module(_NAME, put[name])
        module.register_forward_hook(_Behind(put[name]))
    return put


def restore(model: nn.Module) -> int:
    """Remove all knock-outs from a model, in place, and return their number.

    >>> restore(nn.Linear(2, 2))
    0
    """
    _check_model(model)
    count = 0
    for module in model.modules():
        hooks: Any = module._forward_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, _Behind)]:
            del hooks[key]
            del module._modules[_NAME]
            count += 1
    return count


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise DynamicsError(f"`model` must be a torch.nn.Module, got a {type(model).__name__}.")


class _Behind:
    """A forward hook that passes a module's output to another module; a class, so that copies of a model copy it."""

    def __init__(self, module: Knockout) -> None:
        self.module = module

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        moved: Tensor = self.module(output)
        return moved
