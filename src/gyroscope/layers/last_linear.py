"""The last linear layer of a model: finding it, and refusing to guess."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from gyroscope.errors import LayerError
from gyroscope.layers.class_names import ancestry, is_conv1d, is_norm
from gyroscope.layers.ending import Ending, ending, matrices
from gyroscope.layers.layer import Layer, layers

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
    chosen = None if layer is None else _named(model, found, layer)
    seen = None if sample is None else ending(model, found, sample)
    if chosen is None:
        chosen = _last_registered(model, found) if seen is None else _last_used(model, found, seen)
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


def _named(model: nn.Module, found: Sequence[Layer], name: str) -> Layer:
    for layer in found:
        if name in (layer.name, owner(layer)):
            return layer
    weights = dict(model.named_parameters(remove_duplicate=False))
    names = (name, f"{name}.weight") if isinstance(name, str) else ()
    for weight in (weights[one] for one in names if one in weights):
        if any(layer.parameter is weight for layer in found):
            raise LayerError(_shared(model, weight))
    raise LayerError(f"there is no layer called {name!r}; linear layers are: {', '.join(_linear(found)) or 'none'}.")


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_conv1d(module)


def _linear(found: Sequence[Layer]) -> list[str]:
    return [layer.name for layer in found if layer.kind == "linear" and _is_linear(layer.module)]


def _names(model: nn.Module, weight: nn.Parameter) -> list[str]:
    return [name for name, one in model.named_parameters(remove_duplicate=False) if one is weight]


def _shared(model: nn.Module, weight: nn.Parameter) -> str:
    *others, name = map(repr, _names(model, weight))
    return f"{name} is shared with {', '.join(others)}: it is not used at the end alone."


def _last_registered(model: nn.Module, found: Sequence[Layer]) -> Layer:
    # Nothing is embedded at the end: embeddings registered there are used before.
    ends = [layer for layer in found if layer.kind != "embedding"][-1:]
    # A tied weight is the layer of the first of its modules.
    for module in reversed([*model.modules()]):
        if ends and module is ends[0].module:
            break
        own = module._parameters.get("weight") if _is_linear(module) else None
        tied = [one.parameter for one in found if one.parameter is own]
        if tied:
            raise LayerError(_shared(model, tied[0]))
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
    if _is_linear(last):
        _refuse_doubt(model, found, ends[0])
    return ends[0]


def _refuse_doubt(model: nn.Module, found: Sequence[Layer], last: Layer) -> None:
    """Where what is registered does not fit together, the layer registered last need not be the last."""
    what_to_do = "Give a `sample`, whose way through the network tells, or the name: layer=..."
    out = _outputs(last)
    # The parameters of a module are registered before those of its children, whatever is used first.
    holders = {id(module) for module in around(model, last)[:-1]}
    held = {layer.name: layer.parameter for layer in found if layer.kind == "other" and id(layer.module) in holders}
    for name, matrix in {**matrices(model, found), **held}.items():
        if matrix.dim() == 2 and out in matrix.shape and min(matrix.shape) > 1 and "parametrizations." not in name:
            shape = " × ".join(map(str, matrix.shape))
            raise LayerError(f"{name!r}, {shape}, may multiply what {last.name!r} gives. {what_to_do}")
    # What lies in a Sequential follows each other; that which its first layer follows is the question.
    path = around(model, last)
    while len(path) > 1 and isinstance(path[-2], nn.Sequential):
        path.pop()
    within = {id(module) for module in path[-1].modules()}
    first = next(position for position, layer in enumerate(found) if id(layer.module) in within)
    if first == 0 or not (_is_linear(found[first].module) and _is_linear(found[first - 1].module)):
        return
    entry, before = found[first], found[first - 1]
    common = [one for one, other in zip(path, around(model, before), strict=False) if one is other][-1]
    if not isinstance(common, nn.Sequential) and _outputs(before) != features(entry):
        raise LayerError(
            f"{last.name!r} is registered last, but {before.name!r} before it gives {_outputs(before)} numbers, and "
            f"{entry.name!r} takes {features(entry)}: they may be heads side by side. {what_to_do}"
        )


def _outputs(layer: Layer) -> int:
    return layer.parameter.shape[1 if is_conv1d(layer.module) else 0]


def _last_used(model: nn.Module, found: Sequence[Layer], seen: Ending) -> Layer:
    ends = [found[position] for position in seen.last]
    if len(ends) > 1:
        names = ", ".join(repr(layer.name) for layer in ends)
        raise LayerError(f"the outputs come from {len(ends)} layers side by side: {names}. Name the one: layer=...")
    if ends and ends[0].kind == "embedding" and len(_names(model, ends[0].parameter)) > 1:
        raise LayerError(_shared(model, ends[0].parameter))
    _require_linear(found, ends, "that the outputs come from", "give the name")
    if seen.after[0]:
        raise LayerError(
            f"the model does not end with a linear layer: between {ends[0].name!r} and the outputs lies "
            f"{seen.after[0]}. If that is the one, name it: layer={ends[0].name!r}."
        )
    return ends[0]


def _require_linear(found: Sequence[Layer], ends: Sequence[Layer], how: str, what_to_do: str) -> None:
    if ends and ends[0].kind == "linear":
        return
    linear = _linear(found)
    if not linear:
        kinds = ", ".join(sorted({layer.kind for layer in found}))
        raise LayerError(f"the model has no linear layer; its {len(found)} layers are of these kinds: {kinds}.")
    what = f"the layer {how}, {ends[0].name!r}, is of kind {ends[0].kind!r}" if ends else "none could be followed"
    raise LayerError(
        f"the model does not seem to end with a linear layer: {what}. If it does, {what_to_do}: layer={linear[-1]!r}."
    )


def _refuse_unfit(model: nn.Module, layer: Layer) -> None:
    module, weight = layer.module, layer.parameter
    if layer.kind != "linear" or not _is_linear(module):
        what = f"the weight of a {type(module).__name__}" + f", of kind {layer.kind!r}" * (layer.kind != "linear")
        raise LayerError(f"{layer.name!r} is {what}; linear layers are: {', '.join(_linear(layers(model))) or 'none'}.")
    if weight.is_meta:
        raise LayerError(f"{layer.name!r} is on the meta device: give the model its memory and its weights first.")
    if not weight.is_floating_point():
        raise LayerError(f"{layer.name!r} holds {weight.dtype}; a normalization is of real floating-point numbers.")
    modules = [name for name, one in model.named_modules(remove_duplicate=False) if one is module]
    if len(modules) > 1:
        names = ", ".join(map(repr, modules))
        raise LayerError(f"{layer.name!r} is shared, under the names {names}: it is not used at the end alone.")
    if len(_names(model, weight)) > 1:
        raise LayerError(_shared(model, weight))


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
