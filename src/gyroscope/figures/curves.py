"""Any quantity, one line a layer."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes

from gyroscope.figures.course import draw_course, said
from gyroscope.figures.given import Layers, RunLike, as_run, find, flag
from gyroscope.figures.lines import depth_key, finish, own_axes, span
from gyroscope.figures.looks import frame, look_of, settle


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
    """Draw a quantity of each layer over the steps, one line a layer, and return the axes.

    Dark lines are first layers. The scale is the one that suits the quantity. Where it jumps from step to
    step and there are several layers, lines are moving means, over shades that span the single values.
    Layers that are zero throughout have no place on a logarithmic scale: a note counts them.

    Args:
        run: a run or its path.
        quantity: the name of a quantity that the run holds, a custom one too.
        relative: whether to divide each layer's values by its first; a note counts those that this leaves out, being 0.
        ax: axes to draw on; those of a new figure if not given.
        layers: glob pattern or patterns on the layers' names; all if not given.
        legend: whether to say which colour is which layer; by default on own axes.
        title: text above.

    >>> from gyroscope.figures import example_run
    >>> ax = curves(example_run(), "update_ratio")
    >>> len(ax.lines), ax.get_ylabel()
    (3, 'update ratio ‖Δw‖/‖w‖')
    """
    run = as_run(run)
    series = find(run, quantity, layers=layers)
    look, values = look_of(quantity, run.quantities[quantity]), series.values
    label, undivided = look.label, 0
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
        note_layers(ax, undivided, "0 at first")
    elif look.scale == "log":
        note_layers(ax, int((np.nan_to_num(values) <= 0).all(axis=0).sum()), "0 throughout")
    if flag(legend, "legend", default=own):
        depth_key(ax, series.layers, series.depth, len(run.layers))
    finish(ax, xlabel=said(width), ylabel=label, title=title)
    return ax


def note_layers(ax: Axes, count: int, what: str, *, low: bool = False) -> None:
    """Say in the upper right of `ax`, or the lower one, that `count` layers are `what`, if any are.

    >>> from gyroscope.figures.lines import own_axes
    >>> ax = own_axes()
    >>> note_layers(ax, 2, "0 throughout")
    >>> ax.texts[0].get_text()
    '2 layers are 0 throughout'
    """
    if count:
        said = "1 layer is" if count == 1 else f"{count:,} layers are"
        y, va = (0.02, "bottom") if low else (0.98, "top")
        ax.text(0.99, y, f"{said} {what}", transform=ax.transAxes, ha="right", va=va, fontsize=8)
