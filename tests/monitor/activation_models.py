"""Help for the tests of activations: look at a model while it runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import gyroscope
from gyroscope.passes.activations import COLUMNS, ActivationProbe

Seen = dict[str, dict[str, float]]


def watched(model: nn.Module, run: Callable[[], Any], *, train: bool = False, **options: Any) -> Seen:
    """What a probe sees while `run()` runs, by layer; with `train`, a backward pass follows each run."""
    layers = gyroscope.layers(model)
    probe = ActivationProbe(model, layers, **options)
    probe.attach()
    try:
        out = run()
        if train:
            out.sum().backward()
    finally:
        probe.detach()
    if probe.error is not None:
        raise probe.error
    table = probe.collect()
    assert table.shape == (len(layers), len(COLUMNS))
    names = [layer.name for layer in layers]
    return {name: dict(zip(COLUMNS, row, strict=True)) for name, row in zip(names, table.tolist(), strict=True)}


def close(got: dict[str, float], expected: dict[str, float], rel: float = 1e-5) -> bool:
    """Whether two sets of statistics agree."""
    return all(math.isclose(got[name], expected[name], rel_tol=rel, abs_tol=1e-7) for name in COLUMNS)


def unseen(got: dict[str, float]) -> bool:
    return all(math.isnan(value) for value in got.values())


class Functional(nn.Module):
    """A model whose forward pass is a function of its parts and the input."""

    def __init__(self, forward: Callable[..., Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(parts)
        self.function = forward

    def forward(self, *x: Tensor) -> Tensor:
        return self.function(self.parts, *x)


def seeded(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
