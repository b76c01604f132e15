"""Shared by the contract tests: small models, given gradients, and the literal Algorithm 1 in float64."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gyroscope import Layca

RHO = 3.0**-3

# Where the models lie: the same claims hold on a GPU (`make gpu`).
DEVICE = torch.device(os.environ.get("GYROSCOPE_TEST_DEVICE", "cpu"))

# How far a float64 run may be from its oracle: the kernels of an accelerator take the rate in float32.
TIGHT = 1e-12 if DEVICE.type == "cpu" else 1e-8
NEAR = 1e-8 if DEVICE.type == "cpu" else 1e-6  # the same of an angle, as a share of it

Make = Callable[[Iterable[Any]], Optimizer]


class ReadsWeights(Optimizer):
    """Not known to Gyroscope, and its direction depends on the weights: sign descent with multiplicative decay."""

    def __init__(self, params: Iterable[Any], lr: float = RHO) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad + 0.3 * p * p.abs(), alpha=-group["lr"])
        return loss


def sgd(params: Iterable[Any]) -> Optimizer:
    return torch.optim.SGD(params, lr=RHO)


def momentum(params: Iterable[Any]) -> Optimizer:
    return torch.optim.SGD(params, lr=RHO, momentum=0.9, weight_decay=5e-3)


def adam(params: Iterable[Any]) -> Optimizer:
    return torch.optim.Adam(params, lr=RHO)


def adamw(params: Iterable[Any]) -> Optimizer:
    return torch.optim.AdamW(params, lr=RHO, weight_decay=0.1)


def reads_weights(params: Iterable[Any]) -> Optimizer:
    return ReadsWeights(params, lr=RHO)


INNERS: list[Make] = [sgd, momentum, adam, adamw, reads_weights]


def mlp(seed: int = 0, dtype: torch.dtype = torch.float32, hidden: int = 5) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 3)).to(DEVICE, dtype)


def batch(seed: int, n: int = 8, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE, dtype)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - 1.0).square().mean()


def backward(model: nn.Module, seed: int, n: int = 8) -> None:
    """A gradient that depends on the weights and on `seed`."""
    model.zero_grad()
    dtype = next(model.parameters()).dtype
    loss_of(model, batch(seed, n, dtype)).backward()


def give_gradients(model: nn.Module, seed: int, scale: float = 1.0) -> None:
    """A gradient that depends on `seed` alone."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for p in model.parameters():
        p.grad = (scale * torch.randn(p.shape, generator=generator)).to(p)


def train(model: nn.Module, optimizer: Optimizer, steps: Iterable[int]) -> None:
    for seed in steps:
        backward(model, seed)
        optimizer.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(a: Iterable[Tensor], b: Iterable[Tensor]) -> bool:
    """Bit for bit, dtype included."""
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def assert_close(a: nn.Module, b: nn.Module, tolerance: float) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        difference = (p.detach().double() - q.detach().double()).abs().max().item()
        assert difference <= tolerance, f"{name} differs by {difference}"


def tangent(before: Tensor, after: Tensor) -> float:
    """tan of the angle between two tensors, without the cancellation of acos near 0."""
    x, y = before.detach().double().flatten(), after.detach().double().flatten()
    along = (x @ y) / (x @ x)
    return ((y - along * x).norm() / (along * x).norm()).item()


def angle(before: Tensor, after: Tensor) -> float:
    return math.atan(tangent(before, after))


def snapshot(optimizer: Optimizer) -> dict[str, Any]:
    """Everything an optimizer would save, detached from what happens later."""
    return copy.deepcopy(optimizer.state_dict())


def assert_same_state(a: Any, b: Any, where: str = "state", slack: float = 0.0) -> None:
    """Two nested states, dtypes included: bit for bit, or to a share `slack` of every number."""
    assert type(a) is type(b), f"{where}: {type(a)} and {type(b)}"
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same_state(a[key], b[key], f"{where}[{key!r}]", slack)
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same_state(x, y, f"{where}[{i}]", slack)
    elif isinstance(a, Tensor):
        assert a.dtype == b.dtype, where
        assert torch.equal(a, b) if slack == 0 else torch.allclose(a, b, rtol=slack, atol=1e-12), where
    else:
        assert a == b, where


class Literal64:
    """Algorithm 1 of the layer-rotation paper line by line, in float64, around a real step of the inner optimizer."""

    def __init__(self, model: nn.Module, make: Make) -> None:
        self.model = copy.deepcopy(model).double()
        self.optimizer = make(self.model.parameters())
        self.norms = [p.detach().norm() for p in self.model.parameters()]

    @torch.no_grad()
    def step(self, gradients: Iterable[Tensor | None], rho: float = RHO) -> None:
        params = list(self.model.parameters())
        for p, g in zip(params, gradients, strict=True):
            p.grad = None if g is None else g.double()
        before = [p.detach().clone() for p in params]
        self.optimizer.step()
        for p, w, norm in zip(params, before, self.norms, strict=True):
            if p.grad is None or p.dim() < 2:
                continue
            s = p - w
            u = s - (s * w).sum() / (w * w).sum() * w
            u = u * w.norm() / u.norm()
            new = w + rho * u
            p.copy_(new * norm / new.norm())


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def radii(optimizer: Layca) -> list[Tensor]:
    """The radii as the state shows them, in group order."""
    return [
        optimizer.state[p]["radius"].detach().clone()
        for i, group in enumerate(optimizer.param_groups)
        if optimizer.controls(i)
        for p in group["params"]
        if "radius" in optimizer.state.get(p, {})
    ]
