"""The layers of a model: the parameters that multiply its activations, and their names, order and parts.

A layer is a weight w that multiplies, so its norm ‖w‖ and its direction w/‖w‖ have different effects. Rotation, rate
and effective learning rate are measured per layer, and control acts per layer.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache
from operator import attrgetter
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from gyroscope.base.accepted import choice, listed
from gyroscope.errors import LayerError
from gyroscope.layers.class_names import ancestry, is_conv1d, is_norm, snake, wrapped_in
from gyroscope.layers.order import forward_order

Kind = Literal["linear", "conv", "conv_transpose", "attention", "recurrent", "embedding", "other"]

Granularity = Literal["tensor", "row", "block", "expert"]


@dataclass(frozen=True)
class Layer:
    """One layer: the place of its weight, and the equal parts it is measured and steered in.

    Attributes:
        name: the parameter's qualified name, without the prefixes of wrappers (`torch.compile`, DDP, ...).
        kind: "linear", "conv", "conv_transpose", "attention", "recurrent", "embedding" or "other".
        index: position among the layers, 0..L-1, in forward order.
        module: the module that owns the parameter.
        attribute: the attribute of `module` that holds the parameter; dotted for a parametrized weight.
        segments: number of equal parts along `dim`; 1 is the whole tensor.
        dim: the dimension that is split.
        parametrization: how the weight is computed from the parameter, such as "weight_norm"; None if it is the weight.

    >>> from gyroscope.layers.layer import layers
    >>> layers(nn.Linear(3, 2))[0]
    Layer(name='weight', kind='linear', index=0, attribute='weight', segments=1, dim=0, parametrization=None)
    """

    name: str
    kind: Kind
    index: int
    module: nn.Module = field(repr=False, compare=False)
    attribute: str
    segments: int = 1
    dim: int = 0
    parametrization: str | None = None

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter as it is now; never cached, because FSDP2 and Accelerate swap it in place.

        >>> net = nn.Linear(3, 2)
        >>> layer = layers(net)[0]
        >>> net.weight = nn.Parameter(torch.ones(2, 3))
        >>> layer.parameter is net.weight
        True
        """
        parameter: nn.Parameter = attrgetter(self.attribute)(self.module)
        return parameter

    def view(self, tensor: Tensor | None = None) -> Tensor:
        """Return `tensor` (by default the parameter) with `dim` first, so that `segments` divides the leading size.

        >>> layer = layers(nn.ConvTranspose2d(3, 8, 5), granularity="row")[0]
        >>> layer.segments, tuple(layer.parameter.shape), tuple(layer.view().shape)
        (8, (3, 8, 5, 5), (8, 3, 5, 5))
        """
        tensor = self.parameter if tensor is None else tensor
        return tensor if self.dim == 0 else tensor.movedim(self.dim, 0)


