"""Running means and variances of what goes into layers, and mean squares of the gradients at what comes out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gyroscope.control.preconditioners.cohorts import Shelf, shelves
from gyroscope.control.preconditioners.patch_moments import Windows, patch_moments, windows
from gyroscope.control.preconditioners.places import Place
from gyroscope.control.preconditioners.running import Averages, Spreads, mixed, refuse_in_a_graph
from gyroscope.vectors import backend
from gyroscope.vectors.launch import is_capturing

if TYPE_CHECKING:
    from gyroscope.control.preconditioners.moment_launches import Measured, MomentLaunches


@dataclass(frozen=True, eq=False)
class Use:
    """A use of a layer: its mean and variance, of rows or of pixels; and the norms of gradients, where wanted."""

    index: int
    mean: Tensor
    variance: Tensor
    slopes: Tensor | None
    samples: int
    batch: object
    captured: bool


@dataclass(frozen=True, eq=False)
class Held:
    """The statistics of the layers on one device."""

    shelf: Shelf
    activations: Spreads
    slopes: Averages | None


@dataclass(frozen=True, eq=False)
class Known:
    """What is known of one layer."""

    mean: Tensor
    variance: Tensor
    slopes: Tensor | None
    count: int


class Moments:
    """The moments of layers, as of the last `fold`.

    Args:
        places: the layers.
        decay: of the averages.
        scales: whether gradients are looked at.
    """

    def __init__(self, places: Sequence[Place], decay: float, scales: bool) -> None:
        self.places, self.decay, self.scales = tuple(places), decay, scales
        self._held: list[Held] = []
        self._where: dict[int, tuple[Held, int]] = {}
        self._seen: set[int] = set()
        self._uses: list[Use] = []
        self._measured: list[Measured] = []
        self._launches: list[MomentLaunches] | None = None
        self._windows: dict[tuple[Any, ...], Windows] = {}

    @property
    def held(self) -> list[Held]:
        """All of it, where the weights are when it is first asked for."""
        self._make()
        return self._held

    @property
    def activations(self) -> list[Known]:
        """What is known, layer by layer."""
        return [self._known(i) for i in range(len(self.places))]

    @property
    def complete(self) -> bool:
        """Whether there is something of all layers."""
        return len(self._seen) == len(self.places)

    def add(self, uses: Sequence[tuple[int, Tensor, Tensor | None]], samples: int, batch: object) -> None:
        """Layers were used: see `gyroscope.control.preconditioners.observer.Statistics`."""
        if len(uses) == len(self.places) and not self.scales:
            indices, xs = [i for i, _, _ in uses], [x for _, x, _ in uses]
            for launches in self._kernels():
                if (measured := launches.measure(indices, xs, samples, batch)) is not None:
                    self._measured.append(measured)
                    return
        captured = is_capturing()
        for index, x, g in uses:
            place = self.places[index]
            slopes = place.norms(g) if self.scales and g is not None else None
            self._uses.append(Use(index, *place.pixel_moments(x), slopes, samples, batch, captured))

    def fold(self) -> None:
        """Take what was added into the averages."""
        # What was seen outside of a graph is no part of it, and the other way round.
        captured = is_capturing()
        uses = [use for use in self._uses if use.captured == captured]
        measured = [one for one in self._measured if one.captured == captured]
        self._uses, self._measured = [], []
        if len(measured) == 1 and not uses:
            self._kernels()[0].fold(measured[0])
            self._seen.update(measured[0].indices)
            return
        for one in measured:
            found = zip(one.indices, one.plan.moments(one.partial), strict=True)
            uses += [Use(i, mean, variance, None, one.samples, one.batch, captured) for i, (mean, variance) in found]
        if not uses:
            return
        moments, slopes = self._moments(uses), self._slopes(uses)
        for held in self.held:
            order = held.shelf.order
            if any(i in moments for i in order):
                new = [moments.get(i, (None, None)) for i in order]
                held.activations.update([m for m, _ in new], [v for _, v in new])
                if held.slopes is not None:
                    held.slopes.update([slopes.get(i) for i in order])
        self._seen.update(moments)

    def known(self, index: int) -> bool:
        """Whether there is any of this layer."""
        return index in self._seen

    def state(self, index: int) -> dict[str, Any]:
        """What is known of a layer."""
        own = self._known(index)
        kept = {"mean": own.mean.clone(), "variance": own.variance.clone(), "count": own.count}
        return kept if own.slopes is None else {**kept, "slopes": own.slopes.clone()}

    def load(self, index: int, state: dict[str, Any]) -> None:
        """Go on from that."""
        self._uses, self._measured = [], []
        (self._seen.add if state else self._seen.discard)(index)
        if not state and not self._held:
            return
        held, at = self._find(index)
        for one, rows in ((held.activations, ("mean", "variance")), (held.slopes, ("slopes",))):
            if one is not None:
                for row, name in zip(one.value, rows, strict=True):
                    part = one.part(row, at)
                    part.copy_(state[name]) if state else part.zero_()
                one.counts.value[at] = state.get("count", 0)

    def shapes(self, index: int) -> dict[str, tuple[int, ...]]:
        """Of the tensors in a state."""
        place = self.places[index]
        own: dict[str, tuple[int, ...]] = {"mean": (place.inputs,), "variance": (place.inputs,)}
        return {**own, "slopes": (place.outputs,)} if self.scales else own

    def _kernels(self) -> list[MomentLaunches]:
        """What measures and averages in a few launches, where kernels are to be had and layers lie on one device."""
        if self._launches is None:
            if not self._held and is_capturing():
                return []
            self._launches = []
            if has_kernels(self.held):
                from gyroscope.control.preconditioners.moment_launches import MomentLaunches

                one = self.held[0]
                self._launches = [MomentLaunches(self.places, one.shelf.order, one.activations)]
        return self._launches

    def _make(self) -> None:
        if not self._held:
            refuse_in_a_graph()
            self._held = [self._made(shelf) for shelf in shelves(self.places)]
            self._where = {i: (one, at) for one in self._held for at, i in enumerate(one.shelf.order)}

    def _made(self, shelf: Shelf) -> Held:
        order = [self.places[i] for i in shelf.order]
        spreads = Spreads([place.inputs for place in order], self.decay, shelf.like)
        slopes = Averages([place.outputs for place in order], self.decay, shelf.like) if self.scales else None
        return Held(shelf, spreads, slopes)

    def _find(self, index: int) -> tuple[Held, int]:
        self._make()
        return self._where[index]

    def _known(self, index: int) -> Known:
        held, at = self._find(index)
        mean, variance = (held.activations.part(row, at) for row in held.activations.value)
        slopes = None if held.slopes is None else held.slopes.part(held.slopes.value[0], at)
        return Known(mean, variance, slopes, int(held.activations.counts.value[at]))

    def _moments(self, uses: list[Use]) -> dict[int, tuple[Tensor, Tensor]]:
        """The mean and the variance of the coordinates of each layer that was used."""
        found: defaultdict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        alike: defaultdict[tuple[Any, ...], list[Use]] = defaultdict(list)
        for use in uses:
            module = self.places[use.index].module
            if isinstance(module, nn.Conv2d):
                alike[(*_geometry(module), use.mean.shape, use.mean.dtype, use.mean.device)].append(use)
            else:
                found[use.index].append((use.mean, use.variance))
        for key, several in alike.items():
            first = several[0]
            if key not in self._windows:
                refuse_in_a_graph()
                module = self.places[first.index].module
                assert isinstance(module, nn.Conv2d)
                self._windows[key] = windows(module, first.mean)
            images = torch.stack([use.mean for use in several] + [use.variance for use in several])
            means, variances = patch_moments(images.view(2, len(several), *first.mean.shape), self._windows[key])
            for use, mean, variance in zip(several, means.unbind(), variances.unbind(), strict=True):
                found[use.index].append((mean, variance))
        return {i: mixed(parts) for i, parts in found.items()}

    def _slopes(self, uses: list[Use]) -> dict[int, Tensor]:
        """E[(Ds_j)²] summed over the rows of a sample, as in K-FAC; averaged over passes of the model."""
        norms = [use.slopes for use in uses if use.slopes is not None]
        if not norms:
            return {}
        parts = torch._foreach_mul(norms, norms)
        torch._foreach_mul_(parts, [float(use.samples) for use in uses])
        found: defaultdict[int, list[Tensor]] = defaultdict(list)
        passes: defaultdict[int, set[int]] = defaultdict(set)
        for use, part in zip(uses, parts, strict=True):
            found[use.index].append(part)
            passes[use.index].add(id(use if use.batch is None else use.batch))
        return {i: own[0] if len(own) == 1 else sum(own[1:], own[0]) / len(passes[i]) for i, own in found.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_uses": [], "_measured": [], "_launches": None, "_windows": {}}


def has_kernels(held: Sequence[Held]) -> bool:
    """Whether the layers are on one device, and one that there are kernels for."""
    return len(held) == 1 and not backend(held[0].shelf.like.device).__name__.endswith("eager")


def _geometry(module: nn.Conv2d) -> tuple[Any, ...]:
    around = tuple(module._reversed_padding_repeated_twice)
    return module.kernel_size, module.stride, module.dilation, around, module.padding_mode
