"""Layers that are measured together: flat buffers of their weights, and their inner products.

A bundle holds layers of one device and dtype. The reference, the weights before a step and at the last measured step,
and the last displacement lie in flat buffers with the same offsets, so that only weights and gradients have to be
looked up. `Staged` computes the inner products in plain torch operations, on any device; it is the reference for the
Triton kernel in `kernel.py` and for the compiled pass (`Native`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from gyroscope.monitor.quantities import COLUMNS
from gyroscope.vectors import backend
from gyroscope.vectors.layout import is_dense, memory_view

# Layers start at multiples of this. Products are summed in float32 within a piece, and in float64 over pieces.
PIECE = 512


@dataclass(frozen=True)
class Layout:
    """Offsets of layers of the given sizes in a flat buffer.

    >>> Layout.of([700, 3]).offsets, Layout.of([700, 3]).total
    ((0, 1024), 1536)
    """

    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    total: int

    @classmethod
    def of(cls, sizes: Sequence[int]) -> Layout:
        """Lay out layers one after another, each at a multiple of `PIECE`."""
        ends = [0]
        for size in sizes:
            ends.append(ends[-1] + -(-size // PIECE) * PIECE)
        return cls(tuple(sizes), tuple(ends[:-1]), ends[-1])

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return the layers' parts of a flat buffer."""
        return [buffer[o : o + n] for o, n in zip(self.offsets, self.sizes, strict=True)]


