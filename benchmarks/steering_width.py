"""How the best `others_lr` of `gyroscope.steer` depends on the width of a character GPT.

    python benchmarks/steering_width.py --data DATA
    python benchmarks/steering_width.py --data DATA --device cuda

DATA has tinyshakespeare. On two cores of a CPU, ten minutes: 2 blocks, 300 steps of 16 × 32 characters, the best test
loss by width and `others_lr`. On a GPU, a minute: the network of 4 blocks and width 512 of the study beyond/transfer,
600 steps of 32 × 256 characters in bf16, with other options too. Seed 0, ρ = 0.028.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.engine.population import run_population
from gyroscope_lab.papers.beyond.problems import GPT, steered
from gyroscope_lab.papers.beyond.transfer import sized
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.training import train
from gyroscope_lab.training.trial import Trial
from timing import environment, write

WIDTHS = {64: (0.03, 0.01, 0.003), 128: (0.03, 0.01, 0.003), 256: (0.01, 0.003, 0.001), 512: (0.01, 0.003, 0.001, 3e-4)}
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("adamw", {"norms": "held"}),
    ("adamw", {"others_lr": 3e-3, "norms": "held"}),
    ("adamw", {"others_lr": 1e-3}),
    ("adamw", {"others_lr": 3e-3}),
    ("adamw", {"heads": "turn", "embeddings": "turn"}),
    ("muon", {}),
    ("muon", {"others_lr": 3e-3}),
]


def by_width(given: tuple[int, float, Path]) -> dict[str, Any]:
    """Train one width at one rate on a core."""
    width, rate, data = given
    torch.set_num_threads(1)
    options = dict(GPT.small.options) | {"width": width}
    schedule = replace(GPT.small.schedule, epochs=3, drawn=100)
    task = replace(GPT.small, name=f"gpt-{width}", options=tuple(options.items()), schedule=schedule)
    result = train(Trial(task, steered("adamw", others_lr=rate)), task.source.load(data))
    print(f"width {width}, others_lr {rate:g}: {result.best_test_loss:.3f}", flush=True)
    return {"width": width, "others_lr": rate, "best_test_loss": result.best_test_loss}


def wide(data: Path) -> list[dict[str, Any]]:
    """Train the wide network with each of the options, side by side."""
    with tempfile.TemporaryDirectory() as folder:
        archive = Archive(folder)
        task = sized(Lab(archive, "full"))["width 512"]
        trials = [Trial(task, steered(inner, rate=0.028, **more), precision="bf16") for inner, more in OPTIONS]
        split = task.source.load(data)
        run_population(trials, lambda _: split, archive, at_once=len(trials))
        rows = []
        for trial in trials:
            result = archive.result(trial)
            assert result is not None
            print(f"{trial.recipe.name:50} {result.best_test_loss:.3f}")
            row = {"task": task.name, "recipe": trial.recipe.name, "seed": trial.seed}
            row |= {"best_test_loss": result.best_test_loss, "test_losses": result.test_losses, "loss": result.loss}
            rows.append(row | {"rotation": dict(zip(result.layers, result.rotation[-1], strict=True))})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, help="JSON file; default benchmarks/results/steering_width_DEVICE.json")
    given = parser.parse_args()
    if given.device == "cuda":
        rows = wide(given.data)
    else:
        asked = [(width, rate, given.data) for width, rates in WIDTHS.items() for rate in rates]
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            rows = pool.map(by_width, asked[::-1], chunksize=1)  # the widest take longest
    device = "" if given.device == "cpu" else " --device cuda"
    command = f"python benchmarks/steering_width.py --data DATA{device}"
    about = environment(torch.device(given.device))
    out = given.out or Path(__file__).parent / "results" / f"steering_width_{given.device}.json"
    write(out, {"command": command, "environment": about, "trainings": rows})


if __name__ == "__main__":
    main()
