"""The names models go by."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from gyroscope.lab.errors import LabError
from gyroscope.lab.models.digits_cnn import digits_cnn

#: name -> (builder, what it is in one line)
MODELS: dict[str, tuple[Callable[[int], nn.Module], str]] = {
    "digits-cnn": (digits_cnn, "6 convolutions and a linear classifier for 8×8 grey images, 72,208 weights"),
}


def make(name: str, *, seed: int) -> nn.Module:
    """Return a freshly initialized model; equal seeds give equal weights, bit for bit.

    >>> model = make("digits-cnn", seed=0)
    >>> sum(p.numel() for p in model.parameters())
    72208
    """
    if name not in MODELS:
        raise LabError(f"no model is called {name!r}; there are: {', '.join(sorted(MODELS))}")
    builder, _ = MODELS[name]
    return builder(seed)
