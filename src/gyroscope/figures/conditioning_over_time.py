"""Conditioning over the steps of a recorded run."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from gyroscope.base.accepted import listed
from gyroscope.errors import FigureError
from gyroscope.figures.curves import curves
from gyroscope.figures.drawing import as_picture, depth_key, draw_course, draw_lines, finish, page_key, said, span
from gyroscope.figures.log_axis import edged, say
from gyroscope.figures.run_data import Layers, Measured, RunLike, as_run, choose, described, find, flag, held
from gyroscope.store.labels import look_of

_LARGEST = ("lambda_x", "lambda_g", "lambda_f")
_DOMINATION = ("weight_spectral", "domination")
_COLUMNS = 3


def conditioning_over_time(
    run: RunLike,
    *,
    quantity: str | Sequence[str] | None = None,
    layers: Layers = None,
    log_steps: bool = False,
    title: str | None = None,
) -> Figure:
    """Draw the conditioning of each layer over the steps, one line per layer, and return the figure.

    As figures 6, 7 and 9 of the layer-wise conditioning paper, for all layers or some: λmax of Σx, Σ∇h and F ≈ Σx ⊗
    Σ∇h, κ of F, and weight domination (definition 1), which is σmax(∂L/∂W) far below σmax(W). Values of 0 and ∞ are
    drawn beyond a dotted line.

    Args:
        run: a run or its path, recorded with `watch(..., conditioning=n)`.
        quantity: name of a quantity, such as "kappa_x_p50", or several, one panel each; by default the six most
            informative ones that the run holds.
        layers: glob pattern or patterns on the layers' names, such as that of the last one; all by default.
        log_steps: whether steps are on a logarithmic axis, as in the paper; it is linear from 0 to the first.
        title: title above the figure.

    >>> from gyroscope.figures import example_run
    >>> len(conditioning_over_time(example_run()).axes)
    6
    >>> [ax] = conditioning_over_time(example_run(), quantity="lambda_f").axes
    >>> ax.get_yscale(), len(ax.lines)
    ('log', 3)
    """
    run = as_run(run)
    given: Any = _held(run) if quantity is None else quantity
    shown = listed(given)
    if not shown:
        raise FigureError("`quantity` must be at least one name, got none. Leave it out for the six most informative.")
    if not all(isinstance(name, str) for name in shown):
        raise FigureError(f"`quantity` must be a name or a list of names, got {given!r:.80}. Try 'lambda_f'.")
    columns = min(_COLUMNS, len(shown))
    rows = ceil(len(shown) / columns)
    size = (3.6 * columns, 2.6 * rows + 0.8) if len(shown) > 1 else (5.4, 3.2)
    figure = as_picture(Figure(figsize=size, layout="constrained"))
    axes: list[Axes] = list(figure.subplots(rows, columns, squeeze=False).flat)
    for ax in axes[len(shown) :]:
        ax.remove()
    axes = axes[: len(shown)]
    for ax, name in zip(axes, shown, strict=True):
        _panel(run, name, ax, layers, flag(log_steps, "log_steps"))
    every = run.layers
    chosen = choose(every, layers)
    names, depth = [every[i] for i in chosen], [i / max(len(every) - 1, 1) for i in chosen]
    if len(shown) > 1:
        page_key(axes, names, depth, len(every))
    else:
        depth_key(axes[0], names, depth, len(every))
    if title is not None:
        figure.suptitle(title, fontsize=11)
    return figure


def _held(run: Measured) -> list[str]:
    kappas = sorted((name for name in run.quantities if name.startswith("kappa_f_p")), key=_from_half)
    wanted = [*_LARGEST, *kappas[:1], *_DOMINATION]
    shown = [name for name in wanted if name in run.quantities and not np.isnan(run.series(name)).all()]
    if not shown:
        raise FigureError(
            f"{described(run)} has no conditioning; it holds {held(run)}. "
            "Record it with watch(..., conditioning=n), every n steps."
        )
    return shown


def _from_half(kappa: str) -> float:
    return abs(float(kappa.removeprefix("kappa_f_p")) - 50)


def _panel(run: Measured, name: str, ax: Axes, layers: Layers, log_steps: bool) -> None:
    look = look_of(name, run.quantities.get(name))
    if look.scale != "log":
        curves(run, name, ax=ax, layers=layers)
        steps: npt.ArrayLike = find(run, name, layers=layers).steps
    else:
        series = find(run, name, layers=layers, infinite=True)
        values, steps = series.values, series.steps
        infinite, zero = np.isposinf(values), values <= 0
        edges = edged(ax, values, above=int(infinite.any()), below=int(zero.any()))
        for where, rows in ((infinite, edges.above), (zero, edges.below)):
            for y in rows:
                values = np.where(where, y, values)
        # Means over many steps would hide the first steps, and would be meaningless with marks for 0 or ∞.
        if log_steps or infinite.any() or zero.any():
            width = 1
            draw_lines(ax, steps, values, depth=series.depth, positive=True, log_steps=log_steps)
        else:
            width = draw_course(ax, steps, values, depth=series.depth, look=look)
        say(ax, "∞", edges.above)
        say(ax, "0", edges.below)
        span(ax, steps)
        finish(ax, xlabel=said(width), ylabel=look.drawn)
    if log_steps:
        _logarithmic(ax, np.asarray(steps, dtype=float))


def _logarithmic(ax: Axes, steps: npt.NDArray[np.float64]) -> None:
    positive = steps[steps > 0]
    if len(positive) < 2:
        return
    first, last = float(positive.min()), float(positive.max())
    if len(positive) < len(steps):
        ax.set_xscale("symlog", linthresh=first, linscale=0.3)
        ax.set_xlim(0, last)
    else:
        ax.set_xscale("log")
        ax.set_xlim(first, last)
    decades = [10.0**power for power in range(20)]
    ticks = [tick for tick in decades if first <= tick <= last]
    if len(ticks) < 2:
        ticks = [tick * digit for tick in decades for digit in (1, 2, 5) if first <= tick * digit <= last]
    ax.xaxis.set_major_locator(FixedLocator([0.0, *ticks] if len(positive) < len(steps) else ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
