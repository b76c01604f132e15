"""Training loss and test error of residual networks by depth (figure 8, tables 1 and 2 of the conditioning paper).

Where a last linear layer cannot be trained (`very_deep`), depth does harm: the 1202 layers of a
ResNet learn less than 110. With batch normalization before that layer (ResNet_LastBN) more layers are better again, and
better than pre-activation makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.cells import Cell, cells
from gyroscope_lab.papers.conditioning import depth_paper as paper
from gyroscope_lab.papers.conditioning.by_depth import (
    ARCHITECTURES,
    DEPTHS,
    SGD,
    Network,
    network_of,
    networks,
    of_network,
)
from gyroscope_lab.papers.conditioning.depth_figure import draw_losses
from gyroscope_lab.papers.conditioning.depth_verdicts import of_errors, of_losses, of_twice_the_layers
from gyroscope_lab.papers.rotation.beside_layca import some
from gyroscope_lab.papers.study import Report, Study, Table
from gyroscope_lab.training.trial import Trial

#: The architectures of figure 8.
FIGURE8 = ("ResNet", "ResNet_LastBN")
#: The seeds of each scale.
SEEDS: dict[str, tuple[int, ...]] = {"smoke": (1,), "small": (1, 2), "full": (1, 2, 3, 4, 5)}
#: Means and standard deviations by network.
Told = dict[Network, tuple[float, float]]
# A smoke test is to end, not to learn.
_SMOKE_EPOCHS = 2


def curves(lab: Lab) -> list[Trial]:
    """What figure 8 trains: the first seed.

    >>> from gyroscope_lab.training.archive import Archive
    >>> [one.task.model for one in curves(Lab(Archive("runs"), "full"))][-2:]
    ['resnet-1202', 'resnet-lastbn-1202']
    """
    its = networks(FIGURE8, DEPTHS[lab.scale])
    return [trial(lab, "c10-deep", network, SEEDS[lab.scale][0]) for network in its]


def table1_trials(lab: Lab) -> list[Trial]:
    """What table 1 trains, on CIFAR-10.

    >>> from gyroscope_lab.training.archive import Archive
    >>> len(table1_trials(Lab(Archive("runs"), "full")))
    80
    """
    return _every(lab, "c10-deep")


def table2_trials(lab: Lab) -> list[Trial]:
    """What table 2 trains, on CIFAR-100; where digits stand in for both, the same.

    >>> from gyroscope_lab.training.archive import Archive
    >>> dict(table2_trials(Lab(Archive("runs"), "full"))[0].task.options)
    {'classes': 100}
    """
    return _every(lab, "c100-deep")


def further(lab: Lab) -> list[Trial]:
    """What section 5.1 trains besides: twice the decay and the epochs, and twice the layers; at full scale alone.

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
    """One training of the tables.

    >>> from gyroscope_lab.training.archive import Archive
    >>> one = trial(Lab(Archive("runs"), "full"), "c10-deep", Network("ResNet", 110), 1)
    >>> one.schedule.epochs, one.schedule.milestones, one.recipe.weight_decay
    (160, [79, 119], 0.0001)
    """
    its = of_network(lab, task, network)
    return Trial(its.lasting(_SMOKE_EPOCHS) if lab.scale == "smoke" else its, SGD, seed)


def _every(lab: Lab, task: str) -> list[Trial]:
    """Depth by depth and seed by seed, so that what is done after a while can be compared."""
    return [
        trial(lab, task, network, seed)
        for depth in DEPTHS[lab.scale]
        for seed in SEEDS[lab.scale]
        for network in networks(list(ARCHITECTURES), [depth])
    ]


def figure8(lab: Lab) -> Report:
    """Training loss by epoch: ResNets, and ResNets with batch normalization before the last layer."""
    found = _by_network(lab, curves(lab))
    columns = ("network", "last training loss here", "paper", "mean until the first cut of the rate")
    rows = []
    for network, cell in found.items():
        told = paper.LAST_LOSS.get(network) if lab.scale == "full" else None
        early = np.mean(cell.loss[: uncut(cell)])
        # As text, for two digits would not tell them apart.
        rows.append((str(network), f"{cell.loss[-1]:.3g}", told and f"{told:.3f}", f"{early:.3g}"))
    return Report(
        {"figure": draw_losses(found, FIGURE8)},
        (Table("Training loss", columns, tuple(rows)),),
        tuple(of_losses(found, uncut, full=lab.scale == "full")),
        {"cells": [_numbers(network, cell) for network, cell in found.items()]},
    )


