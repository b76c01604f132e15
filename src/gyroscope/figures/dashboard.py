"""All quantities of a run on one page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from gyroscope.errors import FigureError
from gyroscope.figures.curves import curves, norms, rates
from gyroscope.figures.drawing import as_picture, page_key
from gyroscope.figures.effective_rates import effective_rates
from gyroscope.figures.moment_percentiles import moment_percentiles
from gyroscope.figures.neurons import neurons
from gyroscope.figures.rotation import rotation_curves, rotation_heatmap
from gyroscope.figures.run_data import Layers, Measured, RunLike, as_run, at_least_one, choose, described, holds
from gyroscope.figures.scalars import scalars
from gyroscope.store.labels import literal


@dataclass(frozen=True)
class _Panel:
    """A title, the quantities of which at least one is needed, and the function that draws them."""

    title: str
    needs: tuple[str, ...]
    draw: Callable[[Measured, Axes, Layers], Axes]


_PANELS = (
    _Panel("Rotation curves", ("rotation",), lambda r, ax, some: rotation_curves(r, ax=ax, layers=some)),
    _Panel("Rotation heatmap", ("rotation",), lambda r, ax, some: rotation_heatmap(r, ax=ax, layers=some)),
    _Panel("Whole network", (), lambda r, ax, some: scalars(r, ax=ax)),
    _Panel("Rotation rates", ("rate_per_step",), lambda r, ax, some: rates(r, ax=ax, layers=some)),
    _Panel("Update sizes", ("update_ratio",), lambda r, ax, some: curves(r, "update_ratio", ax=ax, layers=some)),
    _Panel(
        "Effective learning rates",
        ("effective_lr_measured", "effective_lr"),
        lambda r, ax, some: effective_rates(r, ax=ax, layers=some),
    ),
    _Panel("Weight norms", ("weight_norm",), lambda r, ax, some: norms(r, "weight", relative=True, ax=ax, layers=some)),
    _Panel("Gradient norms", ("gradient_norm",), lambda r, ax, some: norms(r, "gradient", ax=ax, layers=some)),
    _Panel("Second moments", ("moment_p50",), lambda r, ax, some: moment_percentiles(r, ax=ax, layers=some)),
    _Panel("Activity of neurons", ("dying", "full"), lambda r, ax, some: neurons(r, "activity", ax=ax, layers=some)),
    _Panel("Rotation of neurons", ("neuron_p50",), lambda r, ax, some: neurons(r, "rotation", ax=ax, layers=some)),
)


def dashboard(run: RunLike, *, layers: Layers = None, columns: int = 3, title: str | None = None) -> Figure:
    """Draw all quantities of a run on one page, and return the figure; quantities that it does not hold are left out.

    Args:
        run: a run or its path.
        layers: glob pattern or patterns on the layers' names; all by default.
        columns: number of panels side by side.
        title: title in place of the run's name, steps and last scalars.

    >>> from gyroscope.figures import example_run
    >>> figure = dashboard(example_run(quantities=["rotation"]))
    >>> [ax.get_title() for ax in figure.axes if ax.get_title()]
    ['Rotation curves', 'Rotation heatmap', 'Whole network']
    """
    run = as_run(run)
    panels = [panel for panel in _PANELS if _holds(run, panel, layers)]
    if not panels:
        raise FigureError(
            f"{described(run)} holds nothing that a dashboard shows. Was it closed before the first step?"
        )
    columns = min(at_least_one(columns, "columns"), len(panels))
    rows = ceil(len(panels) / columns)
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, wspace=0.03, hspace=0.03)
    figure = as_picture(Figure(figsize=(4.6 * columns, 3.0 * rows + 1.2), layout=layout))
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for ax, panel in zip(axes, panels, strict=False):
        panel.draw(run, ax, layers)
        ax.set_title(panel.title, fontsize=10)
    for ax in axes[len(panels) :]:
        ax.remove()
    every = run.layers
    chosen = choose(every, layers)
    depth = [i / max(len(every) - 1, 1) for i in chosen]
    page_key(axes[: len(panels)], [every[i] for i in chosen], depth, len(every))
    figure.suptitle(_header(run) if title is None else title, fontsize=11)
    return figure


def _holds(run: Measured, panel: _Panel, layers: Layers) -> bool:
    if not panel.needs:
        return any(np.isfinite(curve.values).any() for curve in run.scalars.values())
    return any(holds(run, name, layers=layers) for name in panel.needs)


def _header(run: Measured) -> str:
    layers, last = len(run.layers), int(run.steps[-1]) if len(run.steps) else 0
    said = [f"{layers:,} layer{'s' if layers != 1 else ''}", f"step {last:,}"]
    for name, curve in list(run.scalars.items())[:4]:
        values = np.asarray(curve.values, dtype=float)
        if np.isfinite(values).any():
            said.append(f"{literal(name)} {values[np.isfinite(values)][-1]:.4g}")
    return f"{literal(run.name)}\n{' · '.join(said)}"
