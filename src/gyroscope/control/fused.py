"""One launch per step: the inner rule, the inner products, the coefficients and the update of all layers.

A step is two sweeps over the layers, one that sums and one that updates. Both are items of one list
(`gyroscope.vectors.launch.schedule`), so that a step costs one launch. An update waits for the sums of its layer, which
come before it in the list. Programs are dispatched in the order of their numbers, so the sums are running or done when
the update starts, and they wait for nothing: the wait always ends, however few programs the device runs at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from gyroscope.base.hooks import is_capturing
from gyroscope.control.proposal import RULES, Hyper
from gyroscope.control.steering import TANGENT_FLOOR, Law, Ledger
from gyroscope.errors import ControlError
from gyroscope.vectors.launch import (
    CHUNK,
    Addresses,
    Ints,
    cut,
    in_two,
    is_aligned,
    on,
    relauncher,
    schedule,
    to_device,
)
from gyroscope.vectors.triton import TYPES, fetch, pointer, rounded, total

_NUMBER = {rule: number for number, rule in enumerate(RULES)}
GIVEN, STEPPED, SGD, MOMENTUM, NESTEROV, SGD_AMOM, ADAM, NADAM, RADAM, ADAMAX, RMSPROP, ADAGRAD = map(
    tl.constexpr, _NUMBER.values()
)


@triton.jit
def _gradient(g, w, decay, RULE: tl.constexpr, MAXIMIZE: tl.constexpr, DECOUPLED: tl.constexpr):
    """The gradient as the rule takes it."""
    d = g
    if MAXIMIZE:
        d = -d
    if (RULE != GIVEN) & (RULE != STEPPED) & (not DECOUPLED):
        d = d + decay * w
    return d


@triton.jit
def _advanced(power1, power2, age, beta1, beta2, shrink, RULE: tl.constexpr):
    """The row's numbers after one more step: β₁ᵗ (NAdam: the product of its μ), β₂ᵗ, and t."""
    age += 1
    if RULE == NADAM:
        # In float32, as torch keeps the product in the state.
        power1 = (power1 * _nadam_mu(age, beta1, shrink).to(tl.float32)).to(tl.float32).to(tl.float64)
    else:
        power1 *= beta1
    return power1, power2 * beta2, age


@triton.jit
def _nadam_mu(age, beta1, shrink):
    """μₜ = β₁ (1 − ½ 0.96^{tψ}), with `shrink` = ψ log₂ 0.96."""
    return beta1 * (1.0 - 0.5 * tl.exp2(age * shrink))


@triton.jit
def _corrections(power1, power2, age, beta1, beta2, shrink, RULE: tl.constexpr, TC: tl.constexpr):
    """The divisors of the first moment and of the root of the second, and a third number.

    It is the factor on the gradient for NAdam, and on the inverse root for RAdam: 0 where it does not rectify yet.
    """
    bias1 = 1.0 - power1
    bias2 = tl.sqrt(1.0 - power2)
    third = bias2
    if RULE == NADAM:
        following = _nadam_mu(age + 1, beta1, shrink)
        third = (1.0 - _nadam_mu(age, beta1, shrink)) / bias1
        bias1 = (1.0 - power1 * following) / following
    elif RULE == RADAM:
        most = 2.0 / (1.0 - beta2) - 1.0
        length = most - 2.0 * age * power2 / (1.0 - power2)
        square = (length - 4.0) * (length - 2.0) * most / ((most - 4.0) * (most - 2.0) * length)
        third = tl.where(length > 5.0, bias2 * tl.sqrt(tl.where(length > 5.0, square, 0.0)), 0.0)
    return bias1.to(TC), bias2.to(TC), third.to(TC)


@triton.jit
def _displacement(d, w, m, v, decay, mu, eps, bias1, bias2, third, RULE: tl.constexpr, DECOUPLED: tl.constexpr):
    """The displacement s from the rule's state after this step's update; its length does not matter."""
    if RULE == GIVEN:
        s = d
    elif RULE == STEPPED:
        s = d - w
    elif RULE == SGD:
        s = -d
    elif (RULE == MOMENTUM) | (RULE == SGD_AMOM):
        s = -m
    elif RULE == NESTEROV:
        s = -(d + mu * m)
    elif RULE == ADAM:
        s = -(m / bias1) / (tl.sqrt(v) / bias2 + eps)
    elif RULE == NADAM:
        s = -(m / bias1 + third * d) / (tl.sqrt(v) / bias2 + eps)
    elif RULE == RADAM:
        s = -(m / bias1) * tl.where(third > 0, third / (tl.sqrt(v) + eps), 1.0)
    elif RULE == ADAMAX:
        s = -m / v
    else:
        s = -d / (tl.sqrt(v) + eps)
    if DECOUPLED:
        s = s - decay * w
    return s


