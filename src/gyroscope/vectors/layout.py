"""The layout of tensors in memory and over ranks.

In memory: two tensors with the same strides that fill their memory without gaps can be read in memory order together,
because an inner product does not depend on the order. So contiguous, channels-last and transposed weights all cost one
flat pass, as long as weight and gradient agree.

Over ranks (DTensor, FSDP2): inner products are local first, then summed over the shards. Only the mesh dimensions that
*shard* a tensor are summed over. Ranks that hold replicas already agree: adding them up would make norms too large by
the square root of their number. Without the sum, norms would be too small by the square root of the number of shards.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gyroscope.errors import VectorError
from gyroscope.vectors.launch import to_device

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill a stretch of memory, each once, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def by_type(lists: Sequence[Sequence[Tensor]]) -> dict[tuple[torch.dtype, ...], list[int]]:
    """Group the layers that one launch can take together: those of the same dtypes."""
    kinds: dict[tuple[torch.dtype, ...], list[int]] = {}
    for i, types in enumerate(zip(*([t.dtype for t in one] for one in lists), strict=True)):
        kinds.setdefault(types, []).append(i)
    return kinds


def splits_in_memory(tensor: Tensor, segments: int) -> bool:
    """Return whether `segments` equal parts along the leading dimension are consecutive stretches of memory."""
    if segments == 1 or tensor.numel() == 0 or tensor.is_contiguous():
        return True
    return tensor.shape[0] == 1 or tensor.stride(0) * tensor.shape[0] == tensor.numel()


def aligned(tensors: Sequence[Tensor], segments: int) -> list[Tensor]:
    """Return the tensors as `[segments, n]` views with elements in one common order; copies where needed.

    >>> x = torch.arange(6.0).reshape(2, 3)
    >>> [t.tolist() for t in aligned([x, x.T.contiguous().T], 1)]
    [[[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]], [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]]]
    """
    first = tensors[0]
    if first.numel() == 0:
        return [t.detach().reshape(segments, 0) for t in tensors]
    if is_dense(first) and splits_in_memory(first, segments):
        return [memory_view(like(t, first), segments) for t in tensors]
    # reshape alone may return a view with gaps
    return [t.detach().reshape(segments, -1).contiguous() for t in tensors]


def like(tensor: Tensor, reference: Tensor) -> Tensor:
    """Return `tensor` itself where it has the strides of `reference`, else a copy that has them."""
    if tensor.stride() == reference.stride():
        return tensor
    return torch.empty_like(reference, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def memory_view(tensor: Tensor, segments: int) -> Tensor:
    """Return a dense tensor as `[segments, n]` in memory order."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(segments, -1)
    n = tensor.numel()
    return tensor.as_strided((segments, n // segments), (n // segments, 1))


def is_sharded(tensor: Tensor) -> bool:
    """Return whether `tensor` is a DTensor, without importing torch.distributed.tensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def any_sharded(tensors: Iterable[Tensor]) -> bool:
    """Return whether there is a DTensor among the tensors."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(issubclass(kind, module.DTensor) for kind in set(map(type, tensors)))


def local(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the part of each tensor that is on this rank; plain tensors as they are.

    >>> w = torch.ones(2)
    >>> local([w])[0] is w
    True
    """
    if not any_sharded(tensors):
        return list(tensors)
    return [t.detach().to_local() if is_sharded(t) else t for t in tensors]  # type: ignore[attr-defined]


def as_sharded(part: Tensor, like: Any) -> Tensor:
    """Return the DTensor, laid out over the ranks as `like`, whose part on this rank is `part`."""
    from torch.distributed.tensor import DTensor

    whole: Tensor = DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return whole


@dataclass(frozen=True)
class Plan:
    """The rows of a local `[S, K]` matrix that are summed over each tuple of process groups."""

    groups: dict[tuple[ProcessGroup, ...], list[int]]
    rows: int

    def reduce(self, matrix: Tensor) -> Tensor:
        """Sum the sharded rows, with one all-reduce for all layers that are sharded alike."""
        for process_groups, rows in self.groups.items():
            whole = len(rows) == self.rows
            where = None if whole else to_device(np.array(rows, dtype=np.int64), matrix.device)
            part = matrix if where is None else matrix.index_select(0, where)
            for group in process_groups:
                dist.all_reduce(part, group=group)
            if where is not None:
                matrix.index_copy_(0, where, part)
        return matrix


def plan(lists: Sequence[Sequence[Tensor]], counts: Sequence[int]) -> Plan | None:
    """Return the sums that inner products among `lists` need, or None where nothing is sharded.

    A layer must be sharded alike in all lists, because local parts belong together only then.
    """
    if not any(map(any_sharded, lists)):
        return None
    groups: dict[tuple[ProcessGroup, ...], list[int]] = {}
    alike: dict[ProcessGroup, ProcessGroup] = {}
    row = 0
    for i, (tensors, n) in enumerate(zip(zip(*lists, strict=True), counts, strict=True)):
        shards = _shards(tensors[0], i, alike)
        for other in tensors[1:]:
            if _shards(other, i, alike) != shards:
                raise VectorError(
                    f"Layer {i} must be laid out over the ranks in one way, got {_layout(tensors[0])} and "
                    f"{_layout(other)}. Redistribute one of them."
                )
        if shards:
            if n > 1:
                raise VectorError(
                    f"Layer {i} is sharded over ranks, so it must have one segment, got {n}. Use granularity 'tensor' "
                    "for sharded models."
                )
            groups.setdefault(tuple(group for group, _ in shards), []).append(row)
        row += n
    return Plan(groups, row)


def _shards(tensor: Any, i: int, alike: dict[ProcessGroup, ProcessGroup]) -> list[tuple[ProcessGroup, Any]]:
    """Return the process groups that `tensor` is sharded over, and how.

    Of several groups with the same ranks, the first stands for all: equal meshes may have groups of their own.

    Args:
        tensor: a DTensor or a plain tensor.
        i: the index of its layer, for messages.
        alike: for each group seen so far, the first one with the same ranks; extended here.
    """
    over = []
    for dim, placement in enumerate(tensor.placements if is_sharded(tensor) else ()):
        if placement.is_partial():
            raise VectorError(f"Layer {i} has a Partial placement. Redistribute it to Shard or Replicate first.")
        if not placement.is_replicate() and tensor.device_mesh.size(dim) > 1:
            group = tensor.device_mesh.get_group(dim)
            if group not in alike:
                alike[group] = next((one for one in alike.values() if _same_ranks(one, group)), group)
            over.append((alike[group], placement))
    return over


def _same_ranks(a: ProcessGroup, b: ProcessGroup) -> bool:
    same_backend = dist.get_backend(a) == dist.get_backend(b)
    return same_backend and dist.get_process_group_ranks(a) == dist.get_process_group_ranks(b)


def _layout(tensor: Any) -> str:
    return str(tuple(tensor.placements)) if is_sharded(tensor) else "a plain tensor"
