"""Why a wide character GPT does not learn under steering with AdamW: what is stepped plainly, at several rates.

    python benchmarks/steering_width.py --data DATA

On a GPU, in a minute; DATA has tinyshakespeare. The network of 4 blocks and width 512 of the study beyond/transfer, 600
steps, seed 0, bf16.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.engine.population import run_population
from gyroscope_lab.papers.beyond.problems import steered
from gyroscope_lab.papers.beyond.transfer import sized
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.trial import Trial
from timing import environment, write

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("adamw", {"norms": "held"}),
    ("adamw", {"others_lr": 3e-3, "norms": "held"}),
    ("adamw", {"others_lr": 1e-3}),
    ("adamw", {"others_lr": 3e-3}),
    ("adamw", {"heads": "turn", "embeddings": "turn"}),
    ("muon", {}),
    ("muon", {"others_lr": 3e-3}),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "steering_width_cuda.json")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        archive = Archive(folder)
        task = sized(Lab(archive, "full"))["width 512"]
        trials = [Trial(task, steered(inner, rate=0.028, **more), precision="bf16") for inner, more in OPTIONS]
        split = task.source.load(given.data)
        run_population(trials, lambda _: split, archive, at_once=len(trials))
        rows = []
        for trial in trials:
            result = archive.result(trial)
            assert result is not None
            print(f"{trial.recipe.name:50} {result.best_test_loss:.3f}")
            rotation = dict(zip(result.layers, result.rotation[-1], strict=True))
            rows.append(
                {
                    "task": task.name, "recipe": trial.recipe.name, "seed": trial.seed,
                    "best_test_loss": result.best_test_loss, "test_losses": result.test_losses, "loss": result.loss,
                    "rotation": rotation,
                }
            )  # fmt: skip
    about = environment(torch.device("cuda"))
    write(
        given.out,
        {"command": "python benchmarks/steering_width.py --data DATA", "environment": about, "trainings": rows},
    )


if __name__ == "__main__":
    main()
