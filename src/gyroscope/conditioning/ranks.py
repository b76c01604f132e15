"""The factors of a data-parallel model: means over the samples of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gyroscope.conditioning.factors import Factor, accumulated_in
from gyroscope.conditioning.uses import Use
from gyroscope.errors import ConditioningError
from gyroscope.passes.batches import Batch
from gyroscope.vectors.eager import accumulator
from gyroscope.vectors.layout import is_sharded

Key = tuple[int, str]
Found = TypeVar("Found")


def groups_of(model: nn.Module) -> list[Any]:
    """Return the process groups that a model's batch is spread over: DDP's own, or those of FSDP2's mesh.

    >>> groups_of(nn.Linear(2, 2))
    []
    """
    if not (dist.is_available() and dist.is_initialized()):
        return []
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return [model.process_group]
    for parameter in model.parameters():
        if is_sharded(parameter):
            mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
            return [group for dim, group in enumerate(mesh.get_all_groups()) if mesh.size(dim) > 1]
    return []


def groups_given(model: nn.Module, group: Any) -> list[Any]:
    """Return the process groups meant by "auto", None or a group."""
    if group is None:
        return []
    if isinstance(group, str) and group == "auto":
        return groups_of(model)
    if dist.is_available() and isinstance(group, dist.ProcessGroup):
        return [group]
    raise ConditioningError(f"`group` must be 'auto', None or a torch.distributed.ProcessGroup, got {group!r}.")


def place(groups: Sequence[Any]) -> int:
    """Return a number of this rank that no other rank has.

    >>> place([])
    0
    """
    return dist.get_rank() if groups else 0


def agree(problem: Exception | None, groups: Sequence[Any], samples: float = 0) -> list[float]:
    """Raise an error of any rank on every rank, so that none waits; otherwise return the weight of each rank's samples.

    >>> agree(None, [], 5)
    [5]
    """
    said, counts = (None if problem is None else f"{type(problem).__name__}: {problem}"), [samples]
    for group in groups:
        heard: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(heard, (said, counts), group=group)
        said = next((one for one, _ in heard if one is not None), None)
        counts = [count for _, its in heard for count in its]
    if problem is not None:
        raise problem
    if said is not None:
        raise ConditioningError(f"Another rank failed: {said}")
    return counts


def together(groups: Sequence[Any], act: Callable[[], Found]) -> Found:
    """Call `act` on all ranks, and raise on all of them if it fails on one.

    >>> together([], lambda: 3)
    3
    """
    found, problem = None, None
    try:
        found = act()
    except Exception as error:
        problem = error
    agree(problem, groups)
    return cast(Found, found)


def in_step(batches: Iterator[Batch], groups: Sequence[Any]) -> Iterator[Batch]:
    """Yield the batches, as long as all ranks have one.

    >>> list(in_step(iter([1, 2]), []))
    [1, 2]
    """
    while True:
        batch, problem = None, None
        try:
            batch = next(batches, None)
        except Exception as error:
            problem = error
        having = agree(problem, groups, int(batch is not None))
        if batch is None and not any(having):
            return
        if batch is None or not all(having):
            raise ConditioningError(
                f"Only {sum(having)} of {len(having)} ranks have another batch. Pass the same number of batches on all "
                "ranks."
            )
        yield batch


def mean(total: float, samples: float, groups: Sequence[Any], device: torch.device) -> float:
    """Return the mean over the samples of all ranks, from the sums of each.

    >>> mean(6.0, 3, [], torch.device("cpu"))
    2.0
    """
    sums = torch.tensor([total, float(samples)], dtype=accumulator(device), device=device)
    for group in groups:
        dist.all_reduce(sums, group=group)
    return float(sums[0] / sums[1])


def gather(uses: dict[Key, Use], groups: Sequence[Any], device: torch.device) -> dict[Key, Use]:
    """Return the uses of layers on any rank, with factors over the samples of all ranks; called by all together."""
    for group in groups:
        uses = _gather(uses, group, device)
    return uses


def _gather(uses: dict[Key, Use], group: Any, device: torch.device) -> dict[Key, Use]:
    told: list[Any] = [None] * dist.get_world_size(group)
    mine = {
        key: (use.name, use.kind, use.position, use.rows, _about(use.x), _about(use.g)) for key, use in uses.items()
    }
    dist.all_gather_object(told, mine, group=group)
    keys = sorted({key for one in told for key in one})
    found: dict[Key, Use] = {}
    for key in keys:
        entries = [one[key] for one in told if key in one]
        name, kind, position, rows = entries[0][:4]
        use = uses.get(key) or Use(name, kind, position, rows)
        for factor, of in ((use.x, 4), (use.g, 5)):
            _together(factor, [one[key][of] if key in one else None for one in told], group, device)
        found[key] = use
    return found


def _about(factor: Factor) -> tuple[int, int, float, bool, bool]:
    return factor.dimension, factor.samples, factor.eps, factor.diagonal, factor.holds_samples


def _together(factor: Factor, told: Sequence[Any], group: Any, device: torch.device) -> None:
    known = [one for one in told if one is not None]
    dimension, total = max(one[0] for one in known), sum(one[1] for one in known)
    factor.dimension, factor.eps = dimension, max(one[2] for one in known)
    factor.diagonal = any(one[3] for one in known)
    # Counts have the widest dtype on every device.
    dtype = accumulator(device) if factor.diagonal else accumulated_in(device)
    if not factor.diagonal and total < dimension and all(one[4] or one[1] == 0 for one in known):
        most = max(one[1] for one in known)
        mine = torch.zeros(dimension, most, dtype=dtype, device=device)
        if factor.holds_samples:
            mine[:, : factor.samples] = factor.kept()
        parts = [torch.empty_like(mine) for _ in told]
        dist.all_gather(parts, mine, group=group)
        counts = [0 if one is None else one[1] for one in told]
        factor.replace_samples(torch.cat([a[:, :n] for a, n in zip(parts, counts, strict=True)], dim=1))
        return
    if factor.samples:
        whole = factor.matrix()
    else:
        shape = (dimension,) if factor.diagonal else (dimension, dimension)
        whole = torch.zeros(shape, dtype=dtype, device=device)
    dist.all_reduce(whole, group=group)
    factor.replace(whole, total)


def mean_gradients(
    gradients: dict[int, Tensor], samples: float, count: int, groups: Sequence[Any], like: Sequence[Tensor]
) -> dict[int, Tensor]:
    """Return gradients of the mean loss over all ranks, from those of each rank's own samples."""
    for group in groups:
        device = like[0].device
        total = torch.tensor([float(samples)], dtype=torch.float64, device=device)
        dist.all_reduce(total, group=group)
        everywhere = torch.tensor([int(i in gradients) for i in range(count)], device=device)
        dist.all_reduce(everywhere, group=group)
        summed = {}
        for i, n in enumerate(everywhere.tolist()):
            if n:
                wide = torch.promote_types(like[i].dtype, torch.float32)
                part = gradients[i] if i in gradients else torch.zeros_like(like[i], dtype=wide)
                part = part * (samples / total.item())
                dist.all_reduce(part, group=group)
                summed[i] = part
        gradients, samples = summed, float(total.item())
    return gradients
