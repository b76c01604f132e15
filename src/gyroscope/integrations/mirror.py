"""What all sinks share: which layers, quantities and steps are mirrored, and under which names."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import ceil
from typing import Any

import numpy as np

from gyroscope.base.accepted import listed
from gyroscope.errors import LayerError, MonitorError
from gyroscope.integrations.names import Clean, Names, grouped, one_part
from gyroscope.integrations.picture import Pixels, heatmap
from gyroscope.integrations.thinning import AT_EACH_STEP, Thinning
from gyroscope.store.record import Event, LayerInfo, QuantityInfo, Record, Rows, Scalars, Values

LOG = logging.getLogger("gyroscope")

#: The quantities that are mirrored unless others are named.
QUANTITIES = ("rotation", "rate_per_step", "weight_norm")


class Mirror:
    """A sink that mirrors series as one scalar a layer (`rotation/conv1.weight`), scalars, events and the heatmap.

    A tool is added by a subclass that says what to do with numbers and, if it can, with the rest.

    Args:
        every: mirror measured steps that are at least so many steps apart, and the last one. Without it, as many are
            left out as it takes to send 100 numbers a step on average: none for 33 layers and three quantities.
        quantities: the series to mirror; None for all.
        layers: glob pattern or patterns on the names of the layers to mirror; None for all.

    >>> from gyroscope.store import LayerInfo
    >>> class Printed(Mirror):
    ...     def numbers(self, step, values):
    ...         print(step, values)
    >>> sink = Printed(quantities=["rotation"])
    >>> sink.open([LayerInfo("fc.weight", "linear", (2, 2))], {}, {})
    >>> sink.write(Rows(0, np.array([7]), {"rotation": np.array([[0.25]], np.float32)}))
    7 {'rotation/fc.weight': 0.25}
    """

    layer_name: Clean = staticmethod(one_part)
    scalar_name: Clean = staticmethod(grouped)

    def __init__(
        self,
        *,
        every: int | None = None,
        quantities: Iterable[str] | None = QUANTITIES,
        layers: str | Iterable[str] | None = None,
    ) -> None:
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise MonitorError(f"every is {every!r}; it must be a number of steps, 1 or more, or None")
        if isinstance(quantities, str):
            raise MonitorError(f"quantities is {quantities!r}; it must be a sequence of names: [{quantities!r}]")
        self._every = every
        self._asked = None if quantities is None else tuple(_names("quantities", quantities))
        self._patterns = ["*"] if layers is None else _names("layers", layers)

    def begin(self, meta: Mapping[str, Any]) -> None:
        """Begin (or go on with) a run in the tool."""

    def numbers(self, step: int, values: dict[str, float]) -> None:
        """Hand numbers of one step to the tool, by name."""
        raise NotImplementedError

    def event(self, event: Event) -> None:
        """Hand an event to the tool."""

    def end(self, run: Any, step: int, picture: Pixels | None) -> None:
        """Hand what is known at the end to the tool, and close what was opened."""

    def open(
        self, layers: Sequence[LayerInfo], quantities: Mapping[str, QuantityInfo], meta: Mapping[str, Any]
    ) -> None:
        """Begin (or go on with) a run."""
        names = [layer.name for layer in layers]
        for pattern in self._patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                close = get_close_matches(pattern, names, n=3, cutoff=0.4) or names[:3]
                raise LayerError(f"pattern {pattern!r} matches no layer; close names are {', '.join(close)}")
        self._quantity_names, self._scalar_names = Names(self.layer_name), Names(self.scalar_name)
        layer_names = Names(self.layer_name)
        self._chosen: dict[int, tuple[list[int], list[str]]] = {}  # by part: positions within it, and names
        within: dict[int, int] = {}
        for layer in layers:
            position = within.setdefault(layer.part, 0)
            within[layer.part] += 1
            if any(fnmatchcase(layer.name, pattern) for pattern in self._patterns):
                positions, chosen = self._chosen.setdefault(layer.part, ([], []))
                positions.append(position)
                chosen.append(layer_names(layer.name))
        numbers = sum(len(chosen) for _, chosen in self._chosen.values()) * len(self._asked or quantities)
        self._thinning = Thinning(self._every or max(1, ceil(numbers / AT_EACH_STEP)))
        self._seen: set[str] = set()
        self.groups: set[str] = set()  # what stands before the slash of the series mirrored so far
        self._step = 0
        self.begin(meta)

    def write(self, record: Record) -> None:
        """Mirror one record."""
        if isinstance(record, Rows):
            if record.part in self._chosen and (rows := self._picked(record)).values:
                for step, values in self._thinning.passed(rows):
                    self._series(rows.part, step, values)
        elif isinstance(record, Scalars):
            named = {self._scalar_names(k): float(v) for k, v in record.values.items() if not np.isnan(v)}
            self._numbers(record.step, named)
        else:
            self._step = max(self._step, record.step)
            self.event(record)

    def close(self, run: Any) -> None:
        """Mirror the last step and the rotation heatmap, and end."""
        try:
            for part, step, values in self._thinning.left():
                self._series(part, step, values)
        finally:
            self.end(run, self._step, heatmap(run))
        never = [name for name in self._asked or () if name not in self._seen and name not in QUANTITIES]
        if never:
            LOG.warning("%s: never recorded, so not mirrored: %s", type(self).__name__, ", ".join(never))

    def _picked(self, rows: Rows) -> Rows:
        positions, _ = self._chosen[rows.part]
        asked = rows.values if self._asked is None else [name for name in self._asked if name in rows.values]
        self._seen.update(asked)
        return Rows(rows.part, rows.steps, {name: rows.values[name][:, positions] for name in asked})

    def _series(self, part: int, step: int, found: dict[str, Values]) -> None:
        _, names = self._chosen[part]
        tagged: dict[str, float] = {}
        for quantity, values in found.items():
            group = self._quantity_names(quantity)
            self.groups.add(group)
            known = ~np.isnan(values)
            tagged |= {f"{group}/{names[i]}": float(values[i]) for i in np.flatnonzero(known)}
        self._numbers(step, tagged)

    def _numbers(self, step: int, values: dict[str, float]) -> None:
        self._step = max(self._step, step)
        if values:
            self.numbers(step, values)


def _names(what: str, given: Any) -> list[str]:
    names = listed(given)
    if not all(isinstance(name, str) for name in names):
        raise MonitorError(f"`{what}` must be a list of names, got {given!r:.80}. Try ['rotation'] or ['conv*'].")
    return names
