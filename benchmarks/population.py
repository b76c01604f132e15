"""What a training of the laboratory costs on a GPU: alone and side by side, step by step and as CUDA graphs.

    python benchmarks/population.py

Seconds per run of C10-CNN1 (100 epochs: 45,000 images of 32×32 in batches of 128, validation after every epoch, the
monitor on, bf16), of C100-resnet (the same, 100 epochs) and of ResNet-56 (160 epochs of 50,000 augmented images), from
epochs on fewer images, and milliseconds per step of ResNet-110, which is bound by the host when it is not captured. The
contenders of a network take turns: one epoch of each in every round. The images are noise, on which the cost does not
depend.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gyroscope_lab.data.split import Split
from gyroscope_lab.engine.captured import Captured
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.tasks import task
from gyroscope_lab.training.training import Training
from gyroscope_lab.training.trial import Trial
from timing import environment, write

RECIPES = (Recipe("Layca", 3.0**-3, control="layca"), Recipe("SGD + L2", 3.0**-1, weight_decay=2e-3))
DEEP = (Recipe("SGD", 0.1, momentum=0.9, nesterov=True, weight_decay=1e-4),)


@dataclass(frozen=True)
class Case:
    """A task, the examples of one of its epochs, those of an epoch here, its epochs, recipes, and contenders."""

    task: str
    examples: int
    here: int
    epochs: int
    recipes: tuple[Recipe, ...]
    contenders: tuple[tuple[str, int], ...]


CASES = (
    Case("c10-cnn1", 45_000, 128 * 176, 100, RECIPES, (("eager", 1), ("graph", 8), ("compiled graph", 1),
         ("compiled graph", 4), ("compiled graph", 8))),
    Case("c100-resnet", 45_000, 128 * 88, 100, RECIPES, (("eager", 1), ("compiled graph", 1), ("compiled graph", 8))),
    Case("c10-deep", 49_920, 128 * 130, 160, DEEP, (("eager", 1), ("compiled graph", 1), ("compiled graph", 2),
         ("compiled graph", 4), ("compiled graph", 8))),
    Case("c10-resnet110", 45_000, 128 * 40, 200, RECIPES, (("eager", 1), ("compiled graph", 1))),
)  # fmt: skip
WAYS: dict[str, Callable[..., Training]] = {
    "eager": Training,
    "graph": Captured,
    "compiled graph": lambda *given, **options: Captured(*given, compiled=True, **options),
}


def noise(examples: int, *, validation: bool) -> Split:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (examples * 10 // 9, 3, 32, 32), dtype=torch.uint8, generator=generator)
    y = torch.randint(0, 10, (len(x),), generator=generator)
    held_out = (x[examples:], y[examples:]) if validation else (None, None)
    mean, std = torch.tensor(120.7), torch.tensor(64.2)
    return Split(x[:examples], y[:examples], x[:100], y[:100], *held_out, mean, std)


class Population:
    """Trainings that take turns, one epoch at a time."""

    def __init__(self, way: str, case: Case, size: int, split: Split, folder: Path) -> None:
        self.seats = []
        long = task(case.task).lasting(10_000)
        for i in range(size):
            trial = Trial(long, case.recipes[i % len(case.recipes)], seed=i, precision="bf16")
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                made = WAYS[way](trial, split, device="cuda", folder=folder / f"{way}-{case.task}-{size}-{i}")
            self.seats.append((made, made.proceed(), stream))

    def epoch(self) -> float:
        """Seconds until every training has ended its next epoch."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        goal = self.seats[0][0].epoch + 1
        while any(training.epoch < goal for training, _, _ in self.seats):
            for training, turns, stream in self.seats:
                if training.epoch < goal:
                    with torch.cuda.stream(stream):
                        next(turns)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def close(self) -> None:
        for training, _, _ in self.seats:
            training.close()


def measured(contenders: dict[str, Population], rounds: int) -> dict[str, dict[str, Any]]:
    for population in contenders.values():
        for _ in range(2):  # graphs of whole and of smaller batches are made in the first two
            population.epoch()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, population in contenders.items():
            times[name].append(population.epoch())
    return {name: {"epochs_s": seconds, "median_s": statistics.median(seconds)} for name, seconds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tasks", nargs="+", default=[case.task for case in CASES])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    found: dict[str, Any] = {
        "environment": environment(torch.device("cuda")),
        "command": " ".join(["python benchmarks/population.py", *sys.argv[1:]]),
    }
    for case in (case for case in CASES if case.task in options.tasks):
        split = noise(case.here, validation=task(case.task).source.validation > 0).to("cuda")
        with tempfile.TemporaryDirectory() as folder:
            made = {f"{way}, {size}": Population(way, case, size, split, Path(folder)) for way, size in case.contenders}
            results = measured(made, options.rounds)
            for population in made.values():
                population.close()
        for (name, result), (_, size) in zip(results.items(), case.contenders, strict=True):
            each = result["median_s"] / size
            result |= {
                "trials": size,
                "step_ms": 1e3 * each / (case.here / 128),
                "seconds_per_run": each * case.epochs * case.examples / case.here,
            }
            print(
                f"{case.task}, {name}: {result['seconds_per_run']:.1f} s per run of {case.epochs} epochs, "
                f"{result['step_ms']:.3f} ms per step",
                flush=True,
            )
        found[case.task] = results
        write(options.out / "population_cuda.json", found)  # after every task, in case the time ends


if __name__ == "__main__":
    main()
