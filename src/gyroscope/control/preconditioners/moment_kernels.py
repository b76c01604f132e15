"""Means and variances of what goes into all layers, and their running averages, as three launches.

What goes into a layer is a matrix: rows by coordinates, or images by pixels. `moments_kernel` finds the mean and the
sum of squares about it of each column over some rows (a part of them), `gather_kernel` puts the parts together and
takes pixels to positions of a kernel as `patch_moments` does, and `fold_kernel` averages with what is known as
`running.Spreads` does. No program waits for another, or reads what another of its launch writes.
"""

# Triton kernels are not Python functions: their arguments have no Python types.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from gyroscope.vectors.triton import pointer


@triton.jit
def moments_kernel(
    owners, records, pointers, partial, columns,
    TX: tl.constexpr, TC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some columns of a part of the rows of one matrix, by Welford's recursion.

    Each place in a tile of ROWS × COLUMNS keeps moments of its own, of every ROWS-th row; they are put together last.
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
        # Centred, for the digits of the variance; zeros around the image are then c too low.
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
            # A maximum with 0 would make 0 of what is not a number.
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
