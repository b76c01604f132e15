"""How cost grows: a step and a measurement with layers and parameters, a run on disk with its steps.

    python benchmarks/growth.py --device cpu
    python benchmarks/growth.py --device cuda

Three sweeps: 10 to 10,000 layers of one million parameters in all; 10⁶ to 10⁹ parameters (10⁸ on a CPU) in 100 layers;
and, on a CPU, runs of 10³ to 10⁶ steps of 12 layers and 6 quantities. Contenders of one size take turns in one run. The
times of a measured step are those of the optimizer's step with its hooks, without forward and backward passes.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import gyroscope
from gyroscope.store import LayerInfo, QuantityInfo, Rows, Writer, load
from timing import environment, interleaved, under, write

LAYERS = (10, 100, 1_000, 10_000)
PARAMETERS = (10**6, 10**7, 10**8, 10**9)
STEPS = (10**3, 10**4, 10**5, 10**6)
QUANTITIES = ("rotation", "rate", "weight_norm", "gradient_norm", "update_norm", "effective_lr")
MOST_ON_CPU = 10**8


def network(layers: int, parameters: int, device: torch.device) -> nn.Module:
    """Linear layers of equal size, with gradients."""
    model = nn.Sequential()
    wide = max(1, parameters // layers // 10)
    with torch.device(device):
        for _ in range(layers):
            model.append(nn.Linear(wide, 10, bias=False))
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    return model


def steps(layers: int, parameters: int, device: torch.device, folder: str) -> tuple[dict[str, Any], list[Any]]:
    """One step of each contender, on one model, and what is to be closed."""
    model = network(layers, parameters, device)

    def fused(lr: float) -> torch.optim.SGD:
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, fused=True)

    made: dict[str, Callable[[], Any]] = {"torch sgd-momentum fused": fused(1e-9).step}
    layca = gyroscope.Layca(torch.optim.SGD(model.parameters(), lr=3**-5), model).step
    made["layca sgd"] = layca
    watched = fused(1e-9)
    options: dict[str, Any] = {"every": 1, "budget": None, "activations": False, "detail_every": 10**9}
    monitors = [gyroscope.watch(model, watched, f"{folder}/{layers}-{parameters}", diagnose=False, **options)]
    made["sgd-momentum fused, measured"] = watched.step
    if device.type == "cpu" and shutil.which("cc"):
        made["layca sgd native"] = under("native", layca)
        again = fused(1e-9)
        monitors.append(
            under("native", gyroscope.watch)(
                model, again, f"{folder}/{layers}-{parameters}-native", diagnose=False, **options
            )
        )
        made["sgd-momentum fused, measured native"] = again.step
    return made, monitors


def sweep(sizes: list[tuple[int, int]], device: torch.device, rounds: int, seconds: float) -> list[dict[str, Any]]:
    rows = []
    for layers, parameters in sizes:
        with tempfile.TemporaryDirectory() as folder:
            made, monitors = steps(layers, parameters, device, folder)
            times = interleaved(made, device, rounds=rounds, warmup=3, seconds=seconds)
            for monitor in monitors:
                monitor.close()
        base = times["torch sgd-momentum fused"]["median_ms"]
        row: dict[str, Any] = {"layers": layers, "parameters": parameters, "times": times}
        rows.append(row)
        said = "  ".join(
            f"{name} {one['median_ms']:.3f} ({one['median_ms'] / base:.2f})" for name, one in times.items()
        )
        print(f"{layers:6} layers {parameters:.0e} parameters: {said}", flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def runs(sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """A run of so many steps: seconds to write it, bytes, seconds to open it and to load one series."""
    layers = [LayerInfo(f"layer{i}.weight", "linear", (16, 16)) for i in range(12)]
    about = {name: QuantityInfo(name, "1", "a number") for name in QUANTITIES}
    rows = []
    for count in sizes:
        values = np.random.default_rng(0).standard_normal((100, 12)).astype(np.float32)
        with tempfile.TemporaryDirectory() as top:
            folder = Path(top, "run")
            writer = Writer(folder, layers, about)
            start = time.perf_counter()
            for step in range(0, count, 100):
                rows_of_100 = Rows(0, np.arange(step, step + 100), dict.fromkeys(QUANTITIES, values))
                while not writer.put(rows_of_100):
                    time.sleep(1e-4)
            writer.close()
            wrote = time.perf_counter()
            if writer.error is not None:
                sys.exit(str(writer.error))
            with load(folder) as run:
                opened = time.perf_counter()
                found = run.series("rotation")
            loaded = time.perf_counter()
            if found.shape != (count, 12) or not np.array_equal(found[-100:], values):
                sys.exit("the series is not what was written; nothing is reported")
            row = {
                "steps": count,
                "write_seconds": wrote - start,
                "bytes": sum(file.stat().st_size for file in folder.iterdir()),
                "open_seconds": opened - wrote,
                "load_seconds": loaded - opened,
            }
        rows.append(row)
        print("  ".join(f"{key} {value:.4g}" for key, value in row.items()), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=20.0, help="at most this long for each size")
    parser.add_argument("--out", default=None, help="JSON file; default benchmarks/results/growth_DEVICE.json")
    given = parser.parse_args()
    device = torch.device(given.device)
    largest = MOST_ON_CPU if device.type == "cpu" else PARAMETERS[-1]
    result: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/growth.py", *sys.argv[1:]]),
        "environment": environment(device),
        "layers": sweep([(n, 10**6) for n in LAYERS], device, given.rounds, given.seconds),
        "parameters": sweep([(100, n) for n in PARAMETERS if n <= largest], device, given.rounds, given.seconds),
    }
    if device.type == "cpu":
        result["runs"] = runs(STEPS)
    write(given.out or Path(__file__).parent / "results" / f"growth_{device.type}.json", result)


if __name__ == "__main__":
    main()
