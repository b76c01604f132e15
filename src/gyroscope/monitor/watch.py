"""`watch`: one line in a training loop that measures and records every layer, and the checks of its arguments."""

from __future__ import annotations

import inspect
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from pathlib import Path
from time import strftime
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gyroscope.base.accepted import choice, listed, real, text, whole
from gyroscope.diagnosis.diagnose import checked_kinds
from gyroscope.diagnosis.finding import Finding
from gyroscope.errors import ConditioningError, MonitorError, StoreError
from gyroscope.layers.layer import Layer, chosen_layers, split
from gyroscope.layers.untouched import bare as bare_model
from gyroscope.monitor import resume
from gyroscope.monitor.clock import Pace
from gyroscope.monitor.live_page import show
from gyroscope.monitor.monitor import Monitor, Raised, check_numbers
from gyroscope.monitor.quantities import find
from gyroscope.monitor.recorder import About
from gyroscope.monitor.reference import (
    DTYPES,
    Holding,
    Place,
    Precision,
    Source,
    from_source,
    frozen_like,
    standard_error,
)
from gyroscope.store import LayerInfo, Sink
from gyroscope.store.arguments import can_be_named
from gyroscope.store.connect import in_words
from gyroscope.vectors.layout import any_sharded

if TYPE_CHECKING:
    from gyroscope.conditioning.schedule import Schedule


