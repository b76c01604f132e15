"""The sensitivity of figure 1 of the conditioning paper to what the paper does not state."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812  (the name torch's own documentation uses)

import gyroscope
from gyroscope.conditioning.curvature import top_eigenvalue
from gyroscope_lab.papers.conditioning.exact import PLANS, in_json
from gyroscope_lab.papers.conditioning.exact_spectra import Choices, exact_spectra, network, small_images

#: Choices other than the default ones, one or two at a time, for the networks that they matter to.
CHANGES: dict[str, list[dict[str, Any]]] = {
    "plain": [{}, {"normalization": "unit"}, {"normalization": "standard"}, {"crop": 24}],
    "bn": [
        {},
        {"normalization": "unit"},
        {"crop": 24},
        {"affine": True, "gain": "uniform"},
        {"statistics": "batch"},
        {"statistics": "batch", "affine": True, "gain": "uniform"},
    ],
}
_LAYERS = (3, 6)

Values = dict[str, list[float | None]]


@dataclass(frozen=True)
class Row:
    """One network under one choice, one number per seed: λmax of F, and λmax and κ_50% of blocks 3 and 6.

    >>> Row("bn", {}, {"largest F": [1.0, 2.0, 100.0]}).middle("largest F")
    2.0
    """

    network: str
    change: dict[str, Any]
    values: Values

    def middle(self, quantity: str) -> float:
        """Return the median over the seeds where it is defined."""
        return median(value for value in self.values[quantity] if value is not None)

    def as_json(self) -> dict[str, Any]:
        """Return everything as strict JSON can hold it."""
        values = {quantity: [in_json(value) for value in values] for quantity, values in self.values.items()}
        return {"network": self.network, "change": self.change, "values": values}


def sensitivity(
    *,
    data: Path | str | None = None,
    samples: int = 1_000,
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    changes: dict[str, list[dict[str, Any]]] = CHANGES,
    out: Path | str | None = None,
) -> list[Row]:
    """Measure figure 1's networks from several seeds under other choices; with `out`, write sensitivity.json there.

    λmax of the whole F is found without forming it, so that the derivative through batch statistics is affordable.

    >>> rows = sensitivity(samples=20, seeds=[0], changes={"bn": [{}, {"statistics": "batch"}]})
    >>> [row.middle("largest F") > 1 for row in rows]
    [True, True]
    """
    rows = [
        Row(name, change, _measured(name, replace(Choices(), samples=samples, **change), data, seeds))
        for name, several in changes.items()
        for change in several
    ]
    if out is not None:
        held = {
            "gyroscope": gyroscope.__version__,
            "torch": torch.__version__,
            "study": "conditioning/sensitivity",
            "model": PLANS["fig1"].model,
            "data": "digits" if data is None else "MNIST",
            "samples": samples,
            "seeds": list(seeds),
            "rows": [row.as_json() for row in rows],
        }
        Path(out).mkdir(parents=True, exist_ok=True)
        Path(out, "sensitivity.json").write_text(json.dumps(held, indent=1, allow_nan=False) + "\n")
    return rows


def _measured(name: str, choices: Choices, data: Path | str | None, seeds: Sequence[int]) -> Values:
    found: Values = {}
    for seed in seeds:
        for quantity, value in _values(name, choices, data, seed):
            found.setdefault(quantity, []).append(value)
    return found


def _values(name: str, choices: Choices, data: Path | str | None, seed: int) -> Iterator[tuple[str, float | None]]:
    assert choices.samples is not None
    images = small_images(choices.samples, data=data, crop=choices.crop, normalization=choices.normalization)
    model = network(PLANS["fig1"].model, images, batch_norm=name == "bn", seed=seed, choices=choices)
    batch = (images.x, images.y)
    yield "largest F", top_eigenvalue(model, F.cross_entropy, batch, layer="*")
    weights = {layer: f"linear{layer}.weight" for layer in _LAYERS}
    spectra = exact_spectra(model, *batch, labels="model", layers=list(weights.values()), whole=False)
    for layer, weight in weights.items():
        spectrum = spectra[weight]
        yield f"largest F_{layer}", spectrum.largest
        yield f"kappa_50 F_{layer}", spectrum.kappa(0.5)
