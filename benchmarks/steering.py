"""What `gyroscope.steer` is worth on small cases, and where the numbers of its presets come from.

    OMP_NUM_THREADS=1 python benchmarks/steering.py --text tinyshakespeare.txt

One thread of a CPU, about half an hour. The cases, in benchmarks/results/steering_cpu.json:

- `momentum`: steps to half rotation with independent random gradients, for `rates.with_momentum`;
- `digits`: the laboratory's digits task, three seeds, test accuracy;
- `patches`: a vision transformer on digits, three seeds, test accuracy: the map that embeds patches turns or not;
- `gpt`: a character GPT of 3 blocks of width 64 (tied head, context 64, batch 16, cosine to zero), 500 steps on
  tinyshakespeare: norms × head × embeddings × `others_lr` × rate, against AdamW; validation loss;
- `why`: the same with a learnable factor on the logits, with weights that begin at zero, with rates out of range;
- `longer`: 1,500 steps of a few of them; `seeds`: three seeds of a few of them.

Cells that the file has already are not trained again: delete the file to begin anew. Times compare only between cells
that were trained in one go, as those of docs/migrate.md were. The text is not in the repository.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.optim import AdamW, Optimizer

from gyroscope import Layca, steer
from gyroscope.control import SGD_AMom, rates
from gyroscope.control.joint import Joint
from gyroscope_lab import models
from gyroscope_lab.engine import run_trials
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.beyond.problems import VIT
from gyroscope_lab.papers.beyond.problems import steered as preset
from gyroscope_lab.papers.demo import RECIPES, TASK, run
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.recipe import Recipe, register
from gyroscope_lab.training.trial import Trial
from timing import environment

CONTEXT, BATCH, WIDTH, DEPTH, STEPS = 64, 16, 64, 3, 500
OUT = Path(__file__).parent / "results" / "steering_cpu.json"

Make = Callable[[nn.Module], tuple[nn.Module, Optimizer]]


# The character GPT


class Text:
    """Batches of characters, the last tenth of the text for validation."""

    def __init__(self, path: Path) -> None:
        text = path.read_text()
        index = {c: i for i, c in enumerate(sorted(set(text)))}
        data = torch.tensor([index[c] for c in text])
        split = int(0.9 * len(data))
        self.training, self.validation = data[:split], data[split:]

    def batch(self, part: Tensor, generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(part) - CONTEXT - 1, (size,), generator=generator)
        rows = torch.stack([part[i : i + CONTEXT + 1] for i in starts])
        return rows[:, :-1], rows[:, 1:]

    def loss(self, model: nn.Module) -> float:
        generator = torch.Generator().manual_seed(9)
        with torch.no_grad():
            losses = [_loss(model, *self.batch(self.validation, generator, 64)).item() for _ in range(4)]
        return sum(losses) / len(losses)


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def gpt(text: Text, make: Make, steps: int = STEPS, seed: int = 0) -> dict[str, float]:
    """Train one GPT, and return its validation loss at the end."""
    model = models.make("gpt-small", seed=seed, context=CONTEXT, width=WIDTH, depth=DEPTH, tied=True)
    return trained(text, *make(model), steps, seed)


def trained(text: Text, model: nn.Module, optimizer: Optimizer, steps: int, seed: int) -> dict[str, float]:
    """Train a model along a cosine to zero, and return its validation loss at the end."""
    schedule = rates.cosine(optimizer, steps)
    generator = torch.Generator().manual_seed(100 + seed)
    start = time.process_time()
    for _ in range(steps):
        loss = _loss(model, *text.batch(text.training, generator, BATCH))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return {"loss": round(text.loss(model), 4), "cpu_seconds": round(time.process_time() - start, 1)}


class Scaled(nn.Module):
    """A model with a learnable factor on its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.log_scale = model, nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x) * torch.exp(10 * self.log_scale)
        return logits


def steered(inner: str = "adamw", **options: Any) -> Make:
    return lambda model: (model, steer(model, inner, **options))


def adamw(lr: float) -> Make:
    return lambda model: (model, AdamW(model.parameters(), lr=lr, weight_decay=0.1, betas=(0.9, 0.95)))


def adamw_two(lr: float, others_lr: float) -> Make:
    """AdamW at one learning rate for hidden matrices and at another, without decay, for all else."""

    def make(model: nn.Module) -> tuple[nn.Module, Optimizer]:
        groups = steer(model).param_groups
        hidden = [p for group in groups if group["rule"] == "turn" for p in group["params"]]
        rest = [p for group in groups if group["rule"] == "plain" for p in group["params"]]
        parts = [{"params": hidden, "weight_decay": 0.1}, {"params": rest, "lr": others_lr, "weight_decay": 0.0}]
        return model, AdamW(parts, lr=lr, betas=(0.9, 0.95))

    return make


