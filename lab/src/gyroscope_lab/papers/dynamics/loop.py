"""Trainings with any network and any optimizer, on the laboratory's data and schedules.

Recipes name what the laboratory trains with; K-FAC, copied rates and networks with noise in them have no such names.
The numbers of a training are kept next to the laboratory's trials, under a fingerprint of all that they depend on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import isfinite, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the name torch's own documentation uses)
from torch.optim import Optimizer

from gyroscope.base import write_whole
from gyroscope_lab.data.augment import Augmentation
from gyroscope_lab.data.source import Source
from gyroscope_lab.data.split import Split
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.engine.run_one import loaded
from gyroscope_lab.errors import LabError
from gyroscope_lab.papers.study import clean
from gyroscope_lab.training.feed import Feed
from gyroscope_lab.training.schedule import Schedule

Numbers = dict[str, list[Any]]


def device_of(lab: Lab) -> torch.device:
    """The GPU at full scale, where there is one; what is small is faster without.

    >>> from gyroscope_lab.training.archive import Archive
    >>> device_of(Lab(Archive("runs"))).type
    'cpu'
    """
    return torch.device("cuda" if lab.scale == "full" and torch.cuda.is_available() else "cpu")


def dtype_of(lab: Lab) -> torch.dtype:
    """Double precision, but at full scale.

    >>> from gyroscope_lab.training.archive import Archive
    >>> dtype_of(Lab(Archive("runs"))), dtype_of(Lab(Archive("runs"), "full"))
    (torch.float64, torch.float32)
    """
    return torch.float32 if lab.scale == "full" else torch.float64


def split_of(lab: Lab, source: Source) -> Split:
    """The data, on the device."""
    return loaded(source, None if lab.data is None else Path(lab.data)).to(device_of(lab))


def kept(lab: Lab, study: str, setting: Any, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `measure` returns for a setting, measured once for an archive.

    Args:
        lab: the laboratory; one that is to show what is known measures nothing.
        study: whose it is.
        setting: a dataclass with all that the outcome depends on.
        measure: the measurement; what is not finite is kept as None.

    >>> import tempfile
    >>> from gyroscope_lab.training.archive import Archive
    >>> from gyroscope_lab.training.schedule import Schedule
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     lab = Lab(Archive(folder))
    ...     _ = kept(lab, "example", Schedule(), lambda: {"loss": [0.5]})
    ...     kept(lab, "example", Schedule(), lambda: {"loss": [0.25]})
    {'loss': [0.5]}
    """
    told = json.loads(json.dumps(asdict(setting)))
    text = json.dumps([study, str(dtype_of(lab)), told], sort_keys=True)
    path = lab.archive.root / "dynamics" / study / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    if path.exists():
        try:
            content = json.loads(path.read_text())
            return dict(content["found"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LabError(f"{path} cannot be read ({error}); delete it to measure again") from error
    if lab.known:
        raise LabError(f"a training of {study} is not in {path}; let it be trained (leave --known out)")
    with _one_thread(device_of(lab)):
        found = clean(measure())
    write_whole(path, json.dumps({"setting": told, "found": found}, allow_nan=False) + "\n")
    return dict(found)


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """As with every training of a laboratory on a CPU."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def train(
    model: nn.Module,
    optimizer: Optimizer,
    split: Split,
    schedule: Schedule,
    *,
    seed: int,
    augmentation: Augmentation | None = None,
    moved: float = 0.0,
    look: Callable[[], dict[str, Any]] = dict,
    before: Callable[[int], None] = lambda step: None,
    after: Callable[[int], None] = lambda step: None,
) -> Numbers:
    """Train by cross-entropy, and tell the loss of every epoch and what was seen between epochs.

    Args:
        model: the network, in the precision that it is trained in.
        optimizer: any; its learning rates are multiplied with the schedule's.
        split: the data.
        schedule: how long.
        seed: of the order of the examples.
        augmentation: of the images.
        moved: what is added to every input.
        look: called before the first and after every epoch.
        before: called before the optimizer's step, with its number, when gradients and learning rates are set.
        after: called after it.

    Returns:
        "loss", the mean of every epoch's batches, up to the first that is not finite; and what `look` told, one more.

    >>> from gyroscope_lab.models.mlp import mlp
    >>> model = mlp(0, depth=2, width=8, inputs=64)
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> found = train(model, sgd, Source("digits").load(), Schedule(epochs=3), seed=0, look=lambda: {"one": 1})
    >>> len(found["loss"]), found["one"], found["loss"][2] < found["loss"][0]
    (3, [1, 1, 1, 1], True)
    """
    like = next(model.parameters())
    feed = Feed(split, batch=schedule.batch, augmentation=augmentation, seed=seed, device=like.device)
    rates = [group["lr"] for group in optimizer.param_groups]
    losses: list[float] = []
    seen = [look()]
    step = 0
    for epoch in range(schedule.epochs):
        model.train()
        feed.shuffle()
        total, count = torch.zeros((), dtype=torch.float64, device=like.device), 0
        for size in schedule.batches(len(split.y_train)):
            x, y = feed.take(size)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x.to(like.dtype) + moved), y)
            loss.backward()  # type: ignore[no-untyped-call]
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * schedule.multiplier(epoch)
            before(step)
            optimizer.step()
            after(step)
            total, count, step = total + size * loss.detach(), count + size, step + 1
        losses.append(float(total) / count)
        if not isfinite(losses[-1]):
            break
        seen.append(look())
    return {"loss": losses, **{name: [one[name] for one in seen] for name in seen[0]}}


@torch.no_grad()
def accuracy(model: nn.Module, split: Split, *, part: str = "test", moved: float = 0.0) -> float:
    """The share of examples, in percent, that a network in evaluation mode gets right; it is left in that mode.

    >>> from gyroscope_lab.models.mlp import mlp
    >>> 0 <= accuracy(mlp(0, depth=2, width=8, inputs=64), Source("digits").load()) <= 100
    True
    """
    model.eval()
    x, y = (split.x_test, split.y_test) if part == "test" else (split.x_train, split.y_train)
    like = next(model.parameters())
    right = [
        int((model(split.inputs(some).to(like) + moved).argmax(1) == labels).sum())
        for some, labels in zip(torch.split(x, 1000), torch.split(y, 1000), strict=True)
    ]
    return 100 * sum(right) / len(y)


def until(losses: list[float | None], bound: float) -> int | None:
    """The number of the first epoch, from 1, whose loss is at most `bound`; None if there is none.

    >>> until([2.0, 0.5, 0.4], 0.5), until([2.0, None], 0.5)
    (2, None)
    """
    return next((i for i, loss in enumerate(losses, 1) if loss is not None and loss <= bound), None)


class LossCurve:
    """What is read off a loss by epoch; the curve and the bound are those of dataclasses that are one."""

    loss: npt.NDArray[np.float64]
    bound: float

    @property
    def area(self) -> float:
        """The mean loss over training: low where it falls early and far."""
        return float(self.loss.mean())

    @property
    def epochs(self) -> int | None:
        """Epochs until it is learned."""
        return until(self.loss.tolist(), self.bound)


def mean_curve(curves: list[list[float | None]], length: int) -> npt.NDArray[np.float64]:
    """The mean over seeds, epoch by epoch; inf from where one of them diverged.

    >>> mean_curve([[1.0, 2.0], [3.0, None]], 3).tolist()
    [2.0, inf, inf]
    """
    rows = [[np.inf if one is None else one for one in curve] + [np.inf] * (length - len(curve)) for curve in curves]
    return np.asarray(np.mean(rows, axis=0))


def norms(weights: list[Tensor]) -> list[float]:
    """‖w‖ of each tensor.

    >>> norms([torch.tensor([3.0, 4.0])])
    [5.0]
    """
    return [float(weight.detach().norm()) for weight in weights]


@dataclass(frozen=True)
class Gain:
    """A mean difference, and its standard error over seeds; None of one seed.

    >>> Gain(1.0, 0.25).told, Gain(1.0, 0.25).above, Gain(-1.0, 0.25).above, Gain(0.4, 0.25).above
    ('+1.00 ± 0.25', True, False, None)
    """

    mean: float
    error: float | None

    @property
    def told(self) -> str:
        """In words."""
        return f"{self.mean:+.2f}" + ("" if self.error is None else f" ± {self.error:.2f}")

    @property
    def above(self) -> bool | None:
        """Whether it is above zero; None within two standard errors, and of one seed."""
        if self.error is None or abs(self.mean) <= 2 * self.error:
            return None
        return self.mean > 0

    @property
    def none(self) -> bool | None:
        """Whether it is zero within two standard errors; None of one seed."""
        return None if self.error is None else abs(self.mean) <= 2 * self.error


def gain(these: Sequence[float], those: Sequence[float]) -> Gain:
    """By how much these are above those, seed by seed.

    >>> gain([2.0, 4.0], [1.0, 1.0])
    Gain(mean=2.0, error=1.0)
    """
    differences = np.array(these) - np.array(those)
    error = float(differences.std(ddof=1) / sqrt(len(differences))) if len(differences) > 1 else None
    return Gain(float(differences.mean()), error)


def reproduced(whole: Gain, part: Gain, *, share: float) -> bool | None:
    """Whether a share of a gain comes by another way too; None where either may be chance.

    >>> reproduced(Gain(1.0, 0.1), Gain(0.9, 0.1), share=0.5), reproduced(Gain(1.0, 0.1), Gain(0.1, 0.1), share=0.5)
    (True, False)
    >>> reproduced(Gain(1.0, 0.1), Gain(0.9, 0.5), share=0.5) is None
    True
    """
    if not whole.above or part.error is None:
        return None
    if part.above and part.mean >= share * whole.mean:
        return True
    return False if part.mean + 2 * part.error < share * whole.mean else None
