"""Small models, loops and comparisons for the tests of references and resumed runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import nn

import gyroscope
from gyroscope import Monitor, Run

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def net(seed: int = 0, width: int = 6) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 5), nn.Tanh(), nn.Linear(5, 2))


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)


def go(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int], monitor: Monitor | None = None
) -> None:
    """Take the given steps; the data of a step depend on its number alone."""
    dtype = next(model.parameters()).dtype
    for step in steps:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 + step)).to(dtype)
        loss = (model(x) - 1.0).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if monitor is not None:
            monitor.log(loss=loss)


def rotations(model: nn.Module, start: dict[str, torch.Tensor], names: Iterable[str]) -> np.ndarray:
    """1 − cos of each layer's angle to where it started, in float64."""
    now = {name: layer.parameter.detach().double().flatten() for name, layer in _named(model)}
    pairs = [(now[name], start[name].double().flatten()) for name in names]
    return np.array([float(1 - a @ b / (a.norm() * b.norm())) for a, b in pairs])


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of each layer's weights by name."""
    return {name: layer.parameter.detach().clone() for name, layer in _named(model)}


def hooks(optimizer: torch.optim.Optimizer) -> int:
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


def assert_same_curves(run: Run, whole: Run, *, resumed: Iterable[int] = ()) -> None:
    """Steps and all series are the same to the last bit, but for what cannot be at the first `resumed` steps.

    The displacement before them is not known, so their alignment is not; and they are looked at in detail.
    """
    assert run.steps.tolist() == whole.steps.tolist()
    assert set(run.quantities) == set(whole.quantities)
    first = np.isin(whole.steps, list(resumed))
    for name in whole.quantities:
        one, other = run.series(name), whole.series(name)
        other_than_here = name in ("alignment", "gradient_carried") or name.startswith("moment")
        rest = ~first if other_than_here else np.full_like(first, True)
        if name != "gradient_carried":  # known of one layer
            assert (np.isnan(one[~rest]) == (name == "alignment")).all(), name
        np.testing.assert_array_equal(one[rest], other[rest], err_msg=name)


def _named(model: nn.Module) -> list[tuple[str, gyroscope.Layer]]:
    return [(layer.name, layer) for layer in gyroscope.layers(model)]
