"""Decompositions of many small matrices side by side on one GPU.

A solver takes the matrices of a stack one after the other, and most of its time is spent between kernels too small to
fill the device. Parts of a stack on streams of their own, each driven by a thread, fill the gaps.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

_STREAMS = 8
# Above this size one matrix after the other is as fast; up to the smaller one there is a kernel for whole stacks.
_LARGEST, _BATCHED = 512, 32


def eigvalsh(stack: Tensor) -> Tensor:
    """`torch.linalg.eigvalsh` of a stack [b, d, d], in parts side by side where that is faster.

    >>> eigvalsh(torch.tensor([[[2.0, 1.0], [1.0, 2.0]]]))
    tensor([[1., 3.]])
    """
    if stack.device.type != "cuda" or len(stack) < 2 or not _BATCHED < stack.shape[-1] <= _LARGEST:
        return _eigvalsh(stack)
    current = torch.cuda.current_stream(stack.device)
    parts = stack.chunk(_STREAMS)
    streams = [torch.cuda.Stream(stack.device) for _ in parts]  # type: ignore[no-untyped-call]

    def decompose(part: Tensor, stream: torch.cuda.Stream) -> Tensor:
        stream.wait_stream(current)
        with torch.no_grad(), torch.cuda.stream(stream):
            found = _eigvalsh(part)
            stream.synchronize()
        # The memory belongs to the other stream, and may be reused there as soon as it is let go of.
        found.record_stream(current)
        return found

    with ThreadPoolExecutor(len(parts)) as pool:
        return torch.cat(list(pool.map(decompose, parts, streams)))


def _eigvalsh(stack: Tensor) -> Tensor:
    found: Tensor = torch.linalg.eigvalsh(stack)
    return found
