"""Effective learning rates: measured as solid lines, predicted as dashed ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes

from gyroscope.errors import FigureError
from gyroscope.figures.curves import predicted
from gyroscope.figures.drawing import (
    MANY,
    Style,
    depth_key,
    draw_course,
    draw_lines,
    emphasize,
    finish,
    own_axes,
    said,
    span,
    style_key,
)
from gyroscope.figures.looks import frame, spread
from gyroscope.figures.run_data import Layers, Measured, RunLike, Series, as_run, described, find, flag, held, holds
from gyroscope.store.labels import look_of, settle

if TYPE_CHECKING:
    from gyroscope.diagnosis.predict import Prediction

Values = npt.NDArray[np.float64]

# With more layers, this many have predictions, and the lines of the others are faint.
_PREDICTED = 6


def effective_rates(
    run: RunLike,
    *,
    predictions: bool = True,
    ax: Axes | None = None,
    layers: Layers = None,
    legend: bool | None = None,
    title: str | None = None,
) -> Axes:
    """Draw each layer's effective learning rate, measured and predicted, and return the axes.

    Solid lines are measured: the angle turned in a step, divided by ‖w‖ times the part of the gradient that turns it.
    Dashed lines are η/‖w‖², the prediction for plain gradient steps; momentum β makes the measured rate larger, by
    up to 1/(1 − β). Dotted lines are the fitted law by which growing norms make η/‖w‖² decay, for scale-invariant
    layers. The steps of Adam-like optimizers are different: for them solid lines are η/‖w‖² itself. If there are
    many layers, only a few have predictions.

    Args:
        run: a run or its path.
        predictions: whether to draw predictions.
        ax: axes to draw on; by default those of a new figure.
        layers: glob pattern or patterns on the layers' names; all by default.
        legend: whether to explain which color is which layer; by default on new axes only.
        title: title above the axes.

    >>> from gyroscope.figures import example_run
    >>> ax = effective_rates(example_run(), predictions=False)
    >>> len(ax.lines), ax.get_yscale()
    (3, 'log')
    """
    run = as_run(run)
    found = predicted(run, set(run.layers)) if flag(predictions, "predictions") else {}
    series = _measured(run, layers, adam=any(prediction.kind == "adamw" for prediction in found.values()))
    dashed, dotted = _chosen(found, run, series)
    chosen = ~np.isnan(np.concatenate([dashed, dotted])).all(axis=0)
    own = ax is None
    ax = own_axes(ax)

    look = settle(look_of(series.quantity), np.concatenate([series.values, dashed, dotted]))
    log, many = look.scale == "log", len(chosen) > _PREDICTED
    before = len(ax.lines)
    width = draw_course(ax, series.steps, series.values, depth=series.depth, look=look)
    styles: list[tuple[str, Style]] = [("measured" if series.quantity == "effective_lr_measured" else "η/‖w‖²", "-")]
    if many and chosen.any():
        for line, stands_out in zip(ax.lines[before:], chosen, strict=True):
            emphasize(line) if stands_out else line.set_alpha(0.25)
    predictions_of: list[tuple[Values, str, Style]] = [
        (dashed, "η/‖w‖², predicted", "--"),
        (dotted, "fitted decay law", ":"),
    ]
    for values, says, style in predictions_of:
        shown = ~np.isnan(values).all(axis=0)
        if shown.any():
            depth = series.depth[shown]
            draw_lines(ax, series.steps, values[:, shown], depth=depth, linestyle=style, positive=log, dark=True)
            styles.append((says, style))
    frame(ax, look, np.concatenate([series.values, dashed, dotted]))
    span(ax, series.steps)
    if flag(legend, "legend", default=own):
        depth_key(ax, series.layers, series.depth, len(run.layers))
    if len(styles) > 1:
        style_key(ax, styles, loc="best" if len(ax.lines) <= MANY else "lower left")
    finish(ax, xlabel=said(width), ylabel="effective learning rate" if len(styles) > 1 else look.drawn, title=title)
    return ax


def _measured(run: Measured, layers: Layers, *, adam: bool) -> Series:
    wanted = ("effective_lr_measured", "effective_lr")
    there = [quantity for quantity in (reversed(wanted) if adam else wanted) if quantity in run.quantities]
    for quantity in there:
        if quantity == there[-1] or holds(run, quantity, layers=layers):
            return find(run, quantity, layers=layers)
    raise FigureError(f"{described(run)} has no effective learning rates; it holds {held(run)}.")


def _chosen(found: Mapping[str, Prediction], run: Measured, series: Series) -> tuple[Values, Values]:
    """Return predictions and fitted laws [steps, layers] as in `series`, NaN for layers that are not shown."""
    rows = np.isin(run.steps, series.steps)
    dashed, dotted = np.full_like(series.values, np.nan), np.full_like(series.values, np.nan)
    there = [i for i, name in enumerate(series.layers) if name in found]
    for i in (there[j] for j in spread(len(there), _PREDICTED)):
        prediction = found[series.layers[i]]
        if series.quantity == "effective_lr_measured":
            dashed[:, i] = prediction.effective_lr[rows]
        dotted[:, i] = prediction.law[rows]
    return dashed, dotted
