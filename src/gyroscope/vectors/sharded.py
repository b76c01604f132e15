"""Tensors that lie on several ranks (DTensor, FSDP2): local inner products, then one sum over the shards.

Only the mesh dimensions that *shard* a tensor are summed over; ranks that hold replicas already agree, and
adding them up would make norms too large by the square root of their number. Leaving the sum out makes them too
small by the square root of the number of shards.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from gyroscope.errors import VectorError
from gyroscope.vectors.chunks import to_device

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def is_sharded(tensor: Tensor) -> bool:
    """Whether `tensor` is a DTensor; asks without importing torch.distributed.tensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def any_sharded(tensors: Iterable[Tensor]) -> bool:
    """Whether there is a DTensor among the tensors."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(issubclass(kind, module.DTensor) for kind in set(map(type, tensors)))


def local(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The part of each tensor that lies on this rank; plain tensors as they are."""
    if not any_sharded(tensors):
        return list(tensors)
    return [t.detach().to_local() if is_sharded(t) else t for t in tensors]  # type: ignore[attr-defined]


def as_sharded(part: Tensor, like: Any) -> Tensor:
    """This rank's part of a tensor that is laid out over the ranks as the DTensor `like`."""
    from torch.distributed.tensor import DTensor

    whole: Tensor = DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return whole


@dataclass(frozen=True)
class Plan:
    """Which rows of the local `[S, K]` matrix are summed over which process groups."""

    groups: dict[tuple[ProcessGroup, ...], list[int]]
    rows: int

    def reduce(self, matrix: Tensor) -> Tensor:
        """Sum the sharded rows: one all-reduce for all layers that are sharded alike."""
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
    """The sums that inner products among `lists` need, or None where nothing is sharded.

    Local parts belong together only where a layer is sharded alike in all lists.
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
                    f"Layer {i} is laid out over the ranks as {_layout(tensors[0])} and as {_layout(other)}; "
                    "redistribute one of them."
                )
        if shards:
            if n > 1:
                raise VectorError(
                    f"Layer {i} is sharded over ranks and split into {n} segments; use granularity 'tensor' "
                    "for sharded models."
                )
            groups.setdefault(tuple(group for group, _ in shards), []).append(row)
        row += n
    return Plan(groups, row)


def _shards(tensor: Any, i: int, alike: dict[ProcessGroup, ProcessGroup]) -> list[tuple[ProcessGroup, Any]]:
    """The process groups that `tensor` is sharded over, and how.

    Of several groups with the same ranks the first is taken for all: equal meshes may have groups of their own.

    Args:
        tensor: a DTensor or a plain tensor.
        i: its place, for messages.
        alike: for each group that was seen, the first one with the same ranks; grows here.
    """
    over = []
    for dim, placement in enumerate(tensor.placements if is_sharded(tensor) else ()):
        if placement.is_partial():
            raise VectorError(f"Layer {i} has a Partial placement; redistribute it to Shard or Replicate first.")
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
