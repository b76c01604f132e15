"""Training loss and test error of residual networks by depth (figure 8, tables 1 and 2 of the conditioning paper).

Where the last linear layer cannot be trained (`very_deep`), depth does harm: a ResNet of 1202 layers learns less than
one of 110. With batch normalization before that layer (ResNet_LastBN), more layers are better again, and better than
with pre-activation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.cells import Cell, all_below, cells, some
from gyroscope_lab.papers.chance import Estimate, all_exceed
from gyroscope_lab.papers.conditioning.by_depth import (
    ARCHITECTURES,
    DEPTHS,
    SGD,
    Network,
    network_of,
    networks,
    of_network,
)
from gyroscope_lab.papers.study import Report, Study, Table, Verdict
from gyroscope_lab.training.trial import Trial

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The architectures of figure 8.
FIGURE8 = ("ResNet", "ResNet_LastBN")
#: The seeds of each scale.
SEEDS: dict[str, tuple[int, ...]] = {"smoke": (1,), "small": (1, 2), "full": (1, 2, 3, 4, 5)}
#: Means and standard deviations by network.
Told = dict[Network, tuple[float, float]]
# A smoke test has to end, not to learn.
_SMOKE_EPOCHS = 2
Value = Callable[[Cell], Estimate]
# The deepest of the paper's networks.
_DEEPEST = DEPTHS["full"][-1]
# The paper's "nearly the same" is taken to mean: losses by depth lie within this share of their mean.
_NEARLY = 0.1
# The colors of the depths, dark to light.
_COLORS = ("#440154", "#2c728e", "#28ae80", "#e8a500")


def _rows_of_paper(**rows: tuple[tuple[float, float], ...]) -> dict[Network, tuple[float, float]]:
    return {
        Network(architecture, depth): error
        for architecture, errors in rows.items()
        for depth, error in zip(DEPTHS["full"], errors, strict=True)
    }


#: Table 1: test errors on CIFAR-10 in percent, mean and standard deviation of five seeds.
CIFAR_10 = _rows_of_paper(
    ResNet=((7.52, 0.30), (6.89, 0.52), (7.35, 0.64), (9.42, 3.10)),
    PreResNet=((6.89, 0.09), (6.25, 0.08), (6.12, 0.21), (6.07, 0.10)),
    PreResNet_v1=((6.75, 0.26), (6.37, 0.24), (6.32, 0.21), (7.89, 0.58)),
    ResNet_LastBN=((6.50, 0.22), (6.10, 0.09), (5.94, 0.18), (5.68, 0.14)),
)
#: Table 2: the same on CIFAR-100.
CIFAR_100 = _rows_of_paper(
    ResNet=((29.60, 0.41), (28.3, 1.09), (29.25, 0.44), (30.49, 4.44)),
    PreResNet=((29.29, 0.44), (27.58, 0.12), (26.72, 0.33), (26.23, 0.26)),
    PreResNet_v1=((29.60, 0.21), (28.54, 0.26), (27.92, 0.34), (30.07, 2.04)),
    ResNet_LastBN=((28.82, 0.38), (27.05, 0.23), (25.80, 0.10), (25.51, 0.27)),
)
#: Section 5.1: on CIFAR-10, by weight decay, where that of 2·10⁻⁴ goes with twice the iterations.
FURTHER: dict[tuple[Network, float], tuple[float, float]] = {
    (Network("ResNet_LastBN", 1202), 2e-4): (4.79, 0.12),
    (Network("ResNet_LastBN", 2402), 1e-4): (5.04, 0.30),
}
#: Section 5.1: training losses at the end of figure 8.
LAST_LOSS = {Network("ResNet", 56): 0.081, Network("ResNet_LastBN", 56): 0.043}


def curves(lab: Lab) -> list[Trial]:
    """Return the trials of figure 8: those of table 1 that it shows, since one seed decides little.

    >>> from gyroscope_lab.training.archive import Archive
    >>> [(one.task.model, one.seed) for one in curves(Lab(Archive("runs"), "full"))][-2:]
    [('resnet-1202', 5), ('resnet-lastbn-1202', 5)]
    """
    return _every(lab, "c10-deep", FIGURE8)


def table1_trials(lab: Lab) -> list[Trial]:
    """Return the trials of table 1, on CIFAR-10.

    >>> from gyroscope_lab.training.archive import Archive
    >>> len(table1_trials(Lab(Archive("runs"), "full")))
    80
    """
    return _every(lab, "c10-deep")


def table2_trials(lab: Lab) -> list[Trial]:
    """Return the trials of table 2, on CIFAR-100; those of table 1 where digits stand in for both.

    >>> from gyroscope_lab.training.archive import Archive
    >>> dict(table2_trials(Lab(Archive("runs"), "full"))[0].task.options)
    {'classes': 100}
    """
    return _every(lab, "c100-deep")


def further(lab: Lab) -> list[Trial]:
    """Return the other trials of section 5.1: twice the decay and epochs, and twice the layers; at full scale only.

    >>> from gyroscope_lab.training.archive import Archive
    >>> [(one.task.model, one.seed) for one in further(Lab(Archive("runs"), "full"))][4:6]
    [('resnet-lastbn-1202', 5), ('resnet-2402', 1)]
    """
    if lab.scale != "full":
        return []
    last = Network("ResNet_LastBN", 1202)
    seeds = SEEDS[lab.scale]
    longer = [trial(lab, "c10-deep", last, seed) for seed in seeds]
    decayed = replace(SGD, name="SGD, decay 2e-4", weight_decay=2e-4)
    more = [replace(one, task=one.task.lasting(2 * one.schedule.epochs), recipe=decayed) for one in longer]
    return more + [trial(lab, "c10-deep", one, seed) for one in networks(FIGURE8, [2402]) for seed in seeds]


def trial(lab: Lab, task: str, network: Network, seed: int) -> Trial:
    """Return one trial of the tables.

    >>> from gyroscope_lab.training.archive import Archive
    >>> one = trial(Lab(Archive("runs"), "full"), "c10-deep", Network("ResNet", 110), 1)
    >>> one.schedule.epochs, one.schedule.milestones, one.recipe.weight_decay
    (160, [79, 119], 0.0001)
    """
    its = of_network(lab, task, network)
    return Trial(its.lasting(_SMOKE_EPOCHS) if lab.scale == "smoke" else its, SGD, seed)


def _every(lab: Lab, task: str, architectures: Sequence[str] = tuple(ARCHITECTURES)) -> list[Trial]:
    """Depth by depth and seed by seed, so that results can be compared before all are done."""
    return [
        trial(lab, task, network, seed)
        for depth in DEPTHS[lab.scale]
        for seed in SEEDS[lab.scale]
        for network in networks(architectures, [depth])
    ]


def figure8(lab: Lab) -> Report:
    """Report training loss by epoch: ResNets, and ResNets with batch normalization before the last layer."""
    found = _by_network(lab, curves(lab))
    columns = ("network", "last training loss here", "paper", "mean until the first cut of the rate", "seeds")
    rows = []
    for network, cell in found.items():
        told = LAST_LOSS.get(network) if lab.scale == "full" else None
        # As text, since two digits would not tell them apart.
        last, early = f"{cell.loss[-1]:.3g}", f"{_early(cell).mean:.3g}"
        rows.append((str(network), last, told and f"{told:.3f}", early, len(cell.results)))
    return Report(
        {"figure": _draw_losses(found, FIGURE8)},
        (Table("Training loss", columns, tuple(rows)),),
        tuple(_of_losses(found, full=lab.scale == "full")),
        {"cells": [_numbers(network, cell) for network, cell in found.items()]},
    )


def table1(lab: Lab) -> Report:
    """Report test errors on CIFAR-10, and those of section 5.1."""
    report = _table(lab, table1_trials(lab), "CIFAR-10", CIFAR_10)
    held = lab.held(further(lab))
    if not held:
        return report
    found = {(network_of(cell.task), cell.recipe.weight_decay): cell for cell in cells(lab, held)}
    rows = []
    for (network, decay), cell in found.items():
        mean, spread = FURTHER.get((network, decay), (None, None))
        rows.append(
            (str(network), decay, cell.task.schedule.epochs, _error(cell).mean, cell.spread, mean, spread,
             len(cell.results))
        )  # fmt: skip
    columns = ("network", "weight decay", "epochs", "test error % here", "±", "paper", "±", "seeds")
    return replace(
        report,
        tables=(*report.tables, Table("Beyond the table", columns, tuple(rows))),
        verdicts=(*report.verdicts, *_of_twice_the_layers(found)),
    )


def table2(lab: Lab) -> Report:
    """Report test errors on CIFAR-100."""
    return _table(lab, table2_trials(lab), "CIFAR-100", CIFAR_100)


def uncut(cell: Cell) -> int:
    """Return the number of epochs before the rate was first cut, as far as all seeds went.

    >>> from gyroscope_lab.training.result import Result
    >>> from gyroscope_lab.training.tasks import task
    >>> result = Result(1.0, 0.9, loss=[0.1] * 160, layers=["a"], rotation=[[0.0]])
    >>> uncut(Cell(task("c10-deep"), SGD, (result,)))
    79
    """
    return min([len(cell.loss), *cell.task.schedule.milestones])


def _early(cell: Cell) -> Estimate:
    """The mean training loss of these epochs."""
    return cell.over_seeds(lambda result: float(np.mean(result.loss[: uncut(cell)])))


def _last(cell: Cell) -> Estimate:
    """The training loss of the last epoch."""
    return cell.over_seeds(lambda result: result.loss[-1])


def _by_network(lab: Lab, trials: Sequence[Trial]) -> dict[Network, Cell]:
    return {network_of(cell.task): cell for cell in some(cells(lab, trials))}


def _table(lab: Lab, trials: Sequence[Trial], data: str, told: Told) -> Report:
    found = _by_network(lab, trials)
    told = told if lab.scale == "full" else {}
    here = data if lab.scale == "full" else f"digits, in place of {data}"
    return Report(
        {},
        (_layout(found, told, here), _seeds(lab, trials, found, told)),
        tuple(_of_errors(found, full=lab.scale == "full", data=data)),
        {"cells": [_numbers(network, cell) for network, cell in found.items()]},
    )


def _layout(found: dict[Network, Cell], told: Told, data: str) -> Table:
    """The paper's own layout, its numbers under ours."""
    depths = sorted({network.depth for network in found})
    rows: list[tuple[str | None, ...]] = []
    for architecture in ARCHITECTURES:
        its = [Network(architecture, depth) for depth in depths]
        rows.append(
            (
                architecture,
                "here",
                *(_with_spread(_error(found[one]).mean, found[one].spread) if one in found else None for one in its),
            )
        )
        rows.append((architecture, "paper", *(_with_spread(*told[one]) if one in told else None for one in its)))
    columns = ("method", "", *(f"depth {depth}" for depth in depths))
    return Table(f"Test error (%) on {data}, mean ± standard deviation over seeds", columns, tuple(rows))


