"""Homogeneous functions, Euler's theorem and the gradients that follow from it (equations 15 to 18)."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, log, nan
from typing import NamedTuple

import torch
from torch import Tensor

from gyroscope.base.accepted import real
from gyroscope.errors import DynamicsError

Function = Callable[[Tensor], Tensor]


class Homogeneity(NamedTuple):
    """How a function answers to the scale of its argument.

    Attributes:
        degree: k of g(γx) = γᵏ g(x), from the two norms; NaN where g is zero.
        residual: ‖g(γx) − γᵏ g(x)‖/‖γᵏ g(x)‖: zero where g is homogeneous, for these x and γ.
    """

    degree: float
    residual: float


def homogeneity(function: Function, x: Tensor, *, factor: float = 2.0) -> Homogeneity:
    """The degree k for which g(γx) = γᵏ g(x) (equation 15), and how far that is from holding.

    Args:
        function: g, with values of any shape.
        x: where.
        factor: γ, above 0 and not 1.

    >>> found = homogeneity(lambda x: x[0] * x[1] ** 2, torch.tensor([2.0, 3.0], dtype=torch.float64))
    >>> round(found.degree, 12), round(found.residual, 12)
    (3.0, 0.0)
    """
    if not (0 < real(factor) < inf and factor != 1):
        raise DynamicsError(f"factor is {factor!r}; accepted are numbers above 0 other than 1.")
    with torch.no_grad():
        here, there = function(x), function(factor * x)
        size, other = (float(torch.linalg.vector_norm(value)) for value in (here, there))
        if size == 0 or other == 0:
            return Homogeneity(nan, nan)
        degree = log(other / size) / log(factor)
        return Homogeneity(degree, float(torch.linalg.vector_norm(there * (size / other) - here)) / size)


def gradient(function: Function, x: Tensor) -> Tensor:
    """∇g(x) of a function with one value.

    >>> gradient(lambda x: (x**2).sum(), torch.tensor([1.0, 2.0]))
    tensor([2., 4.])
    """
    with torch.enable_grad():
        leaf = x.detach().clone().requires_grad_(True)
        value = function(leaf)
        if value.numel() != 1:
            raise DynamicsError(f"The function gave values of shape {tuple(value.shape)}; accepted is one number.")
        (found,) = torch.autograd.grad(value.sum(), leaf)
    return found


def euler(function: Function, x: Tensor, degree: float = 0.0) -> float:
    """xᵀ∇g(x) − k g(x): zero for a function that is homogeneous of degree k (equation 16).

    For k = 0 it is the rate at which g changes with the scale of x; a scale-invariant g has x ⊥ ∇g(x).

    >>> euler(lambda x: x[0] * x[1] ** 2, torch.tensor([2.0, 3.0]), 3)
    0.0
    """
    slope = float((x.detach() * gradient(function, x)).sum())
    return slope - degree * float(function(x.detach()).detach()) if degree else slope


def gradient_homogeneity(function: Function, x: Tensor, *, factor: float = 2.0) -> Homogeneity:
    """The degree of the gradient: k − 1 for a g of degree k (equation 17), −1 for one that is scale-invariant (18).

    >>> x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    >>> round(gradient_homogeneity(lambda x: x[0] / x.norm(), x).degree, 12)
    -1.0
    """
    return homogeneity(lambda x: gradient(function, x), x, factor=factor)


def effective_gradient(weight: Tensor, gradient: Tensor) -> Tensor:
    """‖w‖⁻² ∇J(ŵ), what SGD on the unit vector ŵ = w/‖w‖ would be given (section 4.3).

    Since ∇J(ŵ) = ‖w‖ ∇J(w) for a scale-invariant J, it is ∇J(w)/‖w‖, and homogeneous of degree −2.

    Args:
        weight: w.
        gradient: ∇J(w), at w and not at ŵ.

    >>> effective_gradient(torch.tensor([3.0, 4.0]), torch.tensor([-4.0, 3.0])).tolist()
    [-0.800000011920929, 0.6000000238418579]
    """
    if weight.shape != gradient.shape:
        raise DynamicsError(
            f"The weight has shape {tuple(weight.shape)}, the gradient {tuple(gradient.shape)}; give equal shapes."
        )
    norm: Tensor = torch.linalg.vector_norm(weight)
    if not bool(norm > 0):
        raise DynamicsError("The weight is zero, so it has no direction, and no effective gradient.")
    return gradient / norm
