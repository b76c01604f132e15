"""`dots` and `combine_` in plain torch operations: any device, and the reference for the other backends.

Products of two float32 numbers are exact in float64, so sums are taken in float64, over pieces that stay in the cache.
A float32 dot of many equal numbers is visibly off; this one is right to twelve digits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gyroscope.vectors.layout import aligned, is_dense, like, memory_view

# Elements per piece. On a CPU, two float64 copies of a piece should fit in the cache and still be worth two threads,
# and few enough numbers should be added one after another. Elsewhere it only bounds the memory of the copies.
_PIECE = {"cpu": 1 << 18}
_PIECE_ELSEWHERE = 1 << 24

# Layers up to this many elements are small: calling an operation costs more than the operation itself.
_SMALL = 1 << 15

# Outside these ranges p − lr (g + wd p) could overflow, vanish or cancel in float32, so the exact way is taken.
_SAFE_A = (0.5, 2.0)
_SAFE_B = (1e-12, 1e12)


def accumulator(device: torch.device) -> torch.dtype:
    """Return the dtype of sums: float64, or float32 on devices that have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def dots(lists: Sequence[Sequence[Tensor]], pairs: Sequence[tuple[int, int]], segments: Sequence[int]) -> Tensor:
    """Return the inner products `[sum(segments), len(pairs)]` of the pairs of lists, all on one device."""
    dtype = accumulator(lists[0][0].device)
    rows: dict[int, Tensor] = {}
    for members in _alike(lists, segments):
        rows |= zip(members, _many_dots(lists, members, pairs, dtype), strict=True)
    for i, n in enumerate(segments):
        if i not in rows:
            rows[i] = _layer_dots([one[i] for one in lists], pairs, n, dtype)
    return torch.cat([rows[i] for i in range(len(segments))])


def _alike(lists: Sequence[Sequence[Tensor]], segments: Sequence[int]) -> list[list[int]]:
    """Group the small layers on a CPU by size, so that each group costs a few operations instead of a few per layer.

    A layer that is the only one of its size is a group too. Other layers must not change a layer's last digit, or ranks
    that hold the same layer next to different shards would drift apart.
    """
    found: dict[Any, list[int]] = {}
    if lists[0][0].device.type == "cpu":
        for i, tensors in enumerate(zip(*lists, strict=True)):
            n = tensors[0].numel()
            if 0 < n <= _SMALL and segments[i] == 1 and all(map(Tensor.is_contiguous, tensors)):
                found.setdefault((n, *(t.dtype for t in tensors)), []).append(i)
    return list(found.values())


def _many_dots(
    lists: Sequence[Sequence[Tensor]], members: Sequence[int], pairs: Sequence[tuple[int, int]], dtype: torch.dtype
) -> Iterator[Tensor]:
    """Yield the inner products of contiguous layers of one size, one `[1, K]` row per layer."""
    n = lists[0][members[0]].numel()
    step = _PIECE["cpu"] // n
    for start in range(0, len(members), step):
        some = members[start : start + step]
        *copies, product = _scratch(len(lists) + 1, n * len(some), dtype, lists[0][members[0]].device)
        for copy, one in zip(copies, lists, strict=True):
            copy.copy_(torch.cat([one[i].detach().view(-1) for i in some]))
        x = [copy.view(len(some), n) for copy in copies]
        product = product.view(len(some), n)
        sums = torch.stack([torch.mul(x[i], x[j], out=product).sum(1) for i, j in pairs], 1)
        yield from sums.unsqueeze(1)


