"""Weight domination simulated (figures 4 and A11 of the conditioning paper).

A layer is in a state of weight domination where σmax(∂L/∂W) ≪ σmax(W) (definition 1): its weights hardly move. It is
simulated by not moving them at all. A code such as "01111" has one digit per part of the network, the first part first,
and 0 where its weights get no updates; normalization and classifier are always trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, isfinite
from typing import TYPE_CHECKING

import numpy as np

from gyroscope_lab.data.source import Source
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.errors import LabError
from gyroscope_lab.papers.at_hand import at_hand, channels, examples, pixels
from gyroscope_lab.papers.cells import Cell, all_below, cells
from gyroscope_lab.papers.study import Report, Study, Table, Verdict
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.schedule import Schedule
from gyroscope_lab.training.task import Task
from gyroscope_lab.training.trial import Trial

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# One part blocked, and more and more of the first ones. The paper does not state the codes of its figures.
_FIVE = ("11111", "01111", "10111", "11011", "11101", "11110", "00111", "00011", "00001")
_SOME = ("11111", "01111", "11011", "00001")
_THREE = ("111", "011", "110", "001")
# A digit of figure A11 is three convolutions.
_TOGETHER = 3
# The weights are measured seldom: the figures show the loss.
_EVERY = 100


@dataclass(frozen=True)
class Plan:
    """The trainings of a scale: the network, its blocked parts, the learning rates, and the duration."""

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
    """Return the layers, counted from 0, that the zeros of a code stand for; a digit stands for `together` layers.

    >>> blocked("01011"), blocked("101", together=3)
    ((0, 2), (3, 4, 5))
    """
    return tuple(
        together * place + layer for place, digit in enumerate(code) if digit == "0" for layer in range(together)
    )


def perceptron(lab: Lab) -> Task:
    """Return the task of figure 4: a step takes all examples.

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
    """Return the task of figure A11.

    >>> from gyroscope_lab.training.archive import Archive
    >>> convolutions(Lab(Archive("runs"), "full")).model
    'vgg-16'
    """
    plan, task = CONVOLUTIONS[lab.scale], lab.task("c10-deep")
    options = (("batch_norm", True), *channels(task.source))
    named = replace(task, name=f"{task.source.name}-{plan.model}", model=plan.model, options=options)
    return named.lasting(plan.epochs)


def perceptron_trials(lab: Lab) -> dict[str, list[Trial]]:
    """Return by code the trials of figure 4, one per rate and seed."""
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
    """Return by code the trials of figure A11; the classifier, which no digit stands for, is always trained."""
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
    """Return the cell of the rate with the lowest training loss at the end; nan is the worst."""
    return min(its, key=_final)


def conclude(lab: Lab, by_code: dict[str, list[Trial]], *, heading: str, of_steps: bool) -> Report:
    """Report the losses of networks that are blocked in part, compared with one that is not."""
    every = {code: its for code, trials in by_code.items() if (its := cells(lab, trials))}
    found = {code: best(its) for code, its in every.items()}
    whole = next(iter(by_code))
    if whole not in found or len(found) < 2:
        raise LabError(f"{heading}: the study compares {whole} with networks blocked in part. Train both.")
    task = found[whole].task
    return Report(
        {"figure": _draw(found, task, heading=f"{heading} ({task.name})", of_steps=of_steps)},
        (_at_best_rate(found, task, whole), *_by_rate(every, task)),
        _verdicts(found, every, whole),
        {code: [{"rate": one.recipe.rate, "best": one is found[code], "frozen": list(one.recipe.frozen),
                 "final_loss": float(one.loss[-1])} | one.numbers() for one in its]
         for code, its in every.items()},
    )  # fmt: skip


def _flat(grid: Callable[[Lab], dict[str, list[Trial]]]) -> Callable[[Lab], list[Trial]]:
    return lambda lab: [trial for its in grid(lab).values() for trial in its]


def figure4(lab: Lab) -> Report:
    """Report training losses of the perceptron."""
    return conclude(lab, perceptron_trials(lab), heading="Layers without updates", of_steps=True)


def figure_a11(lab: Lab) -> Report:
    """Report training losses of the convolutional network."""
    return conclude(lab, convolutional_trials(lab), heading="Convolutions without updates", of_steps=False)


def _at_best_rate(found: Mapping[str, Cell], task: Task, whole: str) -> Table:
    """Each network at its best rate, compared with `whole`, in which nothing is blocked."""
    rows = [
        (
            code,
            _says(cell.recipe.frozen),
            f"{cell.recipe.rate:g}",
            f"{cell.loss[-1]:.3g}",
            None,
            float(cell.loss[-1] / found[whole].loss[-1]),
            cell.train,
            cell.test,
        )
        for code, cell in found.items()
    ]
    columns = ("updates", "blocked", "rate", "training loss", "paper", f"times that of {whole}", "train %", "test %")
    return Table(f"{task.name}: at the end, with the rate of the lowest training loss", columns, tuple(rows))


