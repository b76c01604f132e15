"""Comparison of runs: final rotation against accuracy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isnan
from os import PathLike
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from gyroscope.diagnosis.compare import rank_correlation
from gyroscope.errors import FigureError
from gyroscope.figures.drawing import finish, own_axes
from gyroscope.figures.looks import short_names
from gyroscope.figures.run_data import Layers, Measured, RunLike, as_run, described, find
from gyroscope.store import Run
from gyroscope.store.find import distinct_names
from gyroscope.store.labels import limits, literal, look_of

# Up to this many points carry their run's name.
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

    A point is the mean over layers; the line through it goes from the least to the most rotated layer. The rank
    correlation (Spearman's ρ) of the points is written above them.

    Args:
        runs: runs or their paths, or the path of a folder that contains runs.
        accuracy: the scalar to compare by, as given to `monitor.log`; its last value counts.
        labels: names of the runs, one label per run; by default their names, with paths if these are equal.
        ax: axes to draw on; by default those of a new figure.
        layers: glob pattern or patterns on the layers' names; all by default.
        title: title above the axes.

    >>> from gyroscope.figures import example_run
    >>> ax = compare([example_run(seed=0), example_run(seed=1)])
    >>> ax.get_ylabel()
    'test accuracy (%)'
    """
    chosen = _runs(runs)
    if not isinstance(accuracy, str):
        raise FigureError(f"`accuracy` must be the name of a scalar, got {accuracy!r:.80}. Try 'test_accuracy'.")
    called = _names(chosen) if labels is None else _labels(labels, len(chosen))
    reached = np.array([_last(run, accuracy) for run in chosen])
    final = [_final(run, layers) for run in chosen]
    middle = np.array([rotations.mean() for rotations in final])
    label = literal(accuracy.replace("_", " "))
    if "acc" in accuracy and reached.min() >= 0 and reached.max() <= 1:
        reached, label = 100 * reached, f"{label} (%)"

    ax = own_axes(ax, width=5.2, height=3.8)
    color = matplotlib.colormaps["cividis"](0.15)
    ax.hlines(reached, [f.min() for f in final], [f.max() for f in final], color="0.8", linewidth=1.2, zorder=1)
    ax.scatter(middle, reached, s=26, color=color, zorder=3)
    ax.set_xlim(limits(look_of("rotation"), np.concatenate(final), close=True))
    ax.margins(y=0.12)
    if len(chosen) <= _NAMED:
        _place_labels(ax, middle, reached, called)
    correlation = rank_correlation(middle, reached)
    if not isnan(correlation):
        # Outside the axes: no corner is free in every plot.
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
            raise FigureError(f"`runs` must be a folder of runs or a list of them, got {runs}, which contains none.")
        return found
    if hasattr(runs, "series"):
        raise FigureError("`runs` must be several runs, got one. Give a list of runs, or the folder they are in.")
    if not isinstance(runs, Iterable):
        raise FigureError(f"`runs` must be a list of runs or paths, or a folder, got a {type(runs).__name__}.")
    chosen = [as_run(run) for run in runs]
    if not chosen:
        raise FigureError("`runs` must be at least one run, got none.")
    return chosen


def _labels(given: Any, count: int) -> list[str]:
    listed = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else []
    if len(listed) != count or not all(isinstance(label, str) for label in listed):
        raise FigureError(f"`labels` must be a list of {count} texts, one per run, got {given!r:.80}.")
    return listed


def _names(runs: Sequence[Measured]) -> list[str]:
    stored = [run for run in runs if isinstance(run, Run)]
    return distinct_names(stored) if len(stored) == len(runs) else [run.name for run in runs]


def _last(run: Measured, scalar: str) -> float:
    if scalar not in run.scalars:
        known = ", ".join(run.scalars) or "none"
        raise FigureError(
            f"{described(run)} has no scalar {scalar!r}; its scalars are: {known}. Log it with "
            f"monitor.log({scalar}=...), or name another with accuracy=..."
        )
    values = np.asarray(run.scalars[scalar].values, dtype=float)
    known_values = values[np.isfinite(values)]
    if not known_values.size:
        raise FigureError(f"{described(run)} has no finite value of {scalar!r}.")
    return float(known_values[-1])


def _final(run: Measured, layers: Layers) -> npt.NDArray[np.float64]:
    values = find(run, "rotation", layers=layers).values
    rows = len(values) - 1 - (~np.isnan(values[::-1])).argmax(axis=0)
    final: npt.NDArray[np.float64] = np.take_along_axis(values, rows[None], axis=0)[0]
    return final[~np.isnan(final)]


_SIZE = 7.5
# Offsets in points from the mark, and the alignment of the text there.
_PLACES = [(5, 0, "left"), (-5, 0, "right"), (0, 10, "center"), (0, -10, "center")]
_PLACES += [(dx, dy, "left" if dx > 0 else "right") for dy in (10, -10, 20, -20, 30, -30) for dx in (5, -5)]

Box = tuple[float, float, float, float]


def _place_labels(ax: Axes, x: npt.ArrayLike, y: npt.ArrayLike, names: Sequence[str]) -> None:
    """Write `names` next to the points (x, y) of `ax`, each at the first free position.

    >>> from gyroscope.figures.drawing import own_axes
    >>> ax = own_axes()
    >>> _place_labels(ax, [0.5, 0.5], [1.0, 1.0], ["one", "two"])
    >>> len({text.get_position() for text in ax.texts})
    2
    """
    figure = ax.get_figure()
    assert isinstance(figure, Figure)
    ax.autoscale_view()
    points = ax.transData.transform(np.column_stack([np.asarray(x, float), np.asarray(y, float)]))
    points *= 72 / figure.dpi
    frame = ax.get_window_extent()
    left, right = frame.x0 * 72 / figure.dpi, frame.x1 * 72 / figure.dpi
    taken: list[Box] = [(px - 3, py - 3, px + 3, py + 3) for px, py in points]
    for (px, py), at_x, at_y, name in zip(points, np.asarray(x), np.asarray(y), short_names(names), strict=True):
        boxes = [(_box(px + dx, py + dy, side, name), dx, dy, side) for dx, dy, side in _PLACES]
        costs = [_cost(box, taken, left, right) for box, *_ in boxes]
        box, dx, dy, side = boxes[int(np.argmin(costs))]
        taken.append(box)
        ax.annotate(
            name,
            (at_x, at_y),
            xytext=(dx, dy),
            textcoords="offset points",
            ha=side,
            va="center",
            fontsize=_SIZE,
            path_effects=[withStroke(linewidth=2, foreground="white")],
            arrowprops={"arrowstyle": "-", "color": "0.7", "linewidth": 0.5} if abs(dy) > 10 else None,
        )


def _box(x: float, y: float, side: str, name: str) -> Box:
    # Estimated without a renderer: a letter is about 0.58 of the font size wide.
    width = 0.58 * _SIZE * len(name)
    start = x if side == "left" else x - width if side == "right" else x - width / 2
    return start, y - 0.6 * _SIZE, start + width, y + 0.6 * _SIZE


def _cost(box: Box, taken: list[Box], left: float, right: float) -> float:
    outside = max(left - box[0], 0) + max(box[2] - right, 0)
    return outside * _SIZE + sum(
        max(min(box[2], t[2]) - max(box[0], t[0]), 0) * max(min(box[3], t[3]) - max(box[1], t[1]), 0) for t in taken
    )