def table1(lab: Lab) -> Report:
    """Test errors on CIFAR-10, and those of section 5.1."""
    report = _table(lab, table1_trials(lab), "CIFAR-10", paper.CIFAR_10)
    held = lab.held(further(lab))
    if not held:
        return report
    found = {(network_of(cell.task), cell.recipe.weight_decay): cell for cell in cells(lab, held)}
    rows = []
    for (network, decay), cell in found.items():
        mean, spread = paper.FURTHER.get((network, decay), (None, None))
        rows.append((str(network), decay, cell.task.schedule.epochs, *_error(cell), mean, spread, len(cell.results)))
    columns = ("network", "weight decay", "epochs", "test error % here", "±", "paper", "±", "seeds")
    return replace(
        report,
        tables=(*report.tables, Table("Beyond the table", columns, tuple(rows))),
        verdicts=(*report.verdicts, *of_twice_the_layers(found)),
    )


def table2(lab: Lab) -> Report:
    """Test errors on CIFAR-100."""
    return _table(lab, table2_trials(lab), "CIFAR-100", paper.CIFAR_100)


def uncut(cell: Cell) -> int:
    """How many epochs a training had before its rate was cut, as far as all seeds went.

    >>> from gyroscope_lab.training.result import Result
    >>> from gyroscope_lab.training.tasks import task
    >>> result = Result(1.0, 0.9, loss=[0.1] * 160, layers=["a"], rotation=[[0.0]])
    >>> uncut(Cell(task("c10-deep"), SGD, (result,)))
    79
    """
    return min([len(cell.loss), *cell.task.schedule.milestones])


def _by_network(lab: Lab, trials: Sequence[Trial]) -> dict[Network, Cell]:
    return {network_of(cell.task): cell for cell in some(cells(lab, trials))}


def _table(lab: Lab, trials: Sequence[Trial], data: str, told: Told) -> Report:
    found = _by_network(lab, trials)
    told = told if lab.scale == "full" else {}
    here = data if lab.scale == "full" else f"digits, in place of {data}"
    return Report(
        {},
        (_layout(found, told, here), _seeds(lab, trials, found, told)),
        tuple(of_errors(found, full=lab.scale == "full", data=data)),
        {"cells": [_numbers(network, cell) for network, cell in found.items()]},
    )


def _layout(found: dict[Network, Cell], told: Told, data: str) -> Table:
    """The paper's own layout, its numbers under ours."""
    depths = sorted({network.depth for network in found})
    rows: list[tuple[str | None, ...]] = []
    for architecture in ARCHITECTURES:
        its = [Network(architecture, depth) for depth in depths]
        rows.append(
            (architecture, "here", *(_with_spread(*_error(found[one])) if one in found else None for one in its))
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
        mean, spread = _error(cell)
        paper_mean, paper_spread = told.get(network, (None, None))
        difference = None if paper_mean is None else mean - paper_mean
        each = (errors.get((network, seed)) for seed in SEEDS[lab.scale])
        rows.append((str(network), *each, mean, spread, paper_mean, paper_spread, difference))
    which = (f"seed {seed}" for seed in SEEDS[lab.scale])
    columns = ("network", *which, "mean", "±", "paper", "±", "difference")
    return Table("Test error (%) by seed, as far as there are any", columns, tuple(rows))


def _error(cell: Cell) -> tuple[float, float | None]:
    return 100 - cell.test, cell.spread


def _with_spread(mean: float, spread: float | None) -> str:
    return f"{mean:.2f}" if spread is None else f"{mean:.2f} ± {spread:.2f}"


def _numbers(network: Network, cell: Cell) -> dict[str, object]:
    """What is kept as JSON; rotation, of a thousand layers, is not what these are about."""
    kept = {key: value for key, value in cell.numbers().items() if key != "rotation"}
    return {"architecture": network.architecture, "depth": network.depth, **kept}


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
