"""Weights brought back to one norm after every step, so that explicit and effective learning rates agree (section 4.3).

For a scale-invariant J, the direction ŵ = w/‖w‖ of a free run of SGD,

    w_{k+1} = w_k − α ∇J(w_k),

and a run u that is brought back to a sphere of radius r after every step,

    u_{k+1} = r (u_k − α_k ∇J(u_k)) / ‖u_k − α_k ∇J(u_k)‖,

are the same run, u_k = r ŵ_k, where α_k/r² is the effective learning rate α/‖w_k‖² of the free one. That is exact, at
any step size: what a step does to a direction depends on α/‖w‖² alone. With r = 1 and a constant α_k, explicit and
effective rate are one number, and nothing decays by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, isfinite
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gyroscope.base.accepted import real
from gyroscope.errors import DynamicsError
from gyroscope.layers.layer import Layer, split
from gyroscope.layers.layer import layers as find_layers
from gyroscope.vectors.eager import power_of_two

By = Literal["unit", "tensor"]


def sphere_step(weight: Tensor, gradient: Tensor, lr: float, *, radius: float = 1.0) -> Tensor:
    """One step of SGD on a sphere: r (w − α∇)/‖w − α∇‖.

    >>> sphere_step(torch.tensor([1.0, 0.0]), torch.tensor([0.0, -0.75]), 1.0).tolist()
    [0.800000011920929, 0.6000000238418579]
    """
    if not (isfinite(real(lr)) and 0 < real(radius) < inf):
        raise DynamicsError(f"lr is {lr!r} and radius {radius!r}; accepted are finite numbers, and a radius above 0.")
    stepped = weight - lr * gradient
    norm: Tensor = torch.linalg.vector_norm(stepped)
    if not bool(norm > 0):
        raise DynamicsError("The step ends at zero, which has no direction.")
    return stepped * (radius / norm)


@torch.no_grad()
def renormalize_(layers: Iterable[Layer] | nn.Module, *, radius: float = 1.0, by: By = "unit") -> None:
    """Give every layer, or every unit of it, the norm `radius`, in place; the network computes what it did.

        w_j ← r w_j/‖w_j‖

    It is the same network only where layers are scale-invariant in that way: ask `gyroscope.theory.invariance`, and
    give the layers it finds. Weights that are zero stay so.

    Args:
        layers: from `gyroscope.layers`, or a model, for all of its layers.
        radius: r.
        by: "unit" for the weights into each unit (batch, weight and instance normalization), "tensor" for all
            weights of a layer together (layer normalization too).

    >>> from gyroscope.layers.layer import layers
    >>> net = nn.Linear(4, 3)
    >>> renormalize_(layers(net), radius=2.0)
    >>> [round(norm, 5) for norm in net.weight.detach().norm(dim=1).tolist()]
    [2.0, 2.0, 2.0]
    """
    for layer in _checked(layers, radius, by):
        weight = layer.view(layer.parameter.detach())
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32)).reshape(layer.segments, -1)
        # Brought near 1 first: squares may be zero, or beyond the type, where no weight is. A power of two rounds
        # nothing, and leaves ordinary weights as they would be without.
        most = wide.abs().amax(1, keepdim=True)
        near = wide / torch.where(most.isfinite(), power_of_two(most), 1.0)
        norms = torch.linalg.vector_norm(near, dim=1, keepdim=True)
        weight.copy_((near * torch.where(norms > 0, radius / norms, 1.0)).view(weight.shape))


def keep_norms(
    optimizer: Optimizer, layers: Iterable[Layer] | nn.Module, *, radius: float = 1.0, by: By = "unit"
) -> RemovableHandle:
    """Renormalize now and after every step of an optimizer.

    With plain SGD the effective learning rate is then lr/r², step by step, and weight decay does nothing but scale
    steps by 1/(1 − ηλ). Momentum is not turned with the weights: with it, the equality with a free run is lost.

    Args:
        optimizer: any.
        layers, radius, by: as of `renormalize_`.

    Returns:
        A handle: its `remove()` ends it.

    >>> from gyroscope.layers.layer import layers
    >>> net = nn.Linear(4, 3)
    >>> sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    >>> handle = keep_norms(sgd, layers(net), by="tensor")
    >>> net(torch.ones(2, 4)).square().sum().backward(); sgd.step()
    >>> round(float(net.weight.detach().norm()), 5)
    1.0
    """
    chosen = _checked(layers, radius, by)
    if not isinstance(optimizer, Optimizer):
        raise DynamicsError(f"The optimizer is a {type(optimizer).__name__}; accepted is a torch.optim.Optimizer.")
    renormalize_(chosen, radius=radius, by=by)

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        renormalize_(chosen, radius=radius, by=by)

    return optimizer.register_step_post_hook(after)


def _checked(given: Iterable[Layer] | nn.Module, radius: float, by: By) -> list[Layer]:
    if by not in get_args(By):
        raise DynamicsError(f"by is {by!r}; accepted are {', '.join(map(repr, get_args(By)))}.")
    if not 0 < real(radius) < inf:
        raise DynamicsError(f"radius is {radius!r}; accepted are finite numbers above 0.")
    found: list[Any] = []
    if isinstance(given, nn.Module):
        found += find_layers(given)
    elif isinstance(given, Iterable):
        found += given
    if not found or not all(isinstance(layer, Layer) for layer in found):
        raise DynamicsError("layers is no list from gyroscope.layers(model), and no model; give one of them.")
    return [split(layer, "row" if by == "unit" else "tensor") for layer in found]
