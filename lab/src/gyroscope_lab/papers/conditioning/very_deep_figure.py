"""Four panels over steps, both axes logarithmic: the layout of figures 6, 7 and 9 of the conditioning paper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from gyroscope_lab.papers.conditioning.very_deep_course import PANELS, Course

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A colour of each, dark to light, so that an order of depths can be seen.
_COLOURS = ("#440154", "#2c728e", "#28ae80", "#e8a500")


def draw(courses: Mapping[str, Course], *, heading: str, legend: str = "") -> Figure:
    """Draw the loss, λmax(Σx), λmax of the weight gradient's second moment and ‖W‖ of up to four trainings.

    Steps at which a quantity is exactly 0 are marked in rows below its axis.

    Args:
        courses: by what they are called.
        heading: of the figure.
        legend: what their names are names of.

    >>> from gyroscope_lab.training.last_layer import Followed
    >>> from gyroscope_lab.training.result import Result
    >>> from gyroscope_lab.papers.conditioning.by_depth import Network
    >>> course = Course(Network("ResNet", 56), Followed(*np.ones((7, 9))), Result(0.1, 0.1, [], [], []))
    >>> [ax.get_yscale() for ax in draw({"56": course}, heading="By depth").axes]
    ['log', 'log', 'log', 'log']
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from gyroscope.figures.drawing import edged, log_ticks, say

    figure = Figure(figsize=(12.4, 3.1), layout="constrained")
    axes = figure.subplots(1, len(PANELS))
    zeros = False
    for letter, (quantity, title), ax in zip("abcd", PANELS.items(), axes, strict=True):
        values = {name: getattr(course.followed, quantity) for name, course in courses.items()}
        colours = dict(zip(courses, _COLOURS, strict=False))
        for name, its in values.items():
            ax.plot(np.arange(1, len(its) + 1), its, color=colours[name], linewidth=0.9, label=name)
        # A logarithmic axis has no place for zeros, and a curve that ends in them would be one that was stopped.
        off = {name: np.flatnonzero(its == 0) + 1 for name, its in values.items() if (its == 0).any()}
        edges = edged(ax, np.concatenate(list(values.values())), below=len(off))
        for (name, steps), y in zip(off.items(), edges.below, strict=True):
            ax.plot(steps, np.full(len(steps), y), color=colours[name], linestyle="", marker="|", markersize=5)
        say(ax, "0", edges.below)
        zeros = zeros or bool(off)
        if quantity == "loss":
            course = next(iter(courses.values()))
            ax.axhline(course.chance, color="0.4", linestyle=":", linewidth=1, label=f"ln {course.classes}")
        ax.set(xscale="log")
        log_ticks(ax.xaxis, *ax.get_xlim())
        ax.set_title(f"({letter}) {title}", fontsize=9)
        ax.set_xlabel("step", fontsize=9)
        ax.tick_params(labelsize=8)
        ax.grid(which="major", color="0.9", linewidth=0.6)
        ax.set_axisbelow(True)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
    handles, names = axes[0].get_legend_handles_labels()
    if zeros:
        handles.append(Line2D([], [], color="0.25", linestyle="", marker="|", markersize=5))
        names.append("exactly 0")
    figure.legend(handles, names, title=legend or None, loc="outside right center", fontsize=8, title_fontsize=8)
    figure.suptitle(heading, fontsize=11)
    return figure
