"""Percentiles of the second moments that Adam-like optimizers keep, layer by layer (figure 5 of the rotation paper).

Adam divides each element's step by √v, v the running mean of that element's squared gradient. How v is spread within a
layer, against how it differs between layers, says what this amounts to: "the estimates vary much more across layers
than inside layers". Values are those of v as the optimizer keeps it, as in the paper: no square root is taken and no
bias corrected.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from gyroscope.errors import MonitorError
from gyroscope.passes.activations import spread
from gyroscope.store.record import QuantityInfo
from gyroscope.theory.moment_variance import KEYS
from gyroscope.vectors.layout import is_dense, memory_view
from gyroscope.vectors.sharded import is_sharded

NAMES = ("moment_p10", "moment_p50", "moment_p90")
INFO = {
    name: QuantityInfo(name, "gradient²", f"{which} of the second moments v that the optimizer keeps for the layer")
    for name, which in zip(NAMES, ("10th percentile", "median", "90th percentile"), strict=True)
}
_AT_ONCE = 2**24  # elements sorted together


def moment_percentiles(
    optimizer: Optimizer, parameters: Sequence[Tensor], percents: Sequence[float] = (10, 50, 90), most: int = 65536
) -> Tensor | None:
    """Percentiles of the second moments of each of some parameters, interpolated as NumPy does.

    They are exact up to `most` elements a parameter; of more, `most` are looked at, always the same ones and spread
    evenly. Nothing waits for the device, and the optimizer's state is left as it is. Where state is sharded (FSDP2),
    the result is that of the whole tensors, and all ranks must call together, as for `dots`.

    Args:
        optimizer: any optimizer; a `Layca` keeps the state of its inner one.
        parameters: the layers' parameters.
        percents: which percentiles, from 0 to 100.
        most: elements of a parameter to look at, at most.

    Returns:
        [parameters, percents] in float32 on the first parameter's device. NaN for a parameter whose second moments do
        not exist (before its first step) or are kept in some other form than one number an element (factored,
        quantized). None where no parameter has any.

    >>> p = torch.nn.Parameter(torch.zeros(5))
    >>> optimizer = torch.optim.Adam([p], betas=(0.9, 0.0))         # so that v is the last gradient squared
    >>> p.grad = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]); optimizer.step()
    >>> moment_percentiles(optimizer, [p], percents=(0, 50, 100))
    tensor([[ 1.,  9., 25.]])
    """
    if not all(0 <= q <= 100 for q in percents):
        raise MonitorError(f"percents is {tuple(percents)}; accepted are values from 0 to 100.")
    if most < 1:
        raise MonitorError(f"most is {most}; accepted are values from 1.")
    found = [(i, v) for i, p in enumerate(parameters) if (v := _second_moment(optimizer, p)) is not None]
    if not found:
        return None
    samples: defaultdict[tuple[int, torch.device], list[tuple[int, Tensor]]] = defaultdict(list)
    for i, values in _samples(found, most):
        samples[len(values), values.device].append((i, values))
    device = found[0][1].device
    rows: list[Tensor] = [torch.full((len(percents),), torch.nan, device=device)] * len(parameters)
    for (n, _), group in samples.items():
        at_once = max(1, _AT_ONCE // n)
        for start in range(0, len(group), at_once):
            some = group[start : start + at_once]
            ordered = torch.stack([values for _, values in some]).sort(dim=1).values
            table = torch.stack([_at(ordered, q / 100 * (n - 1)) for q in percents], dim=1)
            for (i, _), row in zip(some, table.to(device, non_blocking=True), strict=True):
                rows[i] = row
    return torch.stack(rows)


def _at(ordered: Tensor, position: float) -> Tensor:
    """The value at a position between two columns."""
    low = int(position)
    high = min(low + 1, ordered.shape[1] - 1)
    return torch.lerp(ordered[:, low], ordered[:, high], position - low)


def _second_moment(optimizer: Optimizer, parameter: Tensor) -> Tensor | None:
    # Not `state[parameter]`: asking a defaultdict makes an entry, and optimizers take that for a step taken.
    state: dict[str, Any] = optimizer.state.get(parameter, {})
    for key in KEYS:
        value = state.get(key)
        if isinstance(value, Tensor) and value.shape == parameter.shape and value.numel() and value.is_floating_point():
            plain = type(value) in (Tensor, torch.nn.Parameter)
            return value.detach() if plain or is_sharded(value) else None
    return None


def _samples(found: Sequence[tuple[int, Tensor]], most: int) -> list[tuple[int, Tensor]]:
    """The elements to look at, in float32."""
    samples: list[tuple[int, Tensor]] = []
    shared: defaultdict[tuple[Any, ...], list[tuple[int, Tensor]]] = defaultdict(list)
    positions: dict[tuple[int, torch.device], Tensor] = {}
    for i, value in found:
        if is_sharded(value):
            groups, part = _own_part(value, most)
            if part is not None:
                shared[groups].append((i, part))
        else:
            n = value.numel()
            flat = memory_view(value, 1)[0] if is_dense(value) else value.reshape(-1)
            if n > most:
                if (n, value.device) not in positions:
                    positions[n, value.device] = spread(n, most, value.device)
                flat = flat.index_select(0, positions[n, value.device])
            samples.append((i, flat.float()))
    for groups, parts in shared.items():
        whole = torch.cat([part for _, part in parts])
        for group in groups:
            dist.all_reduce(whole, group=group)
        end = 0
        for i, part in parts:
            start, end = end, end + len(part)
            samples.append((i, whole[start:end]))
    return samples


def _own_part(value: Any, most: int) -> tuple[tuple[Any, ...], Tensor | None]:
    """Of the elements to look at those that this rank holds, and zeros for the others: the sum over ranks has all."""
    from torch.distributed.tensor import Shard

    mesh, local = value.device_mesh, value.to_local()
    start, size = [0] * value.dim(), list(value.shape)
    groups = []
    for axis, placement in enumerate(value.placements):
        if placement.is_replicate() or mesh.size(axis) == 1:
            continue
        if type(placement) is not Shard:
            return (), None  # on every rank alike
        # As `torch.chunk` does it: equal parts, the last ones smaller or empty.
        dim = placement.dim
        chunk = -(-size[dim] // mesh.size(axis))
        skipped = min(chunk * mesh.get_local_rank(axis), size[dim])
        start[dim] += skipped
        size[dim] = min(chunk, size[dim] - skipped)
        groups.append(mesh.get_group(axis))
    rest = spread(value.numel(), most, local.device)
    if tuple(size) != tuple(local.shape) or local.numel() == 0:
        # A layout of another kind is not known to the other ranks, which sum: NaN tells them.
        return tuple(groups), torch.full((len(rest),), 0.0 if local.numel() == 0 else torch.nan, device=local.device)
    held = torch.ones_like(rest, dtype=torch.bool)
    where = torch.zeros_like(rest)
    step = 1
    for dim in reversed(range(value.dim())):
        coordinate = rest % value.shape[dim] - start[dim]
        rest = rest // value.shape[dim]
        held &= (coordinate >= 0) & (coordinate < size[dim])
        where += coordinate.clamp(0, size[dim] - 1) * step
        step *= size[dim]
    values = local.reshape(-1).index_select(0, where).float()
    return tuple(groups), torch.where(held, values, 0.0)