def muon(lr: float, others_lr: float) -> Make:
    """Muon for hidden matrices, and AdamW for all else, without steering."""

    def make(model: nn.Module) -> tuple[nn.Module, Optimizer]:
        groups = steer(model).param_groups
        parts = [{"params": g["params"], "lr": lr, "rule": g["rule"], "relative_lr": others_lr / lr} for g in groups]
        inner = torch.optim.Muon([g for g in parts if g["rule"] == "turn"], weight_decay=0.1)
        others = AdamW([g for g in parts if g["rule"] == "plain"], weight_decay=0.0, betas=(0.9, 0.95))
        return model, Joint(inner, others, [*inner.param_groups, *others.param_groups])

    return make


def scaled(**options: Any) -> Make:
    def make(model: nn.Module) -> tuple[nn.Module, Optimizer]:
        model = Scaled(model)
        return model, steer(model, "adamw", **options)

    return make


def from_zero(make: Make) -> Make:
    """Begin with maps of zeros into the residual stream."""

    def begin(model: nn.Module) -> tuple[nn.Module, Optimizer]:
        for name, p in model.named_parameters():
            if name.endswith(("attention.out.weight", "linear2.weight")):
                nn.init.zeros_(p)
        return make(model)

    return begin


GRID = {
    f"{norms}, head {heads}, embeddings {embeddings}, others_lr {others_lr:g}, rate {rate:g}": steered(
        norms=norms, heads=heads, embeddings=embeddings, others_lr=others_lr, rate=rate
    )
    for norms, heads, embeddings, others_lr, rate in product(
        ("held", "learned"), ("turn", "plain"), ("turn", "plain"), (3e-3, 1e-2), (0.028, 0.056)
    )
    if norms == "learned" or rate == 0.028
}
TWO = {f"AdamW {lr:g}, others 0.01": adamw_two(lr, 1e-2) for lr in (1e-3, 3e-3)}
MUON = {f"Muon {lr:g}, others 0.01": muon(lr, 1e-2) for lr in (0.01, 0.03, 0.1)}
GPT = {**{f"AdamW {lr:g}": adamw(lr) for lr in (1e-3, 3e-3, 1e-2)}, **TWO, **MUON, **GRID}
HELD: dict[str, Any] = {"norms": "held", "heads": "turn", "embeddings": "plain", "others_lr": 3e-3}
WHY = {
    "held, head turn, a learnable factor on the logits": scaled(**HELD),
    "AdamW 0.003, maps of zeros": from_zero(adamw(3e-3)),
    "steer, maps of zeros": from_zero(steered()),
    "steer, maps of zeros, stepped plainly": from_zero(steered(plain=["*attention.out*", "*linear2*"])),
    **{f"steer adamw, rate {rate:g}": steered(rate=rate) for rate in (0.014, 0.1, 0.2)},
    **{f"steer sgd, rate {rate:.3g}": steered("sgd", rate=rate) for rate in (3**-3, 3**-2, 0.7)},
    **{f"steer muon, rate {rate:g}": steered("muon", rate=rate) for rate in (0.014, 0.028, 0.04, 0.056, 0.14)},
    **{f"steer adamw, others_lr {lr:g}": steered(others_lr=lr) for lr in (0.03, 0.1)},
    "steer adamw, its betas (0.9, 0.999)": steered(inner_options={"betas": (0.9, 0.999)}),
    "steer adamw, betas of others (0.9, 0.999)": steered(others_options={"betas": (0.9, 0.999)}),
    "steer adamw, without operation 1": steered(project=False),
    "steer adamh": steered("adamh"),
    "steer muonh": steered("muonh"),
}
MUONS = {f"steer muon, rate {rate:g}": steered("muon", rate=rate) for rate in (0.028, 0.04, 0.056)}
FEW = {
    "AdamW 0.003": adamw(3e-3),
    "steer adamw": steered(),
    "steer adamw, norms held": steered(norms="held"),
    **MUONS,
}
LONGER = {
    "AdamW 0.001": adamw(1e-3),
    "AdamW 0.01": adamw(1e-2),
    **TWO,
    **MUON,
    **FEW,
    "steer adamw, head turn": steered(heads="turn"),
}
SEEDED = {"AdamW 0.003, others 0.01": adamw_two(3e-3, 1e-2), "Muon 0.03, others 0.01": MUON["Muon 0.03, others 0.01"],
          "steer adamw": steered(), **MUONS}  # fmt: skip
# As many more steps as steered trainings of 1,500 steps take longer on a CPU, over AdamW and over Muon.
AS_LONG = {f"AdamW 0.003, others 0.01, {steps} steps": steps for steps in (1720, 2080)}


# Random walks, and digits


def half_rotation(make: Callable[[list[Tensor]], Optimizer], seed: int) -> int:
    """Return the steps to a mean cosine of one half, over four layers of 64 × 64 with random gradients."""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(64, 64, generator=generator) for _ in range(4)]
    start = torch.stack(weights).flatten(1).clone()
    optimizer, step = make(weights), 0
    while torch.cosine_similarity(torch.stack(weights).flatten(1), start).mean() > 0.5:
        for w in weights:
            w.grad = torch.randn(w.shape, generator=generator)
        optimizer.step()
        step += 1
    return step


