"""The quasi-diagonal directions of all layers as one launch (equation 10)."""

# Triton kernels are not Python functions: their arguments have no Python types.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from gyroscope.vectors.triton import pointer, rounded


@triton.jit
def _reciprocal(value):
    return tl.where(value > 0, 1.0 / value, 0.0)


@triton.jit
def _share(values, n, damping, TC: tl.constexpr, BLOCK: tl.constexpr):
    """What damping adds: a share of the mean magnitude of a layer's numbers."""
    total = tl.zeros((BLOCK,), TC)
    for low in range(0, n, BLOCK):
        k = low + tl.arange(0, BLOCK)
        total += tl.abs(tl.load(values + k, mask=k < n, other=0.0).to(TC))
    return damping * tl.sum(total) / n


@triton.jit
def _moments(means, variances, j, inside, NOISE: tl.constexpr, TC: tl.constexpr):
    """Means and variances; 0 for variances that are no more than rounding makes of numbers that are all the same."""
    m = tl.load(means + j, mask=inside, other=0.0).to(TC)
    v = tl.load(variances + j, mask=inside, other=0.0).to(TC)
    noise = NOISE * m
    return m, tl.where(v > noise * noise, v, 0.0)


@triton.jit
def _share_of_variances(means, variances, n, damping, NOISE: tl.constexpr, TC: tl.constexpr, BLOCK: tl.constexpr):
    """What damping adds to variances."""
    total = tl.zeros((BLOCK,), TC)
    for low in range(0, n, BLOCK):
        k = low + tl.arange(0, BLOCK)
        _, v = _moments(means, variances, k, k < n, NOISE, TC)
        total += v
    return damping * tl.sum(total) / n


@triton.jit
def _product(
    gradient, means, variances, added, factor, k, n, channels, positions, at, inside,
    NOISE: tl.constexpr, TC: tl.constexpr,
):  # fmt: skip
    """(∇W − f mᵀ) Σ⁻¹ of some columns k, with a factor f of each row; and m and Σ⁻¹ there."""
    m, v = _moments(means, variances, k % channels * positions + k // channels, k < n, NOISE, TC)
    precision = _reciprocal(v + added)
    W = tl.load(gradient + at, mask=inside, other=0.0).to(TC)
    return (W - factor[:, None] * m[None, :]) * precision[None, :], m, precision


@triton.jit
def directions_kernel(
    owners, records, pointers, value, slopes, out, coordinates, damping_near, damping_rest,
    TG: tl.constexpr, TC: tl.constexpr, SCALED: tl.constexpr, NOISE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some rows of one layer.

    With a bias P = (∇W − ∇b mᵀ) Σ⁻¹ and ∇b − P m; without one P − P m (Σ⁻¹m)ᵀ / (1 + mᵀΣ⁻¹m) for P = ∇W Σ⁻¹. Where
    pre-activations are scaled, row j over S_jj. Columns are taken as they lie in memory: of a convolution whose
    channels come last the k-th is of channel k mod channels.
    """
    layer = tl.load(owners + tl.program_id(0))
    record = records + 16 * layer
    local = tl.program_id(0) - tl.load(record)
    n = tl.load(record + 1).to(tl.int32)
    rows = tl.load(record + 2).to(tl.int32)
    means = value + tl.load(record + 3)
    channels = tl.load(record + 4).to(tl.int32)
    positions = tl.load(record + 5).to(tl.int32)
    bias = tl.load(record + 6)
    to_weight = out + tl.load(record + 7)
    to_bias = out + tl.load(record + 8)
    variances = means + coordinates
    damping = tl.zeros((), TC) + damping_near + damping_rest

    row = local * ROWS + tl.arange(0, ROWS)
    some = row < rows
    line = row[:, None] * n
    scale = tl.full((ROWS,), 1.0, TC)
    if SCALED:
        own = slopes + tl.load(record + 9)
        s = tl.load(own + row, mask=some, other=0.0).to(TC)
        scale = _reciprocal(s + _share(own, rows, damping, TC, COLUMNS))
    b = tl.zeros((ROWS,), TC)
    if bias >= 0:
        b = tl.load(pointer(pointers, bias, TG, False) + row, mask=some, other=0.0).to(TC)
    gradient = pointer(pointers, layer, TG, False)
    added = _share_of_variances(means, variances, n, damping, NOISE, TC, COLUMNS)
    along = tl.zeros((ROWS, COLUMNS), TC)
    lengths = tl.zeros((COLUMNS,), TC)
    for low in range(0, n, COLUMNS):
        k = low + tl.arange(0, COLUMNS)
        at = line + k[None, :]
        inside = some[:, None] & (k < n)[None, :]
        P, m, precision = _product(
            gradient, means, variances, added, b, k, n, channels, positions, at, inside, NOISE, TC
        )  # fmt: skip
        along += P * m[None, :]
        lengths += precision * m * m
        if bias >= 0:
            tl.store(to_weight + at, rounded(P * scale[:, None], TG), mask=inside)
    shift = tl.sum(along, 1)
    if bias >= 0:
        tl.store(to_bias + row, rounded((b - shift) * scale, TG), mask=some)
    else:
        # Sherman and Morrison's formula.
        shift = shift / (1.0 + tl.sum(lengths))
        for low in range(0, n, COLUMNS):
            k = low + tl.arange(0, COLUMNS)
            at = line + k[None, :]
            inside = some[:, None] & (k < n)[None, :]
            P, m, precision = _product(
                gradient, means, variances, added, shift, k, n, channels, positions, at, inside, NOISE, TC
            )  # fmt: skip
            tl.store(to_weight + at, rounded(P * scale[:, None], TG), mask=inside)
