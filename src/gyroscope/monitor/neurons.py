"""Rotation neuron by neuron: how it is spread within each layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from gyroscope.layers.layer import Layer, split
from gyroscope.monitor.reference import Reference
from gyroscope.store.record import QuantityInfo
from gyroscope.vectors import dots

PERCENTS = (0, 10, 50, 90, 100)

NAMES = tuple(f"neuron_p{p}" for p in PERCENTS)

INFO = {
    name: QuantityInfo(name, "1", f"{p} % of the layer's output units have rotated by at most this much")
    for name, p in zip(NAMES, PERCENTS, strict=True)
}


class Neurons:
    """Measures the rotation of every output unit, and sums it up as quantiles within the layer."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.rows = [split(layer, "row") for layer in layers]
        self.counts = [row.segments for row in self.rows]

    def measure(self, weights: Sequence[Tensor], reference: Reference) -> Tensor:
        """Inner products ⟨w,w⟩, ⟨w,w₀⟩, ⟨w₀,w₀⟩ of every output unit, on the weights' device."""
        held = reference.tensors(weights)
        now = [row.view(w.detach()) for row, w in zip(self.rows, weights, strict=True)]
        first = [row.view(r.to(w.device)) for row, r, w in zip(self.rows, held, weights, strict=True)]
        return dots({"ww": (now, now), "wr": (now, first), "rr": (first, first)}, segments=self.counts)

    def quantiles(self, products: Tensor) -> npt.NDArray[np.float64]:
        """[quantiles, layers] from what `measure` gave, now in host memory; units without a direction are left out.

        >>> import torch
        >>> from gyroscope.layers.layer import layers
        >>> net = torch.nn.Linear(2, 2, bias=False)
        >>> neurons = Neurons(layers(net))
        >>> turned = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 1.0]])      # one unit as it was, one at a right angle
        >>> neurons.quantiles(turned)[:, 0].tolist()
        [0.0, 0.1, 0.5, 0.9, 1.0]
        """
        ww, wr, rr = products.numpy().astype(np.float64).T
        with np.errstate(all="ignore"):
            rotation = np.clip(1.0 - wr / np.sqrt(ww * rr), 0.0, 2.0)
        out = np.full((len(PERCENTS), len(self.counts)), np.nan)
        start = 0
        for i, count in enumerate(self.counts):
            own = rotation[start : start + count]
            own = own[np.isfinite(own)]
            if own.size:
                out[:, i] = np.percentile(own, PERCENTS)
            start += count
        return out
