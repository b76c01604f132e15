"""Resuming an existing run, or a saved state: at which step, and measured from which reference."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gyroscope.base.accepted import listed, whole
from gyroscope.base.whole_file import read_whole
from gyroscope.errors import MonitorError, StoreError
from gyroscope.monitor.quantities import compute, find
from gyroscope.monitor.reference import FILE, Holding, Reference, from_source, later, with_late
from gyroscope.monitor.track import Track, products_of
from gyroscope.store import LayerInfo, Run, load
from gyroscope.store.folder import is_file, reserve, run_file, sync_folder
from gyroscope.store.lock import Lock

# The largest difference between recorded numbers, which are float32, and those of the current weights: relative, and
# for rotations also absolute, because of rounding, with w₀ held exactly or rounded.
_CLOSE = 1e-5
_EXACT, _ROUNDED = 1e-12, 3e-7


@dataclass(frozen=True)
class Saved:
    """A reference as a checkpoint or a run keeps it.

    Attributes:
        tensors: w₀ by layer, of layers that are held whole.
        squares: ⟨w₀,w₀⟩ and its correction by layer.
        samples: the elements of w₀ that are held, of sampled layers.
        frozen: layers whose w₀ is not held, because they were frozen.
    """

    tensors: Mapping[str, Tensor]
    squares: Mapping[str, Sequence[float]]
    samples: Mapping[str, Tensor] = field(default_factory=dict)
    frozen: Sequence[str] = ()

    @classmethod
    def of(cls, tracks: Sequence[Track], only: Collection[str] | None = None) -> Saved:
        """Return the reference of some tracks, of all layers or some; all ranks of a sharded model must call."""
        tensors: dict[str, Tensor] = {}
        samples: dict[str, Tensor] = {}
        squares: dict[str, list[float]] = {}
        frozen: list[str] = []
        for track in tracks:
            held = track.reference
            values = held.tensors(track.parameters(), on_host=True)
            squared = with_late(held.rr, held.late)  # they have arrived: w₀ was copied to the host after them
            for i, (layer, value) in enumerate(zip(track.layers, values, strict=True)):
                if only is not None and layer.name not in only:
                    continue
                if held.asleep[i]:
                    frozen.append(layer.name)
                elif held.drawn[i]:
                    samples[layer.name] = value
                else:
                    tensors[layer.name] = value
                squares[layer.name] = [float(squared[i]), float(held.exact[i])]
        return cls(tensors, squares, samples, frozen)

    def hold(self, track: Track, how: Holding) -> Reference:
        """Return it as the reference of a track."""
        layers, parameters = track.layers, track.parameters()
        missing = [layer.name for layer in layers if layer.name not in self.squares]
        if missing:
            raise MonitorError(f"The saved reference lacks the layer {missing[0]!r}. Pass another: reference=...")
        whole = [
            i for i, layer in enumerate(layers) if layer.name not in self.samples and layer.name not in self.frozen
        ]
        found = from_source(self.tensors, [layers[i] for i in whole], "The saved reference")
        values = dict(zip(whole, found, strict=True))
        samples = {i: self.samples[layer.name] for i, layer in enumerate(layers) if layer.name in self.samples}
        unknown = [i for i in range(len(layers)) if i not in values and i not in samples]
        held = Reference.take(
            parameters, [values.get(i) for i in range(len(layers))], how,
            frozen=[i in unknown and not p.requires_grad for i, p in enumerate(parameters)], samples=samples,
        )  # fmt: skip
        numbers = np.array([self.squares[layer.name] for layer in layers]).reshape(-1, 2)
        for i in unknown:
            if abs(held.rr[i] - numbers[i, 0]) > _CLOSE * numbers[i, 0] and not held.asleep[i]:
                raise MonitorError(
                    f"The saved reference has no copy of {layers[i].name!r}, which was frozen, and its weights have "
                    "changed since. Pass another: reference=..."
                )
        rr = np.where(held.asleep, held.rr, numbers[:, 0])
        return replace(held, rr=rr, exact=held.exact * numbers[:, 1])

    def write(self, file: Path) -> None:
        """Write it to a file that exists whole or not at all, also after a power failure."""
        new = file.with_suffix(".new")
        tensors, samples = ({name: t.cpu() for name, t in its.items()} for its in (self.tensors, self.samples))
        content: dict[str, Any] = {"tensors": tensors, "squares": dict(self.squares)}
        if samples or self.frozen:
            content |= {"samples": samples, "frozen": list(self.frozen)}
        with new.open("wb") as opened:
            torch.save(content, opened)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(new, file)
        sync_folder(file.parent)

    def add_to(self, file: Path) -> None:
        """Add it to what was held later than the reference in `file`."""
        added = later(file)
        before = Saved.read(added) if added.exists() else Saved({}, {})
        before.updated(self).write(added)

    def updated(self, other: Saved) -> Saved:
        """Return it with the layers of another in place of its own."""
        return Saved(
            {**self.tensors, **other.tensors}, {**self.squares, **other.squares}, {**self.samples, **other.samples},
            [name for name in self.frozen if name not in other.squares],
        )  # fmt: skip

    @classmethod
    def read(cls, file: Path) -> Saved:
        """Read it from such a file, with what was held later; nothing in it is executed."""
        try:
            data = read_whole(file)
            found = cls(data["tensors"], data["squares"], data.get("samples", {}), data.get("frozen", ()))
        except FileNotFoundError:
            raise MonitorError(
                f"{file} does not exist, so the reference of the run is not known. Pass it: reference=..."
            ) from None
        except Exception as error:
            raise MonitorError(
                f"{file} cannot be read ({type(error).__name__}: {error}). Pass the reference of the run: reference=..."
            ) from error
        return found.updated(cls.read(later(file))) if later(file).exists() else found


def write_all(payloads: Sequence[tuple[Saved, Path, bool]]) -> Iterator[Any]:
    """Write references, or add to them what was held later, on the writer's thread."""
    for saved, file, adds in payloads:
        if adds:
            saved.add_to(file)
        else:
            saved.write(file)
    return iter(())


