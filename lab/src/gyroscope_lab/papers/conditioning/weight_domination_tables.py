"""The tables and verdicts of figures 4 and A11: training losses by what is blocked, and by rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import inf, isfinite

import numpy as np

from gyroscope_lab.papers.cells import Cell
from gyroscope_lab.papers.study import Table, Verdict
from gyroscope_lab.training.task import Task


def at_best_rate(found: Mapping[str, Cell], task: Task, whole: str) -> Table:
    """Each network at its best rate, beside the one that nothing is blocked in, `whole`."""
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


def by_rate(every: Mapping[str, Sequence[Cell]], task: Task) -> list[Table]:
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


def verdicts(found: Mapping[str, Cell], every: Mapping[str, Sequence[Cell]], whole: str) -> tuple[Verdict, ...]:
    """What the paper says of networks whose layers are in part blocked."""
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
        _higher("but performance is degenerated", final(found[whole]), list(map(final, others))),
        *_at_equal_rates(every, whole),
        _tested(found[whole], others),
        *_tested_from_the_first(found),
    )


def _higher(says: str, reached: float, losses: Sequence[float]) -> Verdict:
    if not isfinite(reached):
        return Verdict(says, "a higher training loss", "the network that nothing is blocked in diverged", None)
    worse = sum(loss > reached for loss in losses)
    ratios = np.array(losses) / reached
    here = f"of {worse} of {len(losses)}, {ratios.min():.2f} to {ratios.max():.1f} times that without"
    return Verdict(says, "a higher training loss", here, worse == len(losses))


def _at_equal_rates(every: Mapping[str, Sequence[Cell]], whole: str) -> list[Verdict]:
    """The same rate by rate, where there are several: at its best one a network may be where rounding decides."""
    losses = {code: {one.recipe.rate: final(one) for one in its} for code, its in every.items()}
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
    return Verdict(
        "but performance is degenerated, on the test set", "no numbers: a lower accuracy", here, worse == len(lost)
    )


def _tested_from_the_first(found: Mapping[str, Cell]) -> list[Verdict]:
    """Of the networks that are blocked from the first layer on, whether each more that is costs more."""
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


def final(cell: Cell) -> float:
    """The loss in the end; infinite where it is no number any more."""
    value = float(cell.loss[-1])
    return value if isfinite(value) else inf
