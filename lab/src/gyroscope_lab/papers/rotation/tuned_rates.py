"""Layer rotation rates when ρ(0) is tuned at each α (figure 2 and table 2 of the speed paper).

Its section 4 compares priorities of layers fairly: each α has the ρ(0) that is best for it by validation accuracy,
found by the search of appendix B.2. Two rules come out: rates should be uniform over the layers (α = 0), and as high
as training allows. Where a task holds no validation data out, as the digits do, test accuracy chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import isnan
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.cells import Cell, cells
from gyroscope_lab.papers.chance import all_exceed
from gyroscope_lab.papers.rotation import paper
from gyroscope_lab.papers.rotation.alpha_and_rate import ALPHAS, POWERS, SWEPT
from gyroscope_lab.papers.rotation.best_layca import in_training
from gyroscope_lab.papers.rotation.panels import draw_sweeps, grid
from gyroscope_lab.papers.rotation.recipes import layca, over_seeds
from gyroscope_lab.papers.study import Report, Study, Table, Verdict, on_task
from gyroscope_lab.training.task import Task
from gyroscope_lab.training.trial import Trial

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Figure 2a: test accuracies in percent by α, at the ρ(0) that the search found; the last two tasks lack α = ±0.8.
_CNN1 = (82.67, 82.97, 83.92, 84.82, 85.78, 87.09, 88.26, 88.39, 88.64, 88.60, 87.53, 82.65, 62.74)
_RESNET = (50.82, 54.63, 56.55, 56.78, 59.31, 59.81, 57.37, 56.06, 54.77, 48.12, 37.32)
_TINY = (41.27, 42.03, 43.93, 46.94, 49.93, 50.89, 49.75, 49.81, 48.59, 46.67, 33.91)
#: The same by task and α.
TUNED: dict[str, dict[float, float]] = {
    "c10-cnn1": dict(zip(ALPHAS, _CNN1, strict=True)),
    "c100-resnet": dict(zip(ALPHAS[1:-1], _RESNET, strict=True)),
    "tiny-cnn": dict(zip(ALPHAS[1:-1], _TINY, strict=True)),
}
#: Table 2: training accuracies of α = −0.6, α = +0.6, ρ = 3⁻⁵, ρ = 3⁻⁴, best. The paper has the first two swapped, as
#: the later one has in its own table 2, whose loss curves tell which is which.
TRAIN: dict[str, tuple[float, ...]] = {
    "c10-cnn1": (100.0, 99.55, 100.0, 100.0, 99.99),
    "c100-resnet": (97.38, 97.9, 99.87, 99.99, 99.75),
    "tiny-cnn": (99.98, 98.64, 99.97, 99.97, 98.91),
}
#: The lowest of these: a network that gets there is close to perfect.
CLOSE = 97.0
#: The powers of 3 that are tried first.
START = (-3.0, -4.0, -2.0)
#: The search ends here: these are the ends of the papers' other searches.
LOWEST, HIGHEST = -7.0, 2.0
#: Scores by the power of 3 of the rate, in the order of trying.
Tried = Mapping[float, float]
Power = TypeVar("Power", bound=float)
#: An α and a power of 3.
Place = tuple[float, float]


@dataclass(frozen=True)
class Tuned:
    """A task's results: by α and log₃ ρ(0) as the search tried them, and by log₃ ρ(0) at α = 0."""

    task: Task
    by_alpha: Mapping[float, Mapping[float, Cell]]
    by_rate: Mapping[int, Cell]

    def power(self, alpha: float) -> float:
        """The best log₃ ρ(0) at this α."""
        return best({power: validation(cell) for power, cell in self.by_alpha[alpha].items()})

    def chosen(self, alpha: float) -> Cell:
        """Return the cell of the best log₃ ρ(0) at this α."""
        return self.by_alpha[alpha][self.power(alpha)]

    @property
    def columns(self) -> list[Cell]:
        """The five columns of figure 2b; the last is the best at α = 0, in the paper's tasks 3⁻³."""
        last = self.by_rate[-3] if self.task.name in SWEPT else self.chosen(0.0)
        return [self.chosen(-0.6), self.chosen(0.6), self.by_rate[-5], self.by_rate[-4], last]