def file_of(attempt: int) -> str:
    """Return the name of the file with the reference that an attempt began with.

    >>> file_of(1), file_of(3)
    ('reference.pt', 'reference-3.pt')
    """
    return FILE if attempt == 1 else FILE.replace(".pt", f"-{attempt}.pt")


class Existing:
    """An existing run of the same layers, which is locked, so that nobody else resumes it."""

    def __init__(self, run: Run, lock: Lock) -> None:
        self.path = run.path
        self.lock = lock
        self.meta = run.meta
        self.attempts = len(run.attempts)
        self.steps = run.steps
        self.last = _reached(run)
        self._rotation = run.series("rotation") if "rotation" in run.quantities else None
        self._norms = run.series("weight_norm") if "weight_norm" in run.quantities else None

    @classmethod
    def at(cls, path: Path, table: Sequence[LayerInfo]) -> Existing | None:
        """Return the run in a folder, or None. A run of other layers is rejected before anything is changed."""
        if not is_file(run_file(path)):
            return None
        lock = reserve(path)
        try:
            with load(path) as run:
                _same_layers(path, run.layer_table, tuple(table))
                return cls(run, lock)
        except BaseException:
            lock.release()
            raise

    def reference(self) -> Saved:
        """Return the reference that it was measured from."""
        return Saved.read(self.path / self.meta.get("reference_file", FILE))

    def step_of(self, now: Now) -> tuple[int | None, str | None]:
        """Return the step whose recorded rotations and norms are those of the current weights, the nearest one.

        Layers that were frozen or zero have no recorded rotation: their norms are compared alone.

        Returns:
            The step, and None; or None, and why there is none.
        """
        if self._rotation is None or (self._norms is None and np.isnan(self._rotation).all()):
            return None, "it has no recorded rotations to compare the current weights with"
        unknown = np.isnan(self._rotation)
        slack = np.where(now.exact == 1.0, _EXACT, _ROUNDED)
        with np.errstate(all="ignore"):
            turned = abs(self._rotation - now.rotation) / (_CLOSE * now.rotation + slack)
            turned[unknown] = 0.0
            if self._norms is None:
                grown = np.where(unknown.all(1, keepdims=True), np.inf, 0.0)
            else:
                grown = abs(self._norms - now.norms) / (_CLOSE * now.norms)
                grown[(self._norms == 0) & (now.norms == 0)] = 0.0
        far = np.nan_to_num(np.maximum(turned, grown), nan=np.inf).max(1)
        nearest = np.flatnonzero((far <= 1.0) & (far == far.min(initial=np.inf)))
        if not len(nearest):
            return None, "none of its steps has the current weights"
        return int(self.steps[nearest[-1]]), None


def _reached(run: Run) -> int:
    """Return the last step of which anything is known: of a killed run, it may be later than the last measured one."""
    found = run.steps[-1:].tolist()
    with suppress(StoreError):  # a run with damaged numbers or events can still be resumed
        found += [int(curve.steps[-1]) for curve in run.scalars.values()]
    with suppress(StoreError):
        found += [event.step for event in run.events]
    return max(found, default=0)


