"""The launch that gives all layers their directions, in buffers that are kept between steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gyroscope.control.preconditioners.direction_kernel import directions_kernel
from gyroscope.control.preconditioners.moments import Held
from gyroscope.control.preconditioners.places import Place
from gyroscope.control.preconditioners.running import noise
from gyroscope.vectors.launch import Addresses, Ints, Launcher, in_two, is_capturing, shared_out, to_device
from gyroscope.vectors.triton import TYPES

_ROWS, _COLUMNS = 4, 256
_ALIGNED = 64  # elements that parts of a buffer start at multiples of


class DirectionLaunch:
    """Directions for gradients that lie as they lay when it was made.

    Args:
        places: the layers, as their statistics stand.
        gradients: of their weights, and then of the biases that are trained with them.
        held: the statistics.
    """

    def __init__(self, places: Sequence[Place], gradients: Sequence[Tensor], held: Held) -> None:
        device, kind = gradients[0].device, gradients[0].dtype
        self.alike = alike(gradients)
        sizes = np.array([-(-g.numel() // _ALIGNED) * _ALIGNED for g in gradients])
        self._out = torch.zeros(int(sizes.sum()), dtype=kind, device=device)
        offsets = (np.cumsum(sizes) - sizes).tolist()
        #: Where the directions are.
        self.directions = [
            self._out.as_strided(g.shape, g.stride(), at) for g, at in zip(gradients, offsets, strict=True)
        ]
        owners, first = shared_out([-(-place.outputs // _ROWS) for place in places])
        records: Ints = np.zeros((len(places), 16), dtype=np.int64)
        start = unit = 0
        bias = len(places)
        for i, (place, g) in enumerate(zip(places, gradients, strict=False)):
            n, rows = place.inputs, place.outputs
            channels = 1 if g.is_contiguous() else g.shape[1]
            records[i, :6] = first[i], n, rows, start, channels, n // channels
            records[i, 6:10] = bias if place.biased else -1, offsets[i], offsets[bias] if place.biased else 0, unit
            start, unit, bias = start + n, unit + rows, bias + place.biased
        averages, slopes = held.activations.value, held.slopes
        self._addresses = Addresses(len(gradients), device)
        self._launcher = Launcher(directions_kernel, len(owners), device)
        self._before = [to_device(owners, device), to_device(records, device)]
        self._between = [averages, averages if slopes is None else slopes.value, self._out, averages.shape[1]]
        computed = torch.float64 if kind == torch.float64 else torch.float32
        self._after = [TYPES[kind], TYPES[computed], slopes is not None, noise(averages.dtype), _ROWS, _COLUMNS]

    def __call__(self, gradients: Sequence[Tensor], damping: float) -> bool:
        """Find the directions; False where a CUDA graph is captured without having been prepared for."""
        pointers = self._addresses.table(list(map(Tensor.data_ptr, gradients)))
        if pointers is None:
            return False
        self._launcher([*self._before, pointers, *self._between, *in_two(damping), *self._after])
        return True


def alike(gradients: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """What has to be the same for gradients to go the same way."""
    return [(type(g), g.shape, g.stride(), g.dtype, g.device) for g in gradients]


def lies_in_rows(g: Tensor) -> bool:
    """Whether rows of a gradient lie one after another, in an order that the kernel knows."""
    return g.is_contiguous() or (g.dim() == 4 and g.is_contiguous(memory_format=torch.channels_last))


class Directions:
    """Directions of all layers at once, for as long as nothing about them is out of the ordinary.

    Args:
        places: all layers.
        held: their statistics, on one device.
    """

    def __init__(self, places: Sequence[Place], held: Held) -> None:
        self._places, self._held = [places[i] for i in held.shelf.order], held
        own = [(place.module._parameters, "weight") for place in self._places]
        self._owned = own + [(place.module._parameters, "bias") for place in self._places if place.biased]
        self._launch: DirectionLaunch | None = None
        self._captured: set[DirectionLaunch] = set()  # a graph knows addresses alone, so what it has captured is kept

    def __call__(self, damping: float) -> tuple[list[Tensor], list[Tensor]] | None:
        """Parameters, and the directions for them; None where that is for others to find out."""
        parameters = [own.get(name) for own, name in self._owned]
        found = [None if p is None else p.grad for p in parameters]
        gradients = [g for g in found if g is not None]
        if len(gradients) < len(found):
            return None
        launch, capturing = self._launch, is_capturing()
        if launch is None or launch.alike != alike(gradients):
            if capturing or not self._ordinary(gradients):
                return None
            launch = self._launch = DirectionLaunch(self._places, gradients, self._held)
        if not launch(gradients, damping):
            return None
        if capturing:
            self._captured.add(launch)
        return [p for p in parameters if p is not None], launch.directions

    def _ordinary(self, gradients: Sequence[Tensor]) -> bool:
        shapes = [tuple(place.module.weight.shape) for place in self._places]
        shapes += [(place.outputs,) for place in self._places if place.biased]
        return (
            {(type(g), g.dtype, g.device) for g in gradients}
            == {(Tensor, self._places[0].module.weight.dtype, self._held.activations.value.device)}
            and gradients[0].dtype in TYPES
            and [tuple(g.shape) for g in gradients] == shapes
            and [place.inputs for place in self._places] == self._held.activations.sizes
            and all(map(lies_in_rows, gradients))
        )
