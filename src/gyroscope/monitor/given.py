"""What a monitor is given, checked where it enters."""

from __future__ import annotations

import inspect
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from numbers import Integral, Real
from pathlib import Path
from threading import TIMEOUT_MAX
from time import strftime
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gyroscope.base.accepted import listed, real, text, whole
from gyroscope.errors import MonitorError, StoreError
from gyroscope.layers.layer import Layer, split
from gyroscope.layers.layer import layers as find_layers
from gyroscope.monitor.reference import DTYPES, Place, Precision
from gyroscope.monitor.resume import agreed
from gyroscope.store import Sink
from gyroscope.store.arguments import can_be_named
from gyroscope.store.connect import in_words


def optimizers(given: Any) -> list[Optimizer]:
    """One optimizer or several, as a list."""
    from gyroscope.control.torch_contract import bare, controller_of  # a neighbour, which monitors do without otherwise

    found = list(given) if isinstance(given, list | tuple) else [given]
    # Accelerate and others wrap an optimizer; what they call in the end is the same object.
    found = [bare(one) for one in found]
    for one in found:
        if not isinstance(one, Optimizer):
            raise MonitorError(
                f"The optimizer is a {type(one).__name__}; accepted is a torch.optim.Optimizer, or a list of them."
            )
        if not hasattr(one, "_optimizer_step_pre_hooks"):
            raise MonitorError(
                f"The optimizer is a {type(one).__name__} that does not call torch.optim.Optimizer.__init__, so it has "
                "no step hooks. Call super().__init__ in it, or watch the optimizer that it wraps."
            )
    if not found:
        raise MonitorError("The list of optimizers is empty; give the one that steps the model.")
    if len({id(one) for one in found}) < len(found):
        raise MonitorError("The same optimizer is listed twice; list each once.")
    for one in found:
        if (outer := controller_of(one)) is not None:
            name = type(outer).__name__
            raise MonitorError(
                f"The {type(one).__name__} is inside a {name}: while it steps, weights are not in their place. Watch "
                f"the {name}, which is what the loop steps."
            )
    return found


def layers(model: Any, chosen: Sequence[Layer] | str | Iterable[str] | None) -> list[Layer]:
    """The layers to measure, from a list of them, from patterns, or all."""
    if not isinstance(model, nn.Module):
        raise MonitorError(f"The model is a {type(model).__name__}; accepted is a torch.nn.Module.")
    if chosen is None:
        found = find_layers(model)
    else:
        some = listed(chosen)
        if some and all(isinstance(one, Layer) for one in some):
            found = some
        elif some and all(isinstance(one, str) for one in some):
            found = find_layers(model, include=some)
        else:
            raise MonitorError(
                "layers must be a list from gyroscope.layers(model), or glob patterns on the layers' names; given "
                f"{[type(one).__name__ for one in some][:3] or 'an empty list'}."
            )
    names = [layer.name for layer in found]
    if len(set(names)) < len(names):
        raise MonitorError("A layer is listed twice; list each once.")
    for layer in found:
        if text(layer.name) is None:
            raise MonitorError(
                f"A layer's name must be text that a file can hold, got {layer.name!r}. Rename its module, or leave it "
                "out: gyroscope.layers(model, exclude=...)."
            )
        if layer.segments > 1:
            raise MonitorError(
                f"{layer.name!r} is split into {layer.segments} segments; a monitor measures whole layers. Use "
                'granularity "tensor"; neurons=True shows how rotation is spread within a layer.'
            )
        if layer.parameter.dtype not in DTYPES:
            raise MonitorError(
                f"{layer.name!r} is {layer.parameter.dtype}; accepted are float32, float64, bfloat16 and float16. "
                "Leave it out: gyroscope.layers(model, exclude=...)."
            )
        if layer.parameter.is_meta:
            raise MonitorError(f"{layer.name!r} is on the meta device and has no values yet; watch it once it has.")
    return found


