"""Ways the same values can lie in memory, and what to expect of them whatever the backend."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from oracles.vectors import combined, dot

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SHAPE = (6, 4, 3, 2)

# Float32 is updated by p ← p − lr (g + wd p), four roundings of numbers up to twice as large.
ROUNDING = {torch.float32: 2**-21, torch.float64: 2**-50, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def values(seed: int, dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def contiguous(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)


def channels_last(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.channels_last)


def transposed(t: Tensor) -> Tensor:
    return t.transpose(0, 1).contiguous().transpose(0, 1)


def sliced(t: Tensor) -> Tensor:
    """With gaps, and NaN in the gaps: whoever reads them shows it."""
    n, c, h, w = t.shape
    around = torch.full((2 * n, c, h, 2 * w), torch.nan, dtype=t.dtype)
    return around[::2, :, :, ::2].copy_(t)


def misaligned(t: Tensor) -> Tensor:
    """Starts one element after the allocation, so not at a multiple of 16 bytes."""
    room = torch.full((t.numel() + 2,), torch.nan, dtype=t.dtype)
    return room[1:-1].view(t.shape).copy_(t)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    f.__name__: f for f in (contiguous, channels_last, transposed, sliced, misaligned)
}


def assert_dot(got: Tensor | float, x: Tensor, y: Tensor) -> None:
    """Within 1e-12 of the oracle, measured by Σ|x y| so that cancellation does not count."""
    assert abs(float(got) - dot(x, y)) <= 1e-12 * dot(x.abs(), y.abs())


def assert_combined(new: Tensor, old: Tensor, y: Tensor, a: float, b: float, roundings: int = 1) -> None:
    """Each element within its dtype's rounding of the oracle, measured by |a x| + |b y|."""
    expected, size = combined(old, y, a, b), combined(old.abs(), y.abs(), abs(a), abs(b))
    assert new.dtype == old.dtype
    assert bool(((new.detach().double() - expected).abs() <= roundings * ROUNDING[new.dtype] * size).all())


def same_bits(x: Tensor, y: Tensor) -> bool:
    return x.dtype == y.dtype and x.contiguous().view(torch.uint8).equal(y.contiguous().view(torch.uint8))
