"""Pairs of trainings that should go through the same functions: how far apart their outputs are, step by step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the name torch's own documentation uses)
from torch.optim import SGD

from gyroscope.base import write_whole
from gyroscope.theory import undo_decay
from gyroscope_lab import models
from gyroscope_lab.data.split import Split
from gyroscope_lab.errors import LabError

#: With weight decay; with the exponential schedule in its place; with neither; with decay from another last digit.
Way = Literal["decay", "exponential", "neither", "rounding"]

# Too little to matter beside any variance, and not the 0 that torch refuses: layers are scale-invariant to rounding.
NO_EPS = 1e-30
_PROBES = 200


@dataclass(frozen=True)
class Setting:
    """A perceptron with batch normalization and how it is trained: all that a pair of trainings depends on.

    Its classifier stays as it was drawn, so that every weight that is trained is scale-invariant.

    Attributes:
        source: the name of the data.
        pixels: how many an image has.
        width: of the three hidden layers.
        rate: η.
        decay: λ.
        momentum: β.
        batch: examples a step, drawn anew for each.
        steps: how many.
        every: steps from one look to the next.
        double: float64, or else float32.
        eps: what batch normalization adds to variances.
        seed: of weights and batches.
    """

    source: str
    pixels: int
    width: int
    rate: float
    decay: float
    momentum: float = 0.0
    batch: int = 100
    steps: int = 1000
    every: int = 10
    double: bool = True
    eps: float = NO_EPS
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Course:
    """One training: at every look the outputs for some test images [looks, images, classes], norms and rate."""

    outputs: Tensor
    norms: npt.NDArray[np.float64]
    rates: npt.NDArray[np.float64]
    test: float


@dataclass(frozen=True)
class Twins:
    """What is kept of a training beside that with weight decay.

    Attributes:
        steps: when they were looked at.
        apart: the largest difference of outputs, as a share of the largest output, at each look.
        agree: the share of test images that both put in the same class in the end.
        norms: the norms of the layers [looks][layers], with weight decay and without.
        rates: the learning rates, with weight decay and without.
        tests: the test accuracies, with weight decay and without.
    """

    steps: list[int]
    apart: list[float]
    agree: float
    norms: tuple[list[list[float]], list[list[float]]]
    rates: tuple[list[float], list[float]]
    tests: tuple[float, float]

    def write(self, path: Path) -> None:
        """Keep it in a file that is there whole or not at all."""
        write_whole(path, json.dumps(asdict(self), allow_nan=False) + "\n")

    @classmethod
    def read(cls, path: Path) -> Twins:
        """Read what `write` kept."""
        try:
            kept: dict[str, Any] = json.loads(path.read_text())
            return cls(**kept | {name: tuple(kept[name]) for name in ("norms", "rates", "tests")})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LabError(f"{path} cannot be read ({error}); delete it to train again") from error


def key(setting: Setting, way: Way) -> str:
    """A name for the file of a pair: another for whatever could come out differently.

    >>> one = Setting("digits", 64, 8, 0.3, 0.03)
    >>> key(one, "exponential") == key(one, "exponential"), key(one, "exponential") == key(one, "neither")
    (True, False)
    """
    told = json.dumps([asdict(setting), way], sort_keys=True)
    return f"{way}-{hashlib.sha256(told.encode()).hexdigest()[:16]}"


def train(setting: Setting, way: Way, split: Split, *, device: str = "cpu") -> Course:
    """Train one way or another, on one thread where on a CPU.

    >>> from gyroscope_lab.data.source import Source
    >>> split = Source("digits").load()
    >>> train(Setting("digits", 64, 8, 0.3, 0.03, steps=20), "exponential", split).rates.round(3).tolist()
    [0.303, 0.363, 0.435]
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _train(setting, way, split, device)
    finally:
        torch.set_num_threads(threads)


