"""Second moments of the patches that a convolution sees: XᵀX, with one row of X per output position.

With x the patch of C/groups · kernel numbers at an output position, in the order of `torch.nn.functional.unfold`
(channels, then kernel positions), a convolution is h = Wx at each of them, and Σx = E[x xᵀ] is XᵀX over the number of
rows. Groups share the kernel's positions and are further rows.

The moments are computed from the patches (`add_unfolded`), or without them, as correlations of the image with shifted
copies of itself (`add_shifted`). Along an axis, kernel position i of the patch at output q reads the input at
stride·q + dilation·i − before, that is at stride·(q + o) + r with 0 ≤ r < stride: index q + o of the image's *phase* r,
every stride-th of its positions. So the entry of kernel positions i and j, over channels c and c', is

    Σ_q x_r(q + o)·x_r'(q + o')  =  Σ_t x_r(t)·x_r'(t + σ),      σ = o' − o,  t from o up to o + outputs,

and all pairs (i, j) with the same r, r' and σ have the same summands: only the ends of their sums differ, by a few
positions at the border of the image. Each summand, a product of C × C, is therefore needed once: 13 products per
position for a kernel of 3×3 and a stride of 1, not 81. Sums are added and never subtracted, so nothing cancels, and
zeros of the padding are never multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import pairwise, product
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from gyroscope.base.accepted import choice
from gyroscope.errors import ConditioningError

Sizes = int | Sequence[int]
Padding = Sizes | Literal["same", "valid"]

# Approximate size of any temporary: 256 MiB in float64.
_MOST = 1 << 25
# The lower triangle is not needed: n blocks of rows take (n + 1)/2n of the multiplications.
_BLOCKS = 4
_TILE = 256
# The approximate costs of moving a number and of an operation on tensors, in multiplications (a GPU does more of them).
_MOVE = 12
_CALL = {"cuda": 1e8}
_CALL_ELSE = 1e5
_MODES = ("zeros", "reflect", "replicate", "circular")


@torch.no_grad()
def patch_gram(
    x: Tensor,
    *,
    kernel_size: Sizes,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
    dtype: torch.dtype = torch.float64,
    out: Tensor | None = None,
) -> Tensor:
    """Return Σ patch·patchᵀ over samples, output positions and groups of a convolution, symmetric [C/groups · kernel]².

    It is computed from the patches or, if that takes fewer multiplications, from correlations of the image with itself
    (`add_shifted`), in parts of bounded size and without waiting for the device.

    Args:
        x: the convolution's input, [samples, channels, *spatial] with one to three spatial dimensions.
        kernel_size, stride, padding, dilation, groups, padding_mode: those of `torch.nn.Conv1d` to `Conv3d`.
        dtype: the dtype of products and sums.
        out: a matrix of that dtype to add to, in place; a new matrix if None.

    >>> x = torch.tensor([[[1.0, 2.0, 3.0]]])
    >>> patch_gram(x, kernel_size=2)  # (1, 2) and (2, 3)
    tensor([[ 5.,  8.],
            [ 8., 13.]], dtype=torch.float64)
    """
    if not x.is_floating_point():
        raise ConditioningError(f"`x` must be a real floating-point tensor, got {x.dtype}. Try x.float().")
    axes = _axes(x.shape, kernel_size, stride, padding, dilation, groups, padding_mode)
    positions, channels = prod(axis.kernel for axis in axes), x.shape[1] // groups
    size = positions * channels
    if out is not None and (out.shape != (size, size) or out.dtype != dtype or out.device != x.device):
        raise ConditioningError(
            f"`out` must be [{size}, {size}] in {dtype} on {x.device} for patches of {size} numbers, got "
            f"{list(out.shape)} in {out.dtype} on {out.device}. Try None."
        )
    gram = torch.zeros(positions, channels, positions, channels, dtype=dtype, device=x.device)
    around = _around(axes)
    if padding_mode != "zeros":
        axes = [replace(axis, size=axis.size + axis.before + axis.after, before=0, after=0) for axis in axes]
    add, each = add_unfolded, size * groups * prod(axis.outputs for axis in axes)
    if _shifts_pay(axes, channels, x.shape[0] * groups, x.device):
        add, each = add_shifted, x.shape[1] * prod(axis.size for axis in axes)
    step = max(1, _MOST // max(1, each))
    for start in range(0, x.shape[0], step):
        part = x[start : start + step]
        if padding_mode != "zeros":
            part = functional.pad(part, around, mode=padding_mode)
        add(gram, part.view(part.shape[0], groups, channels, *part.shape[2:]), axes, most=_MOST)
    found = _mirror_(gram.view(size, size)).view(gram.shape).permute(1, 0, 3, 2).reshape(size, size)
    return found if out is None else out.add_(found)


def patch_count(
    shape: Sequence[int],
    *,
    kernel_size: Sizes,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
) -> int:
    """Return the number of patches that `patch_gram` sums over: samples · output positions · groups.

    >>> patch_count((128, 64, 32, 32), kernel_size=3, stride=2, padding=1)
    32768
    """
    axes = _axes(shape, kernel_size, stride, padding, dilation, groups, padding_mode)
    return shape[0] * groups * prod(axis.outputs for axis in axes)


def add_unfolded(gram: Tensor, x: Tensor, axes: Sequence[Axis], *, most: int) -> None:
    """Add what `add_shifted` adds, from the patches themselves; the arguments are the same.

    >>> x = torch.tensor([[[[1.0, 2.0, 3.0]]]])
    >>> gram = torch.zeros(2, 1, 2, 1)
    >>> add_unfolded(gram, x, [Axis(size=3, kernel=2)], most=100)
    >>> gram.view(2, 2).triu()
    tensor([[ 5.,  8.],
            [ 0., 13.]])
    """
    kernel, channels = gram.shape[:2]
    size, spatial = kernel * channels, len(axes)
    matrix = gram.view(size, size)
    # Contiguous, because every number is read once for each kernel position.
    patches = functional.pad(x if kernel == 1 else x.contiguous(), _around(axes))
    for d, axis in enumerate(axes, start=3):
        patches = patches.unfold(d, axis.dilation * (axis.kernel - 1) + 1, axis.stride)[..., :: axis.dilation]
    # From [samples, groups, C, *outputs, *kernel].
    patches = patches.permute(*range(3 + spatial, 3 + 2 * spatial), 2, 0, 1, *range(3, 3 + spatial))
    rows = max(1, most * axes[0].outputs // max(1, patches.numel()))
    block = -(-size // _BLOCKS)
    for first in range(0, axes[0].outputs, rows):
        part = patches.narrow(3 + spatial, first, min(rows, axes[0].outputs - first))
        columns = torch.empty(part.shape, dtype=gram.dtype, device=x.device).copy_(part).view(size, -1)
        for start in range(0, size, block):
            upper = slice(start, start + block)
            # In place, so that autocast keeps the dtype of the matrix.
            matrix[upper, start:].addmm_(columns[upper], columns[start:].T)


def _shifts_pay(axes: Sequence[Axis], channels: int, samples: int, device: torch.device) -> bool:
    """Return True if shifts take less time than patches, estimated from multiplications, moves and launches."""
    kernel = prod(axis.kernel for axis in axes)
    size, rows = kernel * channels, samples * prod(axis.outputs for axis in axes)
    patches = rows * size * (size * (_BLOCKS + 1) / (2 * _BLOCKS) + 4 * _MOVE)
    it = effort(axes)
    call = _CALL.get(device.type, _CALL_ELSE)
    shifts = it.products * samples * channels * (channels + 2 * _MOVE) + it.matrices * channels**2 * 4 * _MOVE
    return bool(shifts + it.calls * call < patches)


def _around(axes: Sequence[Axis]) -> list[int]:
    """Return the padding in the order that `functional.pad` takes."""
    return [n for axis in reversed(axes) for n in (axis.before, axis.after)]


def _mirror_(matrix: Tensor) -> Tensor:
    """Make a matrix symmetric, in place, from its upper triangle, in blocks that stay in the cache."""
    for start in range(0, len(matrix), _TILE):
        rows = slice(start, start + _TILE)
        matrix[rows, :start] = matrix[:start, rows].T
        tile = matrix[rows, rows]
        tile.copy_(tile.triu() + tile.triu(1).T)
    return matrix


def _axes(
    shape: Sequence[int], kernel_size: Sizes, stride: Sizes, padding: Padding, dilation: Sizes, groups: int, mode: str
) -> list[Axis]:
    """Return the spatial axes of a convolution; reject invalid arguments."""
    spatial = len(shape) - 2
    if not 1 <= spatial <= 3:
        raise ConditioningError(
            "The input must be [samples, channels, *spatial] with 1 to 3 spatial dimensions, got shape "
            f"{list(shape)}. Try unsqueeze(0) if the dimension of samples is missing."
        )
    if not 1 <= groups <= shape[1] or shape[1] % groups:
        raise ConditioningError(f"`groups` must be ≥ 1 and divide the {shape[1]} channels, got {groups}. Try 1.")
    choice(mode, "padding_mode", _MODES, ConditioningError)
    kernel = _sizes("kernel_size", kernel_size, spatial, least=1)
    strides = _sizes("stride", stride, spatial, least=1)
    dilations = _sizes("dilation", dilation, spatial, least=1)
    if padding == "same":
        if any(s != 1 for s in strides):
            raise ConditioningError(f"`padding` must be numbers if stride is not 1, got 'same' with stride {stride}.")
        totals = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
        around = [(total // 2, total - total // 2) for total in totals]
    elif isinstance(padding, str) and padding != "valid":
        raise ConditioningError(f"`padding` must be numbers, 'same' or 'valid', got {padding!r}.")
    else:
        around = [(n, n) for n in _sizes("padding", 0 if isinstance(padding, str) else padding, spatial, least=0)]
    axes = [Axis(*given[:4], *given[4]) for given in zip(shape[2:], kernel, strides, dilations, around, strict=True)]
    if any(axis.outputs < 1 for axis in axes):
        raise ConditioningError(
            f"A kernel of {kernel} with dilation {dilations} does not fit into an input of {list(shape[2:])} with "
            f"padding {padding}. Use more padding or a smaller kernel."
        )
    return axes


def _sizes(name: str, given: Sizes, spatial: int, *, least: int) -> list[int]:
    sizes = [given] * spatial if isinstance(given, int) else list(given)
    if len(sizes) != spatial or any(not isinstance(n, int) or n < least for n in sizes):
        raise ConditioningError(
            f"`{name}` must be a whole number ≥ {least}, or {spatial} of them, one per spatial dimension, got {given}."
        )
    return sizes


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
        """Number of output positions."""
        return (self.size + self.before + self.after - self.dilation * (self.kernel - 1) - 1) // self.stride + 1


@dataclass(frozen=True)
class Shift:
    """The pairs (i, i + step) of kernel positions along an axis whose sums Σ_t x_r(t)·x_r'(t + σ) differ only in ends.

    Attributes:
        step: the distance of the second kernel position from the first.
        phases: r and r'.
        by: σ.
        spans: i, the first t of its sum and the one after the last, in the image; none is empty.
    """

    step: int
    phases: tuple[int, int]
    by: int
    spans: tuple[tuple[int, int, int], ...]

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """All ends of sums, ascending: a sum covers the positions between two neighboring ends wholly or not at all."""
        return tuple(sorted({end for _, *ends in self.spans for end in ends}))


@lru_cache(1024)
def shifts(axis: Axis) -> tuple[Shift, ...]:
    """Return all pairs of kernel positions of an axis, grouped by equal summands.

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
    """Yield the combinations of the axes' shifts, without those whose sums are transposes of another's."""
    for several in product(*map(shifts, axes)):
        if tuple(s.step for s in several) >= (0,) * len(axes):
            yield several


