"""Export of runs: CSV and JSON need only NumPy, data frames and Parquet need the extra `export`.

A `Table` holds the columns to export, and reads them in pieces that fit into memory.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from gyroscope.base.lazy import required
from gyroscope.base.whole_file import whole_file
from gyroscope.errors import StoreError
from gyroscope.store import schema
from gyroscope.store.arguments import names_of, path_of
from gyroscope.store.record import Steps, Values

if TYPE_CHECKING:
    import pandas

    from gyroscope.store.reader import Run

#: Values of one quantity that are held in memory at a time.
_PIECE = 1 << 20
_EXTRA = "gyroscope[export]"

#: One name gives a wide table (one column per layer). Several, or None for all, give a long one (one column per
#: quantity).
Wanted = str | Sequence[str] | None


@dataclass(frozen=True)
class Table:
    """A table of a run.

    It is wide (`step`, one column per layer), long (`step`, `layer`, one column per quantity), or that of a scalar.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder, write_example(folder) as run:
    ...     Table.of(run, "rotation").columns, Table.of(run, None).columns, Table.of(run, "loss").columns
    (('conv1.weight', 'conv2.weight', 'head.weight'), ('rotation', 'rate'), ('loss',))
    """

    run: Run
    form: str
    columns: tuple[str, ...]
    name: str | None = None

    @classmethod
    def of(cls, run: Run, wanted: Wanted) -> Table:
        """Return the table that a user asks for.

        Raises:
            StoreError: the run has no quantity or scalar of that name.
        """
        known = [*run.quantities, *(name for name in run.scalars if name not in run.quantities)]
        names = list(run.quantities) if wanted is None else names_of(wanted)
        for name in names:
            if name not in known:
                raise StoreError(
                    f"{run.path} has no {name!r}. It has {', '.join(known) or 'no series and no scalars'}."
                )
            if name not in run.quantities and not isinstance(wanted, str):
                raise StoreError(f"{name!r} is a number of the whole network, not of its layers. Export it alone.")
        if not isinstance(wanted, str):
            return cls(run, "long", tuple(names))
        if wanted in run.quantities:
            return cls(run, "wide", run.layers, wanted)
        return cls(run, "scalar", (wanted,), wanted)

    def pieces(self) -> Iterator[tuple[Steps, Mapping[str, Values]]]:
        """Yield steps and the values of each column: `[steps]`, or `[steps, layers]` in a long table."""
        if self.form == "scalar":
            scalar = self.run.scalars[self.columns[0]]
            yield scalar.steps, {self.columns[0]: scalar.values}  # type: ignore[dict-item]  # float64, as logged
            return
        size = max(1, _PIECE // len(self.run.layers))
        for i in range(0, len(self.run.steps), size):
            steps = self.run.steps[i : i + size]
            if self.form == "wide":
                values = self.run.series(str(self.name), steps=steps)
                yield steps, dict(zip(self.columns, values.T, strict=True))
            else:
                yield steps, {name: self.run.series(name, steps=steps) for name in self.columns}


def to_csv(run: Run, path: str | os.PathLike[str], wanted: Wanted = None) -> Path:
    """Write a table with a header; numbers are as short as possible, and unknown values are empty.

    A name that a spreadsheet would run as a formula is prefixed with an apostrophe.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder, write_example(f"{folder}/first") as run:
    ...     to_csv(run, f"{folder}/first.csv").read_text().split()[:3]
    ['step,layer,rotation,rate', '0,conv1.weight,0.0,', '0,conv2.weight,0.0,']
    """
    table = Table.of(run, wanted)
    with _whole_text(path) as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["step", *(["layer"] if table.form == "long" else []), *map(_inert, table.columns)])
        layers = [_inert(name) for name in run.layers]
        for steps, columns in table.pieces():
            if table.form == "long":
                labels = (np.repeat(steps, len(layers)).tolist(), layers * len(steps))
                out.writerows(zip(*labels, *(_text(column.ravel(), "") for column in columns.values()), strict=True))
            else:
                out.writerows(zip(steps.tolist(), *(_text(column, "") for column in columns.values()), strict=True))
    return Path(path)


def to_json(run: Run, path: str | os.PathLike[str], wanted: Wanted = None) -> Path:
    """Write everything about a run as strict JSON; a number that is not finite is null.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder, write_example(f"{folder}/first") as run:
    ...     read = json.loads(to_json(run, f"{folder}/first.json").read_text())
    >>> list(read)
    ['gyroscope', 'name', 'meta', 'attempts', 'layers', 'quantities', 'events', 'scalars', 'steps', 'series']
    >>> read["series"]["rate"][0], read["scalars"]["loss"]["values"]
    ([None, None, None], [2.0, 1.0, 0.5, 0.25])
    """
    names = None if wanted is None else names_of(wanted)
    if names is not None:
        # Scalars are always exported.
        names = [name for name in names if name in run.quantities or name not in run.scalars]
    table = Table.of(run, names)
    about = {
        "gyroscope": {"layout": schema.VERSION},
        "name": run.name,
        "meta": run.meta,
        "attempts": [attempt._asdict() for attempt in run.attempts],
        "layers": [vars(layer) for layer in run.layer_table],
        "quantities": {name: vars(run.quantities[name]) for name in table.columns},
        "events": [vars(event) for event in run.events],
        "scalars": {
            name: {"steps": scalar.steps.tolist(), "values": [_finite(v) for v in scalar.values.tolist()]}
            for name, scalar in run.scalars.items()
        },
        "steps": run.steps.tolist(),
    }
    with _whole_text(path) as file:
        file.write(json.dumps(about, allow_nan=False, indent=1)[:-2] + ',\n "series": {')
        for name, before in zip(table.columns, ["\n", *repeat(",\n", len(table.columns))], strict=False):
            file.write(f"{before}  {json.dumps(name)}: [")
            separator = "\n"
            for _, columns in Table(run, "long", (name,)).pieces():
                for row in np.where(np.isfinite(columns[name]), columns[name], np.nan):
                    file.write(f"{separator}   [{', '.join(_text(row, 'null'))}]")
                    separator = ",\n"
            file.write("\n  ]")
        file.write("\n }\n}\n")
    return Path(path)


def to_pandas(run: Run, wanted: Wanted = None) -> pandas.DataFrame:
    """Return a data frame: steps by layers for one quantity, one row per step and layer for several or all.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder, write_example(folder) as run:
    ...     print(to_pandas(run, "rotation").tail(1))
          conv1.weight  conv2.weight  head.weight
    step
    40             0.4           0.6          0.8
    """
    pd = required("pandas", "A data frame", _EXTRA)
    table = Table.of(run, wanted)
    if table.form == "wide":
        index = pd.Index(run.steps, name="step")
        return pd.DataFrame(run.series(str(table.name)), index=index, columns=list(run.layers))
    if table.form == "scalar":
        scalar = run.scalars[str(table.name)]
        return pd.DataFrame({table.name: scalar.values}, index=pd.Index(scalar.steps, name="step"))
    layers = pd.Categorical.from_codes(np.tile(np.arange(len(run.layers)), len(run.steps)), list(run.layers))
    values = {name: run.series(name).ravel() for name in table.columns}
    return pd.DataFrame({"step": np.repeat(run.steps, len(run.layers)), "layer": layers, **values})


def to_parquet(run: Run, path: str | os.PathLike[str], wanted: Wanted = None) -> Path:
    """Write a table as Parquet; unknown values are null, and the file describes the quantities.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder, write_example(f"{folder}/first") as run:
    ...     to_parquet(run, f"{folder}/first.parquet").name
    'first.parquet'
    """
    pa, parquet = (required(module, "Parquet", _EXTRA) for module in ("pyarrow", "pyarrow.parquet"))
    table = Table.of(run, wanted)
    fields = [("step", pa.int64())]
    if table.form == "long":
        fields.append(("layer", pa.dictionary(pa.int32(), pa.string())))
    number = pa.float64() if table.form == "scalar" else pa.float32()
    described = {name: [about.unit, about.meaning] for name, about in run.quantities.items()}
    about = json.dumps({"run": run.name, "meta": run.meta, "quantities": described, "shown": table.name})
    fields = pa.schema([*fields, *((column, number) for column in table.columns)], metadata={"gyroscope": about})
    with _whole_path(path) as part, parquet.ParquetWriter(part, fields) as out:
        for steps, columns in table.pieces():
            arrays: list[Any] = [pa.array(np.repeat(steps, len(run.layers) if table.form == "long" else 1))]
            if table.form == "long":
                codes = np.tile(np.arange(len(run.layers), dtype=np.int32), len(steps))
                arrays.append(pa.DictionaryArray.from_arrays(codes, list(run.layers)))
            arrays += (pa.array(np.ravel(column), type=number, from_pandas=True) for column in columns.values())
            out.write_table(pa.Table.from_arrays(arrays, schema=fields))
    return Path(path)


def _text(values: Values, unknown: str) -> list[str]:
    """Return numbers as the shortest text that reads back as the same, with `unknown` for NaN.

    >>> _text(np.array([0.1, np.nan, 1e-8], dtype=np.float32), "")
    ['0.1', '', '1e-08']
    """
    return [unknown if word == "nan" else word for word in values.astype("U").tolist()]


def _inert(name: str) -> str:
    return f"'{name}" if name.startswith(("=", "+", "-", "@", "\t", "\r")) else name


@contextmanager
def _whole_text(path: str | os.PathLike[str]) -> Iterator[IO[str]]:
    """Open a text file that appears only when all of it has been written."""
    with _whole_path(path) as part, open(part, "w", newline="", encoding="utf-8") as file:
        yield file


@contextmanager
def _whole_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a path to write to, which becomes `path` at the end; see `whole_file`. /dev/stdout is written directly.

    Raises:
        StoreError: it cannot be written.
    """
    final = path_of(path, "the file to write")
    if not final.name:
        raise StoreError(f"The file to write must have a name, got {str(path)!r}. Try 'run.csv'.")
    try:
        with whole_file(final) as part:
            yield part
    except OSError as error:
        raise StoreError(f"{final} cannot be written: {error.strerror or error}. Use another path.") from error


def _finite(value: Any) -> Any:
    return value if np.isfinite(value) else None
