"""What section 5 of the conditioning paper says of training losses and test errors by depth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from gyroscope.lab.studies.cells import Cell
from gyroscope.lab.studies.conditioning.by_depth import DEPTHS, Network
from gyroscope.lab.studies.conditioning.depth_paper import CIFAR_10, CIFAR_100
from gyroscope.lab.studies.study import Finding

Value = Callable[[Cell], float]

# Of the paper's networks; others of its claims are about those that are there.
_DEEPEST = DEPTHS["full"][-1]
# Where the paper says "nearly the same": losses by depth lie within this share of their mean.
_NEARLY = 0.1


def of_losses(found: Mapping[Network, Cell], uncut: Callable[[Cell], int], *, full: bool) -> list[Finding]:
    """Figure 8, from what is there: whole columns of depths, or pairs of one depth.

    Args:
        found: by network.
        uncut: how many epochs a training had before its rate was first cut.
        full: whether these are the paper's networks; others are too shallow, or trained too shortly, to tell.
    """

    def early(cell: Cell) -> float:
        return float(cell.loss[uncut(cell) - 1])

    def last(cell: Cell) -> float:
        return float(cell.loss[-1])

    plain, normal = _column(found, "ResNet"), _column(found, "ResNet_LastBN")
    return [
        _climbs(plain, early, "the deeper a ResNet, the larger its training loss before the rate is cut", full=full),
        _alike(normal, early, full=full),
        _falls(normal, last, "the deeper a ResNet_LastBN, the lower its training loss in the end", full=full),
        _below(found, last, "ResNet_LastBN has a lower training loss than ResNet at every depth",
               ("0.043 against 0.081 at 56 layers", "{:.3g} against {:.3g}"), ("ResNet_LastBN", "ResNet"), full=full),
    ]  # fmt: skip


def of_errors(found: Mapping[Network, Cell], *, full: bool, data: str) -> list[Finding]:
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
               (compared("ResNet_LastBN", "ResNet"), form), ("ResNet_LastBN", "ResNet"), full=full),
        _falls(_column(found, "ResNet_LastBN"), _error, "the deeper a ResNet_LastBN, the lower its test error",
               full=full),
        _degenerates(_column(found, "ResNet")),
        _below(last, _error, f"of {_DEEPEST} layers PreResNet has a lower test error than PreResNet_v1",
               (form.format(*(told[Network(name, _DEEPEST)][0] for name in ("PreResNet", "PreResNet_v1"))), form),
               ("PreResNet", "PreResNet_v1"), full=full),
        _below(found, _error, "ResNet_LastBN has a lower test error than PreResNet at every depth",
               (compared("ResNet_LastBN", "PreResNet"), form), ("ResNet_LastBN", "PreResNet"), full=full),
    ]  # fmt: skip


def of_twice_the_layers(found: Mapping[tuple[Network, float], Cell]) -> list[Finding]:
    """Section 5.1: networks of 2402 layers, from what is there.

    Args:
        found: by network and weight decay.
    """
    plain, normal = (found.get((Network(name, 2402), 1e-4)) for name in ("ResNet", "ResNet_LastBN"))
    if plain is None or normal is None:
        return []
    here = f"train {plain.train:.1f} % against {normal.train:.1f} %"
    holds = not plain.learned and normal.learned
    return [Finding("of 2402 layers ResNet cannot converge and ResNet_LastBN can", "test error 5.04 %", here, holds)]


def _error(cell: Cell) -> float:
    return 100 - cell.test


def _column(found: Mapping[Network, Cell], architecture: str) -> list[tuple[int, Cell]]:
    return sorted(
        ((network.depth, cell) for network, cell in found.items() if network.architecture == architecture),
        key=lambda pair: pair[0],
    )


def _listed(column: Sequence[tuple[int, Cell]], value: Value) -> str:
    return ", ".join(f"{depth}: {value(cell):.3g}" for depth, cell in column) or "–"


def _climbs(column: Sequence[tuple[int, Cell]], value: Value, says: str, *, full: bool) -> Finding:
    holds = all(value(a) < value(b) for (_, a), (_, b) in pairwise(column))
    return Finding(says, "so", _listed(column, value), holds if full and len(column) > 1 else None)


def _falls(column: Sequence[tuple[int, Cell]], value: Value, says: str, *, full: bool) -> Finding:
    holds = all(value(a) > value(b) for (_, a), (_, b) in pairwise(column))
    return Finding(says, "so", _listed(column, value), holds if full and len(column) > 1 else None)


def _alike(column: Sequence[tuple[int, Cell]], value: Value, *, full: bool) -> Finding:
    values = [value(cell) for _, cell in column]
    says = "ResNet_LastBN has nearly the same training loss at every depth before the rate is cut"
    if len(values) < 2:
        return Finding(says, "so", _listed(column, value), None)
    spread = (max(values) - min(values)) * len(values) / sum(values)
    here = f"{_listed(column, value)}: within {100 * spread:.0f} % of their mean"
    return Finding(says, "so", here, spread <= _NEARLY if full else None)


def _below(
    found: Mapping[Network, Cell],
    value: Value,
    says: str,
    words: tuple[str, str],
    names: tuple[str, str],
    *,
    full: bool,
) -> Finding:
    """Whether the first is below the second at every depth that has both."""
    told, form = words
    first, second = (dict(_column(found, name)) for name in names)
    both = [(depth, value(first[depth]), value(second[depth])) for depth in first if depth in second]
    here = "; ".join(f"{depth}: {form.format(a, b)}" for depth, a, b in both) or "–"
    return Finding(says, told, here, all(a < b for _, a, b in both) if full and both else None)


def _degenerates(column: Sequence[tuple[int, Cell]]) -> Finding:
    says = f"a ResNet of {_DEEPEST} layers has a larger test error than shallower ones"
    errors = {depth: _error(cell) for depth, cell in column}
    deepest = errors.get(_DEEPEST)
    others = [error for depth, error in errors.items() if depth != _DEEPEST]
    return Finding(says, "so", _listed(column, _error), deepest > min(others) if deepest and others else None)
