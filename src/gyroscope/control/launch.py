"""The table behind a launch of the fused step: where the layers lie, in which order they are swept, scratch space."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl
from torch import Tensor

from gyroscope.control.coefficients import TANGENT_FLOOR, Law
from gyroscope.control.fused import RULES, step_kernel
from gyroscope.control.ledger import Ledger
from gyroscope.errors import ControlError
from gyroscope.vectors.launch import (
    CHUNK,
    Spare,
    cut,
    in_two,
    is_aligned,
    is_capturing,
    on,
    relauncher,
    rows_of,
    schedule,
    to_device,
)
from gyroscope.vectors.triton import TYPES

# Measured on an H200: smaller chunks spend their time starting, larger blocks run out of registers, and three
# stages of loads keep the memory busy.
BLOCK = 1024
WARPS = 4
FOLD = 4
STAGES = 3

# Where the arguments that change from step to step stand in the kernel's list.
_POINTERS, _NUMBERS, _LR = 1, 15, 16


@dataclass(frozen=True)
class Hyper:
    """The inner rule's numbers, but for the rate; unused ones stay at their defaults."""

    decay: float = 0.0
    momentum: float = 0.0
    dampening: float = 0.0
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    along: float = 0.0
    nesterov: bool = False
    maximize: bool = False
    decoupled: bool = False


# A graph knows addresses alone, so what it has captured is kept for good.
_captured: set[Launch] = set()


