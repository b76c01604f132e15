"""Curvature matrices as their definitions read: one sample, one label and one gradient at a time, in float64."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

Loss = Callable[[Tensor, Tensor], Tensor]


def double(model: nn.Module) -> nn.Module:
    """A copy in float64, in the same mode."""
    return copy.deepcopy(model).double()


def gradient(value: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """The gradient of one number, flattened over all parameters."""
    found = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
    pieces = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
    return torch.cat([piece.flatten() for piece in pieces])


def trained(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


def second_moment(model: nn.Module, loss: Loss, x: Tensor, y: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """M = (1/N) Σ_i ∇ℓ_i ∇ℓ_iᵀ, ℓ_i the loss of sample i alone; all samples are in the forward pass."""
    output = model(x)
    size = sum(p.numel() for p in parameters)
    total = torch.zeros(size, size, dtype=torch.float64)
    for i in range(len(x)):
        g = gradient(loss(output[i : i + 1], y[i : i + 1]), parameters)
        total += torch.outer(g, g)
    return total / len(x)


def classes(output: Tensor, *, log: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
    """Each way to label the positions of one sample's output [1, classes, ...], with its probability."""
    q = output.detach().exp() if log else output.detach().softmax(1)
    q = q.reshape(q.shape[1], -1)
    for labels in itertools.product(range(q.shape[0]), repeat=q.shape[1]):
        chance = torch.ones((), dtype=q.dtype)
        for place, label in enumerate(labels):
            chance = chance * q[label, place]
        yield torch.tensor(labels).reshape(output[:, 0].shape), chance


def coins(output: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each way to label the elements of one sample's output with 0 and 1, with its probability."""
    p = output.detach().sigmoid().flatten()
    for labels in itertools.product((0.0, 1.0), repeat=len(p)):
        y = torch.tensor(labels, dtype=p.dtype)
        yield y.reshape(output.shape), torch.where(y > 0, p, 1 - p).prod()


def normals(variance: float) -> Callable[[Tensor], Iterator[tuple[Tensor, Tensor]]]:
    """Targets on both sides of the output, one standard deviation times √D away in each direction.

    Scores of a Gaussian are linear in y − f, so any points with mean 0 and covariance σ²I give their second moments.
    """

    def points(output: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        d = output.numel()
        for k in range(d):
            for sign in (-1.0, 1.0):
                away = torch.zeros(d, dtype=output.dtype)
                away[k] = sign * (variance * d) ** 0.5
                yield output.detach() + away.reshape(output.shape), torch.tensor(1 / (2 * d), dtype=output.dtype)

    return points


def fisher(
    model: nn.Module,
    loss: Loss,
    x: Tensor,
    parameters: Sequence[Tensor],
    labels: Callable[[Tensor], Iterator[tuple[Tensor, Tensor]]],
) -> Tensor:
    """F = (1/N) Σ_i Σ_y q(y|x_i) ∇ℓ_i ∇ℓ_iᵀ."""
    output = model(x)
    size = sum(p.numel() for p in parameters)
    total = torch.zeros(size, size, dtype=torch.float64)
    for i in range(len(x)):
        for y, chance in labels(output[i : i + 1]):
            g = gradient(loss(output[i : i + 1], y), parameters)
            total += chance * torch.outer(g, g)
    return total / len(x)


def hessian(value: Callable[[], Tensor], parameters: Sequence[Tensor]) -> Tensor:
    """Second derivatives of a number, one row after another."""
    with sdpa_kernel(SDPBackend.MATH):  # the attention that has second derivatives
        first = torch.autograd.grad(value(), parameters, create_graph=True, allow_unused=True)
    flat = torch.cat([(p * 0 if g is None else g).flatten() for p, g in zip(parameters, first, strict=True)])
    return torch.stack([gradient(entry, parameters) for entry in flat])


def jacobian(output: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """∂f/∂θ, [elements of the output, P]."""
    return torch.stack([gradient(element, parameters) for element in output.flatten()])


def gauss_newton(model: nn.Module, loss: Loss, x: Tensor, y: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Jᵀ H J with H the Hessian of the loss of the whole batch with respect to its output."""
    output = model(x)
    f = output.detach().requires_grad_()
    h = hessian(lambda: loss(f, y), [f])
    j = jacobian(output, parameters)
    return j.T @ h @ j
