"""Weights that walk at random on no slope at all: gradients orthogonal to w, of norm g̃/‖w‖, in float64."""

from __future__ import annotations

import math

import numpy as np


def walk(
    steps: int,
    lr: float,
    decay: float = 0.0,
    *,
    size: int = 128,
    gradient: float = 1.0,
    start: float = 1.0,
    kind: str = "sgd",
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    beta2: float = 0.98,
    steady: bool = False,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """‖w‖ after 0, 1, ... steps of an optimizer, and the angle turned in each step.

    With `steady` gradients point the same way for 30 steps, but for what keeps them orthogonal.
    """
    draw = np.random.default_rng(seed)
    w = draw.standard_normal(size)
    w *= start / np.linalg.norm(w)
    v, s = np.zeros(size), np.zeros(size)
    norms, angles = [np.linalg.norm(w)], []
    way = draw.standard_normal(size)
    for k in range(steps):
        if not steady or k % 30 == 0:
            way = draw.standard_normal(size)
        g = way - w * (way @ w) / (w @ w)
        g *= gradient / np.linalg.norm(g) / np.linalg.norm(w)
        before = w
        if kind == "sgd":
            g = g + decay * w
            v = momentum * v + (1 - dampening) * g if k else g
            w = w - lr * (g + momentum * v if nesterov else v)
        else:
            v, s = momentum * v + (1 - momentum) * g, beta2 * s + (1 - beta2) * g * g
            unbiased = v / (1 - momentum ** (k + 1)), s / (1 - beta2 ** (k + 1))
            w = (1 - lr * decay) * w - lr * unbiased[0] / np.sqrt(unbiased[1])
        norms.append(np.linalg.norm(w))
        angles.append(math.acos(min(1.0, w @ before / (norms[-1] * norms[-2]))))
    return np.array(norms), np.array(angles)


def slide(steps: int, lr: float, decay: float = 0.0, *, size: int = 64, start: float = 1.0) -> np.ndarray:
    """‖w‖ under SGD on the scale-invariant loss −⟨a, w⟩/‖w‖, with a new direction a at every step."""
    draw = np.random.default_rng(1)
    w = draw.standard_normal(size)
    w *= start / np.linalg.norm(w)
    norms = [np.linalg.norm(w)]
    for _ in range(steps):
        a = draw.standard_normal(size)
        a /= np.linalg.norm(a)
        norm = np.linalg.norm(w)
        gradient = -a / norm + (a @ w) * w / norm**3
        w = w - lr * (gradient + decay * w)
        norms.append(np.linalg.norm(w))
    return np.array(norms)
