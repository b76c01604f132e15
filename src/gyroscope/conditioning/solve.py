"""From the factors of every layer to the numbers: matrices of a size decomposed at once, few waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gyroscope.conditioning.domination import shorter_grams
from gyroscope.conditioning.products import product_at
from gyroscope.conditioning.result import Kappas, LayerConditioning, Spectra
from gyroscope.conditioning.spectrometer import Spectrometer
from gyroscope.conditioning.uses import Use
from gyroscope.layers.layer import Layer
from gyroscope.vectors import dots
from gyroscope.vectors.sharded import any_sharded, is_sharded

Array = npt.NDArray[np.float64]


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
    """The numbers of each use of a layer, and the uses whose numbers would not be finite.

    Args:
        uses: with their factors complete, which are let go of.
        layers: those that were looked at; a use points at one.
        gradients: by layer the gradient of the mean loss at its weight.
        units: by layer the shares of dying and of full units.
        p: which κ_p; none means that λmax is all that is wanted.
        spectra: whether the spectra are kept.
        spectrometer: one that has some of the factors already.
        times: what the gradients are still to be multiplied by.
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
    """The weights of uses and their gradients, as far as norms need them.

    Attributes:
        parts: for each use the positions of its weight and of its gradient, None where there is none.
        squares: ‖W‖² of all of them.
        grams, scales: see `shorter_grams`.
    """

    parts: list[tuple[int, int | None]]
    squares: Tensor
    grams: list[Tensor]
    scales: Tensor

    @classmethod
    def of(cls, uses: Sequence[Use], layers: Sequence[Layer], gradients: dict[int, Tensor]) -> _Weights:
        whole: list[Tensor] = []
        parts: list[tuple[int, int | None]] = []
        for use in uses:
            weight, gradient = layers[use.position].parameter.detach(), gradients.get(use.position)
            rows = slice(None) if use.rows is None else use.rows
            parts.append((len(whole), None if gradient is None else len(whole) + 1))
            whole.append(weight[rows])
            if gradient is not None:
                whole.append(gradient[rows])
        squares = dots({"ww": (whole, whole)})[:, 0]
        if any_sharded(whole):
            # One at a time: together they would be the whole model on every rank.
            pairs = [shorter_grams([_whole(w)]) for w in whole]
            grams, scales = [g for gram, _ in pairs for g in gram], torch.cat([scale for _, scale in pairs])
        else:
            grams, scales = shorter_grams(whole)
        return cls(parts, squares, grams, scales)

    def norms(self, tops: Tensor, times: float) -> list[tuple[float, float, float | None]]:
        """For each use ‖W‖ and the spectral norms of W and of its gradient, with λmax of the grams."""
        spectral = tops.abs().sqrt() * self.scales.to(tops.device)
        host = torch.stack([self.squares.to(tops.device).sqrt(), spectral], dim=1).tolist()
        return [(host[w][0], host[w][1], None if g is None else host[g][1] * times) for w, g in self.parts]


def _whole(weight: Any) -> Tensor:
    found: Tensor = weight.full_tensor() if is_sharded(weight) else weight
    return found
