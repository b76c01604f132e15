"""Weight domination: how small the gradient of a weight is beside the weight itself (Definition 1)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from gyroscope.conditioning.eigen import largest, magnitudes
from gyroscope.errors import ConditioningError
from gyroscope.vectors.eager import power_of_two

# Elements that are copied to float64 at a time; a CPU loses nothing by fewer.
_PART, _PART_ON_CPU = 2**22, 2**20


def domination(weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """σmax(∂L/∂W)/σmax(W) of each layer, as [n] in float64.

    Weight domination is when this is far below 1: a step along the gradient then hardly changes the weight. It is
    infinite for a weight of zero, and NaN if its gradient is zero as well: there nothing is to be compared.

    Args:
        weights: of each layer, as `spectral_norms` takes them.
        gradients: of the mean loss with respect to each.

    >>> one, none = torch.eye(2), torch.zeros(2, 2)
    >>> domination([2 * one, none, none], [one, one, none])
    tensor([0.5000,    inf,    nan], dtype=torch.float64)
    """
    if len(weights) != len(gradients):
        raise ConditioningError(
            f"{len(weights)} weights and {len(gradients)} gradients were given: give one of each a layer"
        )
    norms = spectral_norms([*weights, *gradients])
    return norms[len(weights) :] / norms[: len(weights)]


def spectral_norms(matrices: Sequence[Tensor]) -> Tensor:
    """σmax of tensors of any shape and real dtype, each taken as a matrix W [out, everything else]; [n] in float64.

    σmax(W)² is the largest eigenvalue of the smaller of WWᵀ and WᵀW. Its error is far below what the squares of small
    singular values suffer: a relative 1e-6 at most. Those of one shape are treated together, on their device; the
    result is on the device of the first, or on the CPU where that has no float64. It is 0 for an empty tensor, and NaN
    for one that is not finite.

    >>> spectral_norms([torch.tensor([[3.0, 0.0], [0.0, -4.0]]), torch.ones(2, 2, 2)])
    tensor([4.0000, 2.8284], dtype=torch.float64)
    """
    grams, scales = shorter_grams(matrices)
    # The eigenvalue of a zero matrix may come out as −0, and a gradient be divided by it.
    return largest(grams).abs().sqrt() * scales


def shorter_grams(matrices: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """The smaller of WWᵀ/s² and WᵀW/s² of tensors taken as matrices, in float64, and s, [n]: powers of two.

    >>> grams, scales = shorter_grams([torch.tensor([[3.0, 4.0]])])
    >>> grams, scales
    ([tensor([[25.]], dtype=torch.float64)], tensor([1.], dtype=torch.float64))
    """
    given = [_matrix(m) for m in matrices]
    shapes: dict[tuple[torch.Size, torch.device], list[int]] = defaultdict(list)
    for i, matrix in enumerate(given):
        shapes[matrix.shape, matrix.device].append(i)
    grams: dict[int, Tensor] = {}
    scales: dict[int, Tensor] = {}
    for same in shapes.values():
        gram, scale = _grams([given[i] for i in same])
        grams |= zip(same, gram, strict=True)
        scales |= zip(same, scale, strict=True)
    if not given:
        return [], torch.zeros(0, dtype=torch.float64)
    order = range(len(given))
    return [grams[i] for i in order], torch.stack([scales[i].to(scales[0].device) for i in order])


def _matrix(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.device.type == "mps":
        tensor = tensor.cpu()
    out, *rest = tensor.shape or (1,)
    return tensor.reshape(out, math.prod(rest))


def _grams(same: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The smaller of WWᵀ/s² and WᵀW/s² of matrices of one shape, stacked, and s: powers of two, W/s being near 1."""
    out, rest = same[0].shape
    axis, (short, long) = int(out <= rest), sorted((out, rest))
    most = _PART_ON_CPU if same[0].device.type == "cpu" else _PART
    width = max(1, most // max(1, len(same) * short))
    scale = _scales(same, axis, long, width)
    gram: Tensor | None = None
    for at in range(0, long, width):
        part = _part(same, axis, at, width)
        if scale is not None:
            part = part.div_(scale[:, None, None])
        wide = part if axis else part.mT
        gram = torch.bmm(wide, wide.mT) if gram is None else gram.baddbmm_(wide, wide.mT)
    ones = same[0].new_ones(len(same), dtype=torch.float64)
    zeros = ones.new_zeros(len(same), short, short)
    return zeros if gram is None else gram, ones if scale is None else scale


def _scales(same: Sequence[Tensor], axis: int, long: int, width: int) -> Tensor | None:
    """What to divide by; None for dtypes whose squares are within the range of float64 anyway."""
    if same[0].dtype is not torch.float64:
        return None
    most = same[0].new_zeros(len(same))
    for at in range(0, long, width):
        most = torch.maximum(most, magnitudes(_part(same, axis, at, width)))
    return power_of_two(most)


def _part(same: Sequence[Tensor], axis: int, at: int, width: int) -> Tensor:
    return torch.stack([m.narrow(axis, at, min(width, m.shape[axis] - at)) for m in same]).to(torch.float64)
