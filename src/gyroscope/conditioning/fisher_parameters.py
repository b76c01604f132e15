"""Which parameters θ a curvature matrix is over."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import is_lazy

from gyroscope.errors import ConditioningError, LayerError
from gyroscope.layers.class_names import ancestry, wrapped_in
from gyroscope.layers.layer import layers


@dataclass(frozen=True)
class Parameters:
    """The parameters of a matrix, in order.

    Attributes:
        model: the module they are in, without wrappers that would communicate or compile.
        names: by the name `named_parameters` has for each, the name to show: the layer's where it is one.
        sizes: how many elements each has.
        weights: the names to show of those that are the weight of a layer.
    """

    model: nn.Module
    names: dict[str, str]
    sizes: tuple[int, ...]
    weights: tuple[str, ...]


def parameters(model: nn.Module, *, only: str | Iterable[str] | None = None, weights: bool = False) -> Parameters:
    """The weights and biases of `model` that require gradients, a shared one once.

    Args:
        model: any module.
        only: glob pattern or patterns: the weights of the layers they match, instead of all parameters.
        weights: the weights of all layers, instead of all parameters.

    >>> net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False))
    >>> parameters(net).names, parameters(net).weights
    ({'0.weight': '0.weight', '0.bias': '0.bias', '1.weight': '1.weight'}, ('0.weight', '1.weight'))
    """
    if not isinstance(model, nn.Module):
        raise ConditioningError(f"the model is a {type(model).__name__}; accepted is a torch.nn.Module.")
    while wrapped := wrapped_in(model):
        model = getattr(model, wrapped)
    named = dict(model.named_parameters())
    for name, parameter in named.items():
        if is_lazy(parameter) or parameter.is_meta or "DTensor" in ancestry(parameter) or parameter.is_complex():
            raise ConditioningError(
                f"{name!r} is lazy, on the meta device, sharded or complex; give a model whose parameters are whole, "
                "real tensors with values."
            )
    try:
        shown = {id(layer.parameter): layer.name for layer in layers(model, include=only)}
    except LayerError:
        # A network without layers still has a matrix over all of its parameters.
        if only is not None or weights:
            raise
        shown = {}
    trained = {name: p for name, p in named.items() if p.requires_grad and p.numel()}
    if only is not None or weights:
        trained = {name: p for name, p in trained.items() if id(p) in shown}
    if not trained:
        which = "no parameter" if only is None else f"no weight of the layers {only!r}"
        raise ConditioningError(f"{which} requires gradients; the matrices are over those that do.")
    names = {name: shown.get(id(p), name) for name, p in trained.items()}
    of_layers = tuple(names[name] for name, p in trained.items() if id(p) in shown)
    return Parameters(model, names, tuple(p.numel() for p in trained.values()), of_layers)
