"""Make the pictures of the gallery: train small networks under `watch`, check what the captions say, and draw.

    python docs/gallery/make.py                          # all twelve, under a minute on one CPU core
    python docs/gallery/make.py frozen not_finite        # some of them
    python docs/gallery/make.py frozen --out FOLDER      # somewhere else

Networks, data and faults are those of the diagnosis benchmark. Every step is measured (`budget=None`) and every seed is
fixed, so the pictures are the same each time. A picture whose caption no longer holds is not written: an assertion
fails.
"""
# ruff: noqa: D102, D103

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import gyroscope
from gyroscope import Layca, Run, figures
from gyroscope.figures import drawing
from gyroscope_lab.faults.benchmark import Case, prepared
from gyroscope_lab.faults.injections import Scene, scene, train
from gyroscope_lab.faults.networks import NETWORKS

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "images"))
import examples  # noqa: E402

#: Draws a picture from runs that it keeps in a folder, and returns it with the run that it shows, if there is one.
Draw = Callable[[Path], tuple[Figure, Run | None]]


@dataclass(frozen=True)
class Picture:
    """A picture, and the kind of the first finding about its run; None for a run without alarms."""

    draw: Draw
    finds: str | None


PICTURES: dict[str, Picture] = {}


def picture(finds: str | None = None) -> Callable[[Draw], Draw]:
    def register(draw: Draw) -> Draw:
        PICTURES[draw.__name__] = Picture(draw, finds)
        return draw

    return register


# Training


def recorded(folder: Path, it: Scene, **options: Any) -> Run:
    """Train a scene of the benchmark, every step measured, and return its run; pictures share runs by their folder."""
    if not folder.exists():
        made = it.build(it.model)
        it.optimizers = made if isinstance(made, list) else [made]
        for act in it.after_build:
            act()
        torch.manual_seed(it.seed)
        with gyroscope.watch(it.model, it.optimizers, folder, budget=None, **options) as monitor:
            train(it, each=lambda step, value: monitor.log(loss=value))
    return gyroscope.load(folder)


def healthy(network: str) -> Scene:
    return scene(NETWORKS[network], seed=0)


def faulty(network: str, fault: str) -> Scene:
    return prepared(Case(network, 0, fault=fault))[0]


def optimized(it: Scene, build: Callable[[Iterable[nn.Parameter]], Optimizer]) -> Scene:
    it.build = lambda model: build(model.parameters())
    return it


def momentum(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.05, momentum=0.9)


# Drawing


def panels(count: int, *, height: float = 2.9) -> Figure:
    figure = Figure(figsize=(8.6, height), layout="constrained")
    figure.subplots(1, count)
    return figure


def courses(
    figure: Figure,
    draw: Callable[..., Axes],
    runs: dict[str, Run],
    *,
    limits: tuple[float, float],
    key: bool = True,
    **on: Any,
) -> None:
    """Draw runs by title in the first panels of a figure, on one scale, with one key."""
    axes, final = [], list(runs)[-1]
    for ax, (title, run) in zip(figure.axes, runs.items(), strict=False):
        axes.append(draw(run, ax=ax, title=title, legend=key and title == final, **on))
    for ax in axes:
        if draw is figures.rates:
            ax.set_yscale("log")
            drawing.log_ticks(ax.yaxis, *limits)
        ax.set(ylim=limits, xlabel="step", ylabel=ax.get_ylabel() if ax is axes[0] else "")


def losses(ax: Axes, runs: dict[str, Run]) -> None:
    for (label, run), color in zip(runs.items(), ("#1f4e79", "#c0392b"), strict=False):
        ax.plot(run.scalars["loss"].steps, run.scalars["loss"].values, color=color, linewidth=1, label=label)
    ax.set_yscale("log")
    drawing.finish(ax, ylabel="loss", title="training loss")
    if len(runs) > 1:
        low, high = ax.get_ylim()
        ax.set_ylim(low, high * (high / low) ** 0.3)  # space for the key
        ax.legend(fontsize=8, frameon=False, loc="upper right")


def checked(name: str, runs: Path) -> Figure:
    """Return a picture, with what the diagnosis says about its run below it."""
    figure, run = PICTURES[name].draw(runs)
    if run is not None:
        found, kind = gyroscope.diagnose(run), PICTURES[name].finds
        if kind is None:
            assert not found.alarms, f"{name} has alarms: {found}"
        else:
            assert [one.kind for one in found][:1] == [kind], f"{kind} is not the first finding of {name}: {found}"
            text = f"gyroscope diagnose: {found[0].severity}. {found[0].sentence}"
            figure.supxlabel("\n".join(textwrap.wrap(text, 120)), fontsize=9, color="#8c1d18")
    return figure


# Good runs


