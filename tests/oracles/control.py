"""Slow, literal versions of the control laws, in float64: one operation a line, as the papers print them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer


def four_operations(
    w: Tensor,
    s: Tensor,
    rho: float,
    radius: float,
    *,
    project: bool = True,
    scale: str = "relative",
    reproject: bool = True,
    growth: float | None = None,
) -> Tensor:
    """Algorithm 1 of the layer-rotation paper on one layer, with operations left out as asked."""
    w, s = w.detach().double(), s.detach().double()
    size = s.norm()
    if rho == 0 or size == 0 or w.norm() == 0:
        return w.clone()
    unit = w / w.norm()
    if project:
        s = s - (s * unit).sum() * unit
        s = s - (s * unit).sum() * unit  # twice, because the first leaves a remainder of rounding
    if s.norm() <= 1e-7 * size:
        return w.clone()
    s = s / s.norm() * (w.norm() if scale == "relative" else 1.0)
    new = w + rho * s
    if reproject:
        new = new / new.norm() * radius
    elif growth is not None and new.norm() > w.norm() + growth * radius:
        new = new / new.norm() * (w.norm() + growth * radius)
    return new


class LiteralLayca:
    """A float64 copy of parameters and inner optimizer: let it step, take the difference, apply the operations.

    Args:
        make: builds the inner optimizer on a list of parameters; its groups' `lr` are the rates.
        params: the parameters to copy.
        controlled: for each parameter its multiplier on the rate, or None where the inner optimizer steps it.
        segments: for each parameter into how many parts along which dimension it is split.
        frozen: whether parameters that are not controlled stay as they are.
        law: which operations to perform.
    """

    def __init__(
        self,
        make: Callable[[list[Tensor]], Optimizer],
        params: Sequence[Tensor],
        *,
        controlled: Sequence[float | None] | None = None,
        segments: Sequence[tuple[int, int]] | None = None,
        frozen: bool = False,
        **law: object,
    ) -> None:
        self.params = [p.detach().to(torch.float64, copy=True).requires_grad_() for p in params]
        self.inner = make(self.params)
        self.controlled = [1.0 if p.dim() > 1 else None for p in params] if controlled is None else controlled
        self.segments = [(1, 0)] * len(params) if segments is None else segments
        self.frozen = frozen
        self.law = law
        self.radii: dict[tuple[int, int], float] = {}

    def _rate(self, p: Tensor) -> float:
        (group,) = [g for g in self.inner.param_groups if any(q is p for q in g["params"])]
        return float(group["lr"])

    def step(
        self, grads: Sequence[Tensor | None] | None = None, closure: Callable[[Sequence[Tensor]], Tensor] | None = None
    ) -> None:
        before = [p.detach().clone() for p in self.params]
        if grads is not None:
            for p, g in zip(self.params, grads, strict=True):
                p.grad = None if g is None else g.double()
        if closure is None:
            self.inner.step()
        else:
            self.inner.step(lambda: closure(self.params))
        with torch.no_grad():
            for i, (p, w, share) in enumerate(zip(self.params, before, self.controlled, strict=True)):
                if share is None:
                    if self.frozen:
                        p.copy_(w)
                elif p.grad is None:
                    p.copy_(w)
                else:
                    p.copy_(self._turn(i, w, p.detach() - w, self._rate(p) * share))

    def _turn(self, i: int, w: Tensor, s: Tensor, rho: float) -> Tensor:
        n, dim = self.segments[i]
        parts = []
        for k, (one, its) in enumerate(zip(w.chunk(n, dim), s.chunk(n, dim), strict=True)):
            radius = self.radii.setdefault((i, k), float(one.norm()))
            parts.append(four_operations(one, its, rho, radius, **self.law))
        return torch.cat(parts, dim)


def angle(x: Tensor, y: Tensor) -> float:
    """The angle between two tensors, by Kahan's formula: exact for small angles, where arccos is not."""
    x, y = x.detach().double().flatten(), y.detach().double().flatten()
    x, y = x / x.norm(), y / y.norm()
    return 2 * math.atan2(float((x - y).norm()), float((x + y).norm()))


def distance(x: Tensor, y: Tensor) -> float:
    """‖x − y‖ as a share of ‖y‖."""
    x, y = x.detach().double(), y.detach().double()
    return float((x - y).norm() / y.norm())


def multipliers(alpha: float, n: int) -> list[float]:
    """The published multipliers, layer by layer."""
    found = []
    for layer in range(n):
        if n == 1:
            found.append(1.0)
        elif alpha > 0:
            found.append((1 - alpha) ** (5 * (n - 1 - layer) / (n - 1)))
        else:
            found.append((1 + alpha) ** (5 * layer / (n - 1)))
    return found


def warmup_rate(lr: float, t: int, steps: int) -> float:
    """lr f + lr/10 (1 − f) while f = t/steps is below 1."""
    if t >= steps:
        return lr
    f = t / steps
    return lr * f + lr / 10 * (1 - f)


class LiteralAMom(Optimizer):
    """v ← μ v + (1 − μ) g, w ← w − η v, one tensor at a time."""

    def __init__(self, params, lr=1e-3, momentum=0.9, weight_decay=0.0, maximize=False):
        super().__init__(params, {"lr": lr, "mu": momentum, "decay": weight_decay, "up": maximize})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                g = (-p.grad if group["up"] else p.grad) + group["decay"] * p
                v = self.state[p].get("momentum_buffer", torch.zeros_like(p))
                v = group["mu"] * v + (1 - group["mu"]) * g
                self.state[p]["momentum_buffer"] = v
                p -= group["lr"] * v
