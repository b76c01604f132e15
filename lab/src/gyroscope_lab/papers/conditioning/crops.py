"""Do the crops explain the test error of ResNet-56 in table 1 of the conditioning paper?

Our ResNet-56 is better than the paper's: 6.38 % against 7.52 ± 0.30 %. The authors' published code crops a whole batch
at one random place, from images whose edges are mirrored. fb.resnet.torch, the best known code for ResNets in Torch 7,
crops each image at a place of its own, from images with zeros around them, and mirrors each with probability ½. If the
table was made with those crops, networks trained with them should have its errors.

Both are trained from the same seeds, at the same depth, with and without LastBN.
"""

from __future__ import annotations

from dataclasses import replace
from math import nan, sqrt
from typing import TYPE_CHECKING

from gyroscope_lab.data.augment import Augmentation
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.cells import Cell, cells, some
from gyroscope_lab.papers.chance import Estimate, estimate, gain
from gyroscope_lab.papers.conditioning.by_depth import DEPTHS, Network, network_of, networks
from gyroscope_lab.papers.conditioning.depth_table import CIFAR_10, FIGURE8, trial
from gyroscope_lab.papers.study import Report, Study, Table, Verdict
from gyroscope_lab.training.trial import Trial

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The seeds by scale: the first of table 1.
SEEDS = {"smoke": (1,), "small": (1, 2, 3), "full": (1, 2, 3)}
#: The seeds of the paper's table.
PAPERS = 5
#: Errors are the same if they differ by less, in points.
SAME = 0.5
_PUBLISHED, _OWN = "one crop per batch, mirrored edges", "one crop per image, zeros around it"
_COLORS = {_PUBLISHED: "black", _OWN: "C0"}

Pairs = dict[Network, dict[str, Cell]]


def trials(lab: Lab) -> list[Trial]:
    """Return those of table 1, and the same with a crop per image.

    Digits, which table 1 does not crop, move by a pixel.

    >>> from gyroscope_lab.training.archive import Archive
    >>> [one.task.name for one in trials(Lab(Archive("runs"), "full"))][:4:3]
    ['c10-resnet-56', 'c10-resnet-56, one crop per image']
    """
    found = []
    for network in networks(FIGURE8, DEPTHS[lab.scale][:1]):
        published = [_cropped(trial(lab, "c10-deep", network, seed)) for seed in SEEDS[lab.scale]]
        found += [*published, *(_cropped(one, own=True) for one in published)]
    return found


def _cropped(one: Trial, *, own: bool = False) -> Trial:
    name, published = one.task.name, one.task.augmentation or Augmentation(1, True, "batch", "reflect", "uniform", True)
    if own:
        name, published = f"{name}, one crop per image", replace(published, per="image", fill="zero", half=False)
    return replace(one, task=replace(one.task, name=name, augmentation=published))


def conclude(lab: Lab) -> Report:
    """Report test errors with either kind of crops, compared with the paper's."""
    found: Pairs = {}
    for cell in some(cells(lab, trials(lab))):
        crops = cell.task.augmentation
        kind = _OWN if crops is not None and crops.per == "image" else _PUBLISHED
        found.setdefault(network_of(cell.task), {})[kind] = cell
    full = lab.scale == "full"
    rows = []
    for network, its in found.items():
        for kind, cell in its.items():
            mean, spread = CIFAR_10.get(network, (None, None)) if full else (None, None)
            rows.append((str(network), kind, 100 - cell.test, cell.spread, mean, spread, len(cell.results)))
    columns = ("network", "crops", "test error % here", "±", "paper", "±", "seeds")
    both = {network: its for network, its in found.items() if len(its) == len(_COLORS)}
    return Report(
        {"figure": _draw(found)},
        (Table("Test errors, mean ± standard deviation over seeds", columns, tuple(rows)),),
        tuple(verdict for network, its in both.items() for verdict in _verdicts(network, its, full=full)),
        {"cells": [{"network": str(network), "crops": kind, "errors": list(_errors(cell).values())}
                   for network, its in found.items() for kind, cell in its.items()]},
    )  # fmt: skip


def _errors(cell: Cell) -> dict[int, float]:
    """The test error in percent by seed."""
    return {seed: 100 * (1 - result.test_accuracy) for seed, result in cell.by_seed.items()}


def _verdicts(network: Network, its: dict[str, Cell], *, full: bool) -> list[Verdict]:
    """The verdicts on one network; other networks than the paper's say nothing about its errors."""
    own, published = _errors(its[_OWN]), _errors(its[_PUBLISHED])
    seeds = [seed for seed in own if seed in published]
    raised = gain([own[seed] for seed in seeds], [published[seed] for seed in seeds])
    paper, spread = CIFAR_10.get(network, (nan, 0.0))
    apart = estimate(list(own.values())) - Estimate(paper, spread / sqrt(PAPERS), PAPERS - 1)
    told = f"{paper:.2f} ± {spread:.2f} %" if full else "–"
    return [
        Verdict(
            f"{network}: a crop per image, with zeros around it, raises the test error",
            "not compared",
            f"by {raised.told} points",
            raised.above if full else None,
        ),
        Verdict(
            f"{network}: with such crops the test error is the paper's, within {SAME} points",
            told,
            f"{100 - its[_OWN].test:.2f} %",
            apart.within(SAME) if full else None,
        ),
    ]


def _draw(found: Pairs) -> Figure:
    """Draw the error of every seed, with the paper's mean and its standard deviation as a band."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 2.8), layout="constrained")
    ax = figure.subplots()
    for place, (network, its) in enumerate(found.items()):
        if network in CIFAR_10:
            mean, spread = CIFAR_10[network]
            ax.fill_between([place - 0.4, place + 0.4], mean - spread, mean + spread, color="0.9")
        for side, (kind, color) in enumerate(_COLORS.items()):
            if kind in its:
                errors = list(_errors(its[kind]).values())
                at = [place - 0.15 + 0.3 * side] * len(errors)
                ax.plot(at, errors, "o", color=color, markersize=5, label=kind if place == 0 else None)
    ax.set_xticks(range(len(found)), [str(network) for network in found], fontsize=8)
    ax.set(ylabel="test error (%)", title="Crops and the test error (gray: the paper)")
    ax.legend(fontsize=7)
    ax.spines[["top", "right"]].set_visible(False)
    return figure


STUDIES = (
    Study(
        "conditioning/crops",
        "Table 1: one crop per batch or per image, and the test error of ResNet-56",
        trials,
        conclude,
    ),
)
