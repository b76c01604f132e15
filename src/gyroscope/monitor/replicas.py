"""Weights of data-parallel ranks compared without waiting for any of them, through the store of the process group.

Ranks that hold replicas of a model have the same weights as long as their gradients are averaged. A model that is
trained around its `DistributedDataParallel` wrapper has not, and nothing fails.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gyroscope.base.hooks import is_capturing
from gyroscope.layers.layer import Layer
from gyroscope.vectors.layout import is_sharded

# Weights are published before the first step and after _FIRST, _APART·_FIRST, … steps, and compared when the next ones
# are: by then all ranks have published theirs.
_FIRST, _APART = 4, 4
# Ranks that average gradients agree to rounding errors.
_SAME, _DIFFERENT = 1e-6, 1e-4
# Numbers of calls, which are the same on all ranks that call `watch` alike.
_CALLS = count()


class Replicas:
    """Publishes the norm of one layer at a few steps on every rank, and compares them on the first.

    Parts of one model on several ranks begin different, and are not compared. If other ranks have published nothing by
    the time of the first comparison, because they do not call `watch`, there is none.

    Args:
        layers: the layers; the smallest one is compared.
        told: called on the first rank with the relative difference, where there is one.
    """

    def __init__(self, layers: Sequence[Layer], told: Callable[[float], None] | None) -> None:
        whole = [layer for layer in layers if not is_sharded(layer.parameter)]
        self._layer = min(whole, key=lambda layer: layer.parameter.numel())
        self._told = told
        self._rank, self._count = dist.get_rank(), dist.get_world_size()
        self._store = dist.distributed_c10d._get_default_store()
        self._prefix = f"gyroscope/replicas/{next(_CALLS)}"
        self._taken, self._due, self._on = 0, _FIRST, True
        self._published = (0, self._publish(0))

    @classmethod
    def of(cls, layers: Sequence[Layer], told: Callable[[float], None] | None) -> Replicas | None:
        """Return the comparison, or None if there is one rank, or no store to compare through."""
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return None
        with suppress(Exception):  # a process group without a store, or whose store is gone
            return cls(layers, told)
        return None

    def follow(self, optimizer: Optimizer) -> RemovableHandle:
        """Count the steps of an optimizer, and compare at the steps that are due."""
        return optimizer.register_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        if not self._on or torch.compiler.is_compiling() or is_capturing():
            return
        self._taken += 1
        if self._taken == self._due:
            self._due *= _APART
            try:
                if self._told is not None:
                    self._compare(*self._published)
                self._published = (self._taken, self._publish(self._taken))
            except Exception:  # the store is gone
                self._on = False

    def _publish(self, step: int) -> list[Any]:
        weight = self._layer.parameter.detach()
        about = [float(torch.linalg.vector_norm(weight.double())), self._layer.name, list(weight.shape)]
        self._store.set(f"{self._prefix}/{step}/{self._rank}", json.dumps(about))
        return about

    def _compare(self, step: int, own: list[Any]) -> None:
        keys = [f"{self._prefix}/{step}/{rank}" for rank in range(self._count) if rank != self._rank]
        if not self._store.check(keys):
            self._on = False
            return
        others = [json.loads(self._store.get(key)) for key in keys]
        alike = all(other[1:] == own[1:] for other in others)
        apart = max(abs(other[0] - own[0]) for other in others) / max(own[0], 1e-30)
        if step == 0:
            self._on = alike and apart < _SAME
        elif apart > _DIFFERENT and self._told is not None:
            self._told(apart)