@picture()
def healthy_run(runs: Path) -> tuple[Figure, Run | None]:
    it = optimized(healthy("cnn"), momentum)
    it.rate = lambda step: 0.5 + 0.5 * math.cos(math.pi * step / it.network.steps)
    run = recorded(runs / "healthy", it)
    rotation, loss = run.series("rotation"), run.scalars["loss"].values
    assert (rotation[-1] > 0.05).all(), "every layer has turned"
    assert (rotation[150] > 0.95 * rotation[-1]).all(), "and has come to rest half-way"
    assert np.mean(loss[-20:]) < 0.01 * loss[0]
    figure = panels(2)
    losses(figure.axes[0], {"": run})
    figures.rotation_curves(run, ax=figure.axes[1], title="rotation of each layer", legend=True)
    return figure, run


@picture()
def layca(runs: Path) -> tuple[Figure, Run | None]:
    it = healthy("cnn")
    it.build = lambda model: Layca(SGD(model.parameters(), lr=3**-3), model, others_lr=0.1)
    shown = {
        "SGD with momentum, η = 0.05": recorded(runs / "SGD", optimized(healthy("cnn"), momentum)),
        "Layca over SGD, ρ = 3⁻³": recorded(runs / "Layca", it),
    }
    plain, steered = (run.series("rate_per_step")[1:] for run in shown.values())
    assert np.allclose(steered, math.atan(3**-3), rtol=1e-3), "Layca turns every layer by arctan ρ at every step"
    assert plain.max() > 100 * plain.min(), "SGD's rates differ by more than 100"
    figure = panels(2)
    courses(figure, figures.rates, shown, limits=(1e-4, 0.1))
    return figure, list(shown.values())[1]


@picture("equilibrium")
def equilibrium(runs: Path) -> tuple[Figure, Run | None]:
    rate, decay = 0.1, 0.05
    it = healthy("cnn")
    it.network = replace(it.network, steps=800)
    noise = torch.Generator().manual_seed(0)

    def build(model: Any) -> Optimizer:
        head = {"params": list(model[-1].parameters()), "weight_decay": 0.0}
        return SGD([{"params": list(model[:-1].parameters())}, head], lr=rate, weight_decay=decay)

    def relabeled(y: torch.Tensor) -> torch.Tensor:
        """Random labels for three in ten: the network cannot fit them, so gradients stay as large as they are."""
        chosen = torch.rand(len(y), generator=noise) < 0.3
        return torch.where(chosen, torch.randint(10, y.shape, generator=noise), y)

    it.build, it.batches = build, ((x, relabeled(y)) for x, y in it.network.batches(0))
    run = recorded(runs / "equilibrium", it)
    rates, predicted = run.series("rate_per_step")[1:, :-1].astype(float), math.sqrt(2 * rate * decay)
    settled = np.sqrt(np.mean(rates[-300:] ** 2, axis=0))
    assert np.allclose(settled, predicted, rtol=0.08), settled
    figure, normalized, colors = panels(2, height=3.1), run.layers[:-1], np.linspace(0, 1, len(run.layers))[:-1]
    ax = figure.axes[0]
    drawing.draw_lines(ax, run.steps[1:], drawing.moving_mean(rates, 15), depth=colors)
    ax.axhline(predicted, color="black", linestyle="--", linewidth=1)
    ax.text(10, 1.12 * predicted, "√(2ηλ) = 0.1, predicted", fontsize=9)
    ax.set(xlim=(0, run.steps[-1]), ylim=(0, 0.15))
    drawing.finish(ax, ylabel="rad per step", title="rotation rate")
    figures.norms(run, ax=figure.axes[1], layers=normalized, title="norm of the weights", legend=True)
    figure.axes[1].set_xlabel("step")
    return figure, run


@picture()
def warm_up(runs: Path) -> tuple[Figure, Run | None]:
    shown = {}
    for label, steps in (("60 steps of warm-up", 60), ("no warm-up", 0)):
        it = optimized(healthy("vit"), lambda p: AdamW(p, lr=0.01))
        it.rate = lambda step, steps=steps: min(1.0, (step + 1) / steps) if steps else 1.0  # type: ignore[misc]
        shown[label] = recorded(runs / label, it)
    with_it, without = (float(np.nanmax(run.series("rate_per_step")[:20])) for run in shown.values())
    ends = [np.mean(run.scalars["loss"].values[-30:]) for run in shown.values()]
    assert without > 10 * with_it, (without, with_it)
    assert ends[1] > 2 * ends[0], ends
    figure = panels(3)
    courses(figure, figures.rates, shown, limits=(6e-4, 0.3), key=False)
    losses(figure.axes[2], shown)
    return figure, shown["60 steps of warm-up"]


