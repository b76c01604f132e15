"""Measurement of the layers that one optimizer steps: their weights before and after, and its way to the host."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_double, c_float
from dataclasses import dataclass, replace
from functools import cache
from itertools import repeat
from operator import is_
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.optim import Optimizer

from gyroscope.base.transfer import to_host
from gyroscope.errors import MonitorError
from gyroscope.layers.layer import Layer
from gyroscope.monitor.bundle import Bundle, flat
from gyroscope.monitor.quantities import COLUMNS, Products
from gyroscope.monitor.reference import Reference, with_late
from gyroscope.vectors.eager import accumulator
from gyroscope.vectors.launch import on, to_device
from gyroscope.vectors.layout import any_sharded, local, plan


@dataclass(frozen=True)
class Measured:
    """One measurement, on its way from the device.

    Attributes:
        step: the number of calls of the optimizer so far.
        matrix: the inner products [layers, columns], in host memory after `wait`; next to them those of the samples, if
            some layers are sampled. Of a layer that is asleep, the column "ee" counts the elements that have changed.
        there: True for columns that were measured.
        gradients: True for layers that have a gradient.
        rr, exact, drawn, asleep, late: those of the reference (see `Reference`).
        groups: the optimizer's group of each layer, −1 for layers in none.
        lr, decay: one number per group, or a tensor that still has to arrive.
        eta: True for groups whose `lr` is a learning rate η.
        amp: of an optimizer that does the work of a GradScaler: whether it skipped this step because the gradients were
            not finite, and how many steps it has skipped. (Otherwise it has unscaled the gradients in place.)
        done: an event on the device after which everything is in host memory; None on a CPU.
        spans: on some steps, events before and after each piece of work on the device.
    """

    step: int
    matrix: Tensor
    there: npt.NDArray[np.bool_]
    gradients: npt.NDArray[np.bool_]
    rr: npt.NDArray[np.float64]
    exact: npt.NDArray[np.float64]
    drawn: npt.NDArray[np.int64]
    asleep: npt.NDArray[np.bool_]
    late: tuple[tuple[list[int], Tensor], ...]
    groups: npt.NDArray[np.int64]
    lr: list[Any]
    eta: list[bool]
    decay: list[Any]
    amp: tuple[Any, Any]
    done: Any
    spans: tuple[Any, ...]

    def wait(self) -> float | None:
        """Wait until everything is in host memory; return the seconds that the device spent on it, if known."""
        if self.done is None:
            return None
        self.done.synchronize()
        if not self.spans:
            return None
        spans = zip(self.spans[::2], self.spans[1::2], strict=True)
        return float(sum(start.elapsed_time(end) for start, end in spans)) / 1e3

    @property
    def skipped(self) -> bool:
        """True if the optimizer skipped the step because a gradient was not finite."""
        return self.amp[0] is not None and bool(self.amp[0].item())

    @property
    def true_step(self) -> int:
        """Number of the optimizer's steps so far, without skipped ones."""
        return self.step - (0 if self.amp[1] is None else int(self.amp[1].item()))


def products_of(measured: Sequence[Measured]) -> Products:
    """Return the products [measurements, layers] of measurements that have arrived, with `steps` set to 1."""
    raw = np.stack([m.matrix.numpy()[:, : len(COLUMNS)] for m in measured]).astype(np.float64)
    rr = np.stack([with_late(m.rr, m.late) if m.late else m.rr for m in measured])
    for column, name in enumerate(COLUMNS):
        values = raw[:, :, column]
        for row, m in enumerate(measured):
            if not m.there[column] or (m.skipped and {"u", "b", "g"} & set(name)):
                values[row] = np.nan
            elif "g" in name:
                values[row, ~m.gradients] = np.nan
    found = {name: raw[:, :, column] for column, name in enumerate(COLUMNS)}
    for row, m in enumerate(measured):
        if m.drawn.any():
            _from_sample(raw[row], m.matrix.numpy()[:, len(COLUMNS) :], rr[row], m.drawn > 0)
        raw[row, m.asleep] = np.nan
        found["ww"][row, m.asleep] = m.rr[m.asleep]
    # The last of each list is for layers that are in no group.
    lr = np.stack([np.array([*map(float, m.lr), np.nan])[m.groups] for m in measured])
    decay = np.stack([np.array([*map(float, m.decay), np.nan])[m.groups] for m in measured])
    eta = np.stack([np.array([*m.eta, False])[m.groups] for m in measured])
    return Products(
        **found,
        rr=rr,
        exact=np.stack([m.exact for m in measured]),
        lr=lr,
        eta=np.where(eta, lr, np.nan),
        decay=decay,
        steps=np.ones_like(lr),
    )


