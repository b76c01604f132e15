"""Dying and full units, active for no sample and for every sample (Huang et al., section 4.2)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gyroscope.layers.layer import Layer
from gyroscope.passes.activations import ActivationProbe, Layout

Extremes = tuple[Tensor, Tensor]  # the smallest and the largest activation of each unit, minus the threshold


def _extremes(x: Tensor, layout: Layout, threshold: float) -> Extremes:
    x, axis, positions = layout.place(x)
    if positions:
        x = x.reshape(math.prod(x.shape[:axis]), -1)
    else:
        x = x.movedim(axis, -1).reshape(-1, x.shape[axis])
    # On a CPU, aminmax over one dimension takes ten times as long as both.
    low, high = (x.amin(0), x.amax(0)) if x.device.type == "cpu" else torch.aminmax(x, dim=0)
    return (low, high) if threshold == 0 else (low - threshold, high - threshold)


class Units(ActivationProbe):
    """A probe of activations that keeps only the extremes of each unit.

    A unit is dying if its largest activation is not above the threshold, and full if its smallest is.

    >>> import gyroscope
    >>> net = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1))
    >>> with torch.no_grad():
    ...     _ = net[0].weight.zero_(), net[0].bias.copy_(torch.tensor([-1.0, 1.0]))
    >>> units = Units(net, gyroscope.layers(net))
    >>> units.attach(); _ = net(torch.randn(4, 1)); units.detach()
    >>> units.shares()[0]
    (0.5, 0.5)
    """

    def __init__(self, model: nn.Module, layers: Sequence[Layer]) -> None:
        self._extremes: list[dict[int, Extremes]] = []
        super().__init__(model, layers, rank=0)

    def reset(self) -> None:
        """Forget what was seen."""
        super().reset()
        self._extremes = [{} for _ in self.layers]

    def _feed(self, layer: int, x: Any) -> None:
        pass  # what enters the layers is not asked for, and takes several passes over all activations

    def _look(self, x: Tensor, layout: Layout, threshold: float) -> Any:
        # Not evaluated yet: a normalizer or a rectifier may follow. The graph keeps the tensor anyway, and in-place
        # operations before the next layer, such as `relu_`, count.
        return x.detach(), layout, threshold

    def _count(self, found: Any) -> None:
        self._sources[found.layer].add(found.source)
        if found.seen is not None:
            maps, (low, high) = self._extremes[found.layer], _extremes(*found.seen)
            if len(low) in maps:
                before = maps[len(low)]
                low, high = torch.minimum(before[0], low), torch.maximum(before[1], high)
            maps[len(low)] = low, high

    def gather(self, groups: Sequence[Any]) -> None:
        """Combine the extremes of all ranks; called by all of them together."""
        self._settle()
        for group in groups:
            told: list[Any] = [None] * dist.get_world_size(group)
            mine = [{size: low.dtype for size, (low, _) in maps.items()} for maps in self._extremes]
            dist.all_gather_object(told, mine, group=group)
            for i, maps in enumerate(self._extremes):
                # Units are identified by their positions. Those that only other ranks have seen are included.
                for size, dtype in sorted({k: v for one in told for k, v in one[i].items()}.items()):
                    unseen = torch.full((size,), torch.inf, dtype=dtype, device=self.layers[0].parameter.device)
                    maps[size] = maps.get(size, (unseen, -unseen))
                    dist.all_reduce(maps[size][0], op=dist.ReduceOp.MIN, group=group)
                    dist.all_reduce(maps[size][1], op=dist.ReduceOp.MAX, group=group)

    def shares(self) -> dict[int, tuple[float, float]]:
        """Return the shares of dying and full units by layer, for layers that were seen."""
        self._settle()
        seen = [(i, extremes) for i, maps in enumerate(self._extremes) for extremes in maps.values()]
        found: dict[int, tuple[int, int, int]] = {}
        by_device: defaultdict[torch.device, list[tuple[int, Extremes]]] = defaultdict(list)
        for i, extremes in seen:
            by_device[extremes[0].device].append((i, extremes))
        for some in by_device.values():
            counts = _counted([extremes for _, extremes in some])
            for (i, (low, _)), (alive, full) in zip(some, counts, strict=True):
                both = found.get(i, (0, 0, 0))
                found[i] = both[0] + len(low), both[1] + alive, both[2] + full
        return {i: (1 - alive / n, full / n) for i, (n, alive, full) in found.items()}


def _counted(some: Sequence[Extremes]) -> list[list[int]]:
    """Return the numbers of units that are alive (their largest is above the threshold), and full (their smallest)."""
    lengths = torch.tensor([len(low) for low, _ in some])
    above = torch.cat([*(high for _, high in some), *(low for low, _ in some)]) > 0
    # Differences of one running sum: a sum for each layer would take several kernels each.
    ends = torch.cat([lengths, lengths]).cumsum(0).sub_(1)
    sums = above.cumsum(0)[ends.to(above.device)]
    found: list[list[int]] = sums.diff(prepend=sums.new_zeros(1)).view(2, -1).T.tolist()
    return found
