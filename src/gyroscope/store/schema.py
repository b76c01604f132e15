"""The layout of a run's file: its tables and their version, and the check that it holds nothing that acts.

A run is a folder with `run.sqlite`, an SQLite database. A row of `series` holds one quantity of the
layers of one part at one step, as float32 (see `database.pack`). A resumed run gets a new attempt; nothing that an
earlier attempt wrote is deleted (see `query.History`).
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gyroscope.errors import StoreError
from gyroscope.store.connect import damaged
from gyroscope.store.record import LayerInfo

FILE = "run.sqlite"
#: The application id that identifies a run among SQLite databases: "GYRO" as a number.
APPLICATION = 0x4759524F
VERSION = 1
#: Bytes of a page. A row of 1,202 layers fills an overflow page and a fifth of another.
PAGE = 4096


def sidecars(file: Path) -> tuple[Path, ...]:
    """Return the files that SQLite keeps next to a database: parts of it, which belong to no other database.

    >>> [path.name for path in sidecars(Path("run.sqlite"))]
    ['run.sqlite-wal', 'run.sqlite-shm', 'run.sqlite-journal']
    """
    return tuple(file.with_name(f"{file.name}{end}") for end in ("-wal", "-shm", "-journal"))


TABLES = {
    "meta": "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID",
    "layers": "CREATE TABLE layers (position INTEGER PRIMARY KEY, name TEXT, kind TEXT, shape TEXT, part INTEGER)",
    "quantities": "CREATE TABLE quantities (id INTEGER PRIMARY KEY, name TEXT UNIQUE, unit TEXT, meaning TEXT)",
    "attempts": "CREATE TABLE attempts (attempt INTEGER PRIMARY KEY, start_step INTEGER, time REAL, ended REAL)",
    "series": (
        "CREATE TABLE series (attempt INTEGER, step INTEGER, quantity INTEGER, part INTEGER, crc INTEGER, data BLOB)"
    ),
    "series_key": "CREATE UNIQUE INDEX series_key ON series (quantity, step, part, attempt)",
    "scalars": (
        "CREATE TABLE scalars (attempt INTEGER, step INTEGER, name TEXT, value REAL, PRIMARY KEY (name, step, attempt))"
        " WITHOUT ROWID"
    ),
    "events": "CREATE TABLE events (attempt INTEGER, step INTEGER, time REAL, kind TEXT, text TEXT)",
}


def create(connection: sqlite3.Connection) -> None:
    """Create the tables of an empty run.

    >>> connection = sqlite3.connect(":memory:")
    >>> create(connection)
    >>> check(connection, Path("memory"))
    >>> connection.close()
    """
    for statement in TABLES.values():
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION}")
    connection.execute(f"PRAGMA user_version = {VERSION}")


def check(connection: sqlite3.Connection, file: Path) -> None:
    """Reject a database that is not a run, has a newer version, or would execute code of its own.

    Raises:
        StoreError: names the file, what was found in it and what to do.

    >>> connection = sqlite3.connect(":memory:")
    >>> check(connection, Path("other.sqlite"))
    Traceback (most recent call last):
    gyroscope.errors.StoreError: other.sqlite is not a run: another program has written this database. ...
    >>> connection.close()
    """
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION:
        raise StoreError(f"{file} is not a run: another program has written this database. Use another folder.")
    if version > VERSION:
        raise StoreError(
            f"{file} was written by a newer Gyroscope (layout {version}; this one reads layouts up to {VERSION}). "
            "Upgrade with pip install --upgrade gyroscope."
        )
    found = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master").fetchall()
    for kind, name, table, sql in found:
        added = table in TABLES and sql is not None and sql != TABLES.get(name)
        if kind in ("trigger", "view") or added:
            raise StoreError(
                f"{file} holds the {kind} {name!r}, which no run has: it was added, and would run whenever the file is "
                "read or written. The file was not opened. Get the run again from its source."
            )
    missing = sorted(TABLES.keys() - {name for _, name, _, _ in found})
    if missing:
        raise damaged(file, f"it has no {', '.join(missing)}")


def write_layers(connection: sqlite3.Connection, layers: Sequence[LayerInfo]) -> None:
    """Write the layers of a new run.

    >>> connection = sqlite3.connect(":memory:")
    >>> create(connection)
    >>> write_layers(connection, [LayerInfo("conv1.weight", "conv", (8, 3, 3, 3))])
    >>> layers_from(connection.execute(LAYERS), Path("memory"))
    (LayerInfo(name='conv1.weight', kind='conv', shape=(8, 3, 3, 3), part=0),)
    >>> connection.close()
    """
    rows = ((i, one.name, one.kind, json.dumps(one.shape), one.part) for i, one in enumerate(layers))
    connection.executemany("INSERT INTO layers VALUES (?, ?, ?, ?, ?)", rows)


Row = tuple[Any, ...]
NUMBER = (int, float)
OR_NONE = (int, float, type(None))


def of_kinds(row: Row, *kinds: type | tuple[type, ...]) -> Row:
    """Return the row if its values have these types: SQLite allows any type in any column, so a damaged file has any.

    Raises:
        TypeError: a value has another type.

    >>> of_kinds((3, "note"), int, str)
    (3, 'note')
    """
    for value, kind in zip(row, kinds, strict=True):
        if not isinstance(value, kind):
            name = kind.__name__ if isinstance(kind, type) else "number"
            raise TypeError(f"expected a {name}, found {value!r:.40}")
    return row


LAYERS = "SELECT name, kind, shape, part FROM layers ORDER BY position"


def layers_from(rows: Iterable[tuple[str, str, str, int]], file: Path) -> tuple[LayerInfo, ...]:
    """Return the layers of a run, in forward order, from the answer to `LAYERS`.

    >>> layers_from([("head.weight", "linear", "[10, 8]", 0)], Path("run.sqlite"))
    (LayerInfo(name='head.weight', kind='linear', shape=(10, 8), part=0),)
    """
    try:
        checked = [of_kinds(row, str, str, str, int) for row in rows]
        found = tuple(LayerInfo(name, kind, tuple(json.loads(shape)), part) for name, kind, shape, part in checked)
        if not found:
            raise ValueError("there are none")
        for one in found:
            of_kinds(one.shape, *[int] * len(one.shape))
        return found
    except (RecursionError, TypeError, ValueError) as error:
        raise damaged(file, f"its layers cannot be understood ({error})") from error
