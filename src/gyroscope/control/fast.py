"""The drivers of the fused step: for known rules, and for displacements written by the inner optimizer's own step.

The step itself is a `Launch`, that of `fused` on CUDA or that of `native_step` on a CPU.
Tables are built once for the same tensors and checked at every step. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from operator import is_, itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from gyroscope.control.proposal import RULES, Group, Hyper, Proposal, Rule, StandIns, decay_of, kernel_of, roundings
from gyroscope.control.steering import Law, Ledger
from gyroscope.vectors.launch import rows_of, to_device
from gyroscope.vectors.layout import by_type, like

_address = Tensor.data_ptr
_strides = Tensor.stride
_is_contiguous = Tensor.is_contiguous

# A check of a whole list that torch's CUDA builds have for their own graphs; a third of the cost of checking each.
_bulk = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


def _lie_at(tensors: list[Tensor], addresses: list[int]) -> bool:
    """Return whether the memory of each tensor starts at its address.

    >>> x = torch.zeros(3)
    >>> _lie_at([x], [x.data_ptr()]), _lie_at([x[1:]], [x.data_ptr()])
    (True, False)
    """
    if _bulk is not None:
        return bool(_bulk(tensors, addresses, _positions(len(addresses))))
    return list(map(_address, tensors)) == addresses


def _lie_alike(parameter: Tensor, gradient: Tensor) -> bool:
    """Return whether two tensors of one shape have the same order in memory; strides of single elements do not count.

    >>> x = torch.zeros(4, 1, 3, 3)
    >>> _lie_alike(x, x.to(memory_format=torch.channels_last)), _lie_alike(x, x.transpose(2, 3))
    (True, False)
    """
    if parameter.stride() == gradient.stride():
        return True
    strides = zip(parameter.shape, parameter.stride(), gradient.stride(), strict=True)
    return all(size == 1 or own == other for size, own, other in strides)


@cache
def _positions(n: int) -> list[int]:
    return list(range(n))


class StateView:
    """Some of the state tensors of some parameters, with a quick check that they are still the state."""

    def __init__(self, optimizer: Optimizer, params: Sequence[Tensor], keys: Sequence[str]) -> None:
        self.keys = list(keys)
        self._everything = list(optimizer.state.values())
        self._owners = [optimizer.state[p] for p in params] if keys else []
        self.tensors = {key: [owner[key] for owner in self._owners] for key in keys}

    def holds(self, optimizer: Optimizer) -> bool:
        """Return whether every tensor is still in the state, which may be loaded or deleted at any time."""
        if not self.keys:
            return True
        if len(optimizer.state) != len(self._everything):
            return False
        if not all(map(is_, optimizer.state.values(), self._everything)):
            return False
        try:
            return all(all(map(is_, map(itemgetter(k), self._owners), self.tensors[k])) for k in self.keys)
        except KeyError:
            return False


class Fast:
    """Steps the layers of one group with one launch per dtype, by a rule that the kernel knows.

    The table of a launch holds addresses, so every step compares them with those of the tensors: parameters may be
    exchanged in place, gradients are allocated again, and state may be loaded or deleted. If nothing has changed,
    `ready` costs a few attribute look-ups per layer.
    """

    def __init__(self, launch: Any, optimizer: Optimizer, rule: Rule, law: Law, ledger: Ledger) -> None:
        self._launch = launch
        self._optimizer = optimizer
        self._rule = rule
        self._law = law
        self._ledger = ledger
        self._every: list[Tensor] = []
        self._params: list[Tensor] = []
        self._active: list[int] | None = None
        self._grads_at: list[int] = []
        self._strides: list[tuple[int, ...]] | None = None
        self._grad_types: list[torch.dtype] = []
        self._copies: list[Tensor] = []
        self._counts: dict[str, Tensor] = {}
        self._state = StateView(optimizer, [], [])
        self._launches: list[tuple[Any, list[int]]] = []

    def ready(self, group: Group) -> bool:
        """Return whether layers, gradients and state are those of the last step; gradients may have moved."""
        every = group["params"]
        if len(every) != len(self._every) or not all(map(is_, every, self._every)):
            return False
        if not self._state.holds(self._optimizer):
            return False
        grads = [p.grad for p in every]
        if self._active is not None:
            if [j for j, g in enumerate(grads) if g is not None] != self._active:
                return False
            grads = [grads[j] for j in self._active]
        try:
            if self._strides is None:
                if not all(map(_is_contiguous, grads)):
                    return False
            elif list(map(_strides, grads)) != self._strides:
                return False
            if not _lie_at(self._params, self._at):
                return False
            if not _lie_at(grads, self._grads_at) and not self._find_grads(grads):
                return False
        except (TypeError, RuntimeError):  # a gradient that is None, or sparse
            return False
        return _options(group) == self._options or self._take_options(group)

    def _take_options(self, group: Group) -> bool:
        """Update the hyperparameters: options that a scheduler changes, such as momentum, need no new tables."""
        if kernel_of(self._rule, group) != self._kernel:
            return False
        self._options = _options(group)
        self._hyper = hyper_of(self._rule, self._kernel, group)
        if self._counts:
            self._set_powers(self._counts["step"], group)
        return True

    def _find_grads(self, grads: Sequence[Tensor]) -> bool:
        if [g.dtype for g in grads] != self._grad_types:
            return False
        self._grads_at = at = list(map(_address, grads))
        for launch, members in self._launches:
            launch.move_gradients(at if len(members) == len(at) else [at[i] for i in members])
        return True

    def run(self, group: Group) -> None:
        """Step the layers that `prepare` or `ready` has seen."""
        if self._counts:
            self._count_step()
        for launch, _ in self._launches:
            launch(self._kernel, self._hyper, group["lr"], self._ledger, self._law)

    def _count_step(self) -> None:
        """Update the numbers in the state as torch does; the kernel has its own, in the ledger."""
        steps = self._counts["step"].add_(1)
        if "mu_product" in self._counts:
            ahead = 0.96 ** (steps.double() * self._hyper.momentum_decay)
            self._counts["mu_product"].mul_((self._hyper.beta1 * (1 - 0.5 * ahead)).float())

    def prepare(
        self,
        kernel: str,
        group: Group,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        rows: Sequence[int],
        counts: Sequence[int],
    ) -> None:
        """Make state and tables for the layers that have gradients."""
        self._kernel = kernel
        self._options = _options(group)
        self._hyper = hyper_of(self._rule, kernel, group)
        self._every = list(group["params"])
        self._params = list(params)
        with_gradient = [j for j, p in enumerate(self._every) if p.grad is not None]
        self._active = None if len(with_gradient) == len(self._every) else with_gradient
        self._at = list(map(_address, params))
        self._counts = {}
        given = grads
        alike = [_lie_alike(p, g) for p, g in zip(params, given, strict=True)]
        # The strides of gradients that are used as they are; gradients with others are copied at every step. If all are
        # contiguous, which costs half as much to check, None.
        plain = all(map(_is_contiguous, params)) and all(map(_is_contiguous, given))
        strides = [_strides(g if same else p) for p, g, same in zip(params, given, alike, strict=True)]
        self._strides = None if plain else strides
        grads = [
            g if same else torch.empty_like(p, dtype=g.dtype).copy_(g)
            for p, g, same in zip(params, given, alike, strict=True)
        ]
        # Copies are kept until the next step, because the table holds addresses only; no gradient is at one.
        self._copies = [c for c, g in zip(grads, given, strict=True) if c is not g]
        self._grads_at = [_address(c) if c is g else -1 for c, g in zip(grads, given, strict=True)]
        self._grad_types = [g.dtype for g in grads]
        keys = _moments(self._rule, kernel)
        if keys:
            self._set_up_state(group, params, keys, rows, counts)
        self._state = StateView(self._optimizer, params, [*keys, *self._counts])
        moments = [self._state.tensors[key] for key in keys]
        self._launches = []
        for members in by_type([params, grads, *moments]).values():
            its_rows = rows_among(rows, counts, members)
            launch = self._launch(self._lists(grads, members), its_rows, [counts[i] for i in members])
            self._launches.append((launch, members))

    def _lists(self, grads: Sequence[Tensor], members: Sequence[int]) -> list[list[Tensor]]:
        """Return weights, gradients, first and second moments; a moment that the rule does not have is never read."""
        tensors = self._state.tensors
        first = tensors.get(self._rule.first or "", grads)
        second = tensors.get(self._rule.second or "", grads)
        return [[one[i] for i in members] for one in (self._params, grads, first, second)]

    def _set_up_state(
        self,
        group: Group,
        params: Sequence[Tensor],
        keys: Sequence[str],
        rows: Sequence[int],
        counts: Sequence[int],
    ) -> None:
        """Create state as torch's own optimizer does, so that either can continue from the other's."""
        states = [self._optimizer.state[p] for p in params]
        starts = _counts(self._kernel)
        # Older versions of torch saved None for a momentum that was not used.
        fresh = [any(state.get(key) is None for key in (*keys, *starts)) for state in states]
        for p, state, new in zip(params, states, fresh, strict=True):
            for key in keys:
                if new:
                    start = group.get("initial_accumulator_value", 0.0) if self._kernel == "adagrad" else 0.0
                    state[key] = torch.full_like(p, start, memory_format=torch.preserve_format).detach()
                elif state[key].stride() != p.stride():
                    state[key] = torch.empty_like(p, dtype=state[key].dtype).copy_(state[key]).detach()
        device = self._ledger.power1.device
        self._where = to_device(np.array(rows, dtype=np.int64), device)
        self._layer_of_row = np.repeat(np.arange(len(params)), counts)
        home = device if group.get("capturable") or group.get("fused") else torch.device("cpu")
        for key, start in starts.items():
            # One vector for all layers, so that counting a step is one operation; the states hold views.
            values = [start if new else state[key] for state, new in zip(states, fresh, strict=True)]
            self._counts[key] = torch.stack([torch.as_tensor(x, dtype=torch.float32, device=home) for x in values])
            for state, view in zip(states, self._counts[key].unbind(), strict=True):
                state[key] = view
        known = torch.tensor([0.0 if new else 1.0 for new in fresh], device="cpu")
        self._set_powers(self._counts.get("step", known), group)

    def _set_powers(self, age: Tensor, group: Group) -> None:
        """Set t, βᵗ and NAdam's product of every row from the state of its layer, without waiting for the device."""
        beta1, beta2 = _betas(group, self._kernel)
        age = age.double()
        first = self._counts["mu_product"].double() if "mu_product" in self._counts else beta1**age
        ledger = self._ledger
        for column, value in ((ledger.power1, first), (ledger.power2, beta2**age), (ledger.age, age)):
            if value.device.type == "cpu":
                value = to_device(value.numpy()[self._layer_of_row], column.device)
            elif len(self._layer_of_row) > len(value):
                value = value[to_device(self._layer_of_row, column.device)]
            column.index_copy_(0, self._where, value)