def _from_sample(
    raw: npt.NDArray[np.float64],
    sample: npt.NDArray[np.float64],
    rr: npt.NDArray[np.float64],
    which: npt.NDArray[np.bool_],
) -> None:
    """Replace the products with w₀ and with the last displacement of sampled layers by those of their samples.

    They are scaled so that ⟨w,w⟩ and ⟨v,v⟩ remain those of the whole layer: cosines are the samples'.

    Args:
        raw: the products of the whole layers [layers, columns].
        sample: the products of the samples.
        rr: ⟨w₀,w₀⟩ [layers].
        which: the sampled layers.
    """
    s = dict(zip(COLUMNS, sample[which].T, strict=True))
    w = dict(zip(COLUMNS, raw[which].T, strict=True))
    with np.errstate(all="ignore"):
        scale = w["ww"] / s["ww"]
        rr[which] = np.maximum(s["ww"] - 2 * s["we"] + s["ee"], 0.0) * scale
        w["we"], w["ee"] = s["we"] * scale, s["ee"] * scale
        w["pp"] = np.where(np.isnan(w["pp"]), np.nan, s["pp"] * scale)
        w["vp"] = s["vp"] * np.sqrt(w["vv"] / s["vv"] * scale)
    raw[which] = np.stack([w[name] for name in COLUMNS], axis=1)


