"""Layers that are measured together, and what is remembered of their weights, in flat buffers.

A bundle holds layers of one device and dtype. The reference, the weights before a step and at the last measured step,
and the last displacement lie in flat buffers with the same offsets, so that only weights and gradients have to be
looked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from gyroscope.vectors import backend
from gyroscope.vectors.layout import is_dense, memory_view

# Layers start at multiples of this: pieces over which products are summed in float32 before float64 takes over.
PIECE = 512


@dataclass(frozen=True)
class Layout:
    """Where layers of the given sizes lie in a flat buffer.

    >>> Layout.of([700, 3]).offsets, Layout.of([700, 3]).total
    ((0, 1024), 1536)
    """

    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    total: int

    @classmethod
    def of(cls, sizes: Sequence[int]) -> Layout:
        """One after another, each at a multiple of `PIECE`."""
        ends = [0]
        for size in sizes:
            ends.append(ends[-1] + -(-size // PIECE) * PIECE)
        return cls(tuple(sizes), tuple(ends[:-1]), ends[-1])

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The layers' parts of a flat buffer."""
        return [buffer[o : o + n] for o, n in zip(self.offsets, self.sizes, strict=True)]


def flat(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """The elements of a weight in the order they lie in memory, or of a gradient in the order of its weight.

    >>> flat(torch.ones(2, 3).T).shape
    torch.Size([6])
    """
    tensor = tensor.detach()
    like = tensor if like is None else like
    if tensor.is_contiguous() and like.is_contiguous():
        return tensor.view(-1)
    if not is_dense(like):
        return tensor.reshape(-1)
    if tensor.stride() != like.stride():
        tensor = torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
    return memory_view(tensor, 1)[0]


@dataclass(frozen=True)
class Remembered:
    """The flat buffers of a bundle at a measured step; None for what is not there.

    Attributes:
        reference: w₀.
        before: the weights before the step.
        anchor: the weights at the last measured step, if that was not the step before.
        previous: the last displacement, which this step's takes the place of.
        moved: whether `previous` holds one yet.
        skip: on the device, whether the step was none, so that the last displacement stays the previous one.
    """

    reference: Tensor
    before: Tensor | None
    anchor: Tensor | None
    previous: Tensor | None
    moved: bool
    skip: Tensor | None = None


class Passes(Protocol):
    """Who walks through the weights: plain torch operations (`staged`) or a kernel.

    Attributes:
        kept: a buffer that is kept from copy to copy, if any.
    """

    kept: Tensor | None

    def copy(self, weights: Sequence[Tensor], *, lasting: bool = False) -> Tensor:
        """The weights as they are now, in a flat buffer; one that is not `lasting` serves for the next copy again."""

    def products(self, weights: Sequence[Tensor], gradients: Sequence[Tensor], remembered: Remembered) -> Tensor:
        """`[layers, len(COLUMNS)]` in float64; the displacement takes the place of the previous one.

        What is not there gives columns of zeros.
        """


class Bundle:
    """Layers of one device and dtype, and what is remembered of their weights.

    Attributes:
        members: the layers' positions among all.
        reference: w₀, flat; on the layers' device or in pinned memory.
        before, anchor, previous, moved: see `Remembered`.
    """

    def __init__(self, members: Sequence[int], weights: Sequence[Tensor], reference: torch.dtype) -> None:
        first = weights[0]
        self.members = tuple(members)
        self.device = first.device
        self.dtype = first.dtype
        self.layout = Layout.of([w.numel() for w in weights])
        self.reference = torch.zeros(self.layout.total, dtype=reference, device=self.device)
        self.before: Tensor | None = None
        self.anchor: Tensor | None = None
        self.previous: Tensor | None = None
        self.moved = False
        self._passes = _passes(self.layout, weights)

    @property
    def bytes(self) -> int:
        """What the flat buffers take that are there now."""
        buffers = (self.reference, self.before, self.anchor, self.previous, self._passes.kept)
        mine = {b.data_ptr(): b.numel() * b.element_size() for b in buffers if b is not None}
        return sum(mine.values())

    def release(self) -> None:
        """Let go of everything but the reference."""
        self.before = self.anchor = self.previous = self._passes.kept = None
        self.moved = False

    def copy(self, weights: Sequence[Tensor]) -> Tensor:
        """The weights as they are now, in a flat buffer."""
        return self._passes.copy(weights)

    def anchored(self, weights: Sequence[Tensor]) -> Tensor:
        """The same, in a buffer that other copies leave alone."""
        return self._passes.copy(weights, lasting=True)

    def remember_moves(self, dtype: torch.dtype) -> None:
        """Keep displacements from now on, so that the next can be compared with them."""
        self.previous = torch.zeros(self.layout.total, dtype=dtype, device=self.device)
        self.moved = False

    def products(
        self, weights: Sequence[Tensor], gradients: Sequence[Tensor], skip: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        """The inner products of the layers, `[layers, len(COLUMNS)]`; see `Passes`."""
        reference = self.reference.to(self.device, non_blocking=True)
        remembered = Remembered(reference, self.before, self.anchor, self.previous, self.moved, skip)
        result = self._passes.products(weights, gradients, remembered)
        if self.before is not None or self.anchor is not None:
            self.moved = self.previous is not None
        return result


def _passes(layout: Layout, weights: Sequence[Tensor]) -> Passes:
    device = weights[0].device
    if backend(device).__name__.endswith("eager") or not all(map(is_dense, weights)):
        from gyroscope.monitor.staged import Staged

        return Staged(layout, device, weights[0].dtype)
    from gyroscope.monitor.kernel import Kernel

    kernel: Any = Kernel(layout, device)
    return kernel  # type: ignore[no-any-return]
