"""Make the pictures of docs/diagnosis.md: a healthy run on the left, and the same network with a fault on the right.

    python docs/images/diagnosis.py [--only KIND ...]

Two minutes on a CPU; writes beside this file.
"""
# ruff: noqa: D103

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
from matplotlib import pyplot as plt
from PIL import Image

import gyroscope
from gyroscope_lab.faults.benchmark import Case, evaluate

HERE = Path(__file__).parent

#: For each kind: the network, its fault, the quantity that shows it, and whether its axis is logarithmic.
PICTURES = {
    "not_in_optimizer": ("mlp-4", "absent", "rotation", False),
    "frozen": ("cnn", "frozen", "rotation", False),
    "gradients_accumulate": ("cnn", "no zero_grad", "gradient_norm", True),
    "large_weights": ("cnn", "weights x 100", "rate_per_step", True),
    "zero_weights": ("cnn", "weights = 0", "rotation", False),
    "symmetric": ("mlp-4", "weights constant", "gradient_norm", True),
    "eval_mode": ("cnn", "normalization in eval mode", "gradient_norm", True),
    "repeated_batch": ("mlp-4", "one batch repeated", "rate_per_step", True),
    "input_scale": ("mlp-4", "inputs x 255", "weight_norm", True),
    "jump": ("cnn", "bit flip", "weight_norm", True),
    "decay_dominates": ("cnn", "coupled decay x 100", "weight_norm", True),
    "schedule_collapsed": ("mlp-4", "scheduler per batch", "lr", True),
    "too_fast": ("cnn", "lr x 300", "update_ratio", True),
    "not_finite": ("mlp-4", "NaN gradient", "weight_norm", False),
    "dead_units": ("mlp-4", "bias = -20", "gradient_norm", True),
    "no_gradient": ("mlp-4", "detached", "rotation", False),
    "saturating": ("mlp-4", "sigmoids", "gradient_norm", True),
    "large_branch": ("transformer", "branch x 10", "gradient_norm", True),
    "slow_layer": ("mlp-4", "lr of k x 1e-3", "rate_per_step", True),
    "too_slow": ("mlp-4", "lr x 1e-4", "rate_per_step", True),
    "double_softmax": ("cnn", "softmax before the loss", "loss", False),
    "at_chance": ("mlp-4", "labels shuffled", "loss", False),
}


def draw(kind: str, runs: Path) -> None:
    network, fault, quantity, is_log = PICTURES[kind]
    figure, axes = plt.subplots(1, 2, figsize=(6.4, 2.1), sharey=True, layout="constrained")
    for ax, case in zip(axes, (Case(network, 0, variant="as it is"), Case(network, 0, fault=fault)), strict=True):
        folder = runs / f"{network}-{(case.fault or 'healthy').replace(' ', '-').replace('/', '-')}"
        if not folder.exists():
            evaluate(case, folder)
        with gyroscope.load(folder) as run:
            if quantity == "loss":
                ax.plot(run.scalars["loss"].steps, run.scalars["loss"].values, color="black", linewidth=0.8)
            else:
                values = run.series(quantity).astype(float)
                for i in range(values.shape[1]):
                    color = plt.get_cmap("viridis")(i / max(1, values.shape[1] - 1))
                    shown = np.where(values[:, i] > 0, values[:, i], np.nan) if is_log else values[:, i]
                    known = np.isfinite(shown)
                    ax.plot(run.steps[known], shown[known], color=color, linewidth=0.9)
        ax.set_title(f"{network}: {case.fault or 'healthy'}", fontsize=8)
        ax.set_xlabel("step", fontsize=7)
        ax.tick_params(labelsize=7)
        if is_log:
            ax.set_yscale("log")
    axes[0].set_ylabel(quantity, fontsize=7)
    path = HERE / f"diagnosis_{kind}.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    Image.open(path).convert("RGB").quantize(48).save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="*", choices=list(PICTURES), help="only these kinds")
    wanted = parser.parse_args().only
    with tempfile.TemporaryDirectory() as folder:
        for kind in wanted or PICTURES:
            draw(kind, Path(folder))
            print(kind)


if __name__ == "__main__":
    main()
