"""Deep perceptrons while they are trained (figures 3, 5, A5 to A7 and A12 of the conditioning paper).

A network of 20 layers of 256 units, with batch normalization ("BN") and without ("Plain"), from weights of
U(±1/√fan_in) ("random") and of N(0, 2/fan_in) ("He"). With h_k = W_k x_{k−1}, λmax(Σx) says how large the inputs of
layer k are, and λmax(Σ∇h) how large the gradients at its outputs. A ReLU halves E[x²] and a random start divides it by
3, so that both lose a factor of 6 a layer in the plain network, and none from He's start. Batch normalization keeps the
inputs as large as they are; the gradients still grow backwards, by π/(π − 1) ≈ 1.47 a layer at the start of a wide
network.

What the paper leaves open is chosen here: all pixels less their mean, divided by their standard deviation; no biases;
normalization without gain and bias, not after the last layer; Adam with its usual ε of 1e-8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from gyroscope_lab.data.source import Source
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.at_hand import at_hand, pixels
from gyroscope_lab.papers.conditioning import perceptron_panels as panels
from gyroscope_lab.papers.conditioning import perceptron_tables as tables
from gyroscope_lab.papers.conditioning import perceptron_verdicts as verdicts_of
from gyroscope_lab.papers.conditioning.perceptron_courses import STARTS, Kind, courses
from gyroscope_lab.papers.study import Report, Study
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.schedule import Schedule
from gyroscope_lab.training.task import Task
from gyroscope_lab.training.trial import Trial

#: How a network is trained: with the gradient of all examples, with that of batches, or by Adam with that of batches.
Way = Literal["gradient", "sgd", "adam"]


@dataclass(frozen=True)
class Plan:
    """What a scale trains.

    Attributes:
        model: the network.
        rates: the learning rates of gradient descent and of SGD.
        adam: those of Adam.
        few: examples of each class where every step takes all of them; None for all there are.
        more: the same where a step takes a batch.
        batch: the size of that.
        iterations: with the gradient of all examples.
        epochs: of SGD.
        adam_epochs: of Adam.
        analyses: how often layers are analysed, about.
    """

    model: str
    rates: tuple[float, ...]
    adam: tuple[float, ...]
    few: int | None
    more: int | None
    batch: int
    iterations: int
    epochs: int
    adam_epochs: int
    analyses: int


_RATES, _ADAM = (0.05, 0.1, 0.5, 1.0), (1e-3, 5e-4, 1e-4)
# How long the paper trained is not in its text.
PLANS = {
    "smoke": Plan("mlp-12x32", (0.1, 0.5), (1e-3,), 20, 20, 50, iterations=30, epochs=8, adam_epochs=20, analyses=4),
    "small": Plan("mlp-20x256", _RATES, _ADAM, 50, 100, 256, iterations=40, epochs=12, adam_epochs=40, analyses=6),
    "full": Plan("mlp-20x256", _RATES, _ADAM, None, None, 1024, iterations=500, epochs=20, adam_epochs=20, analyses=25),
}
_MNIST = 60_000


def task_of(lab: Lab, way: Way, kind: Kind) -> Task:
    """A network and how long it is trained on what; with the gradient of all examples an epoch is one step.

    >>> from gyroscope_lab.training.archive import Archive
    >>> task = task_of(Lab(Archive("runs"), "full"), "gradient", Kind("he_normal", normalized=True))
    >>> task.name, task.schedule.batch, task.schedule.epochs
    ('mnist-mlp-20x256', 60000, 500)
    """
    plan = PLANS[lab.scale]
    per_class = plan.few if way == "gradient" else plan.more
    source = at_hand(lab, Source("mnist", per_class=per_class))
    if source.name == "digits":
        source = replace(source, per_class=per_class)
    epochs = {"gradient": plan.iterations, "sgd": plan.epochs, "adam": plan.adam_epochs}[way]
    schedule = Schedule(epochs, batch=_examples(source) if way == "gradient" else plan.batch, cuts=())
    options: tuple[tuple[str, Any], ...] = (("batch_norm", kind.normalized), ("init", kind.init), *pixels(source))
    name = f"{source.name}-{plan.model}"
    return Task(name, source, plan.model, options=options, schedule=schedule, precision="float32")


def _examples(source: Source) -> int:
    return _MNIST if source.per_class is None else 10 * source.per_class


def trials(lab: Lab, way: Way, starts: Sequence[str] = tuple(STARTS)) -> dict[Kind, list[Trial]]:
    """Every network at every learning rate.

    >>> from gyroscope_lab.training.archive import Archive
    >>> its = trials(Lab(Archive("runs"), "full"), "adam", ["uniform"])
    >>> [(kind.name, kind.start, [trial.recipe.rate for trial in some]) for kind, some in its.items()]
    [('Plain', 'random', [0.001, 0.0005, 0.0001]), ('BN', 'random', [0.001, 0.0005, 0.0001])]
    """
    plan = PLANS[lab.scale]
    optimizer, called, eps = ("adam", "Adam", 1e-8) if way == "adam" else ("sgd", "SGD", None)
    found: dict[Kind, list[Trial]] = {}
    for kind in (Kind(init, normalized) for init in starts for normalized in (False, True)):
        task = task_of(lab, way, kind)
        steps = task.schedule.epochs * task.schedule.steps(_examples(task.source))
        found[kind] = [
            Trial(
                task,
                Recipe(f"{kind.name}, {kind.start} start, {called} {rate:g}", rate, optimizer, eps=eps),
                every=1,  # or the first iteration would not be analysed
                conditions=max(1, steps // plan.analyses),
            )
            for rate in (plan.adam if way == "adam" else plan.rates)
        ]
    return found


def _magnitudes(lab: Lab, way: Way, label: str) -> Report:
    """λmax of both matrices by layer, and the training loss."""
    its = courses(lab, trials(lab, way))
    about = _about(lab, way, label)
    return Report(
        {"figure": panels.magnitudes(its, about), "iterations": panels.over_iterations(its, about)},
        (tables.losses(its, about), tables.factors(its)),
        tuple(verdicts_of.magnitudes(its)),
        {"networks": [one.numbers() | one.magnitudes() for one in its.values()]},
    )


def _conditions(lab: Lab, way: Way, label: str) -> Report:
    """κ_p of both matrices by layer."""
    its = courses(lab, trials(lab, way))
    about = _about(lab, way, label)
    return Report(
        {"figure": panels.conditions(its, about)},
        (tables.kappas(its), tables.losses(its, about)),
        tuple(verdicts_of.conditions(its)),
        {"networks": [one.numbers() | one.conditions() for one in its.values()]},
    )


def _adam(lab: Lab) -> Report:
    """All of it for Adam, from random weights, with what SGD does to the plain network beside it."""
    its = courses(lab, trials(lab, "adam", ["uniform"]))
    beside = courses(lab, _beside_adam(lab))
    sgd = next(iter(beside.values()), None)
    about = _about(lab, "adam", "A7")
    return Report(
        {"figure": panels.all_of_it(its, about), "iterations": panels.over_iterations(its, about)},
        (tables.losses(its, about), tables.factors(its), tables.kappas(its)),
        tuple(verdicts_of.adam(its, sgd)),
        {
            "networks": [one.numbers() | one.magnitudes() | one.conditions() for one in its.values()],
            "sgd": None if sgd is None else sgd.numbers() | sgd.magnitudes(),
        },
    )


def _beside_adam(lab: Lab) -> dict[Kind, list[Trial]]:
    return {kind: its for kind, its in trials(lab, "sgd", ["uniform"]).items() if not kind.normalized}


def _units(lab: Lab) -> Report:
    """Dying and full units by layer, from He's initialization."""
    its = courses(lab, trials(lab, "gradient", ["he_normal"]))
    about = _about(lab, "gradient", "A12")
    return Report(
        {"figure": panels.units(its, about)},
        (tables.units(its), tables.losses(its, about)),
        tuple(verdicts_of.units(its)),
        {"networks": [one.numbers() | one.counts() for one in its.values()]},
    )


