"""Measurements of a study in trainings of its own, kept next to the laboratory's trials.

The trainings are the laboratory's (`gyroscope_lab.training.training`), with optimizers that the studies register as
recipes: K-FAC, grafts, rates by layer. Their measurements are not part of a trial's result, so the numbers are kept in
separate files, under a fingerprint of everything that they depend on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (the name torch's own documentation uses)
from torch.optim import SGD, Optimizer

from gyroscope.base import write_whole
from gyroscope.control import KFAC, QuasiDiagonal
from gyroscope_lab.data.source import Source
from gyroscope_lab.data.split import Split
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.engine.run_one import loaded, one_thread
from gyroscope_lab.errors import LabError
from gyroscope_lab.models.mlp import mlp
from gyroscope_lab.papers.at_hand import pixels
from gyroscope_lab.papers.study import clean
from gyroscope_lab.training.recipe import Recipe, register
from gyroscope_lab.training.schedule import Schedule
from gyroscope_lab.training.task import Task
from gyroscope_lab.training.training import Training
from gyroscope_lab.training.trial import Trial

Numbers = dict[str, list[Any]]


def device_of(lab: Lab) -> torch.device:
    """Return the GPU at full scale, if there is one; small scales are faster on the CPU.

    >>> from gyroscope_lab.training.archive import Archive
    >>> device_of(Lab(Archive("runs"))).type
    'cpu'
    """
    return torch.device("cuda" if lab.scale == "full" and torch.cuda.is_available() else "cpu")


def dtype_of(lab: Lab) -> torch.dtype:
    """Return float64, and float32 at full scale.

    >>> from gyroscope_lab.training.archive import Archive
    >>> dtype_of(Lab(Archive("runs"))), dtype_of(Lab(Archive("runs"), "full"))
    (torch.float64, torch.float32)
    """
    return torch.float32 if lab.scale == "full" else torch.float64


def split_of(lab: Lab, source: Source) -> Split:
    """Return the data on the device of the scale."""
    return loaded(source, None if lab.data is None else Path(lab.data)).to(device_of(lab))


def kept(lab: Lab, study: str, setting: Any, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of `measure` for a setting, measured once per archive.

    Args:
        lab: the laboratory; with `known` it measures nothing.
        study: the name of the study.
        setting: a dataclass with everything that the outcome depends on.
        measure: the measurement; numbers that are not finite are kept as None.

    >>> import tempfile
    >>> from gyroscope_lab.training.archive import Archive
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     lab = Lab(Archive(folder))
    ...     _ = kept(lab, "example", Schedule(), lambda: {"loss": [0.5]})
    ...     kept(lab, "example", Schedule(), lambda: {"loss": [0.25]})
    {'loss': [0.5]}
    """
    # A schedule's `drawn` is newer than kept measurements; it is left out if 0, so that no fingerprint changes.
    fields = asdict(setting, dict_factory=lambda pairs: dict(pair for pair in pairs if pair != ("drawn", 0)))
    told = json.loads(json.dumps(fields))
    text = json.dumps([study, str(dtype_of(lab)), told], sort_keys=True)
    path = lab.archive.root / "dynamics" / study / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    if path.exists():
        try:
            content = json.loads(path.read_text())
            return dict(content["found"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LabError(f"{path} cannot be read ({error}). Delete it to measure again.") from error
    if lab.known:
        raise LabError(f"A training of {study} is not in {path}. Train it first (leave --known out).")
    with one_thread():
        found = clean(measure())
    write_whole(path, json.dumps({"setting": told, "found": found}, allow_nan=False) + "\n")
    return dict(found)


def training_of(
    lab: Lab, task: Task, recipe: Recipe, *, seed: int, network: nn.Module | None = None, moved: float = 0.0
) -> Training:
    """Return a training of the laboratory that keeps no run, on the device and in the precision of the scale.

    Hooks of its optimizer (`register_step_pre_hook`, `register_step_post_hook`) see every step.

    Args:
        lab: the laboratory.
        task: data, a network and a schedule.
        recipe: the optimizer.
        seed: the seed of the weights and of the order of the examples.
        network: the network to train, in place of the task's own.
        moved: the shift of every input.
    """
    split = split_of(lab, task.source).converted(dtype_of(lab), moved=moved)
    model = task.network(seed) if network is None else network
    return Training(Trial(task, recipe, seed), split, device=device_of(lab), network=model.to(dtype_of(lab)))


def followed(training: Training, look: Callable[[], dict[str, Any]] = dict) -> Numbers:
    """Train to the end, and return the loss of every epoch and the measurements between epochs.

    Args:
        training: a training of `training_of`.
        look: the measurement, called before the first and after every epoch.

    Returns:
        "loss", the mean over the batches of each epoch, up to the first that is not finite; and the values of `look`,
        one entry more.

    >>> from gyroscope_lab.training.archive import Archive
    >>> task = Task("digits", Source("digits"), "mlp-2x8", (("inputs", 64),), Schedule(epochs=3))
    >>> training = training_of(Lab(Archive("runs")), task, Recipe("SGD", 0.1), seed=0)
    >>> found = followed(training, lambda: {"one": 1})
    >>> len(found["loss"]), found["one"], found["loss"][2] < found["loss"][0]
    (3, [1, 1, 1, 1], True)
    """
    seen = [look()]

    def on_epoch(training: Training) -> None:
        if training.ended is None:
            seen.append(look())

    for _ in training.proceed(on_epoch):
        pass
    return {"loss": training.loss, **{name: [one[name] for one in seen] for name in seen[0]}}


def _kfac(recipe: Recipe, model: nn.Module) -> Optimizer:
    return KFAC(_sgd(recipe, model), model, F.cross_entropy, **dict(recipe.options))


def _quasi_diagonal(recipe: Recipe, model: nn.Module) -> Optimizer:
    return QuasiDiagonal(_sgd(recipe, model), model)


def _sgd(recipe: Recipe, model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=recipe.rate, weight_decay=recipe.weight_decay)


# SGD on preconditioned gradients. Weight decay is added without preconditioning, as in equation 22.
register("kfac", _kfac)
register("quasi-diagonal", _quasi_diagonal)


@dataclass(frozen=True)
class Perceptron:
    """The data and the size of a perceptron with biases; plans and settings of its trainings derive from it.

    Attributes:
        source: the data, digits or MNIST.
        depth: the number of layers.
        width: the units of each hidden layer.

    >>> Perceptron(Source("digits"), 3, 16).task("example", Schedule()).model
    'mlp-3x16'
    """

    source: Source
    depth: int
    width: int

    def network(self, seed: int, *, batch_norm: bool) -> nn.Sequential:
        """Return the perceptron, with batch normalization before every ReLU or without."""
        return mlp(
            seed, depth=self.depth, width=self.width, biases=True, batch_norm=batch_norm, init="glorot_uniform",
            **dict(pixels(self.source)),
        )  # fmt: skip

    def task(self, name: str, schedule: Schedule) -> Task:
        """Return the task of training it."""
        return Task(name, self.source, f"mlp-{self.depth}x{self.width}", schedule=schedule)


def mean_curve(curves: list[list[float | None]], length: int) -> npt.NDArray[np.float64]:
    """The mean over seeds, epoch by epoch; inf from the epoch in which one of them diverged.

    >>> mean_curve([[1.0, 2.0], [3.0, None]], 3).tolist()
    [2.0, inf, inf]
    """
    rows = [[np.inf if one is None else one for one in curve] + [np.inf] * (length - len(curve)) for curve in curves]
    return np.asarray(np.mean(rows, axis=0))


@dataclass(frozen=True)
class Arm:
    """Trainings that differ in their seed alone.

    Attributes:
        name: the method, or the kind of network.
        rate: the learning rate.
        runs: what was kept of each seed; "loss" has the loss of every epoch.

    >>> arm = Arm("SGD", 0.1, [{"loss": [3.0, 1.0], "test": 90.0}, {"loss": [1.0, 0.5], "test": None}])
    >>> arm.loss.tolist(), arm.area, arm.all("test"), arm.epochs(0.75), arm.learned_in(0.5)
    ([2.0, 0.75], 1.375, [90.0, nan], 2, 'more than all')
    """

    name: str
    rate: float
    runs: Sequence[dict[str, Any]]

    def all(self, of: str) -> list[float]:
        """A number of every seed; NaN where it was not finite."""
        return [nan if run[of] is None else float(run[of]) for run in self.runs]

    def mean(self, of: str) -> float:
        """The mean of a number over seeds."""
        return float(np.mean(self.all(of)))

    @property
    def loss(self) -> npt.NDArray[np.float64]:
        """The loss of every epoch, the mean over seeds; inf from the epoch in which one of them diverged."""
        curves = [run["loss"] for run in self.runs]
        return mean_curve(curves, max(map(len, curves)))

    @property
    def area(self) -> float:
        """The mean loss over training: low if it falls early and far."""
        return float(self.loss.mean())

    @property
    def areas(self) -> npt.NDArray[np.float64]:
        """The mean loss over training, seed by seed; NaN for one that diverged."""
        return np.array([np.mean(np.array(run["loss"], dtype=np.float64)) for run in self.runs])

    @property
    def logs(self) -> npt.NDArray[np.float64]:
        """ln of the mean loss over training, seed by seed; NaN for one that diverged."""
        return np.log(self.areas)

    def epochs(self, bound: float) -> int | None:
        """The number of epochs until the loss is at most `bound`; None if it never is."""
        return next((epoch for epoch, loss in enumerate(self.loss, 1) if loss <= bound), None)

    def learned_in(self, bound: float) -> str:
        """The number of epochs as text, or 'more than all'."""
        return str(self.epochs(bound) or "more than all")


def best(arms: Iterable[Arm]) -> Arm:
    """Return the arm with the lowest mean loss."""
    return min(arms, key=lambda arm: arm.area)