def alphas(lab: Lab) -> tuple[float, ...]:
    """Return the α of figure 2a; fewer of them below full scale.

    >>> from gyroscope_lab.training.archive import Archive
    >>> len(alphas(Lab(Archive("runs"), "full"))), alphas(Lab(Archive("runs")))
    (13, (-0.6, 0.0, 0.6))
    """
    return {"smoke": (-0.6, 0.0, 0.6), "small": (-0.8, -0.6, -0.3, 0.0, 0.3, 0.6, 0.8), "full": ALPHAS}[lab.scale]


def powers(lab: Lab) -> tuple[int, ...]:
    """Return the log₃ ρ(0) of figure 2a at α = 0.

    >>> from gyroscope_lab.training.archive import Archive
    >>> powers(Lab(Archive("runs"), "full"))
    (-7, -6, -5, -4, -3, -2, -1, 0)
    """
    return (-7, -5, -4, -3, -2) if lab.scale == "smoke" else POWERS


def trials(lab: Lab) -> list[Trial]:
    """Return the trials of figure 2 that come before its searches.

    >>> from gyroscope_lab.training.archive import Archive
    >>> len(trials(Lab(Archive("runs"), "full", only=("c10-cnn1",))))
    44
    """
    places = [(alpha, power) for alpha in alphas(lab) for power in START] + [(0.0, power) for power in powers(lab)]
    recipes = list(dict.fromkeys(layca(power, alpha=alpha) for alpha, power in places))
    return [trial for task in lab.tasks(SWEPT) for trial in over_seeds(task, recipes, lab.seeds)]


def tuned(lab: Lab) -> list[Tuned]:
    """Search, task by task; rates are trained as the search comes to them."""
    found = []
    for task in lab.tasks(SWEPT):
        tried = search(alphas(lab), partial(_scores, lab, task))
        by_alpha = {
            alpha: dict(zip(its, _cells(lab, task, [(alpha, power) for power in its]), strict=True))
            for alpha, its in tried.items()
        }
        by_rate = dict(zip(powers(lab), _cells(lab, task, [(0.0, power) for power in powers(lab)]), strict=True))
        found.append(Tuned(task, by_alpha, by_rate))
    return found


def validation(cell: Cell) -> float:
    """Return the best validation accuracy, by which rates are chosen: the mean over seeds in percent, 0 for nan.

    >>> from gyroscope_lab.training.result import Result
    >>> from gyroscope_lab.training.tasks import task
    >>> result = Result(1.0, 0.5, loss=[0.1], layers=["a"], rotation=[[0.0], [0.2]], validation=[0.75, 0.625])
    >>> validation(Cell(task("digits"), layca(-3), (result,)))
    75.0
    """
    value = float(np.mean([100 * result.best_validation for result in cell.results]))
    return 0.0 if isnan(value) else value


def best_by_validation(by_power: Mapping[Power, Cell]) -> Power:
    """Return the power of the best rate by validation accuracy; the lowest of equals.

    >>> from gyroscope_lab.training.result import Result
    >>> from gyroscope_lab.training.tasks import task
    >>> tests = {-3: 0.90, -2: 0.95}
    >>> made = {power: Result(1.0, test, loss=[], layers=[], rotation=[[]]) for power, test in tests.items()}
    >>> best_by_validation({power: Cell(task("digits"), layca(power), (result,)) for power, result in made.items()})
    -2
    """
    return max(sorted(by_power), key=lambda power: validation(by_power[power]))


def figure2(lab: Lab) -> Report:
    """Report (a) accuracies by α and by ρ(0), (b) rotation curves of five configurations."""
    found = tuned(lab)

    def note(cell: Cell) -> str:
        reference = next(one for one in found if one.task == cell.task).columns[-1]
        return f"{cell.test:.2f} %" if cell is reference else f"{cell.test - reference.test:+.2f} %"

    rows = [one.columns for one in found]
    curves = grid(rows, heading="Layer rotation at tuned rates, and test accuracy", note=note)
    return Report(
        {"figure": _draw(found), "curves": curves},
        tuple(table for one in found for table in (_by_alpha(one), _by_rate(one))),
        tuple(verdict for one in found for verdict in on_task(one.task.name, _verdicts(one))),
        _numbers(found),
    )


