"""`dots` and `combine_` as single launches for all layers, through a table of pointers.

Every program works on one chunk of one segment. The program that finishes a segment last adds up the sums of its chunks
in order, so results do not depend on scheduling, and no second launch is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from gyroscope.base.hooks import is_capturing
from gyroscope.errors import VectorError
from gyroscope.vectors import eager
from gyroscope.vectors.launch import CHUNK, Addresses, Ints, Kept, cut, is_aligned, on, rows_of, stream_of, to_device
from gyroscope.vectors.layout import aligned, by_type, is_dense, like, splits_in_memory

_MOST_LISTS = 4  # inner products among more lists take several passes

TYPES = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@triton.jit
def pointer(table, i, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return an address from the table as a pointer; `ALIGNED` allows 16-byte loads."""
    p = tl.load(table + i).to(tl.pointer_type(TYPE))
    if ALIGNED:
        p = tl.multiple_of(p, 16)
    return p


@triton.jit
def fetch(p, offsets, length, MASKED: tl.constexpr):
    """Load a block, with zeros past the end."""
    if MASKED:
        return tl.load(p + offsets, mask=offsets < length, other=0.0)
    else:
        return tl.load(p + offsets)


@triton.jit
def rounded(value, TYPE: tl.constexpr):
    """Round to the type of storage; to 16 bits by way of float32, the conversion that every target has."""
    if tl.float64 == TYPE:
        return value.to(tl.float64)
    else:
        return value.to(tl.float32).to(TYPE)


@triton.jit
def total(partial, low, high, column, COLUMNS: tl.constexpr):
    """Sum the chunks of a segment in order. Loads bypass the L1 cache, because other programs wrote the chunks."""
    acc = tl.zeros((128,), tl.float64)
    for start in range(low, high, 128):
        i = start + tl.arange(0, 128)
        acc += tl.load(partial + i * COLUMNS + column, mask=i < high, other=0.0, cache_modifier=".cg")
    return tl.sum(acc)


