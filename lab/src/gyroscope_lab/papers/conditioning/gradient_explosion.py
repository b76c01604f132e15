"""The gradients of deep normalized networks explode, once (figure A10 of the conditioning paper).

Batch normalization in front of a ReLU lets gradients grow by a constant factor per layer on their way down, so that at
initialization λmax(F_k) is exponential in the depth above layer k. The first step then takes over the weights of lower
layers, W_k ≈ −η ∂L/∂W_k; what follows is normalized, so the gradient of a weight that is a times as large is 1/a of
what it was (theorem 2); and there the layers stay, in a state of weight domination (definition 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gyroscope_lab.data.source import Source
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.at_hand import at_hand, channels, examples, pixels
from gyroscope_lab.papers.cells import recorded
from gyroscope_lab.papers.study import Report, Study, Table, Verdict, on_task
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.schedule import Schedule
from gyroscope_lab.training.task import Task
from gyroscope_lab.training.trial import Trial

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Values = npt.NDArray[np.float64]
#: Iterations 0 to 7, as in the paper.
ITERATIONS = 8
# The paper names neither rates nor batches; these are those of its other networks, and appendix C.1's batch on MNIST.
# In a network of fewer layers only a larger first step matters.
RATES = {"smoke": 1.0, "small": 0.1, "full": 0.1}
_MODELS = {"smoke": ("mlp-50x32", "vgg-38"), "small": ("mlp-100x256", "vgg-110"), "full": ("mlp-100x256", "vgg-110")}
_BATCHES = {"mnist": 1024, "cifar-10": 128, "digits": 50}
# λmax(F_k) is called exponential in k if a straight line explains this share of the variance of its logarithm.
_STRAIGHT = 0.8
# "≪" of definition 1, in a number.
DOMINATED = 0.1
_ROWS = (
    ("curvature", r"$\lambda_{\max}(F_k)$"),
    ("weight", r"$\sigma_{\max}(W_k)$"),
    ("domination", r"$\sigma_{\max}(\partial L/\partial W_k)\,/\,\sigma_{\max}(W_k)$"),
)


def tasks_of(lab: Lab) -> tuple[Task, Task]:
    """Return the perceptron (a) and the convolutional network (b), each with data for eight steps.

    >>> from gyroscope_lab.training.archive import Archive
    >>> [(task.model, task.schedule.batch) for task in tasks_of(Lab(Archive("runs"), "full"))]
    [('mlp-100x256', 1024), ('vgg-110', 128)]
    """
    perceptron, vgg = _MODELS[lab.scale]
    mnist, cifar = at_hand(lab, _source("mnist")), at_hand(lab, _source("cifar-10"))
    return (
        _task(mnist, perceptron, pixels(mnist)),
        _task(cifar, vgg, channels(cifar)),
    )


def _source(name: str) -> Source:
    """Just enough examples of each of ten classes."""
    enough = -(-ITERATIONS * _BATCHES[name] // 10)
    return Source(name, per_class=enough, normalization="channel" if name == "cifar-10" else "scalar")


def _task(source: Source, model: str, shape: tuple[tuple[str, Any], ...]) -> Task:
    schedule = Schedule(epochs=1, batch=_BATCHES[source.name], cuts=(), drop_last=True)
    if source.name == "digits":  # which are few: passed several times
        schedule = replace(schedule, passes=ITERATIONS * schedule.batch // examples(source))
    options = (("batch_norm", True), *shape)
    return Task(f"{source.name}-{model}", source, model, options=options, schedule=schedule, precision="float32")


def trials(lab: Lab) -> list[Trial]:
    """Return one trial of each network, analyzed at every step.

    >>> from gyroscope_lab.training.archive import Archive
    >>> [trial.recipe.name for trial in trials(Lab(Archive("runs"), "full"))]
    ['SGD 0.1', 'SGD 0.1']
    """
    recipe = Recipe(f"SGD {RATES[lab.scale]:g}", RATES[lab.scale])
    return [Trial(task, recipe, every=1, conditions=1) for task in tasks_of(lab)]


@dataclass(frozen=True)
class Course:
    """The first iterations of a network, [iterations, layers], each before its step.

    Attributes:
        name: the task.
        rate: η, the learning rate.
        curvature: λmax(F_k).
        weight: σmax(W_k).
        domination: σmax(∂L/∂W_k)/σmax(W_k).

    >>> Course("made up", 0.1, np.ones((1, 8)), np.ones((1, 8)), np.ones((1, 8))).lower(np.arange(8.0))
    0.5
    """

    name: str
    rate: float
    curvature: Values
    weight: Values
    domination: Values

    def lower(self, values: Values) -> float:
        """The median over the first quarter of the layers."""
        return float(np.median(values[: max(1, len(values) // 4)]))

    def upper(self, values: Values) -> float:
        """The median over the last quarter of the layers."""
        return float(np.median(values[-max(1, len(values) // 4) :]))

    def slope(self) -> tuple[float, float]:
        """Return the slope of log₁₀ λmax(F_k) at initialization, per layer towards the first, and R² of that line.

        The first layer, whose inputs are images, and the last, which is not normalized, are left out.

        >>> deep = 10.0 ** -np.arange(8.0)[None]
        >>> Course("made up", 0.1, deep, deep, deep).slope()
        (1.0, 1.0)
        """
        values = np.log10(self.curvature[0, 1:-1])
        if not np.ptp(values):
            return 0.0, 0.0
        depth = np.arange(len(values))
        rise = float(np.polyfit(depth, values, 1)[0])
        return round(-rise, 12), round(float(np.corrcoef(depth, values)[0, 1] ** 2), 12)

    def numbers(self) -> dict[str, Any]:
        """Return the numbers as JSON holds them."""
        slope, straight = self.slope()
        return {
            "task": self.name,
            "rate": self.rate,
            "lambda_f": self.curvature.tolist(),
            "weight_spectral": self.weight.tolist(),
            "domination": self.domination.tolist(),
            "slope": slope,
            "r_squared": straight,
        }


def course(lab: Lab, trial: Trial) -> Course:
    """Return the recorded first iterations of a training."""
    run = recorded(lab, trial)
    steps = run.where("lambda_f")[:ITERATIONS]
    names = ("lambda_f", "weight_spectral", "domination")
    return Course(
        trial.task.name, trial.recipe.rate, *(run.series(name, steps=steps).astype(np.float64) for name in names)
    )


def figure_a10(lab: Lab) -> Report:
    """Report λmax(F_k) by layer over the first iterations, the growth of the weights, and weight domination."""
    found = [course(lab, trial) for trial in lab.held(trials(lab))]
    return Report(
        {"figure": _draw(found)},
        tuple(_table(one) for one in found),
        tuple(verdict for one in found for verdict in on_task(one.name, _verdicts(one, many=len(found) > 1))),
        {"networks": [one.numbers() for one in found]},
    )


def _table(one: Course) -> Table:
    columns = ("iteration", "λmax(F), first quarter", "last quarter", "paper", "σmax(W), first quarter", "last quarter",
               "σmax(∂L/∂W)/σmax(W), first quarter", "last quarter")  # fmt: skip
    rows = tuple(
        (
            iteration,
            *_both(one, one.curvature[iteration]),
            None,
            *_both(one, one.weight[iteration]),
            *_both(one, one.domination[iteration]),
        )
        for iteration in range(len(one.curvature))
    )
    return Table(f"{one.name}: medians over layers", columns, rows)


def _both(one: Course, values: Values) -> tuple[str, str]:
    return f"{one.lower(values):.3g}", f"{one.upper(values):.3g}"


def _verdicts(one: Course, *, many: bool) -> Sequence[Verdict]:
    """The verdicts on one network.

    Where even in lower layers the first step is smaller than the weights, η σmax(∂L/∂W) < σmax(W), the network is not
    deep enough to tell what a larger step does.
    """
    of = f", {one.name}" if many else ""
    slope, straight = one.slope()
    grown = one.weight[1] / one.weight[0]
    shrunk = [one.lower(values / one.curvature[0]) for values in one.curvature[1:]]
    deep = one.rate * one.lower(one.domination[0]) > 1
    before, after = one.lower(one.domination[0]), [one.lower(values) for values in one.domination[1:]]
    return (
        Verdict(
            f"weight-gradients explode exponentially at initialization{of}",
            "towards lower layers",
            f"λmax(F) rises by {10**slope:.2f} per layer (R² {straight:.2f}), from the last quarter to the first by "
            f"{one.lower(one.curvature[0]) / one.upper(one.curvature[0]):.1e}",
            slope > 0 and straight >= _STRAIGHT,
        ),
        Verdict(
            f"after one step the weights of lower layers have grown{of}",
            "exponentially",
            f"σmax(W) to {one.lower(grown):.3g} times in the first quarter, {one.upper(grown):.3g} in the last",
            one.lower(grown) > 2 * one.upper(grown) if deep else None,
        ),
        Verdict(
            f"which leads to small weight-gradients there{of}",
            "in iterations 1 to 7",
            f"λmax(F) to {min(shrunk):.1e} … {max(shrunk):.1e} of what it was",
            max(shrunk) < DOMINATED if deep else None,
        ),
        Verdict(
            f"lower layers enter weight domination{of}",
            "σmax(∂L/∂W) ≪ σmax(W)",
            f"a ratio of {before:.2g} at first, then {min(after):.1e} … {max(after):.1e}; {after[-1]:.1e} in the end",
            after[-1] < DOMINATED < before if deep else None,
        ),
    )


def _draw(networks: Sequence[Course]) -> Figure:
    """Draw λmax(F_k), one column per network as in the paper; below it σmax of weights, and of gradients over these.

    Iteration 0 is black; those after it go from dark to light.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    from gyroscope.figures.drawing import depth_colors, finish

    columns = len(networks)
    figure = Figure(figsize=(4.4 * columns + 1.0, 7.2), layout="constrained")
    axes = figure.subplots(len(_ROWS), columns, sharex="col", squeeze=False)
    for column, one in enumerate(networks):
        for row, (quantity, label) in enumerate(_ROWS):
            ax, values = axes[row, column], getattr(one, quantity)
            colors = ["black", *depth_colors(max(1, len(values) - 1))]
            for iteration, line in enumerate(values):
                at = np.arange(1, len(line) + 1)
                width = 2.0 if iteration == 0 else 1.1
                ax.plot(at, line, color=colors[iteration], linewidth=width, label=f"Iter{iteration}")
            ax.set_yscale("log")
            last = row == len(_ROWS) - 1
            title = f"({'abcdefgh'[column]}) {one.name}" if row == 0 else None
            finish(ax, xlabel="layer" if last else "", ylabel=label if column == 0 else "", title=title)
            ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes[-1, column].axhline(1.0, color="0.6", linewidth=0.8, linestyle=":")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    wide = min(len(labels), 4 * columns)  # a figure of one network has no room for eight in a row
    figure.legend(handles, labels, loc="outside lower center", ncols=wide, fontsize=8, frameon=False)
    return figure


STUDIES = (
    Study(
        "conditioning/a10",
        "Figure A10: the gradients of deep normalized networks explode, and the weights of lower layers dominate",
        trials,
        figure_a10,
    ),
)