def table2(lab: Lab) -> Report:
    """Report training accuracies of the five configurations."""
    found = tuned(lab)
    tables = []
    for one in found:
        told = TRAIN.get(one.task.name, (None,) * len(one.columns))
        pairs = zip(one.columns, told, strict=True)
        lines = tuple((cell.recipe.name, in_training(cell), number, cell.train) for cell, number in pairs)
        tables.append(Table(one.task.name, ("configuration", "train % here", "paper", "of the tested weights"), lines))
    every = [in_training(cell) for one in found for cell in one.columns]
    says = Verdict(
        "low and uneven rates lead to close to perfect training performance too",
        f"{min(min(row) for row in TRAIN.values()):g} % or more",
        f"{min(every):.2f} % or more",
        min(every) >= CLOSE,
    )
    return Report({}, tuple(tables), (says,), _numbers(found))


def _scores(lab: Lab, task: Task, places: list[Place]) -> list[float]:
    return [validation(cell) for cell in _cells(lab, task, places)]


def _cells(lab: Lab, task: Task, places: Sequence[Place]) -> list[Cell]:
    return cells(lab, over_seeds(task, [layca(power, alpha=alpha) for alpha, power in places], lab.seeds))


def _numbers(found: Sequence[Tuned]) -> dict[str, Any]:
    return {one.task.name: _numbers_of(one) for one in found}


def _numbers_of(one: Tuned) -> dict[str, Any]:
    tried = {
        f"{alpha:g}": {f"3^{power:g}": {"score": validation(cell), **cell.numbers()} for power, cell in its.items()}
        for alpha, its in one.by_alpha.items()
    }
    return {
        "chosen by": "validation accuracy" if one.task.source.validation else "test accuracy",
        "chosen": {f"{alpha:g}": f"3^{one.power(alpha):g}" for alpha in one.by_alpha},
        "tried": tried,
        "by rate": {f"3^{power:g}": cell.numbers() for power, cell in one.by_rate.items()},
    }


def _difference(here: float, told: float | None) -> float | None:
    return None if told is None else here - told


def _by_alpha(one: Tuned) -> Table:
    lines = []
    for alpha in sorted(one.by_alpha):
        cell, told = one.chosen(alpha), TUNED.get(one.task.name, {}).get(alpha)
        tries = len(one.by_alpha[alpha])
        where = (f"{alpha:+g}" if alpha else "0", f"3^{one.power(alpha):g}", tries)
        lines.append((*where, cell.test_told, told, _difference(cell.test, told), cell.train, cell.mean_rotation))
    heads = ("α", "best ρ(0)", "tried", "test % here", "paper", "difference", "train %", "mean rotation")
    return Table(f"{one.task.name}: ρ(0) tuned at each α", heads, tuple(lines))


def _by_rate(one: Tuned) -> Table:
    lines = []
    for power, cell in one.by_rate.items():
        told = paper.BY_RATE.get(one.task.name, {}).get(power)
        lines.append(
            (f"3^{power:g}", cell.test_told, told, _difference(cell.test, told), cell.train, cell.mean_rotation)
        )
    heads = ("ρ(0)", "test % here", "paper", "difference", "train %", "mean rotation")
    return Table(f"{one.task.name}: ρ(0) at α = 0", heads, tuple(lines))


def _verdicts(one: Tuned) -> list[Verdict]:
    name = one.task.name
    uniform, first, last = one.chosen(0.0), one.chosen(-0.6), one.chosen(0.6)
    rates = [cell for cell in one.by_rate.values() if cell.learned] or list(one.by_rate.values())
    fastest, slowest = max(rates, key=lambda cell: cell.test), rates[0]
    high = max(rates[-2:], key=lambda cell: cell.test)  # the highest that learns may be just too high: grids are coarse
    even, uneven = one.columns[-1].unevenness, min(cell.unevenness for cell in one.columns[:2])
    return [
        Verdict(
            f"{name}: rates should be uniform, also when ρ(0) is tuned: prioritizing either end costs accuracy",
            "up to 20 points",
            f"{first.ahead_of(uniform).to(1)} at α = -0.6, {last.ahead_of(uniform).to(1)} at α = +0.6",
            all_exceed([uniform.ahead_of(first), uniform.ahead_of(last)]),
        ),
        Verdict(
            f"{name}: prioritizing the first layers to an extreme generalizes better than the last",
            "in all three tasks",
            f"{first.test:.1f} % at α = -0.6, {last.test:.1f} % at α = +0.6, {first.ahead_of(last).to(1)} points",
            first.ahead_of(last).above,
        ),
        Verdict(
            f"{name}: rates should be as high as training allows",
            "up to 30 points",
            f"best at {fastest.recipe.name}, {fastest.ahead_of(slowest).to(1)} points over {slowest.recipe.name}; "
            f"the highest that learns is {rates[-1].recipe.name}",
            all_exceed([high.ahead_of(cell) for cell in rates[:-2]]),
        ),
        Verdict(
            f"{name}: at α = 0 layers rotate synchronously",
            "nearly all layers, in all three tasks",
            f"they differ by {even:.0%} of their mean, at α = ±0.6 by {uneven:.0%} or more",
            even < uneven,
        ),
    ]


