"""The output layer of a model: how the model ends, and its last linear layer, found without guessing.

One forward pass (`ending`) shows the end of a model: the layers whose outputs reach the model's own through no other
layer. The pass runs under a torch-function mode. Activations are the tensors computed from the sample, and each carries
the set of layers it comes from: a call that takes a layer's weight (or a tensor made of weights alone, such as a cast
or a parametrization of one) and an activation returns one that comes from that layer; any other call passes the sets
on. Residual branches join their sets, and the next layer replaces them. The pass also records matrices that are not
layers, and normalizations. Without a sample, `last_linear` uses the order of registration.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from gyroscope.errors import LayerError
from gyroscope.layers.class_names import ancestry, is_conv1d, is_norm, unwrapped
from gyroscope.layers.layer import Layer, layers
from gyroscope.layers.untouched import output_of, tensors

# Modules that change no number.
_CHANGES_NO_NUMBER = (nn.Identity, nn.Flatten, nn.Unflatten, nn.modules.dropout._DropoutNd)

_NORMALIZES = ("batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm", "normalize")

# Calls whose result is as normalized as their input: the same numbers, or each times a constant or plus one.
_PASSES_ON = re.compile(
    "add|bfloat16|chunk|clone|contiguous|cpu|cuda|detach|div|double|dropout|expand|flatten|float|gather|getitem|half|"
    "index_select|movedim|mul|narrow|neg|permute|reshape|rsub|select|split|squeeze|sub|swapaxes|t|to|transpose|"
    "true_divide|type|type_as|unbind|unflatten|unsqueeze|view|get"  # `__get__` is a property such as .T
)

# Calls whose output may have the shape of an activation that was multiplied by a square matrix.
_MULTIPLIES = re.compile(
    "addbmm|addmm|addmv|baddbmm|bilinear|bmm|cdist|conv.*|cosine_similarity|einsum|inner|linear|matmul|mm|mv|"
    "pairwise_distance|rmatmul|scaled_dot_product_attention|tensordot"
)

# Calls that use only the shape or the type of their second argument.
_RESEMBLES = ("expand_as", "reshape_as", "to", "type_as", "view_as")

_Mark = tuple[int, str, Callable[[], bool] | None]

_WHAT_TO_DO = "Pass a `sample` to find out, or the name: layer=..."


def last_linear(model: nn.Module, sample: object = None, *, layer: str | None = None) -> Layer:
    """Return the linear layer that `model` ends with; its module must be called once, on activations not normalized.

    Args:
        model: the model.
        sample: an input for a forward pass that shows how the model ends; without it, the order of registration counts.
        layer: the name of the layer to take, if it is suitable.

    >>> last_linear(nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))).name
    '2.weight'
    >>> last_linear(nn.Sequential(nn.Linear(3, 2), nn.Conv1d(2, 1, 1)))
    Traceback (most recent call last):
    gyroscope.errors.LayerError: The model does not seem to end with a linear layer: the layer registered last,
    '1.weight', is of kind 'conv'. If it does, pass a `sample` or the name: layer='0.weight'.
    """
    found = layers(model)
    if any("DTensor" in ancestry(one.parameter) for one in found):
        raise LayerError("The model is sharded, and parameters added later would not be. Shard it afterwards.")
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
    """Return the modules that contain a layer's module, outermost first; its own comes last.

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
    raise LayerError(
        f"`layer` must be the name of a layer, got {name!r}. Linear layers are: {', '.join(_linear(found)) or 'none'}."
    )


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_conv1d(module)


def _linear(found: Sequence[Layer]) -> list[str]:
    return [layer.name for layer in found if layer.kind == "linear" and _is_linear(layer.module)]


def _names(model: nn.Module, weight: nn.Parameter) -> list[str]:
    return [name for name, one in model.named_parameters(remove_duplicate=False) if one is weight]


def _shared(model: nn.Module, weight: nn.Parameter) -> str:
    *others, name = map(repr, _names(model, weight))
    return f"{name} is shared with {', '.join(others)}, so it is not used only at the end."


