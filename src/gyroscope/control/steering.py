"""One controlled step of all groups: who computes what, and in which order.

A group of layers goes one of three ways, all with the same result:

- *fused*: torch's common optimizers on CUDA. The inner rule runs inside the kernel that takes the inner products;
- *plain*: SGD without momentum elsewhere. The gradient is the displacement, up to sign;
- *proposed*: everything else. The inner optimizer steps, and what it does to the layers is caught (`proposal`).

Other parameters are stepped by the inner optimizer itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from gyroscope.control.coefficients import Law
from gyroscope.control.ledger import Ledger
from gyroscope.control.proposal import Proposal, Proposer
from gyroscope.control.refusals import few
from gyroscope.control.roster import Entry, Roster
from gyroscope.control.rules import UNKNOWN, Group, decay_of, kernel_of
from gyroscope.control.sweep import Move, sweep
from gyroscope.errors import ControlError
from gyroscope.vectors import backend, dots
from gyroscope.vectors.layout import any_sharded, is_dense, local, splits_in_memory

Others = Literal["inner", "frozen"]


@dataclass(frozen=True)
class Work:
    """The layers of one group that have a gradient in this step."""

    group: Group
    params: list[Tensor]
    grads: list[Any]  # tensors; None where a closure is still to make one
    entries: list[Entry]

    @property
    def rows(self) -> list[int]:
        """The layers' rows in the ledger."""
        return [row for e in self.entries for row in e.rows]

    @property
    def counts(self) -> list[int]:
        """The segments of each layer."""
        return [e.segments for e in self.entries]

    @property
    def views(self) -> list[Tensor]:
        """The weights with their segments along the leading dimension."""
        return [e.view(p) for e, p in zip(self.entries, self.params, strict=True)]


