"""What a training of the laboratory costs on a GPU: alone and side by side, step by step and as CUDA graphs.

    python benchmarks/population.py

Seconds for 100 epochs of C10-CNN1 (45,000 images of 32×32 in batches of 128, validation after every epoch, the monitor
on, bf16) from epochs on half as many images, and milliseconds a step of ResNet-110, which is bound by the host. The
contenders take turns: one epoch of each in every round. The images are noise, on which the cost does not depend.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gyroscope.lab.captured import Captured
from gyroscope.lab.data.split import Split
from gyroscope.lab.recipe import Recipe
from gyroscope.lab.tasks import task
from gyroscope.lab.training import Training
from gyroscope.lab.trial import Trial
from timing import environment, write

EXAMPLES, EPOCHS = 45_000, 100
RECIPES = (Recipe("Layca", 3.0**-3, control="layca"), Recipe("SGD + L2", 3.0**-1, weight_decay=2e-3))
WAYS: dict[str, Callable[..., Training]] = {
    "eager": Training,
    "graph": Captured,
    "compiled graph": lambda *given, **options: Captured(*given, compiled=True, **options),
}


def noise(examples: int) -> Split:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (examples * 10 // 9, 3, 32, 32), dtype=torch.uint8, generator=generator)
    y = torch.randint(0, 10, (len(x),), generator=generator)
    mean, std = torch.tensor(120.7), torch.tensor(64.2)
    return Split(x[:examples], y[:examples], x[:100], y[:100], x[examples:], y[examples:], mean, std)


class Population:
    """Trainings that take turns, one epoch at a time."""

    def __init__(self, way: str, name: str, size: int, split: Split, folder: Path) -> None:
        self.seats = []
        long = task(name).lasting(10_000)
        for i in range(size):
            trial = Trial(long, RECIPES[i % 2], seed=i, precision="bf16")
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                made = WAYS[way](trial, split, device="cuda", folder=folder / f"{way}-{name}-{size}-{i}")
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
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    found: dict[str, Any] = {
        "environment": environment(torch.device("cuda")),
        "command": "python benchmarks/population.py",
    }
    with tempfile.TemporaryDirectory() as folder:
        half = noise(EXAMPLES // 2).to("cuda")
        contenders: dict[str, tuple[str, int]] = {
            f"{way}, {size}": (way, size) for way in WAYS for size in options.sizes if way != "eager" or size == 1
        }
        made = {name: Population(way, "c10-cnn1", size, half, Path(folder)) for name, (way, size) in contenders.items()}
        results = measured(made, options.rounds)
        for name, (_, size) in contenders.items():
            whole = 2 * EPOCHS * results[name]["median_s"] / size
            results[name] |= {"trials": size, "seconds_per_run": whole}
            print(f"C10-CNN1, {name}: {whole:.1f} s a run of {EPOCHS} epochs", flush=True)
        for population in made.values():
            population.close()
        found["c10-cnn1"] = results
        few = noise(128 * 40).to("cuda")
        made = {way: Population(way, "c10-resnet110", 1, few, Path(folder)) for way in ("eager", "graph")}
        results = measured(made, options.rounds)
        for name, result in results.items():
            result["step_ms"] = 1e3 * result["median_s"] / 40
            print(f"ResNet-110, {name}: {result['step_ms']:.2f} ms a step", flush=True)
        for population in made.values():
            population.close()
        found["c10-resnet110"] = results
    write(options.out / "population_cuda.json", found)


if __name__ == "__main__":
    main()
