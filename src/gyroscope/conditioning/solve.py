"""From the factors of every layer to its numbers, with many matrices decomposed together.

`Spectrometer` turns factors into spectra, and keeps few of them in memory. `solve` turns the spectra, weights and
gradients into one row per layer.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gyroscope.conditioning.eigen import Product, eigenvalues, largest, magnitudes
from gyroscope.conditioning.factors import Factor
from gyroscope.conditioning.result import Kappas, LayerConditioning, Spectra
from gyroscope.conditioning.spectra import Spectrum, product_at, spectra_of
from gyroscope.conditioning.uses import Use
from gyroscope.layers.layer import Layer
from gyroscope.vectors import dots
from gyroscope.vectors.eager import power_of_two
from gyroscope.vectors.layout import any_sharded, is_sharded

Array = npt.NDArray[np.float64]

# The bytes that factors may hold while they wait to be decomposed. On a GPU they may hold more, as long as the memory
# in use has not risen by this many bytes since the first one arrived: the backward pass may free more than they take.
_WAITING = 2**25
# Elements that are copied to float64 at a time; a CPU loses nothing by fewer.
_PART, _PART_ON_CPU = 2**22, 2**20


def solve(
    uses: Sequence[Use],
    layers: Sequence[Layer],
    gradients: dict[int, Tensor],
    units: dict[int, tuple[float, float]],
    *,
    p: tuple[float, ...],
    spectra: bool,
    spectrometer: Spectrometer | None = None,
    times: float = 1.0,
) -> tuple[list[LayerConditioning], dict[str, str]]:
    """Return the numbers of each use of a layer, and why the others have none: their numbers would not be finite.

    Args:
        uses: with complete factors, which are released.
        layers: the analyzed layers; a use refers to one by its position.
        gradients: the gradient of the mean loss at each layer's weight, by position.
        units: the shares of dying and of full units, by position.
        p: which κ_p; empty for λmax alone.
        spectra: True to keep the spectra.
        spectrometer: one that has taken some of the factors already.
        times: a factor that the gradients are still to be multiplied by.
    """
    if not uses:
        return [], {}
    full = bool(p) or spectra
    spectrometer = spectrometer or Spectrometer(full=full)
    for use in uses:
        if not use.done:
            spectrometer.take(use.x)
            spectrometer.take(use.g)
    pairs = _Weights.of(uses, layers, gradients)
    weights = pairs.norms(spectrometer.finish(pairs.grams), times)
    x, g = [spectrometer[use.x] for use in uses], [spectrometer[use.g] for use in uses]
    finite = [bool(np.isfinite([a.largest, b.largest]).all()) for a, b in zip(x, g, strict=True)]
    strange = {
        use.name: f"its {'input' if not np.isfinite(a.largest) else 'output gradient'} is not finite"
        for use, a, b, fine in zip(uses, x, g, finite, strict=True)
        if not fine
    }
    kept = [i for i, fine in enumerate(finite) if fine]
    x, g = [x[i] for i in kept], [g[i] for i in kept]
    at = product_at(x, g, p) if p else np.zeros((len(kept), 0))
    found = []
    for row, i in enumerate(kept):
        use, a, b = uses[i], x[row], g[row]
        norm, sigma, slope = weights[i]
        lambda_f = a.largest * b.largest
        dying, full_units = units.get(use.position, (None, None))
        found.append(
            LayerConditioning(
                layer=use.name,
                kind=use.kind,
                lambda_x=a.largest,
                lambda_g=b.largest,
                lambda_f=lambda_f,
                kappa_x={q: a.kappa(q) for q in p},
                kappa_g={q: b.kappa(q) for q in p},
                kappa_f=_kappas(lambda_f, at[row], p),
                rank_x=a.rank if full else None,
                rank_g=b.rank if full else None,
                dimension_x=a.dimension,
                dimension_g=b.dimension,
                samples=use.x.samples,
                weight_norm=norm,
                weight_spectral=sigma,
                gradient_spectral=slope,
                domination=None if slope is None or sigma == 0 else slope / sigma,
                dying=dying,
                full=full_units,
                position=use.position,
                spectra=Spectra(a, b) if spectra else None,
            )
        )
    return found, strange


def _kappas(top: float, at: Array, p: tuple[float, ...]) -> Kappas:
    def ratio(value: float) -> float | None:
        if top == 0:
            return None
        return top / value if value > 0 else float("inf")

    return {q: ratio(float(value)) for q, value in zip(p, at, strict=True)}


@dataclass(frozen=True)
class _Weights:
    """Weights of uses and their gradients, reduced to what norms need.

    Attributes:
        parts: the positions of each use's weight and gradient; None if there is no gradient.
        squares: ‖W‖² of all of them.
        grams, scales: see `shorter_grams`.
    """

    parts: list[tuple[int, int | None]]
    squares: Tensor
    grams: list[Tensor | Product]
    scales: Tensor

    @classmethod
    def of(cls, uses: Sequence[Use], layers: Sequence[Layer], gradients: dict[int, Tensor]) -> _Weights:
        whole: list[Tensor] = []
        parts: list[tuple[int, int | None]] = []
        for use in uses:
            weight, gradient = layers[use.position].parameter.detach(), gradients.get(use.position)
            parts.append((len(whole), None if gradient is None else len(whole) + 1))
            both = [weight] if gradient is None else [weight, gradient]
            whole += both if use.rows is None else [one[use.rows] for one in both]
        squares = dots({"ww": (whole, whole)})[:, 0]
        if any_sharded(whole):
            # One at a time: together they would put the whole model on every rank.
            pairs = [_reduced(_whole(w)) for w in whole]
            grams, scales = [gram for gram, _ in pairs], torch.cat([scale for _, scale in pairs])
        else:
            grams, scales = shorter_grams(whole)
        return cls(parts, squares, grams, scales)

    def norms(self, tops: Tensor, times: float) -> list[tuple[float, float, float | None]]:
        """Return ‖W‖ and the spectral norms of W and of its gradient for each use, from λmax of the grams."""
        spectral = tops.abs().sqrt() * self.scales.to(tops.device)
        host = torch.stack([self.squares.to(tops.device).sqrt(), spectral], dim=1).tolist()
        return [(host[w][0], host[w][1], None if g is None else host[g][1] * times) for w, g in self.parts]


def _whole(weight: Any) -> Tensor:
    found: Tensor = weight.full_tensor() if is_sharded(weight) else weight
    return found


def _reduced(weight: Tensor) -> tuple[Tensor | Product, Tensor]:
    """Return a gram of a weight that does not hold it, with the same λmax, and its scale, [1]."""
    (gram,), scale = shorter_grams([weight])
    return largest([gram])[:, None] if isinstance(gram, Product) else gram, scale


def shorter_grams(matrices: Sequence[Tensor]) -> tuple[list[Tensor | Product], Tensor]:
    """Return the smaller of WWᵀ/s² and WᵀW/s² of each tensor, in float64 if it is formed, and the scales s, [n].

    Tensors of any shape and real dtype are taken as matrices W [out, everything else]. √λmax·s of a gram is the largest
    singular value σmax(W), to a relative 1e-6. The scales are powers of two that bring W/s near 1. Tensors of one shape
    are treated together on their device, or on the CPU if that has no float64.

    >>> grams, scales = shorter_grams([torch.tensor([[3.0, 4.0]])])
    >>> grams, scales
    ([tensor([[25.]], dtype=torch.float64)], tensor([1.], dtype=torch.float64))
    """
    given = [_matrix(m) for m in matrices]
    shapes: dict[tuple[torch.Size, torch.device], list[int]] = defaultdict(list)
    for i, matrix in enumerate(given):
        shapes[matrix.shape, matrix.device].append(i)
    grams: dict[int, Tensor | Product] = {}
    scales: dict[int, Tensor] = {}
    for same in shapes.values():
        gram, scale = _grams([given[i] for i in same])
        grams |= zip(same, gram, strict=True)
        scales |= zip(same, scale, strict=True)
    if not given:
        return [], torch.zeros(0, dtype=torch.float64)
    order = range(len(given))
    return [grams[i] for i in order], torch.stack([scales[i].to(scales[0].device) for i in order])


def _matrix(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.device.type == "mps":
        tensor = tensor.cpu()
    out, *rest = tensor.shape or (1,)
    return tensor.reshape(out, math.prod(rest))


def _grams(same: Sequence[Tensor]) -> tuple[Sequence[Tensor | Product], Tensor]:
    """Return the grams of matrices of one shape, and their scales."""
    out, rest = same[0].shape
    axis, (short, long) = int(out <= rest), sorted((out, rest))
    most = _PART_ON_CPU if same[0].device.type == "cpu" else _PART
    width = max(1, most // max(1, len(same) * short))
    scale = _scales(same, axis, long, width)
    ones = same[0].new_ones(len(same), dtype=torch.float64)
    if Product.suits(short, long, same[0].device):
        if scale is None:
            return [Product.of(m) for m in same], ones
        return [Product.of(m / s) for m, s in zip(same, scale, strict=True)], scale
    gram: Tensor | None = None
    for at in range(0, long, width):
        part = _part(same, axis, at, width)
        if scale is not None:
            part = part.div_(scale[:, None, None])
        wide = part if axis else part.mT
        gram = torch.bmm(wide, wide.mT) if gram is None else gram.baddbmm_(wide, wide.mT)
    zeros = ones.new_zeros(len(same), short, short)
    return list(zeros if gram is None else gram), ones if scale is None else scale


def _scales(same: Sequence[Tensor], axis: int, long: int, width: int) -> Tensor | None:
    """Return the scales; None for dtypes whose squares are within the range of float64 anyway."""
    if same[0].dtype is not torch.float64:
        return None
    most = same[0].new_zeros(len(same))
    for at in range(0, long, width):
        most = torch.maximum(most, magnitudes(_part(same, axis, at, width)))
    return power_of_two(most)


def _part(same: Sequence[Tensor], axis: int, at: int, width: int) -> Tensor:
    some = same if width >= same[0].shape[axis] else [m.narrow(axis, at, min(width, m.shape[axis] - at)) for m in same]
    return torch.stack(list(some)).to(torch.float64)


class Spectrometer:
    """Spectra of factors, or only λmax of each, found for some of them before the rest is complete.

    >>> factor = Factor()
    >>> factor.add(torch.tensor([[3.0, 0.0], [0.0, 1.0]])); factor.close()
    >>> spectrometer = Spectrometer(full=True)
    >>> spectrometer.take(factor)
    >>> _ = spectrometer.finish()
    >>> spectrometer[factor].values
    array([4.5, 0.5])
    """

    def __init__(self, *, full: bool) -> None:
        self.full = full
        self._waiting: list[Factor] = []
        self._bytes = 0
        self._most: int | None = None  # bytes in use on a GPU
        self._look = _WAITING  # waiting bytes from which memory in use counts
        self._found: list[tuple[Factor, Tensor, float, float]] = []
        self._spectra: dict[int, Spectrum] = {}

    def take(self, factor: Factor) -> None:
        """Accept a complete factor, whose memory may be released."""
        self._waiting.append(factor)
        self._bytes += factor.bytes
        if self._most is None and (device := factor.device) is not None and device.type == "cuda":
            self._most = torch.cuda.memory_allocated(device) + _WAITING
        if self._bytes <= self._look:
            return
        if self._most is None or torch.cuda.memory_allocated(factor.device) > self._most:
            self._decompose([])
        else:
            self._look = self._bytes + _WAITING  # not sooner, because the answer takes longer than most kernels

    def finish(self, others: Sequence[Tensor | Product] = ()) -> Tensor:
        """Bring the spectra of all factors to the host, and return λmax of other matrices."""
        tops = self._decompose(others)
        factors, values, times, zeros = zip(*self._found, strict=True) if self._found else ((), (), (), ())
        roundings = [rounding(factor) for factor in factors]
        spectra = spectra_of(values, [factor.dimension for factor in factors], zeros, times, roundings)
        self._spectra |= {id(factor): spectrum for factor, spectrum in zip(factors, spectra, strict=True)}
        return tops

    def __getitem__(self, factor: Factor) -> Spectrum:
        return self._spectra[id(factor)]

    def _decompose(self, others: Sequence[Tensor | Product]) -> Tensor:
        """Decompose the waiting factors, and return λmax of other matrices."""
        waiting, self._waiting, self._bytes, self._look = self._waiting, [], 0, _WAITING
        taken = [factor.take() for factor in waiting]
        dense = [matrix for factor, (matrix, _) in zip(waiting, taken, strict=True) if not factor.diagonal]
        if self.full:
            formed = [matrix for matrix in dense if isinstance(matrix, Tensor)]  # all: their spectra are asked for
            found, tops = iter(eigenvalues(formed, owned=True)), largest(others)
        else:
            both = largest([*dense, *others], owned=True)
            found, tops = iter(both[: len(dense), None]), both[len(dense) :]
        for factor, (matrix, times) in zip(waiting, taken, strict=True):
            if factor.diagonal and isinstance(matrix, Tensor):
                values = matrix if self.full else matrix.amax()[None]  # one-hot samples have the eigenvalues themselves
            else:
                values = next(found)
            self._found.append((factor, values, times, zero_below(factor, matrix.dtype)))
        return tops


def zero_below(factor: Factor, dtype: torch.dtype) -> float:
    """Return the share of λmax below which an eigenvalue counts as zero, because sums were rounded.

    Adding up R outer products of dimension d moves eigenvalues by the accumulators' epsilon times d or a fraction of R,
    whichever is larger.

    >>> zero_below(Factor(dimension=4, samples=80), torch.float64) == 10 * 2.0**-52
    True
    """
    return max(factor.dimension, factor.samples / 8) * torch.finfo(dtype).eps


def rounding(factor: Factor) -> float:
    """Return the share of the mean eigenvalue below which one counts as zero, because samples were rounded.

    Rounding to a dtype of epsilon ε is noise of relative deviation ε/√12 in each element, and adds about ε²/12 of the
    mean eigenvalue to all of them. The inputs of the samples were rounded as well, hence 4ε².

    >>> rounding(Factor(eps=0.5))
    1.0
    """
    return 4 * factor.eps**2
