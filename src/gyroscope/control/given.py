"""The fused kernel for displacements that were written by the inner optimizer's own step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gyroscope.control.coefficients import Law
from gyroscope.control.fused import Hyper, Launch
from gyroscope.control.ledger import Ledger
from gyroscope.control.proposal import Proposal
from gyroscope.vectors.chunks import CHUNK
from gyroscope.vectors.layout import like
from gyroscope.vectors.triton import TYPES, _on, pointer


@triton.jit
def _clear_kernel(  # type: ignore[no-untyped-def]
    pointers, rows, bad, lengths, chunk_segment, chunk_position,
    T: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0)
    segment = tl.load(chunk_segment + c)
    if tl.load(bad + tl.load(rows + segment)) != 0:
        position = tl.load(chunk_position + c)
        n = tl.minimum(tl.load(lengths + segment) - position * CHUNK, CHUNK).to(tl.int32)
        p = pointer(pointers, segment, T, False) + position * CHUNK
        for start in range(0, n, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            x = tl.load(p + offsets, mask=offsets < n, other=0.0)
            odd = (offsets < n) & ~(tl.abs(x.to(tl.float64)) < float("inf"))
            tl.store(p + offsets, tl.zeros((BLOCK,), T), mask=odd)


class Given:
    """One launch for the layers of a group, and one a state to clear what is not finite."""

    def __init__(self) -> None:
        self._known: tuple[Any, ...] = ()
        self._launches: list[Launch] = []
        self._clearing: dict[Any, Launch] = {}

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
        params = [p.detach() for p in proposal.params]
        moves = [like(d, p) for d, p in zip(proposal.displacements, params, strict=True)]
        seen = (list(map(Tensor.data_ptr, params)), list(map(Tensor.data_ptr, moves)), rows)
        if seen != self._known:
            self._launches = []
            for members in _by_type(params, moves).values():
                w, d = [params[i] for i in members], [moves[i] for i in members]
                self._launches.append(Launch([w, d, d, d], _rows_of(rows, counts, members), [counts[i] for i in members]))
            self._known = seen
        for launch in self._launches:
            launch("given", Hyper(lr=lr, along=proposal.along), ledger, law, zero=True)

    def clear(self, states: Sequence[Tensor], rows: Sequence[int], counts: Sequence[int], ledger: Ledger) -> None:
        """Zero what is not finite in the states of layers whose last step was skipped; others are not read."""
        key = (tuple(map(Tensor.data_ptr, states)), tuple(rows))
        launch = self._clearing.get(key)
        if launch is None:
            if len(self._clearing) > 16:
                self._clearing.clear()
            launch = self._clearing[key] = Launch([states], rows, counts)
        with _on(launch.device):
            _clear_kernel[(launch.chunk_segment.numel(),)](
                launch.pointers, launch.rows, ledger.bad, launch.lengths, launch.chunk_segment,
                launch.chunk_position, T=TYPES[states[0].dtype], CHUNK=CHUNK, BLOCK=1024,
            )  # fmt: skip


def _by_type(params: Sequence[Tensor], moves: Sequence[Tensor]) -> dict[tuple[torch.dtype, torch.dtype], list[int]]:
    kinds: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for i, (p, d) in enumerate(zip(params, moves, strict=True)):
        kinds.setdefault((p.dtype, d.dtype), []).append(i)
    return kinds


def _rows_of(rows: Sequence[int], counts: Sequence[int], members: Sequence[int]) -> list[int]:
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return [rows[starts[i] + k] for i in members for k in range(counts[i])]
