"""The drawing of figures 4 and A11: training losses, one line a legend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from gyroscope_lab.papers.cells import Cell
from gyroscope_lab.training.task import Task

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(found: Mapping[str, Cell], task: Task, *, heading: str, of_steps: bool) -> Figure:
    """Draw the loss of every cell over epochs, or where an epoch is some steps of all examples, over these."""
    from matplotlib.figure import Figure

    from gyroscope.figures.drawing import finish

    figure = Figure(figsize=(6.0, 3.8), layout="constrained")
    ax = figure.subplots()
    # An epoch's loss is the mean over its steps, and belongs in their middle.
    width = task.schedule.passes if of_steps else 1
    for number, (code, cell) in enumerate(found.items()):
        times = width * (np.arange(len(cell.loss)) + 0.5)
        colour = "black" if "0" not in code else f"C{number - 1}"
        ax.plot(times, cell.loss, color=colour, linewidth=1.8 if "0" not in code else 1.2, label=code)
    ax.set_yscale("log")
    finish(ax, xlabel="iteration" if of_steps else "epoch", ylabel="training loss", title=heading)
    ax.legend(title="0: blocked", fontsize=8, title_fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    return figure
