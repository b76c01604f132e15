"""Reference weights w₀ that rotation is measured from: where they come from and how they are held.

Layers that are trained are held, whole or, where memory is limited, as a sample of their elements. A frozen layer is
its own w₀ and needs no copy.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gyroscope.base.transfer import pinned, to_host
from gyroscope.base.whole_file import read_whole
from gyroscope.errors import MissingExtraError, MonitorError
from gyroscope.layers.layer import Layer
from gyroscope.layers.layer import layers as find_layers
from gyroscope.monitor.bundle import PIECE, Bundle, flat
from gyroscope.passes.activations import spread
from gyroscope.store import load
from gyroscope.store.folder import run_file
from gyroscope.vectors import dots
from gyroscope.vectors.eager import accumulator
from gyroscope.vectors.layout import is_dense, is_sharded, local, memory_view, plan

Precision = Literal["auto", "float32", "bfloat16"]
Place = Literal["auto", "device", "cpu"]
Source = nn.Module | Mapping[str, Any] | str | Path

# Rounding w₀ to bfloat16 causes an error of 1e-3/√n in the cosine of a layer of n elements: 1e-6 from this size on.
_LARGE = 1 << 20
# Below this size everything is held exactly, because rounding would save little.
_WORTH_ROUNDING = 64 << 20
# If w₀ takes a larger share of a GPU's free memory, it is held in pinned memory.
_FREE_SHARE = 0.25
# Bytes that are streamed from pinned memory at once.
_STREAMED = 256 << 20
# The smallest sample of a layer: a standard error of 0.016 in the cosine at a right angle.
_FEWEST = 4096

FILE = "reference.pt"

# The dtypes that can be measured, and measured from.
DTYPES = {torch.float32, torch.float64, torch.bfloat16, torch.float16}

_WRAPPERS = re.compile(r"(^|\.)(?:(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.)+")


@dataclass(frozen=True)
class Holding:
    """The way w₀ is held.

    Attributes:
        precision, place: as in `watch`.
        limit: the largest number of bytes on this rank, for the layers of one optimizer; None for any.
        most: the largest number of bytes of one layer: of a larger one a sample of this size is held. None for any.
    """

    precision: Precision = "auto"
    place: Place = "auto"
    limit: int | None = None
    most: int | None = None

    def within(self, parts: Sequence[tuple[Sequence[Tensor], Sequence[torch.dtype]]]) -> Holding:
        """Return the same with `most` such that w₀ of all parts (weights, and dtypes of their w₀) keeps to the limit.

        Layers share the memory evenly: smaller ones are held whole, and all others have samples of one size.

        >>> a, b = torch.zeros(10**6), torch.zeros(10**4)
        >>> weights, dtypes = [a, b], [a.dtype, b.dtype]
        >>> Holding(limit=10**6).within([(weights, dtypes)]).drawn(weights, dtypes)
        [119808, 0]
        """
        if self.limit is None:
            return self
        sizes = [
            _Size.of(w, given, dtype)
            for weights, dtypes in parts
            for w, given, dtype in zip(weights, dtypes, _precisions(weights, dtypes, self.precision), strict=True)
        ]
        if _bytes(sizes, None) <= self.limit:
            return replace(self, most=None)
        low, high = _FEWEST * max(size.item for size in sizes), max(size.whole for size in sizes)
        least = _bytes(sizes, low)
        if least > self.limit:
            raise MonitorError(
                f"`reference_memory` must be at least {least:,} bytes for the {len(sizes):,} layers that are trained, "
                f"got {self.limit:,}. Watch fewer layers (layers=...), or leave it out."
            )
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if _bytes(sizes, middle) <= self.limit else (low, middle)
        return replace(self, most=low)

    def drawn(self, weights: Sequence[Tensor], given: Sequence[torch.dtype]) -> list[int]:
        """Return the number of elements in the sample of each layer; 0 for layers that are held whole."""
        if self.most is None:
            return [0] * len(weights)
        dtypes = _precisions(weights, given, self.precision)
        sizes = [_Size.of(w, one, dtype) for w, one, dtype in zip(weights, given, dtypes, strict=True)]
        return [size.sample(self.most) for size in sizes]


def standard_error(drawn: int, whole: int) -> float:
    """Return √((1 − m/n)/m), for a sample of m of n elements; the cosine c of a sample has (1 − c²) times this.

    >>> round(standard_error(10_000, 10**9), 4), standard_error(100, 100)
    (0.01, 0.0)
    """
    return float(np.sqrt((1.0 - drawn / whole) / drawn))


@dataclass(frozen=True)
class _Size:
    """Size of one layer's w₀: its elements, the ranks that share them, its bytes on each, and those of one element."""

    count: int
    shards: int
    whole: int
    item: int
    can_be_sampled: bool

    @classmethod
    def of(cls, weight: Tensor, given: torch.dtype, held: torch.dtype) -> _Size:
        shards = 1
        if is_sharded(weight):
            like: Any = weight
            shards = prod(like.device_mesh.size(i) for i, p in enumerate(like.placements) if not p.is_replicate())
        # By the size of whole layers, so that all ranks decide the same.
        whole = _padded(-(-weight.numel() // shards)) * held.itemsize
        item = torch.promote_types(weight.dtype, given).itemsize
        return cls(weight.numel(), shards, whole, item, shards == 1 or _box(weight) is not None)

    def sample(self, most: int) -> int:
        """Return the number of elements, over all ranks, of a sample of at most `most` bytes per rank."""
        count = most // self.item // PIECE * PIECE * self.shards
        return count if self.can_be_sampled and self.whole > most and count < self.count else 0


def _padded(count: int) -> int:
    """Return the elements that a layer takes in a flat buffer."""
    return -(-count // PIECE) * PIECE


# Bytes per element of a sample for its position in the layer; layers of equal size share positions.
_POSITION = 4


def _bytes(sizes: Sequence[_Size], most: int | None) -> int:
    """Return the bytes that all layers take if each takes at most `most`; whole layers if that is None."""
    total, positions = 0, dict[tuple[int, int], int]()
    for size in sizes:
        count = 0 if most is None else size.sample(most) // size.shards
        total += count * size.item if count else size.whole
        positions[size.count, count] = count * _POSITION
    return total + sum(positions.values())


class Sampled(Bundle):
    """A fixed sample of the elements of large layers, evenly spread over each.

    Args:
        members: the layers' positions among all layers.
        weights: their weights, as far as they are on this rank.
        places: the positions of the elements in each weight, in the order of its indices.
        reference: the dtype of w₀.
    """

    def __init__(
        self, members: Sequence[int], weights: Sequence[Tensor], places: Sequence[Tensor], reference: torch.dtype
    ) -> None:
        super().__init__(
            members, [w.detach().new_empty(len(p)) for w, p in zip(weights, places, strict=True)], reference
        )
        self.places = list(places)
        known: dict[tuple[Any, ...], Tensor] = {}
        keys = [(id(p), w.shape, w.stride()) for w, p in zip(weights, places, strict=True)]
        for key, w, p in zip(keys, weights, places, strict=True):
            if key not in known:
                known[key] = _in_memory(p, w)
        self._at = [known[key] for key in keys]

    @property
    def bytes(self) -> int:
        """Bytes of the buffers and of the positions."""
        positions = {p.data_ptr(): p.numel() * p.element_size() for p in (*self.places, *self._at)}
        return super().bytes + sum(positions.values())

    def draw(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Return the sample of each weight."""
        return [flat(w).index_select(0, at) for w, at in zip(weights, self._at, strict=True)]

    def copy(self, weights: Sequence[Tensor]) -> Tensor:
        """Copy the sample to a flat buffer."""
        return super().copy(self.draw(weights))

    def anchored(self, weights: Sequence[Tensor]) -> Tensor:
        """Copy the sample to a flat buffer that other copies leave alone."""
        return super().anchored(self.draw(weights))

    def products(
        self, weights: Sequence[Tensor], gradients: Sequence[Tensor], skip: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        """Return the inner products of the sample; those of the gradient are not measured."""
        sample = self.draw(weights)
        return super().products(sample, sample, skip)


def _in_memory(places: Tensor, weight: Tensor) -> Tensor:
    """Return positions in the order of indices as positions in memory."""
    if weight.is_contiguous() or not is_dense(weight):
        return places
    rest, found = places.long(), torch.zeros_like(places, dtype=torch.int64)
    for size, stride in zip(reversed(weight.shape), reversed(weight.stride()), strict=True):
        found += rest % size * stride
        rest = rest // size
    return found.to(places.dtype)


def _places(weight: Tensor, count: int) -> tuple[Tensor, Tensor | None]:
    """Return the positions, in this rank's part, of a sample of the whole weight, and which of the sample they are."""
    part = local([weight])[0]
    whole = spread(weight.numel(), count, part.device)
    kind = torch.int32 if part.numel() < 2**31 else torch.int64
    box = _box(weight) if is_sharded(weight) else None
    if box is None:
        return whole.to(kind), None
    start, size = box
    here, at, step = torch.ones_like(whole, dtype=torch.bool), torch.zeros_like(whole), 1
    for dim in reversed(range(weight.dim())):
        coordinate = whole % weight.shape[dim] - start[dim]
        whole = whole // weight.shape[dim]
        here &= (coordinate >= 0) & (coordinate < size[dim])
        at += coordinate * step
        step *= size[dim]
    return at[here].to(kind), here.nonzero()[:, 0]


def _box(weight: Any) -> tuple[list[int], list[int]] | None:
    """Return where this rank's part of a sharded weight begins and how large it is; None for unusual layouts."""
    from torch.distributed.tensor import Shard

    start, size = [0] * weight.dim(), list(weight.shape)
    for axis, placement in enumerate(weight.placements):
        if placement.is_replicate() or weight.device_mesh.size(axis) == 1:
            continue
        if type(placement) is not Shard:
            return None
        # As in `torch.chunk`: equal parts, the last ones smaller or empty.
        dim = placement.dim
        chunk = -(-size[dim] // weight.device_mesh.size(axis))
        skipped = min(chunk * weight.device_mesh.get_local_rank(axis), size[dim])
        start[dim] += skipped
        size[dim] = min(chunk, size[dim] - skipped)
    return start, size


@dataclass(frozen=True)
class Reference:
    """w₀ of all layers that one optimizer steps.

    Attributes:
        bundles: the layers that are measured together, each with its part of w₀; without it if w₀ is sampled.
        samples: the samples of large layers.
        rr: ⟨w₀,w₀⟩ per layer; NaN if it is among the late ones.
        exact: 1 if w₀ is held exactly, else ⟨w₀,w₀⟩/⟨w₀,w̃₀⟩ for the rounded w̃₀.
        drawn: the number of elements of each layer's sample; 0 for a layer that is held whole or not at all.
        asleep: True for frozen layers, which are neither held nor measured: they do not move.
        how: the way it is held.
        late: ⟨w₀,w₀⟩ of layers whose w₀ was taken during training, on its way to host memory, with their positions.
    """

    bundles: list[Bundle]
    samples: list[Sampled]
    rr: npt.NDArray[np.float64]
    exact: npt.NDArray[np.float64]
    drawn: npt.NDArray[np.int64]
    asleep: npt.NDArray[np.bool_]
    how: Holding = field(default_factory=Holding)
    late: tuple[tuple[list[int], Tensor], ...] = ()

    @classmethod
    def take(
        cls,
        weights: Sequence[Tensor],
        values: Sequence[Tensor | None] | None = None,
        how: Holding | None = None,
        *,
        frozen: Sequence[bool] | None = None,
        samples: Mapping[int, Tensor] | None = None,
    ) -> Reference:
        """Hold `values`, by default the weights themselves, as the reference of `weights`.

        Args:
            weights: the layers' parameters.
            values: w₀ of each; None for the weight itself.
            how: the way to hold it.
            frozen: True for layers that need not be held.
            samples: the samples of w₀ of layers whose whole w₀ is not known, by position.
        """
        how, samples = how or Holding(), samples or {}
        source = [
            w.detach() if v is None else v.detach()
            for w, v in zip(weights, values or [None] * len(weights), strict=True)
        ]
        asleep = np.array(frozen if frozen is not None else [False] * len(weights), dtype=bool)
        rr = dots({"rr": (source, source)}).cpu().numpy()[:, 0].astype(np.float64)
        awake = np.flatnonzero(~asleep).tolist()
        its, dtypes = [weights[i] for i in awake], [source[i].dtype for i in awake]
        wide = {i: torch.promote_types(weights[i].dtype, source[i].dtype) for i in awake}
        held = dict(zip(awake, _precisions(its, dtypes, how.precision), strict=True))
        # Weights of zero are replaced by the first that are not, and ⟨w₀,w̃₀⟩ will not be known.
        held |= {i: wide[i] for i in awake if rr[i] == 0}
        counts = dict(zip(awake, how.drawn(its, dtypes), strict=True)) | {i: len(s) for i, s in samples.items()}
        drawn = np.array([counts.get(i, 0) for i in range(len(weights))], dtype=np.int64)
        theirs, mine = local(source), local(weights)
        parts = _Parts(weights, {i: wide[i] if drawn[i] else held[i] for i in awake}, drawn)

        def value(i: int) -> Tensor:
            if i in samples:
                own = parts.own[i]
                return samples[i] if own is None else samples[i].to(own.device)[own]
            if drawn[i]:
                return theirs[i].reshape(-1).to(mine[i].device).index_select(0, parts.places[i])
            return flat(theirs[i].to(mine[i].device), mine[i])

        rounded = [i for i in awake if not drawn[i] and torch.promote_types(held[i], source[i].dtype) != held[i]]
        products: dict[int, Tensor] = {}
        found = []
        for bundle in parts.bundles(value, on_host=_on_host(mine, parts.sizes, how.place)):
            found.append(bundle)
            if bundle.reference is not None and set(bundle.members) & set(rounded):
                views = bundle.layout.views(bundle.reference.to(bundle.device))
                originals = [value(i) for i in bundle.members]
                products |= zip(bundle.members, dots({"rq": (originals, views)}), strict=True)
        exact = np.ones(len(weights))
        if rounded:
            rq = _over_ranks(weights, products)
            with np.errstate(all="ignore"):
                exact[rounded] = np.where(rq[rounded] != 0, rr[rounded] / rq[rounded], 1.0)
        return cls(*_divided(found), rr, exact, drawn, asleep, how)

    def moved(self, before: Sequence[Tensor], weights: Sequence[Tensor]) -> Reference:
        """Return the same for weights with another memory layout, device or precision than `before`."""
        tensors = self.tensors(before)
        kept = {i: p for one in self.samples for i, p in zip(one.members, one.places, strict=True)}
        held = {i: t.dtype for i, t in enumerate(tensors) if not self.asleep[i]}
        parts = _Parts(weights, held, self.drawn, places={i: p.to(weights[i].device) for i, p in kept.items()})

        def value(i: int) -> Tensor:
            there = tensors[i].to(weights[i].device)
            return there if self.drawn[i] else flat(there, weights[i])

        bundles, samples = _divided(parts.bundles(value, on_host=self._on_host and weights[0].device.type == "cuda"))
        return replace(self, bundles=bundles, samples=samples)

    def begin(self, which: Sequence[int], weights: Sequence[Tensor]) -> Reference:
        """Return the same with the weights as they are now as w₀ of some layers: frozen ones, and those that were zero.

        Nothing waits for the device: ⟨w₀,w₀⟩ arrives with the next measurement.
        """
        weights = [w.detach() for w in weights]
        squares = to_host(dots({"rr": ([weights[i] for i in which], [weights[i] for i in which])}))
        mine, new = local(weights), [i for i in which if self.asleep[i]]
        for bundle in self.all_bundles:
            if bundle.reference is not None and set(which) & set(bundle.members):
                now = [mine[i] for i in bundle.members]
                drawn = bundle.draw(now) if isinstance(bundle, Sampled) else list(map(flat, now))
                for i, part, w in zip(bundle.members, bundle.layout.views(bundle.reference), drawn, strict=True):
                    if i in which:
                        part.copy_(w, non_blocking=True)
        rr, asleep = self.rr.copy(), self.asleep.copy()
        rr[list(which)], asleep[new] = np.nan, False
        its, dtypes = [weights[i] for i in new], [weights[i].dtype for i in new]
        how = self.how
        if how.limit is not None and new:
            left = how.limit - self.bytes
            try:
                how = replace(how, limit=left).within([(its, dtypes)])
            except MonitorError:  # the least that there can be is more than what is left
                how = replace(how, most=_FEWEST * max(dtype.itemsize for dtype in dtypes))
        counts = self.drawn.copy()
        counts[new] = how.drawn(its, dtypes)
        parts = _Parts(weights, dict(zip(new, dtypes, strict=True)), counts)

        def value(i: int) -> Tensor:
            return mine[i].reshape(-1).index_select(0, parts.places[i]) if counts[i] else flat(mine[i])

        bundles, samples = _divided(parts.bundles(value, on_host=False))
        return replace(
            self, bundles=self.bundles + bundles, samples=self.samples + samples, rr=rr, drawn=counts, asleep=asleep,
            late=(*self.late, (list(which), squares)),
        )  # fmt: skip

    @cached_property
    def all_bundles(self) -> list[Bundle]:
        """The bundles and the samples."""
        return [*self.bundles, *self.samples]

    @property
    def held(self) -> str:
        """Precision, place and size, in words."""
        return _in_words(self)

    @property
    def bytes(self) -> int:
        """Bytes of w₀ on this rank, with the positions of samples."""
        own = [b.reference for b in self.all_bundles if b.reference is not None]
        positions = {p.data_ptr(): p.numel() * p.element_size() for one in self.samples for p in one.places}
        return sum(r.numel() * r.element_size() for r in own) + sum(positions.values())

    @property
    def sampled_share(self) -> float:
        """Share of the elements of sampled layers that are held, on this rank; 1 if no layer is sampled."""
        whole = sum(sum(b.layout.sizes) for b in self.bundles if b.reference is None)
        return sum(sum(one.layout.sizes) for one in self.samples) / whole if whole else 1.0

    @property
    def _on_host(self) -> bool:
        return any(b.reference.device != b.device for b in self.all_bundles if b.reference is not None)

    def tensors(self, weights: Sequence[Tensor], *, on_host: bool = False) -> list[Tensor]:
        """Return w₀ as whole tensors of the layers' shapes, or as samples; all ranks of a sharded model must call.

        A frozen layer, which is not held, is returned itself.
        """
        found = [w.detach() for w in weights]
        mine = local(weights)
        for bundle in self.bundles:
            if bundle.reference is None:
                continue
            for i, part in zip(bundle.members, bundle.layout.views(bundle.reference), strict=True):
                like = mine[i].detach()
                if is_dense(like) and not like.is_contiguous():
                    whole = torch.empty_like(like, dtype=part.dtype, device=part.device)
                    memory_view(whole, 1)[0].copy_(part)
                else:
                    whole = part.clone().view(like.shape)
                if is_sharded(weights[i]):
                    from gyroscope.vectors.layout import as_sharded

                    whole = as_sharded(whole.to(like.device), weights[i]).full_tensor()  # type: ignore[attr-defined]
                # One at a time to host memory: together they may not fit on the device.
                found[i] = whole.cpu() if on_host else whole
        for one in self.samples:
            assert one.reference is not None
            for i, part in zip(one.members, one.layout.views(one.reference), strict=True):
                sample = part.clone()
                if is_sharded(weights[i]):
                    sample = self._whole_sample(weights[i], sample, int(self.drawn[i]))
                found[i] = sample.cpu() if on_host else sample
        return found

    @staticmethod
    def _whole_sample(weight: Tensor, part: Tensor, count: int) -> Tensor:
        """Return a layer's sample from the parts of all ranks."""
        _, own = _places(weight, count)
        device = local([weight])[0].device
        sample = torch.zeros(1, count, dtype=accumulator(device), device=device)
        if own is None:
            return part
        sample[0, own] = part.to(device, sample.dtype)
        over_ranks = plan([[weight]], [1])
        return (sample if over_ranks is None else over_ranks.reduce(sample))[0].to(part.dtype)


def with_late(rr: npt.NDArray[np.float64], late: Sequence[tuple[list[int], Tensor]]) -> npt.NDArray[np.float64]:
    """Return ⟨w₀,w₀⟩ with the numbers that were late, once they have arrived."""
    rr = rr.copy()
    for which, squares in late:
        rr[which] = squares.numpy()[:, 0]
    return rr


def _divided(bundles: Iterable[Bundle]) -> tuple[list[Bundle], list[Sampled]]:
    """Return the bundles of layers and those of samples."""
    found = list(bundles)
    return [b for b in found if not isinstance(b, Sampled)], [b for b in found if isinstance(b, Sampled)]


class _Parts:
    """Layers to be held, grouped by device and dtype: whole, or as samples of `drawn` elements.

    Attributes:
        places: the positions of each sample in this rank's part of the layer.
        own: which elements of the sample these are; None for all.
        sizes: the bytes of each layer's w₀ on this rank.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        held: Mapping[int, torch.dtype],
        drawn: npt.NDArray[np.int64],
        places: Mapping[int, Tensor] | None = None,
    ) -> None:
        self._mine, self._held = local(weights), held
        self.places: dict[int, Tensor] = dict(places or {})
        self.own: dict[int, Tensor | None] = {}
        known: dict[tuple[Any, ...], Tensor] = {}
        for i in held:
            if drawn[i] and i not in self.places:
                key = (weights[i].numel(), int(drawn[i]), self._mine[i].device)
                if key in known and not is_sharded(weights[i]):
                    self.places[i], self.own[i] = known[key], None
                else:
                    self.places[i], self.own[i] = _places(weights[i], int(drawn[i]))
                    known[key] = self.places[i]
        self._counts = {i: len(self.places[i]) if i in self.places else self._mine[i].numel() for i in held}
        self.sizes = [self._counts[i] * dtype.itemsize for i, dtype in held.items()]

    def bundles(self, value: Callable[[int], Tensor], *, on_host: bool) -> Iterator[Bundle]:
        """Yield the bundles, filled with the `value` of each layer; those in pinned memory are made one at a time."""
        groups: dict[Any, list[int]] = {}
        for i, dtype in self._held.items():
            w = self._mine[i]
            groups.setdefault((w.device, w.dtype, dtype, i in self.places), []).append(i)
        for (_, _, dtype, sampled), members in groups.items():
            if sampled:
                yield Bundle(members, [self._mine[i] for i in members], None)
            for some in _at_most(_STREAMED // dtype.itemsize if on_host else None, members, self._counts):
                its = [self._mine[i] for i in some]
                bundle = (
                    Sampled(some, its, [self.places[i] for i in some], dtype) if sampled else Bundle(some, its, dtype)
                )
                assert bundle.reference is not None
                for i, part in zip(some, bundle.layout.views(bundle.reference), strict=True):
                    part.copy_(value(i))
                if on_host:
                    bundle.reference = pinned(bundle.reference.cpu())
                yield bundle


def _over_ranks(weights: Sequence[Tensor], rows: Mapping[int, Tensor]) -> npt.NDArray[np.float64]:
    """Return one number per layer from some on this rank, summed over the ranks; zero for the others."""
    home = local(weights)[0].device
    found = torch.zeros(len(weights), 1, dtype=accumulator(home), device=home)
    for i, row in rows.items():
        found[i] = row.to(home)
    over_ranks = plan([list(weights)], [1] * len(weights))
    if over_ranks is not None:
        found = over_ranks.reduce(found)
    return found.cpu().numpy()[:, 0].astype(np.float64)


def _precisions(
    weights: Sequence[Tensor], given: Sequence[torch.dtype], precision: Precision
) -> list[torch.dtype]:  # fmt: skip
    """Return the dtype of each layer's w₀, by the size of whole layers, so that all ranks decide the same."""
    wide = [torch.promote_types(w.dtype, dtype) for w, dtype in zip(weights, given, strict=True)]
    size = sum(w.numel() * dtype.itemsize for w, dtype in zip(weights, wide, strict=True))
    round_off = precision == "bfloat16" or (precision == "auto" and size > _WORTH_ROUNDING)
    return [
        torch.bfloat16 if round_off and dtype.itemsize > 2 and (precision != "auto" or w.numel() >= _LARGE) else dtype
        for w, dtype in zip(weights, wide, strict=True)
    ]


def _on_host(weights: Sequence[Tensor], sizes: Sequence[int], place: Place) -> bool:
    """Return whether w₀ of these sizes goes to pinned memory."""
    if not weights or weights[0].device.type != "cuda" or place == "device":
        return False
    return place == "cpu" or sum(sizes) > _FREE_SHARE * torch.cuda.mem_get_info(weights[0].device)[0]


def _at_most(most: int | None, members: list[int], counts: Mapping[int, int]) -> list[list[int]]:
    """Split a list of layers into parts of at most `most` elements."""
    if most is None:
        return [members]
    parts: list[list[int]] = [[]]
    for i in members:
        if parts[-1] and sum(counts[j] for j in parts[-1]) + counts[i] > most:
            parts.append([])
        parts[-1].append(i)
    return parts


def _in_words(reference: Reference) -> str:
    places: dict[str, int] = {}
    for bundle in reference.all_bundles:
        r = bundle.reference
        if r is None:
            continue
        where = "pinned memory, streamed" if r.device.type == "cpu" != bundle.device.type else str(r.device)
        kind = str(r.dtype).removeprefix("torch.")
        kind += " samples" if isinstance(bundle, Sampled) else ""
        key = f"{kind} on {where}" if "pinned" not in where else f"{kind} in {where}"
        places[key] = places.get(key, 0) + r.numel() * r.element_size()
    held = ", ".join(f"{key} ({size / 1e6:.1f} MB)" for key, size in places.items()) or "nothing"
    if reference.samples:
        share = f"{100 * reference.sampled_share:.2g} %"
        held += f"; the samples have {share} of the elements of {_layers(reference.drawn > 0)}"
    return held + (f"; {_layers(reference.asleep)} frozen and not held" if reference.asleep.any() else "")


def _layers(which: npt.NDArray[np.bool_]) -> str:
    return f"{which.sum():,} layer{'s' if which.sum() > 1 else ''}"


def frozen_like(weights: Sequence[Tensor], values: Sequence[Tensor] | None) -> list[bool]:
    """Return which layers are frozen and are their own reference, so that no copy is needed."""
    frozen = [not w.requires_grad for w in weights]
    if values is None or not any(frozen):
        return frozen
    return [
        still and not is_sharded(w) and w.dtype == v.dtype and torch.equal(w, v.to(w.device))
        for still, w, v in zip(frozen, weights, values, strict=True)
    ]


def from_source(source: Source, layers: Sequence[Layer], what: str = "`reference`") -> list[Tensor]:
    """Return the weights of `layers` from another model, a state dict or a checkpoint file, by their names.

    >>> net, other = nn.Linear(3, 2), nn.Linear(3, 2)
    >>> bool((from_source(other, find_layers(net))[0] == other.weight).all())
    True
    """
    if isinstance(source, nn.Module):
        named: Mapping[str, Any] = {layer.name: layer.parameter for layer in find_layers(source)}
    elif isinstance(source, str | Path):
        named = read_tensors(Path(source))
    elif isinstance(source, Mapping):
        named = source
    else:
        raise MonitorError(
            f"{what} must be a model, a state dict, the path of a checkpoint, or the folder of a run, got a "
            f"{type(source).__name__}."
        )
    if not all(isinstance(key, str) for key in named):
        raise MonitorError(f"{what} must be a state dict, whose keys are names, got the keys {list(named)[:3]}.")
    named = _without_prefixes(named)
    found = []
    for layer in layers:
        weight = next((named[key] for key in _keys(layer) if key in named), None)
        if weight is not None and not isinstance(weight, Tensor):
            raise MonitorError(f"{what} must hold tensors, got a {type(weight).__name__} for {layer.name!r}.")
        if weight is None:
            have = (", ".join(list(named)[:4]) or "none") + (" and more" if len(named) > 4 else "")
            raise MonitorError(
                f"{what} must have the weight {layer.name!r}, got {have}. Pass one of the same model, or choose layers "
                "that it has (layers=...). A run keeps no whole copy of layers that were frozen or sampled."
            )
        if weight.shape != layer.parameter.shape:
            raise MonitorError(
                f"{what} must have {layer.name!r} of shape {tuple(layer.parameter.shape)}, as the model has, got "
                f"{tuple(weight.shape)}. Pass one of the same model."
            )
        if weight.is_meta or weight.layout != torch.strided or weight.dtype not in DTYPES:
            kind = "on the meta device, without values" if weight.is_meta else f"{weight.dtype}, {weight.layout}"
            raise MonitorError(
                f"{what} must hold dense tensors of float32, float64, bfloat16 or float16, got {layer.name!r}, which "
                f"is {kind}. Convert it with .to_dense() or .float(), or load it to a CPU."
            )
        found.append(weight.detach())
    return [_laid_out(w, layer.parameter) for w, layer in zip(found, layers, strict=True)]


def _laid_out(weight: Tensor, parameter: Tensor) -> Tensor:
    """Distribute a whole weight over the ranks as the parameter is."""
    if not is_sharded(parameter) or is_sharded(weight):
        return weight
    from torch.distributed.tensor import distribute_tensor

    like: Any = parameter
    return distribute_tensor(weight.to(like.device), like.device_mesh, like.placements)


def _keys(layer: Layer) -> list[str]:
    """Return the names that a layer's weight may have in a state dict."""
    stem = layer.name.removesuffix(layer.name.split(".")[-1])
    return [layer.name, stem + layer.attribute]


def _without_prefixes(named: Mapping[str, Any]) -> dict[str, Any]:
    for key in ("state_dict", "model_state_dict", "model"):
        inner = named.get(key)
        if isinstance(inner, Mapping):
            named = inner
            break
    plain = {_WRAPPERS.sub(r"\1", k): v for k, v in named.items()}
    if plain and all(key.startswith("module.") for key in plain):
        plain = {key.removeprefix("module."): value for key, value in plain.items()}
    return plain


def later(file: Path) -> Path:
    """Return the file with what was held later than the reference in `file`: layers that were frozen or zero.

    >>> later(Path("reference-3.pt")).name
    'reference-3.later.pt'
    """
    return file.with_suffix(".later.pt")


def _reference_file(folder: Path) -> str:
    """Return the name of the file with the last reference of a run."""
    if not run_file(folder).exists():
        return FILE
    with load(folder) as run:
        return str(run.meta.get("reference_file", FILE))


def read_tensors(path: Path) -> Mapping[str, Any]:
    """Return the tensors of a checkpoint file, or of a run's reference; nothing in it is executed."""
    file = path / _reference_file(path) if os.path.isdir(path) else path
    if not os.path.isfile(file):
        raise MonitorError(
            f"There is no file {file}. Pass the path of a checkpoint, or of a run that has a {FILE}; "
            '"pretrained" for the weights as they are now.'
        )
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            loaded: Any = load_file(str(file))
        else:
            # A user's checkpoint may be in another format of torch.
            loaded = read_whole(file) if path.is_dir() else torch.load(file, map_location="cpu", weights_only=True)
    except ImportError:
        raise MissingExtraError(
            f"Reading {file} needs safetensors, which is not installed: pip install safetensors"
        ) from None
    except Exception as error:
        raise MonitorError(
            f"{file} cannot be read as a checkpoint of tensors: {error}. Save a state dict with torch.save."
        ) from error
    if not isinstance(loaded, Mapping):
        raise MonitorError(f"{file} must hold a state dict, got a {type(loaded).__name__}.")
    tensors = loaded.get("tensors")
    if not isinstance(tensors, Mapping):
        return loaded
    if path.is_dir() and later(file).exists():
        return {**tensors, **read_whole(later(file))["tensors"]}
    return tensors