def layers(
    model: nn.Module,
    *,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    granularity: Granularity = "tensor",
    sample: object = None,
) -> list[Layer]:
    """Find the layers of `model`, in forward order.

    Layers are the weights of `Linear`, `Bilinear`, `Conv1d` to `Conv3d` and their transposes, the projections
    of `MultiheadAttention` (a fused `in_proj_weight` is one layer), the input, hidden and projection matrices
    of recurrent networks and cells, `Embedding` and `EmbeddingBag`, transformers' `Conv1D`, subclasses of
    all of these, and modules built like `Linear` (a `weight` of [`out_features`, `in_features`]) or like
    `Embedding` (a matrix `weight`, and a `padding_idx`).

    For a module of another class, layers are its own parameters with two dimensions larger than one and a name
    of a matrix: with "weight", "kernel", "proj" or "lora" in it; w alone, with a number or a word (`w1`, `w_gate`),
    or u or v with a number; `fn`, alone or at the end (`hc_fn`). If it has q, k and v, then these, o and r are of
    kind "attention" (also `w_q`, `wq`).

    Tables that are added are not layers: biases, and position tables that are parameters themselves. Such a table
    has "bias", "pos" or "position" in its own name or that of its module. Of embedding modules, only those called a
    bias are left out. Gains of normalization modules, and parameters with integers or no elements, are not layers
    either. Frozen parameters are layers, since they can be measured. A tied weight appears once, under the first of its
    names that makes it a layer.

    A parametrized weight is measured where the optimizer moves it. For `weight_norm`, w = g v/‖v‖, the layer
    is the direction v and not the gain g; for `spectral_norm`, `orthogonal`, pruning and everything else that starts
    from one tensor, it is that original tensor. The name stays that of the weight. If a weight is computed from
    several tensors (a factorization), each that has two dimensions larger than one is a layer of kind "other".

    Args:
        model: any module, also compiled, data-parallel, checkpointed or sharded with FSDP2.
        include: glob patterns on the names to keep. A name without wildcards may also add a parameter of two or
            more dimensions that is not a layer by default, as kind "other".
        exclude: glob patterns on the names to leave out.
        granularity: the parts of a layer. "tensor": one, the papers' layer. "row": one per output unit (per
            token for an embedding). "block": the q, k, v of `in_proj_weight` and `c_attn`, the gates of an LSTM or GRU.
            "expert": along the leading dimension of a three-dimensional weight of kind "other".
        sample: an input (a tensor, a tuple of positional arguments or a dict of keyword arguments) for one
            forward pass, which puts layers in the order of first use; without it they are in registration
            order. The pass leaves modes, buffers and random state as they were. A layer it never uses follows
            the one registered before it.

    Raises:
        LayerError: there are no layers, a pattern matches none, the granularity is unknown, the forward pass fails, or
            parameters are flattened (FSDP1, ZeRO) or not yet materialized.

    >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 10))
    >>> [layer.name for layer in layers(net)]
    ['0.weight', '3.weight']
    >>> [layer.segments for layer in layers(net, granularity="row", exclude="3.*")]
    [4]
    """
    if not isinstance(model, nn.Module):
        raise LayerError(
            f"`model` must be a torch.nn.Module, got {type(model).__name__}. Pass the model itself, not its parameters "
            "or an optimizer."
        )
    choice(granularity, "granularity", get_args(Granularity), LayerError)
    included = ["*"] if include is None else patterns("include", include)
    excluded = [] if exclude is None else patterns("exclude", exclude)
    found = _find(model)
    by_name = set(included)
    chosen = [
        layer
        for name, (layer, default) in found.items()
        if name == layer.name and (default or (name in by_name and _is_weight(layer.parameter)))
    ]
    if not chosen:
        others = [name for name, (layer, _) in found.items() if _is_weight(layer.parameter)]
        raise LayerError(
            f"{type(model).__name__} has no layers. A layer is the weight of a linear, convolutional, "
            "attention, recurrent or embedding module, or a matrix called weight, kernel, proj, w1 or similar in a "
            "module of another class. Name other parameters of two or more dimensions: gyroscope.layers(model, "
            f"include={others[:2] or ['NAME']}). gyroscope.Layca takes these instead of the model, and gyroscope.watch "
            "as `layers`."
        )
    if sample is not None:
        chosen = _in_order_of_use(model, chosen, sample)
    names = {layer.name: None for layer in chosen}  # ordered, with fast lookup
    matched = {pattern: matching(pattern, names) for pattern in (*included, *excluded)}
    for pattern, its in matched.items():
        if not its:
            raise LayerError(unmatched(pattern, list(names), found))
    wanted, unwanted = (set[str]().union(*map(matched.__getitem__, some)) for some in (included, excluded))
    left = wanted - unwanted
    kept = [layer for layer in chosen if layer.name in left]
    if not kept:
        raise LayerError(
            f"include={include!r} and exclude={exclude!r} leave none of the {len(chosen)} layers. Relax one of them."
        )
    return [split(replace(layer, index=i), granularity) for i, layer in enumerate(kept)]


