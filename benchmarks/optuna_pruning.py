"""What the pruner for Optuna saves: the same search on digits without a pruner, with the median pruner, and with ours.

    python benchmarks/optuna_pruning.py

Learning rate, weight decay and the scale of the initialization are drawn at random, from the same seed, so every
search tries the same configurations. Each trains a small convolutional network on 200 digits; the objective is the
accuracy on 400 others, and 1,197 more tell how good the winner is. Reported are the steps that a search took, and its
best configuration. Needs `pip install 'gyroscope[optuna]' gyroscope-lab`.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from pathlib import Path
from typing import Any

import optuna
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from gyroscope.integrations.optuna import GyroscopePruner, watch
from timing import environment, write

EPOCHS, BATCH = 40, 20


def data() -> tuple[torch.Tensor, torch.Tensor]:
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return x[order], torch.tensor(digits.target)[order]


def network(scale: float) -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 64), nn.ReLU(),
        nn.Linear(64, 10),
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model


def search(name: str, pruner: Any, trials: int, seed: int, folder: str) -> dict[str, Any]:
    x, y = data()
    steps = 0

    def objective(trial: optuna.Trial) -> float:
        nonlocal steps
        torch.manual_seed(0)
        model = network(trial.suggest_float("scale", 0.03, 30, log=True))
        optimizer = torch.optim.SGD(
            model.parameters(), lr=trial.suggest_float("lr", 1e-5, 30, log=True), momentum=0.9,
            weight_decay=trial.suggest_float("weight_decay", 1e-6, 0.3, log=True),
        )  # fmt: skip
        shuffle = torch.Generator().manual_seed(0)
        with watch(trial, model, optimizer, f"{folder}/{name}") as monitor:
            for epoch in range(EPOCHS):
                order = torch.randperm(200, generator=shuffle)
                for batch in order.split(BATCH):
                    loss = cross_entropy(model(x[batch]), y[batch])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    monitor.log(loss=loss)
                    steps += 1
                monitor.flush()
                with torch.no_grad():
                    right = (model(x[200:]).argmax(1) == y[200:]).float()
                trial.report(right[:400].mean().item(), epoch)
                if trial.should_prune():
                    raise optuna.TrialPruned
        trial.set_user_attr("test", right[400:].mean().item())
        return right[:400].mean().item()

    start = time.perf_counter()
    study = optuna.create_study(direction="maximize", pruner=pruner, sampler=optuna.samplers.RandomSampler(seed))
    study.optimize(objective, n_trials=trials)
    seconds = time.perf_counter() - start
    states = [trial.state.name for trial in study.trials]
    best = study.best_trial
    return {
        "search": name, "seed": seed, "trials": trials, "pruned": states.count("PRUNED"), "steps": steps,
        "seconds": round(seconds, 1), "best": best.number, "validation": best.value, "test": best.user_attrs["test"],
        "params": best.params,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", default=Path(__file__).parent / "results" / "optuna_pruning_cpu.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    logging.getLogger("gyroscope").setLevel(logging.ERROR)
    rows = []
    for seed in range(arguments.seeds):
        for name, pruner in {
            "none": optuna.pruners.NopPruner(),
            "median": optuna.pruners.MedianPruner(),
            "findings": GyroscopePruner(lag=0.0),
            "gyroscope": GyroscopePruner(),
            "gyroscope and median": GyroscopePruner(optuna.pruners.MedianPruner()),
        }.items():
            with tempfile.TemporaryDirectory() as folder:
                rows.append(search(name, pruner, arguments.trials, seed, folder))
            row = rows[-1]
            print(
                f"seed {seed} {name:22} pruned {row['pruned']:3} of {row['trials']}  steps {row['steps']:6}  "
                f"{row['seconds']:6.1f} s  best #{row['best']:<3} validation {row['validation']:.3f}  "
                f"test {row['test']:.3f}",
                flush=True,
            )
    write(arguments.out, {"environment": environment(torch.device("cpu")), "rows": rows})


if __name__ == "__main__":
    main()
