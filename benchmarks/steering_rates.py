"""How the best ρ of `gyroscope.steer` depends on the width of a character GPT, and on the size of its initial weights.

    OMP_NUM_THREADS=1 python benchmarks/steering_rates.py --text tinyshakespeare.txt

Trains GPTs of 2 blocks (tied head, context 64, batch 16, cosine to zero) for 300 steps on one thread of a CPU, in 35
minutes. Prints and writes the validation loss at the end. Settings that the output file has already are not trained
again.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from gyroscope import steer
from gyroscope_lab import models
from steering import CONTEXT, Text, trained
from timing import environment, write

OUT = Path(__file__).parent / "results" / "steering_rates_cpu.json"


@dataclass(frozen=True)
class Setting:
    """A training at a width and a rate; matrices start with the standard deviation 0.02 times `scale`."""

    width: int
    rate: float
    inner: str = "adamw"
    scale: float = 1.0
    steps: int = 300
    seed: int = 0

    def train(self, text: Text) -> dict[str, Any]:
        """Return the validation loss at the end."""
        model = models.make("gpt-small", seed=self.seed, context=CONTEXT, width=self.width, depth=2, heads=4, tied=True)
        optimizer = steer(model, self.inner, rate=self.rate)
        with torch.no_grad():
            for group in optimizer.param_groups:
                for p in group["params"] if group["rule"] == "turn" else []:
                    p.mul_(self.scale)
        return trained(text, model, optimizer, self.steps, self.seed)


def settings() -> Iterator[Setting]:
    """Rates by width over AdamW; larger initial weights, also over Muon; seeds."""
    for width in (128, 256, 512):
        for rate in (0.056, 0.028, 0.02, 0.014, 0.0099, 0.007):
            yield Setting(width, rate)
    # Weights that start with a standard deviation of 1/√width.
    for rate in (0.028, 0.014, 0.0099, 0.007, 0.0035):
        yield Setting(256, rate, scale=3.125)
    for scale in (1.0, 3.125):
        yield Setting(256, 0.04, "muon", scale)
    for seed in (1, 2):
        for rate in (0.028, 0.0099):
            yield Setting(512, rate, seed=seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="tinyshakespeare, or another text")
    text = Text(parser.parse_args().text)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # about rates out of range
    rows: list[dict[str, Any]] = json.loads(OUT.read_text())["trainings"] if OUT.exists() else []
    known = [Setting(**{name: row[name] for name in Setting.__annotations__}) for row in rows]
    command = "OMP_NUM_THREADS=1 python benchmarks/steering_rates.py --text tinyshakespeare.txt"
    for setting in settings():
        if setting not in known:
            rows.append(asdict(setting) | setting.train(text))
            print(*(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
            write(OUT, {"command": command, "environment": environment(torch.device("cpu")), "trainings": rows})


if __name__ == "__main__":
    main()
