"""Small networks that are trained and measured in plain torch, and handed over as a run would be."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

import gyroscope
from gyroscope.store.record import LayerInfo


def clusters(count: int, shape: tuple[int, ...], classes: int = 10, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, *shape, generator=draw)
    y = torch.randint(0, classes, (count,), generator=draw)
    return centres[y] + 2.0 * torch.randn(count, *shape, generator=draw), y


def made(series: dict[str, np.ndarray], optimizers: list[dict], layers: list[LayerInfo]) -> SimpleNamespace:
    """The part of a run that `predictions` reads."""
    return SimpleNamespace(
        layers=tuple(layer.name for layer in layers),
        layer_table=tuple(layers),
        steps=np.arange(len(next(iter(series.values())))),
        quantities=dict.fromkeys(series),
        series=lambda name: series[name].astype(np.float32),
        meta={"optimizers": optimizers},
    )


def train(
    model: nn.Module, make, steps: int, *, shape: tuple[int, ...], batch: int = 64, amp: bool = False, seed: int = 0
) -> SimpleNamespace:
    """Train and measure every step: norms, cosines and, as `rate`, the angle turned."""
    x, y = clusters(2048, shape)
    draw = torch.Generator().manual_seed(seed)
    layers = gyroscope.layers(model)
    optimizer = make(model.parameters())
    (group,) = optimizer.param_groups
    rows: dict[str, list] = {name: [] for name in ("weight_norm", "gradient_norm", "invariance", "rate")}
    for _ in range(steps):
        pick = torch.randint(0, len(x), (batch,), generator=draw)
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            out = model(x[pick])
        loss = nn.functional.cross_entropy(out.float(), y[pick])
        optimizer.zero_grad()
        loss.backward()
        w = [layer.parameter.detach().double().flatten() for layer in layers]
        g = [layer.parameter.grad.double().flatten() for layer in layers]
        optimizer.step()
        moved = [layer.parameter.detach().double().flatten() for layer in layers]
        rows["weight_norm"].append([a.norm().item() for a in w])
        rows["gradient_norm"].append([a.norm().item() for a in g])
        rows["invariance"].append([(a @ b / (a.norm() * b.norm())).item() for a, b in zip(w, g, strict=True)])
        rows["rate"].append([angle(a, b) for a, b in zip(w, moved, strict=True)])
    series = {name: np.array(values) for name, values in rows.items()}
    series["lr"] = np.full_like(series["rate"], group["lr"])
    series["weight_decay"] = np.full_like(series["rate"], group["weight_decay"])
    options = {name: value for name, value in group.items() if name != "params"}
    infos = [LayerInfo(layer.name, layer.kind, tuple(layer.parameter.shape)) for layer in layers]
    return made(series, [{"class": type(optimizer).__name__, **options}], infos)


def angle(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a / a.norm(), b / b.norm()
    return 2 * torch.atan2((a - b).norm(), (a + b).norm()).item()
