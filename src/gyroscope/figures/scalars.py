"""Logged scalars of the whole network over the steps: losses and accuracies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from gyroscope.errors import FigureError
from gyroscope.figures.drawing import finish, own_axes, span, thin
from gyroscope.figures.over_depth import colors
from gyroscope.figures.run_data import Measured, RunLike, as_run, described
from gyroscope.store.labels import literal

# More lines than this in one panel cannot be told apart.
_SHOWN = 5
_DASHES = ("-", "--", "-.", ":", (0, (1, 3)))


def scalars(
    run: RunLike, names: Sequence[str] | None = None, *, ax: Axes | None = None, title: str | None = None
) -> Axes:
    """Draw logged scalars, and return the axes: accuracies on the right, the others on the left.

    Args:
        run: a run or its path.
        names: the scalars to draw; by default losses and accuracies, or else the first few.
        ax: axes to draw on; by default those of a new figure.
        title: title above the axes.

    >>> from gyroscope.figures import example_run
    >>> [line.get_label() for line in scalars(example_run()).lines]
    ['loss']
    """
    run = as_run(run)
    names = _chosen(run, names)
    own = own_axes(ax)
    left = [name for name in names if "acc" not in name]
    right = [name for name in names if "acc" in name]
    twin = own.twinx() if left and right else None
    handles: list[Line2D] = []
    for place, name in enumerate(names):
        target = twin if twin is not None and name in right else own
        steps, values = (np.asarray(part, dtype=float) for part in run.scalars[name])
        known = np.isfinite(values)
        x, y = thin(steps[known], values[known][:, None])
        [line] = target.plot(
            x[:, 0],
            y[:, 0],
            color=colors(len(names))[place],
            linestyle=_DASHES[place],
            linewidth=1.3,
            marker="o" if len(y) < 12 else "",
            markersize=3,
            clip_on=len(y) >= 12,
            label=literal(name),
        )
        handles.append(line)
    if right:
        highest = max(float(np.nanmax(run.scalars[name].values)) for name in right)
        (twin or own).set_ylim(0, 1 if highest <= 1 else 100 if highest <= 100 else None)
    every = np.concatenate([np.asarray(run.scalars[name].steps, dtype=float) for name in names])
    span(own, every)
    own.legend(handles=handles, loc="center right" if twin else "best", fontsize=8, framealpha=0.8)
    finish(own, ylabel=literal(", ".join(left or right)), title=title)
    if twin is not None:
        finish(twin, xlabel="", ylabel=literal(", ".join(right)))
        twin.spines["right"].set_visible(True)
    return own


def _chosen(run: Measured, names: Sequence[str] | None) -> list[str]:
    with_values = [name for name, curve in run.scalars.items() if np.isfinite(curve.values).any()]
    if names is None:
        usual = [name for name in with_values if "loss" in name or "acc" in name]
        names = (usual or with_values)[:_SHOWN]
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise FigureError(f"`names` must be a list of names of scalars, got {names!r:.80}. Try ['loss'].")
    known = ", ".join(with_values) or "none"
    missing = [name for name in names if name not in with_values]
    if missing or not names:
        what = f"scalar {missing[0]!r}" if missing else "scalars"
        raise FigureError(
            f"{described(run)} has no {what}; its scalars are: {known}. Log scalars with monitor.log(...)."
        )
    if len(names) > _SHOWN:
        raise FigureError(f"`names` must be at most {_SHOWN} scalars, got {len(names)}: more cannot be told apart.")
    return list(names)
