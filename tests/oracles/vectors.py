"""Inner products and linear combinations, one Python number at a time."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def dot(x: Tensor, y: Tensor) -> float:
    """⟨x, y⟩ with exactly rounded sums; products of float32 numbers are exact, those of float64 rounded once.

    >>> dot(torch.tensor([1e8, 1.0, -1e8]), torch.ones(3))
    1.0
    """
    return math.fsum(p * q for p, q in zip(x.detach().flatten().tolist(), y.detach().flatten().tolist(), strict=True))


def combined(x: Tensor, y: Tensor, a: float, b: float) -> Tensor:
    """The elements a x + b y in float64, in the shape of x and not rounded to its dtype.

    >>> combined(torch.tensor([1.0, 2.0]), torch.tensor([10.0, 10.0]), 2.0, 0.5)
    tensor([7., 9.], dtype=torch.float64)
    """
    elements = zip(x.detach().flatten().tolist(), y.detach().flatten().tolist(), strict=True)
    return torch.tensor([a * p + b * q for p, q in elements], dtype=torch.float64).reshape(x.shape)


def angle(w: Tensor, t: Tensor) -> float:
    """The angle between w and t by Kahan's formula 2 atan2(‖u − v‖, ‖u + v‖), u and v the directions, in long double.

    >>> round(angle(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])) * 4 / math.pi, 12)
    1.0
    """
    u, v = (p.detach().double().flatten().numpy().astype(np.longdouble) for p in (w, t))
    u, v = u / np.sqrt((u * u).sum()), v / np.sqrt((v * v).sum())
    return float(2 * np.arctan2(np.sqrt(((u - v) ** 2).sum()), np.sqrt(((u + v) ** 2).sum())))


def offsets(tensor: Tensor) -> list[int]:
    """Where each element lies in memory, counted from the first, in the order of the indices.

    >>> offsets(torch.zeros(2, 3).T)
    [0, 3, 1, 4, 2, 5]
    """
    return [
        sum(i * stride for i, stride in zip(index, tensor.stride(), strict=True)) for index in np.ndindex(*tensor.shape)
    ]