class _Still:
    """Notices whether layers that should not move do, by a few elements of each.

    Layers that need no gradient may still be changed: as an average of other weights, or by hand.
    """

    def __init__(self, weights: Sequence[Tensor], rows: Sequence[int]) -> None:
        self._groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for i in rows:
            self._groups.setdefault((weights[i].device, weights[i].dtype), []).append(i)
        self.follow(weights)
        self._kept = [torch.cat(views) for views in self._views]

    def follow(self, weights: Sequence[Tensor]) -> None:
        """Look at weights that were exchanged or moved within their device."""
        self._views: list[list[Tensor]] = []
        for members in self._groups.values():
            flats = [flat(weights[i]) for i in members]
            self._views.append([f[:: max(1, f.numel() // _LOOKED_AT)][:_LOOKED_AT] for f in flats])
        counts = [[len(view) for view in views] for views in self._views]
        layers = [np.repeat(members, its) for members, its in zip(self._groups.values(), counts, strict=True)]
        devices = [device for device, _ in self._groups]
        self._layers = [to_device(one, device) for one, device in zip(layers, devices, strict=True)]

    def count(self, into: Tensor) -> None:
        """Add the number of changed elements to one number per layer."""
        for views, kept, layers in zip(self._views, self._kept, self._layers, strict=True):
            changed = torch.cat(views) != kept
            into.index_add_(0, layers.to(into.device), changed.to(into.device, into.dtype))


def arriving(value: Any) -> Any:
    """Return a number as it is, or a copy of a tensor that is on its way to host memory.

    >>> arriving(0.5)
    0.5
    """
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    return value.clone() if value.device.type == "cpu" else to_host(value)


# Displacements are kept in float32 up to this many elements, else in bfloat16: an error of 1e-3/√n in their cosine.
_EXACT_MOVES = 1 << 24

# The number of elements of a frozen layer that are compared with what they were.
_LOOKED_AT = 64

# An element of a gradient above this is the work of something broken.
_HUGE = 1e10

# Numbers in memory, by type.
_NUMBERS = {torch.float32: c_float, torch.float64: c_double}

# Weights that are written this many times without a step have another optimizer. A step writes them up to four times.
_STRAYS = 20

# The device is timed in this many first steps, then once in this many steps.
_TIMED = 8


class Track:
    """Measures the layers of one optimizer.

    Args:
        layers: its layers, in forward order.
        optimizer: the optimizer whose steps are measured.
        reference: w₀ of these layers.
        moves: keep displacements, to compare each with the one before.
    """

    def __init__(self, layers: Sequence[Layer], optimizer: Optimizer, reference: Reference, *, moves: bool) -> None:
        self.layers = list(layers)
        self.optimizer = optimizer
        self.reference = reference
        self.taken = 0
        self.measured_at = 0
        self.tried_at = 0  # the same, also if it could not be recorded
        self.measuring = False
        self.closure = False  # True while a closure is still to compute the gradients of the step
        self.sampling = False
        self.quiet = 0  # number of coming steps in which nothing is due, as far as is known
        self.skimming = False  # True within such a step
        self.broken = False  # True before a step whose gradients are the first that are broken
        self.on_cuda = False
        self.asked_for = 0  # number of coming steps to measure in detail, whatever the interval
        self.next_detail = 1
        self.conditioning = False
        self.comparing = False  # the step's gradient is compared with that of its own backward passes
        self.next_compared = 1
        self.next_conditioning = 1
        self.analyzed_at: int | None = None
        self.skips: Tensor | None = None
        self.caught_up = True  # True if the device had finished the last measured step when the next one began
        self._moves = moves
        self._bundles: list[Bundle] = []
        self._places = [_place(layer) for layer in self.layers]
        self._groups: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._known: tuple[Any, ...] = ()
        self._order: dict[tuple[torch.device, bool], Tensor] = {}
        self._copied: tuple[Any, ...] = ()
        self._marked: Any = None
        self._timing: bool | None = None
        self._count = 0
        self._stashed: list[Tensor | None] | None = None
        self._inside: tuple[list[Tensor], list[Tensor]] | None = None  # parameters and weights within a measured step
        self._fresh = True  # the weights are those of the last measurement
        self._restless = False  # the weights are changed between steps
        self._seen: list[Tensor] = []  # the parameters as they were last, their classes,
        self._kinds: set[type] = set()
        self._exchanges = 0  # and the number of times that either has changed
        self._sharded = False
        self._versions: list[int] = []
        self._everywhere = np.ones(len(self.layers), dtype=bool)
        self._stepped: int | None = None  # a layer that the optimizer steps,
        self._written: tuple[int, Tensor | None, int] = -1, None, 0  # and a step, the layer's parameter, its version
        self._whole = True  # the gradients of the last step that was looked at were finite
        self._still: _Still | None = None
        self._sleeping: list[tuple[Any, str]] = []
        self._directionless: list[int] = []
        self._drawn = False  # some layers are sampled
        self._pending: Measured | None = None  # shows, when it has arrived, which layers are no longer zero or still
        self._prepare(self.parameters())

    def start(self, step: int) -> None:
        """Set the step that training is at."""
        self.taken = self.measured_at = self.tried_at = step
        self.next_detail = self.next_compared = step + 1
        self.next_conditioning, self.analyzed_at = step + 1, None

    def parameters(self) -> list[Tensor]:
        """Return the layers' current parameters; FSDP2 and Accelerate swap them in place."""
        try:
            return [owner[key] for owner, key in self._places]
        except KeyError:
            places = zip(self.layers, self._places, strict=True)
            gone = next(layer.name for layer, (owner, key) in places if key not in owner)
            raise MonitorError(
                f"{gone!r} is no longer a parameter of its module (pruning and parametrizations replace it). Call "
                "watch again for the changed model."
            ) from None

    def release(self) -> None:
        """Release everything but the reference, when nothing will be measured any more."""
        for bundle in self._bundles:
            bundle.release()
        self._stashed = self._inside = None

    def before(self, *, closure: bool = False) -> None:
        """Copy the weights before a measured step; if it has a closure, `computed` follows when it has gradients."""
        parameters = self.parameters()
        weights = self._look(parameters)
        self._notice_changes(parameters)
        self.caught_up = self._marked is None or self._marked.query()
        timed = self._timing = self._is_timed()
        start = _mark(weights, timed)
        for bundle in self._bundles:
            bundle.before = bundle.copy(_chosen(weights, bundle.members))
        self._inside = parameters, weights
        if not closure:
            self.computed()
        self._copied = (start, _mark(weights, timed)) if start is not None and timed else ()

    def computed(self) -> None:
        """Copy the gradients of a step that has begun, if it overwrites them."""
        if self._inside is not None:
            self._stashed = _gradients_that_will_be_overwritten(self.optimizer, self._inside[0])

    @property
    def fresh(self) -> bool:
        """True if the weights are those of the last measurement, as far as hooks can see."""
        return self._fresh

    @property
    def directionless(self) -> list[int]:
        """Layers that have no direction to measure rotation from: their w₀ is zero."""
        return self._directionless

    @property
    def thaws(self) -> bool:
        """True if a frozen layer needs gradients now."""
        return any(key in owner and owner[key].requires_grad for owner, key in self._sleeping)

    def wake(self) -> dict[str, list[int]]:
        """Measure layers from their current weights that have begun to train, to move, or to have a direction.

        Returns:
            Their positions, under "trains", "moves" and "points".
        """
        if self._still is None and not self.directionless:
            return {}
        parameters, asleep = self.parameters(), self.reference.asleep
        trains = [i for i in np.flatnonzero(asleep).tolist() if parameters[i].requires_grad]
        counts = self._arrived(shared=self._sharded and plan([parameters], [1] * len(parameters)) is not None)
        moves = np.flatnonzero(asleep & (counts > 0)).tolist()
        points = [i for i in self.directionless if counts[i] > 0]
        found = {"trains": trains, "moves": [i for i in moves if i not in trains], "points": points}
        which = sorted({i for several in found.values() for i in several})
        if which:
            weights = self._look(parameters)
            known = self._bundles
            self.reference = self.reference.begin(which, parameters)
            for bundle in self.reference.all_bundles:
                if bundle not in known and not self._fresh:
                    bundle.anchor = bundle.anchored(_chosen(weights, bundle.members))
            self._still = None
            self._prepare(parameters)
        return {why: several for why, several in found.items() if several}

    def _arrived(self, *, shared: bool) -> npt.NDArray[np.float64]:
        """Return, per layer, a number above 0 if an earlier measurement shows that it moves or has a direction.

        Ranks that measure together wait for the measurement, on sampled steps only.
        """
        pending = self._pending
        if pending is not None and pending.done is not None:
            if shared and self.sampling:
                pending.done.synchronize()
            elif shared or not pending.done.query():
                pending = None
        if pending is None:
            return np.zeros(len(self.layers))
        self._pending = None
        products = pending.matrix.numpy()
        column = np.where(pending.asleep, products[:, COLUMNS.index("ee")], products[:, COLUMNS.index("ww")])
        return np.nan_to_num(column.astype(np.float64))

    @property
    def may_skip(self) -> bool:
        """True if the optimizer does the work of a GradScaler, and so may skip a step."""
        return getattr(self.optimizer, "found_inf", None) is not None

    @property
    def calm(self) -> bool:
        """True if steps that are not measured need nothing but counting."""
        looked_into = self.asked_for or self.sampling or self.comparing or self.conditioning
        return not (self._fresh or self._sleeping or looked_into)

    def breaks(self) -> bool:
        """Return True at the first step whose gradients are not finite, or huge, if that is free to know: on a CPU.

        A broken layer spoils the gradients of all layers. Before the step its own weights alone are broken, after it
        the weights of all layers. One element of the last layer's gradient is enough to tell.
        """
        owner, key = self._places[-1]
        parameter = owner.get(key)
        gradient = None if parameter is None else parameter.grad
        if self._sharded or type(gradient) is not Tensor or not gradient.is_cpu or gradient.layout is not torch.strided:
            return False
        kind = _NUMBERS.get(gradient.dtype)
        address = 0 if kind is None else gradient.data_ptr()
        if kind is not None and address:  # through torch, every step would take several microseconds for it
            first = kind.from_address(address).value
        else:
            first = gradient[(0,) * gradient.dim()].item() if gradient.numel() else 0.0
        before, self._whole = self._whole, abs(first) < _HUGE
        return before and not self._whole

    def pass_by(self) -> None:
        """Act before a step that is not measured: keep the weights, if the last step was measured."""
        if self._fresh:
            self._notice_changes(self.parameters())
        if self._fresh and not self._restless:
            self.anchor()
            self._fresh = False

    def unseen(self) -> None:
        """Note a step that hooks did not see; from now on every measurement keeps its weights."""
        if not self._restless:
            self._fresh, self._restless = False, True

    def rewritten(self) -> None:
        """Note that the weights were written and are the same: by a step that only created the optimizer's state."""
        if self._fresh:
            self._versions = self._seen_versions(self.parameters())

    def strays(self) -> bool:
        """Return True if weights were written many times since a call of this, without a step of the optimizer."""
        if self.measuring or self.closure or self._sharded or self._stepped is None:
            return False  # a step that evaluates closures may write weights many times
        owner, key = self._places[self._stepped]
        parameter = owner.get(key)
        if parameter is None:
            return False
        version: int = parameter._version
        taken, known, before = self._written
        if taken != self.taken or known is not parameter:
            self._written = self.taken, parameter, version
            return False
        return version - before >= _STRAYS

    def anchor(self) -> None:
        """Keep the current weights, to measure the next angle from them."""
        weights = self._look()
        for bundle in self._bundles:
            bundle.anchor = bundle.anchored(_chosen(weights, bundle.members))

    def skipped(self) -> bool:
        """Return whether the optimizer skipped this step as a GradScaler does; False if only a device knows."""
        found: Tensor | None = getattr(self.optimizer, "found_inf", None)
        if found is None:
            return False
        if found.device.type == "cpu":
            return bool(found.item())
        self.skips = found.detach().clone() if self.skips is None else self.skips + found
        return False

    def leave(self) -> None:
        """Drop the copies for a step that was to be measured, but was skipped."""
        for bundle in self._bundles:
            bundle.before = None
        self._stashed = self._inside = None

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients of the step that is measured, as they were before the optimizer overwrote them."""
        if self._stashed is not None:
            return self._stashed
        return [p.grad for p in (self.parameters() if self._inside is None else self._inside[0])]

    def measure(self, *, gradients: bool = True) -> Measured:
        """Measure the inner products of all layers, without waiting for the device; call `settle` afterwards."""
        parameters = self.parameters() if self._inside is None else self._inside[0]
        given: list[Tensor | None] = self.gradients() if gradients else [None] * len(parameters)
        over_ranks = plan([parameters], [1] * len(parameters)) if self._sharded else None
        failed: Exception | None = None
        there = self._there()
        timed = self._is_timed() if self._timing is None else self._timing
        self._timing = None
        start = _mark(parameters, timed) if timed else None
        try:
            matrix = self._matrix(parameters, given)
        except Exception as error:
            if over_ranks is None:
                raise
            # The other ranks wait for this one's part of the sums.
            device, failed = self._local(parameters)[0].device, error
            width = len(COLUMNS) * (2 if self._drawn else 1)
            matrix = torch.full((len(parameters), width), torch.nan, dtype=accumulator(device), device=device)
        if over_ranks is not None:
            matrix = over_ranks.reduce(matrix)
        if failed is not None:
            raise failed
        lr, eta, decay = self._hyper()
        if matrix.device.type != "cpu":
            matrix = to_host(matrix)
        self._marked = done = _mark(parameters, timed)
        spans = () if start is None else (*self._copied, start, done)
        self._copied = ()
        measured = Measured(
            step=self.taken,
            matrix=matrix,
            there=there,
            gradients=np.array([g is not None for g in given]) if _any_missing(given) else self._everywhere,
            rr=self.reference.rr,
            exact=self.reference.exact,
            drawn=self.reference.drawn,
            asleep=self.reference.asleep,
            late=self.reference.late,
            groups=self._groups,
            lr=lr,
            eta=eta,
            decay=decay,
            amp=(arriving(getattr(self.optimizer, "found_inf", None)), arriving(self.skips)),
            done=done,
            spans=spans,
        )
        if self._pending is None and (self._sleeping or self._directionless):
            self._pending = measured
        return measured

    def awaiting_more(self, measured: Measured) -> Measured:
        """Return the measurement with an event that also covers the copies queued since."""
        self._marked = _mark(self.parameters(), timed=False)
        return replace(measured, done=self._marked)

    def settle(self, *, recorded: bool = True) -> None:
        """Measure the next angle from now, if the measurement was recorded; otherwise from where the last one was."""
        bundles = self._bundles
        self.tried_at, self._stashed = self.taken, None
        if not recorded:
            for bundle in bundles:
                if bundle.anchor is None and bundle.before is not None and self._fresh:
                    bundle.anchor = bundle.before.clone()
                bundle.before = None
            self._fresh, self._inside = False, None
            return
        for bundle in bundles:
            bundle.before = bundle.anchor = None
        self.measured_at, self._fresh = self.taken, True
        self._versions = self._seen_versions(self.parameters() if self._inside is None else self._inside[0])
        self._inside = None
        if self._restless:
            self.anchor()

    def _matrix(self, parameters: Sequence[Tensor], given: Sequence[Any]) -> Tensor:
        weights = self._look(parameters) if self._inside is None else self._inside[1]
        if _any_missing(given):
            given = [w if g is None else g for w, g in zip(parameters, given, strict=True)]
        grads = self._local(given)
        if torch.sparse_coo in {g.layout for g in grads}:
            grads = [g.coalesce().to_dense() if g.is_sparse else g for g in grads]
        skip: Tensor | None = getattr(self.optimizer, "found_inf", None)
        reference = self.reference

        def products(bundles: Sequence[Bundle]) -> Tensor:
            parts = [b.products(_chosen(weights, b.members), _chosen(grads, b.members), skip) for b in bundles]
            return self._in_order(bundles, parts, weights)

        matrix = products(reference.bundles)
        if self._still is not None:
            self._still.count(matrix[:, COLUMNS.index("ee")])
        return torch.cat([matrix, products(reference.samples)], 1) if self._drawn else matrix

    def exchange(self, reference: Reference) -> None:
        """Measure from another reference from now on."""
        self.reference = reference
        self._fresh = True
        self._still = self._pending = None
        self._prepare(self.parameters())

    def _prepare(self, parameters: Sequence[Tensor]) -> None:
        owner = {id(p): g for g, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
        self._groups = np.array([owner.get(id(p), -1) for p in parameters], dtype=np.int64)
        stepped = np.flatnonzero((self._groups >= 0) & ~self.reference.asleep)
        self._stepped = int(stepped[0]) if len(stepped) else None
        weights = self._here(parameters)
        self.on_cuda = any(w.is_cuda for w in weights)
        self._known = self._signature(weights)
        self._shapes = [(w.shape, w.stride(), w.dtype, w.device) for w in weights]
        asleep = np.flatnonzero(self.reference.asleep).tolist()
        self._sleeping = [self._places[i] for i in asleep]
        self._directionless = np.flatnonzero((self.reference.rr == 0) & ~self.reference.asleep).tolist()
        self._drawn = bool(self.reference.drawn.any())
        self._versions = self._seen_versions(parameters)
        if not asleep:
            self._still = None
        elif self._still is None:
            self._still = _Still(weights, asleep)
        else:
            self._still.follow(weights)
        total = sum(p.numel() for p, sleeps in zip(parameters, self.reference.asleep, strict=True) if not sleeps)
        self._bundles = self.reference.all_bundles
        for bundle in self._bundles:
            # Of a layer whose w₀ is sampled, only the sample's displacements are kept.
            if self._moves and bundle.previous is None and bundle.reference is not None:
                wide = torch.promote_types(bundle.dtype, torch.float32)
                bundle.remember_moves(wide if total <= _EXACT_MOVES else torch.bfloat16)
        self._order = {}

    def _here(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return the weights on this rank; parameters that were exchanged may be sharded now."""
        same = len(parameters) == len(self._seen) and all(map(is_, parameters, self._seen))
        if (kinds := set(map(type, parameters))) != self._kinds or not same:
            self._seen, self._kinds, self._sharded = list(parameters), kinds, any_sharded(parameters)
            self._exchanges += 1
        return self._local(parameters)

    def _local(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return local(tensors) if self._sharded else list(tensors)

    def _signature(self, weights: Sequence[Tensor]) -> tuple[Any, ...]:
        groups = [len(group["params"]) for group in self.optimizer.param_groups]
        return self._exchanges, list(map(Tensor.data_ptr, weights)), groups

    def _look(self, parameters: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Return the weights on this rank. If they were exchanged or moved, the buffers follow them."""
        parameters = self.parameters() if parameters is None else parameters
        weights = self._here(parameters)
        if self._signature(weights) == self._known:
            return weights
        now = [(w.shape, w.stride(), w.dtype, w.device) for w in weights]
        if [one[0] for one in now] != [one[0] for one in self._shapes]:
            i = next(i for i, (a, b) in enumerate(zip(now, self._shapes, strict=True)) if a[0] != b[0])
            raise MonitorError(
                f"The weights of {self.layers[i].name!r} had the shape {tuple(self._shapes[i][0])} and now have "
                f"{tuple(now[i][0])}. Call watch again for the changed model."
            )
        if now != self._shapes:
            # Flat buffers have the weights' order in memory and lie on their device.
            like = [torch.empty_strided(s, t, dtype=d, device=v) for s, t, d, v in self._shapes]
            self.reference = self.reference.moved(like, weights)
            self._still = None
        self._prepare(parameters)
        return weights

    def _notice_changes(self, parameters: Sequence[Tensor]) -> None:
        """Check whether the weights were changed since they were measured (clipping, projections).

        If so, the measured weights are gone, and from now on every measurement keeps its weights.
        """
        if self._fresh and self._seen_versions(parameters) != self._versions:
            self._fresh, self._restless = False, True

    def _seen_versions(self, parameters: Sequence[Tensor]) -> list[int]:
        """Return counters that increase when a layer is changed in place; changes through `.data` are invisible."""
        if not self._sleeping:
            return [p._version for p in parameters]
        return [p._version for p, sleeps in zip(parameters, self.reference.asleep, strict=True) if not sleeps]

    def _there(self) -> npt.NDArray[np.bool_]:
        """Return which columns can be measured."""
        bundles = self._bundles
        update = any(one.before is not None for one in bundles)
        move = any(one.anchor is not None for one in bundles) or (update and self._fresh)
        return _columns_of(update, move, move and any(one.moved for one in bundles))

    def _is_timed(self) -> bool:
        """Return whether to time the device in this step; not always, because events cost the host time."""
        self._count += 1
        return self._count < _TIMED or self._count % _TIMED == 0

    def _in_order(self, bundles: Sequence[Bundle], parts: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
        """Return one row per layer; zeros for layers that are in none of the bundles."""
        if len(parts) == 1 and len(parts[0]) == len(weights):
            return parts[0]
        home = weights[0].device if not parts else parts[0].device
        matrix = torch.zeros(len(weights), len(COLUMNS), dtype=accumulator(home), device=home)
        if not parts:
            return matrix
        key = home, bundles is self.reference.samples
        if key not in self._order:
            members = [i for bundle in bundles for i in bundle.members]
            self._order[key] = to_device(np.array(members, dtype=np.int64), home)
        return matrix.index_copy_(0, self._order[key], torch.cat([part.to(home) for part in parts]))

    def _hyper(self) -> tuple[list[Any], list[bool], list[Any]]:
        """Return the rate, whether it is η, and the weight decay of each group."""
        groups = self.optimizer.param_groups
        controls, nan = getattr(self.optimizer, "controls", None), float("nan")
        steered = [controls is not None and bool(controls(g)) for g in range(len(groups))]
        lr = [
            # The `lr` of a group that `gyroscope.steer` steps plainly is ρ, and this is the ratio of η to it.
            arriving(
                group["lr"] * group["relative_lr"] if controls and "relative_lr" in group else group.get("lr", nan)
            )
            for group in groups
        ]
        pairs = zip(groups, steered, strict=True)
        decay = [0.0 if its else arriving(group.get("weight_decay", 0.0)) for group, its in pairs]
        return lr, [not its for its in steered], decay


@cache
def _columns_of(update: bool, move: bool, previous: bool) -> npt.NDArray[np.bool_]:
    """Return which columns need nothing but what is there."""
    known = {"u": update, "b": update, "v": move, "p": previous}
    return np.array([all(known.get(letter, True) for letter in name) for name in COLUMNS])


def _place(layer: Layer) -> tuple[Any, str]:
    """Return the dictionary that holds a layer's parameter, and its key."""
    *path, key = layer.attribute.split(".")
    module: Any = layer.module
    for name in path:
        module = module[name] if hasattr(module, "__getitem__") and name in module else getattr(module, name)
    return module._parameters, key


def _gradients_that_will_be_overwritten(
    optimizer: Optimizer, parameters: Sequence[Tensor]
) -> list[Tensor | None] | None:
    """Return copies of the gradients if the step overwrites them."""
    if not _overwrites_gradients(optimizer):
        return None
    having = [i for i, p in enumerate(parameters) if p.grad is not None and not p.grad.is_sparse]
    copies: list[Tensor | None] = [p.grad for p in parameters]
    grads = [p.grad for p in parameters if p.grad is not None and not p.grad.is_sparse]
    for i, copy in zip(having, torch._foreach_mul(grads, 1.0) if grads else (), strict=True):
        copies[i] = copy
    return copies


def _overwrites_gradients(optimizer: Optimizer) -> bool:
    """Return whether a step overwrites gradients, as torch's Nesterov momentum does, also within a wrapper.

    >>> sgd = torch.optim.SGD([torch.ones(1)], lr=0.1, momentum=0.9, nesterov=True)
    >>> wrapper = torch.optim.Adam([torch.ones(1)])
    >>> wrapper.inner = sgd
    >>> _overwrites_gradients(sgd), _overwrites_gradients(wrapper)
    (True, True)
    """
    inside: dict[int, Optimizer] = {}
    waiting = [optimizer]
    while waiting:
        one = waiting.pop()
        if isinstance(one, torch.optim.SGD) and any(group.get("nesterov") for group in one.param_groups):
            return True
        inside[id(one)] = one
        waiting += [part for part in vars(one).values() if isinstance(part, Optimizer) and id(part) not in inside]
    return False


def _any_missing(gradients: Sequence[Tensor | None]) -> bool:
    return any(map(is_, gradients, repeat(None)))


def _chosen(tensors: list[Tensor], members: Sequence[int]) -> list[Tensor]:
    return tensors if len(members) == len(tensors) else [tensors[i] for i in members]


def _mark(weights: Sequence[Tensor], timed: bool) -> Any:
    """Record an event on the current stream of a GPU; return None on other devices."""
    device = weights[0].device
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
    with on(device):
        event.record()
    return event