def momentum() -> dict[str, Any]:
    slow, fast, beta = 3**-5, 3**-3, 0.9
    alike = rates.with_momentum(fast, beta)
    steps = {
        "3^-3, no momentum": half_rotation(lambda w: Layca(torch.optim.SGD(w, lr=fast)), 0),
        "3^-5, momentum 0.9": half_rotation(lambda w: Layca(SGD_AMom(w, lr=slow, momentum=beta)), 1),
        "with_momentum(3^-3, 0.9), momentum 0.9": half_rotation(
            lambda w: Layca(SGD_AMom(w, lr=alike, momentum=beta)), 2
        ),
    }
    first, second, _ = steps.values()
    return {"steps": steps, "ratio": round(second / first, 3), "law": round(81 / 19, 3)}


def digits(done: dict[str, Any]) -> dict[str, Any]:
    """Train the laboratory's digits task, and return training and test accuracies of three seeds."""
    register("steered", lambda r, model: steer(model, **{"rate": r.rate, **dict(r.options)}))  # type: ignore[arg-type]

    def recipe(name: str, rate: float, **options: Any) -> Recipe:
        return Recipe(name, rate=rate, optimizer="steered", options=tuple(options.items()))

    known = [one for one in RECIPES if one.name in ("Layca 3^-3", "SGD", "SGD + weight decay")]
    ours = [
        recipe(
            f"steer {inner}, {norms}, others_lr {lr:g}, rate {rate:.3g}", rate, inner=inner, norms=norms, others_lr=lr
        )
        for inner, rate in (("adamw", 0.0085), ("adamw", 0.028), ("adamw", 0.056), ("sgd", 3**-3))
        for norms in ("held", "learned")
        for lr in (3e-3, 1e-2)
    ]
    missing = [one for one in (*known, *ours) if one.name not in done]
    if not missing:
        return done
    with tempfile.TemporaryDirectory() as folder:
        demo = run(Lab(Archive(folder), jobs=1), seeds=range(3), recipes=missing, task=TASK)
    trained = {
        cell.recipe.name: {
            "test": [round(100 * one.test_accuracy, 2) for one in cell.results],
            "train": [round(100 * one.train_accuracy, 2) for one in cell.results],
        }
        for cell in demo.cells
    }
    return {**done, **trained}


def patches(done: dict[str, Any]) -> dict[str, Any]:
    """Train the vision transformer of beyond/no-tuning on digits, and return test accuracies of three seeds."""
    recipes = [
        *(preset(inner) for inner in ("adamw", "muon")),
        *(preset(inner, plain="patches*") for inner in ("adamw", "muon")),
    ]
    for recipe in recipes:
        if recipe.name not in done:
            with tempfile.TemporaryDirectory() as folder:
                results = run_trials([Trial(VIT.small, recipe, seed) for seed in range(3)], Archive(folder))
            done[recipe.name] = {"test": [round(100 * one.test_accuracy, 2) for one in results]}
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", type=Path, required=True, help="tinyshakespeare, or another text")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # about rates out of range
    found: dict[str, Any] = json.loads(OUT.read_text()) if OUT.exists() else {}
    found["environment"] = environment(torch.device("cpu"))

    def keep() -> None:
        OUT.write_text(json.dumps(found, indent=1) + "\n")

    found["momentum"] = found.get("momentum") or momentum()
    found["digits"] = digits(found.get("digits", {}))
    found["patches"] = patches(found.get("patches", {}))
    keep()
    text = Text(parser.parse_args().text)
    cells: list[tuple[str, str, Make, int, int]] = [
        *(("gpt", name, make, STEPS, 0) for name, make in GPT.items()),
        *(("why", name, make, STEPS, 0) for name, make in WHY.items()),
        *(("longer", name, make, 3 * STEPS, 0) for name, make in LONGER.items()),
        *(("longer", name, adamw_two(3e-3, 1e-2), steps, 0) for name, steps in AS_LONG.items()),
        *(("seeds", f"{name}, seed {seed}", make, STEPS, seed) for seed in (1, 2) for name, make in FEW.items()),
        *(
            ("longer", f"{name}, seed {seed}", make, 3 * STEPS, seed)
            for seed in (1, 2)
            for name, make in SEEDED.items()
        ),
        *(
            ("longer", f"{name}, seed {seed}", adamw_two(3e-3, 1e-2), steps, seed)
            for seed in (1, 2)
            for name, steps in AS_LONG.items()
        ),
    ]
    for part, name, make, steps, seed in cells:
        if name not in found.setdefault(part, {}):
            found[part][name] = gpt(text, make, steps, seed)
            print(part, name, found[part][name], flush=True)
            keep()
    total = sum(cell["cpu_seconds"] for part in ("gpt", "why", "longer", "seeds") for cell in found[part].values())
    print(f"{math.ceil(total)} s of CPU for the GPTs")


if __name__ == "__main__":
    main()