def chosen_layers(model: Any, given: Any, error: type[Exception]) -> list[Layer]:
    """Return the layers that a user names: a list of layers as it is, those that match patterns, or all for None.

    Args:
        model: any module.
        given: a list from `layers`, one or more glob patterns on names, or None.
        error: the caller's error, raised for anything else, and for layers without values.

    >>> [layer.name for layer in chosen_layers(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), "0.*", ValueError)]
    ['0.weight']
    """
    if not isinstance(model, nn.Module):
        raise error(f"`model` must be a torch.nn.Module, got {type(model).__name__}.")
    some = None if given is None else listed(given)
    if some and all(isinstance(one, Layer) for one in some):
        found = some
    elif some is None or (some and all(isinstance(one, str) for one in some)):
        found = layers(model, include=some)
    else:
        what = [type(one).__name__ for one in some][:3] or "an empty list"
        raise error(
            "`layers` must be a list from gyroscope.layers(model), or glob patterns on the layers' names, got "
            f"{what}. Leave it out for all layers."
        )
    for layer in found:
        if layer.parameter.is_meta:
            raise error(
                f"`layers` must have values, got {layer.name!r} on the meta device. Initialize the weights on a device "
                "first."
            )
    return found


def zero_norm(layers: Iterable[Layer]) -> list[Layer]:
    """Return the layers whose weight is exactly zero: they have no direction w/‖w‖, so no rotation or rate.

    The norm is ℓ0, the number of nonzero elements, because the square of a tiny weight can underflow to
    zero. There is one transfer to the host per device; all ranks of a sharded model call it together. Layers
    on the meta device are skipped.

    >>> net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    >>> _ = nn.init.zeros_(net[1].weight)
    >>> [layer.name for layer in zero_norm(layers(net))]
    ['1.weight']
    """
    listed = list(layers) if isinstance(layers, Iterable) else [None]
    if not all(isinstance(layer, Layer) for layer in listed):
        raise LayerError(
            f"`layers` must be a list of layers, got {type(layers).__name__}. Try gyroscope.layers(model)."
        )
    groups: defaultdict[tuple[torch.device, Any], list[tuple[Layer, Tensor]]] = defaultdict(list)
    for layer in listed:
        weight: Any = layer.parameter.detach()
        mesh = weight.device_mesh if "DTensor" in ancestry(weight) else None
        local = weight if mesh is None else weight.to_local()
        if not local.is_meta:
            groups[local.device, mesh].append((layer, torch.count_nonzero(local)))
    zero: set[int] = set()
    for (_, mesh), group in groups.items():
        norms = torch.stack([norm for _, norm in group])
        for process_group in () if mesh is None else mesh.get_all_groups():
            # Summing over replicas as well multiplies a count, but a zero stays a zero.
            torch.distributed.all_reduce(norms, group=process_group)
        zero |= {id(layer) for (layer, _), norm in zip(group, norms.tolist(), strict=True) if norm == 0}
    return [layer for layer in listed if id(layer) in zero]


_KNOWN: tuple[tuple[Any, Kind, str], ...] = (
    (nn.MultiheadAttention, "attention", r"(in|q|k|v)_proj_weight"),
    (nn.modules.conv._ConvTransposeNd, "conv_transpose", r"weight"),
    (nn.modules.conv._ConvNd, "conv", r"weight"),
    ((nn.RNNBase, nn.RNNCellBase), "recurrent", r"weight_(ih|hh|hr)(_l\d+(_reverse)?)?"),
    ((nn.Embedding, nn.EmbeddingBag), "embedding", r"weight"),
    (nn.Bilinear, "linear", r"weight"),
    (nn.Linear, "linear", r"weight"),
)


#: Names of parameters that multiply, and of those that are added (biases and positions, but not `positionwise`).
_MATRIX = re.compile(r"weight|kernel|proj|lora|^w(\d*|[._]\w+)$|^[uv]\d+$|(^|_)fn$")


_BIAS = re.compile(r"bias")


