"""Copies and inner products of a bundle in one launch each, through a table of pointers to weights and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from gyroscope.monitor.quantities import COLUMNS
from gyroscope.vectors.launch import CHUNK, Addresses, cut, is_aligned, on, relauncher, stream_of, to_device
from gyroscope.vectors.layout import like
from gyroscope.vectors.triton import TYPES, pointer, rounded, total

if TYPE_CHECKING:
    from gyroscope.monitor.bundle import Layout, Remembered

_COLUMNS = len(COLUMNS)
_BLOCK = 512
_WARPS = 4


@triton.jit
def _copy_kernel(
    items, pointers, target, TW: tl.constexpr, TB: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0)
    layer = tl.load(items + c * 4)
    start = tl.load(items + c * 4 + 1)
    n = tl.load(items + c * 4 + 2).to(tl.int32)
    offset = tl.load(items + c * 4 + 3)
    w = pointer(pointers, layer, TW, ALIGNED) + start
    for i in range(0, n, BLOCK):
        at = i + tl.arange(0, BLOCK)
        inside = at < n
        tl.store(target + offset + start + at, tl.load(w + at, mask=inside).to(TB), mask=inside)


@triton.jit
def _products_kernel(
    items, first_chunk, pointers, layers, r, b, a, p, skip, partial, done, out,
    TW: tl.constexpr, TG: tl.constexpr, TP: tl.constexpr,
    HAS_B: tl.constexpr, HAS_A: tl.constexpr, HAS_P: tl.constexpr, KEEP: tl.constexpr, HAS_SKIP: tl.constexpr,
    ALIGNED: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0)
    layer = tl.load(items + c * 4)
    start = tl.load(items + c * 4 + 1)
    n = tl.load(items + c * 4 + 2).to(tl.int32)
    here = tl.load(items + c * 4 + 3) + start
    w_at = pointer(pointers, layer, TW, ALIGNED) + start
    g_at = pointer(pointers, layers + layer, TG, ALIGNED) + start

    taken = True
    if HAS_SKIP:
        taken = tl.load(skip) == 0

    ww = tl.zeros((BLOCK,), tl.float64)
    we, ee, gg, wg, uu, wu, gu, vv, wv, pp, vp, bb = ww, ww, ww, ww, ww, ww, ww, ww, ww, ww, ww, ww
    for i in range(0, n, BLOCK):
        at = i + tl.arange(0, BLOCK)
        inside = at < n
        w = tl.load(w_at + at, mask=inside, other=0.0).to(tl.float64)
        g = tl.load(g_at + at, mask=inside, other=0.0).to(tl.float64)
        e = w - tl.load(r + here + at, mask=inside, other=0.0).to(tl.float64)
        ww += w * w
        we += w * e
        ee += e * e
        gg += g * g
        wg += w * g
        if HAS_B:
            before = tl.load(b + here + at, mask=inside, other=0.0).to(tl.float64)
            u = w - before
            bb += before * before
            uu += u * u
            wu += w * u
            gu += g * u
            v = u
        if HAS_A:
            v = w - tl.load(a + here + at, mask=inside, other=0.0).to(tl.float64)
        if HAS_A or HAS_B:
            vv += v * v
            wv += w * v
            if HAS_P:
                q = tl.load(p + here + at, mask=inside, other=0.0).to(tl.float64)
                pp += q * q
                vp += v * q
            if KEEP:
                tl.store(p + here + at, rounded(v, TP), mask=inside & taken)

    row = partial + c * COLUMNS
    tl.store(row, tl.sum(ww))
    tl.store(row + 1, tl.sum(we))
    tl.store(row + 2, tl.sum(ee))
    tl.store(row + 3, tl.sum(gg))
    tl.store(row + 4, tl.sum(wg))
    tl.store(row + 5, tl.sum(uu))
    tl.store(row + 6, tl.sum(wu))
    tl.store(row + 7, tl.sum(gu))
    tl.store(row + 8, tl.sum(vv))
    tl.store(row + 9, tl.sum(wv))
    tl.store(row + 10, tl.sum(pp))
    tl.store(row + 11, tl.sum(vp))
    tl.store(row + 12, tl.sum(bb))
    tl.debug_barrier()
    low = tl.load(first_chunk + layer)
    high = tl.load(first_chunk + layer + 1)
    finished = tl.atomic_add(done + layer, 1, sem="acq_rel")
    if finished == high - low - 1:
        tl.store(done + layer, 0)
        for column in tl.static_range(COLUMNS):
            tl.store(out + layer * COLUMNS + column, total(partial, low, high, column, COLUMNS))


class Kernel:
    """Launches for the layers of one bundle."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout, self.device = layout, device
        sizes = np.array(layout.sizes, dtype=np.int64)
        segment, position, first = cut(sizes)
        starts = position * CHUNK
        items = np.stack(
            [segment, starts, np.clip(sizes[segment] - starts, 0, CHUNK), np.array(layout.offsets)[segment]], 1
        )
        self._items = to_device(items, device)
        self._first = to_device(first, device)
        self._chunks = len(items)
        self._addresses = Addresses(device)
        self._pointed: dict[Any, tuple[list[list[int]], Tensor, bool]] = {}
        self._done: dict[int, Tensor] = {}
        self._compiled: dict[Any, Any] = {}
        self.kept: Tensor | None = None  # buffers go back to the allocator

    def copy(self, weights: Sequence[Tensor], *, lasting: bool = False) -> Tensor:
        """Copy the weights to a new flat buffer; unused buffers go back to the allocator."""
        pointers, aligned = self._point([weights])
        target = torch.empty(self.layout.total, dtype=weights[0].dtype, device=self.device)
        kind = weights[0].dtype
        self._launch(_copy_kernel, [self._items, pointers, target], [kind, kind], [aligned, 1024])
        return target

    def products(self, weights: Sequence[Tensor], gradients: Sequence[Tensor], remembered: Remembered) -> Tensor:
        """Return `[layers, columns]`; the displacement replaces the previous one."""
        reference, before, anchor = remembered.reference, remembered.before, remembered.anchor
        previous, moved, skip = remembered.previous, remembered.moved, remembered.skip
        if len({g.dtype for g in gradients}) > 1:
            gradients = [g.float() for g in gradients]
        # Contiguity costs half as much to know as strides.
        plain = all(map(Tensor.is_contiguous, gradients)) and all(map(Tensor.is_contiguous, weights))
        if not plain and list(map(Tensor.stride, gradients)) != list(map(Tensor.stride, weights)):
            gradients = [like(g, w) for g, w in zip(gradients, weights, strict=True)]
        pointers, aligned = self._point([weights, gradients])
        stream = stream_of(self.device)  # two streams must not count in the same place
        layers = len(self.layout.sizes)
        if stream not in self._done:
            self._done[stream] = torch.zeros(layers, dtype=torch.int64, device=self.device)
        partial = torch.empty(self._chunks, _COLUMNS, dtype=torch.float64, device=self.device)
        out = torch.empty(layers, _COLUMNS, dtype=torch.float64, device=self.device)

        def there(buffer: Tensor | None) -> Any:
            return reference if buffer is None else buffer

        tensors = [
            self._items, self._first, pointers, layers, reference, there(before), there(anchor), there(previous),
            there(skip), partial, self._done[stream], out,
        ]  # fmt: skip
        types = [weights[0].dtype, gradients[0].dtype, there(previous).dtype]
        settings = [
            before is not None, anchor is not None, previous is not None and moved, previous is not None,
            skip is not None, aligned, _COLUMNS, _BLOCK,
        ]  # fmt: skip
        self._launch(_products_kernel, tensors, types, settings)
        return out

    def _launch(self, kernel: Any, tensors: list[Any], types: list[torch.dtype], settings: list[Any]) -> None:
        """Launch a kernel; from the second time on, without checking every argument again."""
        # A compiled kernel knows which addresses are multiples of 16; other buffers must be so too.
        addresses = [t.data_ptr() for t in tensors if isinstance(t, Tensor)]
        kinds = [t.dtype if isinstance(t, Tensor) else t for t in tensors]
        key = None if any(a % 16 for a in addresses) else (kernel, *kinds, *types, *settings)
        known = self._compiled.get(key)
        with on(self.device):
            if known is not None:
                again, constants = known
                again(*tensors, *constants)
                return
            constants = [*(TYPES[one] for one in types), *settings]
            compiled = kernel[(self._chunks,)](*tensors, *constants, num_warps=_WARPS)
        if key is not None and (again := relauncher(compiled, self._chunks)) is not None:
            self._compiled[key] = again, constants

    def _point(self, lists: Sequence[Sequence[Tensor]]) -> tuple[Tensor, bool]:
        """Return the addresses of the tensors, on the device, and whether all allow 16-byte loads."""
        addresses = [list(map(Tensor.data_ptr, one)) for one in lists]
        key = stream_of(self.device), len(lists)
        known = self._pointed.get(key)
        if known is None or known[0] != addresses:
            array = np.array(addresses, dtype=np.int64)
            table = self._addresses.table(array)
            assert table is not None  # no measurement is captured
            known = self._pointed[key] = addresses, table, is_aligned(array)
        return known[1:]
