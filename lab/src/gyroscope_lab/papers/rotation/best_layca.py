"""Comparison of recipes with the best of Layca, to which the papers' differences Δη refer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gyroscope_lab.papers.cells import Cell
from gyroscope_lab.papers.rotation.recipes import layca

#: The best of Layca in all five tasks.
BEST_LAYCA = layca(-3)
#: Where Layca's own layers rotate less than this on average, training is too short to tell how far layers can rotate.
FAR = 0.5

#: The cells of a task, and that of the best of Layca.
Row = tuple[list[Cell], Cell]


def compared_with_layca(found: Sequence[Cell]) -> list[Row]:
    """Return task by task the cells of other recipes, in order, and that of the best of Layca.

    Tasks that lack either are left out; they do so where only known results are shown.

    >>> from gyroscope_lab.training.recipe import Recipe
    >>> from gyroscope_lab.training.tasks import task
    >>> digits = task("digits")
    >>> [([other], best)] = compared_with_layca([Cell(digits, BEST_LAYCA, ()), Cell(digits, Recipe("SGD", 0.1), ())])
    >>> other.recipe.name, best.recipe.name
    ('SGD', 'Layca 3^-3')
    """
    best = {cell.task.name: cell for cell in found if cell.recipe == BEST_LAYCA}
    others: dict[str, list[Cell]] = {name: [] for name in best}
    for cell in found:
        if cell.recipe != BEST_LAYCA and cell.task.name in best:
            others[cell.task.name].append(cell)
    return [(its, best[name]) for name, its in others.items() if its]


def in_training(cell: Cell) -> float:
    """Return the training accuracy measured during the last epoch, in percent, as in the papers' tables.

    >>> from gyroscope_lab.training.recipe import Recipe
    >>> from gyroscope_lab.training.result import Result
    >>> from gyroscope_lab.training.tasks import task
    >>> result = Result(1.0, 0.9, loss=[0.1], layers=["a"], rotation=[[0.0], [0.2]], accuracy=[0.75])
    >>> in_training(Cell(task("digits"), Recipe("SGD", 0.1), (result,)))
    75.0
    """
    return float(np.mean([100 * result.accuracy[-1] for result in cell.results]))


def noted(rows: Sequence[Row]) -> Callable[[Cell], str]:
    """Return a function that gives the note in the panel of a cell: its test accuracy, and Δη under it."""
    best = {of.task.name: of for _, of in rows}

    def note(cell: Cell) -> str:
        of = best[cell.task.name]
        return f"{cell.test:.1f} %" + ("" if cell.recipe == of.recipe else f"\nΔη {cell.test - of.test:+.2f}")

    return note


def numbers(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the numbers as JSON holds them."""
    return {"cells": [cell.numbers() for row, best in rows for cell in (*row, best)]}