def hyper_of(rule: Rule, kernel: str, group: Group) -> Hyper:
    """Return the hyperparameters of the kernel from the options of a group."""
    how, decay = decay_of(rule, group)
    beta1, beta2 = _betas(group, kernel)
    momentum = float(group["momentum"]) if kernel in ("momentum", "nesterov", "sgd_amom") else 0.0
    return Hyper(
        decay=decay,
        momentum=momentum,
        dampening=momentum if kernel == "sgd_amom" else float(group.get("dampening", 0.0)),
        beta1=beta1,
        beta2=beta2,
        eps=float(group.get("eps", 0.0)),
        momentum_decay=float(group.get("momentum_decay", 0.0)),
        maximize=bool(group.get("maximize", False)),
        decoupled=how == "decoupled",
    )


def _options(group: Group) -> tuple[Any, ...]:
    """Return the options of a group that the kernel or its hyperparameters depend on, except the rate."""
    return tuple(map(group.get, _OPTIONS))


_OPTIONS = (
    "weight_decay", "momentum", "dampening", "nesterov", "betas", "alpha", "eps", "maximize", "amsgrad", "centered",
    "decoupled_weight_decay", "differentiable", "momentum_decay",
)  # fmt: skip


def _betas(group: Group, kernel: str) -> tuple[float, float]:
    if "betas" in group:
        return float(group["betas"][0]), float(group["betas"][1])
    return 0.0, float(group["alpha"]) if kernel == "rmsprop" else 0.0