_ADDED = re.compile(r"bias|(?<![a-z])pos(ition(s|al)?)?(?![a-z])")


def _find(model: nn.Module) -> dict[str, tuple[Layer, bool]]:
    """Return each parameter by name, in registration order: the layer it would be, and whether it is one by default.

    The other names of a tied parameter map to the layer of the first name, or of the first that makes it a layer.
    """
    found: dict[str, tuple[Layer, bool]] = {}
    tied: dict[int, list[str]] = {}
    for prefix, module, parent in _walk(model):
        for name, attribute, how in _own_parameters(module):
            layer = Layer(prefix + name, "other", 0, module, attribute, parametrization=how)
            parameter = layer.parameter
            kind = _kind(layer, parameter, name, parent)
            names = tied.setdefault(id(parameter), [])
            known = found[names[0]] if names else None
            names.append(layer.name)
            if known is not None and (known[1] or kind is None):
                found[layer.name] = known
            else:
                found |= dict.fromkeys(names, (layer if kind is None else replace(layer, kind=kind), kind is not None))
    return found


def _walk(
    module: nn.Module, prefix: str = "", parent: nn.Module | None = None, seen: set[int] | None = None
) -> Iterator[tuple[str, nn.Module, nn.Module | None]]:
    """Yield every module once, depth first, under its name without wrappers, with its parent."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    yield prefix, module, parent
    wrapped = wrapped_in(module)
    for name, child in module.named_children():
        if name == wrapped:
            yield from _walk(child, prefix, parent, seen)
        else:
            yield from _walk(child, f"{prefix}{name}.", module, seen)


def _own_parameters(module: nn.Module) -> Iterator[tuple[str, str, str | None]]:
    """Yield the name as a weight, the attribute and the parametrization of each parameter that a module owns."""
    own = [name for name, parameter in module._parameters.items() if parameter is not None]
    for name in own if not isinstance(module, ParametrizationList) else ():
        stem = name.removesuffix("_v").removesuffix("_orig")
        if name == f"{stem}_v" and f"{stem}_g" in own and _is_gain(module, f"{stem}_g", name):
            yield stem, name, "weight_norm"
        elif name == f"{stem}_orig" and f"{stem}_mask" in module._buffers:
            yield stem, name, "prune"
        elif name == f"{stem}_orig" and f"{stem}_u" in module._buffers:
            yield stem, name, "spectral_norm"
        else:
            yield name, name, None
    if is_parametrized(module):
        for name, steps in module.parametrizations.items():  # type: ignore[union-attr, operator]
            how = "+".join(snake(type(step).__name__) for step in steps)
            direction = "original1" if how.startswith("weight_norm") else "original"
            for original in steps._parameters:
                place = f"parametrizations.{name}.{original}"
                yield name if original == direction else place, place, how


def _is_gain(module: nn.Module, gain: str, direction: str) -> bool:
    """Return True if these can be the g and v of `weight_norm`: attention's gates and values have such names too."""
    g, v = (module._parameters[name] for name in (gain, direction))
    return g.dim() in (0, v.dim()) and sum(size > 1 for size in g.shape) <= 1  # type: ignore[union-attr]