def _layer_dots(
    tensors: Sequence[Tensor], pairs: Sequence[tuple[int, int]], segments: int, dtype: torch.dtype
) -> Tensor:
    views = aligned(tensors, segments)
    length = views[0].shape[1]
    piece = _PIECE.get(views[0].device.type, _PIECE_ELSEWHERE)
    if segments == 1:
        return _long_dots([v[0] for v in views], pairs, piece, dtype)
    step = max(1, piece // max(1, length))
    out = []
    for start in range(0, segments, step):
        rows = [v[start : start + step].to(dtype) for v in views]
        out.append(torch.stack([(rows[i] * rows[j]).sum(1) for i, j in pairs], 1))
    return torch.cat(out)


def _long_dots(vectors: Sequence[Tensor], pairs: Sequence[tuple[int, int]], piece: int, dtype: torch.dtype) -> Tensor:
    length = vectors[0].numel()
    buffers = _scratch(len(vectors), min(piece, length), dtype, vectors[0].device)
    sums = []
    for start in range(0, max(1, length), piece):
        pieces = [
            b[: min(piece, length - start)].copy_(v[start : start + piece])
            for b, v in zip(buffers, vectors, strict=True)
        ]
        sums += [torch.dot(pieces[i], pieces[j]) for i, j in pairs]
    return torch.stack(sums).view(-1, len(pairs)).sum(0, keepdim=True)


_kept = threading.local()


def _scratch(lists: int, length: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return memory for copies; on a CPU it is reused, since new pages cost more than the sums."""
    if device.type != "cpu":
        return list(torch.empty(lists, length, dtype=dtype, device=device))
    memory: Tensor | None = getattr(_kept, "memory", None)
    if memory is None or len(memory) < lists:
        with torch.inference_mode(False):  # later calls may be in another mode than this one
            memory = _kept.memory = torch.empty(lists, _PIECE["cpu"], dtype=dtype, device="cpu")
    return [one[:length] for one in memory[:lists]]


def combine_(x: Sequence[Tensor], y: Sequence[Tensor], a: Tensor, b: Tensor, segments: Sequence[int]) -> None:
    """Update x ← a x + b y for lists on one device; `a` and `b` hold one number per segment."""
    cpu = x[0].device.type == "cpu"
    factors = list(zip(a.tolist(), b.tolist(), strict=True)) if cpu else []
    small: list[tuple[Tensor, Tensor, float, float]] = []
    row = 0
    for xi, yi, n in zip(x, y, segments, strict=True):
        if not cpu or n > 1 or xi.dtype != yi.dtype or not is_dense(xi):
            _exact_(xi, yi, a[row : row + n], b[row : row + n])
        elif xi.numel() <= _SMALL and _is_safe(xi, *factors[row]):
            small.append((xi.detach(), yi.detach(), *factors[row]))
        else:
            _scale_add_(xi, yi, *factors[row])
        row += n
    if small:
        xs, ys, its_a, its_b = (list(one) for one in zip(*small, strict=True))
        scaled = torch._foreach_mul(ys, its_b)  # before x changes, because y may be x
        torch._foreach_mul_(xs, its_a)
        torch._foreach_add_(xs, scaled)


def _is_safe(x: Tensor, a: float, b: float) -> bool:
    """Return whether the tensors' own precision suffices: nothing can overflow, vanish or cancel."""
    in_range = _SAFE_A[0] <= a <= _SAFE_A[1] and _SAFE_B[0] < abs(b) < _SAFE_B[1]
    return in_range and x.dtype in (torch.float32, torch.float64)


def _scale_add_(x: Tensor, y: Tensor, a: float, b: float) -> None:
    """Update x ← a x + b y in one pass where torch has one: p ← p − lr (g + wd p) is the same combination."""
    if a == 1.0 and b == 0.0:
        return
    if not _is_safe(x, a, b) or not hasattr(torch, "_fused_sgd_"):
        coefficients = torch.tensor([a, b], dtype=torch.float64, device=x.device)
        _exact_(x, y, coefficients[:1], coefficients[1:])
        return
    torch._fused_sgd_(
        [memory_view(x, 1)],
        [memory_view(like(y, x), 1)],
        [],
        weight_decay=(a - 1.0) / b,
        momentum=0.0,
        lr=-b,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )


def _exact_(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> None:
    """Update x ← a x + b y in the accumulator's precision, rounded once; rows with a = 1 and b = 0 stay as they are."""
    segments = a.numel()
    dtype = accumulator(x.device)
    shape = (segments, -1)
    old = x.detach().reshape(shape)
    a, b = a.to(dtype).unsqueeze(1), b.to(dtype).unsqueeze(1)
    new = (a * old.to(dtype) + b * y.detach().reshape(shape).to(dtype)).to(x.dtype)
    keep = (a == 1) & (b == 0)
    x.detach().copy_(torch.where(keep, old, new).reshape(x.shape))


def power_of_two(most: Tensor) -> Tensor:
    """Return the largest power of two up to each positive number, 1 for 0, else NaN. Dividing by it rounds nothing.

    >>> power_of_two(torch.tensor([3.0, 0.25, 0.0, torch.inf]))
    tensor([2.0000, 0.2500, 1.0000,    nan])
    """
    scale = most / (2 * torch.frexp(most).mantissa)
    return torch.where(most == 0, 1.0, torch.where(most.isfinite(), scale, torch.nan))
