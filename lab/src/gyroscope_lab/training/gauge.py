"""Readings at the end of an epoch: one small vector, computed on the device of the weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the name torch's own documentation uses)

from gyroscope.base import to_host
from gyroscope.layers import layers
from gyroscope.vectors import dots
from gyroscope_lab.data.split import Split

# The activations of this many images fit on any device, and so do the logits of this many characters.
_AT_ONCE = {"cpu": 2000, "cuda": 5000}
_CHARACTERS = {"cpu": 2000, "cuda": 2**16}
# Norms whose ratio, shorter to longer, is at least this can be subtracted.
_ALIKE = 1e-3


class Reading:
    """Numbers on their way from the device."""

    def __init__(self, values: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if values.is_cuda:
            self._values = to_host(values)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._values = values

    @property
    def ready(self) -> bool:
        """True once they have arrived."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def numbers(self) -> list[float]:
        """The numbers; waits for them."""
        if self._event is not None:
            self._event.synchronize()
        return [float(value) for value in self._values.tolist()]


class Gauge:
    """The rotation of each layer since the gauge was made, and the norm of its weights.

        1 − cos θ = (‖w − w₀‖² − (‖w‖ − ‖w₀‖)²) / (2 ‖w‖ ‖w₀‖),

    which is exactly 0 where nothing moved, and accurate at small angles. For norms that are far apart it is computed as
    1 − ⟨w, w₀⟩ / (‖w‖ ‖w₀‖). It is nan for a layer that is zero.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> _ = model.weight.data.copy_(torch.tensor([[2.0, 0.0]]))
    >>> gauge = Gauge(model)
    >>> _ = model.weight.data.copy_(torch.tensor([[0.0, 3.0]]))
    >>> gauge.read().tolist()
    [[1.0, 3.0]]
    """

    def __init__(self, model: nn.Module) -> None:
        its = layers(model)
        self.names = [layer.name for layer in its]
        self._weights = [layer.parameter for layer in its]
        self.initial = [weight.detach().clone() for weight in self._weights]

    @torch.no_grad()
    def read(self) -> Tensor:
        """[layers, 2], on the device: rotation, and norm."""
        now = [weight.detach() for weight in self._weights]
        moved = [a.double() - b.double() for a, b in zip(now, self.initial, strict=True)]
        products = dots({"ww": (now, now), "rr": (self.initial, self.initial)})
        norm, start = products.sqrt().unbind(1)
        distance = dots({"dd": (moved, moved)}).squeeze(1)
        rotation = (distance - (norm - start).square()).clamp(min=0.0) / (2.0 * norm * start)
        # If one norm is much larger than the other, the difference of squares is only rounding error.
        cosine = dots({"wr": (now, self.initial)}).squeeze(1) / (norm * start)
        apart = torch.minimum(norm, start) < _ALIKE * torch.maximum(norm, start)
        rotation = torch.where(apart, 1.0 - cosine, rotation).clamp(min=0.0, max=2.0)
        rotation = torch.where(norm * start > 0, rotation, torch.nan)  # otherwise rounding error divided by 0
        return torch.stack([rotation, norm], dim=1)


@torch.no_grad()
def correct(forward: Callable[[Tensor], Tensor], split: Split, x: Tensor, y: Tensor) -> Tensor:
    """Return the number of examples that are classified correctly, on the device."""
    found = torch.zeros((), dtype=torch.float64, device=y.device)
    size = _AT_ONCE.get(y.device.type, 2000)
    for inputs, labels in zip(torch.split(x, size), torch.split(y, size), strict=True):
        guesses = forward(split.inputs(inputs.to(y.device))).argmax(dim=-1)
        found += (guesses == labels).sum()
    return found


@torch.no_grad()
def mean_loss(forward: Callable[[Tensor], Tensor], split: Split, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy of the labels, on the device."""
    found = torch.zeros((), dtype=torch.float64, device=y.device)
    # Losses need the logits in float32, not their argmax alone: of fewer examples at a time.
    most = _AT_ONCE if y.dim() == 1 else _CHARACTERS
    size = max(1, most.get(y.device.type, 2000) // max(1, y[:1].numel()))
    for inputs, labels in zip(torch.split(x, size), torch.split(y, size), strict=True):
        scores = forward(split.inputs(inputs.to(y.device))).float()
        found += F.cross_entropy(scores.flatten(0, -2), labels.flatten(), reduction="sum")
    return found / y.numel()