@dataclass(frozen=True)
class Effort:
    """The cost of the sums of a sample.

    Attributes:
        products: products of C × C, one position each.
        matrices: temporary C × C sums of them.
        calls: operations on tensors.
    """

    products: int
    matrices: int
    calls: int


def effort(axes: Sequence[Axis]) -> Effort:
    """Return the cost of `add_shifted`.

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
    """Add the sum of patch·patchᵀ over samples, groups and output positions to the upper triangle of `gram`.

    Args:
        gram: [kernel positions, C, kernel positions, C], contiguous.
        x: [samples, groups, C, *spatial].
        axes: one per spatial dimension.
        most: the approximate number of elements that the products of one shift may take.

    >>> x = torch.tensor([[[[1.0, 2.0, 3.0]]]])
    >>> gram = torch.zeros(2, 1, 2, 1)
    >>> add_shifted(gram, x, [Axis(size=3, kernel=2)], most=100)
    >>> gram.view(2, 2)  # (1, 2) and (2, 3)
    tensor([[ 5.,  8.],
            [ 0., 13.]])
    """
    if len(axes) == 1:
        # Add an axis of one row, so that there always is an axis of rows before the last.
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
    """Return the index in row-major order; it is linear, so it applies to differences of indices as well."""
    place = 0
    for i, size in zip(index, sizes, strict=True):
        place = place * size + i
    return place


def _phase(x: Tensor, residues: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return every stride-th position as [*spatial, samples·groups, C].

    With the samples innermost, any stretch of the last axis is one matrix of many rows, without a copy.
    """
    slices = (slice(r, None, s) for r, s in zip(residues, strides, strict=True))
    picked = x[(slice(None), slice(None), slice(None), *slices)]
    placed = picked.permute(*range(3, x.dim()), 0, 1, 2)
    return torch.empty(placed.shape, dtype=dtype, device=x.device).copy_(placed).flatten(-3, -2)


