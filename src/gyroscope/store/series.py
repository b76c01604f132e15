"""The rows of a quantity, gathered from the file of a run and checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gyroscope.errors import StoreError
from gyroscope.store import schema
from gyroscope.store.attempts import History
from gyroscope.store.connect import damaged
from gyroscope.store.query import Query
from gyroscope.store.record import LayerInfo, Steps, Values

#: Values of one quantity that are read at a time: 4 GB. A row of equal values is short, so a small file may hold more.
_MOST = 1 << 30
#: Steps that are fetched at a time; SQLite takes no more than 999 values with a question.
_PIECE = 500


def read_series(ask: Query, history: History, name: str, steps: Steps, layers: Sequence[LayerInfo]) -> Values:
    """A quantity at `steps`, which are in order, over all layers; NaN where nothing is known.

    Raises:
        StoreError: a row is not the one that was written.
    """
    if len(steps) * len(layers) > _MOST:
        raise StoreError(
            f"{len(steps)} steps of {len(layers)} layers were asked of {ask.file}; at most {_MOST} values are read at "
            "a time. Read fewer steps: run.series(name, steps=run.steps[-1000:])."
        )
    parts = np.array([layer.part for layer in layers])
    columns = {part: np.flatnonzero(parts == part) for part in set(parts.tolist())}
    values = np.full((len(steps), len(layers)), np.nan, dtype=np.float32)
    # What is longer than a row can be is not even read.
    what = f"crc, CASE WHEN length(data) <= {4 * len(layers)} THEN data END"
    places = {step: i for i, step in enumerate(steps.tolist())}
    for i in range(0, len(steps), _PIECE):
        piece = steps[i : i + _PIECE].tolist()
        among = f"step IN ({', '.join('?' * len(piece))})"
        for attempt, step, quantity, part, crc, data in _rows(ask, history, name, what, among, piece):
            try:
                if schema.checksum(attempt, step, quantity, part, data) != crc:
                    raise ValueError("another checksum")
                values[places[step], columns[part]] = schema.unpack(data, len(columns[part]))
            except (KeyError, TypeError, ValueError) as error:
                raise damaged(ask.file, f"the values of {name!r} at step {step} are not those written") from error
    return values


def measured_steps(ask: Query, history: History, name: str, steps: Steps) -> Steps:
    """Those of `steps`, which are in order, at which a quantity is known for any layer."""
    known: dict[tuple[int, int], bool] = {}
    for _, step, _, part, length in _rows(ask, history, name, "length(data)", "TRUE"):
        if not isinstance(length, int):
            raise damaged(ask.file, f"the values of {name!r} at step {step} are not those written")
        known[step, part] = length > 0
    found = np.unique(np.array([step for (step, _), any_known in known.items() if any_known], dtype=np.int64))
    return found[np.isin(found, steps)]


def _rows(
    ask: Query, history: History, name: str, what: str, among: str, given: Sequence[int] = ()
) -> Iterator[tuple[Any, ...]]:
    """Key and `what` of the rows that count; of those for one step, that of the latest attempt comes last."""
    question = (
        f"SELECT attempt, step, quantity, part, {what} FROM series WHERE quantity = "
        f"(SELECT id FROM quantities WHERE name = ?) AND {among} ORDER BY step, part, attempt"
    )
    for row in ask(question, name, *given):
        if history.shows(row[0], row[1]):
            yield row
