"""The layers that one optimizer steps: their weights before and after, and one measurement of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.optim import Optimizer

from gyroscope.base.transfer import to_host
from gyroscope.errors import MonitorError
from gyroscope.layers.layer import Layer
from gyroscope.monitor.measured import Measured, arriving
from gyroscope.monitor.products import COLUMNS
from gyroscope.monitor.reference import Reference
from gyroscope.vectors.eager import accumulator
from gyroscope.vectors.launch import on, to_device
from gyroscope.vectors.layout import local, plan

# Displacements are kept in float32 up to so many elements, then in bfloat16: an error of 1e-3/√n in their cosine.
_EXACT_MOVES = 1 << 24

# The device's time is taken in the first so many steps, and then once in so many.
_TIMED = 8


class Track:
    """Measures the layers of one optimizer.

    Args:
        layers: its layers, in forward order.
        optimizer: whose steps are measured.
        reference: w₀ of these layers.
        moves: whether displacements are kept, to compare each with the one before.
    """

    def __init__(self, layers: Sequence[Layer], optimizer: Optimizer, reference: Reference, *, moves: bool) -> None:
        self.layers = list(layers)
        self.optimizer = optimizer
        self.reference = reference
        self.taken = 0
        self.measured_at = 0
        self.tried_at = 0  # the same, whether or not it could be recorded
        self.measuring = False
        self.sampling = False
        self.asked_for = 0  # so many of the coming steps are measured in detail, whatever the interval
        self.next_detail = 1
        self.conditioning = False
        self.next_conditioning = 1
        self.analysed_at: int | None = None
        self.skips: Tensor | None = None
        self.caught_up = True  # whether the device had done all of the last measured step when the next one came
        self._moves = moves
        self._places = [_place(layer) for layer in self.layers]
        self._groups: list[int | None] = []
        self._known: tuple[Any, ...] = ()
        self._order: dict[torch.device, Tensor] = {}
        self._copied: tuple[Any, ...] = ()
        self._marked: Any = None
        self._timing: bool | None = None
        self._count = 0
        self._stashed: list[Tensor | None] | None = None
        self._inside: tuple[list[Tensor], list[Tensor]] | None = None  # parameters and weights, within a measured step
        self._fresh = True  # the weights are those of the last measurement
        self._restless = False  # somebody changes them between steps
        self._versions: tuple[int, ...] = ()
        self._prepare(self.parameters())

    def start(self, step: int) -> None:
        """Training is at this step."""
        self.taken = self.measured_at = self.tried_at = step
        self.next_detail = step + 1
        self.next_conditioning, self.analysed_at = step + 1, None

    def parameters(self) -> list[Tensor]:
        """The layers' parameters as they are now; FSDP2 and Accelerate swap them in place."""
        try:
            return [owner[key] for owner, key in self._places]
        except KeyError:
            places = zip(self.layers, self._places, strict=True)
            gone = next(layer.name for layer, (owner, key) in places if key not in owner)
            raise MonitorError(
                f"{gone!r} is no parameter of its module any more (pruning and parametrizations put others in its "
                "place); watch the changed model anew."
            ) from None

    def release(self) -> None:
        """Nothing will be measured any more: let go of everything but the reference."""
        for bundle in self.reference.bundles:
            bundle.release()
        self._stashed = self._inside = None

    def before(self) -> None:
        """A measured step is about to be taken: copy the weights."""
        parameters = self.parameters()
        weights = self._look(parameters)
        self._notice_changes(parameters)
        self.caught_up = self._marked is None or self._marked.query()
        timed = self._timing = self._is_timed()
        start = _mark(weights, timed)
        for bundle in self.reference.bundles:
            bundle.before = bundle.copy(_chosen(weights, bundle.members))
        self._stashed = _gradients_that_will_be_overwritten(self.optimizer, parameters)
        self._copied = (start, _mark(weights, timed)) if start is not None and timed else ()
        self._inside = parameters, weights

    @property
    def fresh(self) -> bool:
        """Whether the weights are those of the last measurement, as far as anybody has seen."""
        return self._fresh

    @property
    def may_skip(self) -> bool:
        """Whether the optimizer does a GradScaler's work, and so may skip a step."""
        return getattr(self.optimizer, "found_inf", None) is not None

    def pass_by(self) -> None:
        """A step that is not measured is about to be taken: after a measured one, keep that one's weights."""
        if self._fresh:
            self._notice_changes(self.parameters())
        if self._fresh and not self._restless:
            self.anchor()
            self._fresh = False

    def unseen(self) -> None:
        """A step was taken that no hook has seen; from now on every measurement keeps the weights it saw."""
        if not self._restless:
            self._fresh, self._restless = False, True

    def anchor(self) -> None:
        """Keep the weights as they are now, to measure the next angle from."""
        weights = self._look()
        for bundle in self.reference.bundles:
            bundle.anchor = bundle.anchored(_chosen(weights, bundle.members))

    def skipped(self) -> bool:
        """Whether the optimizer, doing a GradScaler's work, has skipped this step; False where only a device knows."""
        found: Tensor | None = getattr(self.optimizer, "found_inf", None)
        if found is None:
            return False
        if found.device.type == "cpu":
            return bool(found.item())
        self.skips = found.detach().clone() if self.skips is None else self.skips + found
        return False

    def leave(self) -> None:
        """The step that was to be measured was none."""
        for bundle in self.reference.bundles:
            bundle.before = None
        self._stashed = self._inside = None

    def measure(self, *, gradients: bool = True) -> Measured:
        """Inner products of all layers; nothing waits for the device. `settle` says what became of them."""
        parameters = self.parameters() if self._inside is None else self._inside[0]
        given = [p.grad for p in parameters] if gradients else [None] * len(parameters)
        if gradients and self._stashed is not None:
            given = list(self._stashed)
        over_ranks = plan([parameters], [1] * len(parameters))
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
            # The other ranks are waiting for this one's part of the sums.
            device, failed = local(parameters)[0].device, error
            matrix = torch.full((len(parameters), len(COLUMNS)), torch.nan, dtype=accumulator(device), device=device)
        if over_ranks is not None:
            matrix = over_ranks.reduce(matrix)
        if failed is not None:
            raise failed
        lr, eta, decay = self._hyper()
        matrix = to_host(matrix)
        self._marked = done = _mark(parameters, timed)
        spans = () if start is None else (*self._copied, start, done)
        self._copied, self._stashed = (), None
        return Measured(
            step=self.taken,
            matrix=matrix,
            there=there,
            gradients=np.array([g is not None for g in given]),
            rr=self.reference.rr,
            exact=self.reference.exact,
            lr=lr,
            eta=eta,
            decay=decay,
            amp=(arriving(getattr(self.optimizer, "found_inf", None)), arriving(self.skips)),
            done=done,
            spans=spans,
        )

    def settle(self, *, recorded: bool = True) -> None:
        """What was measured is recorded and the next angle is since now; or it is not, and nothing begins anew."""
        bundles = self.reference.bundles
        self.tried_at = self.taken
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
        self._versions = _versions(self.parameters() if self._inside is None else self._inside[0])
        self._inside = None
        if self._restless:
            self.anchor()

    def _matrix(self, parameters: Sequence[Tensor], given: Sequence[Tensor | None]) -> Tensor:
        weights = self._look(parameters) if self._inside is None else self._inside[1]
        grads = local([w if g is None else g for w, g in zip(parameters, given, strict=True)])
        if torch.sparse_coo in {g.layout for g in grads}:
            grads = [g.coalesce().to_dense() if g.is_sparse else g for g in grads]
        skip: Tensor | None = getattr(self.optimizer, "found_inf", None)
        parts = [
            bundle.products(_chosen(weights, bundle.members), _chosen(grads, bundle.members), skip)
            for bundle in self.reference.bundles
        ]
        return self._in_order(parts, weights)

    def exchange(self, reference: Reference) -> None:
        """Measure against another reference from now on."""
        self.reference = reference
        self._fresh = True
        self._prepare(self.parameters())

    def _prepare(self, parameters: Sequence[Tensor]) -> None:
        owner = {id(p): g for g, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
        self._groups = [owner.get(id(p)) for p in parameters]
        weights = local(parameters)
        self._known = self._signature(parameters, weights)
        self._shapes = [(w.shape, w.stride(), w.dtype, w.device) for w in weights]
        self._versions = _versions(parameters)
        total = sum(p.numel() for p in parameters)
        for bundle in self.reference.bundles:
            if self._moves and bundle.previous is None:
                wide = torch.promote_types(bundle.dtype, torch.float32)
                bundle.remember_moves(wide if total <= _EXACT_MOVES else torch.bfloat16)
        self._order = {}

    def _signature(self, parameters: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Any, ...]:
        groups = tuple(len(group["params"]) for group in self.optimizer.param_groups)
        return tuple(map(id, parameters)), tuple(map(Tensor.data_ptr, weights)), groups

    def _look(self, parameters: Sequence[Tensor] | None = None) -> list[Tensor]:
        """The weights on this rank. Where they have been exchanged or moved, what is remembered follows them."""
        parameters = self.parameters() if parameters is None else parameters
        weights = local(parameters)
        if self._signature(parameters, weights) == self._known:
            return weights
        now = [(w.shape, w.stride(), w.dtype, w.device) for w in weights]
        if [one[0] for one in now] != [one[0] for one in self._shapes]:
            i = next(i for i, (a, b) in enumerate(zip(now, self._shapes, strict=True)) if a[0] != b[0])
            raise MonitorError(
                f"The weights of {self.layers[i].name!r} had the shape {tuple(self._shapes[i][0])} and now have "
                f"{tuple(now[i][0])}; watch the changed model anew."
            )
        if now != self._shapes:
            # Flat buffers are in the weights' order in memory, on their device.
            like = [torch.empty_strided(s, t, dtype=d, device=v) for s, t, d, v in self._shapes]
            self.reference = self.reference.moved(like, weights)
        self._prepare(parameters)
        return weights

    def _notice_changes(self, parameters: Sequence[Tensor]) -> None:
        """Somebody may have changed the weights since they were measured (clipping, projections): then they are gone.

        From then on every measurement keeps the weights it saw.
        """
        if self._fresh and _versions(parameters) != self._versions:
            self._fresh, self._restless = False, True

    def _there(self) -> npt.NDArray[np.bool_]:
        """Which columns will mean something."""
        one = self.reference.bundles[0]
        update = one.before is not None
        move = one.anchor is not None or (update and self._fresh)
        known = {"u": update, "v": move, "p": move and one.moved}
        return np.array([all(known.get(letter, True) for letter in name) for name in COLUMNS])

    def _is_timed(self) -> bool:
        """Whether the device's time is taken in this step: not always, since events cost the host time."""
        self._count += 1
        return self._count < _TIMED or self._count % _TIMED == 0

    def _in_order(self, parts: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
        if len(parts) == 1:
            return parts[0]
        home = parts[0].device
        matrix = torch.empty(len(weights), len(COLUMNS), dtype=parts[0].dtype, device=home)
        if home not in self._order:
            members = [i for bundle in self.reference.bundles for i in bundle.members]
            self._order[home] = to_device(np.array(members, dtype=np.int64), home)
        return matrix.index_copy_(0, self._order[home], torch.cat([part.to(home) for part in parts]))

    def _hyper(self) -> tuple[list[Any], npt.NDArray[np.bool_], list[Any]]:
        groups = self.optimizer.param_groups
        controls = getattr(self.optimizer, "controls", None)
        lr = [arriving(group.get("lr", float("nan"))) for group in groups]
        decay = [arriving(group.get("weight_decay", 0.0)) for group in groups]
        steered = [controls is not None and bool(controls(g)) for g in range(len(groups))]
        nan = float("nan")
        return (
            [nan if g is None else lr[g] for g in self._groups],
            np.array([g is not None and not steered[g] for g in self._groups]),
            [nan if g is None else 0.0 if steered[g] else decay[g] for g in self._groups],
        )


def _place(layer: Layer) -> tuple[Any, str]:
    """The dictionary that holds a layer's parameter, and its key in it."""
    *path, key = layer.attribute.split(".")
    module: Any = layer.module
    for name in path:
        module = module[name] if hasattr(module, "__getitem__") and name in module else getattr(module, name)
    return module._parameters, key


def _versions(parameters: Sequence[Tensor]) -> tuple[int, ...]:
    """Counters that go up whenever a tensor is changed in place; not through `.data`, which nobody can see."""
    return tuple(p._version for p in parameters)


def _gradients_that_will_be_overwritten(
    optimizer: Optimizer, parameters: Sequence[Tensor]
) -> list[Tensor | None] | None:
    """Copies of the gradients where the step leaves something else in their place: torch's Nesterov momentum does."""
    if not isinstance(optimizer, torch.optim.SGD) or not any(g.get("nesterov") for g in optimizer.param_groups):
        return None
    having = [i for i, p in enumerate(parameters) if p.grad is not None and not p.grad.is_sparse]
    copies: list[Tensor | None] = [p.grad for p in parameters]
    grads = [p.grad for p in parameters if p.grad is not None and not p.grad.is_sparse]
    for i, copy in zip(having, torch._foreach_mul(grads, 1.0) if grads else (), strict=True):
        copies[i] = copy
    return copies


def _chosen(tensors: list[Tensor], members: Sequence[int]) -> list[Tensor]:
    return tensors if len(members) == len(tensors) else [tensors[i] for i in members]


def _mark(weights: Sequence[Tensor], timed: bool) -> Any:
    """An event on the stream that the work goes to, on a GPU."""
    device = weights[0].device
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
    with on(device):
        event.record()
    return event
