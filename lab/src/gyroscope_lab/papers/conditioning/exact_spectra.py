"""Exact spectra of a network's Fisher matrix, or its second moments, from whichever side is smaller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (the name torch's own documentation uses)

from gyroscope.conditioning import Spectrum, eigenvalues
from gyroscope.conditioning.fisher import fisher, gradient_rows, parameters, scores_of
from gyroscope.layers import untouched
from gyroscope.passes import Batch, borrowed, first_output, network

Labels = Literal["model", "true"]


def exact_spectra(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, *, labels: Labels, layers: Sequence[str], whole: bool
) -> dict[str | None, Spectrum]:
    """Return the spectra of the blocks of `layers`, and under None that of the whole matrix over all layers' weights.

    With G the N·r gradients of N samples, a row each (r is 1 for true labels, the number of classes for the model's),
    the matrix is GᵀG/N; where it has more rows than G, the eigenvalues above zero are found from GGᵀ/N.

    >>> net = nn.Sequential(nn.Linear(3, 9, bias=False), nn.ReLU(), nn.Linear(9, 2, bias=False)).double()
    >>> x, y = torch.ones(2, 3, dtype=torch.float64), torch.tensor([0, 1])
    >>> found = exact_spectra(net, x, y, labels="model", layers=["0.weight"], whole=True)
    >>> found[None].dimension, found["0.weight"].dimension, found[None].rank
    (45, 27, 1)
    """
    size = sum(parameters(model, only="*").sizes)
    with untouched(model), torch.no_grad():
        classes = model(x[:2]).shape[1]
    gradients = len(x) * (classes if labels == "model" else 1)
    if gradients < size:
        return _from_gradients(model, x, y, labels, layers, whole)
    only = "*" if whole else layers
    exact = fisher(model, F.cross_entropy, (x, y), labels=labels, blocks=not whole, layers=only)
    spectra: dict[str | None, Spectrum] = {None: exact.spectrum()} if whole else {}
    return spectra | {name: exact.spectrum(name) for name in layers}


def _from_gradients(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, labels: Labels, layers: Sequence[str], whole: bool
) -> dict[str | None, Spectrum]:
    chosen = parameters(model, only="*")
    with borrowed(model):
        f = network(model, chosen.names, Batch((x,), {}, y), torch.float64)
        output = first_output(f)
        scores = scores_of(F.cross_entropy, output, y, labels, torch.Generator())
        pieces = list(gradient_rows(f, output, scores))
    by_name = {name: torch.cat([piece[name] for piece in pieces]) for name in chosen.names}
    spectra: dict[str | None, Spectrum] = {}
    if whole:
        spectra[None] = _spectrum(torch.cat(list(by_name.values()), dim=1), len(x))
    return spectra | {name: _spectrum(by_name[name], len(x)) for name in layers}


def _spectrum(gradients: torch.Tensor, samples: int) -> Spectrum:
    rows, size = gradients.shape
    gram = gradients @ gradients.T if rows < size else gradients.T @ gradients
    tolerance = max(size * 2.0**-52, (4 * torch.finfo(torch.float64).eps) ** 2)
    return Spectrum.of(eigenvalues([gram / samples])[0], size, tolerance=tolerance)