@triton.jit
def _products(
    p0, p1, p2, p3, offsets, length, c00, c01, c11, c02, c12, c22, c03, c13, c23, c33,
    LISTS: tl.constexpr, WANT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    x0 = fetch(p0, offsets, length, MASKED).to(tl.float64)
    if WANT & 1:
        c00 += x0 * x0
    if LISTS > 1:
        x1 = fetch(p1, offsets, length, MASKED).to(tl.float64)
        if WANT & 2:
            c01 += x0 * x1
        if WANT & 4:
            c11 += x1 * x1
        if LISTS > 2:
            x2 = fetch(p2, offsets, length, MASKED).to(tl.float64)
            if WANT & 8:
                c02 += x0 * x2
            if WANT & 16:
                c12 += x1 * x2
            if WANT & 32:
                c22 += x2 * x2
            if LISTS > 3:
                x3 = fetch(p3, offsets, length, MASKED).to(tl.float64)
                if WANT & 64:
                    c03 += x0 * x3
                if WANT & 128:
                    c13 += x1 * x3
                if WANT & 256:
                    c23 += x2 * x3
                if WANT & 512:
                    c33 += x3 * x3
    return c00, c01, c11, c02, c12, c22, c03, c13, c23, c33


@triton.jit
def _dots_kernel(
    pointers, lengths, chunk_segment, chunk_position, first_chunk, partial, done, out, segments,
    T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr, T3: tl.constexpr,
    LISTS: tl.constexpr, WANT: tl.constexpr, COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0)
    s = tl.load(chunk_segment + c)
    position = tl.load(chunk_position + c)
    n = tl.minimum(tl.load(lengths + s) - position * CHUNK, CHUNK).to(tl.int32)
    p0 = pointer(pointers, s, T0, ALIGNED) + position * CHUNK
    p1 = p0
    p2 = p0
    p3 = p0
    if LISTS > 1:
        p1 = pointer(pointers, segments + s, T1, ALIGNED) + position * CHUNK
    if LISTS > 2:
        p2 = pointer(pointers, 2 * segments + s, T2, ALIGNED) + position * CHUNK
    if LISTS > 3:
        p3 = pointer(pointers, 3 * segments + s, T3, ALIGNED) + position * CHUNK

    c00 = tl.zeros((BLOCK,), tl.float64)
    c01, c11, c02, c12, c22, c03, c13, c23, c33 = c00, c00, c00, c00, c00, c00, c00, c00, c00
    blocks = n // BLOCK
    for i in range(blocks):
        offsets = i * BLOCK + tl.arange(0, BLOCK)
        c00, c01, c11, c02, c12, c22, c03, c13, c23, c33 = _products(
            p0, p1, p2, p3, offsets, n, c00, c01, c11, c02, c12, c22, c03, c13, c23, c33, LISTS, WANT, False
        )
    if n > blocks * BLOCK:
        offsets = blocks * BLOCK + tl.arange(0, BLOCK)
        c00, c01, c11, c02, c12, c22, c03, c13, c23, c33 = _products(
            p0, p1, p2, p3, offsets, n, c00, c01, c11, c02, c12, c22, c03, c13, c23, c33, LISTS, WANT, True
        )

    k = 0
    for bit in tl.static_range(10):
        if WANT & (1 << bit):
            if bit == 0:
                value = c00
            elif bit == 1:
                value = c01
            elif bit == 2:
                value = c11
            elif bit == 3:
                value = c02
            elif bit == 4:
                value = c12
            elif bit == 5:
                value = c22
            elif bit == 6:
                value = c03
            elif bit == 7:
                value = c13
            elif bit == 8:
                value = c23
            else:
                value = c33
            tl.store(partial + c * COLUMNS + k, tl.sum(value))
            k += 1

    tl.debug_barrier()
    low = tl.load(first_chunk + s)
    high = tl.load(first_chunk + s + 1)
    finished = tl.atomic_add(done + s, 1, sem="acq_rel")
    if finished == high - low - 1:
        tl.store(done + s, 0)
        for column in tl.static_range(COLUMNS):
            tl.store(out + s * COLUMNS + column, total(partial, low, high, column, COLUMNS))


@triton.jit
def _combine_kernel(
    pointers, lengths, chunk_segment, chunk_position, a, b, segments,
    TX: tl.constexpr, TY: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0)
    s = tl.load(chunk_segment + c)
    position = tl.load(chunk_position + c)
    n = tl.minimum(tl.load(lengths + s) - position * CHUNK, CHUNK).to(tl.int32)
    x = pointer(pointers, s, TX, ALIGNED) + position * CHUNK
    y = pointer(pointers, segments + s, TY, ALIGNED) + position * CHUNK
    a_s = tl.load(a + s).to(tl.float64)
    b_s = tl.load(b + s).to(tl.float64)
    if (a_s != 1.0) | (b_s != 0.0):
        blocks = n // BLOCK
        for i in range(blocks):
            offsets = i * BLOCK + tl.arange(0, BLOCK)
            new = a_s * tl.load(x + offsets).to(tl.float64) + b_s * tl.load(y + offsets).to(tl.float64)
            tl.store(x + offsets, rounded(new, TX))
        if n > blocks * BLOCK:
            offsets = blocks * BLOCK + tl.arange(0, BLOCK)
            inside = offsets < n
            new = a_s * tl.load(x + offsets, mask=inside).to(tl.float64)
            new += b_s * tl.load(y + offsets, mask=inside).to(tl.float64)
            tl.store(x + offsets, rounded(new, TX), mask=inside)


@dataclass(frozen=True)
class _Work:
    """The work of one launch, on the device, but for the addresses of its tensors.

    Attributes:
        layer: the layer of each segment.
        within: how many elements of its layer lie before each segment.
        chunks: the number of chunks of all segments.
        addresses: tables of the tensors' addresses.
    """

    layer: Ints
    within: Ints
    lengths: Tensor
    chunk_segment: Tensor
    chunk_position: Tensor
    first_chunk: Tensor
    done: Tensor
    chunks: int
    addresses: Addresses

    @property
    def segments(self) -> int:
        """The number of segments."""
        return len(self.layer)

    def pointers(self, lists: Sequence[Sequence[Tensor]]) -> tuple[Tensor, bool]:
        """Return the table of where each segment of each list begins, and whether all of them are aligned."""
        base = np.array([list(map(Tensor.data_ptr, one)) for one in lists], dtype=np.int64)
        sizes = np.array([one[0].element_size() for one in lists], dtype=np.int64)
        begins = base[:, self.layer] + sizes[:, None] * self.within
        table = self.addresses.table(begins)
        if table is None:
            raise VectorError(_UNSEEN)
        return table, is_aligned(begins)


_UNSEEN = (
    "A CUDA graph captures `dots` or `combine_` of tensors of other sizes than before on this stream, or twice of new "
    "ones. Call them once outside the graph first."
)
_works: Kept[_Work] = Kept()


def _work(lists: Sequence[Sequence[Tensor]], segments: Sequence[int], device: torch.device) -> _Work:
    """Return the work for lists of dense tensors of one layout; made once for the same sizes."""
    rows = np.array(segments, dtype=np.int64)
    length = np.fromiter(map(Tensor.numel, lists[0]), np.int64, len(rows)) // rows
    # Two streams must not count in the same `done`.
    key = (device, stream_of(device), len(lists), rows.tobytes(), length.tobytes())
    known = _works.find(key)
    if known is not None:
        return known
    if is_capturing():
        raise VectorError(_UNSEEN)
    lengths = np.repeat(length, rows)
    segment, position, first = cut(lengths)
    work = _Work(
        layer=np.repeat(np.arange(len(rows)), rows),
        within=(np.arange(lengths.size) - np.repeat(np.cumsum(rows) - rows, rows)) * lengths,
        lengths=to_device(lengths, device),
        chunk_segment=to_device(segment, device),
        chunk_position=to_device(position, device),
        first_chunk=to_device(first, device),
        done=torch.zeros(lengths.size, dtype=torch.int64, device=device),
        chunks=len(segment),
        addresses=Addresses(device),
    )
    _works.keep(key, work)
    return work


def dots(lists: Sequence[Sequence[Tensor]], pairs: Sequence[tuple[int, int]], segments: Sequence[int]) -> Tensor:
    """Return the inner products `[sum(segments), len(pairs)]` of the pairs of lists, all on one device."""
    if not all(all(map(Tensor.is_contiguous, one)) for one in lists):
        layers = [aligned([one[i] for one in lists], n) for i, n in enumerate(segments)]
        lists = [list(one) for one in zip(*layers, strict=True)]
    kinds, passes = by_type(lists), _passes(pairs)
    if len(kinds) == len(passes) == 1:
        used = passes[0][0]
        return _launch_dots([lists[u] for u in used], segments, [_inside(pair, used) for pair in pairs])
    device = lists[0][0].device
    out = torch.empty(sum(segments), len(pairs), dtype=torch.float64, device=device)
    for members in kinds.values():
        rows = _rows(members, segments, device)
        for used, columns in passes:
            part = _launch_dots(
                [[lists[u][i] for i in members] for u in used],
                [segments[i] for i in members],
                [_inside(pairs[k], used) for k in columns],
            )
            for k, values in zip(columns, part.unbind(1), strict=True):
                out[:, k].index_copy_(0, rows, values)
    return out


def _rows(members: Sequence[int], segments: Sequence[int], device: torch.device) -> Tensor:
    return to_device(rows_of(members, segments), device)


def _inside(pair: tuple[int, int], used: Sequence[int]) -> tuple[int, int]:
    low, high = sorted((used.index(pair[0]), used.index(pair[1])))
    return low, high


def _passes(pairs: Sequence[tuple[int, int]]) -> list[tuple[list[int], list[int]]]:
    """Group the pairs so that each group needs at most `_MOST_LISTS` lists; return (lists, positions of the pairs)."""
    groups: list[tuple[list[int], list[int]]] = []
    for k, pair in enumerate(pairs):
        for used, columns in groups:
            extra = [i for i in dict.fromkeys(pair) if i not in used]
            if len(used) + len(extra) <= _MOST_LISTS:
                used += extra
                columns.append(k)
                break
        else:
            groups.append((list(dict.fromkeys(pair)), [k]))
    return groups


def _launch_dots(
    lists: Sequence[Sequence[Tensor]], segments: Sequence[int], pairs: Sequence[tuple[int, int]]
) -> Tensor:
    device = lists[0][0].device
    work = _work(lists, segments, device)
    pointers, is_all_aligned = work.pointers(lists)
    bits = [j * (j + 1) // 2 + i for i, j in pairs]
    want = sorted(set(bits))
    types = [TYPES[one[0].dtype] for one in lists] + [tl.float32] * (_MOST_LISTS - len(lists))
    # Graphs of one stream that replay side by side must not count in the same `done` either.
    done = torch.zeros_like(work.done) if is_capturing() else work.done
    partial = torch.empty(work.chunks, len(want), dtype=torch.float64, device=device)
    out = torch.empty(work.segments, len(want), dtype=torch.float64, device=device)
    with on(device):
        _dots_kernel[(work.chunks,)](
            pointers, work.lengths, work.chunk_segment, work.chunk_position, work.first_chunk,
            partial, done, out, work.segments, *types,
            LISTS=len(lists), WANT=sum(1 << b for b in want), COLUMNS=len(want),
            ALIGNED=is_all_aligned, CHUNK=CHUNK, BLOCK=1024 if len(lists) <= 2 else 512, num_warps=4,
        )  # fmt: skip
    order = [want.index(b) for b in bits]
    # Columns rather than an index, which would be uploaded and synchronize.
    return out if order == list(range(len(want))) else torch.stack([out[:, k] for k in order], 1)


def combine_(x: Sequence[Tensor], y: Sequence[Tensor], a: Tensor, b: Tensor, segments: Sequence[int]) -> None:
    """Update x ← a x + b y for lists on one device; `a` and `b` hold one number per segment."""
    device = x[0].device
    if not all(map(Tensor.is_contiguous, x)):
        walkable = [is_dense(t) and splits_in_memory(t, n) for t, n in zip(x, segments, strict=True)]
        if not all(walkable):
            # Tensors with gaps in memory are left to the eager backend; the others still go together.
            for ok, combine in ((True, combine_), (False, eager.combine_)):
                if members := [i for i, w in enumerate(walkable) if w == ok]:
                    rows, parts = _rows(members, segments, device), [segments[i] for i in members]
                    combine([x[i] for i in members], [y[i] for i in members], a[rows], b[rows], parts)
            return
    if list(map(Tensor.stride, x)) != list(map(Tensor.stride, y)):
        y = [like(yi, xi) for xi, yi in zip(x, y, strict=True)]
    kinds = by_type([x, y])
    for (tx, ty), members in kinds.items():
        lists, counts, a_s, b_s = [x, y], segments, a, b
        if len(kinds) > 1:
            rows = _rows(members, segments, device)
            lists = [[x[i] for i in members], [y[i] for i in members]]
            counts, a_s, b_s = [segments[i] for i in members], a[rows], b[rows]
        work = _work(lists, counts, device)
        pointers, is_all_aligned = work.pointers(lists)
        with on(device):
            _combine_kernel[(work.chunks,)](
                pointers, work.lengths, work.chunk_segment, work.chunk_position, a_s, b_s, work.segments,
                TYPES[tx], TYPES[ty], ALIGNED=is_all_aligned, CHUNK=CHUNK, BLOCK=1024, num_warps=4,
            )  # fmt: skip
