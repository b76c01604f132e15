"""Products of curvature matrices with vectors, never the matrices: a few passes through the network each.

With f the outputs of the whole batch and J = ∂f/∂θ, all but the Hessian are Jᵀ A J with a small matrix A a sample:

    Gauss-Newton            A = ∂²L/∂f²
    Fisher, second moment   A = E(s sᵀ)/N, s = ∂ℓ/∂f

Jᵀw is a backward pass. It is linear in w, and its derivative along v at any w is Jv: backward through backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gyroscope.conditioning.fisher_scores import Scores, mean_of
from gyroscope.errors import ConditioningError
from gyroscope.passes.labels import Loss
from gyroscope.passes.network import Network

Product = Callable[[Tensor], Tensor]


def hessian_product(f: Network, loss: Loss) -> Product:
    """v ↦ (∂²L/∂θ²) v for the mean loss L, over the parameters of `f` laid end to end."""
    theta = _leaves(f)
    value = mean_of(loss, f(dict(zip(f.theta, theta, strict=True))), f.batch.target)
    first = _derivatives([value], theta, None, twice=True)

    def times(v: Tensor) -> Tensor:
        return _flat(_derivatives(first, theta, _split(v, theta)))

    return times


def fisher_product(f: Network, scores: Scores) -> Product:
    """v ↦ (1/N) Σ_i J_iᵀ E(s sᵀ) J_i v."""
    return _sandwich(f, lambda output: lambda t: scores.times(t) / scores.samples)


def gauss_newton_product(f: Network, loss: Loss) -> Product:
    """v ↦ Jᵀ (∂²L/∂f²) J v."""

    def middle(output: Tensor) -> Product:
        leaf = output.detach().requires_grad_()
        first = _derivatives([mean_of(loss, leaf, f.batch.target)], [leaf], None, twice=True)
        return lambda t: _derivatives(first, [leaf], [t])[0]

    return _sandwich(f, middle)


def _sandwich(f: Network, middle: Callable[[Tensor], Product]) -> Product:
    theta = _leaves(f)
    output = f(dict(zip(f.theta, theta, strict=True)))
    w = torch.zeros_like(output, requires_grad=True)
    pulled = _derivatives([output], theta, [w], twice=True)
    inner = middle(output)

    def times(v: Tensor) -> Tensor:
        pushed = _derivatives(pulled, [w], _split(v, theta))[0]
        return _flat(_derivatives([output], theta, [inner(pushed)]))

    return times


def _leaves(f: Network) -> list[Tensor]:
    return [p.detach().requires_grad_() for p in f.theta.values()]


def _derivatives(
    of: Sequence[Tensor], by: Sequence[Tensor], along: Sequence[Tensor] | None, *, twice: bool = False
) -> list[Tensor]:
    """Backward along some vectors; zero where nothing depends. With `twice`, the result can be differentiated again."""
    kept = [i for i, one in enumerate(of) if one.requires_grad]
    if not kept:
        return [torch.zeros_like(one) for one in by]
    outward = None if along is None else [along[i] for i in kept]
    try:
        found = torch.autograd.grad(
            [of[i] for i in kept], by, outward, retain_graph=True, create_graph=twice, allow_unused=True
        )
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ConditioningError(
            f"the network or the loss cannot be differentiated twice, which products with its curvature need: {error}"
        ) from error
    return [torch.zeros_like(one) if g is None else g for one, g in zip(by, found, strict=True)]


def _split(v: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    pieces = torch.split(v, [p.numel() for p in like])
    return [piece.reshape(p.shape).to(p.dtype).to(p.device) for piece, p in zip(pieces, like, strict=True)]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach().reshape(-1).to(tensors[0].device) for t in tensors])
