"""Rules for the parameters of a model, by their role: turn, step plainly, or leave as they are.

Hidden matrices turn. Gains, biases and other vectors are stepped plainly, since they have no direction of interest, and
so are the routers of mixtures of experts, whose norm sets how sharply they choose. Embeddings and the output head are
matrices whose norm may matter: a head of fixed norm, after a normalization, limits the logits. So they have rules of
their own. An embedding that is also the head (tied weights) follows the rule of heads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from torch import Tensor, nn

from gyroscope.control.joint import Rule
from gyroscope.layers.class_names import unwrapped, wrapped_in
from gyroscope.layers.layer import Granularity, Layer, layers, patterns, split

Role = Literal["matrix", "embedding", "head", "tied head", "router", "other"]


@dataclass(frozen=True)
class Route:
    """The role of a parameter, and the rule by which it is stepped.

    Attributes:
        name: the parameter's name, without the prefixes of wrappers.
        parameter: the parameter.
        role: what it is for; "other" for everything that is not a layer.
        rule: "turn", "plain" or "frozen".
        layer: the layer, if it is one.
    """

    name: str
    parameter: Tensor
    role: Role
    rule: Rule
    layer: Layer | None = None


def routes(
    model: nn.Module,
    *,
    embeddings: Rule,
    heads: Rule,
    plain: str | Iterable[str] = (),
    granularity: Granularity = "expert",
) -> list[Route]:
    """Return a route for each parameter that needs a gradient, layers first, in forward order.

    Args:
        model: the model.
        embeddings: the rule of embeddings, also of positions.
        heads: the rule of the output head.
        plain: names of layers, or glob patterns on them, that are stepped plainly whatever their role.
        granularity: the parts of a layer that turn, as in `gyroscope.layers`.

    >>> net = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 9))
    >>> [(route.name, route.role, route.rule) for route in routes(net, embeddings="turn", heads="plain")][:3]
    [('0.weight', 'embedding', 'turn'), ('1.weight', 'matrix', 'turn'), ('3.weight', 'head', 'plain')]
    """
    found = layers(model)
    named = patterns("plain", plain)
    excluded = {layer.name for layer in layers(model, include=named)} if named else set()
    heads_of = _heads(model, found)
    own: dict[Role, Rule] = {"embedding": embeddings, "head": heads, "tied head": heads, "router": "plain"}
    routed, seen = [], set[int]()
    for layer in found:
        seen.add(id(layer.parameter))
        if layer.parameter.requires_grad:
            role = _role(model, layer, heads_of)
            rule = own.get(role, "turn")
            if rule == "turn" and (layer.name in excluded or not layer.parameter.is_floating_point()):
                rule = "plain"
            routed.append(Route(layer.name, layer.parameter, role, rule, split(layer, granularity)))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in seen:
            routed.append(Route(_without_wrappers(model, name), parameter, "other", "plain"))
    return routed


def _role(model: nn.Module, layer: Layer, heads: set[int]) -> Role:
    if id(layer.parameter) in heads:
        return "tied head" if layer.kind == "embedding" else "head"
    if layer.kind == "embedding":
        return "embedding"
    return "router" if _is_router(model, layer) else "matrix"


def _is_router(model: nn.Module, layer: Layer) -> bool:
    """Return whether a layer chooses experts: in a module called router, or a gate next to experts."""
    *path, _ = layer.name.split(".")
    for i, name in enumerate(path):
        if re.search(r"(^|_)router$", name):
            return True
        if re.search(r"(^|_)gate$", name):
            siblings = _module(model, path[:i])
            if any("expert" in other for other in [*siblings._modules, *siblings._parameters]):
                return True
    return False


def _heads(model: nn.Module, found: Sequence[Layer]) -> set[int]:
    """Return the parameters of the output head, by id, without running the model.

    The head is what `get_output_embeddings` of transformers returns; else a linear layer that is tied to an embedding;
    else the linear or convolutional layer registered last, unless it is one of several equal blocks, whose output
    something else must read. With it come the linear layers of its list or dict, if they have equal inputs and cannot
    be a chain: other heads.
    """
    inside = unwrapped(model)
    known = getattr(inside, "get_output_embeddings", None)
    head = None
    if callable(known):
        with suppress(NotImplementedError):
            head = known()
    if isinstance(head, nn.Module):
        own = {id(p) for name, p in head.named_parameters() if "lora" not in name.lower()}
        return own & {id(layer.parameter) for layer in found}
    embedded = {id(layer.parameter) for layer in found if layer.kind == "embedding"}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag) and id(weight) in embedded:
            return {id(weight)}
    last = next((layer for layer in reversed(found) if layer.kind != "embedding"), None)
    if last is None or last.kind not in ("linear", "conv") or "lora" in last.name.lower():
        return set()
    *path, _ = last.name.split(".")
    for i in range(len(path) - 1):
        holder, block = _module(model, path[:i]), _module(model, path[: i + 1])
        if path[i].isdigit() and sum(type(unwrapped(one)) is type(block) for one in holder.children()) > 1:
            return set()
    beside = _linear_siblings(_module(model, path[:-1])) if path else []
    if id(last.parameter) not in map(id, beside):
        return {id(last.parameter)}
    if len({one.shape[1] for one in beside}) == 1 and any(a.shape[0] != b.shape[1] for a, b in pairwise(beside)):
        return set(map(id, beside))
    equal = len(beside) > 1 and len({one.shape for one in beside}) == 1
    return set() if equal and isinstance(_module(model, path[:-1]), nn.ModuleList) else {id(last.parameter)}


def _linear_siblings(holder: nn.Module) -> list[Tensor]:
    """Return the weights of the linear layers directly in a list or dict of modules, which has no order of its own."""
    if not isinstance(holder, nn.ModuleList | nn.ModuleDict):
        return []
    return [module.weight for module in map(unwrapped, holder.children()) if isinstance(module, nn.Linear)]


def _module(model: nn.Module, path: Sequence[str]) -> nn.Module:
    """Return the module at a path of names without wrappers."""
    module = unwrapped(model)
    for name in path:
        module = unwrapped(module.get_submodule(name))
    return module


def _without_wrappers(model: nn.Module, name: str) -> str:
    """Return the name of a parameter without the attributes in which wrappers keep a module."""
    module, kept = model, []
    for part in name.split("."):
        if wrapped_in(module) != part:
            kept.append(part)
        inner = module._modules.get(part)
        module = module if inner is None else inner  # a module may be empty, and so be false
    return ".".join(kept)
