"""Runs to explain: networks that are really trained and watched, and random walks written as runs."""

import numpy as np
import torch
from torch import nn

import gyroscope
from gyroscope.monitor import known
from gyroscope.store import LayerInfo, Rows, Writer

DIM, CLASSES = 10, 4


def clusters(count=256):
    draw = torch.Generator().manual_seed(0)
    centres = torch.randn(CLASSES, DIM, generator=draw)
    y = torch.randint(0, CLASSES, (count,), generator=draw)
    return centres[y] + 2.0 * torch.randn(count, DIM, generator=draw), y


def normalized():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(DIM, 12, bias=False), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, CLASSES))


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(DIM, 12), nn.ReLU(), nn.Linear(12, CLASSES))


def train(folder, net, make, steps, *, batch=16, seed=1, **watched):
    """Train `net` with the optimizer that `make(net)` gives, watched; returns the run's folder."""
    x, y = clusters()
    optimizer, draw = make(net), torch.Generator().manual_seed(seed)
    with gyroscope.watch(net, optimizer, folder, budget=None, activations=False, **watched):
        for _ in range(steps):
            pick = torch.randint(0, len(x), (batch,), generator=draw)
            loss = nn.functional.cross_entropy(net(x[pick]), y[pick])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return folder


def walk(steps, *, lr=0.1, decay=0.0, start=1.0, size=64, gradient=1.0, cosine=0.0, seed=0):
    """The series of w ← (1 − αλ)w − αg/‖w‖ with g of a random direction across w, literally, in float64.

    `lr` and `decay` are one number or one a step.
    """
    draw = np.random.default_rng(seed)
    rates, decays = (np.broadcast_to(np.asarray(one, dtype=float), (steps,)) for one in (lr, decay))
    w = draw.standard_normal(size)
    w *= start / np.linalg.norm(w)
    rows = {name: [] for name in ("weight_norm", "gradient_norm", "rate", "update_ratio")}
    for a, d in zip(rates, decays, strict=True):
        g = draw.standard_normal(size)
        g -= g @ w / (w @ w) * w
        g *= gradient / (np.linalg.norm(g) * np.linalg.norm(w))
        new = (1 - a * d) * w - a * g
        rows["weight_norm"].append(np.linalg.norm(new))
        rows["gradient_norm"].append(np.linalg.norm(g))
        rows["rate"].append(np.arccos(w @ new / (np.linalg.norm(w) * np.linalg.norm(new))))
        rows["update_ratio"].append(np.linalg.norm(new - w) / np.linalg.norm(w))
        w = new
    series = {name: np.array(values) for name, values in rows.items()}
    noise = draw.standard_normal(steps) / np.sqrt(size)
    return series | {"lr": rates, "weight_decay": decays, "invariance": cosine * noise, "effective_lr": rates}


def written(folder, series, *, optimizer=None, shape=(8, 8), name="w", steps=None, step=0):
    """A run of one layer with these series, at steps 1, 2, …; an existing run is resumed at `step`."""
    infos = {quantity: info for quantity, info in known().items() if quantity in series}
    at = np.arange(1, len(next(iter(series.values()))) + 1) if steps is None else np.asarray(steps)
    meta = {"optimizers": [{"class": "SGD"} if optimizer is None else optimizer]}
    with Writer(folder, [LayerInfo(name, "linear", shape)], infos, meta=meta, step=step) as writer:
        writer.put(Rows(0, at, {key: np.asarray(v, dtype=np.float32)[:, None] for key, v in series.items()}))
    return folder
