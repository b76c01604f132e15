"""What a step of a very deep residual network costs on a GPU, and what watching all of its layers adds.

    python benchmarks/very_deep.py

Milliseconds a step of ResNet-110 and ResNet-1202 on 128 images of 32×32, bf16: kernel by kernel (eager), with their
blocks compiled, as a CUDA graph, and as a graph of compiled blocks; each also with the monitor measuring every layer at
every step. The contenders take turns: some steps of each in every round, after two that are not counted, in which
networks and kernels are compiled and graphs made; their paces are kept as well. The images are noise, on which the cost
does not depend. And the memory that one step takes, with activations kept and with blocks recomputed.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gyroscope_lab.data.split import Split
from gyroscope_lab.engine.captured import Captured, compile_blocks
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.tasks import task
from gyroscope_lab.training.training import Training
from gyroscope_lab.training.trial import Trial
from timing import environment, write

RECIPE = Recipe("SGD", 0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
BATCH = 128
WARM = 2


class Way(NamedTuple):
    """How steps are taken."""

    name: str
    graph: bool = False
    compiled: bool = False
    watched: bool = False


BARE = (
    Way("eager"),
    Way("compiled", compiled=True),
    Way("graph", graph=True),
    Way("compiled graph", graph=True, compiled=True),
)
WAYS = tuple(one for way in BARE for one in (way, way._replace(name=f"{way.name}, watched", watched=True)))


def noise(steps: int) -> Split:
    """Images for an epoch of so many steps."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (BATCH * steps, 3, 32, 32), dtype=torch.uint8, generator=generator)
    y = torch.randint(0, 10, (len(x),), generator=generator)
    return Split(x, y, x[:100], y[:100], mean=torch.full((3,), 120.7), std=torch.full((3,), 64.2))


class Contender:
    """A training that goes on, an epoch of `steps` steps at a time."""

    def __init__(self, way: Way, depth: int, split: Split, folder: Path | None, **options: Any) -> None:
        its = task("c10-deep").lasting(10_000)
        its = replace(its, model=f"resnet-{depth}", options=tuple(options.items()))
        trial = Trial(its, RECIPE, precision="bf16", every=1 if way.watched else None)
        self.stream = torch.cuda.Stream()
        # Without checkpoints, which a monitor does not need.
        given: dict[str, Any] = {"device": "cuda", "folder": folder if way.watched else None, "save_every": math.inf}
        with torch.cuda.stream(self.stream):
            if way.graph:
                self.training: Training = Captured(trial, split, compiled=None if way.compiled else False, **given)
            else:
                self.training = Training(trial, split, **given)
                if way.compiled:
                    compile_blocks(self.training.model)
            self._turns: Iterator[None] = self.training.proceed()

    def epoch(self) -> float:
        """Seconds of the next epoch."""
        torch.cuda.synchronize()
        start, goal = time.perf_counter(), self.training.epoch + 1
        with torch.cuda.stream(self.stream):
            while self.training.epoch < goal:
                next(self._turns)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def close(self) -> None:
        """End it."""
        with torch.cuda.stream(self.stream):
            self.training.close()


def paces(depth: int, steps: int, rounds: int) -> dict[str, Any]:
    """Milliseconds a step of every contender."""
    split = noise(steps).to("cuda")
    with tempfile.TemporaryDirectory() as folder:
        made = {way.name: Contender(way, depth, split, Path(folder) / way.name) for way in WAYS}
        first: dict[str, list[float]] = {name: [] for name in made}
        times: dict[str, list[float]] = {name: [] for name in made}
        for goes in [first] * WARM + [times] * rounds:
            for name, contender in made.items():
                goes[name].append(1e3 * contender.epoch() / steps)
                print(f"ResNet-{depth}, {name}, round {len(goes[name])}: {goes[name][-1]:.2f} ms", flush=True)
        for contender in made.values():
            contender.close()
    found: dict[str, Any] = {
        name: {"warm_up_ms": first[name], "steps_ms": each, "median_ms": statistics.median(each)}
        for name, each in times.items()
    }
    for way in BARE:
        pairs = zip(times[f"{way.name}, watched"], times[way.name], strict=True)
        found[f"{way.name}, watched"]["more"] = statistics.median(watched / bare - 1 for watched, bare in pairs)
    for name, values in found.items():
        print(f"ResNet-{depth}, {name}: {values['median_ms']:.2f} ms a step {values.get('more', '')}", flush=True)
    return found


def memory(depth: int) -> dict[str, float]:
    """GiB that a step takes at most, kernel by kernel."""
    found = {}
    for name, options in (("kept", {}), ("recomputed", {"checkpointed": True})):
        torch.cuda.empty_cache()
        contender = Contender(Way("eager"), depth, noise(2).to("cuda"), None, **options)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        contender.epoch()
        found[name] = (torch.cuda.max_memory_allocated() - before) / 2**30
        print(f"ResNet-{depth}, activations {name}: {found[name]:.2f} GiB", flush=True)
        contender.close()
    return found


def _given(arguments: list[str]) -> list[str]:
    """What was asked for, without where it goes."""
    if "--out" not in arguments:
        return arguments
    at = arguments.index("--out")
    return arguments[:at] + arguments[at + 2 :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--depths", type=int, nargs="+", default=[110, 1202])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    found: dict[str, Any] = {
        "environment": environment(torch.device("cuda")),
        "command": " ".join(["python", "benchmarks/very_deep.py", *_given(sys.argv[1:])]),
        "batch": BATCH,
    }
    for depth in options.depths:
        steps = max(3, 2400 // depth)
        found[f"resnet-{depth}"] = {"memory_gib": memory(depth), "steps": steps}
        found[f"resnet-{depth}"]["ways"] = paces(depth, steps, options.rounds)
        write(options.out / "very_deep_cuda.json", found)


if __name__ == "__main__":
    main()
