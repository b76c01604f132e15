"""Weights rescaled to one norm after every step, so that explicit and effective learning rates agree (section 4.3).

For a scale-invariant J, the direction ŵ = w/‖w‖ of a free run of SGD,

    w_{k+1} = w_k − η ∇J(w_k),

and a run u that is rescaled to a sphere of radius r after every step,

    u_{k+1} = r (u_k − η_k ∇J(u_k)) / ‖u_k − η_k ∇J(u_k)‖,

are the same run, u_k = r ŵ_k, where η_k/r² is the effective learning rate η/‖w_k‖² of the free run. This is exact at
any step size: what a step does to a direction depends on η/‖w‖² only. With r = 1 and a constant η_k, the explicit and
the effective learning rate are one number, and there is no implicit decay. (The chapter writes α for η.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gyroscope.base.accepted import choice
from gyroscope.control.torch_contract import controller_of
from gyroscope.errors import DynamicsError
from gyroscope.layers.layer import Layer, split
from gyroscope.layers.layer import layers as find_layers
from gyroscope.theory.domains import positive
from gyroscope.vectors.eager import power_of_two

By = Literal["unit", "tensor"]


@torch.no_grad()
def renormalize_(layers: Iterable[Layer] | nn.Module, *, radius: float = 1.0, by: By = "unit") -> None:
    """Rescale every layer, or every unit of it, to the norm `radius`, in place.

        w_j ← r w_j/‖w_j‖

    The network computes the same function only if the layers are scale-invariant in that way: use
    `gyroscope.theory.invariance`, and give the layers that it finds. Weights that are zero stay zero.

    Args:
        layers: a list from `gyroscope.layers`, or a model for all of its layers.
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
        # Scaled to about 1 first, because squares may underflow or overflow where weights do not. A power of two rounds
        # nothing, so that the result for ordinary weights is the same.
        most = wide.abs().amax(1, keepdim=True)
        near = wide / torch.where(most.isfinite(), power_of_two(most), 1.0)
        norms = torch.linalg.vector_norm(near, dim=1, keepdim=True)
        weight.copy_((near * torch.where(norms > 0, radius / norms, 1.0)).view(weight.shape))


def keep_norms(
    optimizer: Optimizer, layers: Iterable[Layer] | nn.Module, *, radius: float = 1.0, by: By = "unit"
) -> RemovableHandle:
    """Renormalize now and after every step of an optimizer.

    With plain SGD the effective learning rate is then lr/r² at every step, and weight decay only scales steps by
    1/(1 − ηλ). Momentum is not turned with the weights, so that with momentum the run is not equal to a free one.

    Args:
        optimizer: any torch optimizer.
        layers, radius, by: as in `renormalize_`.

    Returns:
        A handle, whose `remove()` stops it.

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
        raise DynamicsError(f"`optimizer` must be a torch.optim.Optimizer, got a {type(optimizer).__name__}.")
    if (outer := controller_of(optimizer)) is not None:
        name = type(outer).__name__
        raise DynamicsError(
            f"`optimizer` must be the one that you step, got a {type(optimizer).__name__} inside a {name}, which "
            f"changes its steps. Pass the {name}."
        )
    renormalize_(chosen, radius=radius, by=by)

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        renormalize_(chosen, radius=radius, by=by)

    return optimizer.register_step_post_hook(after)


def _checked(given: Iterable[Layer] | nn.Module, radius: float, by: By) -> list[Layer]:
    choice(by, "by", get_args(By), DynamicsError)
    positive("radius", radius)
    found: list[Any] = []
    if isinstance(given, nn.Module):
        found += find_layers(given)
    elif isinstance(given, Iterable):
        found += given
    if not found or not all(isinstance(layer, Layer) for layer in found):
        raise DynamicsError("`layers` must be a model or a list of layers. Try gyroscope.layers(model).")
    return [split(layer, "row" if by == "unit" else "tensor") for layer in found]
