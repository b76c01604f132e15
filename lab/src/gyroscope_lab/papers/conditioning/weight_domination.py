"""Weight domination simulated (figures 4 and A11 of the conditioning paper).

A layer is in a state of weight domination where σmax(∂L/∂W) ≪ σmax(W) (definition 1): its weights hardly move. It is
simulated by not moving them at all. A legend such as "01111" has a digit for every part of the network, the first for
the first one, and 0 where its weights get no updates; what normalizes and what classifies is trained as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from gyroscope_lab.data.source import Source
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.errors import LabError
from gyroscope_lab.papers.at_hand import at_hand, channels, examples, pixels
from gyroscope_lab.papers.cells import Cell, cells
from gyroscope_lab.papers.conditioning.weight_domination_figure import draw
from gyroscope_lab.papers.conditioning.weight_domination_tables import at_best_rate, by_rate, final, verdicts
from gyroscope_lab.papers.study import Report, Study
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.schedule import Schedule
from gyroscope_lab.training.task import Task
from gyroscope_lab.training.trial import Trial

# One part blocked, and more and more of the first ones. Which legends the paper's figures have is not in its text.
_FIVE = ("11111", "01111", "10111", "11011", "11101", "11110", "00111", "00011", "00001")
_SOME = ("11111", "01111", "11011", "00001")
_THREE = ("111", "011", "110", "001")
# A digit of figure A11 is three convolutions.
_TOGETHER = 3
# The weights are looked at seldom: the loss is what the figures show.
_EVERY = 100


@dataclass(frozen=True)
class Plan:
    """What a scale trains: which network, what of it is blocked, at which rates, and how long."""

    model: str
    codes: tuple[str, ...]
    rates: tuple[float, ...]
    epochs: int
    passes: int = 1
    per_class: int | None = None


#: Figure 4: full gradient descent and the best of four rates, as for the networks of the paper's figure 3.
PERCEPTRONS = {
    "smoke": Plan("mlp-5x32", _SOME, (0.1, 0.5), epochs=15, passes=2),
    "small": Plan("mlp-5x256", _FIVE, (0.1, 0.5, 1.0), epochs=60, passes=2, per_class=100),
    "full": Plan("mlp-5x256", _FIVE, (0.05, 0.1, 0.5, 1.0), epochs=200, passes=5),
}
#: Figure A11: 15 convolutions and a classifier. SGD as for the paper's other networks on CIFAR-10, without decay.
CONVOLUTIONS = {
    "smoke": Plan("vgg-10", _THREE, (0.1,), epochs=5),
    "small": Plan("vgg-16", _FIVE, (0.1,), epochs=60),
    "full": Plan("vgg-16", _FIVE, (0.1,), epochs=160),
}


def blocked(code: str, *, together: int = 1) -> tuple[int, ...]:
    """The layers, counted from 0, that the zeros of a legend stand for; a digit is so many layers `together`.

    >>> blocked("01011"), blocked("101", together=3)
    ((0, 2), (3, 4, 5))
    """
    return tuple(
        together * place + layer for place, digit in enumerate(code) if digit == "0" for layer in range(together)
    )


def perceptron(lab: Lab) -> Task:
    """The task of figure 4: a step takes all examples.

    >>> from gyroscope_lab.training.archive import Archive
    >>> task = perceptron(Lab(Archive("runs"), "full"))
    >>> task.model, task.schedule.batch, task.schedule.epochs * task.schedule.passes
    ('mlp-5x256', 60000, 1000)
    """
    plan = PERCEPTRONS[lab.scale]
    source = at_hand(lab, Source("mnist", per_class=plan.per_class))
    return Task(
        f"{source.name}-{plan.model}",
        source,
        plan.model,
        options=(("batch_norm", True), *pixels(source)),
        schedule=Schedule(plan.epochs, batch=examples(source), cuts=(), passes=plan.passes),
        precision="float32",
    )


def convolutions(lab: Lab) -> Task:
    """The task of figure A11.

    >>> from gyroscope_lab.training.archive import Archive
    >>> convolutions(Lab(Archive("runs"), "full")).model
    'vgg-16'
    """
    plan, task = CONVOLUTIONS[lab.scale], lab.task("c10-deep")
    options = (("batch_norm", True), *channels(task.source))
    named = replace(task, name=f"{task.source.name}-{plan.model}", model=plan.model, options=options)
    return named.lasting(plan.epochs)


def perceptron_trials(lab: Lab) -> dict[str, list[Trial]]:
    """By legend, a training for every rate and seed."""
    plan, task = PERCEPTRONS[lab.scale], perceptron(lab)
    return {
        code: [
            Trial(task, Recipe(f"{code}, SGD {rate:g}", rate, frozen=blocked(code)), seed, every=_EVERY)
            for rate in plan.rates
            for seed in lab.seeds
        ]
        for code in plan.codes
    }


def convolutional_trials(lab: Lab) -> dict[str, list[Trial]]:
    """The same of the convolutional network; its classifier, which no digit stands for, is always trained."""
    plan, task = CONVOLUTIONS[lab.scale], convolutions(lab)
    return {
        code: [
            Trial(
                task,
                Recipe(f"{code}, SGD {rate:g}", rate, momentum=0.9, nesterov=True,
                       frozen=blocked(code, together=_TOGETHER)),
                seed, every=_EVERY,
            )
            for rate in plan.rates
            for seed in lab.seeds
        ]
        for code in plan.codes
    }  # fmt: skip


def best(its: list[Cell]) -> Cell:
    """The cell of the rate with the lowest training loss in the end; a loss that is no number is the worst."""
    return min(its, key=final)


def conclude(lab: Lab, by_code: dict[str, list[Trial]], *, heading: str, of_steps: bool) -> Report:
    """Loss by loss, what is blocked beside what is not."""
    every = {code: its for code, trials in by_code.items() if (its := cells(lab, trials))}
    found = {code: best(its) for code, its in every.items()}
    whole = next(iter(by_code))
    if whole not in found or len(found) < 2:
        raise LabError(f"{heading} compares networks in part blocked with one that is not; train {whole} and others")
    task = found[whole].task
    return Report(
        {"figure": draw(found, task, heading=f"{heading} ({task.name})", of_steps=of_steps)},
        (at_best_rate(found, task, whole), *by_rate(every, task)),
        verdicts(found, every, whole),
        {code: [{"rate": one.recipe.rate, "best": one is found[code], "frozen": list(one.recipe.frozen),
                 "final_loss": float(one.loss[-1])} | one.numbers() for one in its]
         for code, its in every.items()},
    )  # fmt: skip


def _flat(grid: Callable[[Lab], dict[str, list[Trial]]]) -> Callable[[Lab], list[Trial]]:
    return lambda lab: [trial for its in grid(lab).values() for trial in its]


def figure4(lab: Lab) -> Report:
    """Training losses of the perceptron."""
    return conclude(lab, perceptron_trials(lab), heading="Layers without updates", of_steps=True)


def figure_a11(lab: Lab) -> Report:
    """Training losses of the convolutional network."""
    return conclude(lab, convolutional_trials(lab), heading="Convolutions without updates", of_steps=False)


STUDIES = (
    Study(
        "conditioning/fig4",
        "Figure 4: weight domination, simulated by blocking the updates of some layers of a perceptron",
        _flat(perceptron_trials),
        figure4,
    ),
    Study(
        "conditioning/a11",
        "Figure A11: weight domination, simulated by blocking the updates of some convolutions",
        _flat(convolutional_trials),
        figure_a11,
    ),
)
