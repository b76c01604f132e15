"""The Gram matrix of a convolution's patches without the patches: as correlations of the image with itself, shifted.

Along an axis, kernel position i of the patch at output q reads the input at stride·q + dilation·i − before, that is
at stride·(q + o) + r with 0 ≤ r < stride: index q + o of the image's *phase* r, every stride-th of its positions. So
the entry of kernel positions i and j, over channels c and c', is

    Σ_q x_r(q + o)·x_r'(q + o')  =  Σ_t x_r(t)·x_r'(t + σ),      σ = o' − o,  t from o up to o + outputs,

and all pairs (i, j) with the same r, r' and σ have the same summands: only the ends of their sums differ, by a few
positions at the border of the image. Each summand, a product of C × C, is therefore needed once: 13 products a position
for a kernel of 3×3 and a stride of 1, not 81. Sums are only ever put together from parts, never taken from one another,
so that nothing cancels, and zeros of the padding are never multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import pairwise, product
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class Axis:
    """One spatial axis of a convolution, with `before` and `after` zeros around its `size` positions.

    >>> Axis(size=32, kernel=3, stride=2, before=1, after=1).outputs
    16
    """

    size: int
    kernel: int = 1
    stride: int = 1
    dilation: int = 1
    before: int = 0
    after: int = 0

    @property
    def outputs(self) -> int:
        """How many positions the kernel takes."""
        return (self.size + self.before + self.after - self.dilation * (self.kernel - 1) - 1) // self.stride + 1


@dataclass(frozen=True)
class Shift:
    """The pairs (i, i + step) of kernel positions along an axis whose sums Σ_t x_r(t)·x_r'(t + σ) differ by ends only.

    Attributes:
        step: by how much the second kernel position is ahead of the first.
        phases: r and r'.
        by: σ.
        spans: i, and the first t of its sum and the one after the last, in the image; none is empty.
    """

    step: int
    phases: tuple[int, int]
    by: int
    spans: tuple[tuple[int, int, int], ...]

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """Every end of a sum, ascending: between two of them, a position is in all of a sum's summands or in none."""
        return tuple(sorted({end for _, *ends in self.spans for end in ends}))


@lru_cache(1024)
def shifts(axis: Axis) -> tuple[Shift, ...]:
    """All pairs of kernel positions of an axis, those with the same summands together.

    >>> [(s.step, s.spans) for s in shifts(Axis(size=8, kernel=3, before=1, after=1)) if s.step >= 0]
    [(0, ((0, 0, 7), (1, 0, 8), (2, 1, 8))), (1, ((0, 0, 7), (1, 0, 7))), (2, ((0, 0, 6),))]
    """
    found: dict[tuple[int, tuple[int, int], int], list[tuple[int, int, int]]] = {}
    places = [divmod(axis.dilation * i - axis.before, axis.stride) for i in range(axis.kernel)]
    for i, (o, r) in enumerate(places):
        for j, (o2, r2) in enumerate(places):
            by = o2 - o
            start = max(o, 0, -by)
            stop = min(o + axis.outputs, _length(axis, r), _length(axis, r2) - by)
            if start < stop:
                found.setdefault((j - i, (r, r2), by), []).append((i, start, stop))
    return tuple(Shift(*key, tuple(spans)) for key, spans in found.items())


def combined(axes: Sequence[Axis]) -> Iterator[tuple[Shift, ...]]:
    """The shifts of all axes together, without those whose sums are the transposes of another's."""
    for several in product(*map(shifts, axes)):
        if tuple(s.step for s in several) >= (0,) * len(axes):
            yield several


@dataclass(frozen=True)
class Effort:
    """What the sums of a sample take.

    Attributes:
        products: of C × C, over a position each.
        matrices: C × C sums of them that are kept for a moment.
        calls: operations on tensors.
    """

    products: int
    matrices: int
    calls: int


def effort(axes: Sequence[Axis]) -> Effort:
    """Count what `add_shifted` does.

    >>> image = Axis(size=32, kernel=3, before=1, after=1)
    >>> effort([image, image])  # the patches would take 81 products at 32² positions: 82944
    Effort(products=12370, matrices=587, calls=109)
    """
    products = matrices = calls = 0
    for several in combined(axes):
        *rows, parts = [(s.cuts[-1] - s.cuts[0], len(s.cuts) - 1, len(s.spans)) for s in several]
        products += prod(length for length, _, _ in rows) * parts[0]
        matrices += prod(length for length, _, _ in rows) * parts[1]
        calls += parts[1] + 2 * prod(sums for _, _, sums in (*rows, parts))
    return Effort(products, matrices, calls)