def _last_registered(model: nn.Module, found: Sequence[Layer]) -> Layer:
    # Embeddings are used at the beginning, even if they are registered last.
    ends = [layer for layer in found if layer.kind != "embedding"][-1:]
    # A tied weight is the layer of the first of its modules.
    for module in reversed([*model.modules()]):
        if ends and module is ends[0].module:
            break
        own = module._parameters.get("weight") if _is_linear(module) else None
        tied = [one.parameter for one in found if one.parameter is own]
        if tied:
            raise LayerError(_shared(model, tied[0]))
    _require_linear(found, ends, "registered last", "pass a `sample` or the name")
    last, *holders = reversed(around(model, ends[0]))
    if holders and isinstance(holders[0], nn.ModuleList | nn.ModuleDict):
        width = features(ends[0])
        heads = [one for one in holders[0].children() if isinstance(one, nn.Linear) and one.in_features == width]
        if last in heads[1:]:
            raise LayerError(
                f"{ends[0].name!r} is one of {len(heads)} linear layers of {width} inputs in a "
                f"{type(holders[0]).__name__}: they may follow each other or be several heads. {_WHAT_TO_DO}"
            )
    if _is_linear(last):
        _refuse_doubt(model, found, ends[0])
    return ends[0]


def _refuse_doubt(model: nn.Module, found: Sequence[Layer], last: Layer) -> None:
    """Reject a layer registered last if the registered layers do not fit together: it may not be the last one used."""
    out = _outputs(last)
    # The parameters of a module are registered before those of its children, whatever is used first.
    holders = {id(module) for module in around(model, last)[:-1]}
    held = {layer.name: layer.parameter for layer in found if layer.kind == "other" and id(layer.module) in holders}
    for name, matrix in {**matrices(model, found), **held}.items():
        if matrix.dim() == 2 and out in matrix.shape and min(matrix.shape) > 1 and "parametrizations." not in name:
            shape = " × ".join(map(str, matrix.shape))
            raise LayerError(f"{name!r}, {shape}, may multiply the output of {last.name!r}. {_WHAT_TO_DO}")
    # Layers of a Sequential follow each other; the question is which layer its first one follows.
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
            f"{last.name!r} is registered last, but {before.name!r} before it has {_outputs(before)} outputs and "
            f"{entry.name!r} has {features(entry)} inputs: they may be parallel heads. {_WHAT_TO_DO}"
        )


def _outputs(layer: Layer) -> int:
    return layer.parameter.shape[1 if is_conv1d(layer.module) else 0]


def _last_used(model: nn.Module, found: Sequence[Layer], seen: Ending) -> Layer:
    ends = [found[position] for position in seen.last]
    if len(ends) > 1:
        names = ", ".join(repr(layer.name) for layer in ends)
        raise LayerError(f"The outputs come from {len(ends)} parallel layers: {names}. Pass the name of one: layer=...")
    if ends and ends[0].kind == "embedding" and len(_names(model, ends[0].parameter)) > 1:
        raise LayerError(_shared(model, ends[0].parameter))
    _require_linear(found, ends, "that the outputs come from", "pass the name")
    if seen.after[0]:
        raise LayerError(
            f"The model does not end with a linear layer: between {ends[0].name!r} and the outputs is "
            f"{seen.after[0]}. If this layer is meant, pass its name: layer={ends[0].name!r}."
        )
    return ends[0]


def _require_linear(found: Sequence[Layer], ends: Sequence[Layer], how: str, what_to_do: str) -> None:
    if ends and ends[0].kind == "linear":
        return
    linear = _linear(found)
    if not linear:
        kinds = ", ".join(sorted({layer.kind for layer in found}))
        raise LayerError(f"The model has no linear layer. Its {len(found)} layers are of these kinds: {kinds}.")
    what = f"the layer {how}, {ends[0].name!r}, is of kind {ends[0].kind!r}" if ends else "no layer reaches the outputs"
    raise LayerError(
        f"The model does not seem to end with a linear layer: {what}. If it does, {what_to_do}: layer={linear[-1]!r}."
    )