def flat(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return the elements of a weight in memory order, or those of a gradient in the order of its weight.

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
    """Flat buffers of a bundle at a measured step; None for those that do not exist.

    Attributes:
        reference: w₀.
        before: the weights before the step.
        anchor: the weights at the last measured step, if that was not the step before.
        previous: the last displacement, which the new one replaces.
        moved: True once `previous` holds a displacement.
        skip: on the device, nonzero if the optimizer skipped the step: then the last displacement is kept.
    """

    reference: Tensor
    before: Tensor | None
    anchor: Tensor | None
    previous: Tensor | None
    moved: bool
    skip: Tensor | None = None


class Passes(Protocol):
    """Interface of the ways through the weights: torch operations (`Staged`), compiled C (`Native`), Triton (`Kernel`).

    Attributes:
        kept: a buffer that is reused from copy to copy, if any.
    """

    kept: Tensor | None

    def copy(self, weights: Sequence[Tensor], *, lasting: bool = False) -> Tensor:
        """Copy the weights to a flat buffer; unless `lasting`, the next copy may overwrite it."""

    def products(self, weights: Sequence[Tensor], gradients: Sequence[Tensor], remembered: Remembered) -> Tensor:
        """Return `[layers, len(COLUMNS)]` in float64; the displacement replaces the previous one.

        Columns of missing buffers are zero.
        """


class Bundle:
    """Layers of one device and dtype, and the flat buffers of their weights.

    Attributes:
        members: the layers' positions among all layers.
        reference: w₀, flat; on the layers' device or in pinned memory. None if only a sample of it is held elsewhere:
            then the columns of e mean nothing.
        before, anchor, previous, moved: see `Remembered`.
    """

    def __init__(self, members: Sequence[int], weights: Sequence[Tensor], reference: torch.dtype | None) -> None:
        first = weights[0]
        self.members = tuple(members)
        self.device = first.device
        self.dtype = first.dtype
        self.layout = Layout.of([w.numel() for w in weights])
        self.reference: Tensor | None = None
        if reference is not None:
            self.reference = torch.zeros(self.layout.total, dtype=reference, device=self.device)
        self.before: Tensor | None = None
        self.anchor: Tensor | None = None
        self.previous: Tensor | None = None
        self.moved = False
        self._passes = _passes(self.layout, weights)

    @property
    def bytes(self) -> int:
        """Bytes of the flat buffers that exist now."""
        buffers = (self.reference, self.before, self.anchor, self.previous, self._passes.kept)
        mine = {b.data_ptr(): b.numel() * b.element_size() for b in buffers if b is not None}
        return sum(mine.values())

    def release(self) -> None:
        """Release everything but the reference."""
        self.before = self.anchor = self.previous = self._passes.kept = None
        self.moved = False

    def copy(self, weights: Sequence[Tensor]) -> Tensor:
        """Copy the weights to a flat buffer."""
        return self._passes.copy(weights)

    def anchored(self, weights: Sequence[Tensor]) -> Tensor:
        """Copy the weights to a flat buffer that other copies leave alone."""
        return self._passes.copy(weights, lasting=True)

    def remember_moves(self, dtype: torch.dtype) -> None:
        """Keep displacements from now on, to compare each with the next."""
        self.previous = torch.zeros(self.layout.total, dtype=dtype, device=self.device)
        self.moved = False

    def products(
        self, weights: Sequence[Tensor], gradients: Sequence[Tensor], skip: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        """Return the inner products of the layers, `[layers, len(COLUMNS)]`; see `Passes`."""
        # Without a reference, a buffer that exists anyway stands in for it.
        known = (self.reference, self.before, self.anchor)
        reference = next((one for one in known if one is not None), None)
        reference = self.copy(weights) if reference is None else reference.to(self.device, non_blocking=True)
        remembered = Remembered(reference, self.before, self.anchor, self.previous, self.moved, skip)
        result = self._passes.products(weights, gradients, remembered)
        if self.before is not None or self.anchor is not None:
            self.moved = self.previous is not None
        return result


def _passes(layout: Layout, weights: Sequence[Tensor]) -> Passes:
    device = weights[0].device
    chosen = backend(device).__name__.rpartition(".")[2]
    if chosen != "triton" or not all(map(is_dense, weights)):
        return (Native if chosen == "native" else Staged)(layout, device, weights[0].dtype)
    from gyroscope.monitor.kernel import Kernel

    kernel: Any = Kernel(layout, device)
    return kernel  # type: ignore[no-any-return]


# Elements that are staged at once: few enough for a cache, many enough to outweigh the cost of a call.
_TILE = 1 << 18

# The rows of the scratch buffer; v has a row if it differs from u. The last row holds products of two vectors.
_W, _E, _G, _U, _V, _SPARE = range(6)
_PLACE = {"w": _W, "e": _E, "g": _G, "u": _U, "v": _V}


@dataclass(frozen=True)
class _Tile:
    """Part of the flat buffers: the parts of layers in it, and the gaps between them."""

    start: int
    stop: int
    layers: list[tuple[int, slice]]
    into_w: list[Tensor]
    into_g: list[Tensor]
    gaps: list[Tensor]


class Staged:
    """Walks through the layers of one bundle with torch operations.

    Weights and gradients are staged next to each other in a scratch buffer, one tile at a time, and the Gram matrices
    of its pieces give all products in one call. Pieces are short enough for float32; their sums are added in float64.
    """

    def __init__(self, layout: Layout, device: torch.device, dtype: torch.dtype) -> None:
        self.layout, self.device, self.dtype = layout, device, dtype
        counts = torch.tensor([-(-n // PIECE) for n in layout.sizes], device="cpu")
        self._layer_of_piece = torch.repeat_interleave(counts).to(device)
        self.kept: Tensor | None = None
        self._kept_views: list[Tensor] = []
        self._square: Tensor | None = None  # ⟨p,p⟩ of the previous displacement
        self._scratch: dict[torch.dtype, Tensor] = {}
        self._tiles: dict[torch.dtype, list[_Tile]] = {}

    def copy(self, weights: Sequence[Tensor], *, lasting: bool = False) -> Tensor:
        """Copy the weights to a flat buffer, which is reused, because fresh pages cost more than copying."""
        if self.kept is None or lasting:
            buffer = torch.zeros(self.layout.total, dtype=self.dtype, device=self.device)
            # Parts with the shapes of the weights, so that weights need no views of their own at every copy.
            parts = zip(self.layout.views(buffer), weights, strict=True)
            views = [part.view(w.shape) if w.is_contiguous() else part for part, w in parts]
            if not lasting:
                self.kept, self._kept_views = buffer, views
        else:
            buffer, views = self.kept, self._kept_views
        torch._foreach_copy_(views, [w if w.is_contiguous() else flat(w) for w in weights])
        return buffer

    def products(self, weights: Sequence[Tensor], gradients: Sequence[Tensor], remembered: Remembered) -> Tensor:
        """Return all columns."""
        its = list(map(flat, weights))
        gradients = [flat(g, w) for g, w in zip(gradients, weights, strict=True)]
        dtype = _staging_dtype(self.dtype, self.device)
        result = self._products(its, gradients, remembered, dtype)
        if dtype == torch.float32 and self.device.type == "cpu" and _out_of_range(result, gradients):
            # The previous displacement has been replaced; its products are still in `result`.
            again = replace(remembered, previous=None)
            wide = self._products(its, gradients, again, torch.float64)
            result = torch.where(torch.tensor(["p" in pair for pair in COLUMNS], device="cpu"), result, wide)
        self._remember_square(result, remembered)
        return result

    def _remember_square(self, result: Tensor, remembered: Remembered) -> None:
        """Keep the square of the displacement, unless the step was skipped and the last displacement stays."""
        if remembered.before is None and remembered.anchor is None:
            return
        square = result[:, COLUMNS.index("vv")].clone()
        if remembered.skip is not None and self._square is not None:
            square = torch.where(remembered.skip == 0, square, self._square)
        self._square = square

    def _products(
        self, weights: list[Tensor], gradients: Sequence[Tensor], remembered: Remembered, dtype: torch.dtype
    ) -> Tensor:
        two = remembered.before is not None and remembered.anchor is not None
        moves = remembered.before is not None or remembered.anchor is not None
        rows = 5 if two else 4 if moves else 3
        grams, aligned, squares = [], [], []
        for tile in self._cut(dtype):
            staged = self._stage(tile, weights, gradients, remembered, dtype)
            pieces = (tile.stop - tile.start) // PIECE
            x = staged.as_strided((pieces, rows, PIECE), (PIECE, staged.stride(0), 1))
            grams.append(torch.bmm(x, x.transpose(1, 2)).view(pieces, rows * rows))
            if remembered.before is not None and dtype == torch.float64:
                before = staged[_SPARE].copy_(remembered.before[tile.start : tile.stop])
                squares.append(before.square_().view(pieces, PIECE).sum(1))
            if moves and remembered.previous is not None:
                displacement, previous = staged[_V if two else _U], remembered.previous[tile.start : tile.stop]
                if remembered.moved:
                    product = torch.mul(displacement, previous, out=staged[_SPARE])
                    aligned.append(product.view(pieces, PIECE).sum(1))
                if remembered.skip is None:
                    previous.copy_(displacement)
                else:  # a skipped step keeps the previous displacement
                    previous.copy_(torch.where(remembered.skip == 0, displacement, previous.to(displacement.dtype)))
        exact = _sum_dtype(self.device)
        out = torch.zeros(len(weights), len(COLUMNS), dtype=exact, device=self.device)
        if not grams:  # a rank may hold nothing of any layer
            return out
        sums = torch.zeros(len(weights), rows * rows, dtype=exact, device=self.device)
        sums.index_add_(0, self._layer_of_piece, torch.cat(grams).to(exact))
        into, source = _columns(rows, two)
        out[:, into] = sums[:, source]
        if squares:
            out[:, COLUMNS.index("bb")].index_add_(0, self._layer_of_piece, torch.cat(squares).to(exact))
        elif remembered.before is not None:
            # ‖w − u‖², which has all its digits where float32 was not too narrow; else everything is summed again.
            ww, wu, uu = (out[:, COLUMNS.index(name)] for name in ("ww", "wu", "uu"))
            out[:, COLUMNS.index("bb")] = ww - 2 * wu + uu
        if aligned and self._square is not None:
            out[:, COLUMNS.index("pp")] = self._square
            out[:, COLUMNS.index("vp")].index_add_(0, self._layer_of_piece, torch.cat(aligned).to(exact))
        return out

    def _stage(
        self,
        tile: _Tile,
        weights: list[Tensor],
        gradients: Sequence[Tensor],
        remembered: Remembered,
        dtype: torch.dtype,
    ) -> Tensor:
        staged = self._scratch[dtype][:, : tile.stop - tile.start]
        torch._foreach_copy_(tile.into_w, [weights[i][part] for i, part in tile.layers])
        torch._foreach_copy_(tile.into_g, [gradients[i][part] for i, part in tile.layers])
        if tile.gaps:
            torch._foreach_zero_(tile.gaps)
        w = staged[_W]
        here = slice(tile.start, tile.stop)
        torch.sub(w, remembered.reference[here], out=staged[_E])
        since = remembered.before if remembered.before is not None else remembered.anchor
        if since is not None:
            torch.sub(w, since[here], out=staged[_U])
        if remembered.before is not None and remembered.anchor is not None:
            torch.sub(w, remembered.anchor[here], out=staged[_V])
        return staged

    def _cut(self, dtype: torch.dtype) -> list[_Tile]:
        """Return the tiles, which are made once; the gaps of a single tile stay zero."""
        if dtype not in self._tiles:
            total = self.layout.total
            scratch = torch.zeros(6, min(_TILE, total), dtype=dtype, device=self.device)
            starts = range(0, total, _TILE)
            self._scratch[dtype] = scratch
            self._tiles[dtype] = [self._tile(a, min(a + _TILE, total), scratch, len(starts) > 1) for a in starts]
        return self._tiles[dtype]

    def _tile(self, start: int, stop: int, scratch: Tensor, dirty: bool) -> _Tile:
        layers, into_w, into_g, gaps = [], [], [], []
        end = start
        for i, (offset, size) in enumerate(zip(self.layout.offsets, self.layout.sizes, strict=True)):
            a, b = max(start, offset), min(stop, offset + size)
            if a < b:
                gaps.append(slice(end - start, a - start))
                layers.append((i, slice(a - offset, b - offset)))
                into_w.append(scratch[_W, a - start : b - start])
                into_g.append(scratch[_G, a - start : b - start])
                end = b
        gaps.append(slice(end - start, stop - start))
        views = [scratch[row, gap] for gap in gaps if gap.start < gap.stop for row in (_W, _G)]
        return _Tile(start, stop, layers, into_w, into_g, views if dirty else [])


class Native(Staged):
    """Walks through the layers of one bundle with a compiled pass, in float64 throughout."""

    def products(self, weights: Sequence[Tensor], gradients: Sequence[Tensor], remembered: Remembered) -> Tensor:
        """Return all columns."""
        from gyroscope.vectors import native

        buffers = (remembered.reference, remembered.before, remembered.anchor, remembered.previous)
        if not weights or not native.reads(weights[0], *gradients, *buffers) or len({g.dtype for g in gradients}) > 1:
            return super().products(weights, gradients, remembered)
        moves = remembered.before is not None or remembered.anchor is not None
        result = native.moves(
            [w if w.is_contiguous() else flat(w) for w in weights],
            [
                g if g.is_contiguous() and w.is_contiguous() else flat(g, w)
                for g, w in zip(gradients, weights, strict=True)
            ],
            self.layout.offsets,
            buffers,
            moved=remembered.moved,
            keep=moves and remembered.previous is not None and (remembered.skip is None or not bool(remembered.skip)),
        )
        self._remember_square(result, remembered)
        return result


@cache
def _columns(rows: int, two: bool) -> tuple[list[int], list[int]]:
    """Return the columns that a Gram matrix of `rows` rows gives, and their positions in it."""
    into, source = [], []
    for column, pair in enumerate(COLUMNS):
        if {"p", "b"} & set(pair) or (rows == _U and {"u", "v"} & set(pair)):
            continue
        i, j = (_PLACE["u" if letter == "v" and not two else letter] for letter in pair)
        into.append(column)
        source.append(i * rows + j)
    return into, source


_SQUARES = [COLUMNS.index(name) for name in ("ww", "ee", "gg", "uu", "vv")]
_GROWTH = [COLUMNS.index(name) for name in ("ww", "we", "ee", "gg")]
# If a larger share of a displacement's square is along the weights, float32 has too few digits for the rest.
_ALONG = 0.99
_MOVES = [[COLUMNS.index(name) for name in pair] for pair in (("wu", "uu"), ("wv", "vv"))]


def _out_of_range(result: Tensor, gradients: Sequence[Tensor]) -> bool:
    """Return whether float32 was too narrow: squares out of its range, or differences of nearly equal numbers."""
    columns = result.numpy().T
    squares = columns[_SQUARES]
    if not ((squares > 1e-30) & (squares < 1e30) | (squares == 0)).all():
        return True
    ww, we, ee, gg = columns[_GROWTH]
    rr = ww - 2 * we + ee
    # Weights much longer or shorter than w₀: w − w₀ has few digits of the shorter of the two.
    if ((ww > 100 * rr) | ((rr > 100 * ww) & (ww > 0))).any():
        return True
    # A displacement along the weights hardly turns them, since the last measurement or the reference.
    growth = (2 * we - ee) / (np.sqrt(ww) + np.sqrt(np.maximum(rr, 0.0)) + 1e-30)
    if ((_ALONG * ee < growth * growth) & (ee > 0)).any():
        return True
    for pair in _MOVES:
        wd, dd = columns[pair]
        if (_ALONG * ww * dd < wd * wd).any():
            return True
    return not gg.all() and any(bool(gradients[i].any()) for i in np.flatnonzero(gg == 0).tolist())


def _staging_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return float32 if its products keep their digits within a piece, else float64."""
    if device.type == "mps":
        return torch.float32
    return torch.float32 if device.type == "cpu" and dtype != torch.float64 and _full_precision() else torch.float64


def _full_precision() -> bool:
    """Return whether matrix products of float32 are computed in full float32."""
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # it was set per backend
        return False


def _sum_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64
