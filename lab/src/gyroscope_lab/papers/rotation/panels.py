"""Layouts that several figures of the rotation papers have."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gyroscope_lab.papers.cells import Cell
from gyroscope_lab.training.recipe import Recipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Times, and the values measured then.
Curve = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]

# The background of a note, so that it can be read on curves.
_PAPER: dict[str, Any] = {"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1.0}


@dataclass(frozen=True)
class Storeys:
    """A column of two panels: rotation curves [times, layers] above, training accuracies in percent below.

    >>> Storeys("SGD", (np.arange(2.0), np.zeros((2, 7))), (np.arange(1.0), np.zeros(1))).note
    ''
    """

    title: str
    rotation: Curve
    accuracy: Curve
    note: str = ""


def title(recipe: Recipe) -> str:
    """Return a recipe's name as figures print it.

    >>> title(Recipe("Layca 3^-3, alpha -0.6", 3**-3, control="layca", alpha=-0.6))
    'Layca $3^{-3}$, $\\\\alpha = -0.6$'
    """
    name = re.sub(r"(\d)\^(-?[\d.]+)", r"$\1^{\2}$", recipe.name)
    return re.sub(r"alpha (\S+)", r"$\\alpha = \1$", name)


def grid(
    rows: Sequence[Sequence[Cell]], *, heading: str, note: Callable[[Cell], str] = lambda cell: f"{cell.test:.1f} %"
) -> Figure:
    """Draw rotation curves in the layout of the paper's figure 1: one row per task, one panel per recipe."""
    from gyroscope.figures import Panel, rotation_panels

    panels = [
        Panel(title=_panel_title(cell, many=len(rows) > 1), curves=cell.rotation, note=note(cell))
        for row in rows
        for cell in row
    ]
    widest = max(len(row) for row in rows)
    columns = widest if len(rows) > 1 else ceil(widest / ceil(widest / 7))
    return rotation_panels(panels, columns=columns, title=heading)


def _panel_title(cell: Cell, *, many: bool) -> str:
    return f"{cell.task.name}\n{title(cell.recipe)}" if many else title(cell.recipe)


def by_task(rows: Sequence[Sequence[Cell]], *, heading: str, note: Callable[[Cell], str]) -> Figure:
    """Draw rotation curves with one column per task, one row per recipe; panels of a single task are side by side."""
    from gyroscope.figures import Panel, rotation_panels

    panels = [
        Panel(f"{cell.task.name}\n{title(cell.recipe)}", cell.rotation, note=note(cell)) for row in rows for cell in row
    ]
    columns = len(rows[0]) if len(rows[0]) > 1 else len(panels)
    return rotation_panels(panels, columns=columns, title=heading)


#: Test accuracies over a parameter: ours, and the paper's.
Sweep = tuple[Mapping[float, float], Mapping[float, float]]


def draw_sweeps(rows: Sequence[tuple[str, Sweep, Sweep]], *, alpha: str, rate: str) -> Figure:
    """Draw test accuracies over α and over ρ(0), one row per task.

    Args:
        rows: the name of each task, and both sweeps.
        alpha, rate: the labels of the two axes.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 2.6 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), 2, squeeze=False, sharey="row")
    for (left, right), (name, *sweeps) in zip(axes, rows, strict=True):
        for ax, (here, there) in zip((left, right), sweeps, strict=True):
            ax.plot(list(here), list(here.values()), "o-", color="C0", markersize=4, label="here")
            if there:
                ax.plot(list(there), list(there.values()), "s--", color="0.6", markersize=4, label="paper")
                ax.legend(fontsize=8)
        right.set_xscale("log", base=3)
        left.set_ylabel(f"{name}\ntest accuracy (%)", fontsize=9)
        left.set_xlabel(alpha, fontsize=9)
        right.set_xlabel(rate, fontsize=9)
    return figure


def draw_storeys(storeys: Sequence[Storeys], *, heading: str, xlabel: str) -> Figure:
    """Draw rotation curves above training accuracies: the layout of figures 4 and 10 of the rotation paper.

    >>> flat = (np.arange(3.0), np.zeros((3, 2)))
    >>> figure = draw_storeys([Storeys("SGD", flat, (np.arange(3.0), np.zeros(3)))], heading="", xlabel="epoch")
    >>> [ax.get_xlabel() for ax in figure.axes[:2]]
    ['', 'epoch']
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

    from gyroscope.figures import rotation_curves
    from gyroscope.figures.drawing import DEPTH, finish, limits, look_of

    columns = len(storeys)
    figure = Figure(figsize=(2.2 * columns + 1.6, 4.4), layout="constrained")
    axes = figure.subplots(2, columns, sharex="col", sharey="row", squeeze=False)
    for (above, below), one in zip(axes.T, storeys, strict=True):
        rotation_curves(one.rotation[1], one.rotation[0], ax=above, xlabel="", ylabel="", title=one.title)
        above.text(0.05, 0.95, one.note, transform=above.transAxes, va="top", fontsize=8, bbox=_PAPER)
        times, values = one.accuracy
        below.plot(times, values, color="black", linewidth=1.1, marker="o" if len(values) < 3 else "", markersize=4)
        finish(below, xlabel=xlabel)
    every = np.concatenate([one.rotation[1].ravel() for one in storeys])
    axes[0, 0].set_ylim(limits(look_of("rotation"), every, close=True))
    axes[1, 0].set_ylim(0, 103)
    axes[0, 0].set_ylabel("rotation (cosine distance)", fontsize=9)
    axes[1, 0].set_ylabel("training accuracy (%)", fontsize=9)
    figure.suptitle(heading, fontsize=11)
    mappable = ScalarMappable(cmap=DEPTH)
    bar = figure.colorbar(mappable, ax=list(axes[0]), aspect=20, pad=0.01, label="layer: first → last")
    bar.set_ticks([])
    return figure