class Adapted(nn.Module):
    """A linear layer and low-rank factors next to it, W + sBA, with the names that peft uses."""

    def __init__(self, base_layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base_layer, self.scaling, self.active_adapters = base_layer.requires_grad_(False), {"a": 2.0}, ["a"]
        self.lora_A = nn.ModuleDict({"a": nn.Linear(base_layer.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"a": nn.Linear(rank, base_layer.out_features, bias=False)})
        nn.init.zeros_(self.lora_B["a"].weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.scaling["a"] * self.lora_B["a"](self.lora_A["a"](x))


@picture()
def fine_tuning(runs: Path) -> tuple[Figure, Run | None]:
    """Train on digits; then continue on the same digits with their rows and columns exchanged."""

    def scene_of(weights: dict[str, torch.Tensor] | None) -> Scene:
        it = healthy("mlp-4")
        if weights is not None:
            it.model.load_state_dict(weights)
            it.batches = ((x.transpose(2, 3), y) for x, y in it.network.batches(1))
        return it

    def right(it: Scene) -> float:
        x, y = it.network.tested()
        with torch.no_grad():
            return float((it.model(x.transpose(2, 3)).argmax(1) == y).double().mean())

    first = scene_of(None)
    scratch = recorded(runs / "pretraining", first)
    weights = first.model.state_dict()
    before = right(first)
    whole = optimized(scene_of(weights), lambda p: SGD(p, lr=0.005, momentum=0.9))
    tuned = recorded(runs / "tuned", whole)
    low = scene_of(weights)
    torch.manual_seed(0)
    for i, module in enumerate(low.model):
        if isinstance(module, nn.Linear):
            low.model[i] = Adapted(module)
    low.build = lambda model: AdamW([p for p in model.parameters() if p.requires_grad], lr=0.002)
    adapted = recorded(runs / "LoRA", low, detail_every=10)
    assert before < 0.2 < 0.9 < min(right(whole), right(low))
    merged = adapted.series("merged_rotation")
    turned = [np.nanmax(values[np.isfinite(values).any(1)][-1]) for values in (tuned.series("rotation"), merged)]
    assert max(turned) < scratch.series("rotation")[-1].min(), turned
    figure = panels(3, height=3.1)
    curves = [
        ("from scratch", scratch, "rotation"),
        ("all weights fine-tuned", tuned, "rotation"),
        ("LoRA: W + sBA from W", adapted, "merged_rotation"),
    ]
    for ax, (title, run, quantity) in zip(figure.axes, curves, strict=True):
        layers = "*base_layer*" if run is adapted else None
        figures.curves(run, quantity, ax=ax, title=title, layers=layers)
        ax.set(yscale="log", ylim=(1e-4, 1))
    return figure, adapted


@picture()
def transformer(runs: Path) -> tuple[Figure, Run | None]:
    run = recorded(runs / "transformer", healthy("transformer"))
    rotation = dict(zip(run.layers, run.series("rotation")[-1], strict=True))
    for kind in ("qkv", "out", "up", "down"):
        alike = [value for name, value in rotation.items() if f".{kind}." in name]
        assert max(alike) < 1.5 * min(alike), f"layers of a kind turn alike: {alike}"
    assert max(rotation, key=rotation.__getitem__) == "embedding.weight"
    kinds = {
        "embedding": "0.55", "down": "#e67e22", "up": "#c0392b", "qkv": "#1f4e79", "out": "#5dade2", "head": "black",
    }  # fmt: skip
    figure = panels(2)
    for ax, quantity in zip(figure.axes, ("rotation", "rate_per_step"), strict=True):
        for name, values in zip(run.layers, run.series(quantity).T, strict=True):
            color = next(color for kind, color in kinds.items() if kind in name.split("."))
            ax.plot(
                run.steps[1:], drawing.moving_mean(values[1:, None].astype(float), 7)[:, 0], color=color, linewidth=1.1
            )
    drawing.finish(figure.axes[0], ylabel="rotation (cosine distance)", title="14 layers, by kind")
    drawing.finish(figure.axes[1], ylabel="net rotation (rad per step)", title="their rates")
    handles = [Line2D([], [], color=color, linewidth=2) for color in kinds.values()]
    figure.legend(handles, list(kinds), loc="outside right center", frameon=False, fontsize=8)
    return figure, run


@picture()
def conditioning(runs: Path) -> tuple[Figure, Run | None]:
    found = {
        "plain": examples.conditioning(examples.deep(normal=False)),
        "batch normalization": examples.conditioning(examples.deep(normal=True)),
    }
    first, final = ({name: one.entries[at].lambda_g for name, one in found.items()} for at in (0, -1))
    assert first["plain"] < 1e-12 * final["plain"], "gradients vanish on their way to the first layer"
    assert 1 < first["batch normalization"] / final["batch normalization"] < 1e4
    return figures.conditioning_by_layer(found, p=0.5), None


# Bad runs


@picture("large_weights")
def slow_layer(runs: Path) -> tuple[Figure, Run | None]:
    shown = {
        "as it should be": recorded(runs / "SGD", optimized(healthy("cnn"), momentum)),
        "one layer began with weights × 100": recorded(
            runs / "slow", optimized(faulty("cnn", "weights x 100"), momentum)
        ),
    }
    rates = np.median(shown["one layer began with weights × 100"].series("rate_per_step")[1:], axis=0)
    assert rates[2] < 1e-3 * np.median(rates), rates
    ends = [np.mean(run.scalars["loss"].values[-30:]) for run in shown.values()]
    assert np.allclose(ends, [0.004, 0.006], atol=0.0015), ends
    figure = panels(2, height=3.1)
    courses(figure, figures.rates, shown, limits=(1e-7, 0.1))
    return figure, list(shown.values())[1]


@picture("too_fast")
def too_fast(runs: Path) -> tuple[Figure, Run | None]:
    shown = {
        "η = 0.002": recorded(runs / "cnn", healthy("cnn")),
        "η = 0.6": recorded(runs / "fast", faulty("cnn", "lr x 300")),
    }
    fast = list(shown.values())[1]
    assert (fast.series("rotation")[10] > 0.8).all(), "nothing is left of the initialization after ten steps"
    figure = panels(3, height=3.1)
    courses(figure, figures.rotation_curves, shown, limits=(0, 1.2), key=False)
    losses(figure.axes[2], shown)
    return figure, fast


@picture("dead_units")
def dead_units(runs: Path) -> tuple[Figure, Run | None]:
    shown = {}
    for title, bias in (("biases begin at 0", 0.0), ("biases begin at −2", -2.0)):
        it = healthy("mlp-4")
        it.model = examples.perceptron(bias)
        shown[title] = recorded(runs / title, it, detail_every=10)
    figure = panels(2, height=3.1)
    courses(figure, figures.neurons, shown, limits=(0, 1.02), layers=["1.*", "3.*", "5.*", "7.*"])
    return figure, list(shown.values())[1]


@picture("frozen")
def frozen(runs: Path) -> tuple[Figure, Run | None]:
    broken = recorded(runs / "frozen", faulty("cnn", "frozen"))
    shown = {"all layers train": recorded(runs / "cnn", healthy("cnn")), "layer 6 is frozen": broken}
    assert np.isnan(broken.series("rotation")[:, broken.layers.index("6.weight")]).all(), "it is not measured"
    figure = panels(2, height=3.1)
    courses(figure, figures.rotation_curves, shown, limits=(0, 1))
    figure.axes[1].text(290, 0.92, "layer 6 has no curve", ha="right", fontsize=9, color="#8c1d18")
    return figure, broken


@picture("not_finite")
def not_finite(runs: Path) -> tuple[Figure, Run | None]:
    run = recorded(runs / "NaN", faulty("mlp-4", "NaN gradient"))
    norms = run.series("weight_norm")
    [at] = (one.since for one in gyroscope.diagnose(run) if one.kind == "not_finite")
    assert np.isnan(norms[at]).sum() == 1, "one layer broke first"
    assert np.isnan(norms[at + 1]).all(), "the others at the next step"
    figure = panels(2, height=3.1)
    losses(figure.axes[0], {"": run})
    figure.axes[0].axvline(at, color="#8c1d18", linestyle=":", linewidth=1)
    ax, steps = figure.axes[1], range(at - 6, at + 7)
    for row, color in enumerate(drawing.depth_colors(len(run.layers))):
        known = [step for step in steps if np.isfinite(norms[step, row])]
        lost = [step for step in steps if step not in known]
        ax.plot(known, len(known) * [row], "s", color=color, markersize=9)
        ax.plot(lost, len(lost) * [row], "x", color="#8c1d18", markersize=7)
    ax.set_yticks(range(len(run.layers)), run.layers)
    ax.set_ylim(len(run.layers) - 0.4, -0.6)
    drawing.finish(ax, title="weights: finite (■) or not (×)")
    return figure, run


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="pictures to make, of: " + ", ".join(PICTURES))
    parser.add_argument("--out", type=Path, default=HERE, help="folder for the pictures")
    settings = parser.parse_args(given)
    if unknown := set(settings.names) - set(PICTURES):
        parser.error(f"unknown pictures: {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for name in settings.names or PICTURES:
            [path] = figures.save(checked(name, Path(folder)), settings.out / f"{name}.png", dpi=100)
            Image.open(path).convert("RGB").quantize(96, dither=Image.Dither.NONE).save(path, optimize=True)
            print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