def _kind(layer: Layer, parameter: nn.Parameter, name: str, parent: nn.Module | None) -> Kind | None:
    """Return the kind of layer that a parameter, called `name` by its owner, is by default; None if it is not one."""
    module = layer.module
    if is_lazy(parameter):
        raise LayerError(f"{layer.name!r} is lazy and has no shape yet. Run one forward pass first.")
    marked = "FlatParameter" in ancestry(parameter) or getattr(parameter, "_is_flat_param", False)
    _refuse_flat(layer, marked or (hasattr(parameter, "ds_id") and parameter.numel() == 0))
    factor = name.startswith("parametrizations.")
    weight = name.split(".")[1] if factor else name
    *path, _ = layer.name.removesuffix(name).split(".")
    its_class: Any = type(module)
    normalizes = is_norm(its_class)
    entry = _known(its_class, is_conv1d(module)) or (None if normalizes else _like(module, weight, parameter))
    if entry is not None:
        kind, pattern = entry
        if not re.fullmatch(pattern, weight) or (kind == "embedding" and path and _BIAS.search(path[-1].lower())):
            return None
        # With use_orig_params=True, FSDP1's part of a weight is not marked, but has one dimension.
        shard = layer.parametrization is None and parameter.is_floating_point() and parameter.dim() < 2
        _refuse_flat(layer, shard)
        kind = "other" if factor else "attention" if isinstance(parent, nn.MultiheadAttention) else kind
        return kind if _is_weight(parameter, large=2 if factor else 0) else None
    if normalizes or not _is_weight(parameter, large=2):
        return None
    # The parameters of a list are called 0, 1, ...: the name of the list says what they are.
    if isinstance(module, (nn.ParameterList, nn.ParameterDict)):
        *path, listed = path or [""]
        name = f"{listed}.{name}"
    name = name.lower()
    if _ADDED.search(name) or (path and _ADDED.search(path[-1].lower())):
        return None
    if _in_formulas(name) in {"q", "k", "v", "o", "r"} and _has_attention(module):
        return "attention"
    return "other" if _MATRIX.search(name) and "norm" not in name else None


def _in_formulas(name: str) -> str:
    """Return the index of a matrix W_q in a formula: "q" for `q`, `wq` and `W_q`."""
    return re.sub(r"^w_?(?=.)", "", name.lower())


def _has_attention(module: nn.Module) -> bool:
    """Return True if a module has its own query, key and value matrices."""
    own = {_in_formulas(name) for name, p in module._parameters.items() if p is not None and _is_weight(p, large=2)}
    return own >= {"q", "k", "v"}


def _like(module: nn.Module, name: str, parameter: Tensor) -> tuple[Kind, str] | None:
    """Return the kind of a module that is built like one of torch's without being one, such as a quantized one."""
    if name != "weight" or parameter.dim() != 2:
        return None
    if tuple(parameter.shape) == (getattr(module, "out_features", None), getattr(module, "in_features", None)):
        return "linear", name
    return ("embedding", name) if hasattr(module, "padding_idx") else None


@lru_cache(maxsize=1024)
def _known(module: Any, conv1d: bool) -> tuple[Kind, str] | None:
    """Return the kind of a class of modules, and a pattern for the parameters that are weights."""
    entries = (e for e in _KNOWN if issubclass(module, e[0]) or (e[0] is nn.Linear and conv1d))
    found = next(entries, None)
    return None if found is None else found[1:]


def _is_weight(parameter: Tensor, *, large: int = 0) -> bool:
    """Return True for two or more dimensions, at least `large` of them above one, of real or complex numbers."""
    if not (parameter.is_floating_point() or parameter.is_complex()) or parameter.numel() == 0:
        return False
    return parameter.dim() >= 2 and sum(size > 1 for size in parameter.shape) >= large


def _refuse_flat(layer: Layer, flat: bool) -> None:
    if flat:
        raise LayerError(
            f"{layer.name!r} is flattened across layers or processes (FSDP1 or ZeRO), so it has no layers. "
            "Shard with FSDP2 (torch.distributed.fsdp.fully_shard), or use DistributedDataParallel."
        )


def _in_order_of_use(model: nn.Module, chosen: list[Layer], sample: object) -> list[Layer]:
    parameters = [layer.parameter for layer in chosen]
    if any("DTensor" in ancestry(parameter) for parameter in parameters):
        raise LayerError(
            "`sample` was given for a sharded model (DTensor parameters), whose forward pass works on other "
            "tensors. Find the order before sharding, or leave `sample` out."
        )
    # Data-parallel wrappers would communicate during the pass, and hang if only one rank asks.
    while (wrapped := wrapped_in(model)) and wrapped != "_fsdp_wrapped_module":
        model = getattr(model, wrapped)
    return [chosen[position] for position in forward_order(model, parameters, sample)]