def _refuse_unfit(model: nn.Module, layer: Layer) -> None:
    module, weight = layer.module, layer.parameter
    if layer.kind != "linear" or not _is_linear(module):
        what = f"the weight of a {type(module).__name__}" + f", of kind {layer.kind!r}" * (layer.kind != "linear")
        raise LayerError(f"{layer.name!r} is {what}. Linear layers are: {', '.join(_linear(layers(model))) or 'none'}.")
    if weight.is_meta:
        raise LayerError(
            f"{layer.name!r} is on the meta device. Move the model to a device and load its weights first."
        )
    if not weight.is_floating_point():
        raise LayerError(f"{layer.name!r} must hold real floating-point numbers to be normalized, got {weight.dtype}.")
    modules = [name for name, one in model.named_modules(remove_duplicate=False) if one is module]
    if len(modules) > 1:
        names = ", ".join(map(repr, modules))
        raise LayerError(f"{layer.name!r} is shared under the names {names}, so it is not used only at the end.")
    if len(_names(model, weight)) > 1:
        raise LayerError(_shared(model, weight))


def _refuse_seen(layer: Layer, seen: Ending) -> None:
    calls, norm = seen.calls[layer.index], seen.normalized[layer.index]
    if calls != 1:
        how = "never called (a function may use its weight)" if calls == 0 else f"called {calls} times"
        raise LayerError(f"The module of {layer.name!r} is {how} on `sample`; it must be called once.")
    if norm is not None:
        raise LayerError(f"The input of {layer.name!r} is already normalized by {norm}.")


def _refuse_registered_norm(model: nn.Module, layer: Layer) -> None:
    """Reject a layer registered after a normalization, past modules that change no number, if no pass was made."""
    before: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        if module is layer.module:
            break
        if not module._modules and not isinstance(module, _CHANGES_NO_NUMBER):
            before.append((name, module))
    name, norm = before[-1] if before else ("", layer.module)
    its_class: Any = type(norm)
    # A normalization of image channels is followed by a pooling, which need not be a module.
    if (
        is_norm(its_class)
        and not re.search("2d|3d|Group", its_class.__name__)
        and _width(norm) in (None, features(layer))
    ):
        raise LayerError(
            f"{name!r}, registered just before {layer.name!r}, may already normalize its input, and then there is "
            "nothing to do. Pass a `sample` to find out."
        )


def _width(norm: nn.Module) -> int | None:
    """Return the number of features that a normalization is for; None if it does not say."""
    shape = getattr(norm, "normalized_shape", None)
    width = shape[-1] if shape else getattr(norm, "num_features", None)
    return width if isinstance(width, int) else None


@dataclass(frozen=True)
class Ending:
    """The end of a model in a forward pass.

    Attributes:
        last: positions of the layers that the outputs come from, without those that feed another of them.
        calls: how often the module of each layer was called.
        normalized: for each layer, what normalized the input of its module, in words, or None: a module by its name in
            quotes, or a function.
        after: for each of `last`, what is between it and the outputs other than functions of single numbers: "a product
            with 'w'", "a normalization", "a sum with earlier layers", or "".
    """

    last: tuple[int, ...]
    calls: tuple[int, ...]
    normalized: tuple[str | None, ...]
    after: tuple[str, ...] = ()


def ending(model: nn.Module, layers: Sequence[Layer], sample: object) -> Ending:
    """Run `model` on `sample` once, in evaluation mode, and return how it ends; model and random state do not change.

    Args:
        model: the model.
        layers: its layers, in any order.
        sample: a tensor, a tuple of positional arguments or a dict of keyword arguments.

    >>> net = nn.ModuleDict({"head": nn.Linear(2, 1), "body": nn.Linear(3, 2), "norm": nn.LayerNorm(2)})
    >>> net.forward = lambda x: net["head"](net["norm"](net["body"](x)))
    >>> ending(net, layers(net), torch.zeros(1, 3))
    Ending(last=(0,), calls=(1, 1), normalized=("'norm'", None), after=('',))
    """
    # A parallel wrapper would send the sample elsewhere.
    model = unwrapped(model)
    follow = _Follow([layer.parameter for layer in layers], matrices(model, layers), tensors(sample))
    with _Inputs(model, layers, follow) as inputs:
        ends = tensors(output_of(model, sample, follow))
    last = follow.last(ends)
    after = tuple(follow.after(ends, position) for position in last)
    return Ending(last, tuple(inputs.calls), tuple(inputs.normalized), after)


