"""Curves of any quantity over the steps, one line per layer: also rotation rates, and norms."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke

from gyroscope.base.accepted import choice
from gyroscope.errors import FigureError, GyroscopeError
from gyroscope.figures.drawing import depth_key, draw_course, finish, own_axes, said, span
from gyroscope.figures.looks import frame
from gyroscope.figures.run_data import Layers, Measured, RunLike, as_run, choose, find, flag
from gyroscope.store.labels import look_of, settle

if TYPE_CHECKING:
    from gyroscope.diagnosis.predict import Prediction


def curves(
    run: RunLike,
    quantity: str,
    *,
    relative: bool = False,
    ax: Axes | None = None,
    layers: Layers = None,
    legend: bool | None = None,
    title: str | None = None,
) -> Axes:
    """Draw a quantity of each layer over the steps, one line per layer, and return the axes.

    Dark lines are first layers. The scale is chosen to suit the quantity. If it jumps from step to step and there are
    several layers, lines are moving means over shades that span the single values. Layers that are zero throughout
    cannot be shown on a logarithmic scale: a note gives their number, and that of layers that were not measured.

    Args:
        run: a run or its path.
        quantity: name of a quantity that the run holds, also a custom one.
        relative: whether to divide each layer's values by its first; a note gives the number of layers that start at 0.
        ax: axes to draw on; by default those of a new figure.
        layers: glob pattern or patterns on the layers' names; all by default.
        legend: whether to explain which color is which layer; by default on new axes only.
        title: title above the axes.

    >>> from gyroscope.figures import example_run
    >>> ax = curves(example_run(), "update_ratio")
    >>> len(ax.lines), ax.get_ylabel()
    (3, 'update ratio ‖Δw‖/‖w‖')
    """
    run = as_run(run)
    series = find(run, quantity, layers=layers)
    look, values = look_of(quantity, run.quantities[quantity]), series.values
    label, undivided = look.drawn, 0
    if flag(relative, "relative"):
        first = np.take_along_axis(values, (~np.isnan(values)).argmax(axis=0)[None], axis=0)
        values = np.divide(values, first, out=np.full_like(values, np.nan), where=first != 0)
        label, undivided = f"{label} / its first value", int((first == 0).sum())
    look = settle(look, values)
    own = ax is None
    ax = own_axes(ax)
    width = draw_course(ax, series.steps, values, depth=series.depth, look=look)
    frame(ax, look, values)
    span(ax, series.steps)
    if undivided:
        note_layers(ax, undivided, "0 at the start")
    elif look.scale == "log":
        unknown = np.isnan(values).all(axis=0)  # such as frozen layers
        note_layers(ax, int(((np.nan_to_num(values) <= 0).all(axis=0) & ~unknown).sum()), "0 throughout")
        note_layers(ax, int(unknown.sum()), "not measured", low=True)
    if flag(legend, "legend", default=own):
        depth_key(ax, series.layers, series.depth, len(run.layers))
    finish(ax, xlabel=said(width), ylabel=label, title=title)
    return ax


def note_layers(ax: Axes, count: int, what: str, *, low: bool = False) -> None:
    """Note in the upper or lower right of `ax` that `count` layers are `what`, if any are.

    >>> from gyroscope.figures.drawing import own_axes
    >>> ax = own_axes()
    >>> note_layers(ax, 2, "0 throughout")
    >>> ax.texts[0].get_text()
    '2 layers are 0 throughout'
    """
    if count:
        said = "1 layer is" if count == 1 else f"{count:,} layers are"
        y, va = (0.02, "bottom") if low else (0.98, "top")
        ax.text(0.99, y, f"{said} {what}", transform=ax.transAxes, ha="right", va=va, fontsize=8)


# More different equilibria than this would not be readable as lines.
_EQUILIBRIA = 4


def rates(
    run: RunLike,
    *,
    quantity: str = "rate_per_step",
    predictions: bool = True,
    ax: Axes | None = None,
    layers: Layers = None,
    legend: bool | None = None,
    title: str | None = None,
) -> Axes:
    """Draw the angle by which each layer turns per step, and return the axes.

    Weight decay leads scale-invariant layers to a rotation rate that depends only on learning rate, decay and momentum,
    √(2ηλ) for plain SGD. That equilibrium, for the run's last values, is drawn dashed.

    Args:
        run: a run or its path.
        quantity: "rate_per_step", or "rate", the angle since the last measured step.
        predictions: whether to draw the equilibrium.
        ax: axes to draw on; by default those of a new figure.
        layers: glob pattern or patterns on the layers' names; all by default.
        legend: whether to explain which color is which layer; by default on new axes only.
        title: title above the axes.

    >>> from gyroscope.figures import example_run
    >>> rates(example_run(), predictions=False).get_yscale()
    'log'
    """
    run = as_run(run)
    ax = curves(run, quantity, ax=ax, layers=layers, legend=legend, title=title)
    if flag(predictions, "predictions") and quantity == "rate_per_step":
        names = run.layers
        found = predicted(run, {names[i] for i in choose(names, layers)}).values()
        equilibria = {float(f"{p.equilibrium_rate:.3g}") for p in found if p.equilibrium_rate > 0}
        if 0 < len(equilibria) <= _EQUILIBRIA:
            _draw(ax, sorted(equilibria))
    return ax


def _draw(ax: Axes, equilibria: list[float]) -> None:
    low, high = ax.get_ylim()
    for rate in equilibria:
        ax.axhline(rate, color="black", linewidth=1, linestyle="--")
    ax.annotate(
        "predicted equilibrium",
        (1, equilibria[-1]),
        xycoords=("axes fraction", "data"),
        xytext=(-2, 2),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        path_effects=[withStroke(linewidth=2, foreground="white")],
    )
    ax.set_ylim(min(low, equilibria[0] / 1.5), max(high, equilibria[-1] * 1.5))


Which = Literal["weight", "gradient", "update"]


def norms(
    run: RunLike,
    which: Which = "weight",
    *,
    relative: bool = False,
    ax: Axes | None = None,
    layers: Layers = None,
    legend: bool | None = None,
    title: str | None = None,
) -> Axes:
    """Draw the norm of each layer's weights, gradients or updates, and return the axes.

    Args:
        run: a run or its path.
        which: "weight", "gradient" or "update".
        relative: whether to divide each layer's norms by its first, which shows growth and decay.
        ax: axes to draw on; by default those of a new figure.
        layers: glob pattern or patterns on the layers' names; all by default.
        legend: whether to explain which color is which layer; by default on new axes only.
        title: title above the axes.

    >>> from gyroscope.figures import example_run
    >>> norms(example_run(), "gradient").get_ylabel()
    'gradient norm ‖g‖'
    """
    choice(which, "which", get_args(Which), FigureError)
    return curves(run, f"{which}_norm", relative=relative, ax=ax, layers=layers, legend=legend, title=title)


def predicted(run: Measured, layers: Collection[str]) -> dict[str, Prediction]:
    """Return the predictions for `layers` by name; none if the run does not hold what they need.

    >>> from gyroscope.figures import example_run
    >>> predicted(example_run(quantities=["rotation"]), ["block1.conv1.weight"])
    {}
    """
    from gyroscope.diagnosis.predict import predictions

    measured: Any = run  # an `Example` has no layer table, and predictions do not need one
    try:
        found = predictions(measured)
    except GyroscopeError:
        return {}
    return {prediction.layer: prediction for prediction in found if prediction.layer in layers}
