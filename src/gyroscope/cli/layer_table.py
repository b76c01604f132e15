"""One row a layer: what a run has measured last, and how a quantity went."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rich.box import SIMPLE_HEAD
from rich.table import Table

from gyroscope.cli.printed import plain, text
from gyroscope.cli.sparkline import sparklines
from gyroscope.diagnose.standing_out import last_values, lost_at
from gyroscope.store import Run

_SPARK = 24
# Quantities between 0 and 1 or between -1 and 1: those are near 0 that are 0.
_LINEAR = ("rotation", "neuron", "dying", "full", "alignment", "invariance")

# What the next step will be taken with, not what this one was.
_RATES = ("lr", "effective_lr")


@dataclass(frozen=True)
class _Column:
    """A heading, a cell for each layer, and how soon it is left out of a narrow terminal: the highest first."""

    heading: str
    cells: Sequence[str]
    yields: int
    right: bool = True

    @property
    def width(self) -> int:
        return max(map(len, (self.heading, *self.cells))) + 3


_NUMBERS: tuple[tuple[str, str, Callable[[float], str], int], ...] = (
    ("rotation", "rotation", lambda value: f"{value:.3f}", 0),
    ("rate_per_step", "rad/step", lambda value: f"{value:.2g}", 1),
    ("weight_norm", "‖w‖", lambda value: f"{value:.3g}", 3),
    ("update_ratio", "‖Δw‖/‖w‖", lambda value: f"{value:.2g}", 2),
    ("effective_lr", "η/‖w‖²", lambda value: f"{value:.2g}", 4),
)


def layer_table(run: Run, *, quantity: str, rows: Sequence[int], width: int) -> tuple[Table, list[str]]:
    """Return the table of the layers at `rows`, and the headings that `width` characters had no room for.

    A gap between the rows is shown as one, with the number of layers in it.

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
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for column in columns:
        table.add_column(plain(column.heading), justify="right" if column.right else "left", no_wrap=not column.right)
    previous = -1
    for place, row in enumerate(rows):
        if row > previous + 1:
            table.add_row(text(f"… {row - previous - 1:,} more", style="dim"))
        table.add_row(*(text(column.cells[place]) for column in columns))
        previous = row
    if previous < len(run.layers) - 1:
        table.add_row(text(f"… {len(run.layers) - 1 - previous:,} more", style="dim"))
    return table, left_out[::-1]


def as_taken(run: Run, quantity: str) -> npt.NDArray[np.floating]:
    """Return a quantity over the steps; of learning rates, only those that a step was taken with.

    The row that closes a run holds the learning rate that the next step would have had: 0 after many a schedule.
    Such a row knows no gradient and no update. A layer of which none was ever known keeps all it has.
    """
    series = run.series(quantity)
    shows = [name for name in ("update_ratio", "update_norm", "gradient_norm") if name in run.quantities]
    if quantity not in _RATES or not shows:
        return series
    taken = np.any([np.isfinite(run.series(name)) for name in shows], axis=0)
    return np.where(taken | ~taken.any(axis=0), series, np.nan)


def of_earlier_steps(run: Run, *, quantity: str, headings: Collection[object]) -> str:
    """Return which of the columns under `headings` end before the last step, and where; nothing if none does."""
    steps: dict[int, list[str]] = {}
    lost = (lost_at(run) < len(run.steps)).all()
    others = [] if quantity in (name for name, *_ in _NUMBERS) else [(quantity, quantity)]
    for name, heading in (*((name, heading) for name, heading, *_ in _NUMBERS), *others):
        if name in run.quantities and heading in headings and not lost:
            known = np.flatnonzero(np.isfinite(as_taken(run, name)).any(axis=1))
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
    shown = [name for name, *_ in _NUMBERS]
    others = [] if quantity in shown else [(quantity, quantity, lambda value: f"{value:.3g}", 0)]
    for name, heading, written, yields in (*_NUMBERS, *others):
        if name in run.quantities:
            series = as_taken(run, name)
            # What a layer was before it was lost is not what it is.
            gone = lost & ~np.isfinite(series[-1]) if len(series) else lost
            values = last_values(series)
            known = np.isfinite(values)
            cells = ["nan" if gone[row] else written(values[row]) if known[row] else "–" for row in rows]
            columns.append(_Column(heading, cells, yields))
    if quantity in run.quantities and len(run.steps):
        series = as_taken(run, quantity)
        lines = sparklines(run.steps, series, width=_SPARK, log=not quantity.startswith(_LINEAR))
        for row in np.flatnonzero(lost & ~np.isfinite(series[-1])).tolist():  # a curve ends where its layer was lost
            part = (run.steps[at[row] - 1] - run.steps[0]) / max(run.steps[-1] - run.steps[0], 1)
            lines[row] = lines[row][: int(part * len(lines[row])) + 1]
        columns.append(_Column(f"{quantity} over the steps", [lines[row] for row in rows], 0, right=False))
    return columns