def matrices(model: nn.Module, layers: Sequence[Layer]) -> dict[str, nn.Parameter]:
    """Return the parameters of two or more dimensions that are not layers, by name.

    >>> net = nn.Linear(3, 2)
    >>> net.prototypes = nn.Parameter(torch.zeros(5, 2))
    >>> list(matrices(net, layers(net)))
    ['prototypes']
    """
    known = {id(layer.parameter) for layer in layers}
    return {name: one for name, one in model.named_parameters() if one.dim() > 1 and id(one) not in known}


class _Follow(TorchFunctionMode):
    """Records, for every activation, the layers it comes from, directly and through others.

    Sets of layers are bits of whole numbers, because thousands of residual layers end up in the same sets. The bits of
    matrices that are not layers come after those of layers.
    """

    def __init__(self, weights: Sequence[Tensor], matrices: Mapping[str, Tensor], inputs: Iterable[Tensor]) -> None:
        super().__init__()
        self.weights: Any = WeakTensorKeyDictionary(
            {weight: 1 << i for i, weight in enumerate([*weights, *matrices.values()])}
        )
        # For each: the layers it comes from directly, all before it, those it comes from through a normalization, and
        # the matrices between it and the layers it comes from directly.
        self.activations: Any = WeakTensorKeyDictionary(dict.fromkeys(inputs, (0, 0, 0, 0)))
        self.before = [0] * len(weights)
        self._layers, self._names = (1 << len(weights)) - 1, ["" for _ in weights] + list(matrices)
        # For each normalized tensor: its version, what normalized it, and a test that is still to be made.
        self._marks: Any = WeakTensorKeyDictionary()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        given = tensors((args, kwargs or {}))
        # Before the call, because an in-place operation changes the version that a mark refers to.
        marks = [self._marked(tensor) for tensor in given if tensor in self.activations]
        result = func(*args, **(kwargs or {}))
        made = given[:1] if func is Tensor.__setitem__ else tensors(result)
        came = [tensor for tensor in given if tensor in self.activations]
        used = reduce(or_, (self.weights[tensor] for tensor in given if tensor in self.weights), 0)
        if came:
            known = [self.activations[tensor] for tensor in came]
            direct, all_before, normed, crossed = (reduce(or_, bits) for bits in zip(*known, strict=True))
            used = 0 if name in _RESEMBLES else used
            weights = used & self._layers
            for position in _positions(weights):
                self.before[position] |= all_before
            if name in _NORMALIZES:
                normed |= direct
            elif _MULTIPLIES.fullmatch(name.strip("_")) or any(y.shape not in [x.shape for x in came] for y in made):
                crossed |= used & ~self._layers
            self._pass_on_marks(name, marks, made)
            for tensor in made:
                since = (0, 0) if weights else (normed, crossed)
                self.activations[tensor] = (weights or direct, all_before | weights, *since)
        elif used:
            for tensor in made:
                self.weights[tensor] = used
        return result

    def _pass_on_marks(self, name: str, marks: Sequence[_Mark | None], made: Iterable[Tensor]) -> None:
        mark: _Mark | None = (0, f"a call of {name}", None) if name in _NORMALIZES else None
        if _PASSES_ON.fullmatch(name.strip("_")) and len(marks) == 1:
            mark = marks[0]
        for tensor in made:
            self._marks.pop(tensor, None)
            if mark is not None:
                self.mark(tensor, *mark[1:])

    def mark(self, tensor: Tensor, how: str, ask: Callable[[], bool] | None = None) -> None:
        """Record what normalized a tensor, on the condition that `ask` returns True."""
        self._marks[tensor] = _version(tensor), how, ask

    def _marked(self, tensor: Tensor) -> _Mark | None:
        mark: _Mark | None = self._marks.get(tensor)
        # An in-place ReLU keeps the tensor and changes its version.
        return mark if mark is not None and mark[0] == _version(tensor) else None

    def normalized(self, tensor: Tensor, *, asking: bool = True) -> str | None:
        """Return what normalized a tensor, or None."""
        mark = self._marked(tensor)
        return mark[1] if mark is not None and (not asking or mark[2] is None or mark[2]()) else None

    def note_normalization(self, tensor: Tensor) -> None:
        """Record that an opaque module has normalized `tensor`."""
        if tensor in self.activations:
            direct, all_before, normed, crossed = self.activations[tensor]
            self.activations[tensor] = direct, all_before, normed | direct, crossed

    def last(self, outputs: Iterable[Tensor]) -> tuple[int, ...]:
        """Return the layers that the outputs come from, without those that feed another of them."""
        found = _positions(reduce(or_, (self._of(tensor)[0] for tensor in outputs), 0))
        # Layers in a loop come before each other, and before themselves.
        return tuple(p for p in found if not any(self._feeds(p, q) and not self._feeds(q, p) for q in found))

    def after(self, outputs: Iterable[Tensor], position: int) -> str:
        """Return what is between a layer and the outputs that come from it."""
        mine = [known for known in map(self._of, outputs) if known[0] >> position & 1]
        crossed = _positions(reduce(or_, (matrices for _, _, _, matrices in mine), 0))
        if crossed:
            return "a product with " + " and ".join(repr(self._names[one]) for one in crossed)
        if any(normed >> position & 1 for _, _, normed, _ in mine):
            return "a normalization"
        return "a sum with earlier layers" if any(direct != 1 << position for direct, *_ in mine) else ""

    def _of(self, tensor: Tensor) -> tuple[int, int, int, int]:
        known: tuple[int, int, int, int] = self.activations.get(tensor, (0, 0, 0, 0))
        return known

    def _feeds(self, one: int, other: int) -> bool:
        return bool(self.before[other] >> one & 1)


