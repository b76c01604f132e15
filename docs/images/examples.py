"""Make the pictures of docs/figures.md: train small networks on 200 digits under `watch`, and draw their runs.

    python docs/images/examples.py [--runs FOLDER] [--only NAME ...]

A few minutes on a CPU; writes beside this file. Runs that are in FOLDER already are not trained again.
"""
# ruff: noqa: D102, D103

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import MultiStepLR

import gyroscope
from gyroscope import Layca, figures
from gyroscope_lab import data, models

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


def deep(*, normal: bool, layers: int = 20, width: int = 64) -> nn.Module:
    """A perceptron as torch initializes it, with or without batch normalization."""
    torch.manual_seed(0)
    parts: list[nn.Module] = [nn.Flatten()]
    for _ in range(layers - 1):
        parts += [nn.Linear(64 if len(parts) == 1 else width, width), *([nn.BatchNorm1d(width)] * normal), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(width, 10))


def conditioning(model: nn.Module, *, spectra: bool = False) -> gyroscope.conditioning.Conditioning:
    split = data.digits()
    return gyroscope.condition(model, F.cross_entropy, (split.x_train, split.y_train), spectra=spectra)


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
    "normalized": (lambda: deep(normal=True, layers=8), sgd(0.1)),
}


def train(folder: Path, model: nn.Module, make: Callable[[nn.Module], Optimizer], epochs: int = EPOCHS) -> None:
    split, optimizer = data.digits(), make(model)
    generator = torch.Generator().manual_seed(0)
    scheduler = MultiStepLR(optimizer, [round(0.8 * epochs), round(0.9 * epochs)], gamma=0.2)
    watching = gyroscope.watch(model, optimizer, folder, budget=None, neurons=True, detail_every=10, conditioning=5)
    with watching as monitor:
        for _ in range(epochs):
            model.train()
            for chosen in torch.split(torch.randperm(200, generator=generator), 40):
                loss = F.cross_entropy(model(split.x_train[chosen]), split.y_train[chosen])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                monitor.log(loss=loss)
            scheduler.step()
            model.eval()
            with torch.no_grad():
                guesses = model(split.x_test).argmax(1)
            monitor.log(test_accuracy=(guesses == split.y_test).double().mean())


def pair(draw: Callable[..., object], left: gyroscope.Run, right: gyroscope.Run, titles: tuple[str, str]) -> Figure:
    """Two runs side by side, with one key."""
    figure = Figure(figsize=(9, 3), layout="constrained")
    for ax, run, title in zip(figure.subplots(1, 2), (left, right), titles, strict=True):
        draw(run, ax=ax, title=title, legend=run is right)
    figure.axes[1].set_ylabel("")
    return figure


class Runs(dict[str, gyroscope.Run]):
    """Runs by name, trained when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __missing__(self, name: str) -> gyroscope.Run:
        folder = self.folder / name
        if not folder.exists():
            print(name, flush=True)
            model, make = RUNS[name]
            train(folder, model(), make)
        self[name] = gyroscope.load(folder)
        return self[name]


def draw(runs: Runs) -> dict[str, Callable[[], Figure | Axes]]:
    good, bad = ("Layca 3^-2", "layers rotate far"), ("SGD", "layers stay near their start")
    return {
        "rotation_curves": lambda: pair(figures.rotation_curves, runs[good[0]], runs[bad[0]], (good[1], bad[1])),
        "rotation_heatmap": lambda: figures.rotation_heatmap(runs["residual"]),
        "gradient_heatmap": lambda: figures.rotation_heatmap(runs["residual"], quantity="gradient_norm"),
        "rates": lambda: figures.rates(runs["SGD + weight decay"]),
        "norms": lambda: pair(
            lambda run, **on: figures.norms(run, relative=True, **on),
            runs["SGD"],
            runs["SGD + weight decay"],
            ("SGD", "SGD with weight decay"),
        ),
        "effective_rates": lambda: figures.effective_rates(runs["SGD, large rate"]),
        "moment_percentiles": lambda: figures.moment_percentiles(runs["Adam"]),
        "neurons": lambda: pair(
            figures.neurons, runs["healthy"], runs["dying"], ("biases start at 0", "biases start at −2")
        ),
        "neurons_rotation": lambda: figures.neurons(runs["Layca 3^-2"], "rotation"),
        "compare": lambda: figures.compare([runs[name] for name, (model, _) in RUNS.items() if model is cnn]),
        "dashboard": lambda: figures.dashboard(runs["Layca 3^-2"]),
        "conditioning_by_layer": lambda: figures.conditioning_by_layer(
            {"plain": conditioning(deep(normal=False)), "batch normalization": conditioning(deep(normal=True))}
        ),
        "spectra": lambda: figures.spectra(conditioning(deep(normal=False, layers=8), spectra=True)),
        "conditioning_over_time": lambda: figures.conditioning_over_time(runs["normalized"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/figures"), help="where runs are kept")
    parser.add_argument("--dpi", type=int, default=90)
    parser.add_argument("--only", nargs="*", help="the figures to make; all if not given")
    settings = parser.parse_args()
    for name, make in draw(Runs(settings.runs)).items():
        if settings.only is None or name in settings.only:
            [path] = figures.save(make(), HERE / f"figure_{name}.png", dpi=settings.dpi)
            Image.open(path).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
            print(path, f"{path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
