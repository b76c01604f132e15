"""Means and variances of the inputs of all layers, and their running averages, in three launches.

The input of a layer is a matrix: rows by coordinates, or images by pixels. `moments_kernel` computes the mean of each
column over a part of the rows, and the sum of squares about it. `gather_kernel` combines the parts and maps pixels to
positions of a kernel as `affine_layers.patch_moments` does. `fold_kernel` updates the averages as `running.Spreads`
does. No program waits for another, or reads what another program of its launch writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from gyroscope.base.hooks import is_capturing
from gyroscope.control.preconditioners import affine_layers
from gyroscope.control.preconditioners.affine_layers import Place
from gyroscope.control.preconditioners.running import Spreads
from gyroscope.vectors.launch import Addresses, Ints, Launcher, in_two, shared_out, to_device
from gyroscope.vectors.triton import TYPES, pointer


@triton.jit
def moments_kernel(
    owners, records, pointers, partial, columns,
    TX: tl.constexpr, TC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Moments of some columns over a part of the rows of one matrix, by Welford's recursion.

    Each element of a tile of ROWS × COLUMNS keeps its own moments, of every ROWS-th row; they are combined last.
    """
    use = tl.load(owners + tl.program_id(0))
    record = records + 8 * use
    local = tl.program_id(0) - tl.load(record)
    width = tl.load(record + 1)
    rows = tl.load(record + 2)
    part_rows = tl.load(record + 3)
    start = tl.load(record + 4)
    blocks = tl.cdiv(width, COLUMNS)
    part = local // blocks
    row = part * part_rows
    n = tl.minimum(part_rows, rows - row).to(tl.int32)

    k = (local % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    inside = k < width
    down = tl.arange(0, ROWS)
    x = pointer(pointers, use, TX, False) + (row + down)[:, None] * width + k[None, :]
    mean = tl.zeros((ROWS, COLUMNS), TC)
    apart = tl.zeros((ROWS, COLUMNS), TC)
    count = tl.zeros((), TC)
    full = n // ROWS
    for _ in range(full):
        value = tl.load(x, mask=inside[None, :], other=0.0).to(TC)
        x += ROWS * width
        count += 1.0
        delta = value - mean
        mean += delta * (1.0 / count)
        apart += delta * (value - mean)
    left = full * ROWS + down < n
    if n > full * ROWS:
        value = tl.load(x, mask=left[:, None] & inside[None, :], other=0.0).to(TC)
        delta = tl.where(left[:, None], value - mean, 0.0)
        mean += delta * (1.0 / (count + 1.0))
        apart += delta * (value - mean)
    counts = (count + left.to(TC))[:, None]
    total = tl.sum(mean * counts, 0) / n.to(TC)
    off = mean - total[None, :]
    squares = tl.sum(apart + counts * off * off, 0)
    target = start + part * width + k
    tl.store(partial + target, total, mask=inside)
    tl.store(partial + columns + target, squares, mask=inside)


@triton.jit
def _whole(partial, columns, at, inside, width, parts, part_rows, rows, TC: tl.constexpr):
    """Mean and variance over all parts."""
    mean = tl.load(partial + at, mask=inside, other=0.0)
    squares = tl.load(partial + columns + at, mask=inside, other=0.0)
    seen = tl.minimum(part_rows, rows).to(TC)
    for p in range(1, parts):
        n = tl.minimum(part_rows, rows - p * part_rows).to(TC)
        here = at + p * width
        delta = tl.load(partial + here, mask=inside, other=0.0) - mean
        mean += delta * (n / (seen + n))
        squares += tl.load(partial + columns + here, mask=inside, other=0.0)
        squares += delta * delta * (seen * n / (seen + n))
        seen += n
    return mean, squares / seen


@triton.jit
def gather_kernel(
    owners, records, partial, columns, windows, work, coordinates,
    TC: tl.constexpr, BLOCK: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """The moments of some coordinates of a linear layer, or of a channel of a convolution at all positions."""
    use = tl.load(owners + tl.program_id(0))
    record = records + 16 * use
    local = tl.program_id(0) - tl.load(record)
    positions = tl.load(record + 1).to(tl.int32)
    start = tl.load(record + 2)
    width = tl.load(record + 3)
    parts = tl.load(record + 4).to(tl.int32)
    part_rows = tl.load(record + 5)
    rows = tl.load(record + 6)
    target = tl.load(record + 7)
    if positions == 0:
        j = local * BLOCK + tl.arange(0, BLOCK)
        held = j < width
        average, spread = _whole(partial, columns, start + j, held, width, parts, part_rows, rows, TC)
        tl.store(work + target + j, average, mask=held)
        tl.store(work + coordinates + target + j, spread, mask=held)
    else:
        to_pixel = tl.load(record + 9)
        high = tl.load(record + 10).to(tl.int32)
        wide = tl.load(record + 11).to(tl.int32)
        kernel_wide = tl.load(record + 12).to(tl.int32)
        seen_rows = windows + tl.load(record + 13)
        seen_columns = seen_rows + positions // kernel_wide * high
        seen_inside = seen_columns + wide * kernel_wide
        seen_outside = seen_inside + positions
        start += local * tl.load(record + 8)
        target += local * positions
        pixels = high * wide
        # Centered, for the digits of the variance; zeros around the image are then c too low.
        acc = tl.zeros((BLOCK,), TC)
        for low in range(0, pixels, BLOCK):
            pixel = low + tl.arange(0, BLOCK)
            m, _ = _whole(partial, columns, start + pixel * to_pixel, pixel < pixels, width, parts, part_rows, rows, TC)
            acc += m
        c = tl.sum(acc) / pixels
        for first in range(0, positions, POSITIONS):
            k = first + tl.arange(0, POSITIONS)
            within = k < positions
            one = tl.zeros((BLOCK, POSITIONS), TC)
            two = tl.zeros((BLOCK, POSITIONS), TC)
            for low in range(0, pixels, BLOCK):
                pixel = low + tl.arange(0, BLOCK)
                inside = pixel < pixels
                m, v = _whole(partial, columns, start + pixel * to_pixel, inside, width, parts, part_rows, rows, TC)
                m = m - c
                both = inside[:, None] & within[None, :]
                r = (k // kernel_wide * high)[None, :] + (pixel // wide)[:, None]
                s = (pixel % wide * kernel_wide)[:, None] + (k % kernel_wide)[None, :]
                share = tl.load(seen_rows + r, mask=both, other=0.0) * tl.load(seen_columns + s, mask=both, other=0.0)
                one += share * m[:, None]
                two += share * (v + m * m)[:, None]
            mean = tl.sum(one, 0)
            variance = tl.sum(two, 0) - mean * mean
            shifted = mean + c * tl.load(seen_inside + k, mask=within, other=0.0)
            variance += c * tl.load(seen_outside + k, mask=within, other=0.0) * (mean + shifted)
            tl.store(work + target + k, shifted, mask=within)
            # A maximum with 0 would turn NaN into 0.
            tl.store(work + coordinates + target + k, tl.where(variance < 0, 0.0, variance), mask=within)


@triton.jit
def fold_kernel(
    spans, value, work, counts, coordinates, least_near, least_rest, TC: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The running averages of one layer."""
    layer = tl.program_id(0)
    offset = tl.load(spans + 2 * layer)
    n = tl.load(spans + 2 * layer + 1).to(tl.int32)
    t = tl.load(counts + layer).to(TC) + 1.0
    strange = tl.zeros((BLOCK,), tl.int32)
    for low in range(0, n, BLOCK):
        k = low + tl.arange(0, BLOCK)
        m = tl.load(work + offset + k, mask=k < n, other=0.0)
        v = tl.load(work + coordinates + offset + k, mask=k < n, other=0.0)
        strange += tl.where((tl.abs(m) < float("inf")) & (tl.abs(v) < float("inf")), 0, 1)
    if tl.sum(strange) == 0:
        w = 1.0 / t
        least = tl.zeros((), TC) + least_near + least_rest
        w = tl.where(w < least, least, w)
        for low in range(0, n, BLOCK):
            k = low + tl.arange(0, BLOCK)
            here = offset + k
            m = tl.load(value + here, mask=k < n, other=0.0)
            v = tl.load(value + coordinates + here, mask=k < n, other=0.0)
            apart = tl.load(work + here, mask=k < n, other=0.0) - m
            v += w * (tl.load(work + coordinates + here, mask=k < n, other=0.0) - v)
            tl.store(value + here, m + w * apart, mask=k < n)
            tl.store(value + coordinates + here, v + (w - w * w) * apart * apart, mask=k < n)
    # Every thread has read the count by now.
    tl.debug_barrier()
    tl.store(counts + layer, t)


Shapes = tuple[list[int], list[tuple[Any, ...]]]

# A tile has one cache line of each row. Many rows are divided among programs.
_ROWS, _COLUMNS = 64, 32
_PART, _PARTS = 256, 64
_BLOCK = 128
_FOLD = 1024
_PLANS_KEPT = 8


@dataclass(frozen=True)
class Matrix:
    """The input of a layer as rows by columns.

    Attributes:
        rows: the number of rows or images.
        width: the number of coordinates or pixels.
        image: [channels, height, width], for a convolution.
        last: whether channels come last in memory.
    """

    rows: int
    width: int
    image: tuple[int, int, int] | None = None
    last: bool = False

    @property
    def part(self) -> int:
        """The number of rows per program."""
        return max(_PART, -(-self.rows // (_PARTS * _ROWS)) * _ROWS)

    @property
    def parts(self) -> int:
        """The number of parts of that many rows."""
        return -(-self.rows // self.part)

    def shaped(self, flat: Tensor) -> Tensor:
        """Return values of columns, in memory order, as values of coordinates or of pixels [channels, ...]."""
        if self.image is None:
            return flat
        c, h, w = self.image
        return flat.view(h, w, c).permute(2, 0, 1) if self.last else flat.view(c, h, w)


def _matrix(place: Place, x: Tensor) -> Matrix | None:
    """Return the input of a layer as a matrix, or None where it is not one in memory.

    >>> place = Place("", nn.Conv2d(3, 1, 2), True)
    >>> _matrix(place, torch.zeros(5, 3, 4, 4))
    Matrix(rows=5, width=48, image=(3, 4, 4), last=False)
    >>> _matrix(place, torch.zeros(5, 3, 4, 8)[..., ::2]) is None
    True
    """
    if type(x) is not Tensor or x.dtype not in TYPES or x.numel() == 0:
        return None
    if isinstance(place.module, nn.Linear):
        width = place.inputs
        return Matrix(x.numel() // width, width) if x.shape[-1] == width and x.is_contiguous() else None
    if x.dim() not in (3, 4) or x.shape[-3] != place.module.in_channels:
        return None
    last = not x.is_contiguous()
    if last and not (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)):
        return None
    c, h, w = x.shape[-3:]
    return Matrix(x.numel() // (c * h * w), c * h * w, (c, h, w), last)


class Plan:
    """The division of the work on a pass among programs, for inputs of given shapes.

    Args:
        places: the layers, in the order of their inputs.
        matrices: their inputs as matrices.
        xs: their inputs, for the dtypes.
        starts: the first coordinate of each layer among all coordinates.
        spreads: the averages.
    """

    def __init__(
        self,
        places: Sequence[Place],
        matrices: Sequence[Matrix],
        xs: Sequence[Tensor],
        starts: Sequence[int],
        spreads: Spreads,
    ) -> None:
        device = spreads.value.device
        self.matrices = matrices
        self.dtype = torch.float64 if any(x.dtype == torch.float64 for x in xs) else torch.float32
        sizes = np.array([one.parts * one.width for one in matrices])
        self.columns, self.offsets = int(sizes.sum()), (np.cumsum(sizes) - sizes).tolist()
        self.addresses = Addresses(device)
        self.measures = [self._measure([x.dtype for x in xs], kind, device) for kind in {x.dtype: None for x in xs}]
        self.gather, self._gathered = self._gather(places, starts, spreads)

    def _measure(
        self, kinds: Sequence[torch.dtype], kind: torch.dtype, device: torch.device
    ) -> tuple[Launcher, Tensor, Tensor, list[object]]:
        each = [
            one.parts * -(-one.width // _COLUMNS) if own == kind else 0
            for one, own in zip(self.matrices, kinds, strict=True)
        ]
        owners, first = shared_out(each)
        records: Ints = np.zeros((len(each), 8), dtype=np.int64)
        for i, one in enumerate(self.matrices):
            records[i, :5] = first[i], one.width, one.rows, one.part, self.offsets[i]
        return (
            Launcher(moments_kernel, len(owners), device), to_device(owners, device), to_device(records, device),
            [self.columns, TYPES[kind], TYPES[self.dtype], _ROWS, _COLUMNS],
        )  # fmt: skip

    def _gather(
        self, places: Sequence[Place], starts: Sequence[int], spreads: Spreads
    ) -> tuple[Launcher, tuple[Tensor, Tensor, Tensor, list[object]]]:
        device = spreads.value.device
        each = [-(-one.width // _BLOCK) if one.image is None else one.image[0] for one in self.matrices]
        owners, first = shared_out(each)
        records: Ints = np.zeros((len(each), 16), dtype=np.int64)
        tables: dict[object, int] = {}
        flat: list[Tensor] = []
        length, most = 0, 1
        for i, (place, one, start) in enumerate(zip(places, self.matrices, starts, strict=True)):
            records[i, :8] = first[i], 0, self.offsets[i], one.width, one.parts, one.part, one.rows, start
            module = place.module
            if one.image is None or not isinstance(module, nn.Conv2d):
                continue
            c, h, w = one.image
            positions = place.inputs // c
            seen = self._seen(module, h, w)
            key = tuple(seen.tolist())
            if key not in tables:
                tables[key], length = length, length + len(seen)
                flat.append(seen)
            most = max(most, positions)
            steps = (1, c) if one.last else (h * w, 1)
            records[i, 1], records[i, 8:14] = positions, (*steps, h, w, module.kernel_size[1], tables[key])
        seen = torch.cat(flat) if flat else torch.zeros(1, dtype=self.dtype)
        return Launcher(gather_kernel, len(owners), device), (
            to_device(owners, device), to_device(records, device), to_device(seen.numpy(), device),
            [TYPES[self.dtype], _BLOCK, min(16, triton.next_power_of_2(most))],
        )  # fmt: skip

    def _seen(self, module: nn.Conv2d, h: int, w: int) -> Tensor:
        """Return the rows and columns that kernel positions see, and the shares inside and outside of the image."""
        own = affine_layers.windows(module, torch.empty(h, w, dtype=self.dtype, device="cpu"))
        n = own.rows.shape[0] * own.columns.shape[1]
        inside = torch.ones(n, dtype=self.dtype, device="cpu") if own.inside is None else own.inside
        outside = torch.zeros(n, dtype=self.dtype, device="cpu") if own.outside is None else own.outside
        return torch.cat([own.rows.flatten(), own.columns.flatten(), inside, outside])

    def measure(self, addresses: list[int]) -> Tensor | None:
        """Return [2, columns]: means and sums of squares about them, part by part."""
        pointers = self.addresses.table(addresses)
        if pointers is None:
            return None
        partial = torch.empty(2, self.columns, dtype=self.dtype, device=pointers.device)
        for launcher, owners, records, rest in self.measures:
            launcher([owners, records, pointers, partial, *rest])
        return partial

    def moments(self, partial: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return means and variances of coordinates or pixels, matrix by matrix."""
        found = []
        for one, start in zip(self.matrices, self.offsets, strict=True):
            m, squares = (row[start : start + one.parts * one.width].view(one.parts, -1) for row in partial)
            mean, total, seen = m[0], squares[0], min(one.part, one.rows)
            for p in range(1, one.parts):
                n = min(one.part, one.rows - p * one.part)
                delta = m[p] - mean
                mean = mean + delta * (n / (seen + n))
                total = total + squares[p] + delta * delta * (seen * n / (seen + n))
                seen += n
            found.append((one.shaped(mean), one.shaped(total / seen)))
        return found


@dataclass(frozen=True, eq=False)
class Measured:
    """The measured moments of a pass."""

    plan: Plan
    partial: Tensor
    indices: list[int]
    samples: int
    batch: object
    captured: bool


class MomentLaunches:
    """Measures passes that use each layer once, and updates the averages.

    Args:
        places: the layers.
        order: the order of the layers in the averages.
        spreads: the averages.
    """

    def __init__(self, places: Sequence[Place], order: Sequence[int], spreads: Spreads) -> None:
        self.places, self.spreads = places, spreads
        ends = np.cumsum([0, *spreads.sizes]).tolist()
        self._starts = {i: ends[at] for at, i in enumerate(order)}
        value = spreads.value
        self._fold = Launcher(fold_kernel, len(order), value.device)
        spans = np.stack([np.array(ends[:-1]), np.array(spreads.sizes)], 1).astype(np.int64)
        self._fold_arguments = [
            to_device(spans, value.device), value, spreads._work, spreads.counts.value, value.shape[1],
            *in_two(1 - spreads.counts.decay), TYPES[value.dtype], _FOLD,
        ]  # fmt: skip
        self._last: tuple[Shapes, Plan | None] | None = None
        self._plans: list[tuple[Shapes, Plan | None]] = []
        self._captured: set[Plan] = set()  # a graph holds addresses only, so captured plans are kept

    def measure(self, indices: list[int], xs: list[Tensor], samples: int, batch: object) -> Measured | None:
        """Measure the inputs of the layers of a pass; return None where the kernels cannot."""
        plan = self._plan(indices, xs)
        if plan is None:
            return None
        try:
            addresses = list(map(Tensor.data_ptr, xs))
        except RuntimeError:  # a tensor without memory, such as one of torch.func
            return None
        partial = plan.measure(addresses)
        if partial is None:
            return None
        if captured := is_capturing():
            self._captured.add(plan)
        return Measured(plan, partial, indices, samples, batch, captured)

    def fold(self, new: Measured) -> None:
        """Update the averages with the moments of a pass."""
        plan, spreads = new.plan, self.spreads
        owners, records, seen, rest = plan._gathered
        coordinates = spreads.value.shape[1]
        plan.gather([owners, records, new.partial, plan.columns, seen, spreads._work, coordinates, *rest])
        self._fold(self._fold_arguments)

    def _plan(self, indices: list[int], xs: list[Tensor]) -> Plan | None:
        shapes = indices, [(type(x), x.shape, x.stride(), x.dtype, x.device) for x in xs]
        if self._last is None or self._last[0] != shapes:
            known = next((one for one in self._plans if one[0] == shapes), None)
            if known is None:
                if is_capturing():
                    return None
                known = shapes, self._made(indices, xs)
                self._plans = [*self._plans[1 - _PLANS_KEPT :], known]
            self._last = known
        return self._last[1]

    def _made(self, indices: list[int], xs: list[Tensor]) -> Plan | None:
        device = self.spreads.value.device
        if sorted(indices) != sorted(self._starts) or any(x.device != device for x in xs):
            return None
        places = [self.places[i] for i in indices]
        matrices = [one for place, x in zip(places, xs, strict=True) if (one := _matrix(place, x)) is not None]
        if len(matrices) < len(xs):
            return None
        return Plan(places, matrices, xs, [self._starts[i] for i in indices], self.spreads)
