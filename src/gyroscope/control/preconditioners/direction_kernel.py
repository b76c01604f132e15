"""The quasi-diagonal directions of all layers in one launch (equation 10), in buffers that are kept between steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from gyroscope.base.hooks import is_capturing
from gyroscope.control.preconditioners import running
from gyroscope.control.preconditioners.affine_layers import Place
from gyroscope.control.preconditioners.quasi_diagonal import Held
from gyroscope.vectors.launch import Addresses, Ints, Launcher, in_two, shared_out, to_device
from gyroscope.vectors.triton import TYPES, pointer, rounded


@triton.jit
def _reciprocal(value):
    return tl.where(value > 0, 1.0 / value, 0.0)


@triton.jit
def _share(values, n, damping, TC: tl.constexpr, BLOCK: tl.constexpr):
    """The amount that damping adds: a share of the mean magnitude of a layer's numbers."""
    total = tl.zeros((BLOCK,), TC)
    for low in range(0, n, BLOCK):
        k = low + tl.arange(0, BLOCK)
        total += tl.abs(tl.load(values + k, mask=k < n, other=0.0).to(TC))
    return damping * tl.sum(total) / n


@triton.jit
def _moments(means, variances, j, inside, NOISE: tl.constexpr, TC: tl.constexpr):
    """Means and variances; 0 for variances that are only the rounding of equal numbers."""
    m = tl.load(means + j, mask=inside, other=0.0).to(TC)
    v = tl.load(variances + j, mask=inside, other=0.0).to(TC)
    noise = NOISE * m
    return m, tl.where(v > noise * noise, v, 0.0)


@triton.jit
def _share_of_variances(means, variances, n, damping, NOISE: tl.constexpr, TC: tl.constexpr, BLOCK: tl.constexpr):
    """The amount that damping adds to variances."""
    total = tl.zeros((BLOCK,), TC)
    for low in range(0, n, BLOCK):
        k = low + tl.arange(0, BLOCK)
        _, v = _moments(means, variances, k, k < n, NOISE, TC)
        total += v
    return damping * tl.sum(total) / n


