"""What trials cost, before they are run: estimates, to choose a scale by."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from gyroscope.lab.task import Task
from gyroscope.lab.tasks import TASKS
from gyroscope.lab.trial import Trial


class Pace(NamedTuple):
    """How long an epoch of a task takes, and whether that was measured or worked out."""

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


# Seconds for a layer and a step: of a ResNet-110 on an H200, and of a ResNet-20 on one core of a CPU.
_LAYER_ON_GPU, _LAYER_ON_CPU = 8e-5, 8e-4
_EXAMPLES = {"digits": 200, "mnist": 60_000, "cifar-10": 50_000, "cifar-100": 50_000}


class Cost(NamedTuple):
    """What trials cost together.

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


def cost(trials: Sequence[Trial]) -> Cost:
    """Return what trials cost, if none of them ends early and none is known.

    >>> from gyroscope.lab.recipe import Recipe
    >>> from gyroscope.lab.tasks import task
    >>> cost([Trial(task("c10-cnn1"), Recipe("SGD", 0.1), seed) for seed in (0, 1, 1)])
    Cost(trials=2, seconds=90.0, measured=True)
    """
    each = {trial.key: trial for one in trials for trial in one.lineage}.values()
    paces = [(pace(trial.task), trial.schedule.epochs) for trial in each]
    known = [(one, epochs) for one, epochs in paces if one is not None]
    seconds = sum(one.seconds * epochs for one, epochs in known) if len(known) == len(paces) else None
    return Cost(len(each), seconds, all(one.measured for one, _ in known))


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


def _from_its_size(task: Task) -> Pace | None:
    """So many layers, steps and seconds for each; the number of layers is in the names of networks of any depth."""
    depth = re.search(r"-(\d+)(x\d+)?$", task.model)
    examples = _EXAMPLES.get(task.source.name)
    if depth is None or examples is None:
        return None
    if task.source.per_class is not None:
        examples = task.source.per_class * 10
    each = _LAYER_ON_CPU if task.source.name == "digits" else _LAYER_ON_GPU
    return Pace(each * int(depth[1]) * task.schedule.steps(examples), measured=False)


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
