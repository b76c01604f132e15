"""What trials cost, before they are run: estimates, to choose a scale by."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from gyroscope.lab.task import Task
from gyroscope.lab.tasks import TASKS
from gyroscope.lab.trial import Trial


class Pace(NamedTuple):
    """How long an epoch of a task takes, or a whole trial, and whether that was measured or worked out."""

    seconds: float
    measured: bool


#: Seconds an epoch of each task: the digits' on one core of a CPU, all others' on an H200 that eight trials share, each
#: trial's share of it. What was not measured there follows from two tasks that were: 27.5 µs for each layer and step,
#: and 3.8 ms for each 10¹² operations of the network, forward and backward; of the digits, from times beside theirs.
PACES: dict[str, Pace] = {
    "digits": Pace(0.045, measured=True),
    "digits-resnet": Pace(0.13, measured=False),
    "digits-deep": Pace(0.13, measured=False),
    "digits-mlp": Pace(0.003, measured=False),
    "digits-one-layer": Pace(0.0045, measured=False),
    "c10-cnn1": Pace(0.45, measured=True),
    "c100-resnet": Pace(0.40, measured=True),
    "c10-cnn1-light": Pace(0.15, measured=False),
    "tiny-cnn": Pace(0.76, measured=False),
    "c10-cnn2": Pace(0.47, measured=False),
    "c100-wrn": Pace(5.6, measured=False),
    "c10-resnet110": Pace(1.3, measured=False),
    "c10-deep": Pace(1.4, measured=False),
    "c100-deep": Pace(1.4, measured=False),
    "mnist-mlp": Pace(0.01, measured=False),
    "mnist-one-layer": Pace(0.005, measured=False),
}


# Seconds for a layer and a step: of a ResNet-110 on an H200, and on one core of a CPU of a ResNet-20 and of ImageNet's
# ResNets (18 and 50 layers, on digits). A perceptron's layer takes its products too, 6 W² operations an example;
# seconds for each of them from 5 to 100 layers of 256 units in batches of 50 to 500, right within 1.5 times.
_LAYER_ON_GPU, _LAYER_ON_CPU, _IMAGENET_LAYER_ON_CPU = 8e-5, 8e-4, 6e-3
_OPERATION_ON_CPU = 1.25e-11
# Seconds for a layer and an analysis of its conditioning: of a ResNet-110 on an H200, less those of a gradient
# (benchmarks/results/conditioning_cost_cuda.json); and on one core of a CPU, what trials took with analyses less what
# they took without. Convolutions of few channels and perceptrons of 32 units took 0.8 to 1.8 ms there, perceptrons of
# 256 units 13 to 16 ms (5 under Adam), for eigenvalues take W³.
_ANALYSIS_ON_GPU, _ANALYSIS_ON_CPU, _CUBE_ON_CPU = 1.7e-3, 1.2e-3, 7e-10
_EXAMPLES = {"digits": 200, "mnist": 60_000, "cifar-10": 50_000, "cifar-100": 50_000}


class Cost(NamedTuple):
    """What trials cost together, with what is done beside them.

    Attributes:
        trials: how many there are, equal ones counted once.
        seconds: how long they take, one after the other on one core or sharing a GPU; None where a task has no pace.
        measured: whether that is from paces that were measured.
    """

    trials: int
    seconds: float | None
    measured: bool

    @property
    def words(self) -> str:
        """The time in words, ≈ before what is worked out.

        >>> Cost(2, 7200.0, measured=True).words, Cost(1, 54.0, measured=False).words, Cost(1, None, False).words
        ('2.0 h', '≈ 54 s', '?')
        """
        if self.seconds is None:
            return "?"
        return ("" if self.measured else "≈ ") + lasting(self.seconds)


def cost(trials: Sequence[Trial], *, beside: float = 0.0) -> Cost:
    """Return what trials cost, if none of them ends early and none is known, and measured seconds beside them.

    >>> from gyroscope.lab.recipe import Recipe
    >>> from gyroscope.lab.tasks import task
    >>> cost([Trial(task("c10-cnn1"), Recipe("SGD", 0.1), seed) for seed in (0, 1, 1)])
    Cost(trials=2, seconds=90.0, measured=True)
    """
    each = {trial.key: trial for one in trials for trial in one.lineage}.values()
    known = [one for one in map(expected, each) if one is not None]
    seconds = beside + sum(one.seconds for one in known) if len(known) == len(each) else None
    return Cost(len(each), seconds, all(one.measured for one in known))


def expected(trial: Trial) -> Pace | None:
    """Return how long a trial takes: its epochs, and the analyses of its layers; None where that is not known.

    >>> from dataclasses import replace
    >>> from gyroscope.lab.recipe import Recipe
    >>> trial = Trial(TASKS["digits-deep"].lasting(10), Recipe("SGD", 0.1))
    >>> [round(expected(one).seconds, 2) for one in (trial, replace(trial, conditions=10))]
    [1.3, 1.44]
    """
    its = pace(trial.task)
    if its is None or trial.conditions is None:
        return None if its is None else Pace(its.seconds * trial.schedule.epochs, its.measured)
    size = _size(trial.task)
    if size is None:
        return None
    analyses = ceil(trial.schedule.epochs * trial.schedule.steps(size.examples) / trial.conditions)
    on_cpu = _ANALYSIS_ON_CPU + _CUBE_ON_CPU * size.width**3
    each = size.layers * (on_cpu if trial.task.source.name == "digits" else _ANALYSIS_ON_GPU)
    return Pace(its.seconds * trial.schedule.epochs + analyses * each, measured=False)


def pace(task: Task) -> Pace | None:
    """Return the pace of a task, or of a known one with the same data and network, or one from its size; or None.

    >>> from dataclasses import replace
    >>> pace(replace(TASKS["c10-cnn1"], name="c10-cnn1, twice as long").lasting(200))
    Pace(seconds=0.45, measured=True)
    >>> deep = pace(replace(TASKS["c10-deep"], name="deeper", model="resnet-1202"))
    >>> round(deep.seconds), deep.measured
    (38, False)
    """
    if task.name in PACES:
        return PACES[task.name]
    alike = (known for known in TASKS.values() if (known.source.name, known.model) == (task.source.name, task.model))
    return next((PACES[known.name] for known in alike if known.name in PACES), _from_its_size(task))


class _Size(NamedTuple):
    """How many layers a network has, how many units each (0 where its name does not say), and examples to train on."""

    layers: int
    width: int
    examples: int


def _size(task: Task) -> _Size | None:
    """The number of layers is in the names of networks of any depth, and that of units in those of perceptrons."""
    found = re.search(r"-(\d+)(?:x(\d+))?$", task.model)
    examples = _EXAMPLES.get(task.source.name)
    if found is None or examples is None:
        return None
    per_class = task.source.per_class
    return _Size(int(found[1]), int(found[2] or 0), examples if per_class is None else 10 * per_class)


def _from_its_size(task: Task) -> Pace | None:
    """So many layers, steps and seconds for each."""
    size = _size(task)
    if size is None:
        return None
    steps = task.schedule.steps(size.examples)
    if task.source.name != "digits":
        return Pace(_LAYER_ON_GPU * size.layers * steps, measured=False)
    layer = _IMAGENET_LAYER_ON_CPU if task.model.startswith("imagenet") else _LAYER_ON_CPU
    products = 6 * size.width**2 * size.examples * task.schedule.passes
    return Pace(size.layers * (layer * steps + _OPERATION_ON_CPU * products), measured=False)


def lasting(seconds: float) -> str:
    """A time in words.

    >>> [lasting(seconds) for seconds in (0.4, 7.0, 59.6, 150.0, 5400.0, 300_000.0)]
    ['0.4 s', '7.0 s', '60 s', '2.5 min', '1.5 h', '3.5 days']
    """
    for unit, size in (("days", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= (2 if unit == "days" else 1) * size:
            count = seconds / size
            return f"{count:.0f} {unit}" if count >= 10 else f"{count:.1f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 9.95 else f"{seconds:.1f} s"
