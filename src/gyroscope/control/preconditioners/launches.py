"""Launching kernels on tensors that lie elsewhere every step, at little work of the host.

A kernel finds its tensors by a table of addresses. Where all lie as in one of the last steps the table is there
already, and a kernel that was launched before is called without having every argument looked at again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gyroscope.vectors.captured import Spare
from gyroscope.vectors.chunks import Ints, is_capturing, on, to_device
from gyroscope.vectors.relaunch import relauncher

_TABLES_KEPT = 16


class Addresses:
    """Tables of the addresses of some tensors, on their device.

    Args:
        count: how many tensors there are.
        device: where they lie.

    >>> x = torch.zeros(3)
    >>> addresses = Addresses(1, x.device)
    >>> table = addresses.table([x.data_ptr()])
    >>> bool(table == x.data_ptr()), addresses.table([x.data_ptr()]) is table
    (True, True)
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.count, self.device = count, device
        self._known: dict[tuple[int, ...], Tensor] = {}
        self._spare = Spare(device)
        self._captured: list[Tensor] = []  # a graph knows addresses alone, so what it has captured is kept

    def table(self, addresses: list[int]) -> Tensor | None:
        """The table; None where a CUDA graph is captured and there is nothing to capture it from."""
        cuda = self.device.type == "cuda"
        # What one stream is still uploading another must not read.
        stream = torch._C._cuda_getCurrentRawStream(self.device.index) if cuda else 0
        key = (stream, *addresses)
        known = self._known.pop(key, None)
        if is_capturing():
            return self._in_a_graph(addresses, known, key)
        if known is None:
            known = to_device(np.array(addresses, dtype=np.int64), self.device)
            while len(self._known) >= _TABLES_KEPT:
                self._known.pop(next(iter(self._known)))
        self._known[key] = known  # the last used is the last to go
        self._spare.provide((self.count,))
        return known

    def _in_a_graph(self, addresses: list[int], known: Tensor | None, key: tuple[int, ...]) -> Tensor | None:
        if known is not None:
            self._known[key] = known
            self._captured.append(known)
            return known
        return self._spare.copied(addresses)


class Launcher:
    """A kernel with a number of programs.

    What is passed may change from launch to launch but for types and whole numbers, which are compiled in. Tensors
    start at multiples of 16 bytes, as all do that are allocated.

    Args:
        kernel: a function of Triton.
        programs: how many of it run.
        device: where.
        warps: the threads of a program, over 32.
    """

    def __init__(self, kernel: Any, programs: int, device: torch.device, *, warps: int = 4) -> None:
        self.kernel, self.programs, self.device, self.warps = kernel, programs, device, warps
        self._run: Any = None

    def __call__(self, arguments: Sequence[Any]) -> None:
        """Launch it."""
        with on(self.device):
            if self._run is not None:
                self._run(*arguments)
                return
            compiled = self.kernel[(self.programs,)](*arguments, num_warps=self.warps)
        self._run = relauncher(compiled, self.programs)


def shared_out(counts: Sequence[int]) -> tuple[npt.NDArray[np.int32], Ints]:
    """Which of several things each program works on, and the first program of each.

    >>> [t.tolist() for t in shared_out([2, 1, 3])]
    [[0, 0, 1, 2, 2, 2], [0, 2, 3]]
    """
    each = np.array(counts, dtype=np.int64)
    return np.repeat(np.arange(len(each), dtype=np.int32), each), np.cumsum(each) - each