def watch(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    run: str | Path | None = None,
    every: int = 1,
    budget: float | None = 0.01,
    layers: Sequence[Layer] | str | Iterable[str] | None = None,
    quantities: Sequence[str] | None = None,
    neurons: bool = False,
    loss: Any = None,
    *,
    activations: bool = True,
    detail_every: int = 100,
    threshold: float = 0.0,
    reference: Source | None = None,
    reference_dtype: Precision = "auto",
    reference_device: Place = "auto",
    reference_memory: float | str | None = None,
    step: int | None = None,
    meta: Mapping[str, Any] | None = None,
    sinks: Sequence[Sink] = (),
    conditioning: int | Literal["budget"] | Schedule | None = None,
    diagnose: bool = True,
    on_finding: Callable[[Finding], object] | Literal["raise"] | None = None,
    mute: str | Iterable[str] = (),
    live: bool | int = False,
) -> Monitor:
    """Measure and record what every layer of `model` does at each step of `optimizer`.

    Nothing about training changes: losses, gradients, weights, random numbers and state dicts are the same to the last
    bit. Rotation is measured from the weights as they are now, w₀, unless you pass a `reference`.

    Args:
        model: any module; it may be compiled, data-parallel or sharded with FSDP2.
        optimizer: the optimizer whose steps are measured; a list if several step parts of the model, as in a GAN.
        run: the folder to record in; by default a new one under `runs/`. A folder that holds a run of the same model is
            resumed: at the recorded step that has the same weights, if there is one; otherwise as a new attempt from
            step 0, until you load a state with `load_state_dict`. Earlier records are kept.
        every: the number of steps between measurements. Step 0 and the last step are always recorded.
        budget: the share of the training time that measuring may take, including hooks and the writer's thread. The
            interval is stretched to stay within it, after the first 50 measured steps, which show the cost, and not
            before 5 seconds of training or 1,000 measured steps have passed. None: never stretch it.
        layers: the layers to measure, from `gyroscope.layers`, or glob patterns on their names.
        quantities: the names of quantities on the weight side; by default all of `gyroscope.monitor.known`.
        neurons: also measure how rotation is spread over the output units of each layer.
        loss: a loss module, whose value is recorded whenever it is computed, or a function without arguments, which is
            called after a measured step and returns the loss.
        activations: on sampled steps, also measure dying and full units, activation means and ranks. Forward hooks are
            attached on these steps only.
        detail_every: the number of steps between sampled steps. Everything that needs more than inner products is
            measured on sampled steps.
        threshold: an output is active above this, in layers that no activation module follows.
        reference: measure rotation from here: a model, a state dict, the path of a checkpoint, or the folder of a run.
            "pretrained" means the weights as they are now, which is also the default.
        reference_dtype: "float32", "bfloat16" or "auto", which rounds the large layers of large models.
        reference_device: "device", "cpu" (pinned memory, streamed) or "auto", which decides by the free memory.
        reference_memory: the most that w₀ may take on each rank, in bytes or as text such as "2 GiB". If it takes more,
            samples of the largest layers are held, and their rotation is an estimate. Frozen layers take nothing.
        step: the step that training is at, to resume a run whose checkpoint has no monitor state.
        meta: further information to keep with the run: anything that JSON can hold, under keys that Gyroscope does not
            use.
        sinks: further places to mirror the run to, from `gyroscope.integrations`.
        conditioning: the number of steps between analyses of the conditioning of each layer (`gyroscope.condition`),
            which use the forward and backward passes of training itself; "budget" spaces them to stay within the
            budget. The loss must be a mean over the batch; for other losses pass a `gyroscope.conditioning.Schedule`.
        diagnose: evaluate the rules of `gyroscope.diagnose` while training, on the writer's thread and within the
            budget. Each alarm is recorded as an event and logged once.
        on_finding: called with each alarm (a `gyroscope.diagnosis.Finding`), on the writer's thread; or "raise", to
            raise a `FindingError` in the training loop, at the next step after a serious finding.
        mute: kinds of finding to leave out.
        live: also show the run in a browser while it is recorded: True on any free port, or a port. A process of its
            own serves the page (docs/live.md) until this process ends; its address is printed, and is `monitor.live`.

    Returns:
        The monitor, with `log`, `note`, `flush`, `sample`, `cost` and `close`. It is also a context manager.

    Example:
        >>> import tempfile, torch, gyroscope
        >>> folder = tempfile.TemporaryDirectory()
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with gyroscope.watch(model, optimizer, f"{folder.name}/first") as monitor:
        ...     for _ in range(3):
        ...         loss = model(torch.ones(16, 4)).square().mean()
        ...         optimizer.zero_grad(); loss.backward(); optimizer.step()
        ...         monitor.log(loss=loss)
        >>> run = gyroscope.load(f"{folder.name}/first")
        >>> run.layers, run.steps.tolist(), run.series("rotation").shape
        (('0.weight', '2.weight'), [0, 1, 2, 3], (4, 2))
        >>> run.close(); folder.cleanup()
    """
    check_numbers(every=every, budget=budget, detail_every=detail_every, step=step, threshold=threshold)
    choice(reference_dtype, "reference_dtype", get_args(Precision), MonitorError)
    choice(reference_device, "reference_device", get_args(Place), MonitorError)
    how = Holding(reference_dtype, reference_device, _memory(reference_memory))
    _check_flags(neurons=neurons, activations=activations, diagnose=diagnose)
    _check_on_finding(on_finding)
    _check_live(live)
    muted = checked_kinds(mute)
    _check_loss(loss)
    analyses = None if conditioning is None else _schedule(conditioning, budget)
    every, budget = int(every), None if budget is None else float(budget)
    places = _sinks(sinks)
    optimizers = _optimizers(optimizer)
    chosen = measured_layers(model, layers)
    parts = _parts(chosen, optimizers)
    wanted = find(quantities)
    facts = facts_of(model, chosen, optimizers)
    values = None if reference is None or reference == "pretrained" else from_source(reference, chosen)
    how, sampled = _sampled(chosen, values, parts, how)
    its_meta = meta_of(meta, model, optimizers, every=every, budget=budget, facts=facts, **sampled)
    sharded = any_sharded(layer.parameter for layer in chosen)
    _check_neurons(chosen, neurons, sharded, how)
    path = folder_of(run, shared=sharded)
    # Everything but the folder has been checked, and nothing has been changed.
    part_of = {i: part for part, members in enumerate(parts) for i in members}
    table = [
        LayerInfo(layer.name, layer.kind, tuple(layer.parameter.shape), part_of[i]) for i, layer in enumerate(chosen)
    ]
    about = About(
        path=path or Path(),  # ranks without a path do not use it
        layers=table, members=parts, quantities=wanted, meta=its_meta, sinks=places, writes=resume.rank() == 0,
        shared=sharded, held=how, diagnoses=bool(diagnose), mute=muted,
        on_finding=Raised() if on_finding == "raise" else on_finding,
    )  # fmt: skip
    pace = Pace(
        every=every, budget=budget, detail_every=int(detail_every), details=activations or neurons, shared=sharded,
        conditioning=None if analyses is None else analyses.every,
    )  # fmt: skip
    try:
        monitor = Monitor(
            model, chosen, optimizers, about, pace, path=path, loss=loss, activations=activations, neurons=neurons,
            threshold=threshold, conditioning=analyses, reference=values, step=None if step is None else int(step),
        )  # fmt: skip
    except BaseException:
        if run is None and path is not None:
            with suppress(OSError):  # it holds a run already
                path.rmdir()
        raise
    if live and about.writes:
        monitor.live = show(about.path, port=0 if isinstance(live, bool | np.bool_) else int(live))
    return monitor