class Launch:
    """The table for one set of layers: where they lie, in which order they are swept, and scratch space.

    Args:
        lists: weights, gradients, first and second moments, a tensor a layer each.
        rows: the layers' rows in the ledger.
        counts: the segments of each layer.
    """

    def __init__(self, lists: Sequence[Sequence[Tensor]], rows: Sequence[int], counts: Sequence[int]) -> None:
        device = lists[0][0].device
        self.device = device
        self.types = [TYPES[one[0].dtype] for one in lists]
        self._counts = np.asarray(counts, dtype=np.int64)
        lengths = np.repeat(np.array([t.numel() for t in lists[0]], dtype=np.int64) // self._counts, self._counts)
        within = np.arange(lengths.size) - np.repeat(np.cumsum(self._counts) - self._counts, self._counts)
        self._offsets = within * lengths
        self.chunk = CHUNK
        segment, position, first = cut(lengths, self.chunk)
        order = schedule(len(segment))
        c = np.where(order >= 0, order, -order - 1)
        s = segment[c]
        items = np.zeros((len(order), 8), dtype=np.int32)
        items[:, 0] = s
        items[:, 1] = position[c]
        items[:, 2] = np.minimum(lengths[s] - position[c] * self.chunk, self.chunk)
        items[:, 3] = np.asarray(rows, dtype=np.int64)[s]
        items[:, 4] = first[s]
        items[:, 5] = (first[1:] - first[:-1])[s]
        items[:, 6] = order >= 0
        self.items = to_device(items, device)
        self.n_segments = int(lengths.size)
        flags = torch.zeros(3, self.n_segments, dtype=torch.int32, device=device)
        self.done, self.ready, self.left = flags.unbind()
        self.partial = torch.empty(len(segment), 3, dtype=torch.float64, device=device)
        self.a, self.b = torch.empty(2, self.n_segments, dtype=torch.float64, device=device).unbind()
        self._spare = Spare(device)
        self._captured: list[Tensor] = []
        self.point(lists)
        self._uploaded: tuple[Any, Tensor] | None = None
        self._compiled: dict[Any, Any] = {}

    def point(self, lists: Sequence[Sequence[Tensor]]) -> None:
        """Look for the tensors where they lie now; all else about them is as it was."""
        pointers = np.stack(
            [
                np.repeat(np.fromiter(map(Tensor.data_ptr, one), np.int64, len(one)), self._counts)
                + self._offsets * one[0].element_size()
                for one in lists
            ]
        )
        self.aligned = is_aligned(pointers)
        if is_capturing():
            self.pointers = self._captured_copy(pointers)
            return
        self.pointers = to_device(pointers, self.device)
        self._provide()

    def _provide(self) -> None:
        if self.device.type == "cuda":
            self._spare.provide(self.pointers.shape)

    def _captured_copy(self, pointers: npt.NDArray[np.int64]) -> Tensor:
        copy = self._spare.copied(pointers)
        if copy is None:
            raise ControlError(
                "A CUDA graph captures a step of layers that have not been stepped since the last capture; take one "
                "step outside a graph first."
            )
        return copy

    def __call__(
        self, rule: str, hyper: Hyper, lr: float | Tensor, ledger: Ledger, law: Law, *, zero: bool = False
    ) -> None:
        """Take one step; with `zero`, leave the second list (a buffer of displacements) zeroed."""
        if is_capturing():
            _captured.add(self)
            self._captured.append(self.pointers)  # other gradients may be looked for later, outside the graph
        else:
            self._provide()  # a graph may have taken it, and tensors may lie where they lay before
        if isinstance(lr, Tensor) and lr.device.type == "cpu" != self.device.type:
            lr = lr.item()  # at hand, and a kernel could not reach it
        key = (rule, hyper.nesterov, hyper.maximize, hyper.decoupled, law, zero, id(ledger), self.aligned)
        known = None if isinstance(lr, Tensor) else self._compiled.get(key)
        if known is None:
            arguments = self._arguments(rule, hyper, lr, ledger, law, zero)
            with on(self.device):
                compiled = step_kernel[(len(self.items),)](*arguments, num_warps=WARPS)
            # A kernel that reads the rate from memory cannot take a number.
            if not isinstance(lr, Tensor) and (again := relauncher(compiled, len(self.items))) is not None:
                self._compiled[key] = again, arguments
            return
        # The same tensors as when it was compiled, so there is no need to look at each argument again.
        run, arguments = known
        arguments[_POINTERS] = self.pointers
        arguments[_NUMBERS] = self._numbers(hyper, law)
        arguments[_LR : _LR + 2] = in_two(float(lr))
        with on(self.device):
            run(*arguments)

    def _arguments(
        self, rule: str, hyper: Hyper, lr: float | Tensor, ledger: Ledger, law: Law, zero: bool
    ) -> list[Any]:
        tw, tg, tm, tv = self.types
        on_device = isinstance(lr, Tensor)
        return [
            self.items, self.pointers, self.n_segments, self.partial, self.done, self.ready, self.left,
            self.a, self.b, ledger.multiplier, ledger.radius, ledger.skipped, ledger.bad, ledger.power1,
            ledger.power2, self._numbers(hyper, law), *in_two(0.0 if on_device else float(lr)),
            lr if on_device else ledger.radius,
            RULES[rule], hyper.nesterov, hyper.maximize, hyper.decoupled,
            on_device, law.project, law.scale == "relative", law.reproject, law.growth is not None, zero,
            TANGENT_FLOOR, tw, tg, tm, tv, tl.float64 if tw == tl.float64 else tl.float32,
            self.aligned, self.chunk, BLOCK, FOLD, STAGES,
        ]  # fmt: skip

    def _numbers(self, hyper: Hyper, law: Law) -> Tensor:
        """The hyperparameters in float64 on the device: as kernel arguments they would be rounded to float32."""
        values = (
            hyper.decay, hyper.momentum, 1.0 - hyper.dampening, hyper.beta1, hyper.beta2, hyper.eps,
            law.growth or 0.0, hyper.along,
        )  # fmt: skip
        if self._uploaded is None or self._uploaded[0] != values:
            if is_capturing():
                raise ControlError(
                    "A CUDA graph captures a step whose options (momentum, betas, weight decay, ...) have just "
                    "changed; take one step outside the graph first."
                )
            self._uploaded = (values, to_device(np.array(values), self.device))
        if is_capturing():
            self._captured.append(self._uploaded[1])
        return self._uploaded[1]


def rows_among(rows: Sequence[int], counts: Sequence[int], members: Sequence[int]) -> list[int]:
    """The rows of some layers, where `rows` are those of all and `counts` how many each has.

    >>> rows_among([7, 8, 9], [1, 2], [1])
    [8, 9]
    """
    return [rows[k] for k in rows_of(members, counts).tolist()]
