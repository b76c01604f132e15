"""Damping against the norm of the weights: why weight decay helps K-FAC with normalizers (section 5.2, equation 26).

A second-order step is damped, (G + ηI)⁻¹∇J. Where only the direction of w matters, w → γw takes ∇J to ∇J/γ and G to
G/γ², while η stays what it is. So

    (G(γw) + ηI)⁻¹ ∇J(γw)  =  γ (G(w) + γ²ηI)⁻¹ ∇J(w):

relative to the weights, the step at γw is that at w with the damping γ²η. Without damping the norm makes no difference.
With it, growing weights turn a second-order method into gradient descent, and weight decay keeps them from growing.

G is the curvature of one layer: the Gauss-Newton matrix, or K-FAC's A ⊗ S, whose eigenvalues are the products of those
of A and of S. A does not change with γ, S goes as 1/γ².
"""

from __future__ import annotations

from math import inf, sqrt

import torch
from torch import Tensor

from gyroscope.base.accepted import real
from gyroscope.errors import DynamicsError


def damped_step(G: Tensor, gradient: Tensor, *, damping: float) -> Tensor:
    """(G + ηI)⁻¹ ∇J (equation 26), for a symmetric G [n, n] and a gradient [n].

    >>> damped_step(torch.diag(torch.tensor([3.0, 1.0])), torch.tensor([4.0, 4.0]), damping=1.0)
    tensor([1., 2.])
    """
    _check_damping(damping)
    n = len(gradient)
    if G.shape != (n, n) or gradient.dim() != 1:
        raise DynamicsError(
            f"G is {tuple(G.shape)} and the gradient {tuple(gradient.shape)}; accepted: [n, n] and [n]."
        )
    step: Tensor = torch.linalg.solve(G + damping * torch.eye(n, dtype=G.dtype, device=G.device), gradient)
    return step


def rescaled(G: Tensor, gradient: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """G(γw) = G(w)/γ² and ∇J(γw) = ∇J(w)/γ of a layer whose scale does not matter.

    >>> rescaled(torch.tensor([[4.0]]), torch.tensor([4.0]), scale=2.0)
    (tensor([[1.]]), tensor([2.]))
    """
    _check_scale(scale)
    return G / scale**2, gradient / scale


def effective_damping(damping: float, *, scale: float) -> float:
    """γ²η, the damping at w that acts as η does at γw; with γ = ‖w‖, that at the unit vector.

    >>> effective_damping(0.01, scale=3.0)
    0.09
    """
    _check_damping(damping)
    _check_scale(scale)
    return damping * scale**2


def curvature_shares(eigenvalues: Tensor, *, damping: float, scale: float = 1.0) -> Tensor:
    """λ_i/(λ_i + γ²η): how much of Newton's step is left along each eigenvector, between 0 and 1.

    Where it is near 1 the curvature sets the step, where it is near 0 the damping does. The sum is the number of
    directions in which the method is of second order.

    Args:
        eigenvalues: λ_i of G at w; for K-FAC `torch.outer(s, a)`, the products of the factors' eigenvalues.
        damping: η.
        scale: γ.

    >>> curvature_shares(torch.tensor([9.0, 1.0]), damping=1.0)
    tensor([0.9000, 0.5000])
    >>> curvature_shares(torch.tensor([9.0, 1.0]), damping=1.0, scale=3.0)
    tensor([0.5000, 0.1000])
    """
    at = effective_damping(damping, scale=scale)
    if (eigenvalues < 0).any():
        raise DynamicsError(
            f"The smallest eigenvalue is {eigenvalues.min().item():.3g}; curvature must not be negative."
        )
    return torch.where(eigenvalues > 0, eigenvalues / (eigenvalues + at), torch.zeros_like(eigenvalues))


def balance_scale(eigenvalue: float, *, damping: float) -> float:
    """γ = √(λ/η), by which the weights have to grow for the damping to weigh as much as an eigenvalue λ of G at w.

    >>> balance_scale(4.0, damping=0.01)
    20.0
    """
    _check_damping(damping)
    if damping == 0:
        raise DynamicsError("The norm does not matter because the damping is 0: undamped steps do not depend on it.")
    if not 0 <= real(eigenvalue) < inf:
        raise DynamicsError(f"eigenvalue is {eigenvalue!r}; accepted are finite numbers from 0.")
    return sqrt(eigenvalue / damping)


def first_order_rate(lr: float, *, damping: float, norm: float) -> float:
    """α/(η‖w‖²): the effective learning rate of gradient descent that damped steps end up as when weights are large.

    >>> first_order_rate(0.1, damping=0.5, norm=2.0)
    0.05
    """
    for name, value in (("lr", lr), ("norm", norm)):
        if not 0 <= real(value) < inf:
            raise DynamicsError(f"{name} is {value!r}; accepted are finite numbers from 0.")
    at = effective_damping(damping, scale=norm)
    if at == 0:
        raise DynamicsError("First-order behaviour does not apply because the damping is 0.")
    return lr / at


def first_order_cosine(G: Tensor, gradient: Tensor, *, damping: float, scale: float = 1.0) -> float:
    """The cosine between the damped step at γw and the gradient there: 1 where the method is gradient descent.

    >>> G, g = torch.diag(torch.tensor([100.0, 1.0])), torch.tensor([1.0, 1.0])
    >>> [round(first_order_cosine(G, g, damping=1.0, scale=scale), 3) for scale in (0.1, 1.0, 10.0, 100.0)]
    [0.714, 0.721, 0.95, 1.0]
    """
    step = damped_step(*rescaled(G, gradient, scale=scale), damping=damping)
    return float(torch.nn.functional.cosine_similarity(step, gradient, dim=0))


def _check_damping(damping: float) -> None:
    if not 0 <= real(damping) < inf:
        raise DynamicsError(f"damping is {damping!r}; accepted are finite numbers from 0.")


def _check_scale(scale: float) -> None:
    if not 0 < real(scale) < inf:
        raise DynamicsError(f"scale is {scale!r}; accepted are finite numbers above 0.")