def _version(tensor: Tensor) -> int:
    # Tensors made in inference mode have none.
    return 0 if tensor.is_inference() else tensor._version


def _positions(bits: int) -> list[int]:
    return [position for position in range(bits.bit_length()) if bits >> position & 1]


class _Inputs:
    """Temporary hooks that count the calls of layers' modules and record which inputs are normalized."""

    def __init__(self, model: nn.Module, layers: Sequence[Layer], follow: _Follow) -> None:
        self.calls = [0] * len(layers)
        self.normalized: list[str | None] = [None] * len(layers)
        self._follow, self._handles = follow, []
        own = {id(layer.module) for layer in layers}
        for name, module in model.named_modules():
            its_class: Any = type(module)
            if is_norm(its_class):
                self._handles.append(module.register_forward_hook(self._gave(name)))
            elif not its_class.__module__.startswith("torch.nn.") and own.isdisjoint(map(id, module.modules())):
                self._handles.append(module.register_forward_hook(self._may_have_given(name)))
        for position, layer in enumerate(layers):
            takes = self._takes(position)
            self._handles.append(layer.module.register_forward_pre_hook(takes, with_kwargs=True))

    def __enter__(self) -> _Inputs:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _gave(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            for tensor in tensors(output)[:1]:
                self._follow.mark(tensor, repr(name))
                self._follow.note_normalization(tensor)

        return hook

    def _may_have_given(self, name: str) -> Callable[..., None]:
        """Return a hook for a module of unknown class without layers; it is tested when a layer takes its output."""

        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            given, gave = tensors(inputs), tensors(output)
            if len(given) == len(gave) == 1 and given[0].is_floating_point() and given[0].shape == gave[0].shape:
                x, y = given[0], gave[0]
                if self._follow.normalized(y, asking=False) is None:
                    self._follow.mark(y, repr(name), partial(_forgets_scale, module, x))

        return hook

    def _takes(self, position: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.calls[position] += 1
            for x in tensors((args, kwargs))[:1]:
                self.normalized[position] = self._follow.normalized(x) or self.normalized[position]

        return hook


def _forgets_scale(module: nn.Module, like: Tensor) -> bool:
    """Return True if f(2x) = f(x) for a module's f, and f is not the same for all x."""
    generator = torch.Generator("cpu").manual_seed(0)
    x, other = (torch.randn(like.shape, generator=generator, device="cpu").to(like) for _ in range(2))
    try:
        y, twice, others = (module.forward(one).double() for one in (x, 2 * x, other))
    except Exception:  # it takes other inputs, so nothing is known about it
        return False
    near = 0.02 * y.abs().mean()
    return bool((twice - y).abs().max() <= near < (others - y).abs().max())
