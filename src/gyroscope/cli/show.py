"""`gyroscope show`: a run in the terminal."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated

import numpy as np
import numpy.typing as npt
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from gyroscope.cli import options
from gyroscope.cli.fail import BAD_ARGUMENT, FAILED, fail
from gyroscope.cli.options import RunPath
from gyroscope.cli.printed import plain, text
from gyroscope.diagnose.standing_out import last_values, lost_at
from gyroscope.errors import GyroscopeError
from gyroscope.store import Run
from gyroscope.store.record import Steps, Values

if TYPE_CHECKING:
    from gyroscope.store import Run


_ROWS = 24
_EVENTS = 3
_SECONDS = 2.0
# A pipe or a file has no width; this holds every column.
_UNBOUNDED = 150


def show(
    run: RunPath,
    quantity: Annotated[
        str,
        typer.Option(
            help="What the last column draws over the steps, such as gradient_norm.",
            autocompletion=options.quantities,
        ),
    ] = "rotation",
    layers: Annotated[
        str,
        typer.Option(
            metavar="N|all|PATTERN",
            help="How many layers to show, or those whose name matches.",
            autocompletion=options.layers,
        ),
    ] = str(_ROWS),
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep watching a run that is still going.")] = False,
) -> None:
    """Show a run as a table: one row a layer, with its last values and how they came about.

    **rotation** is how far a layer has turned from where it started, 0 not at all and 1 a right angle.
    **rad/step** is how fast it turns now, net over the steps since the measurement before, **‖w‖** the norm
    of its weights, **‖Δw‖/‖w‖** the size of an update beside them, **η/‖w‖²** the learning rate it feels. A dash
    is not known, nan not finite.

    For example: gyroscope show runs/first --layers all
    """
    from gyroscope.store import load

    try:
        with load(run) as found, Kept(found.path) as opened:
            _check(opened, quantity)
            console = Console()
            width = console.width if console.is_terminal else _UNBOUNDED
            if follow:
                _follow(opened, console, quantity, layers, width)
            else:
                console = console if console.is_terminal else Console(width=width)
                console.print(_page(opened, quantity, _rows(opened, layers), width))
    except GyroscopeError as error:
        fail(str(error), code=FAILED)


def _follow(run: Run, console: Console, quantity: str, layers: str, width: int) -> None:
    with Live(console=console, auto_refresh=False) as live:
        try:
            while True:
                going = run.state == "running"
                run.refresh()
                live.update(_page(run, quantity, _rows(run, layers), width), refresh=True)
                if not going:
                    return
                time.sleep(_SECONDS)
        except KeyboardInterrupt:  # how one stops watching
            return


def _page(run: Run, quantity: str, rows: list[int], width: int) -> RenderableType:
    from gyroscope.diagnose.standing_out import in_words

    table, left_out = layer_table(run, quantity=quantity, rows=rows, width=width)
    below = [in_words(run)]
    headings = [str(column.header) for column in table.columns]
    earlier = of_earlier_steps(run, quantity=quantity, headings=headings)
    if earlier:
        below.append(earlier)
    if "rad/step" in headings and len(run.steps) > 1 and (since := int(run.steps[-1] - run.steps[-2])) > 1:
        below.append(
            f"rad/step is the angle over the last {since:,} steps, divided by them: less than a single step turns, as "
            "far as steps undo each other."
        )
    if len(rows) < len(run.layers):
        below.append(f"{len(rows)} of {len(run.layers):,} layers are shown; --layers all shows them all.")
    if left_out:
        below.append(f"A wider terminal also shows {', '.join(left_out)}.")
    return Group(*map(text, _header(run)), table, *map(text, below))


def _header(run: Run) -> list[str]:
    steps = run.steps
    span = f"steps {steps[0]:,} to {steps[-1]:,}, {len(steps):,} of them measured" if len(steps) else "no steps yet"
    lines = [f"{run.name}: {len(run.layers):,} layers, {span}, {run.state}"]
    last = [f"{name} {curve.values[-1]:.4g}" for name, curve in run.scalars.items() if len(curve.values)]
    if last:
        lines.append(", ".join(last))
    events = run.events
    if len(events) > _EVENTS:
        lines.append(f"{len(events):,} events, the last of them (gyroscope events lists all):")
    lines += [f"  step {event.step:,} {event.kind}: {event.text}" for event in events[-_EVENTS:]]
    return lines


def _check(run: Run, quantity: str) -> None:
    known = list(run.quantities)
    if quantity not in known and known:
        close = get_close_matches(quantity, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        # "rotation" is what one gets without asking: a run without it is shown all the same.
        if quantity != "rotation":
            fail(f"--quantity {quantity} is not in {run.name}, which holds {', '.join(known)}{hint}", code=BAD_ARGUMENT)


def _rows(run: Run, layers: str) -> list[int]:
    count = len(run.layers)
    if layers == "all":
        return list(range(count))
    if layers.isascii() and layers.isdigit():
        wanted = count if len(layers) > 9 else min(int(layers), count)
        if wanted < 1:
            fail("--layers is 0; it must be 1 or more, all, or a pattern", code=BAD_ARGUMENT)
        first = (wanted + 1) // 2
        return [*range(first), *range(count - (wanted - first), count)]
    rows = [i for i, name in enumerate(run.layers) if fnmatchcase(name, layers)]
    if not rows:
        close = get_close_matches(layers, run.layers, n=1, cutoff=0)[0]
        fail(f"--layers {layers} matches none of the {count:,} layers; one of them is {close}", code=BAD_ARGUMENT)
    return rows


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


BLOCKS = "▁▂▃▄▅▆▇█"


def sparklines(steps: npt.ArrayLike, values: npt.ArrayLike, *, width: int = 24, log: bool = False) -> list[str]:
    """Return one line of block characters a column of `values` [steps, layers], all on one scale.

    Each character is the mean of the values within its share of the steps; where there are none the last
    value before goes on. The scale begins at 0 for values that are never negative; with `log`, positive
    values that span more than a hundredfold are on a logarithmic one.

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
    level = 0.0 * cells if low == high else (cells - low) / (high - low)  # what is not known stays so
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


#: Bytes of series that are kept; what is beyond is read again whenever it is asked for.
_MOST = 1 << 28


class Kept(Run):
    """A run that keeps what it has read until it is refreshed.

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
        """As `Run.series`; whoever asks may change what is returned."""
        if steps is not None and not np.array_equal(steps, self.steps):
            return super().series(name, steps=steps)
        if name in self._kept:
            return self._kept[name].copy()
        values = super().series(name)
        if sum(kept.nbytes for kept in self._kept.values()) + values.nbytes <= _MOST:
            self._kept[name] = values.copy()
        return values

    def refresh(self) -> None:
        """Forget what was read, so that it is read again."""
        super().refresh()
        self._kept.clear()
