"""Runs against each other: the further layers rotate, the better a network generalises, or not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isnan
from os import PathLike
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes

from gyroscope.diagnose.compare import rank_correlation
from gyroscope.errors import FigureError
from gyroscope.figures.given import Layers, Measured, RunLike, as_run, described, find
from gyroscope.figures.labels import place_labels
from gyroscope.figures.lines import finish, own_axes
from gyroscope.figures.looks import limits, look_of
from gyroscope.figures.names import literal
from gyroscope.store import Run
from gyroscope.store.find import distinct_names

# Up to here points carry their run's name.
_NAMED = 16


def compare(
    runs: Iterable[RunLike] | str | PathLike[str],
    *,
    accuracy: str = "test_accuracy",
    labels: Sequence[str] | None = None,
    ax: Axes | None = None,
    layers: Layers = None,
    title: str | None = None,
) -> Axes:
    """Draw the mean final rotation of each run against its last accuracy, and return the axes.

    A point is the mean over layers, the line through it goes from the least to the most rotated layer. The
    rank correlation (Spearman's ρ) of the points is written above them.

    Args:
        runs: runs or their paths, or the path of a folder with runs in it.
        accuracy: the scalar to compare by, as given to `monitor.log`; its last value counts.
        labels: what to call the runs, one label per run; their names, told apart by their paths, if not given.
        ax: axes to draw on; those of a new figure if not given.
        layers: glob pattern or patterns on the layers' names; all if not given.
        title: text above.

    >>> from gyroscope.figures import example_run
    >>> ax = compare([example_run(seed=0), example_run(seed=1)])
    >>> ax.get_ylabel()
    'test accuracy (%)'
    """
    chosen = _runs(runs)
    if not isinstance(accuracy, str):
        raise FigureError(f"accuracy must be the name of a scalar, got {accuracy!r}. Try 'test_accuracy'.")
    called = _names(chosen) if labels is None else _labels(labels, len(chosen))
    reached = np.array([_last(run, accuracy) for run in chosen])
    final = [_final(run, layers) for run in chosen]
    middle = np.array([rotations.mean() for rotations in final])
    label = literal(accuracy.replace("_", " "))
    if "acc" in accuracy and reached.min() >= 0 and reached.max() <= 1:
        reached, label = 100 * reached, f"{label} (%)"

    ax = own_axes(ax, width=5.2, height=3.8)
    colour = matplotlib.colormaps["cividis"](0.15)
    ax.hlines(reached, [f.min() for f in final], [f.max() for f in final], color="0.8", linewidth=1.2, zorder=1)
    ax.scatter(middle, reached, s=26, color=colour, zorder=3)
    ax.set_xlim(limits(look_of("rotation"), np.concatenate(final), close=True))
    ax.margins(y=0.12)
    if len(chosen) <= _NAMED:
        place_labels(ax, middle, reached, called)
    correlation = rank_correlation(middle, reached)
    if not isnan(correlation):
        # Outside the axes: no corner is free in every scatter.
        said = f"Spearman's ρ = {correlation:+.2f}, {len(chosen)} runs"
        ax.set_title(said, loc="right", fontsize=9)
    finish(ax, xlabel="mean final rotation (line: least to most rotated layer)", ylabel=label)
    if title is not None:
        ax.set_title(title, loc="left", fontsize=10)
    return ax


def _runs(runs: Iterable[RunLike] | str | PathLike[str]) -> list[Measured]:
    if isinstance(runs, str | PathLike):
        from gyroscope.store import runs as stored

        found: list[Measured] = list(stored(runs))
        if not found:
            raise FigureError(f"there are no runs in {runs}; give a folder of runs, or a list of them")
        return found
    if hasattr(runs, "series"):
        raise FigureError("compare takes several runs: give them as a list, or the folder they are in")
    if not isinstance(runs, Iterable):
        raise FigureError(f"compare was given a {type(runs).__name__}; it takes runs, their paths, or their folder")
    chosen = [as_run(run) for run in runs]
    if not chosen:
        raise FigureError("there are no runs to compare; give at least one")
    return chosen


def _labels(given: Any, count: int) -> list[str]:
    listed = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else []
    if len(listed) != count or not all(isinstance(label, str) for label in listed):
        raise FigureError(f"labels must be a list of {count} texts, one per run, got {given!r}.")
    return listed


def _names(runs: Sequence[Measured]) -> list[str]:
    stored = [run for run in runs if isinstance(run, Run)]
    return distinct_names(stored) if len(stored) == len(runs) else [run.name for run in runs]


def _last(run: Measured, scalar: str) -> float:
    if scalar not in run.scalars:
        known = ", ".join(run.scalars) or "none"
        raise FigureError(
            f"{described(run)} has no scalar {scalar!r}; its scalars are: {known}. "
            f"Log it with monitor.log({scalar}=...), or name another with accuracy=..."
        )
    values = np.asarray(run.scalars[scalar].values, dtype=float)
    known_values = values[np.isfinite(values)]
    if not known_values.size:
        raise FigureError(f"{scalar} of {described(run)} has no finite value")
    return float(known_values[-1])


def _final(run: Measured, layers: Layers) -> npt.NDArray[np.float64]:
    values = find(run, "rotation", layers=layers).values
    rows = len(values) - 1 - (~np.isnan(values[::-1])).argmax(axis=0)
    final: npt.NDArray[np.float64] = np.take_along_axis(values, rows[None], axis=0)[0]
    return final[~np.isnan(final)]
