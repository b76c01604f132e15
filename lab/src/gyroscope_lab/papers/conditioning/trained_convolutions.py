"""The conditioning of convolutions while they are trained (figures A8 and A9 of the conditioning paper).

A VGG-style network and a residual one of 20 layers, without batch normalization ("Plain") and with it ("BN"). Each
position of an image is a sample, so that Σx of a convolution has its input channels, and Σ∇h its output channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gyroscope.conditioning import P, percent, quantity
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.errors import LabError
from gyroscope_lab.papers.at_hand import channels, examples
from gyroscope_lab.papers.cells import recorded
from gyroscope_lab.papers.conditioning.trained_perceptrons import LEARNING, inner, mostly
from gyroscope_lab.papers.study import Report, Study, Table, Verdict
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.result import Result
from gyroscope_lab.training.task import Task
from gyroscope_lab.training.trial import Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gyroscope.figures.drawing import Color, Dash, Mark

Values = npt.NDArray[np.float64]
#: The rate of the setup that the paper follows; networks that do not converge take a tenth of it.
RATE = 0.1
#: The κ_p of the figures. The paper's code has that of the whole spectrum; its text names no others. Our numbers do.
SHARES = (0.5, 1.0)
_FACTORS = {"x": "Σx", "g": "Σ∇h"}
_COLORS: dict[str, Color] = {"BN": (0.12, 0.47, 0.71, 1.0), "Plain": (0.84, 0.37, 0.0, 1.0)}
_MARKERS = {"BN": "o", "Plain": "s"}
_GRAY: Color = (0.25, 0.25, 0.25, 1.0)
# The analyses of a training that are drawn.
_WHEN: tuple[tuple[int, Dash, str], ...] = ((0, ":", "end of the first epoch"), (-1, "-", "of the last"))


@dataclass(frozen=True)
class Plan:
    """The depth of the networks of a scale, the epochs of their training, and the epochs between analyses."""

    depth: int
    epochs: int
    apart: int


PLANS = {"smoke": Plan(8, 10, 5), "small": Plan(20, 60, 10), "full": Plan(20, 160, 10)}


def task_of(lab: Lab, style: str, *, normalized: bool) -> Task:
    """Return the task with a network of this style, "vgg" or "resnet".

    >>> from gyroscope_lab.training.archive import Archive
    >>> task_of(Lab(Archive("runs"), "full"), "vgg", normalized=True).model
    'vgg-20'
    """
    plan, task = PLANS[lab.scale], lab.task("c10-deep")
    model = f"{style}-{plan.depth}"
    options = (("batch_norm", normalized), *channels(task.source))
    named = replace(task, name=f"{task.source.name}-{model}", model=model, options=options, precision="float32")
    return named.lasting(plan.epochs)


def trials(lab: Lab, style: str) -> list[Trial]:
    """Return the trials: normalized at η = 0.1; plain at 0.1, where it does not converge in the paper, and at 0.01.

    >>> from gyroscope_lab.training.archive import Archive
    >>> [trial.recipe.name for trial in trials(Lab(Archive("runs"), "full"), "resnet")]
    ['BN, SGD 0.1', 'Plain, SGD 0.1', 'Plain, SGD 0.01']
    """
    found = []
    for name, rate in (("BN", RATE), ("Plain", RATE), ("Plain", RATE / 10)):
        task = task_of(lab, style, normalized=name == "BN")
        recipe = Recipe(f"{name}, SGD {rate:g}", rate, momentum=0.9, nesterov=True)
        steps = task.schedule.steps(examples(task.source))
        found.append(Trial(task, recipe, conditions=PLANS[lab.scale].apart * steps))
    return found


@dataclass(frozen=True)
class Network:
    """A training, and the condition numbers of its layers while it lasted.

    Attributes:
        name: "BN" or "Plain".
        rate: its learning rate.
        result: its result.
        layers: their names.
        steps: the analyzed steps: the last of the first epoch, and of every `Plan.apart` epochs.
        kappa: by factor, "x" or "g", and by p: κ_p [steps, layers]; infinite where λ_p is 0, NaN where λmax is.
    """

    name: str
    rate: float
    result: Result
    layers: tuple[str, ...]
    steps: list[int]
    kappa: dict[str, dict[float, Values]]

    def numbers(self) -> dict[str, Any]:
        """Return the numbers as JSON holds them."""
        kappa = {name: {percent(p): values.tolist() for p, values in by_p.items()} for name, by_p in self.kappa.items()}
        return {
            "loss": self.result.loss,
            "train": 100 * self.result.train_accuracy,
            "test": 100 * self.result.test_accuracy,
            "ended": self.result.ended,
            "layers": list(self.layers),
            "steps": self.steps,
            "kappa": kappa,
        }


def network(lab: Lab, trial: Trial) -> Network:
    """Return what was recorded of a training."""
    run = recorded(lab, trial)
    [result] = lab.run([trial])
    steps = run.where("lambda_x")
    kappa = {
        factor: {p: run.series(quantity(f"kappa_{factor}", p), steps=steps).astype(np.float64) for p in P}
        for factor in _FACTORS
    }
    name = "BN" if dict(trial.task.options)["batch_norm"] else "Plain"
    return Network(name, trial.recipe.rate, result, run.layers, [int(step) for step in steps], kappa)


def conclude(lab: Lab, style: str) -> Report:
    """Report κ_p of both factors by layer, and the training losses; the plain network at its better rate."""
    held = lab.held(trials(lab, style))
    every = [network(lab, trial) for trial in held]
    plain = sorted((one for one in every if one.name == "Plain"), key=_final)
    shown = [one for one in every if one.name == "BN"] + plain[:1]
    if len(shown) < 2:
        raise LabError("The study compares a normalized network with a plain one. Train both.")
    task = held[0].task
    return Report(
        {"figure": _draw(shown, plain[1:], shares=SHARES, heading=task.name)},
        (_losses(task, every), _kappas(task, shown)),
        tuple(_verdicts(lab, shown, plain)),
        {"shown": [f"{one.name} {one.rate:g}" for one in shown],
         "networks": {f"{one.name} {one.rate:g}": one.numbers() for one in every}},
    )  # fmt: skip


def _final(one: Network) -> float:
    return one.result.loss[-1] if isfinite(one.result.loss[-1]) else inf


def _guesses(one: Network) -> bool:
    """True if its loss is, within a tenth, that of guessing among ten classes, or worse."""
    return not _final(one) < LEARNING


def _losses(task: Task, every: list[Network]) -> Table:
    columns = ("network", "rate", "training loss", "paper", "train %", "test %", "epochs")
    rows = tuple(
        (one.name, f"{one.rate:g}", one.result.loss[-1], None, 100 * one.result.train_accuracy,
         100 * one.result.test_accuracy, len(one.result.loss))
        for one in every
    )  # fmt: skip
    return Table(f"{task.name}: training", columns, rows)


def _kappas(task: Task, networks: list[Network]) -> Table:
    rows = []
    for factor, symbol in _FACTORS.items():
        for p in P:
            for place, when in ((0, "first epoch"), (-1, "last epoch")):
                middles = [_middle(one.kappa[factor][p][place]) for one in networks]
                rows.append((symbol, f"{percent(p)} %", when, *(_text(middle) for middle in middles), None))
    names = [one.name for one in networks]
    return Table(f"{task.name}: κ_p, the median over layers", ("of", "p", "at", *names, "paper"), tuple(rows))


def _middle(values: Values) -> float:
    """The median over layers; undefined ones, which nothing passes through, count as infinite."""
    return float(np.median(np.where(np.isnan(values), np.inf, values)))


def _text(value: float) -> str:
    return f"{value:.3g}" if isfinite(value) else "∞"


def _verdicts(lab: Lab, shown: list[Network], rates: list[Network]) -> list[Verdict]:
    normalized, plain = shown
    learned = not _guesses(plain)  # the gradients of a network that only guesses say nothing about training
    found = [
        Verdict(
            f"BN improves the conditioning of the layer {says}, p = {percent(p)} %",
            f"lower κ_p({_FACTORS[factor]})",
            _compared(*(inner(one.kappa[factor][p], factor) for one in shown)),
            _lower(*(inner(one.kappa[factor][p], factor) for one in shown)) if learned else None,
        )
        for factor, says in (("x", "input"), ("g", "output-gradient"))
        for p in SHARES
    ]
    ours, theirs = normalized.result.loss[-1], plain.result.loss[-1]
    found.append(Verdict("and the training loss", "lower with BN", f"{ours:.3g} against {theirs:.3g}", ours < theirs))
    for one in rates:
        if one.rate == RATE:
            here = one.result.ended or f"a training loss of {one.result.loss[-1]:.3g} in the end"
            # The stand-in for CIFAR-10 is easier.
            holds = _guesses(one) if lab.scale == "full" else None
            says = f"without BN it does not converge at a rate of {RATE:g}"
            found.append(Verdict(says, f"so {RATE / 10:g} was taken", here, holds))
    return found


def _compared(ours: Values, theirs: Values) -> str:
    mine, other = _all_steps(ours), _all_steps(theirs)
    better = int((mine < other).sum())
    return f"in {better} of {len(mine)} layers; {_text(_middle(mine))} against {_text(_middle(other))} in the middle"


def _lower(ours: Values, theirs: Values) -> bool | None:
    """Return whether ours is lower in nearly all layers, by the same shares as in the perceptrons of figure 5."""
    mine, other = _all_steps(ours), _all_steps(theirs)
    return mostly(int((mine < other).sum()), len(mine), layers=len(mine))


def _all_steps(values: Values) -> Values:
    """Each layer's median over the training; an undefined κ counts as infinite."""
    return np.asarray(np.median(np.where(np.isnan(values), np.inf, values), axis=0))