def _seeds(lab: Lab, trials: Sequence[Trial], found: dict[Network, Cell], told: Told) -> Table:
    held = lab.held(trials)
    errors = {
        (network_of(one.task), one.seed): 100 * (1 - result.test_accuracy)
        for one, result in zip(held, lab.run(held), strict=True)
    }
    rows = []
    for network, cell in found.items():
        mean, spread = _error(cell).mean, cell.spread
        paper_mean, paper_spread = told.get(network, (None, None))
        difference = None if paper_mean is None else mean - paper_mean
        each = (errors.get((network, seed)) for seed in SEEDS[lab.scale])
        rows.append((str(network), *each, mean, spread, paper_mean, paper_spread, difference))
    which = (f"seed {seed}" for seed in SEEDS[lab.scale])
    columns = ("network", *which, "mean", "±", "paper", "±", "difference")
    return Table("Test error (%) by seed, as far as there are any", columns, tuple(rows))


def _with_spread(mean: float, spread: float | None) -> str:
    return f"{mean:.2f}" if spread is None else f"{mean:.2f} ± {spread:.2f}"


def _numbers(network: Network, cell: Cell) -> dict[str, object]:
    """The numbers as JSON holds them, without the rotation of a thousand layers."""
    kept = {key: value for key, value in cell.numbers().items() if key != "rotation"}
    return {"architecture": network.architecture, "depth": network.depth, **kept}