def parts(chosen: Sequence[Layer], given: Sequence[Optimizer]) -> list[list[int]]:
    """For each optimizer the positions of the layers it steps; those that none steps go with the first."""
    owner = {id(p): part for part, one in enumerate(given) for group in one.param_groups for p in group["params"]}
    found: list[list[int]] = [[] for _ in given]
    stepped = 0
    for i, layer in enumerate(chosen):
        part = owner.get(id(layer.parameter))
        stepped += part is not None
        found[part or 0].append(i)
    if not stepped:
        raise MonitorError(
            "The optimizer steps none of the model's layers. Give the optimizer that was built from this model's "
            "parameters (after FSDP2, which exchanges them)."
        )
    empty = [type(given[part]).__name__ for part, members in enumerate(found) if not members]
    if empty:
        raise MonitorError(f"The optimizer {empty[0]} steps none of the model's layers; leave it out of the list.")
    return found


def check_numbers(**values: Any) -> None:
    """Counts are whole numbers from 1 (steps from 0), a budget is a share, a timeout seconds, a threshold a number."""
    for name, value in values.items():
        if value is None and name in ("budget", "step", "timeout"):
            continue
        least = 0 if name == "step" else 1
        match name:
            case "threshold":
                fine, accepted = _is_real(value), "a finite number"
            case "budget":
                fine, accepted = _is_real(value) and value > 0, "a share of the time above 0, or None"
            case "timeout":
                fine, accepted = 0 <= real(value) <= TIMEOUT_MAX, "a number of seconds from 0, or None to wait"
            case _:
                fine = not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= least
                accepted = f"a whole number from {least}"
        if not fine:
            raise MonitorError(f"{name} is {value!r}; accepted is {accepted}.")