def _same_layers(path: Path, theirs: Sequence[LayerInfo], own: Sequence[LayerInfo]) -> None:
    """Reject a run of other layers."""
    parts = [max((info.part for info in infos), default=0) + 1 for infos in (theirs, own)]
    if parts[0] != parts[1]:
        raise MonitorError(
            f"{path} holds a run whose layers were stepped by {parts[0]} optimizers; here {parts[1]} step them. Pass "
            "another folder."
        )
    for a, b in zip(theirs, own, strict=False):
        if (a.name, tuple(a.shape), a.part) != (b.name, tuple(b.shape), b.part):
            raise MonitorError(
                f"{path} holds a run of another model: it has {a.name!r} of shape {tuple(a.shape)} "
                f"where this one has {b.name!r} of shape {tuple(b.shape)}. Pass another folder."
            )
    if len(theirs) != len(own):
        raise MonitorError(
            f"{path} holds a run of another model or another choice of layers: it has {len(theirs)} layers, this one "
            f"{len(own)}. Pass another folder."
        )


@dataclass(frozen=True)
class Now:
    """Current weights compared with a saved reference, one number per layer."""

    rotation: npt.NDArray[np.float64]
    norms: npt.NDArray[np.float64]
    exact: npt.NDArray[np.float64]

    @classmethod
    def of(cls, tracks: Sequence[Track], members: Sequence[Sequence[int]], saved: Saved) -> Now:
        """Measure them; all ranks of a sharded model must call together."""
        rotation, norms, exact = np.full((3, sum(map(len, members))), np.nan)
        for track, positions in zip(tracks, members, strict=True):
            probe = Track(track.layers, track.optimizer, saved.hold(track, Holding()), moves=False)
            measured = probe.measure(gradients=False)
            measured.wait()
            values = compute(find(["rotation", "weight_norm"]), products_of([measured]))
            where = list(positions)
            rotation[where], norms[where] = values["rotation"][0], values["weight_norm"][0]
            exact[where] = probe.reference.exact
        return cls(rotation, norms, exact)


@dataclass(frozen=True)
class Beginning:
    """Start of recording.

    Attributes:
        step: the step that training is at.
        said: the reason, in words.
        new_reference: True if the reference has to be saved.
        adopt: the run's own reference, if rotation is to be measured from it.
        warning: a warning for the user.
        hides: True if the run has later steps, which are then no longer shown.
    """

    step: int
    said: str
    new_reference: bool
    adopt: Saved | None = None
    warning: str | None = None
    hides: bool = False


def beginning(
    existing: Existing | None,
    tracks: Sequence[Track],
    members: Sequence[Sequence[int]],
    *,
    loaded: bool,
    step: int | None,
    own_reference: bool,
    shared: bool,
) -> Beginning:
    """Decide where recording begins: in a new run, at a loaded state, or at the step that has these weights.

    With `shared`, several ranks decide together, and only the first has seen the run.
    """
    saved: Saved | None = None
    problem: str | None = None
    if existing is not None:
        try:
            saved = existing.reference()
        except MonitorError as error:
            problem = str(error)
    there, saved, problem = agreed((existing is not None, saved, problem), shared)
    at = max(track.taken for track in tracks)
    if not there:
        return Beginning(at if loaded else step or 0, f"{sum(map(len, members))} layers", True)
    (last,) = agreed((None if existing is None else existing.last,), shared)
    if loaded:
        same = saved is not None and dict(saved.squares) == dict(Saved.of(tracks).squares)
        return Beginning(at, f"resumed from a checkpoint at step {at}", not same, hides=at < last)
    if step is None and saved is not None:
        try:
            now = Now.of(tracks, members, saved)
        except MonitorError as error:
            saved, problem = None, str(error)
        else:
            step, problem = agreed((None, None) if existing is None else existing.step_of(now), shared)
    if step is not None:
        if saved is None and not own_reference:
            raise MonitorError(problem or "The run has no reference.")
        adopted = None if own_reference else saved
        return Beginning(step, f"resumed at step {step}", own_reference, adopted, hides=step < last)
    warning = (
        f"holds a run of this model up to step {last}, but {problem}: a new attempt is recorded from step 0, and the "
        "old one is kept. To resume it, load its checkpoint before `watch`, pass `step=`, or call "
        "`monitor.load_state_dict`."
    )
    said = f"a new attempt; the previous one reached step {last}"
    return Beginning(0, said, True, warning=warning, hides=True)