def _optimizers(given: Any) -> list[Optimizer]:
    """Return one optimizer or several as a list."""
    # The only use of control, which is loaded when needed.
    from gyroscope.control.torch_contract import bare, check_holds_parameters, controller_of

    found = list(given) if isinstance(given, list | tuple) else [given]
    for one in found:
        check_holds_parameters(one, MonitorError)
    # Accelerate and others wrap an optimizer, and call the wrapped object in the end.
    found = [bare(one) for one in found]
    for one in found:
        if not isinstance(one, Optimizer):
            raise MonitorError(
                f"`optimizer` must be a torch.optim.Optimizer or a list of them, got a {type(one).__name__}."
            )
        if not hasattr(one, "_optimizer_step_pre_hooks"):
            raise MonitorError(
                f"`optimizer` must have step hooks, got a {type(one).__name__} that does not call "
                "torch.optim.Optimizer.__init__. Call super().__init__ in it, or watch the optimizer that it wraps."
            )
    if not found:
        raise MonitorError(
            "`optimizer` must name at least one optimizer, got an empty list. Pass the one that steps the model."
        )
    if len({id(one) for one in found}) < len(found):
        raise MonitorError("`optimizer` must name each optimizer once, got the same one twice.")
    for one in found:
        if (outer := controller_of(one)) is not None:
            name = type(outer).__name__
            raise MonitorError(
                f"`optimizer` must be the one that the loop steps, got a {type(one).__name__} inside a {name}: while "
                f"it steps, the weights are moved away. Watch the {name}."
            )
    return found


def measured_layers(model: Any, given: Sequence[Layer] | str | Iterable[str] | None) -> list[Layer]:
    """Return the layers to measure, from a list of layers, from patterns, or all of the model."""
    found = chosen_layers(model, given, MonitorError)
    names = [layer.name for layer in found]
    if len(set(names)) < len(names):
        raise MonitorError("`layers` must name each layer once, got one of them twice.")
    for layer in found:
        if text(layer.name) is None:
            raise MonitorError(
                f"`layers` must have names that a file can hold, got {layer.name!r}. Rename the module, or leave the "
                "layer out: gyroscope.layers(model, exclude=...)."
            )
        if layer.segments > 1:
            raise MonitorError(
                f"`layers` must be whole layers, got {layer.name!r} in {layer.segments} segments. Use granularity "
                '"tensor"; neurons=True shows how rotation is spread within a layer.'
            )
        if layer.parameter.dtype not in DTYPES:
            raise MonitorError(
                f"`layers` must be float32, float64, bfloat16 or float16, got {layer.name!r} in "
                f"{layer.parameter.dtype}. Leave it out: gyroscope.layers(model, exclude=...)."
            )
    return found