def _is_real(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(real(value))


def check_choices(reference_dtype: object, reference_device: object) -> None:
    """How the reference may be held."""
    for name, value, kinds in (
        ("reference_dtype", reference_dtype, get_args(Precision)),
        ("reference_device", reference_device, get_args(Place)),
    ):
        if not isinstance(value, str) or value not in kinds:
            raise MonitorError(f"{name} is {value!r}; accepted are {', '.join(map(repr, kinds))}.")


def check_loss(loss: Any) -> None:
    """A loss is a module, whose values are seen, or a function that gives them."""
    fine = loss is None or isinstance(loss, nn.Module)
    if not fine and callable(loss) and not isinstance(loss, type):
        try:
            inspect.signature(loss).bind()
            fine = True
        except (TypeError, ValueError):  # it takes arguments, or nobody knows
            pass
    if not fine:
        kind = "function" if inspect.isfunction(loss) else "class" if isinstance(loss, type) else None
        what = f"a {type(loss).__name__}" if kind is None else f"the {kind} {loss.__name__}"
        raise MonitorError(
            f"loss is {what}; accepted is a loss module, such as torch.nn.CrossEntropyLoss(), or a function without "
            "arguments that gives the value. Anything else goes to `monitor.log(loss=...)`."
        )


def check_flags(**values: Any) -> None:
    """Yes or no."""
    for name, value in values.items():
        if not isinstance(value, bool | np.bool_):
            raise MonitorError(f"{name} is {value!r}; accepted are True and False.")


def check_neurons(layers: Sequence[Layer], wanted: bool, sharded: bool) -> None:
    """Refuse what has no neurons that can be measured."""
    if wanted and sharded:
        raise MonitorError(
            "neurons=True was asked of a sharded model, whose output units lie on several ranks; measure layers "
            "(neurons=False), or neurons in a run on one device."
        )
    for layer in layers if wanted else ():
        split(layer, "row")


def sinks(given: Any) -> tuple[Sink, ...]:
    """Places to mirror a run to."""
    places = tuple(listed(given))
    for sink in places:
        missing = [name for name in ("open", "write", "close") if not callable(getattr(sink, name, None))]
        if missing or isinstance(sink, type):
            raise MonitorError(
                f"sinks holds {sink!r}, which cannot {', '.join(missing) or 'be called as it is'}; accepted are those "
                "of gyroscope.integrations, such as TensorBoard('logs'), or what has open, write and close."
            )
    return places


def folder(run: Any, *, shared: bool) -> Path | None:
    """Where to record, wherever the job goes: as given, or a new folder under `runs/`, which the first rank makes.

    Ranks that measure together (`shared`) hear of it. Others do not, and have None: to wait for the first rank could
    last forever, because often it alone watches.
    """
    if run is None:
        path: Path | None = None
        problem: StoreError | None = None
        if rank() == 0:
            try:
                path = made(Path("runs").absolute() / strftime("%Y-%m-%d_%H-%M-%S"))
            except StoreError as error:
                problem = error
        path, problem = agreed((path, problem), shared)
        if problem is not None:
            raise problem
        return path
    if not isinstance(run, str | os.PathLike) or not str(run) or not can_be_named(os.fspath(run)):
        raise MonitorError(f"run is {run!r}; accepted is the path of a folder, such as 'runs/first'.")
    return Path(run).absolute()


def numbers(values: Any, named: Mapping[str, Any]) -> dict[str, Any]:
    """What `log` was given: numbers, and tensors of one element."""
    if values is not None and not isinstance(values, Mapping):
        raise MonitorError(f"log was given {values!r}; accepted are names and numbers, such as log(loss=0.3).")
    return {_named(name): _number(name, value) for name, value in {**(values or {}), **named}.items()}


def _named(name: Any) -> str:
    if not text(name):
        raise MonitorError(f"log was given the name {name!r}; accepted are words, such as log(loss=0.3).")
    return str(name)


def _number(name: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.numel() == 1 and not value.is_complex():
            return value.detach()
    elif isinstance(value, Real) or (isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "fiub"):
        try:
            return float(value.item() if isinstance(value, np.ndarray) else value)
        except (OverflowError, TypeError, ValueError):
            pass
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    raise MonitorError(
        f"log was given {name}={type(value).__name__}{shape}; accepted are numbers and tensors of one element "
        "(`.mean()` makes one). Words go to `note`."
    )


def meta(
    given: Mapping[str, Any] | None, model: nn.Module, optimizers: Sequence[Optimizer], **more: Any
) -> dict[str, Any]:
    """What a run remembers of where it came from."""
    try:
        own = json.loads(json.dumps({} if given is None else dict(given), allow_nan=False))
        unwritable = [key for key in own if text(key) is None]
        if unwritable:
            raise ValueError(f"the key {unwritable[0]!r} has half a letter in it")
    except (TypeError, ValueError) as error:
        raise MonitorError(f"meta cannot be kept: {error}. Accepted is what JSON can hold.") from None
    about = {
        "model": type(model).__name__,
        "torch": torch.__version__,
        "optimizers": [_optimizer(one) for one in optimizers],
        **more,
    }
    taken = [key for key in own if key in about or key == "reference_file"]
    if taken:
        raise MonitorError(
            f"`meta` must not have the keys that every run has ({', '.join([*about, 'reference_file'])}), got "
            f"{taken[0]!r}. Try {'my_' + taken[0]!r}."
        )
    return {**about, **own}


def _optimizer(optimizer: Optimizer) -> dict[str, Any]:
    group = {key: _read(value) for key, value in optimizer.param_groups[0].items() if key != "params"}
    plain: dict[str, Any] = {k: v for k, v in group.items() if isinstance(v, str) or _plain(v)}
    plain |= {key: list(value) for key, value in group.items() if isinstance(value, tuple) and all(map(_plain, value))}
    about = {"class": type(optimizer).__name__, **plain}
    # Rates and decays are recorded layer by layer; what else groups differ in no layer can be told of.
    others = [other for other in optimizer.param_groups[1:] if isinstance(other, Mapping)]
    differ = sorted(k for k in plain if k not in _BY_LAYER and any(_read(other.get(k)) != group[k] for other in others))
    if differ:
        about["differ"] = differ
    return {**about, **_around(optimizer)}


def _around(optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer around another does to the steps of that, as far as theory depends on it."""
    inner = getattr(optimizer, "inner", None)
    if inner is None:
        return {}
    found: dict[str, Any] = {"inner": type(inner).__name__}
    steppers = [inner]
    if is_dataclass(law := getattr(optimizer, "law", None)) and not isinstance(law, type):  # Layca's
        found["law"] = asdict(law)
    if isinstance(direction := getattr(optimizer, "direction", None), Optimizer):  # Graft's
        found |= {"direction": type(direction).__name__, "granularity": getattr(optimizer, "granularity", None)}
        steppers.append(direction)
    if isinstance(unsupported := getattr(optimizer, "unsupported", None), Mapping):  # a preconditioner's
        found |= {"layers": list(getattr(optimizer, "layers", ())), "unsupported": dict(unsupported)}
        # QuasiDiagonal's statistics say whether it has labels, and so scales of what layers put out.
        scales = getattr(optimizer, "scales", True)
        found |= {"labels": bool(scales), "damping": getattr(optimizer, "damping", None)}
    decays = [group.get("weight_decay", 0.0) for one in steppers for group in one.param_groups]
    found["decays"] = any(not _plain(one) or one != 0 for one in decays)
    within = _around(inner)
    return {**found, "within": within} if within else found


_BY_LAYER = ("lr", "initial_lr", "weight_decay", "name", "max_lr", "min_lr", "base_momentum", "max_momentum")


def _read(value: Any) -> Any:
    """Options that are tensors, or pairs of them, as numbers."""
    if isinstance(value, tuple):
        return tuple(map(_read, value))
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _plain(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def made(path: Path) -> Path:
    """Make the folder `path`, or the first of path-2, path-3, ... that is not there; no other job is given the same."""
    candidate, count = path, 1
    while True:
        try:
            candidate.parent.mkdir(parents=True, exist_ok=True)
            candidate.mkdir()
            return candidate
        except FileExistsError as error:
            if not path.parent.is_dir():
                raise in_words(error, candidate) from error
            count += 1
            candidate = path.with_name(f"{path.name}-{count}")
        except OSError as error:
            raise in_words(error, candidate) from error


def check_state(state: Any, names: Sequence[str], shapes: Sequence[tuple[int, ...]], optimizers: int) -> None:
    """Refuse a state that was saved for another model."""
    wanted = {"layers", "shapes", "steps", "reference", "squares"}
    if not isinstance(state, Mapping) or not wanted <= set(state):
        have = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise MonitorError(f"A monitor's state has the keys {sorted(wanted)}; given {have}. Pass what state_dict gave.")
    if whole(state.get("version", 1)) != 1:
        raise MonitorError(
            f"The state is of version {state['version']!r:.80}, of a newer Gyroscope; this one knows version 1."
        )
    kinds = {"layers": Sequence, "shapes": Sequence, "steps": Sequence, "reference": Mapping, "squares": Mapping}
    for key, kind in kinds.items():
        if not isinstance(state[key], kind):
            raise MonitorError(
                f"The state's {key!r} must be a {'list' if kind is Sequence else 'dict'}, got "
                f"{type(state[key]).__name__}; nothing was changed. Pass what state_dict() returned."
            )
    for saved, own in zip(state["layers"], names, strict=False):
        if not isinstance(saved, str) or saved != own:
            raise MonitorError(
                f"The state is of a model that has a layer {saved!r} where this one has {own!r}: it belongs to another "
                "model, or to another choice of layers. Nothing was changed."
            )
    count = len(state["layers"])
    if count != len(names):
        raise MonitorError(
            f"The state is of a model with {count} layers; this one has {len(names)}. Nothing was changed."
        )
    for key in ("reference", "squares"):
        missing = [name for name in names if name not in state[key]]
        if missing:
            raise MonitorError(f"The state's {key!r} lacks the layer {missing[0]!r}; nothing was changed.")
    for name in names:
        tensor, pair = state["reference"][name], state["squares"][name]
        if not isinstance(tensor, Tensor):
            raise MonitorError(
                f"The state's reference of {name!r} must be a tensor, got {type(tensor).__name__}; nothing was "
                "changed. Pass what state_dict() returned."
            )
        if not isinstance(pair, Sequence) or len(pair) != 2 or not all(isinstance(x, Real) for x in pair):
            raise MonitorError(
                f"The state's squares of {name!r} must be two numbers, got {pair!r}; nothing was changed. Pass "
                "what state_dict() returned."
            )
    if len(state["shapes"]) != count:
        raise MonitorError(f"The state has {len(state['shapes'])} shapes for {count} layers; nothing was changed.")
    for name, its, mine in zip(names, state["shapes"], shapes, strict=True):
        if list(map(whole, listed(its))) != list(mine):
            raise MonitorError(
                f"The state is of a model whose {name!r} has shape {tuple(listed(its))}; this one's has {tuple(mine)}. "
                "Nothing was changed."
            )
    if len(state["steps"]) != optimizers:
        raise MonitorError(
            f"The state is of {len(state['steps'])} optimizers; this monitor watches {optimizers}. Nothing was changed."
        )
    if any(whole(taken, 0) is None for taken in state["steps"]):
        raise MonitorError(
            f"The state's steps must be whole numbers >= 0, got {list(state['steps'])}; nothing was changed. Pass what "
            "state_dict() returned."
        )


def rank() -> int:
    """This process's rank; 0 where there is only one."""
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
