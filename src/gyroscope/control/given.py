"""The fused kernel for displacements that were written by the inner optimizer's own step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.optim import Optimizer

from gyroscope.control.coefficients import Law
from gyroscope.control.fast import StateView
from gyroscope.control.launch import Hyper, Launch, rows_among
from gyroscope.control.ledger import Ledger
from gyroscope.control.proposal import Proposal
from gyroscope.vectors.launch import on
from gyroscope.vectors.layout import like
from gyroscope.vectors.triton import TYPES, by_type, pointer


@triton.jit
def _clear_kernel(items, pointers, bad, T: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    record = items + 8 * tl.program_id(0)
    if (tl.load(record + 6) == 1) & (tl.load(bad + tl.load(record + 3)) != 0):
        n = tl.load(record + 2)
        p = pointer(pointers, tl.load(record), T, False) + tl.load(record + 1).to(tl.int64) * CHUNK
        for start in range(0, n, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            x = tl.load(p + offsets, mask=offsets < n, other=0.0)
            finite = tl.abs(x.to(tl.float64)) < float("inf")
            tl.store(p + offsets, tl.zeros((BLOCK,), T), mask=(offsets < n) & (finite == 0))


class Given:
    """One launch for the layers of a group, and one for each kind of state to clear what is not finite."""

    def __init__(self) -> None:
        self._known: tuple[Any, ...] = ()
        self._launches: list[Launch] = []
        self._states: list[StateView] = []
        self._clearing: list[tuple[Launch, Any]] = []
        self._cleared: tuple[list[int], int] = ([], -1)

    def step(
        self,
        proposal: Proposal,
        rows: Sequence[int],
        counts: Sequence[int],
        ledger: Ledger,
        lr: float | Tensor,
        law: Law,
    ) -> None:
        """Turn the proposal's parameters; its displacements are zero afterwards, ready for the next step."""
        params, moves = proposal.params, proposal.displacements
        if list(map(Tensor.stride, params)) != list(map(Tensor.stride, moves)):
            moves = [like(d, p) for d, p in zip(moves, params, strict=True)]
        seen = (list(map(Tensor.data_ptr, params)), list(map(Tensor.data_ptr, moves)), rows)
        if seen != self._known:
            self._launches = []
            for members in by_type([params, moves]).values():
                w, d = [params[i] for i in members], [moves[i] for i in members]
                its_rows = rows_among(rows, counts, members)
                self._launches.append(Launch([w, d, d, d], its_rows, [counts[i] for i in members]))
            self._known = seen
        for launch in self._launches:
            launch("given", Hyper(along=proposal.along), lr, ledger, law, zero=True)

    def clear(
        self,
        optimizer: Optimizer,
        params: Sequence[Tensor],
        rows: Sequence[int],
        counts: Sequence[int],
        ledger: Ledger,
    ) -> None:
        """Zero what is not finite in the state of layers whose last step was skipped; of others nothing is read."""
        size = sum(map(len, optimizer.state.values()))  # state may appear at any step
        if (rows, size) != self._cleared or not all(view.holds(optimizer) for view in self._states):
            self._cleared = (list(rows), size)
            self._find_states(optimizer, params, rows, counts)
        for launch, kind in self._clearing:
            with on(launch.device):
                _clear_kernel[(len(launch.items),)](
                    launch.items, launch.pointers, ledger.bad, T=kind, CHUNK=launch.chunk, BLOCK=1024
                )

    def _find_states(
        self, optimizer: Optimizer, params: Sequence[Tensor], rows: Sequence[int], counts: Sequence[int]
    ) -> None:
        """The states that have their parameter's shape, by name and dtype."""
        found: dict[tuple[str, torch.dtype], list[int]] = {}
        for i, p in enumerate(params):
            for name, value in optimizer.state[p].items() if p in optimizer.state else ():
                if isinstance(value, Tensor) and value.shape == p.shape and value.is_floating_point():
                    found.setdefault((name, value.dtype), []).append(i)
        self._states, self._clearing = [], []
        for (name, dtype), members in found.items():
            view = StateView(optimizer, [params[i] for i in members], [name])
            launch = Launch([view.tensors[name]], rows_among(rows, counts, members), [counts[i] for i in members])
            self._states.append(view)
            self._clearing.append((launch, TYPES[dtype]))
