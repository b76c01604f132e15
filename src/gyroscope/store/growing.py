"""`GrowingRun`, a run that is read again and again while it is written: each time, only what was added is read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from gyroscope.store.arguments import steps_of
from gyroscope.store.connect import damaged
from gyroscope.store.reader import Run, Scalar
from gyroscope.store.record import Steps, Values
from gyroscope.store.schema import OR_NONE, of_kinds

# Values of a quantity are kept if more steps than this are asked for at once, up to this many bytes per run.
_FEW, _KEPT = 256, 1 << 26
_COUNTS = (
    "SELECT (SELECT coalesce(max(rowid), 0) FROM series), (SELECT coalesce(max(rowid), 0) FROM events), "
    "(SELECT count(*) FROM scalars)"
)
_ADDED = "SELECT rowid, attempt, step, quantity, length(data) > 0 FROM series WHERE rowid > ? ORDER BY rowid"
# The distinct names by a walk over the first row of each, which SQLite does not find by itself.
_NAMES = (
    "WITH RECURSIVE names (name) AS (SELECT min(name) FROM scalars UNION ALL SELECT (SELECT min(name) FROM scalars AS "
    "other WHERE other.name > names.name) FROM names WHERE name IS NOT NULL) SELECT name FROM names WHERE name NOTNULL"
)
_LOGGED = "SELECT name, step, attempt, value FROM scalars WHERE name = ? AND step >= ? ORDER BY step, attempt"


class GrowingRun(Run):
    """A run whose `refresh` costs as much as what was written since the last one, however long the run is.

    It shows what a `Run` of the same folder shows. The values of a quantity that is asked for as a whole are kept in
    memory, up to 64 MB per run; `forget_values` drops them. A number that is logged again for a step that is not the
    last one is seen when the run is opened again.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_example(folder).close()
    ...     with GrowingRun(folder) as run:
    ...         run.refresh()
    ...         run.where("rotation").tolist()
    [0, 10, 20, 30, 40]
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._rows = self._notes = self._logged = 0
        self._begun: list[tuple[Any, ...]] = []
        self._found: dict[str, Steps] = {}
        self._kept: dict[str, tuple[Steps, Values]] = {}
        self._restart()

    def refresh(self) -> None:
        """Read what was written since the last time; everything again if the run was resumed or replaced.

        Raises:
            StoreError: the run is gone, or cannot be read.
        """
        for name in ("meta", "quantities", "attempts", "_history"):
            self.__dict__.pop(name, None)
        rows, notes, logged = self._ask(_COUNTS)[0]
        if rows < self._rows or notes < self._notes or logged < self._logged or self._begun != self._beginnings():
            self._restart()
            return
        if rows > self._rows:
            self._add_series()
        if notes > self._notes:
            self._notes = notes
            self.__dict__.pop("_events", None)
        if logged > self._logged:
            self._add_scalars(logged)

    def where(self, name: str) -> Steps:
        """Return the steps at which a quantity was measured for any layer; a subset of `steps`."""
        if name not in self._found:
            self._found[name] = super().where(name)
        return self._found[name]

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers, in forward order."""
        return super().layers

    @cached_property
    def scalars(self) -> dict[str, Scalar]:
        """Numbers logged for the whole network, by name."""
        (_, _, self._logged) = self._ask(_COUNTS)[0]
        # The rows that are counted are read afterwards: what comes between is counted, and read, the next time.
        found: dict[str, Scalar] = Run.scalars.func(self)  # type: ignore[attr-defined]
        return found

    def series(self, name: str, *, steps: Sequence[int] | Steps | None = None) -> Values:
        """Return one quantity over steps and layers; see `Run.series`."""
        wanted = self.steps if steps is None else steps_of(steps)
        count = len(self.where(name))
        if len(wanted) <= _FEW or 4 * count * len(self.layer_table) > _KEPT:  # too few, or too many
            return super().series(name, steps=steps)
        found: Values = np.full((len(wanted), len(self.layer_table)), np.nan, dtype=np.float32)
        if count:
            its_steps, values = self._whole(name)
            place = np.searchsorted(its_steps, wanted).clip(max=len(its_steps) - 1)
            there = its_steps[place] == wanted
            found[there] = values[place[there]]
        return found

    def forget_values(self) -> None:
        """Drop the values that are kept."""
        self._kept.clear()

    def _whole(self, name: str) -> tuple[Steps, Values]:
        """Return the steps and the values of a quantity, of which those that are not kept yet are read."""
        wanted = self.where(name)
        its_steps, values = self._kept.pop(name, (wanted[:0], np.empty((0, len(self.layer_table)), dtype=np.float32)))
        missing = wanted[~np.isin(wanted, its_steps)]
        if len(missing):
            added = super().series(name, steps=missing)
            order = np.argsort(its_steps := np.concatenate([its_steps, missing]), kind="stable")
            its_steps, values = its_steps[order], np.concatenate([values, added])[order]
        while self._kept and values.nbytes + sum(one.nbytes for _, one in self._kept.values()) > _KEPT:
            self._kept.pop(next(iter(self._kept)))
        self._kept[name] = its_steps, values  # the last, which is dropped last
        return its_steps, values

    def _beginnings(self) -> list[tuple[Any, ...]]:
        return [(one.number, one.start_step, one.time) for one in self.attempts]

    def _restart(self) -> None:
        """Forget everything, layers included: the run was opened, resumed or replaced."""
        super().refresh()
        for name in ("layers", "layer_table", "scalars"):
            self.__dict__.pop(name, None)
        self._found.clear()
        self._kept.clear()
        # Counted before anything is read, so that what is written meanwhile is read again rather than never.
        self._rows, self._notes, self._logged = self._ask(_COUNTS)[0]
        self._begun = self._beginnings()

    def _add_series(self) -> None:
        names = dict(self._ask("SELECT id, name FROM quantities"))
        steps: set[int] = set()
        known: dict[str, set[int]] = {}
        changed: dict[str, set[int]] = {}
        try:
            for row in self._ask(_ADDED, self._rows):
                self._rows, attempt, step, quantity, any_known = of_kinds(row, int, int, int, int, int)
                if self._history.shows(attempt, step):
                    steps.add(step)
                    changed.setdefault(names[quantity], set()).add(step)
                    if any_known:
                        known.setdefault(names[quantity], set()).add(step)
        except (KeyError, TypeError) as error:
            raise damaged(self._ask.file, f"its series cannot be understood ({error})") from error
        if "steps" in self.__dict__:
            self.__dict__["steps"] = _joined(self.steps, steps)
        for name, more in known.items():
            if name in self._found:
                self._found[name] = _joined(self._found[name], more)
        for name, more in changed.items():
            if name in self._kept:  # another part of a step that is kept
                its_steps, values = self._kept[name]
                stale = np.isin(its_steps, list(more))
                if stale.any():
                    self._kept[name] = its_steps[~stale], values[~stale]

    def _add_scalars(self, logged: int) -> None:
        if "scalars" not in self.__dict__:
            return
        found, added = dict(self.scalars), 0
        for (name,) in self._ask(_NAMES):
            old = found.get(name, Scalar(np.empty(0, dtype=np.int64), np.empty(0)))
            last = int(old.steps[-1]) if len(old.steps) else -(2**63)
            new: dict[int, float] = {}
            try:
                for row in self._ask(_LOGGED, name, last):
                    _, step, attempt, value = of_kinds(row, str, int, int, OR_NONE)
                    added += step > last
                    if self._history.shows(attempt, step):
                        new[step] = np.nan if value is None else value
            except TypeError as error:
                raise damaged(self._ask.file, f"its scalars cannot be understood ({error})") from error
            before = int(np.searchsorted(old.steps, last)) if last in new else len(old.steps)
            steps = np.concatenate([old.steps[:before], np.array(list(new), dtype=np.int64)])
            values = np.concatenate([old.values[:before], np.array(list(new.values()), dtype=np.float64)])
            if len(steps):
                found[name] = Scalar(steps, values)
        if added >= logged - self._logged:  # more, if something was written after it was counted
            self._logged += added
            self.__dict__["scalars"] = found
        else:  # something was logged for an earlier step
            del self.__dict__["scalars"]


def _joined(steps: Steps, more: set[int]) -> Steps:
    new = np.array(sorted(more), dtype=np.int64)
    if not len(steps) or (len(new) and new[0] > steps[-1]):
        return np.concatenate([steps, new])
    return np.union1d(steps, new)