def _parts(chosen: Sequence[Layer], given: Sequence[Optimizer]) -> list[list[int]]:
    """Return the positions of the layers that each optimizer steps; layers that none steps go with the first."""
    owner = {id(p): part for part, one in enumerate(given) for group in one.param_groups for p in group["params"]}
    found: list[list[int]] = [[] for _ in given]
    stepped = 0
    for i, layer in enumerate(chosen):
        part = owner.get(id(layer.parameter))
        stepped += part is not None
        found[part or 0].append(i)
    if not stepped:
        raise MonitorError(
            "`optimizer` must step layers of the model, got one that steps none. Pass the optimizer that was built "
            "from this model's parameters (after FSDP2, which exchanges them)."
        )
    empty = [type(given[part]).__name__ for part, members in enumerate(found) if not members]
    if empty:
        raise MonitorError(
            f"`optimizer` must step layers of the model, got {empty[0]}, which steps none. Leave it out."
        )
    return found


_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{between}B": base**power
    for power, prefix in enumerate("KMGT", 1)
    for between, base in (("", 1000), ("I", 1024))
}


def _memory(given: Any) -> int | None:
    """Return a number of bytes, given as a number or as text.

    >>> _memory("1.5 GiB"), _memory("200MB"), _memory(2e9), _memory(None)
    (1610612736, 200000000, 2000000000, None)
    """
    if given is None:
        return None
    amount = real(given)
    if isinstance(given, str) and (found := re.fullmatch(r"\s*([\d.]+)\s*([A-Za-z]*)\s*", given)):
        with suppress(ValueError):
            amount = float(found[1]) * _UNITS.get(found[2].upper(), math.nan)
    if not (math.isfinite(amount) and amount >= 1):
        raise MonitorError(
            f"`reference_memory` must be a number of bytes ≥ 1, as a number or as text, got {given!r:.80}. Try '2 GiB'."
        )
    return int(amount)


def _sampled(
    layers: Sequence[Layer], values: Sequence[Tensor] | None, parts: Sequence[Sequence[int]], how: Holding
) -> tuple[Holding, dict[str, Any]]:
    """Return how w₀ is held within the limit, and for the run's meta the sizes and errors of samples, if there are any.

    The standard error of a rotation d is d(2 − d) times the "error" of its layer.
    """
    if how.limit is None:
        return how, {}
    weights = [layer.parameter for layer in layers]
    asleep = frozen_like(weights, values)
    kept = [[i for i in members if not asleep[i]] for members in parts]
    dtypes = [(w if values is None else values[i]).dtype for i, w in enumerate(weights)]
    how = how.within([([weights[i] for i in members], [dtypes[i] for i in members]) for members in kept])
    drawn: dict[str, int] = {}
    for members in kept:
        counts = how.drawn([weights[i] for i in members], [dtypes[i] for i in members])
        drawn |= {layers[i].name: count for i, count in zip(members, counts, strict=True) if count}
    sizes = {layer.name: layer.parameter.numel() for layer in layers}
    errors = {name: float(f"{standard_error(count, sizes[name]):.3g}") for name, count in drawn.items()}
    return how, {"reference_sample": {"elements": drawn, "error": errors}} if drawn else {}


def _check_loss(loss: Any) -> None:
    """Reject a loss that is neither a module nor a function without arguments."""
    fine = loss is None or isinstance(loss, nn.Module)
    if not fine and callable(loss) and not isinstance(loss, type):
        try:
            inspect.signature(loss).bind()
            fine = True
        except (TypeError, ValueError):  # it takes arguments, or has no signature
            pass
    if not fine:
        kind = "function" if inspect.isfunction(loss) else "class" if isinstance(loss, type) else None
        what = f"a {type(loss).__name__}" if kind is None else f"the {kind} {loss.__name__}"
        raise MonitorError(
            f"`loss` must be a loss module, such as torch.nn.CrossEntropyLoss(), or a function without arguments that "
            f"returns the loss, got {what}. Record other values with `monitor.log(loss=...)`."
        )


def _check_on_finding(given: Any) -> None:
    """Reject what can neither be called nor is "raise"."""
    if given is not None and given != "raise" and not callable(given):
        raise MonitorError(f"`on_finding` must be a function of a finding, 'raise' or None, got {given!r:.80}.")


