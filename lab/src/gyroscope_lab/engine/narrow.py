"""3×3 convolutions of few channels as Triton kernels, with the batch statistics of their outputs.

cuDNN's kernels are made for hundreds of channels. With 16 or 32, as in the first stages of CIFAR networks, most of each
tile is empty, and a convolution takes up to three times as long as necessary. With channels last, the three pixels
of a row that a 3×3 window covers are contiguous in memory, so a convolution over P pixels is three matrix products

    Y[P, M] = Σ_i  X_i[P, 3C] · W_i[3C, M],        i = 0, 1, 2: the rows of the window,

and so are its two gradients: the gradient of the input is the same sum with the window rotated by 180°, and the
gradient of the weights is W_i′ = X_iᵀ · Y′. The kernels read float32 weights and round them on the fly, return float32
gradients of them, and sum y and y² for the batch normalization that follows: no weight is cast, and no output is read
again for its statistics.

`narrow` puts the kernels into a network of the laboratory. Parameters, their names and the computed function stay the
same, except that a normalization does not count the batches it has seen: nothing reads that count.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from gyroscope_lab.models.residual import BasicBlock

# For the gradient of weights, by input channels: pixels that a block takes at a time, its warps, and the most shares.
# From 128 channels on, cuDNN is faster. All these were chosen on an H200, for batches of 128 images of 32×32 to 8×8.
_WEIGHTS = {3: (64, 4, 256), 16: (128, 1, 256), 32: (64, 2, 256), 64: (256, 4, 64)}
_OUTPUTS = (16, 32, 64)
_COLUMNS = 32  # that a block of a sum takes, where there are many


@triton.jit
def product_kernel(
    x, w, y, sums, pixels, height, width,
    C: tl.constexpr, M: tl.constexpr, TURNED: tl.constexpr, RELU: tl.constexpr, SUMS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y[p, m] = Σ_{i, j, c} x[p + (i − 1)·width + (j − 1), c] · w: w[m, i, j, c], or w[c, 2 − i, 2 − j, m] if TURNED.

    With RELU it is max(y, 0); with SUMS also sums[b] = (Σ y, Σ y²) over the pixels p of block b.
    """
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    m = tl.arange(0, M)
    column = p % width
    row = (p // width) % height
    total = tl.zeros([BLOCK_P, M], dtype=tl.float32)
    for i in tl.static_range(3):
        inside = (p < pixels) & (row + i >= 1) & (row + i <= height)
        start = (p + (i - 1) * width - 1) * C
        for first in tl.static_range(0, 3 * C, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            j = k // C
            at = column[:, None] + j[None, :]
            known = inside[:, None] & (k < 3 * C)[None, :] & (at >= 1) & (at <= width)
            a = tl.load(x + start[:, None] + k[None, :], mask=known, other=0.0)
            if TURNED:
                place = (k % C)[:, None] * (9 * M) + (2 - i) * (3 * M) + (2 - j)[:, None] * M + m[None, :]
            else:
                place = m[None, :] * (9 * C) + i * (3 * C) + k[:, None]
            b = tl.load(w + place, mask=(k < 3 * C)[:, None], other=0.0)
            total = tl.dot(a, b.to(a.dtype), total)
    if RELU:
        total = tl.maximum(total, 0.0)
    result = total.to(y.dtype.element_ty)
    tl.store(y + p[:, None] * M + m[None, :], result, mask=(p < pixels)[:, None])
    if SUMS:  # sums of the stored values; pixels past the end are zero
        rounded = result.to(tl.float32)
        there = sums + tl.program_id(0) * (2 * M) + m
        tl.store(there, tl.sum(rounded, axis=0))
        tl.store(there + M, tl.sum(rounded * rounded, axis=0))


@triton.jit
def weights_kernel(
    x, g, parts, pixels, height, width, share,
    C: tl.constexpr, M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """parts[s, m, i, j, c] = Σ_p g[p, m] · x[p + (i − 1)·width + (j − 1), c] over the s-th `share` of the pixels."""
    part = tl.program_id(0)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    m = tl.arange(0, M)
    j = k // C
    upper = tl.zeros([M, BLOCK_K], dtype=tl.float32)
    middle = tl.zeros([M, BLOCK_K], dtype=tl.float32)
    lower = tl.zeros([M, BLOCK_K], dtype=tl.float32)
    for first in range(0, share, BLOCK_P):
        p = part * share + first + tl.arange(0, BLOCK_P)
        row = (p // width) % height
        at = (p % width)[:, None] + j[None, :]
        known = (p < pixels)[:, None] & (k < 3 * C)[None, :] & (at >= 1) & (at <= width)
        near = x + ((p - 1) * C)[:, None] + k[None, :]
        b = tl.trans(tl.load(g + p[:, None] * M + m[None, :], mask=(p < pixels)[:, None], other=0.0))
        upper = tl.dot(b, tl.load(near - width * C, mask=known & (row >= 1)[:, None], other=0.0), upper)
        middle = tl.dot(b, tl.load(near, mask=known, other=0.0), middle)
        lower = tl.dot(b, tl.load(near + width * C, mask=known & (row + 1 < height)[:, None], other=0.0), lower)
    there = parts + (part * M + m)[:, None] * (9 * C) + k[None, :]
    mask = (m < M)[:, None] & (k < 3 * C)[None, :]
    tl.store(there, upper, mask=mask)
    tl.store(there + 3 * C, middle, mask=mask)
    tl.store(there + 6 * C, lower, mask=mask)


@triton.jit
def normalize_kernel(
    y, mean, scale, weight, bias, residual, z, size,
    M: tl.constexpr, AFFINE: tl.constexpr, ADDS: tl.constexpr, RELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """z = (y − mean)·scale, times weight plus bias if AFFINE, rounded, plus residual if ADDS; max(z, 0) if RELU."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    m = i % M
    total = (tl.load(y + i, mask=inside).to(tl.float32) - tl.load(mean + m)) * tl.load(scale + m)
    if AFFINE:
        total = total * tl.load(weight + m) + tl.load(bias + m)
    if ADDS:
        total = total.to(y.dtype.element_ty).to(tl.float32) + tl.load(residual + i, mask=inside).to(tl.float32)
    if RELU:
        total = tl.maximum(total, 0.0)
    tl.store(z + i, total.to(z.dtype.element_ty), mask=inside)


@triton.jit
def gradient_kernel(
    g, y, z, mean, scale, parts, pixels, share, M: tl.constexpr, RELU: tl.constexpr, BLOCK_P: tl.constexpr
):
    """parts[s] = (Σ_p g, Σ_p g·ŷ) over the s-th `share` of the pixels, ŷ = (y − mean)·scale; with RELU, where z > 0."""
    m = tl.arange(0, M)
    center, factor = tl.load(mean + m)[None, :], tl.load(scale + m)[None, :]
    plain = tl.zeros([BLOCK_P, M], dtype=tl.float32)
    product = tl.zeros([BLOCK_P, M], dtype=tl.float32)
    for first in range(0, share, BLOCK_P):
        p = tl.program_id(0) * share + first + tl.arange(0, BLOCK_P)
        there = p[:, None] * M + m[None, :]
        mask = (p < pixels)[:, None] & (m < M)[None, :]
        if RELU:
            mask = mask & (tl.load(z + there, mask=mask, other=0.0) > 0.0)
        a = tl.load(g + there, mask=mask, other=0.0).to(tl.float32)
        plain += a
        product += a * (tl.load(y + there, mask=mask, other=0.0).to(tl.float32) - center) * factor
    there = parts + tl.program_id(0) * (2 * M) + m
    tl.store(there, tl.sum(plain, axis=0))
    tl.store(there + M, tl.sum(product, axis=0))


@triton.jit
def statistics_kernel(
    parts, mean, scale, running_mean, running_variance, count, pixels, momentum, eps,
    M: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """μ = Σ_s parts[s, 0] / pixels and 1/√(σ² + ε), σ² = Σ_s parts[s, 1] / pixels − μ², and the running averages."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.zeros([BLOCK_S, BLOCK_M], dtype=tl.float32)
    second = tl.zeros([BLOCK_S, BLOCK_M], dtype=tl.float32)
    for start in range(0, count, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        there = parts + s[:, None] * (2 * M) + m[None, :]
        mask = (s < count)[:, None] & (m < M)[None, :]
        first += tl.load(there, mask=mask, other=0.0)
        second += tl.load(there + M, mask=mask, other=0.0)
    center = tl.sum(first, axis=0) / pixels
    variance = tl.maximum(tl.sum(second, axis=0) / pixels - center * center, 0.0)
    tl.store(mean + m, center, mask=m < M)
    tl.store(scale + m, 1.0 / tl.sqrt(variance + eps), mask=m < M)
    before = tl.load(running_mean + m, mask=m < M)
    tl.store(running_mean + m, before + momentum * (center - before), mask=m < M)
    before = tl.load(running_variance + m, mask=m < M)
    unbiased = variance * (pixels / (pixels - 1.0))
    tl.store(running_variance + m, before + momentum * (unbiased - before), mask=m < M)


@triton.jit
def sum_kernel(parts, out, count, size, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr):
    """out[m] = Σ_s parts[s, m]."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    total = tl.zeros([BLOCK_S, BLOCK_M], dtype=tl.float32)
    for first in range(0, count, BLOCK_S):
        s = first + tl.arange(0, BLOCK_S)
        known = (s < count)[:, None] & (m < size)[None, :]
        total += tl.load(parts + s[:, None] * size + m[None, :], mask=known, other=0.0)
    tl.store(out + m, tl.sum(total, axis=0), mask=m < size)


def _sum(parts: Tensor) -> Tensor:
    size = parts[0].numel()
    out = parts.new_empty(parts.shape[1:])
    # Where columns are few, their rows have to keep a processor busy.
    rows, columns = (512, 8) if size < 1024 else (64, _COLUMNS)
    sum_kernel[(triton.cdiv(size, columns),)](parts, out, len(parts), size, BLOCK_S=rows, BLOCK_M=columns, num_warps=4)
    return out


def _block(pixels: int) -> int:
    """The pixels per block of a product: few enough that every processor has a block."""
    return 256 if pixels >= 65_536 else 128 if pixels >= 16_384 else 64


def _product(x: Tensor, w: Tensor, outputs: int, *, turned: bool, relu: bool, sums: bool) -> tuple[Tensor, Tensor]:
    count, inputs, height, width = x.shape
    pixels = count * height * width
    x, w = (each.contiguous(memory_format=torch.channels_last) for each in (x, w))
    y = torch.empty((count, outputs, height, width), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    block = _block(pixels)
    blocks = triton.cdiv(pixels, block)
    parts = x.new_empty((blocks if sums else 0, 2, outputs), dtype=torch.float32)
    product_kernel[(blocks,)](
        x, w, y, parts, pixels, height, width, C=inputs, M=outputs, TURNED=turned, RELU=relu, SUMS=sums,
        BLOCK_P=block, BLOCK_K=max(16, inputs), num_warps=8 if block > 64 else 4,
    )  # fmt: skip
    return y, parts


@torch.library.custom_op("gyroscope_lab::convolve", mutates_args=())
def convolve(x: Tensor, w: Tensor, relu: bool) -> tuple[Tensor, Tensor]:
    """Return y = W ∗ x, or ReLU(W ∗ x), and the sums of y and of y² over parts of the pixels, [parts, 2, M]."""
    return _product(x, w, len(w), turned=False, relu=relu, sums=True)


@convolve.register_fake
def _(x: Tensor, w: Tensor, relu: bool) -> tuple[Tensor, Tensor]:
    pixels = x.numel() // x.shape[1]
    return _like(x, len(w)), w.new_empty((triton.cdiv(pixels, _block(pixels)), 2, len(w)), dtype=torch.float32)


@torch.library.custom_op("gyroscope_lab::input_gradient", mutates_args=())
def input_gradient(g: Tensor, w: Tensor) -> Tensor:
    """Return the gradient of W ∗ x with respect to x, from that with respect to W ∗ x."""
    return _product(g, w, w.shape[1], turned=True, relu=False, sums=False)[0]


@input_gradient.register_fake
def _(g: Tensor, w: Tensor) -> Tensor:
    return _like(g, w.shape[1])


def _like(x: Tensor, channels: int) -> Tensor:
    return x.new_empty((len(x), channels, *x.shape[2:])).contiguous(memory_format=torch.channels_last)


@torch.library.custom_op("gyroscope_lab::weight_gradient", mutates_args=())
def weight_gradient(x: Tensor, g: Tensor) -> Tensor:
    """Return the gradient of W ∗ x with respect to W, in float32."""
    count, inputs, height, width = x.shape
    outputs, pixels = g.shape[1], count * height * width
    x, g = (each.contiguous(memory_format=torch.channels_last) for each in (x, g))
    block, warps, shares = _WEIGHTS[inputs]
    share = max(256, triton.cdiv(pixels, shares * block) * block)
    shares = triton.cdiv(pixels, share)
    window = max(16, inputs)
    parts = x.new_empty((shares, outputs, 3, 3, inputs), dtype=torch.float32)
    weights_kernel[(shares, triton.cdiv(3 * inputs, window))](
        x, g, parts, pixels, height, width, share, C=inputs, M=outputs, BLOCK_P=block, BLOCK_K=window,
        num_warps=warps, num_stages=1,
    )  # fmt: skip
    return _sum(parts).permute(0, 3, 1, 2)


@weight_gradient.register_fake
def _(x: Tensor, g: Tensor) -> Tensor:
    return x.new_empty((g.shape[1], 3, 3, x.shape[1]), dtype=torch.float32).permute(0, 3, 1, 2)


def _keep(ctx, inputs, output):
    x, w, relu = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, w, output[0])
    ctx.relu = relu


def _backward(ctx, g, _):
    """The sums have no gradient here: `normalize` adds theirs to that of y."""
    x, w, y = ctx.saved_tensors
    if ctx.relu:
        g = torch.where(y > 0, g, 0.0)
    of_x, of_w, _ = ctx.needs_input_grad
    return input_gradient(g, w) if of_x else None, weight_gradient(x, g) if of_w else None, None


convolve.register_autograd(_backward, setup_context=_keep)


@torch.library.custom_op("gyroscope_lab::statistics", mutates_args=("running_mean", "running_variance"))
def statistics(
    parts: Tensor, running_mean: Tensor, running_variance: Tensor, pixels: int, momentum: float, eps: float
) -> tuple[Tensor, Tensor]:
    """Return μ and 1/√(σ² + ε) from the sums that `convolve` gives, and update the running averages."""
    mean, scale = (torch.empty_like(running_mean) for _ in range(2))
    size = len(mean)
    statistics_kernel[(triton.cdiv(size, 8),)](
        parts, mean, scale, running_mean, running_variance, len(parts), float(pixels), momentum, eps, M=size,
        BLOCK_S=256, BLOCK_M=8, num_warps=4,
    )  # fmt: skip
    return mean, scale


@statistics.register_fake
def _(
    parts: Tensor, running_mean: Tensor, running_variance: Tensor, pixels: int, momentum: float, eps: float
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(running_mean), torch.empty_like(running_mean)


@torch.library.custom_op("gyroscope_lab::gradient_sums", mutates_args=())
def gradient_sums(g: Tensor, y: Tensor, z: Tensor | None, mean: Tensor, scale: Tensor) -> Tensor:
    """Return Σ g and Σ g·ŷ for each channel, [2, M], ŷ = (y − mean)·scale; given z, over the pixels where z > 0."""
    g, y = (each.contiguous(memory_format=torch.channels_last) for each in (g, y))
    z = y if z is None else z.contiguous(memory_format=torch.channels_last)
    outputs, pixels = y.shape[1], y.numel() // y.shape[1]
    block = 2048 // outputs
    share = triton.cdiv(pixels, 512 * block) * block
    shares = triton.cdiv(pixels, share)
    parts = mean.new_empty((shares, 2, outputs))
    gradient_kernel[(shares,)](
        g, y, z, mean, scale, parts, pixels, share, M=outputs, RELU=z is not y, BLOCK_P=block, num_warps=4
    )
    return _sum(parts)


@gradient_sums.register_fake
def _(g: Tensor, y: Tensor, z: Tensor | None, mean: Tensor, scale: Tensor) -> Tensor:
    return mean.new_empty((2, len(mean)))


@torch.library.custom_op("gyroscope_lab::normalize", mutates_args=())
def normalize(
    y: Tensor,
    mean: Tensor,
    scale: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    relu: bool,
) -> Tensor:
    """Return z = ŷ·γ + β + r, or ReLU of it, with ŷ = (y − μ)·s and the statistics μ and s of y itself."""
    y = y.contiguous(memory_format=torch.channels_last)
    added = y if residual is None else residual.contiguous(memory_format=torch.channels_last)
    z = torch.empty_like(y)
    size = y.numel()
    normalize_kernel[(triton.cdiv(size, 2048),)](
        y, mean, scale, mean if weight is None else weight, mean if bias is None else bias, added, z, size,
        M=y.shape[1], AFFINE=weight is not None, ADDS=residual is not None, RELU=relu, BLOCK=2048, num_warps=4,
    )  # fmt: skip
    return z


@normalize.register_fake
def _(
    y: Tensor,
    mean: Tensor,
    scale: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    relu: bool,
) -> Tensor:
    return _like(y, y.shape[1])


def _keep_normalized(ctx, inputs, output):
    y, mean, scale, weight, _, residual, relu = inputs
    ctx.save_for_backward(y, mean, scale, weight, output if relu else None)
    ctx.adds = residual is not None


def _normalize_backward(ctx, g):
    """Return ∂y = γ s (g − mean(g) − ŷ·mean(g·ŷ)) and ∂r = g, with g = ∂z where the ReLU lets it pass.

    The gradient through μ and s is part of ∂y. torch's compiler fuses the elementwise operations.
    """
    y, mean, scale, weight, z = ctx.saved_tensors
    sums = gradient_sums(g, y, z, mean, scale)
    plain, product = sums[0], sums[1]
    if z is not None:
        g = torch.where(z > 0, g, 0.0)
    hat = (y - mean[:, None, None]) * scale[:, None, None]
    each = y.shape[1] / y.numel()
    factor = scale if weight is None else scale * weight
    of_y = factor[:, None, None] * (g - each * plain[:, None, None] - hat * (each * product)[:, None, None])
    affine = (None, None) if weight is None else (product, plain)
    return of_y.to(y.dtype), None, None, *affine, g if ctx.adds else None, None


normalize.register_autograd(_normalize_backward, setup_context=_keep_normalized)


def _normalized(
    conv: nn.Conv2d,
    norm: nn.BatchNorm2d,
    x: Tensor,
    *,
    first: bool = False,
    last: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """BN(W ∗ x) + residual in training, with a ReLU `first`, before the normalization, or `last`."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
    y, parts = convolve(x, conv.weight, first)
    pixels = y.numel() // y.shape[1]
    averages = norm.running_mean, norm.running_var, pixels, norm.momentum, norm.eps
    mean, scale = statistics(parts.detach(), *averages)
    z: Tensor = normalize(y, mean, scale, norm.weight, norm.bias, residual, last)
    return z


@cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(_normalized, dynamic=False)


def _fused(conv: Any, norm: Any, x: Tensor, **given: Any) -> Tensor:
    """`_normalized`, compiled separately if the network around it is not, as for a first layer."""
    compute = _normalized if torch.compiler.is_compiling() else _compiled()
    return compute(conv, norm, x, **given)


def _suits(conv: nn.Module, norm: nn.Module) -> bool:
    """True if this module's kernels can replace a convolution and the normalization after it."""
    return (
        isinstance(conv, nn.Conv2d)
        and isinstance(norm, nn.BatchNorm2d)
        and (conv.kernel_size, conv.stride, conv.padding, conv.groups) == ((3, 3), (1, 1), (1, 1), 1)
        and conv.bias is None
        and conv.in_channels in _WEIGHTS
        and conv.out_channels in _OUTPUTS
        and norm.training
        and norm.momentum is not None
    )


class _Chain(nn.Sequential):
    """A chain of modules in which a convolution, its normalization and its ReLU are one."""

    def forward(self, x: Tensor) -> Tensor:
        modules = list(self)
        while modules:
            conv, *rest = modules
            if len(rest) > 1 and isinstance(rest[0], nn.ReLU) and _suits(conv, rest[1]):
                x, modules = _fused(conv, rest[1], x, first=True), rest[2:]
            elif rest and _suits(conv, rest[0]):
                last = len(rest) > 1 and isinstance(rest[1], nn.ReLU)
                x, modules = _fused(conv, rest[0], x, last=last), rest[2 if last else 1 :]
            else:
                x, modules = conv(x), rest
        return x


class _Block(BasicBlock):
    """A residual block in which a convolution, its normalization and its ReLU are one."""

    def compute(self, x: Tensor) -> Tensor:
        y = self.pad(x)
        if _suits(self.conv1, self.norm1):
            y = _fused(self.conv1, self.norm1, y, last=True)
        else:
            y = self.relu1(self.norm1(self.conv1(y)))
        if _suits(self.conv2, self.norm2):
            return _fused(self.conv2, self.norm2, y, residual=self.shortcut(x), last=True)
        out: Tensor = self.relu2(self.norm2(self.conv2(y)) + self.shortcut(x))
        return out


def narrow(model: nn.Module) -> None:
    """Make a model's convolutions of few channels, and the normalizations after them, use the kernels above.

    The kernels are used in training; in evaluation, modules run as usual.
    """
    for module in model.modules():
        if type(module) is nn.Sequential:
            module.__class__ = _Chain
        elif type(module) is BasicBlock:
            module.__class__ = _Block
