"""One training run, from initialization to test accuracy, with its rotation curves."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import ceil, isfinite
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (the name torch's own documentation uses)
from torch.optim.lr_scheduler import MultiStepLR

from gyroscope.lab.data import Split
from gyroscope.lab.errors import LabError
from gyroscope.lab.rotation import rotation
from gyroscope.layer import layers
from gyroscope.monitor import Monitor, watch


@dataclass(frozen=True)
class Schedule:
    """How long to train, in batches of what size, and when the rate is divided by `factor`.

    >>> Schedule(epochs=60).milestones
    [48, 54]
    """

    epochs: int = 60
    batch: int = 32
    cuts: tuple[float, ...] = (0.8, 0.9)
    factor: float = 5.0

    @property
    def milestones(self) -> list[int]:
        """The epochs after which the rate is cut."""
        return [round(cut * self.epochs) for cut in self.cuts]


@dataclass(frozen=True)
class Result:
    """What a training run leaves: `rotation[t][l]` is layer l's cosine distance after t epochs.

    >>> Result(0.5, 0.4, loss=[2.3], layers=["fc"], rotation=[[0.0], [0.1]]).final_rotation
    [0.1]
    """

    train_accuracy: float
    test_accuracy: float
    loss: list[float]
    layers: list[str]
    rotation: list[list[float]]

    @property
    def final_rotation(self) -> list[float]:
        """Each layer's rotation at the end."""
        return self.rotation[-1]


def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the share of `x` that `model`, put in evaluation mode, classifies as `y`.

    >>> import torch
    >>> accuracy(torch.nn.Identity(), torch.eye(4), torch.tensor([0, 1, 2, 0]))
    0.75
    """
    model.eval()
    with torch.no_grad():
        return float((model(x).argmax(dim=1) == y).double().mean())


def train(
    model: nn.Module,
    split: Split,
    optimizer: torch.optim.Optimizer,
    *,
    seed: int,
    schedule: Schedule = Schedule(),  # noqa: B008  (frozen)
    record: Path | None = None,
) -> Result:
    """Train `model` on cross-entropy; the same seed and thread count give the same result, bit for bit.

    The examples are shuffled every epoch and the last, smaller batch is kept. With `record`, what every layer does is
    recorded in that folder at the end of every epoch.

    >>> from gyroscope.lab import data, models
    >>> from gyroscope.lab.recipe import Recipe
    >>> model = models.make("digits-cnn", seed=0)
    >>> optimizer = Recipe("Layca", rate=3**-3, alpha=0.0).optimizer(model)
    >>> result = train(model, data.digits(), optimizer, seed=0, schedule=Schedule(epochs=1))
    >>> len(result.rotation), len(result.layers)
    (2, 7)
    """
    generator = torch.Generator().manual_seed(seed)
    scheduler = MultiStepLR(optimizer, schedule.milestones, gamma=1 / schedule.factor)
    weights = {layer.name: layer.parameter for layer in layers(model)}
    initial = {name: weight.detach().clone() for name, weight in weights.items()}

    def rotations() -> list[float]:
        return [rotation(weight, initial[name]) for name, weight in weights.items()]

    count = len(split.y_train)
    curves, losses = [rotations()], []
    with _recorded(model, optimizer, record, steps=ceil(count / schedule.batch)) as monitor:
        for epoch in range(schedule.epochs):
            model.train()
            total = 0.0
            for chosen in torch.split(torch.randperm(count, generator=generator), schedule.batch):
                loss = F.cross_entropy(model(split.x_train[chosen]), split.y_train[chosen])
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                optimizer.step()
                total += loss.item() * len(chosen)
            scheduler.step()
            if not isfinite(total):
                raise LabError(f"training diverged: the loss is {total} in epoch {epoch + 1}; lower the rate")
            losses.append(total / count)
            curves.append(rotations())
            if monitor is not None:
                monitor.log(loss=losses[-1])
        trained = accuracy(model, split.x_train, split.y_train)
        tested = accuracy(model, split.x_test, split.y_test)
        if monitor is not None:
            monitor.log(train_accuracy=trained, test_accuracy=tested)
    return Result(trained, tested, loss=losses, layers=list(weights), rotation=curves)


def _recorded(
    model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path | None, *, steps: int
) -> AbstractContextManager[Monitor | None]:
    """A monitor that measures once in so many steps, or nothing where there is no folder to record in."""
    if folder is None:
        return nullcontext()
    return watch(model, optimizer, folder, every=steps, budget=None, detail_every=10 * steps)