def _check_live(given: Any) -> None:
    """Reject what is neither a flag nor a port."""
    if not isinstance(given, bool | np.bool_) and not 1 <= (whole(given) or 0) <= 65535:
        raise MonitorError(f"`live` must be True, False or a port from 1 to 65535, got {given!r:.80}. Try True.")


def _check_flags(**values: Any) -> None:
    """Reject flags that are neither True nor False."""
    for name, value in values.items():
        if not isinstance(value, bool | np.bool_):
            raise MonitorError(f"`{name}` must be True or False, got {value!r:.80}.")


def _check_neurons(layers: Sequence[Layer], wanted: bool, sharded: bool, how: Holding) -> None:
    """Reject layers whose neurons cannot be measured."""
    if wanted and how.most is not None:
        raise MonitorError(
            "`neurons` must be False where only samples of w₀ are held, got True. Leave out `reference_memory`, or "
            "choose fewer layers."
        )
    if wanted and sharded:
        raise MonitorError(
            "`neurons` must be False for a sharded model, whose output units lie on several ranks, got True. Measure "
            "neurons in a run on one device."
        )
    for layer in layers if wanted else ():
        split(layer, "row")


def _sinks(given: Any) -> tuple[Sink, ...]:
    """Return the places to mirror a run to."""
    places = tuple(listed(given))
    for sink in places:
        missing = [name for name in ("open", "write", "close") if not callable(getattr(sink, name, None))]
        if missing or isinstance(sink, type):
            raise MonitorError(
                f"`sinks` must have the methods open, write and close, got {sink!r:.80}, "
                f"{'without ' + ', '.join(missing) if missing else 'which is a class'}. Try one of "
                "gyroscope.integrations, such as TensorBoard('logs')."
            )
    return places


def folder_of(run: Any, *, shared: bool) -> Path | None:
    """Return the absolute path to record in: as given, or a new folder under `runs/`, which the first rank makes.

    Ranks that measure together (`shared`) receive it. Other ranks get None: waiting for the first rank could last
    forever, because often only the first rank calls `watch`.
    """
    if run is None:
        path: Path | None = None
        problem: StoreError | None = None
        if resume.rank() == 0:
            try:
                path = _made(Path("runs").absolute() / strftime("%Y-%m-%d_%H-%M-%S"))
            except StoreError as error:
                problem = error
        path, problem = resume.agreed((path, problem), shared)
        if problem is not None:
            raise problem
        return path
    if not isinstance(run, str | os.PathLike) or not str(run) or not can_be_named(os.fspath(run)):
        raise MonitorError(f"`run` must be the path of a folder, got {run!r:.80}. Try 'runs/first'.")
    return Path(run).absolute()