def _moments(rule: Rule, kernel: str) -> list[str]:
    """Return the names of the state tensors that the kernel reads and writes."""
    needs = RULES[kernel]
    return [key for key, needed in ((rule.first, needs.first), (rule.second, needs.second)) if key and needed]


def _counts(kernel: str) -> dict[str, float]:
    """Return the names of the numbers in the state of a layer, and the values with which they start."""
    if kernel == "nadam":
        return {"step": 0.0, "mu_product": 1.0}
    return {"step": 0.0} if RULES[kernel].second else {}


class Given:
    """Steps the layers of one group along displacements, and clears what is not finite from their state."""

    def __init__(self, launch: Any) -> None:
        self._launch = launch
        self._known: tuple[Any, ...] = ()
        self._stand_ins: StandIns | None = None
        self._launches: list[tuple[Any, torch.dtype]] = []
        self._states: list[StateView] = []
        self._clearing: list[Any] = []
        self._cleared: tuple[Sequence[int], int] = ([], -1)

    def knows(self, proposal: Proposal) -> bool:
        """Return whether everything lies where it did at the last step, as the proposal has found out."""
        return proposal.stand_ins is not None and proposal.stand_ins is self._stand_ins

    def step(
        self,
        proposal: Proposal,
        rows: Sequence[int],
        counts: Sequence[int],
        ledger: Ledger,
        lr: float | Tensor,
        law: Law,
    ) -> None:
        """Turn the parameters of the proposal; set its displacements to 0 for the next step, if they are kept."""
        if not self.knows(proposal):
            self._find(proposal, rows, counts)
        for launch, dtype in self._launches:
            if proposal.stepped:
                launch("stepped", Hyper(noise=roundings(dtype) ** 2), lr, ledger, law)
            else:
                launch("given", Hyper(along=proposal.along), lr, ledger, law, zero=True)

    def _find(self, proposal: Proposal, rows: Sequence[int], counts: Sequence[int]) -> None:
        """Find the layers and their displacements in memory; the tables are kept if nothing has moved."""
        params, moves = proposal.params, proposal.displacements
        if list(map(Tensor.stride, params)) != list(map(Tensor.stride, moves)):
            moves = [like(d, p) for d, p in zip(moves, params, strict=True)]
        seen = (list(map(Tensor.data_ptr, params)), list(map(Tensor.data_ptr, moves)), rows)
        if seen != self._known:
            self._launches = []
            for members in by_type([params, moves]).values():
                w, d = [params[i] for i in members], [moves[i] for i in members]
                its_rows = rows_among(rows, counts, members)
                launch = self._launch([w, d, d, d], its_rows, [counts[i] for i in members])
                self._launches.append((launch, d[0].dtype))
            self._known = seen
        # Copies of displacements in another layout are made at every step.
        self._stand_ins = proposal.stand_ins if moves is proposal.displacements else None

    def clear(
        self,
        optimizer: Optimizer,
        params: Sequence[Tensor],
        rows: Sequence[int],
        counts: Sequence[int],
        ledger: Ledger,
    ) -> None:
        """Set what is not finite to 0 in the state of layers whose last step was skipped; others are not read."""
        size = sum(map(len, optimizer.state.values()))  # state may appear at any step
        if (rows, size) != self._cleared or not all(view.holds(optimizer) for view in self._states):
            self._cleared = (rows, size)
            self._find_states(optimizer, params, rows, counts)
        for launch in self._clearing:
            launch.clear(ledger)

    def _find_states(
        self, optimizer: Optimizer, params: Sequence[Tensor], rows: Sequence[int], counts: Sequence[int]
    ) -> None:
        """Find the states that have the shape of their parameter, by name and dtype."""
        found: dict[tuple[str, torch.dtype], list[int]] = {}
        for i, p in enumerate(params):
            for name, value in optimizer.state[p].items() if p in optimizer.state else ():
                if isinstance(value, Tensor) and value.shape == p.shape and value.is_floating_point():
                    found.setdefault((name, value.dtype), []).append(i)
        self._states, self._clearing = [], []
        for (name, _), members in found.items():
            view = StateView(optimizer, [params[i] for i in members], [name])
            its_rows = rows_among(rows, counts, members)
            self._states.append(view)
            self._clearing.append(self._launch([view.tensors[name]], its_rows, [counts[i] for i in members]))


def rows_among(rows: Sequence[int], counts: Sequence[int], members: Sequence[int]) -> list[int]:
    """Return the rows of the layers `members`, where `rows` are those of all and layer l has `counts[l]` of them.

    >>> rows_among([7, 8, 9], [1, 2], [1])
    [8, 9]
    """
    return [rows[k] for k in rows_of(members, counts).tolist()]