def _about(lab: Lab, way: Way, label: str) -> panels.About:
    """What figures and tables say about where their numbers are from."""
    task = task_of(lab, way, Kind("uniform", normalized=False))
    depth, width = task.model.removeprefix("mlp-").split("x")
    ways = {
        "gradient": "full gradient",
        "sgd": f"SGD in batches of {task.schedule.batch:,}",
        "adam": f"Adam in batches of {task.schedule.batch:,}",
    }
    images = f"{_examples(task.source):,} images of {'MNIST' if task.source.name == 'mnist' else 'digits'}"
    setting = f"{depth} layers of {width} units, {images}, {ways[way]}"
    return panels.About(label, setting, "iteration" if way == "gradient" else "epoch")


def _listed(way: Way, starts: Sequence[str] = tuple(STARTS)) -> Callable[[Lab], list[Trial]]:
    return lambda lab: [trial for its in trials(lab, way, starts).values() for trial in its]


def _listed_for_adam(lab: Lab) -> list[Trial]:
    beside = [trial for its in _beside_adam(lab).values() for trial in its]
    return _listed("adam", ["uniform"])(lab) + beside


STUDIES = (
    Study(
        "conditioning/fig3",
        "Figure 3: the magnitude of layer inputs and output gradients of a deep perceptron, and its training loss",
        _listed("gradient"),
        lambda lab: _magnitudes(lab, "gradient", "3"),
    ),
    Study(
        "conditioning/fig5",
        "Figure 5: the condition numbers of layer inputs and output gradients of the same perceptron",
        _listed("gradient"),
        lambda lab: _conditions(lab, "gradient", "5"),
    ),
    Study(
        "conditioning/a5",
        "Figure A5: figure 3 with SGD in batches",
        _listed("sgd"),
        lambda lab: _magnitudes(lab, "sgd", "A5"),
    ),
    Study(
        "conditioning/a6",
        "Figure A6: figure 5 with SGD in batches",
        _listed("sgd"),
        lambda lab: _conditions(lab, "sgd", "A6"),
    ),
    Study("conditioning/a7", "Figure A7: figures 3 and 5 with Adam", _listed_for_adam, _adam),
    Study(
        "conditioning/a12",
        "Figure A12: dying and full neurons of the perceptron of figure 3",
        _listed("gradient", ["he_normal"]),
        _units,
    ),
)
