"""From the factors of every layer to the numbers: matrices of a size decomposed at once, few waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gyroscope.conditioning.domination import spectral_norms
from gyroscope.conditioning.factors import Factor
from gyroscope.conditioning.result import Kappas, LayerConditioning, Spectra
from gyroscope.conditioning.spectra import Spectrum, eigenvalues, largest, product_at, spectra_of
from gyroscope.conditioning.uses import Use
from gyroscope.layer import Layer
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
) -> tuple[list[LayerConditioning], dict[str, str]]:
    """The numbers of each use of a layer, and the uses whose numbers would not be finite.

    Args:
        uses: with their factors complete, which are let go of.
        layers: those that were looked at; a use points at one.
        gradients: by layer the gradient of the mean loss at its weight.
        units: by layer the shares of dying and of full units.
        p: which κ_p; none means that λmax is all that is wanted.
        spectra: whether the spectra are kept.
    """
    full = bool(p) or spectra
    both = _spectra([factor for use in uses for factor in (use.x, use.g)], full=full)
    x, g = both[::2], both[1::2]
    weights = _norms(uses, layers, gradients)
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


def tolerance(factor: Factor, dtype: torch.dtype) -> float:
    """Below which share of λmax an eigenvalue counts as zero.

    Rounding of samples to a dtype of epsilon ε moves singular values by about ε σmax, eigenvalues of the mean outer
    product by its square; adding up outer products of dimension d moves them by d times the accumulators' epsilon.

    >>> tolerance(Factor(dimension=4, eps=2.0**-23), torch.float64) == (4 * 2.0**-23) ** 2
    True
    """
    return max(factor.dimension * torch.finfo(dtype).eps, (4 * factor.eps) ** 2)


def _spectra(factors: Sequence[Factor], *, full: bool) -> list[Spectrum]:
    """The spectra of factors, which are let go of size by size; with λmax alone in them unless `full`."""
    values: dict[int, Tensor] = {}
    tolerances: dict[int, float] = {}
    sizes: dict[int, list[int]] = {}
    for i, factor in enumerate(factors):
        sizes.setdefault(0 if factor.diagonal else factor.side, []).append(i)
    for size, members in sizes.items():
        means = [_released(factors[i]) for i in members]
        tolerances |= {i: tolerance(factors[i], mean.dtype) for i, mean in zip(members, means, strict=True)}
        if size == 0:  # one-hot samples: the eigenvalues themselves
            found = [mean if full else mean.amax()[None] for mean in means]
        elif full:
            found = eigenvalues(means)
        else:
            found = list(largest(means)[:, None])
        values |= dict(zip(members, found, strict=True))
    order = range(len(factors))
    return spectra_of([values[i] for i in order], [one.dimension for one in factors], [tolerances[i] for i in order])


def _released(factor: Factor) -> Tensor:
    mean = factor.mean()
    factor.release()
    return mean


def _kappas(top: float, at: Array, p: tuple[float, ...]) -> Kappas:
    def ratio(value: float) -> float | None:
        if top == 0:
            return None
        return top / value if value > 0 else float("inf")

    return {q: ratio(float(value)) for q, value in zip(p, at, strict=True)}


def _norms(
    uses: Sequence[Use], layers: Sequence[Layer], gradients: dict[int, Tensor]
) -> list[tuple[float, float, float | None]]:
    """For each use ‖W‖ and the spectral norms of W and of its gradient."""
    whole: list[Tensor] = []
    parts: list[tuple[int, int | None]] = []
    for use in uses:
        weight, gradient = layers[use.position].parameter.detach(), gradients.get(use.position)
        rows = slice(None) if use.rows is None else use.rows
        at = len(whole)
        whole.append(weight[rows])
        if gradient is not None:
            whole.append(gradient[rows])
        parts.append((at, None if gradient is None else at + 1))
    if not whole:
        return []
    if any_sharded(whole):
        # One at a time: together they would be the whole model on every rank.
        norms = torch.cat([spectral_norms([_matrix(_whole(w))]) for w in whole])
    else:
        norms = spectral_norms([_matrix(w) for w in whole])
    squares = dots({"ww": (whole, whole)})[:, 0]
    host = torch.stack([norms.to(squares.device), squares.sqrt()], dim=1).tolist()
    return [(host[w][1], host[w][0], None if s is None else host[s][0]) for w, s in parts]


def _whole(weight: Any) -> Tensor:
    found: Tensor = weight.full_tensor() if is_sharded(weight) else weight
    return found


def _matrix(weight: Tensor) -> Tensor:
    return weight.flatten(1)