def _of_losses(found: Mapping[Network, Cell], *, full: bool) -> list[Verdict]:
    """Return the verdicts of figure 8 on the networks that are there: columns of depths, or pairs of one depth.

    Losses of one seed decide nothing, however far they are apart.

    Args:
        found: by network.
        full: True for the paper's networks; others are too shallow, or trained too briefly, to tell.
    """
    plain, normal = _column(found, "ResNet"), _column(found, "ResNet_LastBN")
    return [
        _climbs(plain, full=full),
        _alike(normal, full=full),
        _falls(normal, _last, "the deeper a ResNet_LastBN, the lower its training loss in the end", full=full),
        _below(found, _last, "ResNet_LastBN has a lower training loss than ResNet at every depth",
               ("0.043 against 0.081 at 56 layers", "{:.3g} against {:.3g}"), ("ResNet_LastBN", "ResNet"), full=full),
    ]  # fmt: skip


def _of_errors(found: Mapping[Network, Cell], *, full: bool, data: str) -> list[Verdict]:
    """Return the verdicts of tables 1 and 2 on the networks that are there.

    Args:
        found: by network.
        full: as in `_of_losses`.
        data: "CIFAR-10" or "CIFAR-100".
    """
    told = CIFAR_10 if data == "CIFAR-10" else CIFAR_100

    def compared(better: str, worse: str) -> str:
        depths = [network.depth for network in told if network.architecture == better]
        gains = [told[Network(worse, depth)][0] - told[Network(better, depth)][0] for depth in depths]
        return "by " + ", ".join(f"{gain:.2f}" for gain in gains)

    form = "{:.2f} against {:.2f}"
    last = {network: cell for network, cell in found.items() if network.depth == _DEEPEST}
    return [
        _below(found, _error, "ResNet_LastBN has a lower test error than ResNet at every depth",
               (compared("ResNet_LastBN", "ResNet"), form), ("ResNet_LastBN", "ResNet"), full=full),
        _falls(_column(found, "ResNet_LastBN"), _error, "the deeper a ResNet_LastBN, the lower its test error",
               full=full),
        _degenerates(_column(found, "ResNet")),
        _below(last, _error, f"of {_DEEPEST} layers PreResNet has a lower test error than PreResNet_v1",
               (form.format(*(told[Network(name, _DEEPEST)][0] for name in ("PreResNet", "PreResNet_v1"))), form),
               ("PreResNet", "PreResNet_v1"), full=full, depths=[_DEEPEST]),
        _below(found, _error, "ResNet_LastBN has a lower test error than PreResNet at every depth",
               (compared("ResNet_LastBN", "PreResNet"), form), ("ResNet_LastBN", "PreResNet"), full=full),
    ]  # fmt: skip