def _study(name: str, title: str, style: str) -> Study:
    return Study(f"conditioning/{name}", title, partial(trials, style=style), partial(conclude, style=style))


def _draw(networks: Sequence[Network], others: Sequence[Network], *, shares: Sequence[float], heading: str) -> Figure:
    """Draw κ_p(Σx) (a) and κ_p(Σ∇h) (b) by layer, dotted after one epoch and solid in the end, and the loss (c).

    Of `others`, networks at rates that do not suit them, only the loss is drawn.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    from gyroscope.figures.drawing import Line, draw_marked, finish

    figure = Figure(figsize=(11.0, 2.4 * len(shares) + 1.0), layout="constrained")
    grid = figure.add_gridspec(len(shares), 3)
    marks: list[Mark] = []
    for row, share in enumerate(shares):
        for column, (factor, symbol) in enumerate((("x", r"\Sigma_x"), ("g", r"\Sigma_{\nabla h}"))):
            ax = figure.add_subplot(grid[row, column])
            marks += draw_marked(
                ax,
                [
                    Line(one.kappa[factor][share][place], number, _COLORS[one.name], dash, _MARKERS[one.name])
                    for number, one in enumerate(networks)
                    for place, dash, _ in _WHEN
                ],
            )
            label = rf"$\kappa_{{{percent(share)}\%}}({symbol})$"
            last = row == len(shares) - 1
            title = f"({'ab'[column]}) $\\kappa_p({symbol})$" if row == 0 else None
            finish(ax, xlabel="layer" if last else "", ylabel=label, title=title)
            ax.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    right = figure.add_subplot(grid[:, 2])
    for one in networks:
        _curve(right, one, dash="-")
    for one in others:
        _curve(right, one, dash="--")
    right.set_yscale("log")
    finish(right, xlabel="epoch", ylabel="training loss", title="(c) training loss")
    right.legend(fontsize=8)
    _key(figure, networks, marks)
    figure.suptitle(heading, fontsize=11)
    return figure


def _key(figure: Figure, networks: Sequence[Network], marks: Sequence[Mark]) -> None:
    from matplotlib.lines import Line2D

    from gyroscope.figures.drawing import SAYS

    handles = [
        Line2D([], [], color=_COLORS[one.name], marker=_MARKERS[one.name], markersize=4, label=one.name)
        for one in networks
    ]
    handles += [Line2D([], [], color=_GRAY, linestyle=dash, label=label) for _, dash, label in _WHEN]
    handles += [
        Line2D([], [], color=_GRAY, linestyle="", marker=mark, markersize=4, label=SAYS[mark])
        for mark in dict.fromkeys(marks)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)


def _curve(ax: Axes, one: Network, *, dash: Dash) -> None:
    loss = np.array(one.result.loss)
    alone = "o" if np.isfinite(loss).sum() < 2 else ""
    ax.plot(
        np.arange(1, len(loss) + 1), loss, color=_COLORS[one.name], linestyle=dash, linewidth=1.3, marker=alone,
        markersize=3, label=f"{one.name}, rate {one.rate:g}",
    )  # fmt: skip


STUDIES = (
    _study("a8", "Figure A8: the conditioning of a VGG-style network while it is trained, plain and normalized", "vgg"),
    _study(
        "a9", "Figure A9: the conditioning of a residual network while it is trained, plain and normalized", "resnet"
    ),
)
