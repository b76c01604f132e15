"""Percentiles per layer of the squared gradients that Adam-like optimizers keep."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from gyroscope.errors import FigureError
from gyroscope.figures.drawing import finish, own_axes
from gyroscope.figures.over_depth import _MARKERS, colors, draw_bars, layer_axis
from gyroscope.figures.run_data import Layers, RunLike, Series, as_run, described, find, held, numbers

_NAMES = ("moment_p10", "moment_p50", "moment_p90")


def moment_percentiles(
    run: RunLike,
    *,
    steps: Sequence[float] | None = None,
    ax: Axes | None = None,
    layers: Layers = None,
    title: str | None = None,
) -> Axes:
    """Draw the 10th, 50th and 90th percentile of the second moments in each layer, and return the axes.

    As in figure 5 of the layer-rotation paper: if the marks differ more from layer to layer than the bars are long,
    then adapting to single parameters mainly means adapting to layers.

    Args:
        run: a run or its path, of an optimizer that keeps second moments.
        steps: the steps to show; the nearest measured ones are taken. By default 2 %, 20 % and 100 % of the run, which
            is about the paper's epochs 1, 10 and 50.
        ax: axes to draw on; by default those of a new figure.
        layers: glob pattern or patterns on the layers' names; all by default.
        title: title above the axes.

    >>> from gyroscope.figures import example_run
    >>> ax = moment_percentiles(example_run())
    >>> [text.get_text() for text in ax.get_legend().get_texts()]
    ['step 2', 'step 20', 'step 100']
    """
    run = as_run(run)
    missing = [name for name in _NAMES if name not in run.quantities]
    if missing:
        raise FigureError(
            f"{described(run)} has no second moments ({', '.join(missing)}); it holds {held(run)}. "
            "They are recorded for optimizers that keep them, such as Adam and RMSprop."
        )
    series = [find(run, name, layers=layers) for name in _NAMES]
    shown = _shown(series[1], steps)
    names = series[1].layers
    ax = own_axes(ax, width=float(np.clip(2.6 + 0.28 * len(names), 4.2, 7)))
    for place, step in enumerate(shown):
        low, middle, high = (s.at(step)[1] for s in series)
        draw_bars(ax, low, middle, high, place=place, places=len(shown))
    if all((s.values[np.isin(s.steps, shown)] > 0).any() for s in series):
        ax.set_yscale("log", nonpositive="clip")
    layer_axis(ax, names)
    handles = [
        Line2D([], [], color=color, marker=marker, markersize=4, linewidth=1)
        for color, marker in zip(colors(len(shown)), _MARKERS, strict=False)
    ]
    labels = [f"step {step:,}" for step in shown]
    ax.legend(handles, labels, loc="best", fontsize=8, framealpha=0.8)
    finish(ax, xlabel="layer, in forward order", ylabel="second moment, p10 – p50 – p90", title=title)
    return ax


def _shown(series: Series, steps: Sequence[float] | None) -> list[int]:
    if steps is None:
        first, last = int(series.steps[0]), int(series.steps[-1])
        steps = [first + share * (last - first) for share in (0.02, 0.2, 1.0)]
    elif (count := numbers(steps, "steps").size) == 0:
        raise FigureError("`steps` must be at least one step, got none. Leave it out for three steps over the run.")
    elif count > len(_MARKERS):
        raise FigureError(f"`steps` must be at most {len(_MARKERS)} steps, got {count}: more cannot be told apart.")
    return list(dict.fromkeys(series.at(step)[0] for step in numbers(steps, "steps").ravel()))