def split(layer: Layer, granularity: Granularity) -> Layer:
    """Return the same layer in the equal parts of another granularity: the tensor, output units, blocks or experts.

    >>> split(layers(nn.Linear(3, 2))[0], "row").segments
    2
    """
    if granularity == "tensor" and layer.segments == 1:
        return layer
    shape = layer.parameter.shape
    segments, dim = 1, 0
    match granularity:
        case "row":
            transposed = layer.kind == "conv_transpose"
            if transposed and layer.module.groups != 1:
                raise LayerError(
                    f"granularity='row' cannot split {layer.name!r}: a transposed convolution with "
                    f"{layer.module.groups} groups has its output units along two dimensions, "
                    "[in, out/groups, ...]. Exclude it, or use granularity='tensor'."
                )
            dim = 1 if transposed or (layer.kind == "linear" and is_conv1d(layer.module)) else 0
            segments = shape[dim]
        case "block":
            segments, dim = _blocks(layer, shape)
        case "expert":
            segments = shape[0] if layer.kind == "other" and len(shape) == 3 else 1
    return replace(layer, segments=segments, dim=dim)


def _blocks(layer: Layer, shape: Sequence[int]) -> tuple[int, int]:
    name = layer.name.split(".")
    if layer.kind == "attention" and name[-1] == "in_proj_weight":
        return 3, 0
    if layer.kind == "recurrent" and not name[-1].startswith("weight_hr"):
        gates = {(nn.LSTM, nn.LSTMCell): 4, (nn.GRU, nn.GRUCell): 3}
        return next((n for classes, n in gates.items() if isinstance(layer.module, classes)), 1), 0
    if layer.kind == "linear" and is_conv1d(layer.module) and name[-2:] == ["c_attn", "weight"]:
        # [width, 3 width] holds q, k, v; in cross-attention [width, 2 width] holds k, v.
        return (shape[1] // shape[0], 1) if shape[1] % shape[0] == 0 else (1, 0)
    return 1, 0


def patterns(option: str, given: Any) -> list[str]:
    """Return one glob pattern on names, or several, as a list.

    >>> patterns("include", "encoder.*")
    ['encoder.*']
    """
    listed = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else [given]
    for one in listed:
        if not isinstance(one, str):
            raise LayerError(
                f"`{option}` must be one or more layer names or glob patterns on them, got {given!r:.80}. Try "
                '"encoder.*".'
            )
    return listed


def matching(pattern: str, names: dict[str, None]) -> set[str]:
    """Return the names that a pattern matches; a name always matches itself.

    >>> sorted(matching("conv*", {"conv1.weight": None, "fc.weight": None}))
    ['conv1.weight']
    """
    same = {pattern} & names.keys()
    # There may be thousands of names; only patterns with wildcards are compared with each.
    return same | {name for name in names if fnmatchcase(name, pattern)} if re.search(r"[*?[]", pattern) else same


def unmatched(pattern: str, names: list[str], found: dict[str, tuple[Layer, bool]]) -> str:
    """Return why a pattern matches no layer, and names that are close to it.

    >>> unmatched("con.weight", ["conv.weight", "fc.weight"], {})
    "The pattern 'con.weight' matches no layer. Close names are 'conv.weight', 'fc.weight'."
    """
    if pattern in found:
        layer, _ = found[pattern]
        if layer.name != pattern:
            return f"{pattern!r} is tied to {layer.name!r} and is not a layer of its own. Use that name."
        return (
            f"{pattern!r} with shape {tuple(layer.parameter.shape)} and {layer.parameter.dtype} is not a layer. "
            "`include` also takes the name of a real or complex parameter of two or more dimensions."
        )
    close = get_close_matches(pattern, names, n=3, cutoff=0.4) or names[:3]
    return f"The pattern {pattern!r} matches no layer. Close names are {', '.join(map(repr, close))}."
