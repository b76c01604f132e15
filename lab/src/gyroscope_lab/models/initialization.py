"""Initial weights: the initializers of the papers, each drawn from its own generator.

A weight is [outputs, inputs/groups, *kernel]. Each output sums over fan_in = (inputs/groups)·|kernel| numbers, and
fan_out = outputs·|kernel|.
"""

from __future__ import annotations

from collections.abc import Callable
from math import erf, prod, sqrt
from typing import TypeVar

import torch
from torch import nn

Initializer = Callable[..., torch.Tensor]
Model = TypeVar("Model", bound=nn.Module)


def he_uniform_(weight: torch.Tensor, *, generator: torch.Generator) -> torch.Tensor:
    """Fill `weight` in place from U(−b, b), b = √(6 / fan_in), Keras's `he_uniform`.

    fan_in is the number of inputs that each output sums over: the product of all dimensions except the first. PyTorch's
    own default for convolutions and linear layers has b = √(1 / fan_in), which shrinks the signal.

    >>> import torch
    >>> weight = he_uniform_(torch.empty(64, 6), generator=torch.Generator().manual_seed(0))
    >>> bool(weight.abs().max() <= 1)
    True
    """
    return _symmetric_(weight, sqrt(6 / _fan_in(weight)), generator)


def glorot_uniform_(weight: torch.Tensor, *, generator: torch.Generator) -> torch.Tensor:
    """Fill `weight` in place from U(−b, b), b = √(6 / (fan_in + fan_out)), Keras's default.

    >>> weight = glorot_uniform_(torch.empty(64, 32), generator=torch.Generator().manual_seed(0))
    >>> bool(weight.abs().max() <= 1 / 4)
    True
    """
    return _symmetric_(weight, sqrt(6 / (_fan_in(weight) + _fan_out(weight))), generator)


def uniform_(weight: torch.Tensor, *, generator: torch.Generator) -> torch.Tensor:
    """Fill `weight` in place from U(−b, b), b = 1 / √fan_in, Torch 7's default: the variance is 1 / (3 fan_in).

    >>> weight = uniform_(torch.empty(64, 100), generator=torch.Generator().manual_seed(0))
    >>> bool(weight.abs().max() <= 1 / 10)
    True
    """
    return _symmetric_(weight, 1 / sqrt(_fan_in(weight)), generator)


def he_normal_(weight: torch.Tensor, *, generator: torch.Generator) -> torch.Tensor:
    """Fill `weight` in place from N(0, σ²), σ = √(2 / fan_in).

    >>> weight = he_normal_(torch.empty(400, 200), generator=torch.Generator().manual_seed(0))
    >>> round(weight.std().item(), 2)
    0.1
    """
    with torch.no_grad():
        return weight.normal_(0, sqrt(2 / _fan_in(weight)), generator=generator)


def he_normal_fan_out_(weight: torch.Tensor, *, generator: torch.Generator) -> torch.Tensor:
    """Fill `weight` in place from N(0, σ²), σ = √(2 / fan_out): for k×k convolutions, √(2 / (k² · outputs)).

    >>> weight = he_normal_fan_out_(torch.empty(200, 400), generator=torch.Generator().manual_seed(0))
    >>> round(weight.std().item(), 2)
    0.1
    """
    with torch.no_grad():
        return weight.normal_(0, sqrt(2 / _fan_out(weight)), generator=generator)


def he_normal_truncated_(weight: torch.Tensor, *, generator: torch.Generator) -> torch.Tensor:
    """Fill `weight` in place from N(0, σ²) truncated at ±2σ, σ = √(2 / fan_in), Keras 2.1's `he_normal`.

    Truncation leaves a standard deviation of 0.8796 σ, which Keras 2.1 does not correct (later versions do).

    >>> weight = he_normal_truncated_(torch.empty(400, 200), generator=torch.Generator().manual_seed(0))
    >>> round(weight.std().item(), 3), bool(weight.abs().max() <= 0.2)
    (0.088, True)
    """
    deviation = sqrt(2 / _fan_in(weight))
    # Φ⁻¹(u) = √2 erf⁻¹(2u − 1), and 2Φ(2) − 1 = erf(√2): a uniform number in this interval maps to ±2σ.
    _symmetric_(weight, erf(sqrt(2)), generator)
    with torch.no_grad():
        return weight.erfinv_().mul_(sqrt(2) * deviation).clamp_(-2 * deviation, 2 * deviation)


def orthogonal_(weight: torch.Tensor, *, generator: torch.Generator) -> torch.Tensor:
    """Fill `weight` in place, as a matrix W [outputs, fan_in], so that WWᵀ = 1 or, with more outputs, WᵀW = 1.

    >>> weight = orthogonal_(torch.empty(6, 2, 3, 3), generator=torch.Generator().manual_seed(0)).flatten(1)
    >>> torch.allclose(weight @ weight.T, torch.eye(6), atol=1e-6)
    True
    """
    nn.init.orthogonal_(weight, generator=generator)
    return weight


#: The initializers by name.
INITIALIZERS: dict[str, Initializer] = {
    "glorot_uniform": glorot_uniform_,
    "he_normal": he_normal_,
    "he_normal_fan_out": he_normal_fan_out_,
    "he_normal_truncated": he_normal_truncated_,
    "he_uniform": he_uniform_,
    "orthogonal": orthogonal_,
    "uniform": uniform_,
}


def initialized(
    build: Callable[[], Model],
    *,
    generator: torch.Generator,
    initializer: Initializer,
    linear: Initializer | None = None,
) -> Model:
    """Return `build()` with the kernels of its convolutions and linear layers drawn again and their biases zero.

    Kernels are drawn from `generator` in the order of their registration. The caller's random state, which PyTorch's
    own initialization uses, is not changed.

    Args:
        build: returns the model.
        generator: the generator of the weights.
        initializer: the initializer of the kernels.
        linear: the initializer of linear layers, if it is another one.

    >>> model = initialized(lambda: nn.Linear(3, 2), generator=torch.Generator(), initializer=he_uniform_)
    >>> model.bias.tolist()
    [0.0, 0.0]
    """
    with torch.random.fork_rng(devices=[]):
        model = build()
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            draw_ = linear if linear is not None and isinstance(module, nn.Linear) else initializer
            draw_(module.weight, generator=generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model


def _symmetric_(weight: torch.Tensor, bound: float, generator: torch.Generator) -> torch.Tensor:
    with torch.no_grad():
        return weight.uniform_(-bound, bound, generator=generator)


def _fan_in(weight: torch.Tensor) -> int:
    return prod(weight.shape[1:])


def _fan_out(weight: torch.Tensor) -> int:
    return weight.shape[0] * prod(weight.shape[2:])