@triton.jit
def _load_new(p, offsets, n, other, MASKED: tl.constexpr):
    """Load state that the first sweep wrote, past the L1 cache: another multiprocessor may have written it."""
    if MASKED:
        x = tl.load(p + offsets, mask=offsets < n, other=other, cache_modifier=".cg")
    else:
        x = tl.load(p + offsets, cache_modifier=".cg")
    return x


@triton.jit
def _store(p, offsets, n, x, MASKED: tl.constexpr):
    if MASKED:
        tl.store(p + offsets, x, mask=offsets < n)
    else:
        tl.store(p + offsets, x)


@triton.jit
def _sum_block(
    pw, pg, pm, pv, offsets, n, ww, ws, ss, decay, mu, undamped, beta1, beta2, eps, bias1, bias2, third, fresh,
    RULE: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, MAXIMIZE: tl.constexpr, DECOUPLED: tl.constexpr,
    TM: tl.constexpr, TV: tl.constexpr, TC: tl.constexpr, MASKED: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    w = fetch(pw, offsets, n, MASKED).to(TC)
    g = fetch(pg, offsets, n, MASKED).to(TC)
    d = _gradient(g, w, decay, RULE, MAXIMIZE, DECOUPLED)
    m = d
    v = d
    # A gradient that is not finite must not stay in the state: its element starts again from 0.
    finite = tl.abs(g) < float("inf")
    if FIRST:
        old = fetch(pm, offsets, n, MASKED).to(TC)
        if SECOND:
            m = old + (1 - beta1).to(TC) * (d - old)
        else:
            m = tl.where(fresh, d, mu * old + undamped * d)
        # Rounded as it is stored, so that the update computes the same displacement from it.
        kept = rounded(tl.where(finite, m, 0.0), TM)
        m = kept.to(TC)
        _store(pm, offsets, n, kept, MASKED)
    if SECOND:
        old_v = fetch(pv, offsets, n, MASKED).to(TC)
        if RULE == ADAGRAD:
            v = old_v + d * d
        elif RULE == ADAMAX:
            v = tl.maximum(beta2.to(TC) * old_v, tl.abs(d) + eps)
        else:
            v = beta2.to(TC) * old_v + (1 - beta2).to(TC) * d * d
        kept_v = rounded(tl.where(finite, v, 0.0), TV)
        v = kept_v.to(TC)
        _store(pv, offsets, n, kept_v, MASKED)
    s = _displacement(d, w, m, v, decay, mu, eps, bias1, bias2, third, RULE, DECOUPLED)
    if RULE != GIVEN:
        s = tl.where(finite, s, float("nan"))
    if MASKED:
        s = tl.where(offsets < n, s, 0.0)
    # A thread adds its neighboring elements first: a quarter of the registers for sums, the same exact products.
    w = tl.reshape(w.to(tl.float64), (w.shape[0] // FOLD, FOLD))
    s = tl.reshape(s.to(tl.float64), (s.shape[0] // FOLD, FOLD))
    return ww + tl.sum(w * w, 1), ws + tl.sum(w * s, 1), ss + tl.sum(s * s, 1)


@triton.jit
def _update_block(
    pw, pg, pm, pv, offsets, n, a, b, moved, decay, mu, eps, bias1, bias2, third,
    RULE: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, AGAIN: tl.constexpr,
    MAXIMIZE: tl.constexpr, DECOUPLED: tl.constexpr, ZERO: tl.constexpr,
    TW: tl.constexpr, TG: tl.constexpr, TC: tl.constexpr, TA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    if moved:
        w = fetch(pw, offsets, n, MASKED).to(TC)
        d = w
        m = w
        v = w
        if AGAIN:
            d = _gradient(fetch(pg, offsets, n, MASKED).to(TC), w, decay, RULE, MAXIMIZE, DECOUPLED)
        if FIRST:
            m = _load_new(pm, offsets, n, 0.0, MASKED).to(TC)
        if SECOND:
            v = _load_new(pv, offsets, n, 1.0, MASKED).to(TC)
        s = _displacement(d, w, m, v, decay, mu, eps, bias1, bias2, third, RULE, DECOUPLED)
        _store(pw, offsets, n, rounded(a * w.to(TA) + b * s.to(TA), TW), MASKED)
    if ZERO:
        _store(pg, offsets, n, tl.zeros(offsets.shape, TG), MASKED)


@triton.jit
def step_kernel(
    items, pointers, segments, partial, done, ready, left, coefficient_a, coefficient_b,
    multiplier, radius, skipped, bad, power1, power2, age, numbers, lr_value, lr_rest, lr_pointer,
    RULE: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, AGAIN: tl.constexpr,
    MAXIMIZE: tl.constexpr, DECOUPLED: tl.constexpr,
    LR_ON_DEVICE: tl.constexpr, PROJECT: tl.constexpr, RELATIVE: tl.constexpr, REPROJECT: tl.constexpr,
    CAPPED: tl.constexpr, ZERO: tl.constexpr, FLOOR: tl.constexpr,
    TW: tl.constexpr, TG: tl.constexpr, TM: tl.constexpr, TV: tl.constexpr, TC: tl.constexpr,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, FOLD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One item of the list: sum a chunk, or update one. The last to sum a segment computes its coefficients."""
    record = items + 8 * tl.program_id(0)
    segment = tl.load(record)
    position = tl.load(record + 1)
    n = tl.load(record + 2)
    row = tl.load(record + 3)
    first = tl.load(record + 4)
    chunks = tl.load(record + 5)
    summing = tl.load(record + 6) == 1
    start = position.to(tl.int64) * CHUNK
    pw = pointer(pointers, segment, TW, ALIGNED) + start
    pg = pointer(pointers, segments + segment, TG, ALIGNED) + start
    pm = pointer(pointers, 2 * segments + segment, TM, ALIGNED) + start
    pv = pointer(pointers, 3 * segments + segment, TV, ALIGNED) + start
    decay = tl.load(numbers).to(TC)
    mu = tl.load(numbers + 1).to(TC)
    undamped = tl.load(numbers + 2).to(TC)
    beta1 = tl.load(numbers + 3)
    beta2 = tl.load(numbers + 4)
    eps = tl.load(numbers + 5).to(TC)
    growth = tl.load(numbers + 6)
    along = tl.load(numbers + 7)
    shrink = tl.load(numbers + 8)
    noise = tl.load(numbers + 9)
    blocks = n // BLOCK
    fresh = False

    if summing:
        bias1 = tl.full((), 1.0, TC)
        bias2 = tl.full((), 1.0, TC)
        third = tl.full((), 1.0, TC)
        if FIRST & SECOND:
            p1, p2, t = _advanced(
                tl.load(power1 + row), tl.load(power2 + row), tl.load(age + row), beta1, beta2, shrink, RULE
            )
            bias1, bias2, third = _corrections(p1, p2, t, beta1, beta2, shrink, RULE, TC)
        if (RULE == MOMENTUM) | (RULE == NESTEROV):
            fresh = tl.load(power1 + row) == 1.0
        ww = tl.zeros((BLOCK // FOLD,), tl.float64)
        ws = tl.zeros((BLOCK // FOLD,), tl.float64)
        ss = tl.zeros((BLOCK // FOLD,), tl.float64)
        for i in tl.range(0, blocks, num_stages=STAGES):
            ww, ws, ss = _sum_block(
                pw, pg, pm, pv, i * BLOCK + tl.arange(0, BLOCK), n, ww, ws, ss, decay, mu, undamped, beta1, beta2,
                eps, bias1, bias2, third, fresh,
                RULE, FIRST, SECOND, MAXIMIZE, DECOUPLED, TM, TV, TC, False, FOLD,
            )  # fmt: skip
        if n > blocks * BLOCK:
            ww, ws, ss = _sum_block(
                pw, pg, pm, pv, blocks * BLOCK + tl.arange(0, BLOCK), n, ww, ws, ss, decay, mu, undamped, beta1,
                beta2, eps, bias1, bias2, third, fresh,
                RULE, FIRST, SECOND, MAXIMIZE, DECOUPLED, TM, TV, TC, True, FOLD,
            )  # fmt: skip
        c = first + position
        tl.store(partial + 3 * c, tl.sum(ww))
        tl.store(partial + 3 * c + 1, tl.sum(ws))
        tl.store(partial + 3 * c + 2, tl.sum(ss))
        tl.debug_barrier()
        finished = tl.atomic_add(done + segment, 1, sem="acq_rel")
        if finished == chunks - 1:
            tl.store(done + segment, 0)
            w2 = total(partial, first, first + chunks, 0, 3)
            wt = total(partial, first, first + chunks, 1, 3)
            s2 = total(partial, first, first + chunks, 2, 3)
            # A decoupled decay that is not part of the displacement: s + along·w.
            s2 += 2.0 * along * wt + along * along * w2
            wt += along * w2
            if LR_ON_DEVICE:
                rate = tl.load(lr_pointer).to(tl.float64) * tl.load(multiplier + row)
            else:
                # Two float32 arguments hold a rate to the digits of float64.
                rate = tl.load(multiplier + row) * lr_value + tl.load(multiplier + row) * lr_rest
            norm = tl.sqrt(w2)
            start_norm = tl.load(radius + row)
            start_norm = tl.where(start_norm <= 0, norm, start_norm)
            finite = (w2 < float("inf")) & (tl.abs(wt) < float("inf")) & (s2 < float("inf"))
            if RULE == STEPPED:
                # A change of a few roundings of the weights has no direction.
                finite = finite & ((s2 == 0) | (s2 > noise * w2))
            ratio = wt / w2
            square = s2
            if PROJECT:
                square = s2 - ratio * wt
            moved = finite & (w2 > 0) & (s2 > 0) & (rate > 0) & (rate < float("inf")) & (square > FLOOR * s2)
            length = rate
            if RELATIVE:
                length = rate * norm
            step = length / tl.sqrt(square)
            far = w2 + length * length
            a = tl.full((), 1.0, tl.float64)
            if PROJECT:
                a = 1.0 - step * ratio
                new = tl.sqrt(far)
            else:
                new = tl.sqrt(tl.maximum(far + 2.0 * step * wt, 0.0))
            moved = moved & (new < float("inf"))
            k = tl.full((), 1.0, tl.float64)
            if REPROJECT:
                moved = moved & (new * new > FLOOR * far)
                k = start_norm / new
            elif CAPPED:
                k = tl.minimum(1.0, (norm + growth * start_norm) / new)
            b = k * step
            a = k * a + b * along
            tl.store(coefficient_a + segment, tl.where(moved, a, 1.0))
            tl.store(coefficient_b + segment, tl.where(moved, b, 0.0))
            if w2 < float("inf"):
                tl.store(radius + row, start_norm)
            tl.store(bad + row, tl.where(finite, 0, 1))
            tl.store(skipped + row, tl.load(skipped + row) + tl.where(finite, 0, 1))
            if (RULE != SGD_AMOM) & FIRST:
                p1, p2, t = _advanced(
                    tl.load(power1 + row), tl.load(power2 + row), tl.load(age + row), beta1, beta2, shrink, RULE
                )
                tl.store(power1 + row, p1)
                tl.store(power2 + row, p2)
                if (RULE == NADAM) | (RULE == RADAM):
                    tl.store(age + row, t)
            tl.debug_barrier()
            tl.atomic_xchg(ready + segment, 1, sem="release")
    else:
        while tl.atomic_add(ready + segment, 0, sem="acquire") == 0:
            pass
        tl.debug_barrier()
        a = tl.load(coefficient_a + segment, cache_modifier=".cg")
        b = tl.load(coefficient_b + segment, cache_modifier=".cg")
        bias1 = tl.full((), 1.0, TC)
        bias2 = tl.full((), 1.0, TC)
        third = tl.full((), 1.0, TC)
        if FIRST & SECOND:
            p1 = tl.load(power1 + row, cache_modifier=".cg")
            p2 = tl.load(power2 + row, cache_modifier=".cg")
            t = tl.load(age + row, cache_modifier=".cg")
            bias1, bias2, third = _corrections(p1, p2, t, beta1, beta2, shrink, RULE, TC)
        tl.debug_barrier()
        # The last to read the flag resets it, so that the next launch finds everything as this one did.
        if tl.atomic_add(left + segment, 1, sem="acq_rel") == chunks - 1:
            tl.store(left + segment, 0)
            tl.store(ready + segment, 0)
        moved = (a != 1.0) | (b != 0.0)
        if moved | ZERO:
            # Float32 arithmetic unless a coefficient would leave its range.
            if (tl.float32 == TC) & (tl.abs(b) < 1e30) & (tl.abs(b) > 1e-30):
                for i in tl.range(0, blocks, num_stages=STAGES):
                    _update_block(
                        pw, pg, pm, pv, i * BLOCK + tl.arange(0, BLOCK), n, a.to(tl.float32), b.to(tl.float32),
                        moved, decay, mu, eps, bias1, bias2, third,
                        RULE, FIRST, SECOND, AGAIN, MAXIMIZE, DECOUPLED, ZERO, TW, TG, TC, tl.float32, False,
                    )  # fmt: skip
                if n > blocks * BLOCK:
                    _update_block(
                        pw, pg, pm, pv, blocks * BLOCK + tl.arange(0, BLOCK), n, a.to(tl.float32),
                        b.to(tl.float32), moved, decay, mu, eps, bias1, bias2, third,
                        RULE, FIRST, SECOND, AGAIN, MAXIMIZE, DECOUPLED, ZERO, TW, TG, TC, tl.float32, True,
                    )  # fmt: skip
            else:
                for i in range(tl.cdiv(n, BLOCK)):
                    _update_block(
                        pw, pg, pm, pv, i * BLOCK + tl.arange(0, BLOCK), n, a, b, moved, decay, mu, eps, bias1,
                        bias2, third,
                        RULE, FIRST, SECOND, AGAIN, MAXIMIZE, DECOUPLED, ZERO, TW, TG, TC, tl.float64, True,
                    )  # fmt: skip


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


# Measured on an H200: smaller chunks spend their time starting, larger blocks run out of registers, and three
# stages of loads keep the memory busy.
_BLOCK = 1024
_WARPS = 4
_FOLD = 4
_STAGES = 3

# The positions of the arguments that change from step to step, in the kernel's list.
_POINTERS, _NUMBERS, _LR = 1, 16, 17


# A graph holds addresses only, so the launches it has captured are kept for good.
_captured: set[Launch] = set()


class Launch:
    """The table for one set of layers: their addresses, the order in which they are swept, and scratch space.

    Args:
        lists: weights, gradients, first and second moments; one tensor per layer each.
        rows: the layers' rows in the ledger.
        counts: the number of segments of each layer.
    """

    def __init__(self, lists: Sequence[Sequence[Tensor]], rows: Sequence[int], counts: Sequence[int]) -> None:
        device = lists[0][0].device
        self.device = device
        self.types = [TYPES[one[0].dtype] for one in lists]
        self._counts = np.asarray(counts, dtype=np.int64)
        lengths = np.repeat(np.array([t.numel() for t in lists[0]], dtype=np.int64) // self._counts, self._counts)
        within = np.arange(lengths.size) - np.repeat(np.cumsum(self._counts) - self._counts, self._counts)
        self._offsets = within * lengths
        self.chunk = CHUNK
        segment, position, first = cut(lengths, self.chunk)
        order = schedule(len(segment))
        c = np.where(order >= 0, order, -order - 1)
        s = segment[c]
        items = np.zeros((len(order), 8), dtype=np.int32)
        items[:, 0] = s
        items[:, 1] = position[c]
        items[:, 2] = np.minimum(lengths[s] - position[c] * self.chunk, self.chunk)
        items[:, 3] = np.asarray(rows, dtype=np.int64)[s]
        items[:, 4] = first[s]
        items[:, 5] = (first[1:] - first[:-1])[s]
        items[:, 6] = order >= 0
        self.items = to_device(items, device)
        self.n_segments = int(lengths.size)
        flags = torch.zeros(3, self.n_segments, dtype=torch.int32, device=device)
        self.done, self.ready, self.left = flags.unbind()
        self.partial = torch.empty(len(segment), 3, dtype=torch.float64, device=device)
        self.a, self.b = torch.empty(2, self.n_segments, dtype=torch.float64, device=device).unbind()
        self._addresses = Addresses(device)
        self._captured: list[Tensor] = []
        self._sizes = [one[0].element_size() for one in lists]
        self._table = np.stack([self._spread(k, list(map(Tensor.data_ptr, one))) for k, one in enumerate(lists)])
        self._point()
        self._uploaded: tuple[Any, Tensor] | None = None
        self._compiled: dict[Any, Any] = {}

    def move_gradients(self, addresses: Sequence[int]) -> None:
        """Update the addresses of the second list; everything else is unchanged."""
        self._table[1] = self._spread(1, addresses)
        self._point()

    def _spread(self, k: int, addresses: Sequence[int]) -> Ints:
        """Return the addresses of the segments of list k."""
        return np.repeat(np.array(addresses, dtype=np.int64), self._counts) + self._offsets * self._sizes[k]

    def _point(self) -> None:
        table = self._addresses.table(self._table)
        if table is None:
            raise ControlError(
                "A CUDA graph captures a step of layers that have not been stepped since the last capture. Take one "
                "step outside a graph first."
            )
        self.pointers, self.aligned = table, is_aligned(self._table)

    def __call__(
        self, rule: str, hyper: Hyper, lr: float | Tensor, ledger: Ledger, law: Law, *, zero: bool = False
    ) -> None:
        """Take one step; with `zero`, set the second list (a buffer of displacements) to 0."""
        if is_capturing():
            _captured.add(self)
            self._captured.append(self.pointers)  # the addresses may be updated later, outside the graph
        else:
            self._addresses.provide()
        if isinstance(lr, Tensor) and lr.device.type == "cpu" != self.device.type:
            lr = lr.item()  # known on the host, and out of reach for a kernel
        key = (rule, hyper.maximize, hyper.decoupled, law, zero, id(ledger), self.aligned)
        known = None if isinstance(lr, Tensor) else self._compiled.get(key)
        if known is None:
            arguments = self._arguments(rule, hyper, lr, ledger, law, zero)
            with on(self.device):
                compiled = step_kernel[(len(self.items),)](*arguments, num_warps=_WARPS)
            # A kernel that reads the rate from memory cannot take a number.
            if not isinstance(lr, Tensor) and (again := relauncher(compiled, len(self.items))) is not None:
                self._compiled[key] = again, arguments
            return
        # The same tensors as when it was compiled, so the arguments need not be inspected again.
        run, arguments = known
        arguments[_POINTERS] = self.pointers
        arguments[_NUMBERS] = self._numbers(hyper, law)
        arguments[_LR : _LR + 2] = in_two(float(lr))
        with on(self.device):
            run(*arguments)

    @staticmethod
    def takes(*tensors: Tensor) -> bool:
        """Return whether the kernel knows the types of these tensors."""
        return all(t.dtype in TYPES for t in tensors)

    def clear(self, ledger: Ledger) -> None:
        """Set what is not finite to 0 in the first list, where the last step of a layer was skipped."""
        with on(self.device):
            _clear_kernel[(len(self.items),)](
                self.items, self.pointers, ledger.bad, T=self.types[0], CHUNK=self.chunk, BLOCK=1024
            )

    def _arguments(
        self, rule: str, hyper: Hyper, lr: float | Tensor, ledger: Ledger, law: Law, zero: bool
    ) -> list[Any]:
        tw, tg, tm, tv = self.types
        on_device = isinstance(lr, Tensor)
        return [
            self.items, self.pointers, self.n_segments, self.partial, self.done, self.ready, self.left,
            self.a, self.b, ledger.multiplier, ledger.radius, ledger.skipped, ledger.bad, ledger.power1,
            ledger.power2, ledger.age, self._numbers(hyper, law), *in_two(0.0 if on_device else float(lr)),
            lr if on_device else ledger.radius,
            _NUMBER[rule], *RULES[rule], hyper.maximize, hyper.decoupled,
            on_device, law.project, law.scale == "relative", law.reproject, law.growth is not None, zero,
            TANGENT_FLOOR, tw, tg, tm, tv, tl.float64 if tw == tl.float64 else tl.float32,
            self.aligned, self.chunk, _BLOCK, _FOLD, _STAGES,
        ]  # fmt: skip

    def _numbers(self, hyper: Hyper, law: Law) -> Tensor:
        """Return the hyperparameters in float64 on the device: kernel arguments would be rounded to float32."""
        values = (
            hyper.decay, hyper.momentum, 1.0 - hyper.dampening, hyper.beta1, hyper.beta2, hyper.eps,
            law.growth or 0.0, hyper.along, hyper.momentum_decay * math.log2(0.96), hyper.noise,
        )  # fmt: skip
        if self._uploaded is None or self._uploaded[0] != values:
            if is_capturing():
                raise ControlError(
                    "A CUDA graph captures a step whose options (momentum, betas, weight decay, ...) have just "
                    "changed. Take one step outside the graph first."
                )
            self._uploaded = (values, to_device(np.array(values), self.device))
        if is_capturing():
            self._captured.append(self._uploaded[1])
        return self._uploaded[1]
