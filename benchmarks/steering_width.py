"""How the best learning rates by role, and the best ρ, of `gyroscope.steer` depend on the width of a character GPT.

    python benchmarks/steering_width.py --data DATA

DATA has tinyshakespeare. Trains the networks of 4 blocks of the study beyond/transfer for 600 steps of 32 × 256
characters in bf16, from seed 0: six minutes on an H200. Prints and writes the best test losses. Settings that the
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

from gyroscope_lab.engine import run_trials
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.beyond.problems import steered
from gyroscope_lab.papers.beyond.transfer import sized
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.trial import Trial
from timing import environment, write

WIDTHS = (128, 256, 512, 1024)


@dataclass(frozen=True)
class Setting:
    """A preset at a width: ρ, and the learning rates of the head, of embeddings, and of gains and biases.

    The embeddings are those of the positions, and of the characters if the head is not tied to them.
    """

    width: int
    inner: str
    tied: bool = True
    rate: float = 0.028
    head: float = 0.01
    embeddings: float = 0.01
    other: float = 0.01

    def trial(self) -> Trial:
        """The training of this setting."""
        roles = ("head", self.head), ("embedding", self.embeddings), ("other", self.other)
        told = " ".join(f"{value:.3g}" for value in (self.rate, self.head, self.embeddings, self.other))
        recipe = replace(steered(self.inner, rate=self.rate, others_lr=roles), name=f"{self.inner} {told}")
        name = "smallest" if self.width == WIDTHS[0] else f"width {self.width}"
        task = sized(Lab(Archive("runs"), "full"))[name]
        task = replace(task, options=tuple((dict(task.options) | {"tied": self.tied}).items()))
        return Trial(task, recipe, precision="bf16")


def settings(width: int) -> Iterator[Setting]:
    """The settings of a width: one role after the other at lower rates, then all; an untied head; other ρ."""
    low, rule = 1 / width, 1.28 / width
    for inner in ("adamw", "muon"):
        yield Setting(width, inner)
        for head in (reach / width for reach in (2.0, 1.0, 0.5, 0.25) if reach / width < 0.01):
            yield Setting(width, inner, head=head)
        if width < 1024:
            yield Setting(width, inner, head=low, embeddings=low)
            yield Setting(width, inner, head=low, embeddings=low, other=low)
            yield Setting(width, inner, tied=False)
            yield Setting(width, inner, tied=False, head=low)
            for rate in (0.014, 0.056):
                yield Setting(width, inner, rate=rate, head=low)
        if width > 128:
            yield Setting(width, inner, tied=False, head=rule, embeddings=rule, other=rule)
            for factor in (2.0, 1.0, 0.5, 0.25):
                its = rule * factor
                yield Setting(width, inner, head=its, embeddings=its, other=its)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="JSON file; default benchmarks/results/steering_width_cuda.json")
    given = parser.parse_args()
    out = given.out or Path(__file__).parent / "results" / "steering_width_cuda.json"
    rows: list[dict[str, Any]] = json.loads(out.read_text())["trainings"] if out.exists() else []
    known = {Setting(**{name: row[name] for name in Setting.__annotations__}) for row in rows}
    asked = [one for width in WIDTHS for one in settings(width) if one not in known][::-1]
    with tempfile.TemporaryDirectory() as folder:
        results = run_trials(
            [one.trial() for one in asked],  # the widest, which take longest, first
            Archive(folder),
            data=given.data,
            jobs=12,
            on_done=lambda trial, result: print(f"{trial.title}: {result.best_test_loss:.3f}", flush=True),
        )
    rows += [
        asdict(setting) | {"best_test_loss": result.best_test_loss, "test_losses": result.test_losses}
        for setting, result in zip(asked, results, strict=True)
    ]
    for row in rows:
        told = {name: value for name, value in row.items() if name not in ("inner", "test_losses")}
        print(f"{row['inner']:6}", *(f"{name} {value:<7.4g}" for name, value in told.items()))
    command = "python benchmarks/steering_width.py --data DATA"
    write(out, {"command": command, "environment": environment(torch.device("cuda")), "trainings": rows})


if __name__ == "__main__":
    main()
