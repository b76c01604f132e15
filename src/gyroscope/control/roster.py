"""The parameters of an optimizer that are layers: their order, rows in the ledger, and radii in a saved state."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gyroscope.control.torch_contract import OWN, Wrapper, check_state, check_whole
from gyroscope.errors import ControlError
from gyroscope.layers.layer import Layer, layers
from gyroscope.vectors.layout import is_sharded


@dataclass(frozen=True)
class Entry:
    """A controlled layer: its name, its place in forward order, and its rows in the ledger."""

    name: str
    index: int
    row: int
    segments: int = 1
    dim: int = 0

    @property
    def rows(self) -> range:
        """The layer's rows in the ledger."""
        return range(self.row, self.row + self.segments)

    def view(self, tensor: Tensor) -> Tensor:
        """Return `tensor` with the layer's segments along the leading dimension."""
        return tensor.movedim(self.dim, 0) if self.dim else tensor


class Roster:
    """The controlled layers of each group, by their position in it.

    Positions rather than parameters, because FSDP2 and Accelerate exchange the parameters of a group in place.
    """

    def __init__(self, groups: list[dict[int, Entry]]) -> None:
        self.groups = groups
        # The parameters of the groups with their shapes, once each group holds layers or others.
        self._held: list[list[tuple[weakref.ref[Tensor], torch.Size]]] = []
        # The same at the last step, which is quicker to compare with.
        self._last: list[list[Tensor]] = []

    @classmethod
    def of(cls, optimizer: Optimizer, model_or_layers: nn.Module | Sequence[Layer] | None) -> Roster:
        """Find the layers among the optimizer's parameters."""
        if isinstance(optimizer, Wrapper) and optimizer.sets_lengths:
            raise ControlError(
                f"`optimizer` must be an optimizer without a controller, got a {type(optimizer).__name__}, which "
                "itself controls the steps of its inner optimizer. Keep one of the two controllers; try "
                "torch.optim.SGD(model.parameters(), lr=3**-3)."
            )
        places = {
            id(p): (g, j) for g, group in enumerate(optimizer.param_groups) for j, p in enumerate(group["params"])
        }
        if model_or_layers is None:
            found = _every_matrix(optimizer)
        else:
            found = _named(chosen_layers(model_or_layers), places)
        if not found:
            raise ControlError(
                "The optimizer holds no layer to control: no parameter of two or more dimensions. Flattened parameters "
                "(ZeRO, FSDP1) have no layers; use FSDP2 (fully_shard) or DDP. Frozen layers are not controlled."
            )
        for g, j, name, *_ in found:
            weight = optimizer.param_groups[g]["params"][j]
            check_weight(f"Layer {name}", weight, "Exclude it: gyroscope.layers(model, exclude=...).")
        roster = cls([{} for _ in optimizer.param_groups])
        row = 0
        # Rows follow the groups, so that a group's entries have the order of its parameters; indices follow use.
        for index, (g, j, name, segments, dim) in sorted(enumerate(found), key=lambda pair: pair[1][:2]):
            roster.groups[g][j] = Entry(name, index, row, segments, dim)
            row += segments
        return roster

    @property
    def layers(self) -> int:
        """The number of controlled layers."""
        return sum(len(group) for group in self.groups)

    @property
    def rows(self) -> int:
        """The number of rows of the ledger."""
        return sum(e.segments for group in self.groups for e in group.values())

    def controlled(self) -> list[int]:
        """Return the groups that hold layers."""
        return [i for i, group in enumerate(self.groups) if group]

    def in_order(self) -> list[Entry]:
        """Return all layers in forward order."""
        return sorted((e for group in self.groups for e in group.values()), key=lambda e: e.index)

    def places(self) -> Iterator[tuple[int, int, Entry]]:
        """Yield all layers with their group and their position in it."""
        for g, entries in enumerate(self.groups):
            for j, e in entries.items():
                yield g, j, e

    def shapes(self, groups: Sequence[dict[str, Any]]) -> list[list[int]]:
        """Return the shapes of the layers, in forward order."""
        of = {e.index: list(groups[g]["params"][j].shape) for g, j, e in self.places()}
        return [of[e.index] for e in self.in_order()]

    def split(self, optimizer: Optimizer, others_lr: float | None, *, unsplittable: bool, added: bool = False) -> None:
        """Split groups so that each holds either layers or other parameters, the latter at `others_lr`.

        A scheduler that was built on the groups would not know the new ones, so this is an error. With `added`, only
        the last group is split, which was just added and has no scheduler yet.
        """
        groups = optimizer.param_groups
        first = len(groups) - 1 if added else 0
        mixed = [i for i, own in enumerate(self.groups) if 0 < len(own) < len(groups[i]["params"])]
        if mixed and unsplittable:
            if others_lr is not None:
                raise ControlError(
                    f"`others_lr` must be None with {type(optimizer).__name__}, got {others_lr!r}: it takes one group, "
                    "so that its other parameters cannot have a learning rate of their own."
                )
            self.hold(groups)
            return
        own_groups = 'groups of their own: [{"params": layers}, {"params": others}].'
        # torch's schedulers wrap the step. Others, checkpoints and some optimizers also leave an `initial_lr`.
        scheduled = hasattr(optimizer.step, "_wrapped_by_lr_sched")
        keeps_initial = "initial_lr" in optimizer.defaults
        for i in mixed if not added else ():
            if scheduled:
                raise ControlError(
                    f"Group {i} holds layers and other parameters, so that it becomes two groups, but already has a "
                    "scheduler. Wrap the optimizer first, and build the scheduler on the wrapper."
                )
            if "initial_lr" in groups[i] and not keeps_initial:
                raise ControlError(
                    f"Group {i} holds layers and other parameters, so that it becomes two groups, but has an "
                    f"`initial_lr`. The scheduler, the checkpoint or the {type(optimizer).__name__} that set it may "
                    f"not expect that. Build the optimizer with the layers and the other parameters in {own_groups}"
                )
        by_group = [name for name, value in vars(optimizer).items() if _is_by_group(value, len(groups))]
        if mixed and by_group and not added:
            raise ControlError(
                f"{type(optimizer).__name__} keeps one number per group in `{by_group[0]}`, which would be too few "
                f"when group {mixed[0]} becomes two. Build it with the layers and the other parameters in {own_groups}"
            )
        for i in mixed:
            group, own = groups[i], self.groups[i]
            rest = [j for j in range(len(group["params"])) if j not in own]
            # A rate that is a tensor is not shared, because a scheduler writes into it once per group.
            options = {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items()}
            others = {**options, **_pick(group, rest)}
            group.update(_pick(group, list(own)))
            self.groups[i] = dict(enumerate(own.values()))
            groups.append(others)
            self.groups.append({})
        if others_lr is not None:
            for i, own in enumerate(self.groups):
                if not own and i >= first:
                    groups[i] |= {"lr": others_lr, "initial_lr": others_lr} if keeps_initial else {"lr": others_lr}
        self.hold(groups)

    def hold(self, groups: Sequence[dict[str, Any]]) -> None:
        """Remember which parameters the groups hold, and in which order."""
        self._held = [[(weakref.ref(p), p.shape) for p in group["params"]] for group in groups]
        self._last = []

    def refuse_changes(self, groups: Sequence[dict[str, Any]], *, begun: bool) -> None:
        """Reject groups that are no longer those of the roster, which knows layers by their positions.

        Groups without matrices that were added to the inner optimizer hold no layers, and are accepted. A parameter may
        be replaced by its own shards (FSDP2) and, before the first step has `begun`, by another of its shape.
        """
        if self._same(groups):
            if begun and not self._last:  # before, parameters that are replaced should be freed at once
                self._last = [list(group["params"]) for group in groups]
            return
        sizes, held = ([len(group["params"]) for group in groups], [len(own) for own in self._held])
        more = groups[len(held) :]
        if sizes[: len(held)] != held or any(p.dim() >= 2 for group in more for p in group["params"]):
            raise ControlError(
                f"The optimizer had groups of {held} parameters and now has groups of {sizes}, whose layers are not "
                "known; nothing was changed. Add parameters with add_param_group of the controller, or build it again "
                "after changing the groups."
            )
        known = {id(p) for own in self._held for ref, _ in own if (p := ref()) is not None}
        for g, own in enumerate(self._held):
            for j, (p, (ref, shape)) in enumerate(zip(groups[g]["params"], own, strict=True)):
                if p is not ref() and (id(p) in known or (begun and not is_sharded(p)) or p.shape != shape):
                    raise ControlError(
                        f"Parameter {j} of group {g} is not the one the controller was built on; nothing was changed. "
                        "Keep the order of a group's parameters, add others with add_param_group of the controller, "
                        "or build it again after changing the groups."
                    )
        self.groups += [{} for _ in more]
        self.hold(groups)

    def _same(self, groups: Sequence[dict[str, Any]]) -> bool:
        if len(groups) != len(self._held):
            return False
        if self._last:
            pairs = [(group["params"], own) for group, own in zip(groups, self._last, strict=True)]
            return all(len(params) == len(own) and all(map(is_, params, own)) for params, own in pairs)
        return all(
            len(group["params"]) == len(own)
            and all(p is ref() for p, (ref, _) in zip(group["params"], own, strict=True))
            for group, own in zip(groups, self._held, strict=True)
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": [], "_last": []}  # a copy holds other parameters

    def extend(self, group: dict[str, Any]) -> None:
        """Append a group that was added: its matrices become the last layers."""
        index, row = self.layers, self.rows
        own: dict[int, Entry] = {}
        taken = {entry.name for entry in self.in_order()}
        for j, (name, p) in enumerate(zip(names_of(group, len(self.groups)), group["params"], strict=True)):
            if p.dim() >= 2 and p.numel():
                known = f"group{len(self.groups)}.{name}" if name in taken else name
                own[j] = Entry(known, index + len(own), row + len(own))
        self.groups.append(own)


def chosen_layers(model_or_layers: nn.Module | Sequence[Layer]) -> list[Layer]:
    """Return the layers of a model, or a list of layers as it is; reject anything else.

    >>> [layer.name for layer in chosen_layers(nn.Linear(3, 2))]
    ['weight']
    """
    given: Any = model_or_layers
    if isinstance(given, nn.Module):
        return layers(given)
    listed = isinstance(given, Iterable) and not isinstance(given, str | bytes | Tensor | Mapping)
    chosen = list(given) if listed else []
    wrong = [one for one in chosen if not isinstance(one, Layer)]
    if wrong or not listed:
        what = f"{_called(given)} that holds {_called(wrong[0])}" if wrong else _called(given)
        raise ControlError(
            "`model_or_layers` must be a model (torch.nn.Module) or a list of layers from gyroscope.layers(model, "
            f"include=..., exclude=...), got {what}. Pass the model itself for all of its layers."
        )
    if not chosen:
        raise ControlError(
            "`model_or_layers` must be a model or a list of one or more layers from gyroscope.layers(model), got an "
            "empty list. Pass the model itself for all of its layers."
        )
    return chosen


def _called(thing: object) -> str:
    """Return what a thing is, for a message.

    >>> _called([]), _called("0.weight")
    ('a list', "'0.weight'")
    """
    return repr(thing) if isinstance(thing, str) else f"a {type(thing).__name__}"


def names_of(group: dict[str, Any], g: int) -> list[str]:
    """Return the names of the parameters of group `g`, or their positions where they have no names.

    >>> names_of({"params": list(nn.Linear(3, 2).parameters())}, 4)
    ['group4.0', 'group4.1']
    """
    return group.get("param_names") or [f"group{g}.{j}" for j in range(len(group["params"]))]


def _is_by_group(value: Any, groups: int) -> bool:
    """Return whether an attribute of an optimizer is a list of one number per group, such as AdaBound's first rates.

    >>> _is_by_group([0.1], 1), _is_by_group([0.1], 2), _is_by_group(0.1, 1)
    (True, False, False)
    """
    return isinstance(value, list) and len(value) == groups and all(isinstance(one, float | int) for one in value)


def _pick(group: dict[str, Any], positions: Sequence[int]) -> dict[str, Any]:
    picked = {"params": [group["params"][j] for j in positions]}
    if "param_names" in group:
        picked["param_names"] = [group["param_names"][j] for j in positions]
    return picked


def _every_matrix(optimizer: Optimizer) -> list[tuple[int, int, str, int, int]]:
    found = []
    for g, group in enumerate(optimizer.param_groups):
        names = names_of(group, g)
        for j, p in enumerate(group["params"]):
            if getattr(p, "_is_flat_param", False) or hasattr(p, "ds_id"):
                raise ControlError(
                    f"Parameter {names[j]} is a flattened shard (ZeRO or FSDP1), which has no layers. Use FSDP2 "
                    "(fully_shard) or DDP."
                )
            if p.dim() >= 2 and p.numel():
                found.append((g, j, names[j], 1, 0))
    return found


def _named(chosen: Sequence[Layer], places: dict[int, tuple[int, int]]) -> list[tuple[int, int, str, int, int]]:
    found, missing, seen = [], [], set()
    for layer in chosen:
        if id(layer.parameter) in seen:
            raise ControlError(f"Layer {layer.name} was given twice. Give every layer once, in forward order.")
        seen.add(id(layer.parameter))
        place = places.get(id(layer.parameter))
        if place is not None:
            found.append((*place, layer.name, layer.segments, layer.dim))
        elif layer.parameter.requires_grad:
            missing.append(layer.name)
    if missing:
        raise ControlError(
            f"The optimizer does not hold these layers of the model: {few(missing)}. Build it on this model's "
            "parameters, or pass the layers it holds: Layca(optimizer, gyroscope.layers(model, include=...)). "
            "Flattened parameters (ZeRO, FSDP1) have no layers; use FSDP2 (fully_shard) or DDP."
        )
    return found


def check_saved(state_dict: dict[str, Any], inner: Optimizer, roster: Roster) -> None:
    """Reject a state that is damaged, or that belongs to other layers than those of the roster."""
    check_whole(state_dict)
    saved, shapes = state_dict.get("layers"), state_dict.get("shapes")
    listed = [saved, shapes, *(shapes if isinstance(shapes, list | tuple) else ())]
    if not all(given is None or isinstance(given, list | tuple) for given in listed):
        raise ControlError("The state is damaged: 'layers' and 'shapes' must be lists. Load another checkpoint.")
    if saved is not None and list(saved) != (layers := [e.name for e in roster.in_order()]):
        raise ControlError(
            f"The state belongs to a model with other layers: {unlike(list(saved), layers)}. Build the model and the "
            "optimizer as they were when the state was saved."
        )
    if shapes is not None and (theirs := [list(shape) for shape in shapes]) != (
        mine := roster.shapes(inner.param_groups)
    ):
        raise ControlError(
            f"The state belongs to a model whose layers have other shapes: {unlike(theirs, mine)}. Build the model as "
            "it was when the state was saved."
        )
    check_state(inner, state_dict)
    for g, j, e in roster.places():
        own = _own_in(state_dict, g, j)
        radius, moments = own.get("radius"), own.get("norm_moments")
        if isinstance(radius, Tensor) and radius.numel() != e.segments:
            raise ControlError(
                f"The state has {radius.numel()} radii for layer {e.name}, which has {e.segments} segments. Use the "
                "granularity that it was saved with."
            )
        if radius is not None and not isinstance(radius, Tensor | float | int):
            raise ControlError(f"The state's radius of layer {e.name} must be a number, got a {type(radius).__name__}.")
        if moments is not None and getattr(moments, "shape", None) != (e.segments, 3):
            raise ControlError(f"The state is damaged: its moments of the norm of layer {e.name} do not fit the layer.")
    numbers = [one.reshape(-1).cpu() for own in own_in(state_dict, roster).values() for one in own.values()]
    if numbers and not bool(torch.isfinite(torch.cat(numbers)).all()):
        raise ControlError("The state is damaged: it holds radii that are not finite. Load another checkpoint.")


def own_in(state_dict: dict[str, Any], roster: Roster) -> dict[int, dict[str, Tensor]]:
    """Return copies of what Layca keeps in a state, by layer; the state may hold views of our own."""
    found = {}
    for g, j, e in roster.places():
        own = _own_in(state_dict, g, j)
        if "radius" in own:
            found[e.index] = {k: torch.as_tensor(v, dtype=torch.float64).detach().clone() for k, v in own.items()}
    return found


def _own_in(state_dict: dict[str, Any], g: int, j: int) -> dict[str, Any]:
    """Return what a state holds of Layca's for parameter j of group g."""
    kept = state_dict["state"].get(state_dict["param_groups"][g]["params"][j], {})
    return {name: kept[name] for name in OWN if kept.get(name) is not None}


def check_weight(what: str, weight: Tensor, remedy: str) -> None:
    """Reject a weight that cannot be turned: complex numbers, integers, and weights that have no values yet."""
    if not weight.dtype.is_floating_point:
        raise ControlError(f"{what} must be float32, float64, bfloat16 or float16, got {weight.dtype}. {remedy}")
    if weight.is_meta:
        raise ControlError(
            f"{what} is on the meta device and has no values to turn. Call model.to_empty(device='cpu') and initialize "
            "the model, and build the optimizer after that."
        )


def few(names: Sequence[object], most: int = 5) -> str:
    """Return the first of many names, and the number of the others.

    >>> few(["a", "b"]), few(["a", "b", "c", "d"], most=2)
    ('a, b', 'a, b and 2 more')
    """
    more = len(names) - most
    return ", ".join(map(str, names[:most])) + (f" and {more} more" if more > 0 else "")


def unlike(theirs: Sequence[Any], mine: Sequence[Any]) -> str:
    """Describe where two lists begin to differ.

    >>> unlike(["a", "b"], ["a", "c"]), unlike(["a"], ["a", "b"])
    ("2 and 2; number 1 is 'b' there and 'c' here", "1 and 2; number 1 is missing there and 'b' here")
    """
    k = next((k for k, (one, other) in enumerate(zip(theirs, mine, strict=False)) if one != other), None)
    k = min(len(theirs), len(mine)) if k is None else k
    there, here = (repr(one[k]) if k < len(one) else "missing" for one in (theirs, mine))
    return f"{len(theirs)} and {len(mine)}; number {k} is {there} there and {here} here"