def _of_twice_the_layers(found: Mapping[tuple[Network, float], Cell]) -> list[Verdict]:
    """Return the verdict of section 5.1 on networks of 2402 layers, if they are there.

    Args:
        found: by network and weight decay.
    """
    plain, normal = (found.get((Network(name, 2402), 1e-4)) for name in ("ResNet", "ResNet_LastBN"))
    if plain is None or normal is None:
        return []
    here = f"train {plain.train:.1f} % against {normal.train:.1f} %"
    holds = not plain.learned and normal.learned
    says = "of 2402 layers ResNet cannot converge and ResNet_LastBN can"
    return [Verdict(says, "test error 5.04 %", here, holds, over=_among("ResNet", "ResNet_LastBN", depths=[2402]))]


def _error(cell: Cell) -> Estimate:
    return (-cell.tested).plus(100)


def _column(found: Mapping[Network, Cell], architecture: str) -> list[tuple[int, Cell]]:
    return sorted(
        ((network.depth, cell) for network, cell in found.items() if network.architecture == architecture),
        key=lambda pair: pair[0],
    )


def _listed(column: Sequence[tuple[int, Cell]], value: Value) -> str:
    return ", ".join(f"{depth}: {value(cell).mean:.3g}" for depth, cell in column) or "–"


def _climbs(column: Sequence[tuple[int, Cell]], *, full: bool) -> Verdict:
    says = "the deeper a ResNet, the larger its training loss until the rate is cut"
    holds = all_below([(a, b) for (_, a), (_, b) in pairwise(column)], _early) if full else None
    return Verdict(says, "so", _listed(column, _early), holds, over=_among("ResNet"))


def _falls(column: Sequence[tuple[int, Cell]], value: Value, says: str, *, full: bool) -> Verdict:
    pairs = [(deeper, shallower) for (_, shallower), (_, deeper) in pairwise(column)]
    holds = all_below(pairs, value) if full else None
    return Verdict(says, "so", _listed(column, value), holds, over=_among("ResNet_LastBN"))


def _alike(column: Sequence[tuple[int, Cell]], *, full: bool) -> Verdict:
    values = [_early(cell) for _, cell in column]
    says = "ResNet_LastBN has nearly the same training loss at every depth until the rate is cut"
    if len(values) < 2:
        return Verdict(says, "so", _listed(column, _early), None)
    middle = sum(value.mean for value in values) / len(values)
    apart = [value.times(1 / middle).plus(-1) for value in values]
    here = f"{_listed(column, _early)}: within {100 * max(abs(one.mean) for one in apart):.0f} % of their mean"
    holds = all_exceed([side for one in apart for side in (one, -one)], -_NEARLY) if full else None
    return Verdict(says, "so", here, holds, over=_among("ResNet_LastBN"))


