"""One launch a step: the inner rule, the inner products, the coefficients and the update of all layers.

A step is two sweeps over a layer, one that sums and one that updates. Run one after the other over a large network
they read everything from memory twice. Here both are items of one list (`chunks.schedule`), and a layer is updated
shortly after it was summed, while its weights and gradients still lie in the L2 cache. Programs draw items from a
ticket counter, so an update waits only for sums that were drawn before it, by programs that are already running:
the wait always ends, however many programs the device holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from gyroscope.control.coefficients import TANGENT_FLOOR, Law
from gyroscope.control.ledger import Ledger
from gyroscope.vectors.chunks import CHUNK, cut, is_aligned, schedule, to_device
from gyroscope.vectors.triton import TYPES, _on, fetch, pointer, rounded, total

# Bytes of weights, gradients and state summed ahead of their update; two such windows share the L2 cache.
WINDOW = 10 << 20

GIVEN, SGD, MOMENTUM, SGD_AMOM, ADAM, RMSPROP, ADAGRAD = (tl.constexpr(i) for i in range(7))
RULES = {"given": 0, "sgd": 1, "momentum": 2, "sgd_amom": 3, "adam": 4, "rmsprop": 5, "adagrad": 6}


@triton.jit
def _gradient(g, w, decay, RULE: tl.constexpr, MAXIMIZE: tl.constexpr, DECOUPLED: tl.constexpr):  # type: ignore[no-untyped-def]
    """What the rule takes for the gradient."""
    d = g
    if MAXIMIZE:
        d = -d
    if (RULE != GIVEN) & (not DECOUPLED):
        d = d + decay * w
    return d


@triton.jit
def _displacement(  # type: ignore[no-untyped-def]
    d, w, m, v, decay, mu, eps, bias1, bias2,
    RULE: tl.constexpr, NESTEROV: tl.constexpr, DECOUPLED: tl.constexpr,
):  # fmt: skip
    """The displacement s from the rule's state after this step's update; its length does not matter."""
    if RULE == GIVEN:
        s = d
    elif RULE == SGD:
        s = -d
    elif RULE == MOMENTUM:
        if NESTEROV:
            s = -(d + mu * m)
        else:
            s = -m
    elif RULE == SGD_AMOM:
        s = -m
    elif RULE == ADAM:
        s = -(m / bias1) / (tl.sqrt(v) / bias2 + eps)
        if DECOUPLED:
            s = s - decay * w
    else:
        s = -d / (tl.sqrt(v) + eps)
    return s


@triton.jit
def _sum_block(  # type: ignore[no-untyped-def]
    pw, pg, pm, pv, offsets, n, ww, ws, ss, decay, mu, undamped, beta1, beta2, eps, bias1, bias2, fresh,
    RULE: tl.constexpr, NESTEROV: tl.constexpr, MAXIMIZE: tl.constexpr, DECOUPLED: tl.constexpr,
    TM: tl.constexpr, TV: tl.constexpr, TC: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    w = fetch(pw, offsets, n, MASKED).to(TC)
    g = fetch(pg, offsets, n, MASKED).to(TC)
    d = _gradient(g, w, decay, RULE, MAXIMIZE, DECOUPLED)
    m = d
    v = d
    # A gradient that is not finite must not stay in the state: its element starts afresh.
    finite = tl.abs(g) < float("inf")
    if (RULE == MOMENTUM) | (RULE == SGD_AMOM) | (RULE == ADAM):
        old = fetch(pm, offsets, n, MASKED).to(TC)
        if RULE == ADAM:
            m = old + (1 - beta1).to(TC) * (d - old)
        else:
            m = tl.where(fresh, d, mu * old + undamped * d)
        # Rounded as it is stored, so that the update computes the same displacement from it.
        kept = rounded(tl.where(finite, m, 0.0), TM)
        m = kept.to(TC)
        if MASKED:
            tl.store(pm + offsets, kept, mask=offsets < n)
        else:
            tl.store(pm + offsets, kept)
    if (RULE == ADAM) | (RULE == RMSPROP) | (RULE == ADAGRAD):
        old_v = fetch(pv, offsets, n, MASKED).to(TC)
        if RULE == ADAGRAD:
            v = old_v + d * d
        else:
            v = beta2.to(TC) * old_v + (1 - beta2).to(TC) * d * d
        kept_v = rounded(tl.where(finite, v, 0.0), TV)
        v = kept_v.to(TC)
        if MASKED:
            tl.store(pv + offsets, kept_v, mask=offsets < n)
        else:
            tl.store(pv + offsets, kept_v)
    s = _displacement(d, w, m, v, decay, mu, eps, bias1, bias2, RULE, NESTEROV, DECOUPLED)
    if RULE != GIVEN:
        s = tl.where(finite, s, float("nan"))
    if MASKED:
        s = tl.where(offsets < n, s, 0.0)
    w = w.to(tl.float64)
    s = s.to(tl.float64)
    return ww + w * w, ws + w * s, ss + s * s


@triton.jit
def _update_block(  # type: ignore[no-untyped-def]
    pw, pg, pm, pv, offsets, n, a, b, moved, decay, mu, eps, bias1, bias2,
    RULE: tl.constexpr, NESTEROV: tl.constexpr, MAXIMIZE: tl.constexpr, DECOUPLED: tl.constexpr,
    ZERO: tl.constexpr, TW: tl.constexpr, TG: tl.constexpr, TC: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    if MASKED:
        inside = offsets < n
    else:
        inside = offsets >= 0
    if moved:
        w = fetch(pw, offsets, n, MASKED).to(TC)
        d = w
        m = w
        v = w
        if (RULE == GIVEN) | (RULE == SGD) | NESTEROV | (RULE == RMSPROP) | (RULE == ADAGRAD):
            g = fetch(pg, offsets, n, MASKED).to(TC)
            d = _gradient(g, w, decay, RULE, MAXIMIZE, DECOUPLED)
        # Past the L1 cache: another multiprocessor may have written the state in the first sweep.
        if (RULE == MOMENTUM) | (RULE == SGD_AMOM) | (RULE == ADAM):
            if MASKED:
                m = tl.load(pm + offsets, mask=inside, other=0.0, cache_modifier=".cg").to(TC)
            else:
                m = tl.load(pm + offsets, cache_modifier=".cg").to(TC)
        if (RULE == ADAM) | (RULE == RMSPROP) | (RULE == ADAGRAD):
            if MASKED:
                v = tl.load(pv + offsets, mask=inside, other=1.0, cache_modifier=".cg").to(TC)
            else:
                v = tl.load(pv + offsets, cache_modifier=".cg").to(TC)
        s = _displacement(d, w, m, v, decay, mu, eps, bias1, bias2, RULE, NESTEROV, DECOUPLED)
        new = rounded(a * w.to(tl.float64) + b * s.to(tl.float64), TW)
        if MASKED:
            tl.store(pw + offsets, new, mask=inside)
        else:
            tl.store(pw + offsets, new)
    if ZERO:
        zero = tl.zeros(offsets.shape, TG)
        if MASKED:
            tl.store(pg + offsets, zero, mask=inside)
        else:
            tl.store(pg + offsets, zero)


@triton.jit
def _step_kernel(  # type: ignore[no-untyped-def]
    items, ticket, n_items, chunk_segment, chunk_position, first_chunk, lengths, pointers, segments,
    partial, done, ready, coefficient_a, coefficient_b,
    rows, multiplier, radius, skipped, bad, power1, power2, numbers, lr_value, lr_pointer,
    RULE: tl.constexpr, NESTEROV: tl.constexpr, MAXIMIZE: tl.constexpr, DECOUPLED: tl.constexpr,
    LR_ON_DEVICE: tl.constexpr, PROJECT: tl.constexpr, RELATIVE: tl.constexpr, REPROJECT: tl.constexpr,
    CAPPED: tl.constexpr, ZERO: tl.constexpr, FLOOR: tl.constexpr,
    TW: tl.constexpr, TG: tl.constexpr, TM: tl.constexpr, TV: tl.constexpr, TC: tl.constexpr,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    decay = tl.load(numbers).to(TC)
    mu = tl.load(numbers + 1).to(TC)
    undamped = tl.load(numbers + 2).to(TC)
    beta1 = tl.load(numbers + 3)
    beta2 = tl.load(numbers + 4)
    eps = tl.load(numbers + 5).to(TC)
    growth = tl.load(numbers + 6)
    along = tl.load(numbers + 7)

    drawn = tl.atomic_add(ticket, 1)
    epoch = drawn // n_items + 1
    item = tl.load(items + drawn % n_items)
    summing = item >= 0
    c = tl.where(summing, item, -item - 1)
    segment = tl.load(chunk_segment + c)
    position = tl.load(chunk_position + c)
    n = tl.minimum(tl.load(lengths + segment) - position * CHUNK, CHUNK).to(tl.int32)
    row = tl.load(rows + segment)
    pw = pointer(pointers, segment, TW, ALIGNED) + position * CHUNK
    pg = pointer(pointers, segments + segment, TG, ALIGNED) + position * CHUNK
    pm = pointer(pointers, 2 * segments + segment, TM, ALIGNED) + position * CHUNK
    pv = pointer(pointers, 3 * segments + segment, TV, ALIGNED) + position * CHUNK
    blocks = n // BLOCK
    fresh = False

    if summing:
        bias1 = tl.full((), 1.0, TC)
        bias2 = tl.full((), 1.0, TC)
        if RULE == ADAM:
            bias1 = (1.0 - tl.load(power1 + row) * beta1).to(TC)
            bias2 = tl.sqrt(1.0 - tl.load(power2 + row) * beta2).to(TC)
        if RULE == MOMENTUM:
            fresh = tl.load(power1 + row) == 1.0
        ww = tl.zeros((BLOCK,), tl.float64)
        ws = tl.zeros((BLOCK,), tl.float64)
        ss = tl.zeros((BLOCK,), tl.float64)
        for i in range(blocks):
            ww, ws, ss = _sum_block(
                pw, pg, pm, pv, i * BLOCK + tl.arange(0, BLOCK), n, ww, ws, ss, decay, mu, undamped, beta1, beta2,
                eps, bias1, bias2, fresh, RULE, NESTEROV, MAXIMIZE, DECOUPLED, TM, TV, TC, False,
            )  # fmt: skip
        if n > blocks * BLOCK:
            ww, ws, ss = _sum_block(
                pw, pg, pm, pv, blocks * BLOCK + tl.arange(0, BLOCK), n, ww, ws, ss, decay, mu, undamped, beta1,
                beta2, eps, bias1, bias2, fresh, RULE, NESTEROV, MAXIMIZE, DECOUPLED, TM, TV, TC, True,
            )  # fmt: skip
        tl.store(partial + 3 * c, tl.sum(ww))
        tl.store(partial + 3 * c + 1, tl.sum(ws))
        tl.store(partial + 3 * c + 2, tl.sum(ss))
        tl.debug_barrier()
        low = tl.load(first_chunk + segment)
        high = tl.load(first_chunk + segment + 1)
        finished = tl.atomic_add(done + segment, 1, sem="acq_rel")
        if finished == high - low - 1:
            tl.store(done + segment, 0)
            w2 = total(partial, low, high, 0, 3)
            wt = total(partial, low, high, 1, 3)
            s2 = total(partial, low, high, 2, 3)
            # A decoupled decay that the caller left out of the displacement: s + along·w.
            s2 += 2.0 * along * wt + along * along * w2
            wt += along * w2
            if LR_ON_DEVICE:
                rate = tl.load(lr_pointer).to(tl.float64) * tl.load(multiplier + row)
            else:
                rate = lr_value.to(tl.float64) * tl.load(multiplier + row)
            norm = tl.sqrt(w2)
            start = tl.load(radius + row)
            start = tl.where(start < 0, norm, start)
            finite = (w2 < float("inf")) & (tl.abs(wt) < float("inf")) & (s2 < float("inf"))
            ratio = wt / w2
            square = s2
            if PROJECT:
                square = s2 - ratio * wt
            moved = finite & (w2 > 0) & (s2 > 0) & (rate > 0) & (rate < float("inf")) & (square > FLOOR * s2)
            step = rate / tl.sqrt(square)
            if RELATIVE:
                step = step * norm
            a = tl.full((), 1.0, tl.float64)
            if PROJECT:
                a = 1.0 - step * ratio
                new = tl.sqrt(w2 + step * step * square)
            else:
                new = tl.sqrt(w2 + 2.0 * step * wt + step * step * s2)
            k = tl.full((), 1.0, tl.float64)
            if REPROJECT:
                k = start / new
            elif CAPPED:
                k = tl.minimum(1.0, (norm + growth * start) / new)
            b = k * step
            a = k * a + b * along
            tl.store(coefficient_a + segment, tl.where(moved, a, 1.0))
            tl.store(coefficient_b + segment, tl.where(moved, b, 0.0))
            if w2 < float("inf"):
                tl.store(radius + row, start)
            tl.store(bad + row, tl.where(finite, 0, 1))
            tl.store(skipped + row, tl.load(skipped + row) + tl.where(finite, 0, 1))
            if (RULE == ADAM) | (RULE == MOMENTUM):
                tl.store(power1 + row, tl.load(power1 + row) * beta1)
                tl.store(power2 + row, tl.load(power2 + row) * beta2)
            tl.debug_barrier()
            tl.atomic_xchg(ready + segment, epoch, sem="release")
    else:
        while tl.atomic_add(ready + segment, 0, sem="acquire") < epoch:
            pass
        tl.debug_barrier()
        a = tl.load(coefficient_a + segment, cache_modifier=".cg")
        b = tl.load(coefficient_b + segment, cache_modifier=".cg")
        moved = (a != 1.0) | (b != 0.0)
        bias1 = tl.full((), 1.0, TC)
        bias2 = tl.full((), 1.0, TC)
        if RULE == ADAM:
            bias1 = (1.0 - tl.load(power1 + row, cache_modifier=".cg")).to(TC)
            bias2 = tl.sqrt(1.0 - tl.load(power2 + row, cache_modifier=".cg")).to(TC)
        if moved | ZERO:
            for i in range(blocks):
                _update_block(
                    pw, pg, pm, pv, i * BLOCK + tl.arange(0, BLOCK), n, a, b, moved, decay, mu, eps, bias1, bias2,
                    RULE, NESTEROV, MAXIMIZE, DECOUPLED, ZERO, TW, TG, TC, False,
                )  # fmt: skip
            if n > blocks * BLOCK:
                _update_block(
                    pw, pg, pm, pv, blocks * BLOCK + tl.arange(0, BLOCK), n, a, b, moved, decay, mu, eps, bias1,
                    bias2, RULE, NESTEROV, MAXIMIZE, DECOUPLED, ZERO, TW, TG, TC, True,
                )  # fmt: skip


@dataclass(frozen=True)
class Hyper:
    """The inner rule's numbers for one launch; unused ones stay at their defaults."""

    lr: float | Tensor = 0.0
    decay: float = 0.0
    momentum: float = 0.0
    dampening: float = 0.0
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    along: float = 0.0
    nesterov: bool = False
    maximize: bool = False
    decoupled: bool = False


