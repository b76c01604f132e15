"""Does the best rate of steering move with the size of a network and the length of its training?

A character GPT is trained at several rates ρ of steering, and at several learning rates η of AdamW, from a smallest
size. Then one thing grows at a time: width, depth, batch, or the number of steps. Two numbers are reported per change:
how far the best rate moves, in powers of two, and what is lost by keeping the best rate of the smallest. A third is
reported per kind: the one rate that loses least where it loses most, and how much that is. This one was added after the
losses at the small scale were known.

Rates lie a factor of two apart and are the same for all sizes. They are compared at seed 0 first. While the best rate
of any size lies at the edge of the grid, the next rate beyond it is tried at every size, up to three times. A best rate
still at the edge is marked. The best rate of each size, the second best, that of the smallest, and the one for all are
then trained from all seeds. If their mean is above the loss of another rate, the other rate takes its place, and is
trained from all seeds too. If that one lies at the edge of the grid, it is marked, and the grid does not grow again.
This was added after part of the results at the full scale was known: there, AdamW's best rates at seed 0 failed from
other seeds.

The presets of steering, which have one rate for all sizes or one that follows from the width, are trained at every
size too. What they lose is compared with the best rate of the grid.

Verdicts take errors over seeds into account. They compare two kinds over the sizes of which the losses of both are
known.

All kinds lower their rate along half a cosine. AdamW has a decay of 0.1 and the usual warm-up; steering has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, log2, nan
from typing import TYPE_CHECKING, Any

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.beyond.problems import (
    GPT,
    NATS,
    adamw,
    decided,
    deviation,
    difference,
    mean,
    raw,
    score,
    seeds,
    steered,
    untuned,
    warmed,
)
from gyroscope_lab.papers.cells import Cell, cells, some
from gyroscope_lab.papers.chance import Estimate, all_exceed, all_hold, gain, mean_of, smaller_at_worst
from gyroscope_lab.papers.study import Report, Study, Table, Verdict
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.task import Task
from gyroscope_lab.training.trial import Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D


@dataclass(frozen=True)
class Sizes:
    """The sizes of one scale: the smallest, and the values to which each thing grows."""

    width: int
    depth: int
    batch: int
    steps: int
    grows: Mapping[str, tuple[int, ...]]


#: The sizes by scale.
SIZES = {
    "smoke": Sizes(8, 1, 8, 20, {"width": (16,), "steps": (40,)}),
    "small": Sizes(32, 2, 16, 120, {"width": (128,), "depth": (6,), "batch": (64,), "steps": (480,)}),
    "full": Sizes(
        128,
        4,
        32,
        600,
        {"width": (256, 512, 1024), "depth": (8, 16), "batch": (128, 512), "steps": (2500, 10_000)},
    ),
}
#: The rates: of steering with AdamW and with Muon inside, and of AdamW.
GRIDS = {
    "steer adamw": tuple(0.028 * 2.0**power for power in (-1, 0, 1, 2, 3)),
    "steer muon": tuple(0.028 * 2.0**power for power in (-1, 0, 1, 2, 3)),
    "AdamW": tuple(2.0**power for power in (-10, -9, -8, -7, -6)),
}
#: How often a grid is extended.
MOVES = 3
_SMOKE_GRID = slice(0, 2)
_DECAY = 0.1
# The number of evaluations of a training.
_READINGS = 4


def kinds(lab: Lab) -> dict[str, tuple[float, ...]]:
    """Return the rates by kind; all kinds at full scale, two rates in a smoke test."""
    if lab.scale == "full":
        return GRIDS
    if lab.scale == "small":
        return {name: GRIDS[name] for name in ("steer muon", "AdamW")}
    return {name: GRIDS[name][_SMOKE_GRID] for name in ("steer adamw", "AdamW")}


def recipe(task: Task, kind: str, rate: float) -> Recipe:
    """Return the recipe of a kind at a rate.

    >>> recipe(GPT.small, "steer muon", 0.014).name
    'steer muon 0.014'
    """
    return adamw(task, rate, _DECAY) if kind == "AdamW" else steered(kind.removeprefix("steer "), rate=rate)


def sized(lab: Lab) -> dict[str, Task]:
    """Return the tasks by name: the smallest first, then one per change.

    >>> from gyroscope_lab.training.archive import Archive
    >>> list(sized(Lab(Archive("runs"), "small")))
    ['smallest', 'width 128', 'depth 6', 'batch 64', 'steps 480']
    """
    sizes = SIZES[lab.scale]
    start = {"width": sizes.width, "depth": sizes.depth, "batch": sizes.batch, "steps": sizes.steps}
    changes = [("smallest", start)]
    changes += [(f"{name} {to}", start | {name: to}) for name, values in sizes.grows.items() for to in values]
    return {name: _task(lab, **its) for name, its in changes}


def _task(lab: Lab, *, width: int, depth: int, batch: int, steps: int) -> Task:
    base = GPT.at(lab)
    options = dict(base.options) | {"width": width, "depth": depth}
    if lab.scale == "full":
        options |= {"heads": 4, "dropout": 0.0}
    schedule = replace(base.schedule, epochs=_READINGS, drawn=steps // _READINGS, batch=batch)
    name = f"{base.name}-{depth}x{width}-{batch}-{steps}"
    return replace(base, name=name, options=tuple(options.items()), schedule=schedule)


def trials(lab: Lab) -> list[Trial]:
    """Return the trials that are known beforehand, at every size: grids from seed 0, and presets from all seeds."""
    found = []
    for kind, rates in kinds(lab).items():
        for size in sized(lab):
            found += [*_trials(lab, kind, size, rates), *_presets(lab, kind, size)]
    return list({one.key: one for one in reversed(found)}.values())[::-1]  # a preset's rate may be in the grid


def _presets(lab: Lab, kind: str, size: str) -> list[Trial]:
    if kind == "AdamW":
        return []
    task = sized(lab)[size]
    return [Trial(task, untuned(task, kind.removeprefix("steer ")), seed) for seed in seeds(lab)]


def _trials(lab: Lab, kind: str, size: str, rates: Iterable[float], seeds: Iterable[int] = (0,)) -> list[Trial]:
    task = sized(lab)[size]
    task = warmed(task) if kind == "AdamW" else task
    return [Trial(task, recipe(task, kind, rate), seed) for rate in rates for seed in seeds]


@dataclass(frozen=True)
class Curve:
    """The losses of one kind at one size.

    Attributes:
        kind: the kind of recipe.
        size: the name of the size.
        cells: the cell of each rate that is known, of seed 0 or of all seeds.
        preset: the cell of the preset of steering, if it is known.
    """

    kind: str
    size: str
    cells: Mapping[float, Cell]
    preset: Cell | None = None

    @property
    def tried(self) -> dict[float, float]:
        """The mean loss over the known seeds by rate; infinite where one has no finite test loss."""
        return {rate: value if isfinite(value := score(cell)) else inf for rate, cell in self.cells.items()}

    @property
    def best(self) -> float:
        """The rate of the lowest loss."""
        return min(self.tried, key=self.tried.__getitem__)

    @property
    def second(self) -> float:
        """The best rate but one."""
        return self._best_but(self.best)

    def _best_but(self, rate: float) -> float:
        return min((one for one in self.cells if one != rate), key=self.tried.__getitem__)

    @property
    def at_edge(self) -> bool:
        """True if the best rate is the lowest or the highest."""
        return self.best in (min(self.cells), max(self.cells))

    def moved(self, smallest: Curve) -> float:
        """How far the best rate is from that of the smallest, in powers of two."""
        return log2(self.best / smallest.best)

    def lost(self, rate: float) -> Estimate | None:
        """What is lost with a rate, in nats: compared with the best of the others, over the seeds of the rate.

        With the best rate nothing is lost, up to the error with which it is ahead of the second best. None if that is
        not known, also because the best of the others lacks one of these seeds so far.
        """
        if rate not in self.cells:
            return None
        its, rival = self.cells[rate].by_seed, self.cells[self._best_but(rate)].by_seed
        if not its.keys() <= rival.keys():
            return None
        found = gain(*([one[seed].best_test_loss for seed in its] for one in (its, rival)))
        return replace(found, mean=max(0.0, found.mean)) if isfinite(found.mean) else None

    @property
    def preset_loses(self) -> Estimate | None:
        """What is lost with the preset, in nats; negative if it is better than all rates. None if it is not known."""
        if self.preset is None:
            return None
        if self.preset.recipe.rate in self.cells:
            return self.lost(self.preset.recipe.rate)
        found = difference(self.preset, self.cells[self.best])
        return found if isfinite(found.mean) else None


def one_rate(its: Sequence[Curve]) -> float:
    """Return the one rate for all sizes that loses least where it loses most."""
    rates = set.intersection(*(set(curve.cells) for curve in its))
    return min(sorted(rates), key=lambda rate: max(curve.tried[rate] - curve.tried[curve.best] for curve in its))


def curves(lab: Lab) -> dict[str, list[Curve]]:
    """Return the curves of each kind, the smallest size first; a size is left out until its grid is known."""
    found = {kind: _extended(lab, kind, rates) for kind, rates in kinds(lab).items()}
    seeded = {kind: _seeded(lab, its) for kind, its in found.items() if its and its[0].size == "smallest"}
    return {kind: [_with_preset(lab, curve) for curve in its] for kind, its in seeded.items()}


def _with_preset(lab: Lab, curve: Curve) -> Curve:
    return replace(curve, preset=next(iter(cells(lab, _presets(lab, curve.kind, curve.size))), None))


def _seeded(lab: Lab, its: Sequence[Curve]) -> list[Curve]:
    """The same curves, with all seeds at the rates that are reported; with these, another rate may be the best."""
    while True:
        found = [_with_seeds(lab, curve, (curve.best, curve.second, its[0].best, one_rate(its))) for curve in its]
        if _known(found) == _known(its):
            return found
        its = found


def _known(its: Sequence[Curve]) -> int:
    """The number of known trainings."""
    return sum(len(cell.results) for curve in its for cell in curve.cells.values())


def _with_seeds(lab: Lab, curve: Curve, reported: Iterable[float]) -> Curve:
    known = cells(lab, _trials(lab, curve.kind, curve.size, sorted(set(reported)), seeds(lab)))
    rates = {recipe(cell.task, curve.kind, rate): rate for cell in known for rate in reported}
    return replace(curve, cells={**curve.cells, **{rates[cell.recipe]: cell for cell in known}})


def _extended(lab: Lab, kind: str, rates: tuple[float, ...]) -> list[Curve]:
    """The curves of one kind on its grid at seed 0, which grows while the best rate of a size lies at its edge.

    It does not grow again for a rate at the edge that becomes the best with other seeds (`_seeded`).
    """
    found = _curves(lab, kind, rates)
    for _ in range(0 if lab.scale == "smoke" else MOVES):
        best = {curve.best for curve in found}
        beyond = [rates[0] / 2] * (rates[0] in best) + [rates[-1] * 2] * (rates[-1] in best)
        wider = tuple(sorted((*rates, *beyond)))
        more = _curves(lab, kind, wider)
        if _known(more) == _known(found):
            break
        rates, found = wider, more
    return found


def _curves(lab: Lab, kind: str, rates: Sequence[float]) -> list[Curve]:
    asked = {size: _trials(lab, kind, size, rates) for size in sized(lab)}
    known = {(cell.task, cell.recipe): cell for cell in cells(lab, [trial for its in asked.values() for trial in its])}
    result = []
    for size, its in asked.items():
        found = {rate: cell for rate, t in zip(rates, its, strict=True) if (cell := known.get((t.task, t.recipe)))}
        if all(rate in found for rate in kinds(lab)[kind]):
            result.append(Curve(kind, size, found))
    return result


def conclude(lab: Lab) -> Report:
    """Report how far the best rate moves, and what is lost with the rate of the smallest."""
    by_kind = curves(lab)
    some(list(by_kind))
    return Report(
        {"figure": _draw(by_kind, list(sized(lab)))},
        tuple(_table(kind, its) for kind, its in by_kind.items()),
        tuple(_verdicts(lab, by_kind)),
        {
            "cells": [raw(cell) for its in by_kind.values() for curve in its for cell in curve.cells.values()],
            "presets": [raw(curve.preset) for its in by_kind.values() for curve in its if curve.preset is not None],
        },
    )


def _table(kind: str, its: Sequence[Curve]) -> Table:
    rows = []
    for curve in its:
        best = curve.cells[curve.best]
        spread = deviation(best)
        rate, lost = f"{curve.best:.3g}" + (" (edge)" if curve.at_edge else ""), curve.lost(its[0].best)
        preset = curve.preset_loses
        told = (f"{score(best):.3f}", spread and f"{spread:.3f}", len(best.results))
        rows.append(
            (
                curve.size,
                rate,
                *told,
                f"{curve.moved(its[0]):+.0f}",
                None if lost is None else f"{lost.mean:.3f}",
                None if preset is None else preset.to(3),
            )
        )
    columns = (
        "size",
        "best rate",
        "best test loss",
        "± over seeds",
        "seeds",
        "moved (powers of 2)",
        "lost with the smallest's",
        "lost with the preset",
    )
    return Table(kind, columns, tuple(rows))


#: What is lost by size, in nats.
Lost = dict[str, Estimate]


def _lost(its: Sequence[Curve], rate: float) -> Lost:
    """What each size loses with one rate; sizes of which that is not known are left out."""
    return {curve.size: found for curve in its if (found := curve.lost(rate)) is not None}


def _verdicts(lab: Lab, by_kind: Mapping[str, Sequence[Curve]]) -> list[Verdict]:
    theirs = by_kind.get("AdamW", ())
    if len(theirs) < 2:
        return []
    sizes = list(sized(lab))
    whole = len(by_kind) == len(kinds(lab)) and all(len(its) == len(sizes) for its in by_kind.values())
    shared = {kind: one_rate(its) for kind, its in by_kind.items()}
    found = []
    for kind, its in by_kind.items():
        if kind == "AdamW":
            continue
        known = whole and all(_is_seeded(lab, by_kind[one], shared[one]) for one in (kind, "AdamW"))
        found += [
            _serves(kind, its, len(sizes) - 1, known=known),
            _moves_less(kind, its, theirs, len(sizes) - 1, known=known),
            _one_for_all(kind, (its, shared[kind]), (theirs, shared["AdamW"]), len(sizes), known=known),
            _preset(lab, kind, its, len(sizes), known=known),
        ]
    return found


def _serves(kind: str, its: Sequence[Curve], count: int, *, known: bool) -> Verdict:
    """The verdict on the rate of the smallest network, at the larger sizes."""
    lost = list(_lost(its[1:], its[0].best).values())
    most, average = max((one.mean for one in lost), default=nan), mean([one.mean for one in lost])
    furthest = max((abs(curve.moved(its[0])) for curve in its), default=0.0)
    return Verdict(
        f"{kind}: the rate of the smallest network serves all sizes and lengths",
        f"at most {NATS} nats are lost (our aim)",
        f"at most {most:.3f} nats, {average:.3f} on average ({len(lost)} of {count} sizes); the best moves by up to "
        f"2^{furthest:.0f}",
        all_exceed([-one for one in lost], -NATS) if known else None,
    )


def _preset(lab: Lab, kind: str, its: Sequence[Curve], count: int, *, known: bool) -> Verdict:
    """The verdict on the preset, at all sizes."""
    says = f"{kind}: the preset serves all sizes and lengths"
    lost = [one for curve in its if (one := curve.preset_loses) is not None]
    if not lost:
        return Verdict(says, f"at most {NATS} nats are lost (our aim)", "no size is known", None)
    most, average = max(one.mean for one in lost), mean([one.mean for one in lost])
    whole = known and len(lost) == count and decided(lab, [curve.preset for curve in its if curve.preset is not None])
    return Verdict(
        says,
        f"at most {NATS} nats are lost (our aim)",
        f"at most {most:.3f} nats, {average:.3f} on average ({len(lost)} of {count} sizes)",
        all_exceed([-one for one in lost], -NATS) if whole else None,
    )


def _moves_less(kind: str, its: Sequence[Curve], others: Sequence[Curve], count: int, *, known: bool) -> Verdict:
    """The verdict on moves and losses, over the larger sizes of which the losses of both kinds are known.

    A best rate has moved for sure if the rate of the smallest loses more than by chance. A kind moves less if all of
    its moves are fewer than the sure ones of the other.
    """
    lost = [_lost(one[1:], one[0].best) for one in (its, others)]
    sizes = [size for size in lost[0] if size in lost[1]]
    says = f"{kind}: its best rate moves less than AdamW's, and less is lost by keeping it"
    if not sizes:
        return Verdict(says, "less on average (our aim)", "no size is known of both", None)
    moves = [{curve.size: abs(curve.moved(one[0])) for curve in one} for one in (its, others)]
    moved = [mean([one[size] for size in sizes]) for one in moves]
    sure = mean([moves[1][size] if lost[1][size].above else 0.0 for size in sizes])
    mine, theirs = (mean_of([one[size] for size in sizes]) for one in lost)
    holds = all_hold([True if moved[0] < sure else None, (theirs - mine).above])
    return Verdict(
        says,
        "less on average (our aim)",
        f"2^{moved[0]:.1f} and {mine.mean:.3f}; AdamW 2^{moved[1]:.1f} and {theirs.mean:.3f} nats "
        f"({len(sizes)} of {count} sizes)",
        holds if known else None,
    )


def _one_for_all(
    kind: str, mine: tuple[Sequence[Curve], float], theirs: tuple[Sequence[Curve], float], count: int, *, known: bool
) -> Verdict:
    """The verdict on one rate for all sizes, over those of which the losses of both kinds are known."""
    both = [_lost(*one) for one in (mine, theirs)]
    sizes = [size for size in both[0] if size in both[1]]
    says = f"{kind}: one rate for all sizes loses less than AdamW's one learning rate, where each loses most"
    if not sizes:
        return Verdict(says, "less (our aim)", "no size is known of both", None)
    ours, adamws = ([lost[size] for size in sizes] for lost in both)
    return Verdict(
        says,
        "less (our aim)",
        f"{max(one.mean for one in ours):.3f} nats with ρ = {mine[1]:.3g}; AdamW "
        f"{max(one.mean for one in adamws):.3f} with η = {theirs[1]:.3g} ({len(sizes)} of {count} sizes)",
        smaller_at_worst(ours, adamws) if known else None,
    )


def _is_seeded(lab: Lab, its: Sequence[Curve], shared: float) -> bool:
    """Return whether all seeds of the rates that verdicts compare are known, with finite test losses."""
    rates = [(curve, rate) for curve in its for rate in (curve.best, its[0].best, shared)]
    if any(curve.lost(rate) is None for curve, rate in rates):
        return False
    return decided(lab, [curve.cells[rate] for curve, rate in rates])


def _draw(by_kind: Mapping[str, Sequence[Curve]], sizes: Sequence[str]) -> Figure:
    """Draw the loss by rate, one panel per kind, one line per size, of the same color in all panels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.2 + 3.0 * len(by_kind), 3.4), layout="constrained")
    axes = figure.subplots(1, len(by_kind), squeeze=False, sharey=True)[0]
    lines: dict[str, Line2D] = {}
    for ax, (kind, its) in zip(axes, by_kind.items(), strict=True):
        for curve in its:
            lines[curve.size] = _line(ax, curve, sizes.index(curve.size))
        ax.axvline(its[0].best, color="0.6", linewidth=0.8, linestyle=":")
        ax.set(xscale="log", xlabel="η" if kind == "AdamW" else "ρ")
        rates = sorted({rate for curve in its for rate in curve.cells})
        ax.set_xticks(rates, [f"{rate:.2g}" for rate in rates], fontsize=7)
        ax.minorticks_off()
        ax.set_title(kind, fontsize=9)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("best test loss (nats)")
    drawn = [lines[size] for size in sizes if size in lines]
    axes[-1].legend(handles=drawn, fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.suptitle("Loss by rate, mean over seeds (rings: the best; dotted: that of the smallest)")
    return figure


def _line(ax: Axes, curve: Curve, place: int) -> Line2D:
    known = {rate: value for rate, value in curve.tried.items() if isfinite(value)}
    color = "black" if place == 0 else f"C{place - 1}"
    ax.plot(curve.best, curve.tried[curve.best], "o", color=color, markersize=8, fillstyle="none")
    style: dict[str, Any] = {"color": color, "markersize": 3, "linewidth": 1.2, "label": curve.size}
    return ax.plot(list(known), list(known.values()), "o-", **style)[0]


STUDIES = (
    Study(
        "beyond/transfer",
        "Transfer: the best rate of a character GPT by width, depth, batch and steps",
        trials,
        conclude,
        curves,
    ),
)
