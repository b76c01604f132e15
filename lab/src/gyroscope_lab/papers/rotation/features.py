"""The effect of layer rotation on features (figure 8 of the rotation paper).

A perceptron with one hidden layer, whose neurons' weights can be looked at as images, is trained from one
initialization with Layca at four rates. The paper sees that rotation decides "to what extent" features are learned, not
"which": the further a layer rotates the more prominent they are, and the less retrievable the initialization. Both can
be measured. With w_i(0) and w_i(T) the weights of hidden neuron i at the start and at the end:

    retrievable = the share of neurons i with argmax_j cos(w_i(T), w_j(0)) = i,

those that can be told, of all neurons, from where they started; and with u_i, the part of w_i(T) orthogonal to w_i(0),
which is what has been learned, the mean over neurons of cos(u_i, u_i') for two rates: 1 if the features are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import sqrt
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import normalize

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.cells import Cell, cells, some
from gyroscope_lab.papers.rotation.panels import title
from gyroscope_lab.papers.rotation.recipes import layca
from gyroscope_lab.papers.study import Report, Study, Table, Verdict
from gyroscope_lab.training.trial import Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: log₃ of the four rates, and when each is divided by 5, as shares of all epochs.
POWERS = (-2.0, -2.5, -3.0, -4.0)
CUTS: dict[float, tuple[float, ...]] = {-2.0: (0.9,), -2.5: (0.95,), -3.0: (0.95,), -4.0: ()}
#: The paper's test accuracies in percent, and the final rotation of the first layer, read off its curves.
TESTS = dict(zip(POWERS, (96.75, 96.60, 96.54, 95.81), strict=True))
ROTATIONS = dict(zip(POWERS, (0.90, 0.60, 0.30, 0.11), strict=True))
# The digits are a fiftieth of the paper's 10,000 examples; this gives them its five steps per epoch.
_BATCH = 40
_SHOWN = 5
_FIRST = "linear1.weight"


@dataclass(frozen=True)
class Features:
    """The hidden neurons' weights of one trial, [neurons, inputs]: at the start and at the end."""

    power: float
    initial: Tensor
    final: Tensor

    @property
    def remains(self) -> float:
        """The mean over neurons of cos(w_i(T), w_i(0))."""
        return float((normalize(self.final, dim=1) * normalize(self.initial, dim=1)).sum(1).mean())

    @property
    def retrievable(self) -> float:
        """Return the share of neurons that can be identified from their initialization.

        >>> w = torch.eye(3)
        >>> Features(-2.0, w, w).retrievable, round(Features(-2.0, w, w[[1, 0, 2]]).retrievable, 2)
        (1.0, 0.33)
        """
        return _told(self.final, self.initial)

    @property
    def learned(self) -> Tensor:
        """Return u_i: the part of each neuron's weights that is orthogonal to its initialization."""
        start = normalize(self.initial, dim=1)
        return self.final - (self.final * start).sum(1, keepdim=True) * start


def likeness(first: Features, second: Features) -> tuple[float, float]:
    """Return the likeness of the learned parts of two trials: the mean of cos(u_i, u_i'), and the share identified.

    >>> start = torch.eye(3)
    >>> a, b = Features(-2.0, start, start + 0.1), Features(-4.0, start, start + 0.01)
    >>> [round(value, 3) for value in likeness(a, b)]
    [1.0, 1.0]
    """
    a, b = first.learned, second.learned
    same = (normalize(a, dim=1) * normalize(b, dim=1)).sum(1).mean()
    return float(same), _told(a, b)


def _told(these: Tensor, those: Tensor) -> float:
    cosines = normalize(these, dim=1) @ normalize(those, dim=1).T
    return float((cosines.argmax(1) == torch.arange(len(these))).double().mean())


def trials(lab: Lab) -> list[Trial]:
    """The four rates, from one initialization.

    >>> from gyroscope_lab.training.archive import Archive
    >>> [trial.schedule.milestones for trial in trials(Lab(Archive("runs"), "full"))]
    [[90], [95], [95], []]
    """
    task = lab.task("mnist-mlp")
    if lab.scale != "full":
        task = replace(task, schedule=replace(task.schedule, batch=_BATCH))
    return [
        Trial(replace(task, schedule=replace(task.schedule, cuts=CUTS[power])), layca(power), seed, keeps=True)
        for power in POWERS
        for seed in lab.seeds
    ]


def figure8(lab: Lab) -> Report:
    """Report features at four rates, and how much of the initialization they still show."""
    its = _whole(lab.held(trials(lab)))
    found = dict(zip(POWERS, cells(lab, its), strict=True))
    features = [_features(lab, power, trial) for power in POWERS for trial in its if trial.recipe == layca(power)]
    by_rate = {power: [one for one in features if one.power == power] for power in POWERS}
    return Report(
        {"figure": _draw([(found[power], by_rate[power][0]) for power in POWERS])},
        (_table(found, by_rate),),
        tuple(_verdicts(found, by_rate)),
        {
            "cells": [cell.numbers() for cell in found.values()],
            "features": [
                {"power": one.power, "retrievable": one.retrievable, "remains": one.remains} for one in features
            ],
        },
    )


def _whole(its: Sequence[Trial]) -> list[Trial]:
    """The trials of the seeds that all four rates were trained from, so that each rate is compared with the others."""
    seeds = Counter(trial.seed for trial in its)
    return list(some([trial for trial in its if seeds[trial.seed] == len(POWERS)]))