def _below(
    found: Mapping[Network, Cell],
    value: Value,
    says: str,
    words: tuple[str, str],
    names: tuple[str, str],
    *,
    full: bool,
    depths: Sequence[int] = DEPTHS["full"],
) -> Verdict:
    """The verdict on whether the first is below the second at every depth that has both."""
    told, form = words
    first, second = (dict(_column(found, name)) for name in names)
    both = {depth: (first[depth], second[depth]) for depth in first if depth in second}
    here = "; ".join(f"{depth}: {form.format(value(a).mean, value(b).mean)}" for depth, (a, b) in both.items()) or "–"
    holds = all_below(list(both.values()), value) if full else None
    return Verdict(says, told, here, holds, over=_among(*names, depths=depths))


def _degenerates(column: Sequence[tuple[int, Cell]]) -> Verdict:
    says = f"a ResNet of {_DEEPEST} layers has a larger test error than shallower ones"
    by_depth = dict(column)
    deepest = by_depth.pop(_DEEPEST, None)
    pairs = [] if deepest is None else [(other, deepest) for other in by_depth.values()]
    return Verdict(says, "so", _listed(column, _error), all_below(pairs, _error), over=_among("ResNet"))


def _among(*architectures: str, depths: Sequence[int] = DEPTHS["full"]) -> Callable[[Trial], bool]:
    """The trainings of table 1 of these architectures at these depths."""

    def over(trial: Trial) -> bool:
        network = network_of(trial.task)
        return trial.recipe == SGD and network.architecture in architectures and network.depth in depths

    return over


def _draw_losses(found: Mapping[Network, Cell], architectures: Sequence[str]) -> Figure:
    """Draw the losses of up to four depths; on a logarithmic axis, since they are small in the end.

    >>> from gyroscope_lab.training.result import Result
    >>> from gyroscope_lab.training.tasks import task
    >>> result = Result(1.0, 0.9, loss=[1.0, 0.5], layers=["a"], rotation=[[0.0]])
    >>> found = {Network("ResNet", 56): Cell(task("c10-deep"), SGD, (result,))}
    >>> [ax.get_title() for ax in _draw_losses(found, ["ResNet", "ResNet_LastBN"]).axes]
    ['(a) ResNet', '(b) ResNet_LastBN']
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    from gyroscope.figures.drawing import log_ticks

    figure = Figure(figsize=(8.6, 3.3), layout="constrained")
    axes = figure.subplots(1, len(architectures), sharex=True, sharey=True, squeeze=False)[0]
    colors = dict(zip(sorted({network.depth for network in found}), _COLORS, strict=False))
    for letter, architecture, ax in zip("abcd", architectures, axes, strict=False):
        for depth, color in colors.items():
            cell = found.get(Network(architecture, depth))
            if cell is not None:
                epochs = np.arange(1, len(cell.loss) + 1)
                ax.plot(epochs, cell.loss, color=color, linewidth=1.1, label=str(depth))
        ax.set_title(f"({letter}) {architecture}", fontsize=10)
        ax.set_xlabel("epoch", fontsize=9)
        ax.grid(color="0.9", linewidth=0.6)
        ax.set_axisbelow(True)
        ax.tick_params(labelsize=8)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
    axes[0].set_yscale("log")
    log_ticks(axes[0].yaxis, *axes[0].get_ylim())
    axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].set_ylabel("training loss", fontsize=9)
    lines = {line.get_label(): line for ax in axes for line in ax.lines}
    shown = {str(depth): lines[str(depth)] for depth in colors}
    figure.legend(shown.values(), shown, title="layers", loc="outside right center", fontsize=8, title_fontsize=8)
    figure.suptitle("Training loss of residual networks, by depth", fontsize=11)
    return figure


STUDIES = (
    Study("conditioning/fig8", "Figure 8: training loss of residual networks, by depth", curves, figure8),
    Study(
        "conditioning/table1",
        "Table 1: test errors of residual networks on CIFAR-10, by architecture and depth",
        lambda lab: [*table1_trials(lab), *further(lab)],
        table1,
    ),
    Study(
        "conditioning/table2",
        "Table 2: test errors of residual networks on CIFAR-100, by architecture and depth",
        table2_trials,
        table2,
    ),
)
