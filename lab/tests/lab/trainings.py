"""Small trainings, interrupted trainings, and the contents of their folders, for several tests."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import gyroscope
from gyroscope_lab.data.source import Source
from gyroscope_lab.data.text import Text
from gyroscope_lab.training.task import Task
from gyroscope_lab.training.tasks import task
from gyroscope_lab.training.training import Training, train

# 90 digits to train on and 10 to validate on: batches of 32, 32 and 26.
HELD = replace(task("digits").lasting(3), source=Source("digits", validation=0.1, per_class=10), tests="best")
HELD = replace(HELD, schedule=replace(HELD.schedule, cuts=(0.4,)))
# A network that drops activations at random.
DROPOUT = replace(HELD, name="wrn", model="wrn-10-1", options=(("channels", 1),))

# 63 pieces of ten characters of eight kinds, which are easy to guess; and a transformer that drops some at random.
TEXT = Text("made", "abcdefgh", torch.randint(0, 8, (700,), generator=torch.Generator().manual_seed(1)).sort()[0])
OPTIONS = (("vocab", 8), ("context", 10), ("width", 8), ("depth", 1), ("heads", 2), ("dropout", 0.1))
WRITES = Task("text", HELD.source, "gpt-small", options=OPTIONS, schedule=replace(HELD.schedule, epochs=2))


# The packages of optimizers that torch does not have.
PACKAGES = {"schedule-free": "schedulefree", "prodigy": "prodigyopt"}


def present(recipe):
    """Skip the test if the package of a recipe's optimizer is not installed."""
    if recipe.optimizer in PACKAGES:
        pytest.importorskip(PACKAGES[recipe.optimizer])


class StoppedError(Exception):
    """An error that interrupts a training."""


def stopping(epoch):
    def stop(training):
        if training.epoch == epoch:
            raise StoppedError

    return stop


def interrupted(trial, split, folder, *, at, **options):
    """Train up to an epoch, and continue in a second training, with another random state."""
    try:
        train(trial, split, folder=folder, save_every=0.0, on_epoch=stopping(at), **options)
    except StoppedError:
        torch.manual_seed(1234)
    return train(trial, split, folder=folder, save_every=0.0, **options)


def stepped(trial, split, **options):
    """Return the training after its end."""
    training = Training(trial, split, **options)
    for _ in training.proceed():
        pass
    return training


def recorded(folder):
    """The steps of a run, and its curves and numbers by name."""
    with gyroscope.load(folder) as run:
        curves = {name: run.series(name) for name in run.quantities}
        numbers = {name: (one.steps.tolist(), one.values.tolist()) for name, one in run.scalars.items()}
        return run.steps.tolist(), curves, numbers


def equal_curves(one, other):
    return one.shape == other.shape and np.array_equal(one, other, equal_nan=True)


def equal_tensors(one, other):
    """Return whether two nested dicts and lists hold the same numbers, bit for bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal_tensors(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal_tensors, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    return one == other
