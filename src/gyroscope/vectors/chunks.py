"""Cutting lists of tensors into chunks of work, and the tables of pointers a kernel finds them by."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gyroscope.base.transfer import pinned

CHUNK = 8192  # elements a program works on; a multiple of every block size

Ints = npt.NDArray[np.int64]


def cut(lengths: Sequence[int] | Ints, chunk: int = CHUNK) -> tuple[Ints, Ints, Ints]:
    """Cut segments of the given lengths into chunks.

    Returns:
        For each chunk its segment, and its position within the segment; and for each segment (one more at the
        end) its first chunk. An empty segment has one empty chunk, so that its sums are written, as zeros.

    >>> [t.tolist() for t in cut([10, 0, 3], chunk=4)]
    [[0, 0, 0, 1, 2], [0, 1, 2, 0, 0], [0, 3, 4, 5]]
    """
    counts = np.maximum(1, -(-np.asarray(lengths, dtype=np.int64) // chunk))
    first = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    segment = np.repeat(np.arange(len(counts)), counts)
    return segment, np.arange(first[-1]) - first[segment], first


def rows_of(members: Sequence[int], counts: Sequence[int] | Ints) -> Ints:
    """The rows that the segments of some layers take among those of all, of which `counts` says how many each has.

    >>> rows_of([0, 2], [1, 2, 3]).tolist()
    [0, 3, 4, 5]
    """
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
    return np.concatenate([np.arange(starts[i], starts[i + 1]) for i in members])


def schedule(chunks: int) -> Ints:
    """The order in which one launch first sums all chunks and then updates them.

    Updates go backwards, from what was read last and still lies in the cache. Chunk c is listed as c where it is
    summed and as −c − 1 where it is updated.

    >>> schedule(3).tolist()
    [0, 1, 2, -3, -2, -1]
    """
    order = np.arange(chunks)
    return np.concatenate([order, -order[::-1] - 1])


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """An array on the device, without waiting for the copy."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        return pinned(tensor).to(device, non_blocking=True)
    return tensor.clone()


def is_aligned(pointers: Ints) -> bool:
    """Whether every pointer allows 16-byte loads."""
    return not bool((pointers & 15).any())


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured, so that nothing may wait for the device."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def on(device: torch.device) -> Any:
    """Launch on the tensors' own device, where that is not the current one."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return nullcontext()
    return torch.cuda.device(device)
