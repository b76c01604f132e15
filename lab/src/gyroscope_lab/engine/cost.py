"""Estimated costs of trials before they are run, for the choice of a scale."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from gyroscope_lab import models
from gyroscope_lab.training.task import Task
from gyroscope_lab.training.tasks import TASKS
from gyroscope_lab.training.trial import Trial


class Pace(NamedTuple):
    """The duration of an epoch of a task, or of a whole trial, and whether it was measured or estimated."""

    seconds: float
    measured: bool


#: Seconds per epoch of each task: for the digits on one core of a CPU, for all others each trial's share of an H200
#: that eight trials share. Unmeasured ones follow from two measured tasks: 22.7 µs per layer and step, and 3.6 ms per
#: 10¹² operations of the network, forward and backward; for the digits, from the times of similar tasks.
PACES: dict[str, Pace] = {
    "digits": Pace(0.045, measured=True),
    "digits-resnet": Pace(0.13, measured=False),
    "digits-deep": Pace(0.13, measured=False),
    "digits-mlp": Pace(0.003, measured=False),
    "digits-one-layer": Pace(0.0045, measured=False),
    "c10-cnn1": Pace(0.40, measured=True),
    "c100-resnet": Pace(0.34, measured=True),
    "c10-cnn1-light": Pace(0.13, measured=False),
    "tiny-cnn": Pace(0.70, measured=False),
    "c10-cnn2": Pace(0.42, measured=False),
    "c100-wrn": Pace(5.3, measured=False),
    "c10-resnet110": Pace(1.1, measured=False),
    "c10-deep": Pace(0.61, measured=True),
    "c100-deep": Pace(0.61, measured=False),
    "mnist-mlp": Pace(0.01, measured=False),
    "mnist-one-layer": Pace(0.005, measured=False),
}


# Seconds per layer and step on an H200. Graph: eight ResNet-56 side by side, and perceptrons as in the 100 kept
# trainings of mnist-one-layer. Eager: a ResNet-56 whose kernels are launched one by one, as with optimizers that cannot
# be captured (benchmarks/results/population_cuda.json).
_LAYER_ON_GPU, _PERCEPTRON_LAYER_ON_GPU, _EAGER_LAYER_ON_GPU = 2.8e-5, 2.3e-5, 5e-4
# Seconds per layer and step on one core of a CPU: a ResNet-20 and ImageNet's ResNets (18 and 50 layers, on
# digits).
_LAYER_ON_CPU, _IMAGENET_LAYER_ON_CPU = 8e-4, 6e-3
# Seconds per operation of a perceptron, which has 6 W² per layer and example: in float32 on an H200, at two thirds of
# its peak; and on one core of a CPU, for 5 to 100 layers of 256 units in batches of 50 to 500, accurate within a factor
# of 1.5.
_OPERATION_ON_GPU, _OPERATION_ON_CPU = 2.5e-14, 1.25e-11
# Seconds per layer and analysis of its conditioning: a ResNet-110 on an H200, minus those of a gradient
# (benchmarks/results/conditioning_cost_cuda.json); and on one core of a CPU, the time of trials with analyses minus
# that of trials without. Convolutions of few channels and perceptrons of 32 units took 0.8 to 1.8 ms there, perceptrons
# of 256 units 13 to 16 ms (5 under Adam), because eigenvalues take W³.
_ANALYSIS_ON_GPU, _ANALYSIS_ON_CPU, _CUBE_ON_CPU = 1.7e-3, 1.2e-3, 7e-10
# Seconds per operation of a transformer or LSTM on one core of a CPU (a GPT of 3 blocks of width 64), and on an H200 in
# bf16 (one of 6 blocks of width 384, four side by side). Its weights per block and squared width.
_SEQUENCE_ON_CPU, _SEQUENCE_ON_GPU = 2.6e-11, 6e-15
# Seconds per weight matrix of a block and captured step: GPTs of 4 and 8 blocks of width 128, ten side by side.
_SEQUENCE_LAYER_ON_GPU = 1.2e-4
_SEQUENCE_WEIGHTS = {"gpt-small": 12, "vit-small": 12, "lstm-small": 8}
# Seconds of the shortest kept trainings on an H200 shared by eight, start and end included.
_LEAST_ON_GPU = 1.0
_EXAMPLES = {"digits": 200, "mnist": 60_000, "cifar-10": 50_000, "cifar-100": 50_000, "tiny-imagenet": 100_000}


class Cost(NamedTuple):
    """The cost of several trials, and of other work.

    Attributes:
        trials: the number of trials, equal ones counted once.
        seconds: the time they take, one after another on one core or sharing a GPU; None if a task has no pace.
        measured: True if the time follows from measured paces.
    """

    trials: int
    seconds: float | None
    measured: bool

    @property
    def words(self) -> str:
        """The time in words, with ≈ if it is estimated.

        >>> Cost(2, 7200.0, measured=True).words, Cost(1, 54.0, measured=False).words, Cost(1, None, False).words
        ('2.0 h', '≈ 54 s', '?')
        """
        if self.seconds is None:
            return "?"
        return ("" if self.measured else "≈ ") + lasting(self.seconds)


def cost(trials: Sequence[Trial], *, beside: float = 0.0) -> Cost:
    """Return the cost of trials if none ends early and none has a result yet, plus `beside` measured seconds.

    >>> from gyroscope_lab.training.recipe import Recipe
    >>> from gyroscope_lab.training.tasks import task
    >>> cost([Trial(task("c10-cnn1"), Recipe("SGD", 0.1), seed) for seed in (0, 1, 1)])
    Cost(trials=2, seconds=80.0, measured=True)
    """
    each = {trial.key: trial for one in trials for trial in one.lineage}.values()
    known = [one for one in map(expected, each) if one is not None]
    seconds = beside + sum(one.seconds for one in known) if len(known) == len(each) else None
    return Cost(len(each), seconds, all(one.measured for one in known))


def expected(trial: Trial) -> Pace | None:
    """Return the seconds of a trial: its epochs, and the analyses of its layers; None if unknown.

    On a GPU, optimizers that cannot be captured run eagerly, which takes longer per step.

    >>> from dataclasses import replace
    >>> from gyroscope_lab.training.recipe import Recipe
    >>> trial = Trial(TASKS["digits-deep"].lasting(10), Recipe("SGD", 0.1))
    >>> [round(expected(one).seconds, 2) for one in (trial, replace(trial, conditions=10))]
    [1.3, 1.44]
    """
    epochs, size = trial.schedule.epochs, _size(trial.task)
    its = pace(trial.task)
    if its is None or (trial.conditions is not None and size is None):
        return None
    on_gpu = _on_gpu(trial.task)
    seconds, measured = epochs * its.seconds, its.measured
    if on_gpu and trial.task.model in _SEQUENCE_WEIGHTS and trial.eager:
        layers, steps = _sequence_layers(trial.task), trial.schedule.drawn or _steps(trial.task) or 0
        seconds += epochs * layers * steps * (_EAGER_LAYER_ON_GPU - _SEQUENCE_LAYER_ON_GPU)
    elif on_gpu and size is not None and trial.eager:
        layer = _PERCEPTRON_LAYER_ON_GPU if size.width else _LAYER_ON_GPU
        seconds += epochs * size.layers * size.steps * (_EAGER_LAYER_ON_GPU - layer)
        measured = False
    if trial.conditions is not None and size is not None:
        analyses = ceil(epochs * size.steps / trial.conditions)
        on_cpu = _ANALYSIS_ON_CPU + _CUBE_ON_CPU * size.width**3
        seconds += analyses * size.layers * (_ANALYSIS_ON_GPU if on_gpu else on_cpu)
        measured = False
    return Pace(max(seconds, _LEAST_ON_GPU) if on_gpu else seconds, measured)


def pace(task: Task) -> Pace | None:
    """Return the seconds per epoch of a task, None if unknown.

    They are those of a known task with the same data, network and number of steps. Otherwise they follow from the size
    of the network, or from the number of steps if its name does not contain the size.

    >>> from dataclasses import replace
    >>> pace(replace(TASKS["c10-cnn1"], name="c10-cnn1, twice as long").lasting(200))
    Pace(seconds=0.4, measured=True)
    >>> deep = pace(replace(TASKS["c10-deep"], name="deeper", model="resnet-1202"))
    >>> round(deep.seconds), deep.measured
    (13, False)
    """
    if task.model in _SEQUENCE_WEIGHTS:
        return _of_sequences(task)
    alike = [known for known in TASKS.values() if (known.source.name, known.model) == (task.source.name, task.model)]
    known = next((one for one in alike if one.name == task.name), alike[0] if alike else None)
    if known is None:
        return _from_its_size(task)
    steps, its_steps = _steps(task), _steps(known)
    if steps is None or steps == its_steps:
        return PACES.get(known.name)
    ratio = steps / (its_steps or steps)
    scaled = PACES.get(known.name)
    return _from_its_size(task) or (None if scaled is None else Pace(ratio * scaled.seconds, measured=False))


def _on_gpu(task: Task) -> bool:
    """Return whether a task is meant for a GPU: not the embedded data, nor the beginning of a text."""
    return task.source.name not in ("digits", "made-text") and task.source.characters is None


def _of_sequences(task: Task) -> Pace | None:
    """Return the pace of a transformer or LSTM from its operations, six per weight and token, and its layers."""
    size = models.defaults(task.model) | dict(task.options)
    steps = task.schedule.drawn or _steps(task)
    if steps is None:
        return None
    tokens = (size["side"] // size["patch"]) ** 2 if task.model == "vit-small" else task.source.context
    weights = _SEQUENCE_WEIGHTS[task.model] * size["depth"] * size["width"] ** 2
    operations = 6 * weights * tokens * task.schedule.batch * steps
    if not _on_gpu(task):
        return Pace(operations * _SEQUENCE_ON_CPU, measured=False)
    layer = _sequence_layers(task) * _SEQUENCE_LAYER_ON_GPU
    return Pace(operations * _SEQUENCE_ON_GPU + layer * steps, measured=False)


def _sequence_layers(task: Task) -> int:
    """Return the number of weight matrices in the blocks of a transformer, or of their likes in an LSTM."""
    depth: int = (models.defaults(task.model) | dict(task.options))["depth"]
    return 4 * depth


class _Size(NamedTuple):
    """Layers of a network, units per layer (0 if its name does not contain them), examples and steps per epoch."""

    layers: int
    width: int
    examples: int
    steps: int


def _size(task: Task) -> _Size | None:
    """Return the size; names of networks of any depth contain the layers, and those of perceptrons the units."""
    found = re.search(r"-(\d+)(?:x(\d+))?$", task.model)
    examples, steps = _examples(task), _steps(task)
    if found is None or examples is None or steps is None:
        return None
    return _Size(int(found[1]), int(found[2] or 0), examples * task.schedule.passes, steps)


def _examples(task: Task) -> int | None:
    """The examples that a task trains on, None if unknown."""
    if task.source.per_class is not None:
        return 10 * task.source.per_class
    published = _EXAMPLES.get(task.source.name)
    return None if published is None else round(published * (1 - task.source.validation))


def _steps(task: Task) -> int | None:
    examples = _examples(task)
    return None if examples is None else task.schedule.steps(examples)


def _from_its_size(task: Task) -> Pace | None:
    """Return the pace from the number of layers and steps, and the seconds of each."""
    size = _size(task)
    if size is None:
        return None
    products = 6 * size.width**2 * size.examples
    if task.source.name == "digits":
        layer = _IMAGENET_LAYER_ON_CPU if task.model.startswith("imagenet") else _LAYER_ON_CPU
        operation = _OPERATION_ON_CPU
    else:
        layer, operation = _PERCEPTRON_LAYER_ON_GPU if size.width else _LAYER_ON_GPU, _OPERATION_ON_GPU
    return Pace(size.layers * (layer * size.steps + operation * products), measured=False)


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
