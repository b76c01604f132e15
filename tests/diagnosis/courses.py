"""A course in which nothing is wrong, to be spoiled by tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from gyroscope.diagnosis import Course
from gyroscope.store import LayerInfo

NAMES = ("stem.weight", "blocks.0.fc.weight", "blocks.1.fc.weight", "blocks.2.fc.weight", "head.weight")
SHAPES = ((16, 8), (16, 16), (16, 16), (16, 16), (10, 16))
STEPS = 300


def healthy(*, layers: int = 5, facts: dict[str, Any] | None = None, optimizer: dict[str, Any] | None = None) -> Course:
    """Sixty measured steps of 300: layers that turn by about 0.01 per step, noisily, under SGD with momentum."""
    random = np.random.default_rng(0)
    steps = np.unique(np.linspace(0, STEPS, 61).astype(np.int64))
    shape = (len(steps), layers)

    def noisy(middle: float, spread: float = 0.2) -> np.ndarray:
        return middle * np.exp(spread * random.standard_normal(shape))

    norm = np.sqrt([dims[0] for dims in SHAPES[:layers]]) * (1 + 0.3 * steps[:, None] / STEPS)
    series = {
        "rotation": 1 - np.cos(0.8 * np.sqrt(steps / STEPS))[:, None] * np.ones(layers),
        "rate_per_step": noisy(0.01),
        "weight_norm": norm,
        "weight_norm_before": norm.copy(),
        "gradient_norm": noisy(0.5, 0.3),
        "update_norm": noisy(0.01) * norm,
        "update_ratio": noisy(0.01),
        "alignment": np.clip(0.9 + 0.02 * random.standard_normal(shape), -1, 1),
        "lr": np.full(shape, 0.1),
        "weight_decay": np.full(shape, 5e-4),
    }
    still = {name for fact in ("frozen", "unheld") for name in (facts or {}).get(fact, ())}
    series["update_norm"][:, [name in still for name in NAMES[:layers]]] = 0.0
    for name in ("rate_per_step", "weight_norm_before", "gradient_norm", "update_norm", "update_ratio", "alignment"):
        series[name][0] = np.nan
    detailed = {"dying_channels": 0.2, "gradient_carried": 0.0, "norm_evaluates": 0.0}
    detailed |= {"input_mean": 0.1, "input_rms": 1.0, "input_low": -2.0, "input_high": 3.0, "moment_p50": 1e-4}
    for name, value in detailed.items():
        series[name] = np.full(shape, np.nan)
        series[name][[1, 20, 40]] = value * np.exp(0.1 * random.standard_normal((3, layers)))
    for name, values in {"softmax_twice": (0.0, 0.0, 0.0), "output_information": (0.001, 1.2, 1.9)}.items():
        series[name] = np.full(shape, np.nan)
        series[name][[1, 20, 40], -1] = values
    table = tuple(LayerInfo(name, "linear", dims) for name, dims in zip(NAMES[:layers], SHAPES, strict=False))
    losses = np.arange(1, STEPS + 1)
    loss = 2.3 * np.exp(-losses / 60) + 0.05 + 0.02 * random.random(STEPS)
    known = {"class": "SGD", "lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4} if optimizer is None else optimizer
    return Course(table, steps, series, losses, loss, {"optimizers": [known], "facts": facts or {}})
