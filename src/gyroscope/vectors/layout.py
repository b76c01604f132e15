"""How a tensor lies in memory, and how to walk through it flat.

Two tensors with the same strides that fill their memory without gaps can be walked through in memory
order together: an inner product does not care which order that is. So contiguous, channels-last and
transposed weights all cost one flat pass, as long as weight and gradient agree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their stretch of memory, each once, in whatever order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def splits_in_memory(tensor: Tensor, segments: int) -> bool:
    """Whether `segments` equal parts along the leading dimension are stretches of memory, one after another."""
    if segments == 1 or tensor.numel() == 0 or tensor.is_contiguous():
        return True
    return tensor.shape[0] == 1 or tensor.stride(0) * tensor.shape[0] == tensor.numel()


def aligned(tensors: Sequence[Tensor], segments: int) -> list[Tensor]:
    """The same tensors, as `[segments, n]` views with elements in one common order; copies where need be.

    >>> x = torch.arange(6.0).reshape(2, 3)
    >>> [t.tolist() for t in aligned([x, x.T.contiguous().T], 1)]
    [[[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]], [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]]]
    """
    first = tensors[0]
    if first.numel() == 0:
        return [t.detach().reshape(segments, 0) for t in tensors]
    if is_dense(first) and splits_in_memory(first, segments):
        return [memory_view(like(t, first), segments) for t in tensors]
    # reshape alone may give a view with gaps
    return [t.detach().reshape(segments, -1).contiguous() for t in tensors]


def like(tensor: Tensor, reference: Tensor) -> Tensor:
    """`tensor` itself where it has the strides of `reference`, else a copy that has them."""
    if tensor.stride() == reference.stride():
        return tensor
    return torch.empty_like(reference, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def memory_view(tensor: Tensor, segments: int) -> Tensor:
    """A dense tensor as `[segments, n]` in memory order."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(segments, -1)
    n = tensor.numel()
    return tensor.as_strided((segments, n // segments), (n // segments, 1))