class Steering:
    """Steps the layers of a roster by a law, towards what the inner optimizer proposes."""

    def __init__(self, inner: Optimizer, roster: Roster, law: Law, others: Others, reads_weights: bool | None) -> None:
        self.inner = inner
        self.roster = roster
        self.law = law
        self.others: Others = others
        self.proposer = Proposer(inner, reads_weights)
        self.ledgers: dict[torch.device, Ledger] = {}
        self.multipliers = torch.ones(roster.layers, dtype=torch.float64, device="cpu")
        self._layer_of_row: dict[torch.device, Tensor] = {}
        self._drivers: dict[Any, Any] = {}  # fused kernels by group, and by ("given", group)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_drivers": {}}

    def ledger(self, device: torch.device) -> Ledger:
        """The ledger on a device, made when first asked for."""
        if device not in self.ledgers:
            self.ledgers[device] = Ledger.blank(self.roster.rows, device)
            self.write_multipliers()
        return self.ledgers[device]

    def write_multipliers(self) -> None:
        """Bring the ledgers' multipliers up to date; nothing waits for the device."""
        for device, ledger in self.ledgers.items():
            where = self._layer_of_row.get(device)
            if where is None or where.numel() != self.roster.rows:
                of_row = sorted((row, e.index) for e in self.roster.in_order() for row in e.rows)
                where = self._layer_of_row[device] = torch.tensor([i for _, i in of_row], device=device)
            ledger.multiplier.copy_(self.multipliers.to(device, ledger.multiplier.dtype, non_blocking=True)[where])

    def grow(self, old: dict[torch.device, Ledger]) -> None:
        """Make room for layers that were added; what is known of the others is kept."""
        self.ledgers = {}
        for device, ledger in old.items():
            new = self.ledgers[device] = Ledger.blank(self.roster.rows, device)
            for name in ("radius", "skipped", "bad", "power1", "power2"):
                getattr(new, name)[: len(ledger.radius)] = getattr(ledger, name)
        self._drivers.clear()
        self.write_multipliers()

    def ready(self) -> list[int]:
        """The groups whose fused kernel can go on where it left off."""
        if self._hooked():
            return []
        groups = self.inner.param_groups
        return [i for i, driver in self._drivers.items() if isinstance(i, int) and driver.ready(groups[i])]

    def forget(self) -> None:
        """Make all tables anew at the next step: a state was loaded."""
        self._drivers.clear()

    def _hooked(self) -> bool:
        """Whether somebody listens to the inner optimizer's own step, which must then be called."""
        return bool(self.inner._optimizer_step_pre_hooks or self.inner._optimizer_step_post_hooks)

    def work(self, but: Collection[int] = (), *, late: bool = False) -> dict[int, Work]:
        """For each controlled group that is not in `but`, the layers that have a gradient, or get one `late`."""
        found = {}
        for i in self.roster.controlled():
            if i in but:
                continue
            group, entries = self.inner.param_groups[i], self.roster.groups[i]
            every = group["params"]
            params = [every[j] for j in entries] if len(every) > len(entries) else every
            grads = [p.grad for p in params]
            if any(g is None for g in grads):
                having = [k for k, g in enumerate(grads) if g is not None or (late and params[k].requires_grad)]
                its = list(entries.values())
                found[i] = Work(
                    group, [params[k] for k in having], [grads[k] for k in having], [its[k] for k in having]
                )
            else:
                found[i] = Work(group, params, grads, list(entries.values()))
        return found

    def step(self, work: dict[int, Work], ready: Sequence[int], closure: Callable[[], Any] | None) -> Any:
        """Take the step; `closure` only for an inner optimizer that evaluates it itself."""
        try:
            return self._step(work, ready, closure)
        except BaseException:
            self.proposer.forget()
            raise

    def _step(self, work: dict[int, Work], ready: Sequence[int], closure: Callable[[], Any] | None) -> Any:
        ways = {i: way for i, w in work.items() if (way := self._way(w)) is not None}
        proposals, loss = self._propose(work, {*ways, *ready}, closure)
        moves: list[tuple[torch.device, Move]] = []
        after: list[Callable[[], None]] = []
        for i, proposal in proposals.items():
            if proposal.params:
                self._follow(i, proposal, moves, after)
        for i, way in ways.items():
            if way == "plain":
                moves += self._plain(work[i])
            else:
                self._fused(i, way, work[i])
        for device in dict.fromkeys(device for device, _ in moves):
            sweep([move for where, move in moves if where == device], self.ledger(device), self.law)
        for action in after:
            action()
        for i in ready:
            self._drivers[i].run(self.inner.param_groups[i])
        return loss

    def _way(self, work: Work) -> str | None:
        """`"plain"`, the fused kernel's rule, or None where the inner optimizer must be asked."""
        if self.proposer.reads_weights or self._hooked() or not work.params:
            return None
        kernel = kernel_of(self.proposer.rule, work.group)
        if kernel is None or any(g.is_sparse for g in work.grads):
            return None
        if self._kernel_runs(work):
            return kernel
        return "plain" if kernel == "sgd" else None

    def _kernel_runs(self, work: Work) -> bool:
        device = work.params[0].device
        if backend(device).__name__.endswith("eager"):
            return False
        if any(p.device != device for p in work.params) or any_sharded(work.params):
            return False
        if all(n == 1 for n in work.counts):
            return all(p.is_contiguous() or is_dense(p) for p in work.params)
        return all(is_dense(v) and splits_in_memory(v, n) for v, n in zip(work.views, work.counts, strict=True))

    def _fused(self, i: int, kernel: str, work: Work) -> None:
        from gyroscope.control.fast import Fast

        if i not in self._drivers:
            self._drivers[i] = Fast(self.inner, self.proposer.rule, self.law, self.ledger(work.params[0].device))
        self._drivers[i].prepare(kernel, work.group, work.params, work.grads, work.rows, work.counts)
        self._drivers[i].run(work.group)

    def _plain(self, work: Work) -> list[tuple[torch.device, Move]]:
        how, decay = decay_of(self.proposer.rule, work.group)
        sign = 1.0 if work.group.get("maximize", False) else -1.0
        return self._moves(work, work.grads, sign=sign, along=-decay if how == "coupled" else 0.0)

    def _propose(
        self, work: dict[int, Work], done: set[int], closure: Callable[[], Any] | None
    ) -> tuple[dict[int, Proposal], Any]:
        """Step the other parameters, and catch the displacements of the layers that need the inner step."""
        groups = self.inner.param_groups
        asked = [i for i in work if i not in done and (work[i].params or closure is not None)]
        rest = [i for i, own in enumerate(self.roster.groups) if not own] if self.others == "inner" else []
        active = any(p.grad is not None for i in rest for p in groups[i]["params"])
        if not asked and not active:
            return {}, None
        its = [pair for i in asked for pair in zip(work[i].entries, work[i].grads, strict=True)]
        sparse = [e.name for e, g in its if g is not None and g.is_sparse]
        if sparse:
            raise ControlError(
                f"{few(sparse)} has a sparse gradient; use sparse=False on the embedding, or exclude it "
                "(gyroscope.layers(model, exclude=...)) so that the inner optimizer steps it. Nothing was changed."
            )
        seen = {*asked, *rest}
        with _keeping_rates([groups[i] for i in asked]) if self.proposer.rule is UNKNOWN else nullcontext():
            proposals, loss = self.proposer.propose(
                [list(entries) for entries in self.roster.groups],
                hidden={i for i in range(len(groups)) if i not in seen},
                frozen=asked if self.others == "frozen" else (),
                closure=closure,
            )
        return {i: proposals[i] for i in asked}, loss

    def _follow(
        self, i: int, proposal: Proposal, moves: list[tuple[torch.device, Move]], after: list[Callable[[], None]]
    ) -> None:
        """Turn the layers towards the displacements the inner optimizer proposed, now or with the other moves."""
        entries = [self.roster.groups[i][j] for j in proposal.positions]
        work = Work(self.inner.param_groups[i], proposal.params, [], entries)
        self._drivers.pop(i, None)  # the fused kernel's own count of steps is behind now
        if self._kernel_runs(work):
            from gyroscope.control.given import Given

            driver = self._drivers.setdefault(("given", i), Given())
            ledger = self.ledger(proposal.params[0].device)
            driver.step(proposal, work.rows, work.counts, ledger, work.group["lr"], self.law)
            driver.clear(self.inner, work.params, work.rows, work.counts, ledger)
            if self.proposer.reads_weights:
                self._clear(work, shaped=False)
            return

        def finish() -> None:
            self.proposer.release(proposal)
            self._clear(work)

        moves += self._moves(work, proposal.displacements, along=proposal.along)
        after.append(finish)

    def _moves(
        self, work: Work, displacements: Sequence[Tensor], *, sign: float = 1.0, along: float = 0.0
    ) -> list[tuple[torch.device, Move]]:
        """The moves of a group's layers, one a device."""
        devices: dict[torch.device, list[int]] = {}
        for k, p in enumerate(work.params):
            devices.setdefault(p.device, []).append(k)
        found = []
        for device, members in devices.items():
            entries = [work.entries[k] for k in members]
            move = Move(
                weights=[e.view(work.params[k]) for k, e in zip(members, entries, strict=True)],
                displacements=[e.view(displacements[k]) for k, e in zip(members, entries, strict=True)],
                rows=[row for e in entries for row in e.rows],
                counts=[e.segments for e in entries],
                lr=work.group["lr"],
                sign=sign,
                along=along,
            )
            found.append((device, move))
        return found

    def _states(self, work: Work, shaped: bool) -> list[tuple[list[Tensor], list[int], list[int]]]:
        """The inner state of the layers: by name and dtype, with rows and segments.

        Without `shaped`, only what has another shape than its layer, such as Adafactor's rows and columns.
        """
        found: dict[tuple[str, torch.dtype], tuple[list[Tensor], list[int], list[int]]] = {}
        for p, e in zip(work.params, work.entries, strict=True):
            for name, value in self.inner.state[p].items() if p in self.inner.state else ():
                if name == "radius" or not isinstance(value, Tensor) or not value.is_floating_point():
                    continue
                if value.dim() > 0 and (shaped or value.shape != p.shape):
                    tensors, rows, counts = found.setdefault((name, value.dtype), ([], [], []))
                    tensors.append(local([value])[0])
                    rows.extend(e.rows)
                    counts.append(e.segments)
        return list(found.values())

    def _clear(self, work: Work, *, shaped: bool = True) -> None:
        """Zero what is not finite in the inner state of layers whose step was skipped."""
        where = {p.device for p in work.params}
        if {device.type for device in where} == {"cpu"} and not any(self.ledger(d).bad.any() for d in where):
            return  # at hand, and most often so
        for states, rows, counts in self._states(work, shaped):
            start = 0
            for state, n in zip(states, counts, strict=True):
                bad = self.ledger(state.device).bad[rows[start] : rows[start] + n].any()
                start += n
                # On a CPU the answer is at hand; elsewhere asking would wait, so the state is passed over instead.
                if state.device.type != "cpu":
                    state.copy_(torch.where(bad & ~torch.isfinite(state), torch.zeros_like(state), state))
                elif bad:
                    state[~torch.isfinite(state)] = 0

    def zero_layers(self, work: dict[int, Work]) -> list[str]:
        """The layers among `work` whose weights, or those of a segment, are all zero (waits for the device)."""
        entries = [e for w in work.values() for e in w.entries]
        views = [view for w in work.values() for view in w.views]
        squares = dots({"ww": (views, views)}, segments=[e.segments for e in entries])[:, 0].tolist()
        found, start = [], 0
        for e in entries:
            zeros = squares[start : start + e.segments].count(0)
            if zeros:
                found.append(e.name if e.segments == 1 else f"{e.name} ({zeros} of its {e.segments} segments)")
            start += e.segments
        return found

    def nonfinite(self) -> list[str]:
        """The parameters whose gradients are not finite (waits for the device)."""
        names, grads = [], []
        for g, group in enumerate(self.inner.param_groups):
            for j, p in enumerate(group["params"]):
                if p.grad is not None:
                    e = self.roster.groups[g].get(j)
                    names.append(e.name if e else f"parameter {j} of group {g}")
                    dense = p.grad.to_dense() if p.grad.is_sparse else p.grad
                    grads.append(torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense)
        finite = torch.isfinite(dots({"gg": (grads, grads)})[:, 0]).tolist()
        return [name for name, ok in zip(names, finite, strict=True) if not ok]


@contextmanager
def _keeping_rates(groups: Sequence[Group]) -> Iterator[None]:
    """Undo what an optimizer writes into the rates of some groups: there they are angles, and the user's to change."""
    rates = [group["lr"] for group in groups]
    values = [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]
    try:
        yield
    finally:
        for group, rate, value in zip(groups, rates, values, strict=True):
            if isinstance(rate, Tensor):
                rate.copy_(value)
            group["lr"] = rate
