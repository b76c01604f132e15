"""Small models under a monitor, with copies of every step to compare its numbers with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gyroscope
from oracles.monitor import COSINES, WEIGHT_SIDE, Copies, measured


def mlp(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3)).to(dtype)


def inputs(
    count: int, dtype: torch.dtype = torch.float32, seed: int = 1, shape: Sequence[int] = (8, 6)
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).to(dtype) for _ in range(count)]


def backward(model: nn.Module, x: Tensor) -> Tensor:
    model.zero_grad()
    loss = (model(x).float() - 1.0).square().mean()
    loss.backward()
    return loss.detach()


def train(
    model: nn.Module,
    optimizer: Optimizer,
    xs: Sequence[Any],
    *,
    copies: Copies | None = None,
    each: Callable[[int], None] | None = None,
    step: Callable[[nn.Module, Any], Any] = backward,
) -> list[Any]:
    """Steps on `xs`; `each(i)` is called before the i-th, counted from 0."""
    losses = []
    for i, x in enumerate(xs):
        if each is not None:
            each(i)
        losses.append(step(model, x))
        if copies is not None:
            copies.keep_gradients()
        optimizer.step()
        if copies is not None:
            copies.keep_step(optimizer)
    return losses


def copies_of(model: nn.Module, names: Sequence[str] | None = None) -> Copies:
    found = [layer for layer in gyroscope.layers(model) if names is None or layer.name in names]
    return Copies(lambda: [holder(layer)._parameters[layer.attribute.split(".")[-1]] for layer in found])


def holder(layer: gyroscope.Layer) -> nn.Module:
    module = layer.module
    for name in layer.attribute.split(".")[:-1]:
        module = module[name] if isinstance(module, nn.ModuleDict) else getattr(module, name)
    return module


def check(
    path: Path,
    copies: Copies,
    steps: Sequence[int],
    *,
    whole: Sequence[bool] | None = None,
    layers: Sequence[int] | None = None,
    leave_out: Sequence[str] = (),
    rtol: float = 3e-6,
    atol: float = 3e-7,
) -> None:
    """Every quantity that was recorded is that of the oracle, at exactly these steps; `atol` is for cosines."""
    expected = measured(copies, steps, whole)
    with gyroscope.load(path) as run:
        columns = list(range(len(run.layers))) if layers is None else list(layers)
        rows = [i for i, step in enumerate(run.steps) if np.isfinite(run.series("weight_norm")[i, columns]).all()]
        assert run.steps[rows].tolist() == list(steps)
        for name in [name for name in WEIGHT_SIDE if name not in leave_out]:
            got, want = run.series(name)[rows][:, columns], expected[name]
            if "lr" in name or name == "weight_decay":  # those of a step that is none do not matter
                got, want = got[1:], want[1:]
            small = atol if name in COSINES and name != "rotation" else 0.0  # rotation keeps its digits
            np.testing.assert_allclose(got, want, rtol=rtol, atol=small, err_msg=name)