def _features(lab: Lab, power: float, trial: Trial) -> Features:
    kept = lab.archive.weights(lab.trial(trial))
    return Features(power, kept["initial"][_FIRST].double(), kept["tested"][_FIRST].double())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _table(found: dict[float, Cell], by_rate: dict[float, list[Features]]) -> Table:
    columns = ("rate", "test % here", "paper", "train %", "rotation of layer 1", "paper", "retrievable %", "remains",
               "same features as at the top rate", "told from them %")  # fmt: skip
    rows = []
    for power, cell in found.items():
        known = cell.task.name == "mnist-mlp"
        alike = [likeness(one, top) for one, top in zip(by_rate[power], by_rate[POWERS[0]], strict=True)]
        rows.append((
            f"3^{power:g}", cell.test_told, TESTS[power] if known else None, cell.train, float(cell.final_rotation[0]),
            ROTATIONS[power] if known else None, 100 * _mean([one.retrievable for one in by_rate[power]]),
            _mean([one.remains for one in by_rate[power]]), _mean([same for same, _ in alike]),
            100 * _mean([told for _, told in alike]),
        ))  # fmt: skip
    return Table(next(iter(found.values())).task.name, columns, tuple(rows))


def _verdicts(found: dict[float, Cell], by_rate: dict[float, list[Features]]) -> list[Verdict]:
    rotations = [float(cell.final_rotation[0]) for cell in found.values()]
    retrievable = [_mean([one.retrievable for one in by_rate[power]]) for power in POWERS]
    alike = [
        likeness(one, top) for power in POWERS[1:] for one, top in zip(by_rate[power], by_rate[POWERS[0]], strict=True)
    ]
    fastest, slowest = found[POWERS[0]], found[POWERS[-1]]
    ahead = fastest.ahead_of(slowest)
    return [
        Verdict(
            "all four rates learn the training set",
            "100 %",
            ", ".join(f"{cell.train:.1f} %" for cell in found.values()),
            all(cell.train > 99.5 for cell in found.values()),
        ),
        Verdict(
            "the higher the rate, the further the first layer rotates",
            ", ".join(f"{ROTATIONS[power]:.2f}" for power in POWERS),
            ", ".join(f"{rotation:.2f}" for rotation in rotations),
            all(a > b for a, b in pairwise(rotations)),
        ),
        Verdict(
            "the further it rotates, the better the network generalizes",
            f"{TESTS[POWERS[0]] - TESTS[POWERS[-1]]:+.2f} points from the slowest to the fastest",
            f"{ahead.told} points",
            ahead.above,
        ),
        Verdict(
            "the further it rotates, the less retrievable is the initialization",
            "close to 1 no remnants of it are left",
            ", ".join(f"{100 * share:.0f} %" for share in retrievable) + " of neurons are told from their start",
            all(a <= b for a, b in pairwise(retrievable)) and retrievable[0] < retrievable[-1],
        ),
        Verdict(
            "rotation does not decide which features are learned, but to what extent",
            "seen in five neurons",
            f"at the others it has a cosine of {min(same for same, _ in alike):.2f} or more with what is learned at "
            f"the highest, and {100 * min(told for _, told in alike):.0f} % of neurons or more are told by it",
            all(same > 0.5 and told > 0.5 for same, told in alike),
        ),
    ]


def _draw(its: Sequence[tuple[Cell, Features]]) -> Figure:
    """One column for the initialization and one per rate: the curves of both layers above, the features below."""
    from matplotlib.figure import Figure

    from gyroscope.figures.drawing import DEPTH

    figure = Figure(figsize=(1.75 * (len(its) + 1), 2.2 + 1.3 * _SHOWN), layout="constrained")
    grid = figure.add_gridspec(1 + _SHOWN, len(its) + 1, height_ratios=[1.4, *[1] * _SHOWN])
    neurons = torch.randperm(len(its[0][1].initial), generator=torch.Generator().manual_seed(0))[:_SHOWN].tolist()
    for column, (cell, features) in enumerate(its, start=1):
        ax = figure.add_subplot(grid[0, column])
        for layer, name in enumerate(("hidden", "output")):
            ax.plot(cell.rotation[:, layer], color=DEPTH(float(layer)), label=name)
        ax.set(ylim=(0, 1), xlim=(0, len(cell.rotation) - 1))
        ax.set_title(f"{title(cell.recipe)}\n{cell.test:.2f} %", fontsize=9)
        ax.set_xlabel("epoch", fontsize=8)
        ax.tick_params(labelsize=7, labelleft=column == 1)
        if column == 1:
            ax.set_ylabel("rotation", fontsize=8)
            ax.legend(fontsize=7, loc="upper left", title="layer", title_fontsize=7)
        for row, neuron in enumerate(neurons, start=1):
            _image(figure.add_subplot(grid[row, column]), features.final[neuron])
    for row, neuron in enumerate(neurons, start=1):
        ax = figure.add_subplot(grid[row, 0])
        _image(ax, its[0][1].initial[neuron])
        ax.set_ylabel(f"neuron {neuron}", fontsize=8)
        if row == 1:
            ax.set_title("initialization", fontsize=9)
    figure.suptitle("Features of hidden neurons, trained from one initialization", fontsize=11)
    return figure


def _image(ax: Axes, weights: Tensor) -> None:
    side = round(sqrt(len(weights)))
    bound = float(weights.abs().max())
    ax.imshow(weights.reshape(side, side).numpy(), cmap="RdBu_r", vmin=-bound, vmax=bound)
    ax.set(xticks=[], yticks=[])


STUDIES = (Study("rotation/fig8", "Figure 8: features of hidden neurons at four rates", trials, figure8),)
