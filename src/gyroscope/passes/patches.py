"""The second moments of the patches a convolution sees: XᵀX, its rows the inputs of every output position.

With x the patch of C/groups · kernel numbers at an output position, in the order of `torch.nn.functional.unfold`
(channels, then kernel positions), a convolution is h = Wx at each of them, and Σx = E[x xᵀ] is XᵀX over the number of
rows. Groups share the kernel's positions and are further rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from gyroscope.errors import ConditioningError
from gyroscope.passes.shifts import Axis, add_shifted, effort

Sizes = int | Sequence[int]
Padding = Sizes | Literal["same", "valid"]

# Numbers of any one temporary, about: 256 MiB in float64.
_MOST = 1 << 25
# The lower triangle is not needed: of n blocks of rows, this takes (n + 1)/2n of the multiplications.
_BLOCKS = 4
_TILE = 256
# What moving a number and an operation on tensors cost in multiplications, about. A GPU does more of these meanwhile.
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
    """Σ patch·patchᵀ over samples, output positions and groups of a convolution, a symmetric [C/groups · kernel]².

    It is found from the patches or, where that takes fewer multiplications, from correlations of the image with itself
    (`gyroscope.passes.shifts`), in parts of bounded size and without waiting for the device.

    Args:
        x: the convolution's input, [samples, channels, *spatial] with one to three spatial dimensions.
        kernel_size, stride, padding, dilation, groups, padding_mode: those of `torch.nn.Conv1d` to `Conv3d`.
        dtype: what products are taken and summed in.
        out: a matrix of that dtype to add to, in place; a new one of zeros if not given.

    >>> x = torch.tensor([[[1.0, 2.0, 3.0]]])
    >>> patch_gram(x, kernel_size=2)  # (1, 2) and (2, 3)
    tensor([[ 5.,  8.],
            [ 8., 13.]], dtype=torch.float64)
    """
    if not x.is_floating_point():
        raise ConditioningError(f"patches are of real floating-point inputs, and this one is of {x.dtype}: convert it")
    axes = _axes(x.shape, kernel_size, stride, padding, dilation, groups, padding_mode)
    positions, channels = prod(axis.kernel for axis in axes), x.shape[1] // groups
    size = positions * channels
    if out is not None and (out.shape != (size, size) or out.dtype != dtype or out.device != x.device):
        raise ConditioningError(
            f"patches of {size} numbers add up to [{size}, {size}] of {dtype} on {x.device}, and out is "
            f"{list(out.shape)} of {out.dtype} on {out.device}: give one of that kind, or none"
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
    """How many patches `patch_gram` sums over for an input of this shape: samples · output positions · groups.

    >>> patch_count((128, 64, 32, 32), kernel_size=3, stride=2, padding=1)
    32768
    """
    axes = _axes(shape, kernel_size, stride, padding, dilation, groups, padding_mode)
    return shape[0] * groups * prod(axis.outputs for axis in axes)


def add_unfolded(gram: Tensor, x: Tensor, axes: Sequence[Axis], *, most: int) -> None:
    """What `add_shifted` adds, and takes, but from the patches themselves.

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
    # Contiguous, since every number is read once for each kernel position.
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
            # In place, which autocast leaves in the dtype of the matrix.
            matrix[upper, start:].addmm_(columns[upper], columns[start:].T)


def _shifts_pay(axes: Sequence[Axis], channels: int, samples: int, device: torch.device) -> bool:
    """Whether shifts take less time than patches, by what both multiply, move and launch."""
    kernel = prod(axis.kernel for axis in axes)
    size, rows = kernel * channels, samples * prod(axis.outputs for axis in axes)
    patches = rows * size * (size * (_BLOCKS + 1) / (2 * _BLOCKS) + 4 * _MOVE)
    it = effort(axes)
    call = _CALL.get(device.type, _CALL_ELSE)
    shifts = it.products * samples * channels * (channels + 2 * _MOVE) + it.matrices * channels**2 * 4 * _MOVE
    return bool(shifts + it.calls * call < patches)


def _around(axes: Sequence[Axis]) -> list[int]:
    """The padding in the order `functional.pad` takes it."""
    return [n for axis in reversed(axes) for n in (axis.before, axis.after)]


def _mirror_(matrix: Tensor) -> Tensor:
    """Make a matrix symmetric, in place, from its upper triangle; by blocks, which stay in the cache."""
    for start in range(0, len(matrix), _TILE):
        rows = slice(start, start + _TILE)
        matrix[rows, :start] = matrix[:start, rows].T
        tile = matrix[rows, rows]
        tile.copy_(tile.triu() + tile.triu(1).T)
    return matrix


def _axes(
    shape: Sequence[int], kernel_size: Sizes, stride: Sizes, padding: Padding, dilation: Sizes, groups: int, mode: str
) -> list[Axis]:
    """The spatial axes of a convolution, refused where it could not be one."""
    spatial = len(shape) - 2
    if not 1 <= spatial <= 3:
        raise ConditioningError(
            f"a convolution's input is [samples, channels, *spatial] with 1 to 3 spatial dimensions, and this one is "
            f"{list(shape)}: add the dimension of samples if that is missing"
        )
    if not 1 <= groups <= shape[1] or shape[1] % groups:
        raise ConditioningError(
            f"{shape[1]} channels are not {groups} groups of equal size: give groups that divide them"
        )
    if mode not in _MODES:
        raise ConditioningError(f"padding_mode is {mode!r}, and it can be one of {', '.join(_MODES)}")
    kernel = _sizes("kernel_size", kernel_size, spatial, least=1)
    strides = _sizes("stride", stride, spatial, least=1)
    dilations = _sizes("dilation", dilation, spatial, least=1)
    if padding == "same":
        if any(s != 1 for s in strides):
            raise ConditioningError(
                f"padding is 'same', which is of stride 1 alone, and stride is {stride}: give numbers"
            )
        totals = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
        around = [(total // 2, total - total // 2) for total in totals]
    elif isinstance(padding, str) and padding != "valid":
        raise ConditioningError(f"padding is {padding!r}, and it can be numbers, 'same' or 'valid'")
    else:
        around = [(n, n) for n in _sizes("padding", 0 if isinstance(padding, str) else padding, spatial, least=0)]
    axes = [Axis(*given[:4], *given[4]) for given in zip(shape[2:], kernel, strides, dilations, around, strict=True)]
    if any(axis.outputs < 1 for axis in axes):
        raise ConditioningError(
            f"a kernel of {kernel} with dilation {dilations} does not fit into an input of {list(shape[2:])} with "
            f"padding {padding}: give more padding or a smaller kernel"
        )
    return axes


def _sizes(name: str, given: Sizes, spatial: int, *, least: int) -> list[int]:
    sizes = [given] * spatial if isinstance(given, int) else list(given)
    if len(sizes) != spatial or any(not isinstance(n, int) or n < least for n in sizes):
        raise ConditioningError(
            f"{name} is {given}, and it is one whole number of at least {least}, or {spatial} of them, one for each "
            "spatial dimension"
        )
    return sizes