@triton.jit
def _product(
    gradient, means, variances, added, factor, k, n, channels, positions, at, inside,
    NOISE: tl.constexpr, TC: tl.constexpr,
):  # fmt: skip
    """(∇W − f mᵀ) Σ⁻¹ of some columns k, with one factor f per row; and m and Σ⁻¹ of these columns."""
    m, v = _moments(means, variances, k % channels * positions + k // channels, k < n, NOISE, TC)
    precision = _reciprocal(v + added)
    W = tl.load(gradient + at, mask=inside, other=0.0).to(TC)
    return (W - factor[:, None] * m[None, :]) * precision[None, :], m, precision


@triton.jit
def directions_kernel(
    owners, records, pointers, value, slopes, out, coordinates, damping_near, damping_rest,
    TG: tl.constexpr, TC: tl.constexpr, SCALED: tl.constexpr, NOISE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The directions of some rows of one layer.

    With a bias, P = (∇W − ∇b mᵀ) Σ⁻¹ and ∇b − P m; without one, P − P m (Σ⁻¹m)ᵀ / (1 + mᵀΣ⁻¹m) for P = ∇W Σ⁻¹. Where
    pre-activations are scaled, row j is divided by S_jj. Columns are in memory order: for a convolution whose channels
    come last, column k belongs to channel k mod channels.
    """
    layer = tl.load(owners + tl.program_id(0))
    record = records + 16 * layer
    local = tl.program_id(0) - tl.load(record)
    n = tl.load(record + 1).to(tl.int32)
    rows = tl.load(record + 2).to(tl.int32)
    means = value + tl.load(record + 3)
    channels = tl.load(record + 4).to(tl.int32)
    positions = tl.load(record + 5).to(tl.int32)
    bias = tl.load(record + 6)
    to_weight = out + tl.load(record + 7)
    to_bias = out + tl.load(record + 8)
    variances = means + coordinates
    damping = tl.zeros((), TC) + damping_near + damping_rest

    row = local * ROWS + tl.arange(0, ROWS)
    some = row < rows
    line = row[:, None] * n
    scale = tl.full((ROWS,), 1.0, TC)
    if SCALED:
        own = slopes + tl.load(record + 9)
        s = tl.load(own + row, mask=some, other=0.0).to(TC)
        scale = _reciprocal(s + _share(own, rows, damping, TC, COLUMNS))
    b = tl.zeros((ROWS,), TC)
    if bias >= 0:
        b = tl.load(pointer(pointers, bias, TG, False) + row, mask=some, other=0.0).to(TC)
    gradient = pointer(pointers, layer, TG, False)
    added = _share_of_variances(means, variances, n, damping, NOISE, TC, COLUMNS)
    along = tl.zeros((ROWS, COLUMNS), TC)
    lengths = tl.zeros((COLUMNS,), TC)
    for low in range(0, n, COLUMNS):
        k = low + tl.arange(0, COLUMNS)
        at = line + k[None, :]
        inside = some[:, None] & (k < n)[None, :]
        P, m, precision = _product(
            gradient, means, variances, added, b, k, n, channels, positions, at, inside, NOISE, TC
        )  # fmt: skip
        along += P * m[None, :]
        lengths += precision * m * m
        if bias >= 0:
            tl.store(to_weight + at, rounded(P * scale[:, None], TG), mask=inside)
    shift = tl.sum(along, 1)
    if bias >= 0:
        tl.store(to_bias + row, rounded((b - shift) * scale, TG), mask=some)
    else:
        # Sherman and Morrison's formula.
        shift = shift / (1.0 + tl.sum(lengths))
        for low in range(0, n, COLUMNS):
            k = low + tl.arange(0, COLUMNS)
            at = line + k[None, :]
            inside = some[:, None] & (k < n)[None, :]
            P, m, precision = _product(
                gradient, means, variances, added, shift, k, n, channels, positions, at, inside, NOISE, TC
            )  # fmt: skip
            tl.store(to_weight + at, rounded(P * scale[:, None], TG), mask=inside)


_ROWS, _COLUMNS = 4, 256
_ALIGNED = 64  # parts of a buffer start at multiples of this many elements


class DirectionLaunch:
    """Directions for gradients of fixed shapes, strides, dtype and device.

    Args:
        places: the layers, in the order of their statistics.
        gradients: the gradients of their weights, then of the biases that are trained with them.
        held: the statistics.
    """

    def __init__(self, places: Sequence[Place], gradients: Sequence[Tensor], held: Held) -> None:
        device, kind = gradients[0].device, gradients[0].dtype
        self.alike = _alike(gradients)
        sizes = np.array([-(-g.numel() // _ALIGNED) * _ALIGNED for g in gradients])
        self._out = torch.zeros(int(sizes.sum()), dtype=kind, device=device)
        offsets = (np.cumsum(sizes) - sizes).tolist()
        #: Views of the directions in the buffer.
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
        self._addresses = Addresses(device)
        self._launcher = Launcher(directions_kernel, len(owners), device)
        self._before = [to_device(owners, device), to_device(records, device)]
        self._between = [averages, averages if slopes is None else slopes.value, self._out, averages.shape[1]]
        computed = torch.float64 if kind == torch.float64 else torch.float32
        self._after = [TYPES[kind], TYPES[computed], slopes is not None, running.noise(averages.dtype), _ROWS, _COLUMNS]

    def __call__(self, gradients: Sequence[Tensor], damping: float) -> bool:
        """Compute the directions; return False where a CUDA graph is captured and no memory was provided for it."""
        pointers = self._addresses.table(list(map(Tensor.data_ptr, gradients)))
        if pointers is None:
            return False
        self._launcher([*self._before, pointers, *self._between, *in_two(damping), *self._after])
        return True


def _alike(gradients: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """Return the properties that must be equal for gradients to use the same launch."""
    return [(type(g), g.shape, g.stride(), g.dtype, g.device) for g in gradients]


def _lies_in_rows(g: Tensor) -> bool:
    """Return whether the rows of a gradient are consecutive in memory, in an order that the kernel knows."""
    return g.is_contiguous() or (g.dim() == 4 and g.is_contiguous(memory_format=torch.channels_last))


class Directions:
    """Directions of all layers at once, where their gradients are as usual.

    Args:
        places: all layers.
        held: their statistics, on one device.
    """

    def __init__(self, places: Sequence[Place], held: Held) -> None:
        self._places, self._held = [places[i] for i in held.shelf.order], held
        own = [(place.module._parameters, "weight") for place in self._places]
        self._owned = own + [(place.module._parameters, "bias") for place in self._places if place.biased]
        self._launch: DirectionLaunch | None = None
        self._captured: set[DirectionLaunch] = set()  # a graph holds addresses only, so captured launches are kept

    def __call__(self, damping: float) -> tuple[list[Tensor], list[Tensor]] | None:
        """Return the parameters and their directions, or None where the kernel cannot compute them."""
        parameters = [own.get(name) for own, name in self._owned]
        found = [None if p is None else p.grad for p in parameters]
        gradients = [g for g in found if g is not None]
        if len(gradients) < len(found):
            return None
        launch, capturing = self._launch, is_capturing()
        if launch is None or launch.alike != _alike(gradients):
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
            and all(map(_lies_in_rows, gradients))
        )