def add_shifted(gram: Tensor, x: Tensor, axes: Sequence[Axis], *, most: int) -> None:
    """Add to `gram` the sum of patch·patchᵀ over samples, groups and output positions, in its upper triangle alone.

    Args:
        gram: [kernel positions, C, kernel positions, C], contiguous.
        x: [samples, groups, C, *spatial].
        axes: one for each spatial dimension.
        most: about how many numbers the products of one shift may take.

    >>> x = torch.tensor([[[[1.0, 2.0, 3.0]]]])
    >>> gram = torch.zeros(2, 1, 2, 1)
    >>> add_shifted(gram, x, [Axis(size=3, kernel=2)], most=100)
    >>> gram.view(2, 2)  # (1, 2) and (2, 3)
    tensor([[ 5.,  8.],
            [ 0., 13.]])
    """
    if len(axes) == 1:
        # One row, so that there always is an axis of rows before the last.
        x, axes = x.unsqueeze(3), (Axis(size=1), *axes)
    strides = [axis.stride for axis in axes]
    phase = cache(lambda residues: _phase(x, residues, strides, gram.dtype))
    kernel = [axis.kernel for axis in axes]
    for several in combined(axes):
        first = phase(tuple(s.phases[0] for s in several))
        second = phase(tuple(s.phases[1] for s in several))
        ahead = _flat([s.step for s in several], kernel)
        *rows, last = several
        for bounds, products in _products(first, second, several, most):
            for i, start, stop in last.spans:
                summed = _total(products[last.cuts.index(start) : last.cuts.index(stop)])
                for spans in product(*(s.spans for s in rows)):
                    place = _flat([*(span[0] for span in spans), i], kernel)
                    _add_window(gram[place, :, place + ahead], summed, spans, bounds)


def _length(axis: Axis, residue: int) -> int:
    return len(range(residue, axis.size, axis.stride))


def _flat(index: Sequence[int], sizes: Sequence[int]) -> int:
    """The place in row-major order; linear, so that it serves for differences of indices as well."""
    place = 0
    for i, size in zip(index, sizes, strict=True):
        place = place * size + i
    return place


def _phase(x: Tensor, residues: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Every stride-th position as [*spatial, samples·groups, C].

    With the samples innermost, any stretch of the last axis is one matrix of many rows, without a copy.
    """
    slices = (slice(r, None, s) for r, s in zip(residues, strides, strict=True))
    picked = x[(slice(None), slice(None), slice(None), *slices)]
    placed = picked.permute(*range(3, x.dim()), 0, 1, 2)
    return torch.empty(placed.shape, dtype=dtype, device=x.device).copy_(placed).flatten(-3, -2)


def _products(
    first: Tensor, second: Tensor, several: Sequence[Shift], most: int
) -> Iterator[tuple[list[tuple[int, int]], Tensor]]:
    """Σ x_r(t)·x_r'(t + σ)ᵀ over each part of the last axis between two cuts, and for each row by itself.

    Rows come in blocks, of about `most` numbers: which they are, and their products as [parts, *rows, C, C].
    """
    *rows, last = several
    parts = list(pairwise(last.cuts))
    whole = [(s.cuts[0], s.cuts[-1]) for s in rows]
    channels = first.shape[-1]
    (top, bottom), *inner = whole
    block = max(1, most // (len(parts) * prod(stop - start for start, stop in inner) * channels**2))
    for start in range(top, bottom, block):
        bounds = [(start, min(start + block, bottom)), *inner]
        sizes = [b - a for a, b in bounds]
        products = first.new_empty(len(parts), *sizes, channels, channels)
        for part, into in zip(parts, products, strict=True):
            box = (*bounds, part)
            left = first[tuple(slice(a, b) for a, b in box)]
            right = second[tuple(slice(a + s.by, b + s.by) for (a, b), s in zip(box, several, strict=True))]
            # With an output given, which autocast leaves in its dtype.
            torch.matmul(left.flatten(-3, -2).mT, right.flatten(-3, -2), out=into)
        yield bounds, products


def _add_window(
    block: Tensor, summed: Tensor, spans: Sequence[tuple[int, int, int]], bounds: Sequence[tuple[int, int]]
) -> None:
    """Add to `block` those of the rows within `bounds` that lie within `spans`."""
    ends = [(max(low, top), min(high, bottom)) for (_, low, high), (top, bottom) in zip(spans, bounds, strict=True)]
    if any(start >= stop for start, stop in ends):
        return
    window = summed[tuple(slice(a - top, b - top) for (a, b), (top, _) in zip(ends, bounds, strict=True))]
    # One axis at a time: a sum over two that do not lie together in memory is ten times slower.
    while window.dim() > 2:
        window = _total(window)
    block.add_(window)


def _total(several: Tensor) -> Tensor:
    return several.sum(0) if len(several) > 1 else several[0]
