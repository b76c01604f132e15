"""Training losses by epoch, a panel an architecture: the layout of figure 8 of the conditioning paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gyroscope_lab.papers.cells import Cell
from gyroscope_lab.papers.conditioning.by_depth import Network

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Of the depths, dark to light.
_COLOURS = ("#440154", "#2c728e", "#28ae80", "#e8a500")


def draw_losses(found: Mapping[Network, Cell], architectures: Sequence[str]) -> Figure:
    """Draw the losses of up to four depths; on a logarithmic axis, for in the end they are small.

    >>> from gyroscope_lab.training.result import Result
    >>> from gyroscope_lab.papers.conditioning.by_depth import SGD
    >>> from gyroscope_lab.training.tasks import task
    >>> result = Result(1.0, 0.9, loss=[1.0, 0.5], layers=["a"], rotation=[[0.0]])
    >>> found = {Network("ResNet", 56): Cell(task("c10-deep"), SGD, (result,))}
    >>> [ax.get_title() for ax in draw_losses(found, ["ResNet", "ResNet_LastBN"]).axes]
    ['(a) ResNet', '(b) ResNet_LastBN']
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    from gyroscope.figures.drawing import log_ticks

    figure = Figure(figsize=(8.6, 3.3), layout="constrained")
    axes = figure.subplots(1, len(architectures), sharex=True, sharey=True, squeeze=False)[0]
    colours = dict(zip(sorted({network.depth for network in found}), _COLOURS, strict=False))
    for letter, architecture, ax in zip("abcd", architectures, axes, strict=False):
        for depth, colour in colours.items():
            cell = found.get(Network(architecture, depth))
            if cell is not None:
                epochs = np.arange(1, len(cell.loss) + 1)
                ax.plot(epochs, cell.loss, color=colour, linewidth=1.1, label=str(depth))
        ax.set_title(f"({letter}) {architecture}", fontsize=10)
        ax.set_xlabel("epoch", fontsize=9)
        ax.grid(color="0.9", linewidth=0.6)
        ax.set_axisbelow(True)
        ax.tick_params(labelsize=8)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
    axes[0].set_yscale("log")
    log_ticks(axes[0].yaxis, *axes[0].get_ylim())
    axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].set_ylabel("training loss", fontsize=9)
    lines = {line.get_label(): line for ax in axes for line in ax.lines}
    shown = {str(depth): lines[str(depth)] for depth in colours}
    figure.legend(shown.values(), shown, title="layers", loc="outside right center", fontsize=8, title_fontsize=8)
    figure.suptitle("Training loss of residual networks, by depth", fontsize=11)
    return figure
