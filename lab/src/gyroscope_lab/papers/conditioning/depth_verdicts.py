"""What section 5 of the conditioning paper says of training losses and test errors by depth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import sqrt

import numpy as np

from gyroscope_lab.papers.cells import Cell
from gyroscope_lab.papers.conditioning.by_depth import DEPTHS, Network
from gyroscope_lab.papers.conditioning.depth_paper import CIFAR_10, CIFAR_100
from gyroscope_lab.papers.study import Verdict

Value = Callable[[Cell], float]

# Of the paper's networks; others of its claims are about those that are there.
_DEEPEST = DEPTHS["full"][-1]
# Where the paper says "nearly the same": losses by depth lie within this share of their mean.
_NEARLY = 0.1
# The images that test errors are of, and how many standard errors two are apart that do not differ by chance.
_IMAGES, _APART = 10_000, 2.0


def of_losses(found: Mapping[Network, Cell], uncut: Callable[[Cell], int], *, full: bool) -> list[Verdict]:
    """Figure 8, from what is there: whole columns of depths, or pairs of one depth.

    Args:
        found: by network.
        uncut: how many epochs a training had before its rate was first cut.
        full: whether these are the paper's networks; others are too shallow, or trained too shortly, to tell.
    """

    def early(cell: Cell) -> float:
        return float(np.mean(cell.loss[: uncut(cell)]))

    def last(cell: Cell) -> float:
        return float(cell.loss[-1])

    plain, normal = _column(found, "ResNet"), _column(found, "ResNet_LastBN")
    return [
        _climbs(plain, early, "the deeper a ResNet, the larger its training loss until the rate is cut", full=full),
        _alike(normal, early, full=full),
        _falls(normal, last, "the deeper a ResNet_LastBN, the lower its training loss in the end", full=full),
        _below(found, last, "ResNet_LastBN has a lower training loss than ResNet at every depth",
               ("0.043 against 0.081 at 56 layers", "{:.3g} against {:.3g}"), ("ResNet_LastBN", "ResNet"), full=full),
    ]  # fmt: skip


def of_errors(found: Mapping[Network, Cell], *, full: bool, data: str) -> list[Verdict]:
    """Tables 1 and 2, from what is there.

    Args:
        found: by network.
        full: as above.
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
               (compared("ResNet_LastBN", "ResNet"), form), ("ResNet_LastBN", "ResNet"), full=full, noise=_noise),
        _falls(_column(found, "ResNet_LastBN"), _error, "the deeper a ResNet_LastBN, the lower its test error",
               full=full, noise=_noise),
        _degenerates(_column(found, "ResNet")),
        _below(last, _error, f"of {_DEEPEST} layers PreResNet has a lower test error than PreResNet_v1",
               (form.format(*(told[Network(name, _DEEPEST)][0] for name in ("PreResNet", "PreResNet_v1"))), form),
               ("PreResNet", "PreResNet_v1"), full=full, noise=_noise),
        _below(found, _error, "ResNet_LastBN has a lower test error than PreResNet at every depth",
               (compared("ResNet_LastBN", "PreResNet"), form), ("ResNet_LastBN", "PreResNet"), full=full,
               noise=_noise),
    ]  # fmt: skip


def of_twice_the_layers(found: Mapping[tuple[Network, float], Cell]) -> list[Verdict]:
    """Section 5.1: networks of 2402 layers, from what is there.

    Args:
        found: by network and weight decay.
    """
    plain, normal = (found.get((Network(name, 2402), 1e-4)) for name in ("ResNet", "ResNet_LastBN"))
    if plain is None or normal is None:
        return []
    here = f"train {plain.train:.1f} % against {normal.train:.1f} %"
    holds = not plain.learned and normal.learned
    return [Verdict("of 2402 layers ResNet cannot converge and ResNet_LastBN can", "test error 5.04 %", here, holds)]


def _error(cell: Cell) -> float:
    return 100 - cell.test


def _column(found: Mapping[Network, Cell], architecture: str) -> list[tuple[int, Cell]]:
    return sorted(
        ((network.depth, cell) for network, cell in found.items() if network.architecture == architecture),
        key=lambda pair: pair[0],
    )


def _listed(column: Sequence[tuple[int, Cell]], value: Value) -> str:
    return ", ".join(f"{depth}: {value(cell):.3g}" for depth, cell in column) or "–"


def _climbs(column: Sequence[tuple[int, Cell]], value: Value, says: str, *, full: bool) -> Verdict:
    holds = all(value(a) < value(b) for (_, a), (_, b) in pairwise(column))
    return Verdict(says, "so", _listed(column, value), holds if full and len(column) > 1 else None)


def _falls(
    column: Sequence[tuple[int, Cell]], value: Value, says: str, *, full: bool, noise: Value = lambda cell: 0.0
) -> Verdict:
    pairs = [(deeper, shallower) for (_, shallower), (_, deeper) in pairwise(column)]
    return Verdict(says, "so", _listed(column, value), _all_below(pairs, value, noise) if full else None)


def _noise(cell: Cell) -> float:
    """The standard error of a mean test error: from its seeds, or of one seed that of so many images."""
    if cell.spread is not None:
        return cell.spread / sqrt(len(cell.results))
    return sqrt(_error(cell) * cell.test / _IMAGES)


def _all_below(pairs: Sequence[tuple[Cell, Cell]], value: Value, noise: Value) -> bool | None:
    """Whether the first is below the second in all pairs; None where that may be chance.

    It is not where any pair is the other way round by more than its noise, and it is where none is the other way round
    and all together are apart by more than theirs.
    """
    gains = [value(second) - value(first) for first, second in pairs]
    squares = [noise(first) ** 2 + noise(second) ** 2 for first, second in pairs]
    if any(gain <= -_APART * sqrt(square) for gain, square in zip(gains, squares, strict=True)):
        return False
    sure = bool(pairs) and min(gains) > 0 and sum(gains) > _APART * sqrt(sum(squares))
    return True if sure else None


def _alike(column: Sequence[tuple[int, Cell]], value: Value, *, full: bool) -> Verdict:
    values = [value(cell) for _, cell in column]
    says = "ResNet_LastBN has nearly the same training loss at every depth until the rate is cut"
    if len(values) < 2:
        return Verdict(says, "so", _listed(column, value), None)
    middle = sum(values) / len(values)
    spread = max(abs(value - middle) for value in values) / middle
    here = f"{_listed(column, value)}: within {100 * spread:.0f} % of their mean"
    return Verdict(says, "so", here, spread <= _NEARLY if full else None)


def _below(
    found: Mapping[Network, Cell],
    value: Value,
    says: str,
    words: tuple[str, str],
    names: tuple[str, str],
    *,
    full: bool,
    noise: Value = lambda cell: 0.0,
) -> Verdict:
    """Whether the first is below the second at every depth that has both."""
    told, form = words
    first, second = (dict(_column(found, name)) for name in names)
    both = {depth: (first[depth], second[depth]) for depth in first if depth in second}
    here = "; ".join(f"{depth}: {form.format(value(a), value(b))}" for depth, (a, b) in both.items()) or "–"
    return Verdict(says, told, here, _all_below(list(both.values()), value, noise) if full else None)


def _degenerates(column: Sequence[tuple[int, Cell]]) -> Verdict:
    says = f"a ResNet of {_DEEPEST} layers has a larger test error than shallower ones"
    by_depth = dict(column)
    deepest = by_depth.pop(_DEEPEST, None)
    pairs = [] if deepest is None else [(other, deepest) for other in by_depth.values()]
    return Verdict(says, "so", _listed(column, _error), _all_below(pairs, _error, _noise))
