"""`Run`, a run to read; `load` opens one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from gyroscope.base import markup
from gyroscope.errors import StoreError
from gyroscope.store import lock, schema
from gyroscope.store.arguments import path_of, steps_of
from gyroscope.store.connect import damaged
from gyroscope.store.export import Table, Wanted, to_csv, to_json, to_pandas, to_parquet
from gyroscope.store.query import Attempt, History, Query, measured_steps, read_series
from gyroscope.store.record import Event, LayerInfo, QuantityInfo, Steps, Values

if TYPE_CHECKING:
    import pandas

    State = Literal["running", "ended", "interrupted"]
else:
    State = str  # Jedi, which completes names in IPython, fails on properties that return a Literal

T = TypeVar("T")

# In seconds since 1970; later times are invalid.
_YEAR_10000 = 253_402_300_800
# Logged numbers that a notebook shows at most, and the series whose last values it shows, with their heads.
_LOGGED = 12
_SHOWN = {"rotation": "last rotation", "rate_per_step": "rotation rate, rad/step", "weight_norm": "‖w‖"}


class Scalar(NamedTuple):
    """Numbers of the whole network: `values[i]` was logged at `steps[i]`.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder, write_example(f"{folder}/first") as run:
    ...     loss = run.scalars["loss"]
    >>> loss.steps.shape == loss.values.shape
    True
    """

    steps: Steps
    values: npt.NDArray[np.float64]


def _understood(read: Callable[[Run], T]) -> Callable[[Run], T]:
    """Report a readable file with invalid content as damaged."""

    @wraps(read)
    def wrapped(run: Run) -> T:
        try:
            return read(run)
        except (KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
            what = read.__name__.strip("_").replace("_", " ")
            raise damaged(run._ask.file, f"its {what} cannot be understood ({error})") from error

    return wrapped


def _no_number(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


class LayerSeries:
    """The series of one layer: `run["conv1.weight"]["rotation"]` is float32 `[S]`, over `run.steps`.

    `dict(run["conv1.weight"])` reads all of them.
    """

    def __init__(self, run: Run, layer: int) -> None:
        self._run, self._layer = run, layer

    def __getitem__(self, quantity: str) -> Values:
        values: Values = self._run.series(quantity)[:, self._layer]
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(self._run.quantities)

    def keys(self) -> list[str]:
        """Return the names of the quantities."""
        return list(self)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)

    def __repr__(self) -> str:
        return f"LayerSeries({self._run.layers[self._layer]!r}: {', '.join(self)})"


class Run:
    """A run on disk, as it was when it was first read; `refresh` shows what has been written since.

    It can be read while it is written. Its file is never changed, and nothing in it is executed.

    Attributes:
        path: the run's folder.
        name: the folder's name.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder, write_example(f"{folder}/first") as run:
    ...     print(run)
    ...     run.series("rotation")[:, -1]
    ...     run.scalars["loss"].values
    Run('first': 3 layers, 5 steps from 0 to 40, rotation, rate)
    array([0. , 0.2, 0.4, 0.6, 0.8], dtype=float32)
    array([2.  , 1.  , 0.5 , 0.25])

    The names of the layers are its keys, which IPython completes.

    >>> with tempfile.TemporaryDirectory() as folder, write_example(f"{folder}/first") as run:
    ...     list(run), run["conv1.weight"]["rotation"][-1]
    (['conv1.weight', 'conv2.weight', 'head.weight'], np.float32(0.4))
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path_of(path).absolute()
        self.name = self.path.name
        self._ask = Query(self.path / schema.FILE)
        self._ask("SELECT 1 FROM layers")

    @cached_property
    @_understood
    def meta(self) -> dict[str, Any]:
        """Metadata that the run was written with."""
        rows = self._ask("SELECT key, value FROM meta ORDER BY key")
        return {key: json.loads(value, parse_constant=_no_number) for key, value in rows}

    @cached_property
    def layer_table(self) -> tuple[LayerInfo, ...]:
        """Layers with their kinds, shapes and parts, in forward order."""
        return schema.layers_from(self._ask(schema.LAYERS), self._ask.file)

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers, in forward order."""
        return tuple(layer.name for layer in self.layer_table)

    @cached_property
    @_understood
    def quantities(self) -> dict[str, QuantityInfo]:
        """Quantities that the run has values of, by name."""
        has_rows = "EXISTS (SELECT 1 FROM series WHERE quantity = id)"
        rows = self._ask(f"SELECT name, unit, meaning FROM quantities WHERE {has_rows} ORDER BY id")
        return {row[0]: QuantityInfo(*schema.of_kinds(row, str, str, str)) for row in rows}

    @cached_property
    @_understood
    def attempts(self) -> list[Attempt]:
        """Stretches in which the run was written: more than one if it was resumed."""
        rows = self._ask("SELECT attempt, start_step, time, ended FROM attempts ORDER BY attempt")
        found = [Attempt(*schema.of_kinds(row, int, int, schema.NUMBER, schema.OR_NONE)) for row in rows]
        if any(not 0 <= time < _YEAR_10000 for one in found for time in (one.time, one.ended or 0)):
            raise ValueError("an invalid time")
        return found

    @property
    def state(self) -> State:
        """State of the run: "running" while it is written, "ended", or "interrupted" by a kill or an exception."""
        if lock.is_held(self.path):
            return "running"
        (ended,) = self._ask("SELECT ended FROM attempts ORDER BY attempt DESC LIMIT 1") or [(None,)]
        return "interrupted" if ended[0] is None else "ended"

    @cached_property
    @_understood
    def steps(self) -> Steps:
        """Steps at which anything was measured, in order: int64 `[S]`."""
        rows = self._ask("SELECT step, attempt FROM series GROUP BY step, attempt")
        return np.unique(np.array([s for s, attempt in rows if self._history.shows(attempt, s)], dtype=np.int64))

    def series(self, name: str, *, steps: Sequence[int] | Steps | None = None) -> Values:
        """Return one quantity over steps and layers.

        Args:
            name: one of `quantities`.
            steps: the steps wanted; all of `run.steps` if None.

        Returns:
            float32 `[S, L]`; NaN if it was not measured or is unknown.

        Raises:
            StoreError: the run has no such quantity, or its file is damaged.
        """
        self._known(name)
        wanted, place = np.unique(self.steps if steps is None else steps_of(steps), return_inverse=True)
        values = read_series(self._ask, self._history, name, wanted, self.layer_table)
        return values if steps is None else values[place]

    def __getitem__(self, layer: str) -> LayerSeries:
        """Return the series of one layer, by its name.

        Raises:
            StoreError: the run has no such layer.
        """
        if layer not in self.layers:
            close = get_close_matches(str(layer), self.layers, n=3, cutoff=0.4) or self.layers[:3]
            raise StoreError(f"{self.path} has no layer {layer!r}. Close names are {', '.join(map(repr, close))}.")
        return LayerSeries(self, self.layers.index(layer))

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)

    def where(self, name: str) -> Steps:
        """Return the steps at which a quantity was measured for any layer; a subset of `steps`."""
        self._known(name)
        return measured_steps(self._ask, self._history, name, self.steps)

    @cached_property
    @_understood
    def scalars(self) -> dict[str, Scalar]:
        """Numbers logged for the whole network, by name."""
        found: dict[str, dict[int, float]] = {}
        for row in self._ask("SELECT name, step, attempt, value FROM scalars ORDER BY name, step, attempt"):
            name, step, attempt, value = schema.of_kinds(row, str, int, int, schema.OR_NONE)
            if self._history.shows(attempt, step):
                found.setdefault(name, {})[step] = np.nan if value is None else value
        return {
            name: Scalar(np.array(list(of), dtype=np.int64), np.array(list(of.values()), dtype=np.float64))
            for name, of in found.items()
        }

    @property
    def events(self) -> list[Event]:
        """Events, in the order of steps."""
        return [event for event, attempt in self._events if self._history.shows(attempt, event.step)]

    @property
    def all_events(self) -> list[Event]:
        """Events of all attempts, including those after the step at which a later attempt was resumed."""
        return [event for event, _ in self._events]

    @cached_property
    @_understood
    def _events(self) -> list[tuple[Event, int]]:
        """All events, with their attempts."""
        rows = self._ask("SELECT step, kind, text, time, attempt FROM events ORDER BY step, attempt, rowid")
        checked = [schema.of_kinds(row, int, str, str, schema.NUMBER, int) for row in rows]
        if not all(0 <= row[3] < _YEAR_10000 for row in checked):
            raise ValueError("an invalid time")
        return [(Event(*row), attempt) for *row, attempt in checked]

    def to_pandas(self, quantity: Wanted = None) -> pandas.DataFrame:
        """Return a data frame: one row per step for one quantity or scalar, else one row per step and layer."""
        return to_pandas(self, quantity)

    def to_parquet(self, path: str | os.PathLike[str], quantity: Wanted = None) -> Path:
        """Write the table of `to_pandas` as Parquet."""
        return to_parquet(self, path, quantity)

    def to_csv(self, path: str | os.PathLike[str], quantity: Wanted = None) -> Path:
        """Write the table of `to_pandas` as CSV; unknown values are empty."""
        return to_csv(self, path, quantity)

    def to_json(self, path: str | os.PathLike[str], quantity: Wanted = None) -> Path:
        """Write the run as JSON, with all series or some of them; unknown values are null."""
        return to_json(self, path, quantity)

    def check(self) -> None:
        """Read all of the run, and compare it with its checksums.

        Raises:
            StoreError: the file is damaged; the message says where.
        """
        said = self._ask("PRAGMA integrity_check(1)")
        if said != [("ok",)]:
            raise damaged(self._ask.file, str(said[0][0]))
        for _ in Table.of(self, None).pieces():
            pass

    def refresh(self) -> None:
        """Discard what was read, so that it is read again."""
        for name in ("meta", "quantities", "attempts", "steps", "scalars", "_events", "_history"):
            self.__dict__.pop(name, None)

    def close(self) -> None:
        """Close the file; reading opens it again."""
        self._ask.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[type[Run], tuple[Path]]:
        return Run, (self.path,)

    def __repr__(self) -> str:
        span = f" from {self.steps[0]} to {self.steps[-1]}" if len(self.steps) else ""
        return (
            ", ".join(
                [f"Run({self.name!r}: {len(self.layers)} layers", f"{len(self.steps)} steps{span}", *self.quantities]
            )
            + ")"
        )

    def _repr_html_(self) -> str:
        return _html(self)

    @cached_property
    @_understood
    def _history(self) -> History:
        return History(self.attempts)

    def _known(self, name: str) -> None:
        if not isinstance(name, str) or name not in self.quantities:
            close = get_close_matches(str(name), self.quantities, n=3, cutoff=0.4) or list(self.quantities)
            said = f"Close names are {', '.join(map(repr, close))}" if close else "It has no series yet"
            raise StoreError(f"{self.path} has no series {name!r}. {said}.")


def _html(run: Run) -> str:
    """Return the run for a notebook: its state, what was logged last, and its layers with curves of their rotation."""
    steps, layers = run.steps, run.layer_table
    span = f" from {steps[0]:,} to {steps[-1]:,}" if len(steps) else ""
    findings = sum(event.kind == "finding" for event in run.events)
    said = [run.state, f"{len(layers):,} layers", f"{len(steps):,} measured steps{span}"]
    said += [f"{findings:,} finding{'s' if findings > 1 else ''}"] if findings else []
    lines = [f"<p><b>{markup.text(run.name)}</b>: {markup.text(', '.join(said))}</p>"]
    logged = [f"{name[:60]} {markup.number(one.values[-1])}" for name, one in run.scalars.items() if len(one.values)]
    if logged:
        more = [f"{len(logged) - _LOGGED:,} more"] if len(logged) > _LOGGED else []
        lines.append(markup.paragraph("Logged last: " + ", ".join([*logged[:_LOGGED], *more])))
    columns: dict[str, Sequence[object]] = {
        "layer": run.layers,
        "shape": [" × ".join(map(str, layer.shape)) for layer in layers],
    }
    if len(at := run.where("rotation") if "rotation" in run.quantities else steps[:0]):
        at = at[np.unique(np.linspace(0, len(at) - 1, markup.POINTS).round().astype(int))]
        rotation = run.series("rotation", steps=at)
        high = float(np.max(rotation, initial=0.0, where=np.isfinite(rotation)))
        columns[f"rotation, 0 to {markup.number(high)}"] = [
            markup.curve(at, one, 0.0, high, "rotation") for one in rotation.T
        ]
    for name, head in _SHOWN.items():
        if name in run.quantities:
            values = run.series(name, steps=run.where(name)[-_LOGGED:])
            columns[head] = [markup.number(next(filter(np.isfinite, one[::-1]), None)) for one in values.T]
    rows = list(zip(*columns.values(), strict=True))
    return "".join([*lines, markup.table(list(columns), rows, words=range(2))])
