"""A laboratory that trains nothing: its results are made up, so that the reports of studies at full scale have
known answers."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from gyroscope.layers.layer import layers
from gyroscope_lab import models
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.result import Result
from gyroscope_lab.training.trial import Trial


@cache
def layer_names(model, options):
    return [layer.name for layer in layers(models.make(model, seed=0, **dict(options)))]


def made(trial, *, test=0.5, train=1.0, accuracy=None, rotation=0.8, uneven=0.0, epochs=None):
    """A result whose layers have turned by `rotation` on average at the end; or `rotation` is a curve.

    The first layer turns by less than that, by the share `uneven`, and the last by more.
    """
    names = layer_names(trial.task.model, trial.task.options)
    epochs = trial.schedule.epochs if epochs is None else epochs
    curve = [rotation * epoch / epochs for epoch in range(epochs + 1)] if isinstance(rotation, float) else rotation
    accuracy = [train] * epochs if accuracy is None else accuracy
    shares = np.linspace(1 - uneven, 1 + uneven, len(names))
    rows = [(value * shares).tolist() for value in curve]
    return Result(train, test, loss=[1.0] * epochs, layers=names, rotation=rows, accuracy=accuracy)


@dataclass(frozen=True)
class MadeLab(Lab):
    """A laboratory with made-up results. Those of several seeds are equal, so their differences are no chance."""

    make: Callable[[Trial], Result] = made
    many: int | None = None

    @property
    def seeds(self):
        return super().seeds if self.many is None else range(self.many)

    def run(self, trials):
        return [self.make(trial) for trial in trials]


@dataclass(frozen=True)
class BriefLab(Lab):
    """A laboratory whose trainings have as many epochs as it is told."""

    epochs: int = 5

    def task(self, name):
        return super().task(name).lasting(self.epochs)


def raw(lab, trial):
    """A trial's result as in the archive's file, read without the archive; the trial is run if necessary."""
    lab.run([trial])
    return json.loads((lab.archive.folder(lab.trial(trial)) / "result.json").read_text())["result"]


def percent(numbers):
    return 100 * numbers["test_accuracy"], 100 * numbers["train_accuracy"]


def printed(numbers):
    """The test accuracy as tables print that of one seed."""
    return f"{100 * numbers['test_accuracy']:.2f}"


def knowing(lab, folder, trials):
    """A laboratory that knows only the results of these trials, and trains nothing."""
    for trial in trials:
        content = {"trial": lab.trial(trial).description, "result": raw(lab, trial)}
        here = Archive(folder).folder(lab.trial(trial))
        here.mkdir(parents=True)
        (here / "result.json").write_text(json.dumps(content))
    return Lab(Archive(folder), lab.scale, known=True)