def _draw(found: Sequence[Tuned]) -> Figure:
    rows = []
    for one in found:
        tests = {alpha: one.chosen(alpha).test for alpha in sorted(one.by_alpha)}
        rates = {3.0**power: cell.test for power, cell in one.by_rate.items()}
        told = {3.0**power: test for power, test in paper.BY_RATE.get(one.task.name, {}).items()}
        rows.append((one.task.name, (tests, TUNED.get(one.task.name, {})), (rates, told)))
    return draw_sweeps(rows, alpha="α, at its best ρ(0)", rate="ρ(0) at α = 0")


def search(alphas: Sequence[float], score: Callable[[list[Place]], Sequence[float]]) -> dict[float, dict[float, float]]:
    """Search for the best rate at each α (appendix B.2 of the speed paper): return what was tried, and its scores.

    The search starts from 3⁻⁴, 3⁻³ and 3⁻². As long as the best rate is the lowest or the highest of those tried, the
    next lower or higher one, by a factor of 3, is tried too. After that, where the best rates of two neighboring α
    differ by a factor of 3, the rate between them, √3 from either, is tried for both.

    Args:
        alphas: any.
        score: gives the scores of (α, log₃ ρ), of several at a time; the higher the better.

    >>> tried = search([-0.2, 0.0], lambda places: [-abs(power + 1 + 5 * alpha) for alpha, power in places])
    >>> {alpha: sorted(its) for alpha, its in tried.items()}
    {-0.2: [-4.0, -3.0, -2.0, -1.0, -0.5, 0.0, 1.0], 0.0: [-4.0, -3.0, -2.0, -1.0, -0.5, 0.0]}
    """
    tried: dict[float, dict[float, float]] = {alpha: {} for alpha in alphas}
    while places := [(alpha, power) for alpha, its in tried.items() for power in extended(its)]:
        _score(tried, places, score)
    _score(tried, between(tried), score)
    return tried


def best(tried: Tried) -> float:
    """Return the power with the highest score; of equals, the one that was tried first.

    >>> best({-3: 0.9, -4: 0.8, -2: 0.9})
    -3
    """
    return max(tried, key=lambda power: tried[power])


def extended(tried: Tried) -> list[float]:
    """Return the powers to try next at one α.

    >>> extended({}), extended({-3: 0.8, -4: 0.9, -2: 0.7}), extended({-3: 0.9, -4: 0.8, -2: 0.7})
    ([-3.0, -4.0, -2.0], [-5], [])
    """
    if not tried:
        return list(START)
    top = best(tried)
    further = [top - 1] if top == min(tried) else [top + 1] if top == max(tried) else []
    return [power for power in further if LOWEST <= power <= HIGHEST]


def between(tried: Mapping[float, Tried]) -> list[Place]:
    """Return the rates between the best ones of neighboring α that differ by a factor of 3, for both.

    >>> between({0.1: {-2: 0.8, -3: 0.7}, 0.0: {-2: 0.7, -3: 0.8}, 0.4: {-4: 0.5}})
    [(0.0, -2.5), (0.1, -2.5)]
    """
    bests = {alpha: best(tried[alpha]) for alpha in sorted(tried)}
    found = [
        (alpha, (bests[low] + bests[high]) / 2)
        for low, high in pairwise(bests)
        if abs(bests[low] - bests[high]) == 1
        for alpha in (low, high)
    ]
    return list(dict.fromkeys(found))


def _score(
    tried: dict[float, dict[float, float]], places: list[Place], score: Callable[[list[Place]], Sequence[float]]
) -> None:
    for (alpha, power), value in zip(places, score(places), strict=True):
        tried[alpha][power] = value


STUDIES = (
    Study("speed/fig2", "Figure 2: accuracy over α with ρ(0) tuned, over ρ(0), and rotation curves", trials, figure2),
    Study("speed/table2", "Table 2: training accuracies of figure 2b", trials, table2),
)
