"""The knock-out experiment: what batch normalization centred and scaled is moved and stretched again, at random.

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

from gyroscope.base.accepted import real
from gyroscope.errors import DynamicsError

_NAME = "knockout"  # of the child that a batch normalization gets


class Knockout(nn.Module):
    """A random affine transformation of every unit, drawn anew for every batch.

        m_j ~ p_m,  γ_j ~ p_γ        for each unit j
        â_j⁽ⁱ⁾ = γ_j a_j⁽ⁱ⁾ + m_j    for each example i

    Here p_m is uniform over [−shift, shift] and p_γ over `gain`; the chapter leaves both open. After a batch
    normalization without gain and bias, â_j has exactly the mean m_j and the standard deviation γ_j: internal covariate
    shift is back, and nothing else is lost. The chapter's numbers are one a unit and batch. With `spread`, each example
    has its own, as in the experiment the chapter simplifies: m_j⁽ⁱ⁾ uniform within `spread` of m_j, γ_j⁽ⁱ⁾ normal
    about γ_j with standard deviation `spread`.

    In evaluation mode units are transformed by the means of both distributions.

    Args:
        shift: half of the width of p_m.
        gain: the least and the largest γ_j.
        spread: how far examples of a batch differ; 0 for not at all.
        generator: what numbers are drawn from, on the device of the activations; torch's own unless given.

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
            raise DynamicsError(f"gain is {gain!r}; accepted are two numbers, 0 < least ≤ largest.") from None
        if not (0 <= real(shift) < inf and 0 <= real(spread) < inf):
            raise DynamicsError(f"shift is {shift!r} and spread {spread!r}; accepted are finite numbers from 0.")
        if not 0 < low <= high < float("inf"):
            raise DynamicsError(f"gain is {gain!r}; accepted are two numbers, 0 < least ≤ largest.")
        self.shift, self.gain, self.spread, self.generator = float(shift), (low, high), float(spread), generator

    def forward(self, a: Tensor) -> Tensor:
        """â for activations [B, D, ...]."""
        if a.dim() < 2:
            raise DynamicsError(f"The activations have shape {tuple(a.shape)}; accepted is [B, D, ...].")
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
        """Over [−1, 1]."""
        return torch.empty(shape, dtype=like.dtype, device=like.device).uniform_(-1, 1, generator=self.generator)

    def extra_repr(self) -> str:
        """What it was made with."""
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
    """Put a `Knockout` behind every batch normalization of a model, in place.

    Names, parameters and checkpoints of the model stay what they are: the normalization keeps its place and hands its
    output on. `restore` takes the knock-outs away. Do it before compiling.

    Args:
        model: any module with batch normalizations.
        shift, gain, spread, generator: as of `Knockout`.
        include: a glob pattern on the names of normalizations.

    Returns:
        The knock-outs, by the names of the normalizations they are behind.

    Raises:
        DynamicsError: there is no batch normalization of such a name, or one has its knock-out already.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 3), nn.BatchNorm1d(3))
    >>> list(knock_out(net)), list(net.state_dict())[:2]
    (['1', '4'], ['0.weight', '0.bias'])
    >>> restore(net)
    2
    """
    _check_model(model)
    if not isinstance(include, str):
        raise DynamicsError(f"include is {include!r}; accepted is a glob pattern on the names of normalizations.")
    found = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    chosen = {name: module for name, module in found.items() if fnmatchcase(name, include)}
    if not chosen:
        there = f"its batch normalizations are {', '.join(found)}" if found else "it has no batch normalization"
        raise DynamicsError(f"{type(model).__name__} has no batch normalization called {include!r}: {there}.")
    twice = [name for name, module in chosen.items() if _NAME in module._modules]
    if twice:
        raise DynamicsError(f"{', '.join(twice)} of the model is knocked out already; `restore` it first.")
    put: dict[str, Knockout] = {}
    for name, module in chosen.items():
        put[name] = Knockout(shift=shift, gain=gain, spread=spread, generator=generator).train(module.training)
        # A child, so that it follows the mode of the model; and behind, so that nothing changes its name.
        module.add_module(_NAME, put[name])
        module.register_forward_hook(_Behind(put[name]))
    return put


def restore(model: nn.Module) -> int:
    """Take all knock-outs out of a model, in place; how many there were.

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
        raise DynamicsError(f"The model is a {type(model).__name__}; accepted is a torch.nn.Module.")


class _Behind:
    """A forward hook that hands a module's output to another one; a class, so that copies of a model have copies."""

    def __init__(self, module: Knockout) -> None:
        self.module = module

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        moved: Tensor = self.module(output)
        return moved
