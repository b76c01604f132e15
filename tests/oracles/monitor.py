"""What a monitor should have measured, from copies of the weights and gradients of every step: float64, plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

WEIGHT_SIDE = (
    "rotation", "rate", "rate_per_step", "weight_norm", "weight_norm_before", "gradient_norm", "update_norm",
    "update_ratio", "effective_lr", "effective_lr_measured", "alignment", "invariance", "lr", "weight_decay",
)  # fmt: skip
# Quantities that cancellation may bring near 0: they are compared with an absolute error.
COSINES = ("rotation", "alignment", "invariance")


class Copies:
    """Copies of some parameters, made before the first step and after each one."""

    def __init__(self, parameters: Callable[[], Sequence[Tensor]]) -> None:
        self.parameters = parameters
        self.weights = [[flat(p) for p in parameters()]]
        self.gradients: list[list[Tensor | None]] = [[None for _ in parameters()]]
        self.lr = [[math.nan for _ in parameters()]]
        self.decay = [[math.nan for _ in parameters()]]

    def keep_gradients(self) -> None:
        """Just before a step."""
        self._held = [None if p.grad is None else flat(p.grad.to_dense()) for p in self.parameters()]

    def keep_step(self, optimizer: Optimizer) -> None:
        """Just after it."""
        parameters = self.parameters()
        self.weights.append([flat(p) for p in parameters])
        self.gradients.append(self._held)
        groups = [next((g for g in optimizer.param_groups if any(q is p for q in g["params"])), {}) for p in parameters]
        self.lr.append([float(g.get("lr", math.nan)) for g in groups])
        self.decay.append([float(g.get("weight_decay", 0.0 if g else math.nan)) for g in groups])

    @property
    def steps(self) -> int:
        return len(self.weights) - 1


def measured(copies: Copies, steps: Sequence[int], whole: Sequence[bool] | None = None) -> dict[str, np.ndarray]:
    """Every quantity on the weight side, [steps, layers], for a monitor that measured these steps.

    Where `whole` is False, only the weights after the step were known to it: not the gradient, nor those before.
    """
    layers = len(copies.weights[0])
    whole = [step > 0 for step in steps] if whole is None else whole
    result = {name: np.full((len(steps), layers), math.nan) for name in WEIGHT_SIDE}
    for row, step in enumerate(steps):
        for layer in range(layers):
            w, start = copies.weights[step][layer], copies.weights[0][layer]
            found = {
                "rotation": cosine_distance(w, start),
                "weight_norm": norm(w),
                "lr": copies.lr[step][layer],
                "weight_decay": copies.decay[step][layer],
                "effective_lr": over(copies.lr[step][layer], norm(w) ** 2),
            }
            if row > 0:
                last = copies.weights[steps[row - 1]][layer]
                found["rate"] = angle(w, last)
                found["rate_per_step"] = angle(w, last) / (step - steps[row - 1])
            if row > 1:
                found["alignment"] = cosine(w - last, last - copies.weights[steps[row - 2]][layer])
            if whole[row]:
                b = copies.weights[step - 1][layer]
                found["weight_norm_before"] = norm(b)
                found["update_norm"] = norm(w - b)
                found["update_ratio"] = over(norm(w - b), norm(b))
                g = copies.gradients[step][layer]
                if g is not None:
                    found["gradient_norm"] = norm(g)
                    found["invariance"] = cosine(b, g)
                    found["effective_lr_measured"] = over(angle(w, b), norm(b) * norm(across(g, b)))
            for name, value in found.items():
                result[name][row, layer] = value
    return result


def flat(tensor: Tensor) -> Tensor:
    """The elements in logical order, as a float64 copy of its own."""
    return tensor.detach().to(torch.float64, copy=True).reshape(-1)


def norm(x: Tensor) -> float:
    largest = float(x.abs().max())
    if largest == 0 or not math.isfinite(largest):
        return largest
    return largest * math.sqrt(math.fsum((x / largest).square().tolist()))


def over(a: float, b: float) -> float:
    return a / b if b > 0 else math.nan


def unit(x: Tensor) -> Tensor:
    """x / ‖x‖; the second division takes the rounding of the first away."""
    x = x / norm(x)
    return x / norm(x)


def across(g: Tensor, b: Tensor) -> Tensor:
    """The part of g at right angles to b."""
    if norm(b) == 0:
        return torch.zeros_like(g)
    return g - math.fsum((g * unit(b)).tolist()) * unit(b)


def angle(a: Tensor, b: Tensor) -> float:
    """The arc cosine of ⟨a,b⟩/(‖a‖‖b‖), in Kahan's form, which is right for small angles too."""
    if not (0 < norm(a) < math.inf and 0 < norm(b) < math.inf):
        return math.nan
    return 2 * math.atan2(norm(unit(a) - unit(b)), norm(unit(a) + unit(b)))


def cosine_distance(a: Tensor, b: Tensor) -> float:
    """1 − ⟨a,b⟩/(‖a‖‖b‖) = ‖a/‖a‖ − b/‖b‖‖²/2, which does not cancel."""
    if not (0 < norm(a) < math.inf and 0 < norm(b) < math.inf):
        return math.nan
    return norm(unit(a) - unit(b)) ** 2 / 2


def cosine(a: Tensor, b: Tensor) -> float:
    if not (0 < norm(a) < math.inf and 0 < norm(b) < math.inf):
        return math.nan
    return math.fsum((unit(a) * unit(b)).tolist())
