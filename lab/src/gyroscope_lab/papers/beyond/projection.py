"""Operation 1 of Layca, on and off: does the projection of steps onto the tangent of the sphere matter?

Layca removes from a step its component along the weights (operation 1) before it sets the length of the rest. Without
it, a step of the same length is taken as it is and the norm restored: Hyperball. Published results disagree on which
of the two is better. The study trains presets of steering both ways, with the same rate and all else equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.beyond.problems import (
    DIGITS_CNN,
    GPT,
    LSTM,
    VIT,
    Gain,
    Problem,
    decided,
    presets,
    raw,
    score,
    seeds,
    tolerance,
    unit,
    untuned,
)
from gyroscope_lab.papers.cells import cells, some
from gyroscope_lab.papers.study import Report, Study, Table, Verdict
from gyroscope_lab.training.trial import Trial

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The problems: one network of each kind.
PROBLEMS = (DIGITS_CNN, VIT, GPT, LSTM)
#: How norms are treated: as the presets do, and as Layca does.
NORMS = ("learned", "held")
#: The share of pairs that may differ by chance: one in twenty does, and one in five of 22 hardly ever.
CHANCE = 0.2


@dataclass(frozen=True)
class Pair(Gain):
    """A preset on a problem, without operation 1 and with it."""

    problem: Problem
    inner: str
    norms: str

    @property
    def helps(self) -> bool | None:
        """True if the gain is more than chance and than the tolerance, False if the loss is; None for one seed."""
        found = self.over_seeds
        return found.above if abs(found.mean) > tolerance(self.changed.task) else None

    @property
    def alike(self) -> bool:
        """True if the gain, or loss, is within the tolerance beyond chance; False for one seed."""
        return self.over_seeds.within(tolerance(self.changed.task)) is True


def trials(lab: Lab) -> list[Trial]:
    """Return every preset with operation 1 and without, with norms learned and held, from all seeds."""
    return [
        Trial(problem.at(lab), untuned(problem.at(lab), inner, **options), seed)
        for problem in PROBLEMS
        for inner in presets(lab, problem)
        for norms in NORMS
        for options in _both(norms)
        for seed in seeds(lab)
    ]


def _both(norms: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options with operation 1 and without; the presets say neither, and learn norms."""
    own: dict[str, Any] = {} if norms == NORMS[0] else {"norms": norms}
    return own, {**own, "project": False}


def conclude(lab: Lab) -> Report:
    """Report the score of every preset with operation 1 and without."""
    found = {(cell.task, cell.recipe): cell for cell in cells(lab, trials(lab))}
    pairs = []
    for problem in PROBLEMS:
        task = problem.at(lab)
        for inner in presets(lab, problem):
            for norms in NORMS:
                on, off = (found.get((task, untuned(task, inner, **options))) for options in _both(norms))
                if on is not None and off is not None:
                    pairs.append(Pair(off, on, problem, inner, norms))
    some(pairs)
    return Report(
        {"figure": _draw(pairs)},
        (_table(pairs),),
        tuple(_verdicts(lab, pairs)),
        {"cells": [raw(cell) for pair in pairs for cell in (pair.changed, pair.without)]},
    )


def _table(pairs: Sequence[Pair]) -> Table:
    rows = []
    for pair in pairs:
        scores = f"{score(pair.changed):.3f}", f"{score(pair.without):.3f}", f"{pair.value:+.3f}", _text(pair.noise)
        told = unit(pair.changed.task), "no" if pair.alike else "undecided" if pair.helps is None else "yes"
        rows.append((pair.problem.name, pair.inner, pair.norms, *scores, *told))
    columns = (
        "problem",
        "preset",
        "norms",
        "with operation 1",
        "without",
        "gain",
        "± (standard error)",
        "unit",
        "differs",
    )
    title = "Test error in percent, or test loss of texts, with operation 1 and without"
    return Table(title, columns, tuple(rows))


def _text(noise: float | None) -> str | None:
    return None if noise is None else f"{noise:.3f}"


def _verdicts(lab: Lab, pairs: Sequence[Pair]) -> list[Verdict]:
    """Conclude from the pairs that have all their seeds; from all pairs, and nothing, if none has."""
    sure = [pair for pair in pairs if decided(lab, (pair.changed, pair.without))]
    known, pairs = bool(sure), sure or pairs
    better, worse = ([pair for pair in pairs if pair.helps is side] for side in (True, False))
    alike = [pair for pair in pairs if pair.alike]
    few, most = CHANCE * len(pairs), (1 - CHANCE) * len(pairs)
    rest = len(pairs) - len(better) - len(worse) - len(alike)
    here = (
        f"better in {len(better)}, worse in {len(worse)}, no difference in {len(alike)}, undecided in {rest} of "
        f"{len(pairs)} pairs"
    )
    helps = True if len(better) > few and not worse else False if len(worse) > few or len(alike) >= most else None
    none = True if len(alike) >= most else False if len(better) + len(worse) > few else None
    return [
        Verdict(
            "operation 1 helps: it is better where it makes a difference",
            "Layca has it; one published comparison found the opposite",
            here,
            helps if known else None,
        ),
        Verdict(
            "operation 1 makes no difference in four fifths of the pairs or more",
            "small steps in high dimensions are nearly tangent",
            here,
            none if known else None,
        ),
    ]


def _draw(pairs: Sequence[Pair]) -> Figure:
    """Draw the gain of operation 1, images and texts in a panel each."""
    from matplotlib.figure import Figure

    parts = [[pair for pair in pairs if pair.changed.task.source.is_text is text] for text in (False, True)]
    parts = [its for its in parts if its]
    figure = Figure(figsize=(4.4 * len(parts), 0.9 + 0.26 * max(map(len, parts))), layout="constrained")
    axes = figure.subplots(1, len(parts), squeeze=False)[0]
    for ax, its in zip(axes, parts, strict=True):
        most = tolerance(its[0].changed.task)
        ax.axvspan(-most, most, color="0.93")
        ax.axvline(0, color="0.5", linewidth=0.8)
        for place, pair in enumerate(reversed(its)):
            color = {True: "C0", False: "C3", None: "0.4"}[pair.helps]
            ax.errorbar(pair.value, place, xerr=pair.over_seeds.span, fmt="o", color=color, markersize=4, linewidth=1)
        names = [f"{pair.problem.name}, {pair.inner}, norms {pair.norms}" for pair in reversed(its)]
        ax.set_yticks(range(len(its)), names, fontsize=8)
        ax.set_xlabel(f"gain ({unit(its[0].changed.task)}, intervals at 95 %)", fontsize=8)
        ax.tick_params(axis="x", labelsize=8)
        ax.locator_params(axis="x", nbins=5)
        ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Operation 1: better to the right (gray: no difference)")
    return figure


STUDIES = (
    Study(
        "beyond/projection",
        "Operation 1: Layca's projection on and off, for every preset of steering",
        trials,
        conclude,
    ),
)