def _by_rate(every: Mapping[str, Sequence[Cell]], task: Task) -> list[Table]:
    """The same at every rate, where there are several: a rate that suits one network may be too high for another."""
    rates = sorted({one.recipe.rate for its in every.values() for one in its})
    if len(rates) < 2:
        return []
    losses = {code: {one.recipe.rate: f"{one.loss[-1]:.3g}" for one in its} for code, its in every.items()}
    rows = tuple((code, *(its.get(rate) for rate in rates)) for code, its in losses.items())
    columns = ("updates", *(f"at {rate:g}" for rate in rates))
    return [Table(f"{task.name}: training loss at the end, by rate", columns, rows)]


def _says(frozen: tuple[int, ...]) -> str:
    numbers = [layer + 1 for layer in frozen]
    if not numbers:
        return "none"
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"layers {numbers[0]} to {numbers[-1]}"
    return f"layer {', '.join(map(str, numbers))}"


def _verdicts(found: Mapping[str, Cell], every: Mapping[str, Sequence[Cell]], whole: str) -> tuple[Verdict, ...]:
    """The verdicts on networks that are blocked in part."""
    others = [cell for code, cell in found.items() if code != whole]
    first, last = np.array([[cell.loss[0], cell.loss[-1]] for cell in others]).T
    falls = int((last < first).sum())
    return (
        Verdict(
            "with weight domination in certain layers the loss can still decrease",
            "it does",
            f"in {falls} of {len(others)}, from {first.mean():.2f} to {last.min():.2g} … {last.max():.2g}",
            falls == len(others),
        ),
        _higher("but performance is degenerated", _final(found[whole]), list(map(_final, others))),
        *_at_equal_rates(every, whole),
        _tested(found[whole], others),
        *_tested_from_the_first(found),
    )


def _higher(says: str, reached: float, losses: Sequence[float]) -> Verdict:
    if not isfinite(reached):
        return Verdict(says, "a higher training loss", "the network without blocked layers diverged", None)
    worse = sum(loss > reached for loss in losses)
    ratios = np.array(losses) / reached
    here = f"of {worse} of {len(losses)}, {ratios.min():.2f} to {ratios.max():.1f} times that without"
    return Verdict(says, "a higher training loss", here, worse == len(losses))


def _at_equal_rates(every: Mapping[str, Sequence[Cell]], whole: str) -> list[Verdict]:
    """The same rate by rate, where there are several: at its best rate rounding may decide."""
    losses = {code: {one.recipe.rate: _final(one) for one in its} for code, its in every.items()}
    if len(losses[whole]) < 2:
        return []
    found = []
    for rate, reached in sorted(losses[whole].items()):
        others = [its[rate] for code, its in losses.items() if code != whole and rate in its]
        if others:
            found.append(_higher(f"but performance is degenerated, all at a rate of {rate:g}", reached, others))
    return found


def _tested(unblocked: Cell, others: Sequence[Cell]) -> Verdict:
    lost = [unblocked.test - cell.test for cell in others]
    worse = sum(points > 0 for points in lost)
    here = f"of {worse} of {len(lost)}, by {min(lost):.1f} to {max(lost):.1f} points"
    holds = all_below([(cell, unblocked) for cell in others], lambda cell: cell.tested)
    return Verdict("but performance is degenerated, on the test set", "no numbers: a lower accuracy", here, holds)


def _tested_from_the_first(found: Mapping[str, Cell]) -> list[Verdict]:
    """The verdict on networks blocked from the first layer on: each further layer costs accuracy."""
    blocked = sorted((code for code in found if "0" not in code.lstrip("0")), reverse=True)
    its = {code: found[code].test for code in blocked}
    if len(its) < 2:
        return []
    return [
        Verdict(
            "and the more so the more layers are blocked, from the first on",
            "no numbers: a lower accuracy",
            ", ".join(f"{code}: {test:.1f} %" for code, test in its.items()),
            all(a > b for a, b in pairwise(its.values())),
        )
    ]


def _final(cell: Cell) -> float:
    """The loss at the end; infinite where it is not finite."""
    value = float(cell.loss[-1])
    return value if isfinite(value) else inf


def _draw(found: Mapping[str, Cell], task: Task, *, heading: str, of_steps: bool) -> Figure:
    """Draw the loss of every cell over epochs, or over steps where every step takes all examples."""
    from matplotlib.figure import Figure

    from gyroscope.figures.drawing import finish

    figure = Figure(figsize=(6.0, 3.8), layout="constrained")
    ax = figure.subplots()
    # An epoch's loss is the mean over its steps, and belongs in their middle.
    width = task.schedule.passes if of_steps else 1
    for number, (code, cell) in enumerate(found.items()):
        times = width * (np.arange(len(cell.loss)) + 0.5)
        color = "black" if "0" not in code else f"C{number - 1}"
        ax.plot(times, cell.loss, color=color, linewidth=1.8 if "0" not in code else 1.2, label=code)
    ax.set_yscale("log")
    finish(ax, xlabel="iteration" if of_steps else "epoch", ylabel="training loss", title=heading)
    ax.legend(title="0: blocked", fontsize=8, title_fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    return figure


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