def agreed(values: tuple[Any, ...], shared: bool) -> tuple[Any, ...]:
    """Return the first rank's values if several ranks decide together.

    >>> agreed((1, "a"), shared=False)
    (1, 'a')
    """
    if not shared:
        return values
    box = [values]
    torch.distributed.broadcast_object_list(box, 0)
    return box[0]


def rank() -> int:
    """Return the rank of this process; 0 if there is only one."""
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def check_state(state: Any, names: Sequence[str], shapes: Sequence[tuple[int, ...]], optimizers: int) -> None:
    """Reject a state that was saved for another model."""
    wanted = {"layers", "shapes", "steps", "reference", "squares"}
    if not isinstance(state, Mapping) or not wanted <= set(state):
        have = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise MonitorError(f"`state` must have the keys {sorted(wanted)}, got {have}. Pass what state_dict() returned.")
    if whole(state.get("version", 1)) != 1:
        raise MonitorError(
            f"`state` must be of version 1, got version {state['version']!r:.80} of a newer Gyroscope. Upgrade: "
            "pip install --upgrade gyroscope"
        )
    kinds = {"layers": Sequence, "shapes": Sequence, "steps": Sequence, "reference": Mapping, "squares": Mapping}
    kinds |= {key: kind for key, kind in (("samples", Mapping), ("frozen", Sequence)) if key in state}
    for key, kind in kinds.items():
        if not isinstance(state[key], kind):
            raise MonitorError(
                f"`state[{key!r}]` must be a {'list' if kind is Sequence else 'dict'}, got a "
                f"{type(state[key]).__name__}. Nothing was changed. Pass what state_dict() returned."
            )
    for saved, own in zip(state["layers"], names, strict=False):
        if not isinstance(saved, str) or saved != own:
            raise MonitorError(
                f"`state` must be of this model and this choice of layers, got the layer {saved!r} in the place of "
                f"{own!r}. Nothing was changed."
            )
    count = len(state["layers"])
    if count != len(names):
        raise MonitorError(f"`state` must be of a model with {len(names)} layers, got {count}. Nothing was changed.")
    its = {"reference": state["reference"], "samples": state.get("samples", {})}
    known = {*its["reference"], *its["samples"], *map(str, state.get("frozen", ()))}
    for key, there in (("reference", known), ("squares", state["squares"])):
        missing = [name for name in names if name not in there]
        if missing:
            raise MonitorError(
                f"`state[{key!r}]` must have all layers, got none named {missing[0]!r}. Nothing was changed."
            )
    for name in names:
        where = next((one for one, tensors in its.items() if name in tensors), None)
        pair = state["squares"][name]
        if where is not None and not isinstance(tensor := its[where][name], Tensor):
            raise MonitorError(
                f"`state[{where!r}][{name!r}]` must be a tensor, got a {type(tensor).__name__}. Nothing was "
                "changed. Pass what state_dict() returned."
            )
        size = prod(shapes[names.index(name)])
        if where == "samples" and not 0 < its[where][name].numel() <= size:
            raise MonitorError(
                f"`state['samples'][{name!r}]` must have at most {size:,} elements, got {its[where][name].numel():,}. "
                "Nothing was changed. Pass what state_dict() returned."
            )
        if not isinstance(pair, Sequence) or len(pair) != 2 or not all(isinstance(x, Real) for x in pair):
            raise MonitorError(
                f"`state['squares'][{name!r}]` must be two numbers, got {pair!r:.80}. Nothing was changed. Pass what "
                "state_dict() returned."
            )
    if len(state["shapes"]) != count:
        raise MonitorError(
            f"`state['shapes']` must have {count} shapes, got {len(state['shapes'])}. Nothing was changed."
        )
    for name, its, mine in zip(names, state["shapes"], shapes, strict=True):
        if list(map(whole, listed(its))) != list(mine):
            raise MonitorError(
                f"`state` must be of a model whose {name!r} has shape {tuple(mine)}, got {tuple(listed(its))}. Nothing "
                "was changed."
            )
    if len(state["steps"]) != optimizers:
        raise MonitorError(
            f"`state` must be of {optimizers} optimizers, got {len(state['steps'])}. Nothing was changed."
        )
    if any(whole(taken, 0) is None for taken in state["steps"]):
        raise MonitorError(
            f"`state['steps']` must be whole numbers ≥ 0, got {list(state['steps'])}. Nothing was changed. Pass what "
            "state_dict() returned."
        )
