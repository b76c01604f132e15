"""Layer rotation under control: which layers turn, and how fast (figures 1 and 9 and table 2 of the rotation paper).

Section 4 of the paper trains each task with Layca at one global rate ρ(0) and multipliers over the layers that α sets,
and finds that the further all layers rotate, the better the network generalizes: best is α = 0 and ρ(0) = 3⁻³, where
nearly all of them reach a cosine distance of 1.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.cells import LEARNED, Cell, cells
from gyroscope_lab.papers.chance import all_exceed, all_hold
from gyroscope_lab.papers.rotation import paper
from gyroscope_lab.papers.rotation.best_layca import in_training
from gyroscope_lab.papers.rotation.panels import Sweep, draw_sweeps, grid
from gyroscope_lab.papers.rotation.recipes import layca, over_seeds
from gyroscope_lab.papers.study import Report, Study, Table, Verdict, on_task
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.trial import Trial

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The five columns of figure 1, the best last.
COLUMNS = (layca(-3, alpha=-0.6), layca(-3, alpha=0.6), layca(-5), layca(-4), layca(-3))
#: The tasks for which figure 9 has more.
SWEPT = ("c10-cnn1", "c100-resnet", "tiny-cnn")
ALPHAS = (-0.8, -0.6, -0.4, -0.3, -0.2, -0.1, 0.0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8)
POWERS = (-7, -6, -5, -4, -3, -2, -1, 0)
# In points: a fall of accuracy that does not count, and ten times that for "widely".
_NOISE, _WIDELY = 0.5, 5.0


def columns(lab: Lab) -> list[Trial]:
    """Return the trials of figure 1 and table 2.

    >>> from gyroscope_lab.training.archive import Archive
    >>> len(columns(Lab(Archive("runs"), "full")))
    25
    """
    return [trial for task in lab.tasks(paper.TASKS) for trial in over_seeds(task, COLUMNS, lab.seeds)]


def sweep(lab: Lab) -> list[Trial]:
    """Return the trials of figure 9.

    >>> from gyroscope_lab.training.archive import Archive
    >>> len(sweep(Lab(Archive("runs"), "full", only=("c10-cnn1",))))
    20
    """
    return [trial for task in lab.tasks(SWEPT) for trial in over_seeds(task, recipes_of_sweep(lab), lab.seeds)]


def recipes_of_sweep(lab: Lab) -> list[Recipe]:
    """Return the α and ρ(0) of figure 9, each configuration once; a smoke test takes a few of them."""
    if lab.scale == "smoke":
        return [layca(power) for power in (-7, -5, -3, -2)] + [layca(-3, alpha=alpha) for alpha in (-0.6, 0.6)]
    rates = [layca(power) for power in POWERS]
    return rates + [layca(-3, alpha=alpha) for alpha in ALPHAS if alpha != 0.0]


def figure1(lab: Lab) -> Report:
    """Report rotation curves and test accuracies of the five columns."""
    rows = _rows(lab, columns(lab))
    best = {row[0].task.name: row[-1] for row in rows}

    def note(cell: Cell) -> str:
        reference = best[cell.task.name]
        return f"{cell.test:.2f} %" if cell is reference else f"{cell.test - reference.test:+.2f} points"

    figure = grid(rows, heading="Layer rotation under Layca, and test accuracy against the last", note=note)
    return Report(
        {"figure": figure},
        tuple(_accuracies(row) for row in rows),
        tuple(verdict for row in rows for verdict in on_task(row[0].task.name, _verdicts(row))),
        {"cells": [cell.numbers() for row in rows for cell in row]},
    )


def figure9(lab: Lab) -> Report:
    """Report test accuracy by α and by ρ(0)."""
    rows = _rows(lab, sweep(lab))
    return Report(
        {"figure": _draw_sweep(rows)},
        tuple(_accuracies(row) for row in rows),
        tuple(verdict for row in rows for verdict in _sweep_verdicts(lab, row)),
        {"cells": [cell.numbers() for row in rows for cell in row]},
    )


def table2(lab: Lab) -> Report:
    """Report training accuracies of the five columns, measured during the last epoch as in the paper."""
    rows = _rows(lab, columns(lab))
    found = []
    for row in rows:
        told = dict(zip(COLUMNS, paper.TRAIN_LAYCA.get(row[0].task.name, ()), strict=False))
        lines = tuple((cell.recipe.name, in_training(cell), told.get(cell.recipe), cell.train) for cell in row)
        heads = ("configuration", "train % here", "paper", "of the tested weights")
        found.append(Table(row[0].task.name, heads, lines))
    every = [in_training(cell) for row in rows for cell in row]
    learned = sum(train >= 100 * LEARNED for train in every)
    says = Verdict(
        f"(nearly) every configuration learns its training set, to {100 * LEARNED:g} % or more",
        "24 of 25",
        f"{learned} of {len(every)}",
        learned >= len(every) * 24 / 25,
    )
    return Report({}, tuple(found), (says,), {"cells": [cell.numbers() for row in rows for cell in row]})


def _rows(lab: Lab, trials: list[Trial]) -> list[list[Cell]]:
    found: dict[str, list[Cell]] = {}
    for cell in cells(lab, trials):
        found.setdefault(cell.task.name, []).append(cell)
    return list(found.values())


def _accuracies(row: list[Cell]) -> Table:
    lines = []
    for cell in row:
        told = paper.told(cell.task.name, cell.recipe.name)
        difference = None if told is None else cell.test - told
        lines.append((cell.recipe.name, cell.test_told, told, difference, cell.train, cell.mean_rotation))
    columns = ("configuration", "test % here", "paper", "difference", "train %", "mean rotation")
    return Table(row[0].task.name, columns, tuple(lines))


def _verdicts(row: list[Cell]) -> list[Verdict]:
    name = row[0].task.name
    if len(row) < len(COLUMNS):
        return []
    first, last, slow, _, best = row
    learned = [cell for cell in row if cell.learned]
    furthest = max(row, key=lambda cell: cell.mean_rotation)
    worst = min(learned, key=lambda cell: cell.test, default=best)
    return [
        Verdict(
            f"{name}: the configuration that rotates most generalizes best",
            "Layca 3^-3 in all five tasks",
            f"{furthest.recipe.name}; {max(row, key=lambda cell: cell.test).recipe.name}",
            all_exceed([furthest.ahead_of(cell) for cell in row if cell is not furthest]),
        ),
        Verdict(
            f"{name}: slow rotation is enough to learn the training set, and generalizes worse",
            "by up to 24 points",
            f"{slow.train:.1f} % train, {slow.ahead_of(best).to(1)} points test",
            all_hold([slow.learned, best.ahead_of(slow).above]),
        ),
        Verdict(
            f"{name}: prioritizing the last layers costs more than prioritizing the first",
            "in all five tasks",
            f"{last.ahead_of(best).to(1)} against {first.ahead_of(best).to(1)} points",
            first.ahead_of(last).above,
        ),
        Verdict(
            f"{name}: configurations that learn the training set differ widely on the test set",
            "by up to 30 points",
            f"{best.ahead_of(worst).to(1)} points among {len(learned)}",
            best.ahead_of(worst).exceeds(_WIDELY, tests=len(learned) - 1)
            if len(learned) > 1 and best in learned
            else None,
        ),
    ]


def _sweep_verdicts(lab: Lab, row: list[Cell]) -> list[Verdict]:
    wanted = [recipe for recipe in recipes_of_sweep(lab) if not recipe.alpha]
    ordered = sorted((cell for cell in row if not cell.recipe.alpha), key=_rate)
    if len(ordered) < len(wanted):
        return []
    best = max(ordered, key=lambda cell: cell.test)
    climbs = ordered[: ordered.index(best) + 1]
    grows = all_exceed([b.ahead_of(a) for a, b in pairwise(climbs)], -_NOISE)
    return [
        Verdict(
            f"{row[0].task.name}: the faster all layers rotate, the better, as long as training can follow",
            "accuracy climbs up to 3^-3",
            ", ".join(f"{cell.recipe.name.split()[-1]}: {cell.test:.1f}" for cell in ordered),
            all_hold([len(climbs) > 2, grows]),
            over=lambda trial: trial.task.name == row[0].task.name and not trial.recipe.alpha,
        )
    ]


def _rate(cell: Cell) -> float:
    return cell.recipe.rate


def _draw_sweep(rows: list[list[Cell]]) -> Figure:
    def over(row: list[Cell], place: Callable[[Cell], float]) -> Sweep:
        its = {place(cell): cell for cell in sorted(row, key=place)}
        told = {x: paper.told(cell.task.name, cell.recipe.name) for x, cell in its.items()}
        return {x: cell.test for x, cell in its.items()}, {x: test for x, test in told.items() if test is not None}

    shown = []
    for row in rows:
        alphas = [cell for cell in row if cell.recipe.rate == 3.0**-3]
        rates = [cell for cell in row if not cell.recipe.alpha]
        shown.append((row[0].task.name, over(alphas, lambda cell: cell.recipe.alpha), over(rates, _rate)))
    return draw_sweeps(shown, alpha="α: first layers faster ← 0 → last layers faster", rate="ρ(0)")


STUDIES = (
    Study("rotation/fig1", "Figure 1: rotation curves and test accuracy of five configurations", columns, figure1),
    Study("rotation/fig9", "Figure 9: test accuracy over α and over ρ(0)", sweep, figure9),
    Study("rotation/table2", "Table 2: training accuracies of figure 1", columns, table2),
)
