"""The drawing of figure A10: quantities by layer, a line an iteration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gyroscope_lab.papers.conditioning.gradient_explosion import Course

_ROWS = (
    ("curvature", r"$\lambda_{\max}(F_k)$"),
    ("weight", r"$\sigma_{\max}(W_k)$"),
    ("domination", r"$\sigma_{\max}(\partial L/\partial W_k)\,/\,\sigma_{\max}(W_k)$"),
)


def draw(networks: Sequence[Course]) -> Figure:
    """Draw λmax(F_k) as the paper does, a column a network; below it σmax of the weights, and of gradients over these.

    Iteration 0 is black; those after it go from dark to light.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    from gyroscope.figures.drawing import depth_colours, finish

    columns = len(networks)
    figure = Figure(figsize=(4.4 * columns + 1.0, 7.2), layout="constrained")
    axes = figure.subplots(len(_ROWS), columns, sharex="col", squeeze=False)
    for column, one in enumerate(networks):
        for row, (quantity, label) in enumerate(_ROWS):
            ax, values = axes[row, column], getattr(one, quantity)
            colours = ["black", *depth_colours(max(1, len(values) - 1))]
            for iteration, line in enumerate(values):
                at = np.arange(1, len(line) + 1)
                width = 2.0 if iteration == 0 else 1.1
                ax.plot(at, line, color=colours[iteration], linewidth=width, label=f"Iter{iteration}")
            ax.set_yscale("log")
            last = row == len(_ROWS) - 1
            title = f"({'abcdefgh'[column]}) {one.name}" if row == 0 else None
            finish(ax, xlabel="layer" if last else "", ylabel=label if column == 0 else "", title=title)
            ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes[-1, column].axhline(1.0, color="0.6", linewidth=0.8, linestyle=":")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False)
    return figure
