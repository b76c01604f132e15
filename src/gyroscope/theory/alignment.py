"""How far a gradient is from orthogonal to the weights: for a layer as a whole, and for each of its units."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gyroscope.errors import LayerError
from gyroscope.layers.layer import Layer, split


@dataclass(frozen=True)
class Alignment:
    """⟨w, ∇⟩/(‖w‖‖∇‖) of a layer.

    Attributes:
        tensor: of the whole tensor; None where weight or gradient is zero.
        largest: the largest |cosine| of its units; None where no unit has one.
        typical: the mean of these, each counted by ‖w_j‖‖∇_j‖, so that units with next to no gradient count for as
            little; None where no unit has one.
        size: the number of elements.
        fan_in: of those in a unit.
        units: how many units there are; 0 where the layer cannot be taken apart into units.
        silent: how many of them have no cosine: their weight or their gradient is zero.
    """

    tensor: float | None
    largest: float | None
    typical: float | None
    size: int
    fan_in: int
    units: int
    silent: int


def alignment(layer: Layer, weight: Tensor, gradient: Tensor | None, *, nothing: float = 0.0) -> Alignment:
    """The cosines between a layer's weight and its gradient.

    Args:
        layer: says what its units are: rows of a linear layer, filters of a convolution, tokens of an embedding.
        weight: of the shape of the layer's.
        gradient: of the same shape; None for zero.
        nothing: where ‖w‖‖∇‖ is not above this, the gradient counts as zero; for a unit, above its share of this.

    >>> from gyroscope.layers.layer import layers
    >>> w, g = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    >>> found = alignment(layers(torch.nn.Linear(2, 2))[0], w, g)
    >>> round(found.tensor, 6), found.largest
    (0.5, 1.0)
    """
    given = _real(weight)
    slope = torch.zeros_like(given) if gradient is None else _real(gradient)
    (whole,) = _cosines(given.reshape(1, -1), slope.reshape(1, -1), nothing).tolist()
    tensor = None if whole != whole else whole  # NaN: there is none
    try:
        rows = split(layer, "row")
    except LayerError:  # a grouped transposed convolution has its units along two dimensions
        return Alignment(tensor, None, None, given.numel(), 0, 0, 0)
    w, g = (rows.view(one).reshape(rows.segments, -1) for one in (given, slope))
    cosines = _cosines(w, g, nothing / len(w))
    heard = ~cosines.isnan()
    sizes, pulls = cosines[heard].abs(), (w.norm(dim=1) * g.norm(dim=1))[heard]
    largest = float(sizes.max()) if len(sizes) else None
    typical = float((sizes * pulls).sum() / pulls.sum()) if len(sizes) else None
    return Alignment(tensor, largest, typical, given.numel(), w.shape[1], len(w), len(w) - len(sizes))


def norm(tensor: Tensor) -> float:
    """‖tensor‖, as a number.

    >>> norm(torch.tensor([3.0, 4.0]))
    5.0
    """
    return float(torch.linalg.vector_norm(tensor))


def _cosines(w: Tensor, g: Tensor, nothing: float) -> Tensor:
    """Of the rows; NaN where there is none. Directions first: the square of a tiny gradient may be zero."""
    sizes, slopes = (torch.linalg.vector_norm(one, dim=1, keepdim=True) for one in (w, g))
    cosines = ((w / sizes) * (g / slopes)).sum(1)
    return torch.where((sizes * slopes > nothing).squeeze(1), cosines, torch.nan)


def _real(tensor: Tensor) -> Tensor:
    """As real numbers of float32 or better: sums in less would be as coarse as what they are to find."""
    real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return real.to(torch.promote_types(real.dtype, torch.float32))
