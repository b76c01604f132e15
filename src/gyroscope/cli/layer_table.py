"""The table of `gyroscope show`: one row per layer, with its last values and a sparkline.

It is loaded when a run is shown: other commands start without what it needs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from rich.box import SIMPLE_HEAD
from rich.table import Table

from gyroscope.cli.printed import plain, text
from gyroscope.diagnosis.standing_out import last_values, lost_at
from gyroscope.store import Run
from gyroscope.store.record import Steps, Values

_SPARK = 24
# Long names are shortened to no fewer characters than this.
_LEAST = 12
# Quantities between 0 and 1 or between -1 and 1, which a logarithmic sparkline would not suit.
_LINEAR = ("rotation", "neuron", "dying", "full", "alignment", "invariance")

# Values for the next step, not for the last one.
_RATES = ("lr", "effective_lr")


@dataclass(frozen=True)
class _Column:
    """A heading, one cell per layer, and a rank: a narrow terminal leaves out the highest first."""

    heading: str
    cells: Sequence[str]
    yields: int
    right: bool = True

    @property
    def letters(self) -> int:
        return max(map(len, (self.heading, *self.cells)))

    @property
    def width(self) -> int:
        return self.letters + 3


_NUMBERS: tuple[tuple[str, str, Callable[[float], str], int], ...] = (
    ("rotation", "rotation", lambda value: f"{value:.3f}", 0),
    ("merged_rotation", "merged", lambda value: f"{value:.3f}", 0),
    ("rate_per_step", "rad/step", lambda value: f"{value:.2g}", 1),
    ("weight_norm", "‖w‖", lambda value: f"{value:.3g}", 3),
    ("update_ratio", "‖Δw‖/‖w‖", lambda value: f"{value:.2g}", 2),
    ("effective_lr", "η/‖w‖²", lambda value: f"{value:.2g}", 4),
)


def layer_table(run: Run, *, quantity: str, rows: Sequence[int], width: int) -> tuple[Table, list[str]]:
    """Return the table of the layers at `rows`, and the headings that did not fit in `width` characters.

    A gap between the rows is shown as one row, with the number of layers in it. Names that are still too long lose
    their beginning.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder, write_example(folder) as run:
    ...     table, left_out = layer_table(run, quantity="rotation", rows=[0, 2], width=100)
    >>> [column.header for column in table.columns], table.row_count, left_out
    (['layer', 'kind', 'shape', 'rotation', 'rotation over the steps'], 3, [])
    """
    columns = _columns(run, quantity, rows)
    left_out = []
    while sum(column.width for column in columns) > width and any(column.yields for column in columns):
        first = max(columns, key=lambda column: column.yields)
        columns.remove(first)
        left_out.append(first.heading)
    names = columns[0]
    left = max(width - sum(column.width for column in columns[1:]) - 3, _LEAST)
    columns[0] = replace(names, cells=[name if len(name) <= left else f"…{name[1 - left :]}" for name in names.cells])
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for column in columns:
        table.add_column(
            plain(column.heading), justify="right" if column.right else "left", no_wrap=True,
            min_width=column.letters if column.right else None,
        )  # fmt: skip
    previous = -1
    for place, row in enumerate(rows):
        if row > previous + 1:
            table.add_row(text(f"… {row - previous - 1:,} more", style="dim"))
        table.add_row(*(text(column.cells[place]) for column in columns))
        previous = row
    if previous < len(run.layers) - 1:
        table.add_row(text(f"… {len(run.layers) - 1 - previous:,} more", style="dim"))
    return table, left_out[::-1]


def _as_taken(run: Run, quantity: str) -> npt.NDArray[np.floating]:
    """Return a quantity over the steps; for learning rates, only values that a step was taken with.

    The last row of a closed run holds the learning rate that the next step would have had, which is 0 after many
    schedules. Such a row has no gradient and no update. A layer that never had any keeps all its values.
    """
    series = run.series(quantity)
    shows = [name for name in ("update_ratio", "update_norm", "gradient_norm") if name in run.quantities]
    if quantity not in _RATES or not shows:
        return series
    taken = np.any([np.isfinite(run.series(name)) for name in shows], axis=0)
    return np.where(taken | ~taken.any(axis=0), series, np.nan)


def of_earlier_steps(run: Run, *, quantity: str, headings: Collection[object]) -> str:
    """Return which of the columns under `headings` end before the last step, and where; empty if none does."""
    steps: dict[int, list[str]] = {}
    lost = (lost_at(run) < len(run.steps)).all()
    others = [] if quantity in (name for name, *_ in _NUMBERS) else [(quantity, quantity)]
    for name, heading in (*((name, heading) for name, heading, *_ in _NUMBERS), *others):
        if name in run.quantities and heading in headings and not lost:
            known = np.flatnonzero(np.isfinite(_as_taken(run, name)).any(axis=1))
            if len(known) and known[-1] < len(run.steps) - 1:
                steps.setdefault(int(run.steps[known[-1]]), []).append(heading)
    said = [
        f"{' and '.join(names)} {'were' if len(names) > 1 else 'was'} last measured at step {at:,}."
        for at, names in steps.items()
    ]
    return " ".join(said)


def _columns(run: Run, quantity: str, rows: Sequence[int]) -> list[_Column]:
    infos = [run.layer_table[row] for row in rows]
    columns = [
        _Column("layer", [info.name for info in infos], 0, right=False),
        _Column("kind", [info.kind for info in infos], 6, right=False),
        _Column("shape", ["×".join(map(str, info.shape)) for info in infos], 5),
    ]
    at = lost_at(run)
    lost = at < len(run.steps)
    frozen = _frozen(run)
    shown = [name for name, *_ in _NUMBERS]
    others = [] if quantity in shown else [(quantity, quantity, lambda value: f"{value:.3g}", 0)]
    for name, heading, written, yields in (*_NUMBERS, *others):
        if name in run.quantities:
            series = _as_taken(run, name)
            # The last finite value of a lost layer is not its current one.
            gone = lost & ~np.isfinite(series[-1]) if len(series) else lost
            values = last_values(series)
            known = np.isfinite(values)
            unknown = ["frozen" if name == "rotation" and one in frozen else "–" for one in run.layers]
            cells = ["nan" if gone[row] else written(values[row]) if known[row] else unknown[row] for row in rows]
            columns.append(_Column(heading, cells, yields))
    if quantity in run.quantities and len(run.steps):
        series = _as_taken(run, quantity)
        lines = sparklines(run.steps, series, width=_SPARK, log=not quantity.startswith(_LINEAR))
        # A curve ends at the step at which its layer was lost.
        for row in np.flatnonzero(lost & ~np.isfinite(series[-1])).tolist():
            part = (run.steps[at[row] - 1] - run.steps[0]) / max(run.steps[-1] - run.steps[0], 1)
            lines[row] = lines[row][: int(part * len(lines[row])) + 1]
        columns.append(_Column(f"{quantity} over the steps", [lines[row] for row in rows], 0, right=False))
    return columns


def _frozen(run: Run) -> set[str]:
    """Return the layers that were frozen when the run began, and so have no rotation unless they trained later."""
    facts = run.meta.get("facts")
    named = facts.get("frozen") if isinstance(facts, dict) else None
    return set(named) if isinstance(named, list) else set()


BLOCKS = "▁▂▃▄▅▆▇█"


def sparklines(steps: npt.ArrayLike, values: npt.ArrayLike, *, width: int = 24, log: bool = False) -> list[str]:
    """Return one line of block characters per column of `values` [steps, layers], all on one scale.

    Each character is the mean of the values within its share of the steps; without values the previous one is repeated.
    The scale starts at 0 for values that are never negative; with `log`, positive values that span more than a factor
    of 100 are on a logarithmic scale.

    >>> sparklines([0, 1, 2, 3], [[0.0, 0.0], [0.1, 0.5], [0.2, 0.8], [0.3, 1.0]], width=4)
    ['▁▁▂▃', '▁▅▇█']
    """
    x, y = np.asarray(steps, dtype=float), np.asarray(values, dtype=float)
    y = np.where(np.isfinite(y), y, np.nan)
    cells = _cells(x, y, min(width, len(x)))
    known = cells[~np.isnan(cells)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 0.0)
    if log and low > 0 and high > 100 * low:
        cells, low, high = np.log(cells), float(np.log(low)), float(np.log(high))
    else:
        low = min(low, 0.0)
    level = 0.0 * cells if low == high else (cells - low) / (high - low)  # unknown values stay NaN
    return ["".join(_block(value) for value in column) for column in level.T]


def _cells(x: npt.NDArray[np.float64], y: npt.NDArray[np.float64], width: int) -> npt.NDArray[np.float64]:
    span = max(float(x[-1] - x[0]), 1.0) if len(x) else 1.0
    cell = np.minimum(((x - x[0]) / span * width).astype(int), width - 1) if len(x) else np.array([], dtype=int)
    means = np.full((width, y.shape[1]), np.nan)
    last = np.full(y.shape[1], np.nan)
    for place in range(width):
        inside = y[cell == place]
        counts = (~np.isnan(inside)).sum(axis=0)
        sums = np.nansum(inside, axis=0)
        last = np.where(counts > 0, sums / np.maximum(counts, 1), last)
        means[place] = last
    return means


def _block(level: float) -> str:
    return " " if np.isnan(level) else BLOCKS[min(int(level * len(BLOCKS)), len(BLOCKS) - 1)]


#: Bytes of series that are kept; others are read again each time.
_MOST = 1 << 28


class Kept(Run):
    """A run that keeps the series it has read until it is refreshed.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_example(folder).close()
    ...     with Kept(folder) as run:
    ...         run.series("rotation")[-1], run.series("rotation", steps=[40, 7])[:, 0]
    (array([0.4, 0.6, 0.8], dtype=float32), array([0.4, nan], dtype=float32))
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._kept: dict[str, Values] = {}

    def series(self, name: str, *, steps: Sequence[int] | Steps | None = None) -> Values:
        """Return a series as `Run.series` does; the caller may modify it."""
        if steps is not None and not np.array_equal(steps, self.steps):
            return super().series(name, steps=steps)
        if name in self._kept:
            return self._kept[name].copy()
        values = super().series(name)
        if sum(kept.nbytes for kept in self._kept.values()) + values.nbytes <= _MOST:
            self._kept[name] = values.copy()
        return values

    def refresh(self) -> None:
        """Discard the series that were read, so that they are read again."""
        super().refresh()
        self._kept.clear()
