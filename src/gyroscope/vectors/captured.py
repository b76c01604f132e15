"""Copies to the device that a CUDA graph holds, in which memory cannot be page-locked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gyroscope.base.transfer import pinned


class Spare:
    """Host memory that is ready for the next graph, and what earlier ones copy from.

    Args:
        device: where copies go.

    >>> spare = Spare(torch.device("cpu"))
    >>> spare.copied([1, 2]) is None             # nothing was provided
    True
    >>> spare.provide((2,)); spare.copied([1, 2])
    tensor([1, 2])
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._next: Tensor | None = None
        self._taken: list[Tensor] = []

    def provide(self, shape: Sequence[int]) -> None:
        """Have memory ready for so many whole numbers; outside of graphs, as often as one may come next."""
        if self._next is None:
            memory = torch.empty(tuple(shape), dtype=torch.int64, device="cpu")
            self._next = pinned(memory) if self.device.type == "cuda" else memory

    def copied(self, values: npt.ArrayLike) -> Tensor | None:
        """Values on the device, copied anew at every replay, so that their source stays as it is; None without one."""
        if self._next is None:
            return None
        source, self._next = self._next, None
        source.numpy()[:] = np.asarray(values)
        self._taken.append(source)
        return source.to(self.device, non_blocking=True)


def in_two(value: float) -> tuple[float, float]:
    """A number as the float32 next to it and what is missing: arguments of kernels are rounded to float32.

    >>> sum(in_two(0.1)) == 0.1
    True
    """
    near = float(np.float32(value))
    return near, value - near
