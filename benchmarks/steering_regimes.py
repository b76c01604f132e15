"""What decides how well `gyroscope.steer` does when steps are few, and when the text is repeated many times.

    OMP_NUM_THREADS=1 python benchmarks/steering_regimes.py --data DATA
    python benchmarks/steering_regimes.py --data DATA --device cuda

DATA has tinyshakespeare. Trains a character GPT (3 blocks of width 96, 32 × 64 characters per step) over Muon for 400
steps on the whole text, and for 2,000 steps, 76 epochs, on the first 60,000 characters: an hour on two cores of a CPU.
On a GPU, the larger one of beyond/no-tuning. Prints and writes the best and the last test loss. Settings that the
output file has already are not trained again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gyroscope_lab.data.source import Source
from gyroscope_lab.engine import run_trials
from gyroscope_lab.papers.beyond.problems import GPT, adamw, steered, warmed
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.result import Result
from gyroscope_lab.training.schedule import Schedule
from gyroscope_lab.training.task import Precision, Task
from gyroscope_lab.training.trial import Trial
from timing import environment, write

#: The regimes of the small network: characters of the text, steps, and dropout.
REGIMES = {"short": (1_000_000, 400, 0.0), "repeated": (60_000, 2000, 0.1)}
LARGE = "large"
_EPOCHS = 8


@dataclass(frozen=True)
class Setting:
    """A training: of AdamW with a warm-up and this decay, or of `steer` with these choices."""

    regime: str
    rate: float
    decay: float | None = None
    norms: str = "learned"
    heads: str = "plain"
    embeddings: str = "plain"
    scale: float = 1.0
    seed: int = 0
    inner: str = "muon"

    def trial(self) -> Trial:
        """The training of this setting."""
        task = GPT.full if self.regime == LARGE else _small(self.regime)
        precision: Precision = "bf16" if self.regime == LARGE else "float32"
        if self.decay is not None:
            return Trial(warmed(task), adamw(task, self.rate, self.decay), self.seed, precision)
        choices = {"norms": self.norms, "heads": self.heads, "embeddings": self.embeddings}
        recipe = steered(self.inner, rate=self.rate, **choices)
        recipe = replace(recipe, scale=self.scale, name=f"{recipe.name}, scale={self.scale:g}")
        return Trial(task, recipe, self.seed, precision)


def _small(regime: str) -> Task:
    characters, steps, dropout = REGIMES[regime]
    options = {"context": 64, "width": 96, "depth": 3, "heads": 4, "tied": True, "dropout": dropout}
    return Task(
        f"gpt-{regime}",
        Source("shakespeare", context=64, characters=characters),
        "gpt-small",
        tuple(options.items()),
        Schedule(epochs=_EPOCHS, drawn=steps // _EPOCHS, batch=32, cuts=(), cosine=True),
        test_loss=True,
    )


def settings(device: str) -> Iterator[Setting]:
    """The settings of the small network on a CPU, of the larger one on a GPU."""
    if device == "cuda":
        yield from _large()
        return
    for regime in REGIMES:
        for decay in (0.1, 1.0):
            yield Setting(regime, 0.003, decay)
        for scale in (1.0, 2.0):
            yield Setting(regime, 0.028, scale=scale)
            for heads, embeddings in (("plain", "plain"), ("turn", "plain"), ("turn", "turn")):
                yield Setting(regime, 0.028, None, "held", heads, embeddings, scale)
        yield Setting(regime, 0.028, None, "learned", "turn", "plain")
        yield Setting(regime, 0.028, None, "learned", "turn", "turn")
        for rate in (0.04, 0.056, 0.1):
            yield Setting(regime, rate)
        # Weights that start four times as large have nearly the standard deviation 1/√width.
        yield Setting(regime, 0.028, scale=4.0)
        for rate in (0.028, 0.056):
            yield Setting(regime, rate, None, "held", "turn", "turn", 4.0)
        yield Setting(regime, 0.056, None, "learned", "turn", "plain")
        yield Setting(regime, 0.056, None, "held")
        yield Setting(regime, 0.056, None, "held", "turn", "turn")
        for seed in (1, 2):
            yield Setting(regime, 0.003, 1.0, seed=seed)
            for rate in (0.028, 0.04, 0.056, 0.1):
                yield Setting(regime, rate, seed=seed)


def _large() -> Iterator[Setting]:
    """ρ with learned norms; then held norms, also with a head and embeddings that turn, over Muon and AdamW.

    beyond/no-tuning has ρ = 0.028 with learned norms, and AdamW.
    """
    for rate in (0.02, 0.04, 0.056, 0.08):
        yield Setting(LARGE, rate)
    for inner in ("muon", "adamw"):
        for rate in (0.028, 0.056):
            yield Setting(LARGE, rate, None, "held", "turn", "turn", inner=inner)
        yield Setting(LARGE, 0.028, None, "held", inner=inner)
        yield Setting(LARGE, 0.028, None, "learned", "turn", "turn", inner=inner)
    yield Setting(LARGE, 0.056, inner="adamw")
    yield Setting(LARGE, 0.028, None, "held", "turn", "plain")
    for held in (("learned", "plain", "plain"), ("held", "turn", "turn")):
        yield Setting(LARGE, 0.028, None, *held, 2.0)
    # What was best of these, with seeds, and the same from weights that start larger.
    for seed in (1, 2):
        yield Setting(LARGE, 0.04, seed=seed)
        yield Setting(LARGE, 0.056, None, "held", "turn", "turn", seed=seed)
        yield Setting(LARGE, 0.028, None, "held", "turn", "turn", seed=seed, inner="adamw")
    for rate, inner in ((0.056, "muon"), (0.028, "adamw")):
        yield Setting(LARGE, rate, None, "held", "turn", "turn", 2.0, inner=inner)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, help="JSON file; default benchmarks/results/steering_regimes_DEVICE.json")
    given = parser.parse_args()
    out = given.out or Path(__file__).parent / "results" / f"steering_regimes_{given.device}.json"
    rows: list[dict[str, Any]] = json.loads(out.read_text())["trainings"] if out.exists() else []
    known = {Setting(**{name: row[name] for name in Setting.__annotations__ if name in row}) for row in rows}
    asked = {one.trial(): one for one in settings(given.device) if one not in known}
    command = "python benchmarks/steering_regimes.py --data DATA --device cuda"
    if given.device == "cpu":
        command = "OMP_NUM_THREADS=1 python benchmarks/steering_regimes.py --data DATA"

    def keep(trial: Trial, result: Result) -> None:
        print(f"{trial.title}: {result.best_test_loss:.3f}", flush=True)
        losses = {"best": result.best_test_loss, "last": result.test_losses[-1], "train": result.loss[-1]}
        rows.append(asdict(asked[trial]) | losses)
        write(out, {"command": command, "environment": environment(torch.device(given.device)), "trainings": rows})

    with tempfile.TemporaryDirectory() as folder:
        jobs = 2 if given.device == "cpu" else 10
        run_trials(list(asked), Archive(folder), data=given.data, jobs=jobs, on_done=keep)
    for row in rows:
        print("  ".join(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()))


if __name__ == "__main__":
    main()