def meta_of(
    given: Mapping[str, Any] | None, model: nn.Module, optimizers: Sequence[Optimizer], **more: Any
) -> dict[str, Any]:
    """Return the information that is kept with a run: the user's, and that of the model and its optimizers."""
    try:
        own = json.loads(json.dumps({} if given is None else dict(given), allow_nan=False))
        unwritable = [key for key in own if text(key) is None]
        if unwritable:
            raise ValueError(f"the key {unwritable[0]!r} is not valid Unicode")
    except (TypeError, ValueError) as error:
        raise MonitorError(f"`meta` must be a dict that JSON can hold, got {given!r:.80}: {error}.") from None
    about: dict[str, Any] = {
        "model": type(bare_model(model)).__name__,
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


# Rows of a weight that are compared to find units that start alike.
_ALIKE = 16


def facts_of(model: nn.Module, layers: Sequence[Layer], optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Return what is known about the objects before the first step: names of layers by fact, for `diagnose`.

    "frozen" layers need no gradient; "unheld" ones do, and no optimizer holds them; "replaced" ones are unheld while an
    optimizer holds a parameter of the same shape that is not in the model; "symmetric" ones have equal units. "foreign"
    is the number of parameters that the optimizers hold and the model does not.

    >>> import gyroscope
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> nn.init.ones_(net[1].weight) is net[1].weight
    True
    >>> facts_of(net, gyroscope.layers(net), [torch.optim.SGD(net[1].parameters(), lr=0.1)])
    {'unheld': ['0.weight'], 'symmetric': ['1.weight']}
    """
    held = {id(p): p for one in optimizers for group in one.param_groups for p in group["params"]}
    own = set(map(id, model.parameters())) | {id(layer.parameter) for layer in layers}
    foreign = [p for key, p in held.items() if key not in own]
    shapes = [tuple(p.shape) for p in foreign]
    unheld = [layer for layer in layers if layer.parameter.requires_grad and id(layer.parameter) not in held]
    replaced = [layer.name for layer in unheld if tuple(layer.parameter.shape) in shapes]
    facts = {
        "frozen": [layer.name for layer in layers if not layer.parameter.requires_grad],
        "unheld": [layer.name for layer in unheld],
        "replaced": replaced,
        "foreign": len(foreign),
        "symmetric": _symmetric(layers),
    }
    return {name: fact for name, fact in facts.items() if fact}


def _symmetric(layers: Sequence[Layer]) -> list[str]:
    """Return the layers whose units all have the same weights, other than zero."""
    whole = [
        layer for layer in layers
        if layer.parameter.dim() > 1 and layer.parameter.shape[0] > 1 and not any_sharded([layer.parameter])
    ]  # fmt: skip
    with torch.no_grad():
        alike = [
            (rows[1:] == rows[:1]).all() & (rows[0] != 0).any()
            for layer in whole
            if (rows := layer.parameter.detach()[:_ALIKE].flatten(1)).numel()
        ]
        known = torch.stack([one.cpu() for one in alike]).tolist() if alike else []
    return [layer.name for layer, one in zip(whole, known, strict=True) if one]


def _optimizer(optimizer: Optimizer) -> dict[str, Any]:
    group = {key: _read(value) for key, value in optimizer.param_groups[0].items() if key != "params"}
    plain: dict[str, Any] = {k: v for k, v in group.items() if isinstance(v, str) or _plain(v)}
    plain |= {key: list(value) for key, value in group.items() if isinstance(value, tuple) and all(map(_plain, value))}
    about = {"class": type(optimizer).__name__, **plain}
    # Learning rates and decays are recorded per layer; other differences between groups are only named.
    others = [other for other in optimizer.param_groups[1:] if isinstance(other, Mapping)]
    differ = sorted(k for k in plain if k not in _BY_LAYER and any(_read(other.get(k)) != group[k] for other in others))
    if differ:
        about["differ"] = differ
    return {**about, **_around(optimizer)}


def _around(optimizer: Optimizer) -> dict[str, Any]:
    """Return how an optimizer changes the steps of the one it wraps, as far as theory depends on it."""
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
        # Whether QuasiDiagonal has labels, and so the scales of layer outputs, follows from its statistics.
        scales = getattr(optimizer, "scales", True)
        found |= {"labels": bool(scales), "damping": getattr(optimizer, "damping", None)}
    decays = [group.get("weight_decay", 0.0) for one in steppers for group in one.param_groups]
    found["decays"] = any(not _plain(one) or one != 0 for one in decays)
    within = _around(inner)
    return {**found, "within": within} if within else found


_BY_LAYER = ("lr", "initial_lr", "weight_decay", "name", "max_lr", "min_lr", "base_momentum", "max_momentum")


def _read(value: Any) -> Any:
    """Return options that are tensors, or tuples of tensors, as numbers."""
    if isinstance(value, tuple):
        return tuple(map(_read, value))
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _plain(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _made(path: Path) -> Path:
    """Make the folder `path`, or the first of path-2, path-3, ... that does not exist; each job gets its own."""
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


def _schedule(given: Any, budget: float | None) -> Schedule:
    """Return when to analyze conditioning; its modules are loaded only here."""
    from gyroscope.conditioning.schedule import Schedule

    schedule = given if isinstance(given, Schedule) else Schedule(every=given)
    if schedule.every == "budget" and budget is None:
        raise ConditioningError(
            "`conditioning` must be a number of steps where budget=None, got 'budget'. Try 1000, or pass a budget."
        )
    return schedule
