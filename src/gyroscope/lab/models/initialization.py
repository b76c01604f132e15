"""How weights start."""

from __future__ import annotations

from math import prod, sqrt

import torch


def he_uniform_(weight: torch.Tensor, *, generator: torch.Generator) -> torch.Tensor:
    """Fill `weight` in place from U(−b, b), b = √(6 / fan_in), Keras's `he_uniform`.

    fan_in is the number of inputs each output sums over: every dimension but the first. PyTorch's own
    default for convolutions and linear layers has b = √(1 / fan_in), which shrinks the signal.

    >>> import torch
    >>> weight = he_uniform_(torch.empty(64, 6), generator=torch.Generator().manual_seed(0))
    >>> bool(weight.abs().max() <= 1)
    True
    """
    bound = sqrt(6 / prod(weight.shape[1:]))
    with torch.no_grad():
        return weight.uniform_(-bound, bound, generator=generator)
