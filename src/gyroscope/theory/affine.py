"""Invertible affine maps of vectors: the changes of coordinates that a layer can be looked at in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gyroscope.errors import DynamicsError


@dataclass(frozen=True, eq=False)
class Affine:
    """An invertible affine map x → M x + c of vectors of d numbers.

    Attributes:
        matrix: M, [d, d]; or [d] for a diagonal one, a map of each coordinate on its own.
        shift: c, [d].

    >>> double = Affine(torch.tensor([2.0, 4.0]), torch.tensor([1.0, 0.0]))
    >>> double(torch.tensor([[1.0, 1.0]]))
    tensor([[3., 4.]])
    >>> double.inverse()(double(torch.tensor([5.0, 7.0])))
    tensor([5., 7.])
    """

    matrix: Tensor
    shift: Tensor

    def __post_init__(self) -> None:
        for name, given in (("matrix", self.matrix), ("shift", self.shift)):
            if not isinstance(given, Tensor) or not given.is_floating_point():
                kind = given.dtype if isinstance(given, Tensor) else f"a {type(given).__name__}"
                raise DynamicsError(f"The {name} of an affine map is {kind}; accepted are floating-point tensors.")
        d = self.shift.shape[0] if self.shift.dim() == 1 else -1
        if self.matrix.shape not in ((d,), (d, d)):
            raise DynamicsError(
                f"An affine map was given a matrix of {list(self.matrix.shape)} and a shift of "
                f"{list(self.shift.shape)}; accepted are a shift [d] with a matrix [d, d], or [d] for a diagonal."
            )

    @property
    def diagonal(self) -> bool:
        """Whether every coordinate is mapped on its own."""
        return self.matrix.dim() == 1

    def __call__(self, x: Tensor, *, dim: int = -1) -> Tensor:
        """M x + c along a dimension of x."""
        x = x.movedim(dim, -1)
        return ((x * self.matrix if self.diagonal else x @ self.matrix.T) + self.shift).movedim(-1, dim)

    def inverse(self) -> Affine:
        """The map back, x → M⁻¹ (x − c)."""
        matrix = 1 / self.matrix if self.diagonal else torch.linalg.inv_ex(self.matrix).inverse
        if not bool(torch.isfinite(matrix).all()):
            raise DynamicsError("An affine map has a matrix without an inverse; give one that loses no direction.")
        back = Affine(matrix, torch.zeros_like(self.shift))
        return Affine(matrix, -back(self.shift))


def standardizing(mean: Tensor, variance: Tensor) -> Affine:
    """The map to zero mean and unit variance, ã = Σ^(−1/2) (a − m), with Σ = diag(variance) (equation 7).

    >>> standardizing(torch.tensor([3.0]), torch.tensor([4.0]))(torch.tensor([5.0]))
    tensor([1.])
    """
    for name, given in (("means", mean), ("variances", variance)):
        if not isinstance(given, Tensor):
            raise DynamicsError(f"The {name} are a {type(given).__name__}; accepted is a tensor, one a coordinate.")
    if mean.shape != variance.shape or mean.dim() != 1 or not bool((variance > 0).all()):
        raise DynamicsError(
            f"Means of shape {list(mean.shape)} and variances of shape {list(variance.shape)} were given; accepted are "
            "one of each for every coordinate, the variances above 0: leave constant coordinates out, or add to them."
        )
    scale = variance.rsqrt()
    return Affine(scale, -scale * mean)


class FixedAffine(nn.Module):
    """An affine map as a module without parameters: Ψ or Ω of figure 3.

    Args:
        map: the map.
        dim: the dimension of the inputs that it mixes: −1 for features, 1 for the channels of images.

    >>> FixedAffine(Affine(torch.tensor([2.0]), torch.tensor([1.0])))(torch.tensor([[3.0]]))
    tensor([[7.]])
    """

    matrix: Tensor
    shift: Tensor

    def __init__(self, map: Affine, *, dim: int = -1) -> None:
        super().__init__()
        self.register_buffer("matrix", map.matrix.detach().clone())
        self.register_buffer("shift", map.shift.detach().clone())
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """M x + c."""
        return Affine(self.matrix, self.shift)(x, dim=self.dim)