def _products(
    first: Tensor, second: Tensor, several: Sequence[Shift], most: int
) -> Iterator[tuple[list[tuple[int, int]], Tensor]]:
    """Yield Σ x_r(t)·x_r'(t + σ)ᵀ over each part of the last axis between two cuts, separately for each row.

    Rows come in blocks of about `most` numbers: their bounds, and their products as [parts, *rows, C, C].
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
            # With `out`, so that autocast keeps its dtype.
            torch.matmul(left.flatten(-3, -2).mT, right.flatten(-3, -2), out=into)
        yield bounds, products


def _add_window(
    block: Tensor, summed: Tensor, spans: Sequence[tuple[int, int, int]], bounds: Sequence[tuple[int, int]]
) -> None:
    """Add the rows within `bounds` that lie within `spans` to `block`."""
    ends = [(max(low, top), min(high, bottom)) for (_, low, high), (top, bottom) in zip(spans, bounds, strict=True)]
    if any(start >= stop for start, stop in ends):
        return
    window = summed[tuple(slice(a - top, b - top) for (a, b), (top, _) in zip(ends, bounds, strict=True))]
    # One axis at a time: a sum over two that are not adjacent in memory is ten times slower.
    while window.dim() > 2:
        window = _total(window)
    block.add_(window)


def _total(several: Tensor) -> Tensor:
    return several.sum(0) if len(several) > 1 else several[0]


def patch_columns(
    x: Tensor,
    *,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Any,
    dilation: Sequence[int],
    groups: int = 1,
    padding_mode: str = "zeros",
) -> Tensor:
    """Return the patch at every output position of every sample and group, [C/groups · kernel, patches].

    Rows are in the order of `torch.nn.functional.unfold`. Meant for few patches; `patch_gram` does not form them.

    >>> x = torch.tensor([[[1.0, 2.0, 3.0]]])
    >>> patch_columns(x, kernel_size=(2,), stride=(1,), padding=(0,), dilation=(1,))
    tensor([[1., 2.],
            [2., 3.]])
    """
    n = len(kernel_size)
    ends: list[tuple[int, int]]
    if padding == "same":
        ends = [(d * (k - 1) // 2, d * (k - 1) - d * (k - 1) // 2) for k, d in zip(kernel_size, dilation, strict=True)]
    elif padding == "valid":
        ends = [(0, 0)] * n
    else:
        ends = [(size, size) for size in ([padding] * n if isinstance(padding, int) else padding)]
    if any(end != (0, 0) for end in ends):
        mode = "constant" if padding_mode == "zeros" else padding_mode
        x = functional.pad(x, [size for end in reversed(ends) for size in end], mode=mode)
    for i, (k, s, d) in enumerate(zip(kernel_size, stride, dilation, strict=True)):
        x = x.unfold(2 + i, (k - 1) * d + 1, s)[..., ::d]
    # [B, C, *out, *kernel] → [C/groups, *kernel, B, groups, *out]
    x = torch.unflatten(x, 1, (groups, -1))
    kernel = range(3 + n, 3 + 2 * n)
    x = x.permute(2, *kernel, 0, 1, *range(3, 3 + n))
    return x.flatten(n + 1).flatten(0, n)
