"""Runs as CSV and JSON, with nothing but the standard library and NumPy."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from gyroscope.base.whole_file import whole_file
from gyroscope.errors import StoreError
from gyroscope.store import schema
from gyroscope.store.given import names_of, path_of
from gyroscope.store.tables import Table, Wanted, text

if TYPE_CHECKING:
    from gyroscope.store.reader import Run


def to_csv(run: Run, path: str | os.PathLike[str], wanted: Wanted = None) -> Path:
    """Write a table with a header; numbers are as short as they can be, what is not known is empty.

    A name that a spreadsheet would run as a formula is preceded by an apostrophe.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder, write_example(f"{folder}/first") as run:
    ...     to_csv(run, f"{folder}/first.csv").read_text().split()[:3]
    ['step,layer,rotation,rate', '0,conv1.weight,0.0,', '0,conv2.weight,0.0,']
    """
    table = Table.of(run, wanted)
    with _whole(path) as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["step", *(["layer"] if table.form == "long" else []), *map(_inert, table.columns)])
        layers = [_inert(name) for name in run.layers]
        for steps, columns in table.pieces():
            if table.form == "long":
                labels = (np.repeat(steps, len(layers)).tolist(), layers * len(steps))
                out.writerows(zip(*labels, *(text(column.ravel(), "") for column in columns.values()), strict=True))
            else:
                out.writerows(zip(steps.tolist(), *(text(column, "") for column in columns.values()), strict=True))
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
        names = [name for name in names if name in run.quantities or name not in run.scalars]  # these are there anyway
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
    with _whole(path) as file:
        file.write(json.dumps(about, allow_nan=False, indent=1)[:-2] + ',\n "series": {')
        for name, before in zip(table.columns, ["\n", *repeat(",\n", len(table.columns))], strict=False):
            file.write(f"{before}  {json.dumps(name)}: [")
            separator = "\n"
            for _, columns in Table(run, "long", (name,)).pieces():
                for row in np.where(np.isfinite(columns[name]), columns[name], np.nan):
                    file.write(f"{separator}   [{', '.join(text(row, 'null'))}]")
                    separator = ",\n"
            file.write("\n  ]")
        file.write("\n }\n}\n")
    return Path(path)


def _inert(name: str) -> str:
    return f"'{name}" if name.startswith(("=", "+", "-", "@", "\t", "\r")) else name


@contextmanager
def _whole(path: str | os.PathLike[str]) -> Iterator[IO[str]]:
    """A file that is there when all of it has been written, and not before."""
    with whole(path) as part, open(part, "w", newline="", encoding="utf-8") as file:
        yield file


@contextmanager
def whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path to write to, which becomes `path` at the end; see `whole_file`. /dev/stdout is written to as it is.

    Raises:
        StoreError: it cannot be written.
    """
    final = path_of(path, "a file to write")
    if not final.name:
        raise StoreError(f"{str(path)!r} was given for a file to write; it has no name. Give one, such as 'run.csv'.")
    try:
        with whole_file(final) as part:
            yield part
    except OSError as error:
        raise StoreError(f"{final} cannot be written: {error.strerror or error}. Give another path.") from error


def _finite(value: Any) -> Any:
    return value if np.isfinite(value) else None
