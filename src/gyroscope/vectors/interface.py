"""`dots` and `combine_` over lists of tensors: validation, and the choice of the backend."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from operator import index as whole
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gyroscope.errors import VectorError
from gyroscope.vectors import eager
from gyroscope.vectors.launch import rows_of, to_device
from gyroscope.vectors.layout import local, plan

_DTYPES = {torch.float32, torch.float64, torch.bfloat16, torch.float16}


def dots(
    pairs: Mapping[str, tuple[Sequence[Tensor], Sequence[Tensor]]], *, segments: Sequence[int] | None = None
) -> Tensor:
    """Return the inner product ⟨x_l, y_l⟩ for each layer l and each named pair (x, y).

    It takes one pass over memory, does not synchronize with the host, and sums in float64.

    Args:
        pairs: the pairs by name; each is two lists of tensors, one tensor per layer. A list that occurs in several
            pairs is read once.
        segments: the number of equal parts that layer l is split into along its leading dimension, each with its own
            inner products (rows of a matrix, blocks of a fused projection). Default: one part per layer.

    Returns:
        A float64 tensor `[L, K]` on the layers' device; column k belongs to the k-th pair. With `segments` it has one
        row per segment. For layers on several devices it is on the first accelerator among them. For DTensors it holds
        the inner products of the whole tensors, the same on every rank.

    Example:
        >>> w, s = [torch.tensor([3.0, 4.0])], [torch.tensor([1.0, 0.0])]
        >>> dots({"ww": (w, w), "ws": (w, s)})
        tensor([[25.,  3.]], dtype=torch.float64)
    """
    lists, index = _unique(pairs)
    counts = _counts(lists, segments)
    if not lists or not lists[0]:
        return torch.zeros(0, len(pairs), dtype=torch.float64, device="cpu")
    over_ranks = plan(lists, counts)
    if over_ranks is not None:
        lists = [local(one) for one in lists]
    device = _home(lists)
    out: Tensor
    groups = _by_device(lists)
    if len(groups) == 1:
        out = backend(device).dots(lists, index, counts)
    else:
        out = torch.empty(sum(counts), len(index), dtype=eager.accumulator(device), device=device)
        for where, members in groups.items():
            part = backend(where).dots(
                [[one[i] for i in members] for one in lists], index, [counts[i] for i in members]
            )
            rows = to_device(rows_of(members, counts), device)
            out.index_copy_(0, rows, part.to(out, non_blocking=True))
    if over_ranks is not None:
        out = over_ranks.reduce(out)
    return out


def combine_(
    x: Sequence[Tensor], y: Sequence[Tensor], a: Tensor, b: Tensor, *, segments: Sequence[int] | None = None
) -> None:
    """Update x_l ← a_l x_l + b_l y_l in place, where the tensors `a` and `b` hold one number per layer or segment.

    Where a_l = 1 and b_l = 0, the layer stays exactly as it is, whatever y_l holds.

    Example:
        >>> x, y = [torch.tensor([1.0, 2.0])], [torch.tensor([10.0, 10.0])]
        >>> combine_(x, y, torch.tensor([2.0]), torch.tensor([0.5]))
        >>> x
        [tensor([7., 9.])]
    """
    x, y = _listed(x, "`x`"), _listed(y, "`y`")
    counts = _counts([x, y], segments)
    total = sum(counts)
    for name, given in (("a", a), ("b", b)):
        if not isinstance(given, Tensor) or given.is_complex():
            what = f"a {given.dtype} tensor" if isinstance(given, Tensor) else f"a {type(given).__name__}"
            raise VectorError(
                f"`{name}` must be a tensor of real numbers, one per layer or segment, got {what}. Try "
                f"torch.tensor({[1.0] * min(total, 3)}) for {min(total, 3)} of them."
            )
    if a.shape != (total,) or b.shape != (total,):
        raise VectorError(
            f"`a` and `b` must have shape ({total},), one number per layer or segment, got {tuple(a.shape)} and "
            f"{tuple(b.shape)}. Try torch.ones({total})."
        )
    if not x:
        return
    plan([x, y], counts)  # rejects layers whose shards do not belong together
    xs, ys = local(x), local(y)
    a, b = a.detach().contiguous(), b.detach().contiguous()  # kernels read them by their place in memory
    groups = _by_device([xs, ys])
    if len(groups) == 1:
        (where,) = groups
        backend(where).combine_(xs, ys, a.to(where), b.to(where), counts)
        return
    for where, members in groups.items():
        rows = rows_of(members, counts)
        backend(where).combine_(
            [xs[i] for i in members],
            [ys[i] for i in members],
            a[to_device(rows, a.device)].to(where),
            b[to_device(rows, b.device)].to(where),
            [counts[i] for i in members],
        )


def backend(device: torch.device | str) -> ModuleType:
    """Return the module that computes on `device`: `triton` on CUDA where Triton is installed, else `eager`.

    The environment variable `GYROSCOPE_BACKEND` overrides the choice. `native` compiles a kernel for CPUs with the
    machine's C compiler, and leaves other devices as they are. `eager` and `triton` hold for every device; `triton` on
    a CPU needs Triton's interpreter (`TRITON_INTERPRET=1`).

    >>> backend("cpu").__name__
    'gyroscope.vectors.eager'
    """
    name = os.environ.get("GYROSCOPE_BACKEND", "")
    if name not in ("", "eager", "native", "triton"):
        raise VectorError(
            f"GYROSCOPE_BACKEND must be 'eager', 'native' or 'triton', got {name!r}. Unset it for the default."
        )
    try:
        kind = torch.device(device).type
    except (TypeError, RuntimeError):  # also for an accelerator that is not there
        raise VectorError(f"`device` must be a device that torch knows, got {device!r}. Try 'cpu'.") from None
    if name == "native" and kind == "cpu":
        from gyroscope.vectors import native

        return native
    wanted = name if name in ("eager", "triton") else "triton" if kind == "cuda" and _has_triton() else "eager"
    if wanted == "eager":
        return eager
    if name == "triton":
        _refuse_idle_triton(kind)
    from gyroscope.vectors import triton

    return triton


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _refuse_idle_triton(kind: str) -> None:
    """Report what Triton needs where it was requested; its own messages are about drivers."""
    if not _has_triton():
        raise VectorError(
            "GYROSCOPE_BACKEND is 'triton', which is not installed. Install triton, or unset the variable."
        )
    if kind == "cpu" and os.environ.get("TRITON_INTERPRET", "0").lower() not in ("1", "true", "on", "y", "yes"):
        raise VectorError(
            "GYROSCOPE_BACKEND is 'triton' and a layer is on the CPU, where Triton needs its interpreter "
            "(TRITON_INTERPRET=1, for tests). Unset GYROSCOPE_BACKEND to use each device's own backend."
        )


def _unique(
    pairs: Mapping[str, tuple[Sequence[Tensor], Sequence[Tensor]]],
) -> tuple[list[list[Tensor]], list[tuple[int, int]]]:
    """Return the distinct lists among the pairs, and each pair as two positions in them."""
    lists: list[list[Tensor]] = []
    seen: dict[int, int] = {}
    index = []
    if not isinstance(pairs, Mapping):
        raise VectorError(f"`pairs` must be a dict, got a {type(pairs).__name__}. Try {{'xy': (x, y)}}.")
    for name, pair in pairs.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise VectorError(
                f"Pair {name!r} must be two lists with one tensor per layer, got {_counted(pair)}. Try ([x], [y])."
            )
        for one in pair:
            if id(one) not in seen:
                seen[id(one)] = len(lists)
                lists.append(_listed(one, f"Each part of pair {name!r}"))
        index.append((seen[id(pair[0])], seen[id(pair[1])]))
    return lists, index


def _counted(pair: object) -> str:
    return f"{len(pair)} lists" if isinstance(pair, tuple | list) else f"a {type(pair).__name__}"


def _listed(one: Any, what: str) -> list[Tensor]:
    if isinstance(one, Tensor) or not isinstance(one, Iterable):
        raise VectorError(
            f"{what} must be a list with one tensor per layer, got a {type(one).__name__}. For one layer, try [tensor]."
        )
    return list(one)


def _counts(lists: Sequence[Sequence[Tensor]], segments: Sequence[int] | None) -> list[int]:
    """Return the number of segments of each layer, after checking that the lists belong together."""
    if not lists:
        return []
    n = len(lists[0])
    for other in lists[1:]:
        if len(other) != n:
            raise VectorError(f"Every list must have one tensor per layer, got lists of {n} and {len(other)} tensors.")
    try:
        fine = _belong_together(lists)
    except (AttributeError, TypeError):  # not a tensor
        fine = False
    if not fine:
        _say_why_not(lists)
    if segments is None:
        return [1] * n
    try:
        counts = [whole(parts) for parts in segments]
    except TypeError:
        raise VectorError(
            f"`segments` must be a list of integers, the number of parts of each layer, got {segments!r}. Try "
            f"{[1] * min(n, 3)} for {min(n, 3)} layers that are not split."
        ) from None
    if len(counts) != n:
        raise VectorError(f"`segments` must have one entry per layer, got {len(counts)} entries for {n} layers.")
    for i, (t, parts) in enumerate(zip(lists[0], counts, strict=True)):
        if parts < 1 or (parts > 1 and (t.dim() == 0 or t.shape[0] % parts)):
            raise VectorError(
                f"Layer {i} of shape {tuple(t.shape)} cannot be split into {parts} equal parts along its "
                "leading dimension."
            )
    return counts


def _belong_together(lists: Sequence[Sequence[Tensor]]) -> bool:
    """Return whether dtypes are supported, and shapes and devices agree layer by layer."""
    first = lists[0]
    shapes, devices = [t.shape for t in first], [t.device for t in first]
    return all(
        {t.dtype for t in one} <= _DTYPES
        and {t.layout for t in one} <= {torch.strided}
        and (one is first or [t.shape for t in one] == shapes)
        and (one is first or [t.device for t in one] == devices)
        for one in lists
    )


def _say_why_not(lists: Sequence[Sequence[Tensor]]) -> None:
    for i, tensors in enumerate(zip(*lists, strict=True)):
        for t in tensors:
            if not isinstance(t, Tensor):
                raise VectorError(f"Layer {i} must be a tensor, got a {type(t).__name__}. Try torch.as_tensor.")
        first = tensors[0]
        for t in tensors:
            if t.layout != torch.strided:
                raise VectorError(f"Layer {i} must be dense, got {t.layout}. Try its to_dense().")
            if t.dtype not in _DTYPES:
                raise VectorError(f"Layer {i} must be float32, float64, bfloat16 or float16, got {t.dtype}.")
            if t.shape != first.shape:
                raise VectorError(
                    f"Layer {i} must have one shape in all lists, got {tuple(first.shape)} and {tuple(t.shape)}."
                )
            if t.device != first.device:
                raise VectorError(
                    f"Layer {i} must be on one device in all lists, got {first.device} and {t.device}. Move it."
                )


def _by_device(lists: Sequence[Sequence[Tensor]]) -> dict[torch.device, list[int]]:
    groups: dict[torch.device, list[int]] = {}
    for i, t in enumerate(lists[0]):
        groups.setdefault(t.device, []).append(i)
    return groups


def _home(lists: Sequence[Sequence[Tensor]]) -> torch.device:
    devices = [t.device for t in lists[0]]
    return next((d for d in devices if d.type != "cpu"), devices[0])
