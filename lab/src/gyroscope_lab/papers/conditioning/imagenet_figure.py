"""Errors by epoch, a panel a depth: the layout of figure A13 of the conditioning paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {"ResNet": "#2c728e", "ResNet_LastBN": "#e8a500"}


class Errors(Protocol):
    """What is drawn of a network."""

    @property
    def architecture(self) -> str:
        """ResNet or ResNet_LastBN."""

    @property
    def depth(self) -> int:
        """How many layers."""

    @property
    def training_errors(self) -> list[float]:
        """While training, epoch by epoch, in percent."""

    @property
    def test_errors(self) -> list[float]:
        """On the test set, epoch by epoch, in percent."""


def draw_errors(found: Sequence[Errors]) -> Figure:
    """Draw training errors as solid lines, and test errors as dashed ones."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    depths = sorted({one.depth for one in found})
    figure = Figure(figsize=(4.2 * len(depths) + 1.6, 3.4), layout="constrained")
    axes = figure.subplots(1, len(depths), squeeze=False)[0]
    for letter, depth, ax in zip("abcd", depths, axes, strict=False):
        for one in found:
            if one.depth != depth:
                continue
            for errors, dash, name in ((one.training_errors, "-", "training"), (one.test_errors, "--", "test")):
                epochs, label = np.arange(1, len(errors) + 1), f"{one.architecture}, {name}"
                ax.plot(epochs, errors, dash, color=_COLOURS[one.architecture], linewidth=1.2, label=label)
        ax.set_title(f"({letter}) {depth} layers", fontsize=10)
        ax.set_xlabel("epoch", fontsize=9)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.grid(color="0.9", linewidth=0.6)
        ax.set_axisbelow(True)
        ax.tick_params(labelsize=8)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
    axes[0].set_ylabel("top-1 error (%)", fontsize=9)
    lines = {line.get_label(): line for ax in axes for line in ax.lines}
    figure.legend(lines.values(), lines, loc="outside right center", fontsize=8)
    figure.suptitle("Batch normalization before the last layer", fontsize=11)
    return figure
