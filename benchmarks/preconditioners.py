"""What a step of K-FAC and of the quasi-diagonal preconditioner costs, in gradients.

    python benchmarks/preconditioners.py --device cpu
    python benchmarks/preconditioners.py --device cuda

A gradient is a forward and a backward pass over the batch: ResNet-20 on images of 32×32, and a perceptron of four
layers. Contenders take ten training steps each in every round, in random order, so that what K-FAC does every tenth
step is in its mean. On a GPU also as CUDA graphs of a step. Where curvlinops is installed, the factors of K-FAC and
their damped inverse as one gets them there stand beside, a step of it each round.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer

from gyroscope.control.preconditioners.kfac import KFAC
from gyroscope.control.preconditioners.quasi_diagonal import QuasiDiagonal
from gyroscope_lab import models
from timing import Step, captured, environment, write

STEPS = 10
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "ResNet-20": lambda: models.make("resnet-20", seed=0),
    "MLP": lambda: models.make("mlp-4x500", seed=0, inputs=784, biases=True),
}
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "cuda": {"ResNet-20": (128, 3, 32, 32), "MLP": (512, 784)},
    "cpu": {"ResNet-20": (32, 3, 32, 32), "MLP": (256, 784)},
}


def _sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=1e-3, momentum=0.9)


CONTENDERS: dict[str, Callable[[nn.Module], Optimizer | None]] = {
    "gradient": lambda model: None,
    "SGD": _sgd,
    "quasi-diagonal": lambda model: QuasiDiagonal(_sgd(model), model),
    "quasi-diagonal, every 10th step": lambda model: QuasiDiagonal(_sgd(model), model, every=10),
    "K-FAC, true labels": lambda model: KFAC(_sgd(model), model, labels="true"),
    "K-FAC, sampled labels": lambda model: KFAC(_sgd(model), model, cross_entropy),
    "K-FAC, true labels, decomposed at every step": lambda model: KFAC(
        _sgd(model), model, labels="true", decompose_every=1
    ),
    "K-FAC, measured every 10th step": lambda model: KFAC(_sgd(model), model, cross_entropy, every=10),
}


def training(network: str, contender: str, device: torch.device) -> Step:
    """A training step."""
    model = NETWORKS[network]().to(device)
    x, y = batch(network, device)
    optimizer = CONTENDERS[contender](model)

    def step() -> None:
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        if optimizer is not None:
            optimizer.step()

    return step


def batch(network: str, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = SHAPES[device.type][network]
    x, y = torch.randn(shape, generator=generator), torch.randint(0, 10, shape[:1], generator=generator)
    return x.to(device), y.to(device)


def peer(network: str, device: torch.device) -> dict[str, Step]:
    """curvlinops: factors of a batch and their damped inverse applied to the gradient."""
    try:
        from curvlinops import FisherType, KFACInverseLinearOperator, KFACLinearOperator

        released = version("curvlinops-for-pytorch")
    except (ImportError, PackageNotFoundError):
        return {}
    model = NETWORKS[network]().to(device)
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    x, y = batch(network, device)

    def step() -> None:
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        factors = KFACLinearOperator(
            model, nn.CrossEntropyLoss(), weights, [(x, y)], fisher_type=FisherType.EMPIRICAL,
            check_deterministic=False, num_data=len(x),
        )  # fmt: skip
        inverse = KFACInverseLinearOperator(factors, damping=1e-3, use_heuristic_damping=True)
        inverse @ [weight.grad for weight in weights]

    return {f"curvlinops {released}, an inverse a step": step}


def contenders(network: str, device: torch.device) -> dict[str, tuple[Step, int]]:
    """Steps, and how many are timed at once."""
    made = {name: (training(network, name, device), STEPS) for name in CONTENDERS}
    if device.type == "cuda":
        for name in ("gradient", "SGD", "quasi-diagonal"):
            made[f"{name}, captured"] = captured(training(network, name, device)), STEPS
    return made | {name: (step, 1) for name, step in peer(network, device).items()}


def measure(
    steps: dict[str, tuple[Step, int]], device: torch.device, *, rounds: int, seconds: float
) -> dict[str, dict[str, float]]:
    """Milliseconds a step of each, a mean over the steps of a cycle of medians over rounds; and in gradients.

    On a CPU they take turns step by step, so that what else the machine does meets all alike; on a GPU by cycles, since
    the host runs ahead of it.
    """
    at_once = STEPS if device.type == "cuda" else 1
    times: dict[str, list[list[float]]] = {
        name: [[] for _ in range(count // at_once or 1)] for name, (_, count) in steps.items()
    }
    for step, count in steps.values():
        for _ in range(min(3, count)):
            step()
    names, shuffled, end = list(steps), random.Random(0), time.perf_counter() + seconds
    for r in range(rounds):
        if r >= 3 and time.perf_counter() > end:
            break
        for turn in range(STEPS // at_once):
            shuffled.shuffle(names)
            for name in names:
                step, count = steps[name]
                if turn < len(times[name]):
                    times[name][turn].append(timed(step, min(count, at_once), device))
    found = {}
    for name, own in times.items():
        base = times["gradient, captured" if name.endswith(", captured") else "gradient"]
        low, median, high = (statistics.mean(quantile(turn, q) for turn in own) for q in (0.25, 0.5, 0.75))
        gradient = statistics.mean(quantile(turn, 0.5) for turn in base)
        found[name] = {
            "median_ms": median, "low_ms": low, "high_ms": high, "n": len(own[0]),
            "gradients": median / gradient, "low": low / gradient, "high": high / gradient,
        }  # fmt: skip
    return found


def timed(step: Step, count: int, device: torch.device) -> float:
    """Milliseconds a step."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        step()
    synchronize(device)
    return 1e3 * (time.perf_counter() - start) / count


def quantile(values: list[float], q: float) -> float:
    return torch.tensor(values).quantile(q).item()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, help="a network, after which no round is begun, but for three")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.backends.cudnn.benchmark = True
    found: dict[str, Any] = {
        "environment": environment(device),
        "command": f"python benchmarks/preconditioners.py --device {device.type}",
    }
    seconds = options.seconds or (10.0 if device.type == "cuda" else 45.0)
    for network in NETWORKS:
        times = measure(contenders(network, device), device, rounds=options.rounds, seconds=seconds)
        for name, one in times.items():
            print(f"{network}, {name}: {one['median_ms']:.2f} ms, {one['gradients']:.2f} gradients", flush=True)
        found[network] = {"shape": list(SHAPES[device.type][network]), "contenders": times}
    write(options.out / f"preconditioners_{device.type}.json", found)


if __name__ == "__main__":
    main()
