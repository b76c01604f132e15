"""Rotation curves of many runs side by side: the layout of the rotation paper's first figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from textwrap import fill

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure

from gyroscope.base.accepted import listed
from gyroscope.errors import FigureError
from gyroscope.figures.depth import DEPTH
from gyroscope.figures.given import at_least_one
from gyroscope.figures.lines import span
from gyroscope.figures.looks import limits, look_of
from gyroscope.figures.notebook import as_picture
from gyroscope.figures.rotation_curves import rotation_curves

# Characters of a heading to an inch.
_TO_AN_INCH = 11


@dataclass(frozen=True)
class Panel:
    """One run: its curves [times, layers], a title above them and a note inside.

    >>> Panel("SGD", [[0.0], [0.4]], note="94.6 %").x is None
    True
    """

    title: str
    curves: npt.ArrayLike
    x: npt.ArrayLike | None = None
    note: str = ""


def rotation_panels(
    panels: Sequence[Panel], *, columns: int = 5, title: str | None = None, xlabel: str = "epoch"
) -> Figure:
    """Draw one small panel a run, all on the same axes, with a colour bar for depth.

    >>> figure = rotation_panels([Panel("slow", [[0.0], [0.1]]), Panel("fast", [[0.0], [0.8]])])
    >>> [ax.get_title() for ax in figure.axes[:2]]
    ['slow', 'fast']
    """
    panels = listed(panels)
    if not panels:
        raise FigureError("there are no panels to draw; give at least one")
    wrong = [one for one in panels if not isinstance(one, Panel)]
    if wrong:
        raise FigureError(f"panels must be a list of Panel, got {wrong[0]!r:.80}. Try [Panel('SGD', curves)].")
    columns = min(at_least_one(columns, "columns"), len(panels))
    rows = ceil(len(panels) / columns)
    figure = as_picture(Figure(figsize=(2.1 * columns + 1.2, 2.1 * rows + 0.6), layout="constrained"))
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)

    axes = list(grid.flat)
    for index, (ax, panel) in enumerate(zip(axes, panels, strict=False)):
        rotation_curves(panel.curves, panel.x, ax=ax, xlabel="", ylabel="")
        ax.set_title(panel.title, fontsize=9)
        _note(ax, panel)
        # Sharing leaves epochs under the last row only, which may be incomplete.
        ax.tick_params(labelbottom=index + columns >= len(panels))
    for ax in axes[len(panels) :]:
        ax.remove()
    # Axes are shared, and what is drawn last would set them for all.
    drawn = [np.asarray(panel.curves, dtype=float) for panel in panels]
    times = [np.arange(len(c)) if p.x is None else np.asarray(p.x) for c, p in zip(drawn, panels, strict=True)]
    span(axes[0], np.concatenate(times))
    axes[0].set_ylim(limits(look_of("rotation"), np.concatenate([curves.ravel() for curves in drawn])))

    figure.supxlabel(xlabel, fontsize=10)
    whole = " to initialization" if rows > 1 else ""  # a single row is too low for it
    figure.supylabel(f"rotation (cosine distance{whole})", fontsize=10)
    if title is not None:
        figure.suptitle(fill(str(title), round(_TO_AN_INCH * figure.get_figwidth())), fontsize=11)
    mappable = ScalarMappable(cmap=DEPTH)
    bar = figure.colorbar(mappable, ax=axes[: len(panels)], aspect=40, pad=0.01, label="layer: first → last")
    bar.set_ticks([])
    return figure


def _note(ax: Axes, panel: Panel) -> None:
    """Write where the curves are not: below where they are high, above where they are low, and legibly over both."""
    curves = np.asarray(panel.curves, dtype=float)
    high = bool(np.nanmean(curves[len(curves) // 2 :]) > 0.5) if np.isfinite(curves).any() else False
    x, y, ha, va = (0.96, 0.05, "right", "bottom") if high else (0.05, 0.95, "left", "top")
    paper = {"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1.0}
    ax.text(x, y, panel.note, transform=ax.transAxes, ha=ha, va=va, fontsize=9, bbox=paper)
