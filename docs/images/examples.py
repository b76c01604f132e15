"""Make the pictures of docs/figures.md: train small networks on 200 digits under `watch`, and draw their runs.

    python docs/images/examples.py [--runs FOLDER]

A few minutes on a CPU; writes beside this file. Runs that are in FOLDER already are not trained again.
"""
# ruff: noqa: D102, D103

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import MultiStepLR

import gyroscope
from gyroscope import Layca, figures
from gyroscope.lab import data, models
from gyroscope.lab.training import accuracy

HERE = Path(__file__).parent
EPOCHS = 60


def layca(rate: float, alpha: float = 0.0) -> Callable[[nn.Module], Optimizer]:
    return lambda model: Layca(SGD(model.parameters(), lr=rate), model, alpha=alpha)


def sgd(rate: float, decay: float = 0.0) -> Callable[[nn.Module], Optimizer]:
    return lambda model: SGD(model.parameters(), lr=rate, weight_decay=decay)


def adam(model: nn.Module) -> Optimizer:
    return Adam(model.parameters(), lr=1e-3)


class Block(nn.Module):
    """Two convolutions around which the input is passed on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


def cnn() -> nn.Module:
    return models.make("digits-cnn", seed=0)


def residual(blocks: int = 32, width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    ends = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]
    return nn.Sequential(nn.Conv2d(1, width, 3, padding=1), *(Block(width) for _ in range(blocks)), *ends)


def perceptron(bias: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    sizes = [(64, 128), (128, 128), (128, 128), (128, 128)]
    layers = [part for n, m in sizes for part in (nn.Linear(n, m), nn.ReLU())]
    model = nn.Sequential(nn.Flatten(), *layers, nn.Linear(128, 10))
    for module in model:
        if isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight)
            nn.init.constant_(module.bias, bias)
    return model


RUNS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Optimizer]]] = {
    **{f"Layca 3^{power}": (cnn, layca(3.0**power)) for power in (-5, -4, -3, -2.5, -2, -1.5, -1)},
    "Layca, first layers first": (cnn, layca(3.0**-3, -0.6)),
    "Layca, last layers first": (cnn, layca(3.0**-3, 0.6)),
    "SGD": (cnn, sgd(3.0**-1)),
    "SGD, large rate": (cnn, sgd(3.0)),
    "SGD, small rate": (cnn, sgd(3.0**-5)),
    "SGD + weight decay": (cnn, sgd(3.0**-1, 5e-3)),
    "Adam": (cnn, adam),
    "residual": (residual, sgd(0.1, 5e-4)),
    "healthy": (perceptron, sgd(0.1)),
    "dying": (lambda: perceptron(-2.0), sgd(0.1)),
}


def train(folder: Path, model: nn.Module, make: Callable[[nn.Module], Optimizer], epochs: int = EPOCHS) -> None:
    split, optimizer = data.digits(), make(model)
    generator = torch.Generator().manual_seed(0)
    scheduler = MultiStepLR(optimizer, [round(0.8 * epochs), round(0.9 * epochs)], gamma=0.2)
    with gyroscope.watch(model, optimizer, folder, budget=None, neurons=True, detail_every=10) as monitor:
        for _ in range(epochs):
            model.train()
            for chosen in torch.split(torch.randperm(200, generator=generator), 40):
                loss = F.cross_entropy(model(split.x_train[chosen]), split.y_train[chosen])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                monitor.log(loss=loss)
            scheduler.step()
            monitor.log(test_accuracy=accuracy(model, split.x_test, split.y_test))


def pair(draw: Callable[..., object], left: gyroscope.Run, right: gyroscope.Run, titles: tuple[str, str]) -> Figure:
    """Two runs side by side, with one key."""
    figure = Figure(figsize=(9, 3), layout="constrained")
    for ax, run, title in zip(figure.subplots(1, 2), (left, right), titles, strict=True):
        draw(run, ax=ax, title=title, legend=run is right)
    figure.axes[1].set_ylabel("")
    return figure


def draw(runs: dict[str, gyroscope.Run]) -> dict[str, object]:
    cnns = [run for name, run in runs.items() if RUNS[name][0] is cnn]
    good, bad = ("Layca 3^-2", "layers rotate far"), ("SGD", "layers stay near their start")
    return {
        "rotation_curves": pair(figures.rotation_curves, runs[good[0]], runs[bad[0]], (good[1], bad[1])),
        "rotation_heatmap": figures.rotation_heatmap(runs["residual"]),
        "gradient_heatmap": figures.rotation_heatmap(runs["residual"], quantity="gradient_norm"),
        "rates": figures.rates(runs["SGD + weight decay"]),
        "norms": pair(
            lambda run, **on: figures.norms(run, relative=True, **on),
            runs["SGD"],
            runs["SGD + weight decay"],
            ("SGD", "SGD with weight decay"),
        ),
        "effective_rates": figures.effective_rates(runs["SGD, large rate"]),
        "moment_percentiles": figures.moment_percentiles(runs["Adam"]),
        "neurons": pair(figures.neurons, runs["healthy"], runs["dying"], ("biases start at 0", "biases start at −2")),
        "neurons_rotation": figures.neurons(runs["Layca 3^-2"], "rotation"),
        "compare": figures.compare(cnns),
        "dashboard": figures.dashboard(runs["Layca 3^-2"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/figures"), help="where runs are kept")
    parser.add_argument("--dpi", type=int, default=90)
    settings = parser.parse_args()
    runs = {}
    for name, (model, make) in RUNS.items():
        folder = settings.runs / name
        if not folder.exists():
            print(name, flush=True)
            train(folder, model(), make)
        runs[name] = gyroscope.load(folder)
    for name, figure in draw(runs).items():
        [path] = figures.save(figure, HERE / f"figure_{name}.png", dpi=settings.dpi)
        Image.open(path).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
        print(path, f"{path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