class Launch:
    """The table for one set of layers: where they lie, in which order they are swept, and scratch space."""

    def __init__(
        self,
        lists: Sequence[Sequence[Tensor]],
        rows: Sequence[int],
        counts: Sequence[int],
        window: int = WINDOW,
    ) -> None:
        device = lists[0][0].device
        self.device = device
        self.types = [TYPES[one[0].dtype] for one in lists]
        n_rows = np.asarray(counts, dtype=np.int64)
        per_segment = np.array([t.numel() for t in lists[0]], dtype=np.int64) // n_rows
        lengths = np.repeat(per_segment, n_rows)
        within = np.arange(lengths.size) - np.repeat(np.cumsum(n_rows) - n_rows, n_rows)
        pointers = np.stack(
            [
                np.repeat(np.array([t.data_ptr() for t in one], dtype=np.int64), n_rows)
                + within * lengths * one[0].element_size()
                for one in lists
            ]
        )
        segment, position, first = cut(lengths)
        bytes_per_chunk = CHUNK * sum(one[0].element_size() for one in _distinct(lists))
        items = schedule(first, bytes_per_chunk, window)
        self.items = to_device(items, device)
        self.n_items = len(items)
        self.n_segments = int(lengths.size)
        self.chunk_segment = to_device(segment, device)
        self.chunk_position = to_device(position, device)
        self.first_chunk = to_device(first, device)
        self.lengths = to_device(lengths, device)
        self.pointers = to_device(pointers, device)
        self.rows = to_device(np.asarray(rows, dtype=np.int64), device)
        self.aligned = is_aligned(pointers)
        self.ticket = torch.zeros(1, dtype=torch.int64, device=device)
        self.done = torch.zeros(self.n_segments, dtype=torch.int64, device=device)
        self.ready = torch.zeros(self.n_segments, dtype=torch.int64, device=device)
        self.partial = torch.empty(len(segment), 3, dtype=torch.float64, device=device)
        self.a = torch.empty(self.n_segments, dtype=torch.float64, device=device)
        self.b = torch.empty(self.n_segments, dtype=torch.float64, device=device)
        self._uploaded: tuple[Any, ...] = (None,)

    def __call__(self, rule: str, hyper: Hyper, ledger: Ledger, law: Law, *, zero: bool = False) -> None:
        """Take one step; with `zero`, leave the second list (a buffer of displacements) zeroed."""
        tw, tg, tm, tv = self.types
        on_device = isinstance(hyper.lr, Tensor)
        with _on(self.device):
            _step_kernel[(self.n_items,)](
                self.items, self.ticket, self.n_items, self.chunk_segment, self.chunk_position,
                self.first_chunk, self.lengths, self.pointers, self.n_segments,
                self.partial, self.done, self.ready, self.a, self.b,
                self.rows, ledger.multiplier, ledger.radius, ledger.skipped, ledger.bad, ledger.power1,
                ledger.power2, self._numbers(hyper, law), 0.0 if on_device else float(hyper.lr),
                hyper.lr if on_device else ledger.radius,
                RULE=RULES[rule], NESTEROV=hyper.nesterov, MAXIMIZE=hyper.maximize, DECOUPLED=hyper.decoupled,
                LR_ON_DEVICE=on_device, PROJECT=law.project, RELATIVE=law.scale == "relative",
                REPROJECT=law.reproject, CAPPED=law.growth is not None, ZERO=zero, FLOOR=TANGENT_FLOOR,
                TW=tw, TG=tg, TM=tm, TV=tv, TC=tl.float64 if tw == tl.float64 else tl.float32,
                ALIGNED=self.aligned, CHUNK=CHUNK, BLOCK=1024, num_warps=4,
            )  # fmt: skip

    def _numbers(self, hyper: Hyper, law: Law) -> Tensor:
        """The hyperparameters in float64 on the device; uploaded when they change, which the rate alone does often."""
        values = (
            hyper.decay, hyper.momentum, 1.0 - hyper.dampening, hyper.beta1, hyper.beta2, hyper.eps,
            law.growth or 0.0, hyper.along,
        )  # fmt: skip
        if values != self._uploaded[0]:
            host = torch.tensor(values, dtype=torch.float64)
            if self.device.type == "cuda":
                host = host.pin_memory()
            self._uploaded = (values, host.to(self.device, non_blocking=True), host)
        return self._uploaded[1]


def _distinct(lists: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
    return list({id(one): one for one in lists}.values())