def _train(setting: Setting, way: Way, split: Split, device: str) -> Course:
    dtype = torch.float64 if setting.double else torch.float32
    options = {"batch_norm": True, "inputs": setting.pixels, "eps": setting.eps}
    model = models.make(f"mlp-4x{setting.width}", seed=setting.seed, **options).to(device, dtype)
    *hidden, classifier = model.parameters()
    classifier.requires_grad_(False)
    if way == "rounding":
        _jog(hidden, setting.seed)
    decay = 0.0 if way == "neither" else setting.decay
    sgd = SGD(hidden, lr=setting.rate, momentum=setting.momentum, weight_decay=decay)
    schedule = undo_decay(sgd) if way == "exponential" else None
    probe = split.inputs(split.x_test[:_PROBES]).to(device, dtype)
    outputs, norms, rates = [], [], []
    for step, x, y in _batches(setting, split):
        if step % setting.every == 0:
            outputs.append(_outputs(model, probe).cpu().double())
            norms.append([float(weight.detach().double().norm()) for weight in hidden])
            rates.append(float(sgd.param_groups[0]["lr"]))
        if step == setting.steps:
            break
        sgd.zero_grad()
        loss = F.cross_entropy(model(x.to(device, dtype)), y.to(device))
        loss.backward()  # type: ignore[no-untyped-call]
        sgd.step()
        if schedule is not None:
            schedule.step()
    return Course(torch.stack(outputs), np.array(norms), np.array(rates), _test(model, split, device, dtype))


def _batches(setting: Setting, split: Split) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The same for every way: drawn from the seed alone."""
    draw = torch.Generator().manual_seed(setting.seed)
    for step in range(setting.steps + 1):
        chosen = torch.randint(0, len(split.y_train), (setting.batch,), generator=draw)
        yield step, split.inputs(split.x_train[chosen]), split.y_train[chosen]


@torch.no_grad()
def _jog(weights: Sequence[Tensor], seed: int) -> None:
    """Change every weight by its last digit, up or down."""
    draw = torch.Generator().manual_seed(seed + 1)
    for weight in weights:
        signs = torch.randint(0, 2, weight.shape, generator=draw).to(weight) * 2 - 1
        weight.mul_(1 + torch.finfo(weight.dtype).eps * signs)


@torch.no_grad()
def _outputs(model: nn.Module, x: Tensor) -> Tensor:
    """Normalized over these images themselves: running averages are of another scale in each twin's past."""
    averages = {name: value.clone() for name, value in model.state_dict().items() if "running" in name}
    found: Tensor = model(x)
    model.load_state_dict(averages, strict=False)
    return found


@torch.no_grad()
def _test(model: nn.Module, split: Split, device: str, dtype: torch.dtype) -> float:
    """By batch statistics of the test set, for the same reason."""
    x = split.inputs(split.x_test).to(device, dtype)
    return float((model(x).argmax(1).cpu() == split.y_test.cpu()).double().mean())


def compare(setting: Setting, first: Course, second: Course) -> Twins:
    """How far apart two trainings are.

    >>> outputs = torch.tensor([[[1.0, 2.0]], [[1.0, 4.0]]])
    >>> one = Course(outputs, np.ones((2, 1)), np.ones(2), 0.5)
    >>> other = Course(outputs + torch.tensor([0.0, 1.0]), np.ones((2, 1)), np.ones(2), 0.5)
    >>> compare(Setting("digits", 64, 8, 0.3, 0.03, steps=10), one, other).apart
    [0.5, 0.25]
    """
    largest = first.outputs.abs().flatten(1).max(dim=1).values
    apart = (first.outputs - second.outputs).abs().flatten(1).max(dim=1).values / largest
    if not bool(apart.isfinite().all()):
        raise LabError(f"a training with {setting} left the numbers of its type; take fewer steps or less decay")
    same = first.outputs[-1].argmax(-1) == second.outputs[-1].argmax(-1)
    return Twins(
        list(range(0, setting.steps + 1, setting.every)),
        apart.tolist(),
        float(same.double().mean()),
        (first.norms.tolist(), second.norms.tolist()),
        (first.rates.tolist(), second.rates.tolist()),
        (first.test, second.test),
    )
