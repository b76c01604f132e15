"""Dying and full units: active for no sample, and for every sample (Huang et al., section 4.2)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gyroscope.layer import Layer
from gyroscope.monitor.activations import ActivationProbe
from gyroscope.monitor.modules import Layout

Extremes = tuple[Tensor, Tensor]  # of each unit, the smallest and the largest activation above the threshold


class Units(ActivationProbe):
    """What a probe of activations sees, kept as the extremes of each unit: all that dying and full units need.

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

    def _look(self, x: Tensor, layout: Layout, threshold: float) -> Any:
        x, axis, positions = layout.place(x.detach())
        if positions:
            x = x.reshape(-1, *x.shape[axis:]).flatten(1)
        else:
            x = x.movedim(axis, -1).reshape(-1, x.shape[axis])
        low, high = torch.aminmax(x, dim=0)
        return (low, high) if threshold == 0 else (low - threshold, high - threshold)

    def _count(self, found: Any) -> None:
        self._sources[found.layer].add(found.source)
        if found.seen is not None:
            maps, (low, high) = self._extremes[found.layer], found.seen
            if len(low) in maps:
                before = maps[len(low)]
                low, high = torch.minimum(before[0], low), torch.maximum(before[1], high)
            maps[len(low)] = low, high

    def gather(self, groups: Sequence[Any]) -> None:
        """The same over all ranks; called by all together."""
        self._settle()
        for group in groups:
            told: list[Any] = [None] * dist.get_world_size(group)
            mine = [{size: low.dtype for size, (low, _) in maps.items()} for maps in self._extremes]
            dist.all_gather_object(told, mine, group=group)
            for i, maps in enumerate(self._extremes):
                # Units are told apart by their positions. Those that other ranks alone have seen are taken over.
                for size, dtype in sorted({k: v for one in told for k, v in one[i].items()}.items()):
                    unseen = torch.full((size,), torch.inf, dtype=dtype, device=self.layers[0].parameter.device)
                    maps[size] = maps.get(size, (unseen, -unseen))
                    dist.all_reduce(maps[size][0], op=dist.ReduceOp.MIN, group=group)
                    dist.all_reduce(maps[size][1], op=dist.ReduceOp.MAX, group=group)

    def shares(self) -> dict[int, tuple[float, float]]:
        """By layer the shares of its units that are dying and full; those of layers that were seen."""
        self._settle()
        seen = [(i, extremes) for i, maps in enumerate(self._extremes) for extremes in maps.values()]
        found: dict[int, list[int]] = {}
        by_device: defaultdict[torch.device, list[tuple[int, Extremes]]] = defaultdict(list)
        for i, extremes in seen:
            by_device[extremes[0].device].append((i, extremes))
        for some in by_device.values():
            # Full: the smallest is above the threshold. Alive: the largest is. All units cross to the host together.
            low = torch.cat([low for _, (low, _) in some])
            high = torch.cat([high for _, (_, high) in some])
            full, alive = torch.stack([low > 0, high > 0]).cpu().numpy()
            at = 0
            for i, (units, _) in some:
                here, at = slice(at, at + len(units)), at + len(units)
                counts = (len(units), int(alive[here].sum()), int(full[here].sum()))
                found[i] = [a + b for a, b in zip(found.get(i, [0, 0, 0]), counts, strict=True)]
        return {i: (1 - alive / n, full / n) for i, (n, alive, full) in found.items()}
