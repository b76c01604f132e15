"""The last linear layer of a model: finding it, and refusing to guess."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from gyroscope.class_names import ancestry, is_conv1d, is_norm
from gyroscope.ending import Ending, ending
from gyroscope.errors import LayerError
from gyroscope.layer import Layer, layers

_PASSES_ON = (nn.Identity, nn.Flatten, nn.Unflatten, nn.modules.dropout._DropoutNd)


def last_linear(model: nn.Module, sample: object = None, *, layer: str | None = None) -> Layer:
    """Return the linear layer that `model` ends with, if its module alone is called once for it, on raw activations.

    Args:
        model: the model.
        sample: an input for a forward pass that tells how the model ends; else the order of registration does.
        layer: the name of the layer to take, if it fits.

    >>> last_linear(nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))).name
    '2.weight'
    >>> last_linear(nn.Sequential(nn.Linear(3, 2), nn.Conv1d(2, 1, 1)))
    Traceback (most recent call last):
    gyroscope.errors.LayerError: the model does not seem to end with a linear layer: the layer registered last,
    '1.weight', is of kind 'conv'. If it does, give a `sample`, or the name: layer='0.weight'.
    """
    found = layers(model)
    if any("DTensor" in ancestry(one.parameter) for one in found):
        raise LayerError("the model is sharded and would not shard what comes later: shard it afterwards.")
    chosen = None if layer is None else _named(found, layer)
    seen = None if sample is None else ending(model, found, sample)
    if chosen is None:
        chosen = _last_registered(model, found) if seen is None else _last_used(found, seen)
    _refuse_unfit(model, chosen)
    if seen is None:
        _refuse_registered_norm(model, chosen)
    else:
        _refuse_seen(chosen, seen)
    return chosen


def owner(layer: Layer) -> str:
    """Return the name of the module that a layer belongs to.

    >>> owner(layers(nn.Sequential(nn.Linear(3, 2)))[0]), owner(layers(nn.Linear(3, 2))[0])
    ('0', '')
    """
    return layer.name.rpartition(".")[0]


def features(layer: Layer) -> int:
    """Return the number of inputs of a linear layer.

    >>> features(layers(nn.Linear(3, 2))[0])
    3
    """
    return layer.parameter.shape[0 if is_conv1d(layer.module) else 1]


def around(model: nn.Module, layer: Layer) -> list[nn.Module]:
    """Return the modules that a layer's module lies in, from the outermost; its own comes last.

    >>> net = nn.Sequential(nn.Sequential(nn.Linear(3, 2)))
    >>> [type(module).__name__ for module in around(net, layers(net)[0])]
    ['Sequential', 'Sequential', 'Linear']
    """
    path = next(name for name, module in model.named_modules() if module is layer.module).split(".")
    return [model, *(model.get_submodule(".".join(path[: i + 1])) for i in range(len(path)) if path != [""])]


def _named(found: Sequence[Layer], name: str) -> Layer:
    for layer in found:
        if name in (layer.name, owner(layer)):
            return layer
    raise LayerError(f"there is no layer called {name!r}; linear layers are: {', '.join(_linear(found)) or 'none'}.")


def _linear(found: Sequence[Layer]) -> list[str]:
    return [layer.name for layer in found if layer.kind == "linear"]


def _last_registered(model: nn.Module, found: Sequence[Layer]) -> Layer:
    # Nothing is embedded at the end: embeddings registered there are used before.
    ends = [layer for layer in found if layer.kind != "embedding"][-1:]
    _require_linear(found, ends, "registered last", "give a `sample`, or the name")
    last, *holders = reversed(around(model, ends[0]))
    if holders and isinstance(holders[0], nn.ModuleList | nn.ModuleDict):
        width = features(ends[0])
        heads = [one for one in holders[0].children() if isinstance(one, nn.Linear) and one.in_features == width]
        if last in heads[1:]:
            raise LayerError(
                f"{ends[0].name!r} is one of {len(heads)} linear layers of {width} inputs in a "
                f"{type(holders[0]).__name__}: they may follow each other or be several heads. Give a `sample`, whose "
                "way through the network tells, or the name: layer=..."
            )
    return ends[0]


def _last_used(found: Sequence[Layer], seen: Ending) -> Layer:
    ends = [found[position] for position in seen.last]
    if len(ends) > 1:
        names = ", ".join(repr(layer.name) for layer in ends)
        raise LayerError(f"the outputs come from {len(ends)} layers side by side: {names}. Name the one: layer=...")
    _require_linear(found, ends, "that the outputs come from", "give the name")
    if seen.after[0]:
        raise LayerError(
            f"the model does not end with a linear layer: between {ends[0].name!r} and the outputs lies "
            f"{seen.after[0]}. If that is the one, name it: layer={ends[0].name!r}."
        )
    return ends[0]


def _require_linear(found: Sequence[Layer], ends: Sequence[Layer], how: str, what_to_do: str) -> None:
    linear = _linear(found)
    if not linear:
        kinds = ", ".join(sorted({layer.kind for layer in found}))
        raise LayerError(f"the model has no linear layer; its {len(found)} layers are of these kinds: {kinds}.")
    if not ends or ends[0].kind != "linear":
        what = f"the layer {how}, {ends[0].name!r}, is of kind {ends[0].kind!r}" if ends else "none could be followed"
        raise LayerError(
            f"the model does not seem to end with a linear layer: {what}. If it does, {what_to_do}: "
            f"layer={linear[-1]!r}."
        )


def _refuse_unfit(model: nn.Module, layer: Layer) -> None:
    module, weight = layer.module, layer.parameter
    if layer.kind != "linear" or not (isinstance(module, nn.Linear) or is_conv1d(module)):
        what = f"the weight of a {type(module).__name__}, of kind {layer.kind!r}"
        raise LayerError(f"{layer.name!r} is {what}; linear layers are: {', '.join(_linear(layers(model))) or 'none'}.")
    if weight.is_meta:
        raise LayerError(f"{layer.name!r} is on the meta device: give the model its memory and its weights first.")
    if not weight.is_floating_point():
        raise LayerError(f"{layer.name!r} holds {weight.dtype}; a normalization is of real floating-point numbers.")
    modules = [name for name, one in model.named_modules(remove_duplicate=False) if one is module]
    weights = [name for name, one in model.named_parameters(remove_duplicate=False) if one is weight]
    if len(modules) > 1 or len(weights) > 1:
        names = ", ".join(map(repr, modules if len(modules) > 1 else weights))
        raise LayerError(f"{layer.name!r} is shared, under the names {names}: it is not used at the end alone.")


def _refuse_seen(layer: Layer, seen: Ending) -> None:
    calls, norm = seen.calls[layer.index], seen.normalized[layer.index]
    if calls != 1:
        how = "never called (a function may use its weight)" if calls == 0 else f"called {calls} times"
        raise LayerError(f"the module of {layer.name!r} is {how} on `sample`; it is to be called once.")
    if norm is not None:
        raise LayerError(f"the input of {layer.name!r} is normalized already, by {norm}.")


def _refuse_registered_norm(model: nn.Module, layer: Layer) -> None:
    """Where no pass was made: look at the module registered just before, past those that change no number."""
    before: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        if module is layer.module:
            break
        if not module._modules and not isinstance(module, _PASSES_ON):
            before.append((name, module))
    name, norm = before[-1] if before else ("", layer.module)
    its_class: Any = type(norm)
    # What normalizes channels of images is followed by a pooling, which need not be a module.
    if (
        is_norm(its_class)
        and not re.search("2d|3d|Group", its_class.__name__)
        and _width(norm) in (None, features(layer))
    ):
        raise LayerError(
            f"{name!r}, registered just before {layer.name!r}, may normalize its input already, and then there is "
            "nothing to do. Give a `sample`, whose way through the network tells."
        )


def _width(norm: nn.Module) -> int | None:
    """How many features a normalization is for, if it says so."""
    shape = getattr(norm, "normalized_shape", None)
    width = shape[-1] if shape else getattr(norm, "num_features", None)
    return width if isinstance(width, int) else None
