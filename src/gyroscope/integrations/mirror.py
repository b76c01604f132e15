"""The base class of all sinks: it selects layers, quantities and steps, and names them as a tool accepts."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from importlib import import_module
from math import ceil
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from gyroscope.base.accepted import listed
from gyroscope.errors import FigureError, LayerError, MissingExtraError, MonitorError
from gyroscope.store.record import Event, LayerInfo, QuantityInfo, Record, Rows, Scalars, Values

LOG = logging.getLogger("gyroscope")

#: Quantities that are mirrored by default.
QUANTITIES = ("rotation", "rate_per_step", "weight_norm")


# MLflow allows 250 characters for a quantity, a slash and a layer.
_LONGEST = 120

Clean = Callable[[str], str]


def as_it_is(name: str) -> str:
    """Return `name` unchanged: for tools that accept any name.

    >>> as_it_is("encoder/0:weight")
    'encoder/0:weight'
    """
    return name


def one_part(name: str) -> str:
    """Return `name` in letters, digits, `_`, `.` and `-`, without slashes, which group names in these tools.

    >>> one_part("encoder/0:weight"), one_part(".."), len(one_part(300 * "x"))
    ('encoder_0_weight', '__', 120)
    """
    safe = re.sub(r"[^A-Za-z0-9_.-]", "_", name) or "_"
    if set(safe) == {"."}:  # a folder, for tools that keep one file per name
        safe = "_" * len(safe)
    if len(safe) > _LONGEST:
        return f"{safe[: _LONGEST - 9]}_{crc32(name.encode(errors='replace')):08x}"
    return safe


def grouped(name: str) -> str:
    """Return `name` in the characters of `one_part` and slashes, none of them doubled, first or last.

    >>> grouped("/train//top-5 accuracy")
    'train/top-5_accuracy'
    """
    return one_part("") if not name.strip("/") else "/".join(one_part(part) for part in name.split("/") if part)


class Names:
    """Cleaned names: the same each time, and different for different names.

    >>> names = Names(one_part)
    >>> [names(name) for name in ("a/b", "a:b", "a_b", "a/b")]
    ['a_b', 'a_b_2', 'a_b_3', 'a_b']
    """

    def __init__(self, clean: Clean) -> None:
        self._clean = clean
        self._chosen: dict[str, str] = {}
        self._taken: set[str] = set()

    def __call__(self, name: str) -> str:
        """Return the name to use for `name`."""
        if name not in self._chosen:
            clean = chosen = self._clean(name)
            count = 1
            while chosen in self._taken:
                count += 1
                chosen = f"{clean}_{count}"
            self._taken.add(chosen)
            self._chosen[name] = chosen
        return self._chosen[name]


# Numbers per step that a tool takes without a noticeable cost; above it, steps are skipped.
_AT_EACH_STEP = 100


class _Thinning:
    """Pass measured steps that are at least `every` steps apart, and keep the last of the others.

    A quantity that is measured less often passes whenever it is `every` steps after its last.

    >>> rows = Rows(0, np.arange(6), {"rotation": np.zeros((6, 2), np.float32)})
    >>> thinning = _Thinning(2)
    >>> [(step, sorted(values)) for step, values in thinning.passed(rows)]
    [(0, ['rotation']), (2, ['rotation']), (4, ['rotation'])]
    >>> [(part, step) for part, step, _ in thinning.left()]
    [(0, 5)]
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._opened: dict[int, int] = {}
        self._passed: dict[tuple[int, str], int] = {}
        self._left: dict[tuple[int, str], tuple[int, Values]] = {}

    def passed(self, rows: Rows) -> list[tuple[int, dict[str, Values]]]:
        """Return the steps of `rows` to mirror, each with its values by quantity, for the layers of the part."""
        return [(int(step), found) for i, step in enumerate(rows.steps) if (found := self._at(rows, i, int(step)))]

    def left(self) -> list[tuple[int, int, dict[str, Values]]]:
        """Return, and forget, the part, step and values measured after the last step that passed."""
        ends: dict[tuple[int, int], dict[str, Values]] = {}
        for (part, quantity), (step, values) in self._left.items():
            ends.setdefault((part, step), {})[quantity] = values
        self._left = {}
        return [(part, step, values) for (part, step), values in sorted(ends.items(), key=lambda end: end[0])]

    def _at(self, rows: Rows, i: int, step: int) -> dict[str, Values]:
        is_open = self._far(step, self._opened.get(rows.part)) or step == self._opened[rows.part]
        found: dict[str, Values] = {}
        for quantity, values in rows.values.items():
            if np.isnan(values[i]).all():
                continue
            key = rows.part, quantity
            if is_open or self._far(step, self._passed.get(key)):
                found[quantity] = values[i]
                self._passed[key] = step
                self._left.pop(key, None)
            else:
                self._left[key] = step, values[i].copy()
        if is_open and found:
            self._opened[rows.part] = step
        return found

    def _far(self, step: int, last: int | None) -> bool:
        return last is None or step < last or step - last >= self.every


Pixels = npt.NDArray[np.uint8]


def _heatmap(run: Any) -> Pixels | None:
    """Return the heatmap of `run` as `[height, width, 3]`; None, with a log message, if it cannot be drawn.

    >>> from gyroscope.figures import example_run
    >>> _heatmap(example_run(layers=5)).shape[2]
    3
    """
    try:
        from gyroscope.figures import rotation_heatmap
    except MissingExtraError as error:
        LOG.info("The rotation heatmap is left out: %s", error)
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    try:
        figure = rotation_heatmap(run).figure
    except FigureError as error:  # for example, a run without rotation
        LOG.info("The rotation heatmap is left out: %s", error)
        return None
    figure.set_dpi(150)
    canvas: Any = FigureCanvasAgg(figure)  # type: ignore[arg-type]
    canvas.draw()
    return np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[:, :, :3])


def imported(module: str, *, sink: str, extra: str) -> Any:
    """Import `module` for a class (`sink`, or an adapter), or raise an error that names the extra to install.

    >>> imported("json", sink="Json", extra="json").__name__
    'json'
    >>> imported("no_such_tool", sink="NoSuch", extra="nosuch")
    Traceback (most recent call last):
        ...
    gyroscope.errors.MissingExtraError: NoSuch cannot import no_such_tool
    (No module named 'no_such_tool'): pip install 'gyroscope[nosuch]'
    """
    try:
        found = import_module(module)
        if found.__spec__ is not None and found.__spec__.origin is None:
            # wandb keeps runs in a folder called wandb, which Python imports as a namespace package.
            raise ImportError(f"{next(iter(found.__path__))} is a folder, not the package")
    except ImportError as error:
        message = f"{sink} cannot import {module} ({error}): pip install 'gyroscope[{extra}]'"
        raise MissingExtraError(message) from error
    return found


class Mirror:
    """A sink that mirrors series as one scalar per layer (`rotation/conv1.weight`), scalars, events and the heatmap.

    A subclass adds a tool: it implements what to do with numbers and, optionally, with the rest.

    Args:
        every: mirror measured steps that are at least this many steps apart, and the last one. By default as many are
            skipped as needed to send 100 numbers per step on average: none for 33 layers and three quantities.
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
            raise MonitorError(f"`every` must be a whole number of steps ≥ 1, or None, got {every!r:.80}. Try 10.")
        if isinstance(quantities, str):
            raise MonitorError(
                f"`quantities` must be a list of names, got {quantities!r:.80}. Try [{quantities!r:.80}]."
            )
        self._every = every
        self._asked = None if quantities is None else tuple(_names("quantities", quantities))
        self._patterns = ["*"] if layers is None else _names("layers", layers)

    def begin(self, meta: Mapping[str, Any]) -> None:
        """Begin (or resume) a run in the tool."""

    def numbers(self, step: int, values: dict[str, float]) -> None:
        """Send the numbers of one step to the tool, by name."""
        raise NotImplementedError

    def event(self, event: Event) -> None:
        """Send an event to the tool."""

    def end(self, run: Any, step: int, picture: Pixels | None) -> None:
        """Send the results known at the end to the tool, and close what was opened."""

    def open(
        self, layers: Sequence[LayerInfo], quantities: Mapping[str, QuantityInfo], meta: Mapping[str, Any]
    ) -> None:
        """Begin (or resume) a run."""
        names = [layer.name for layer in layers]
        for pattern in self._patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                close = get_close_matches(pattern, names, n=3, cutoff=0.4) or names[:3]
                raise LayerError(
                    f"`layers` must match at least one layer, got {pattern!r}. Close names are {', '.join(close)}."
                )
        self._quantity_names, self._scalar_names = Names(self.layer_name), Names(self.scalar_name)
        layer_names = Names(self.layer_name)
        self._chosen: dict[int, tuple[list[int], list[str]]] = {}  # by part: positions within the part, and names
        within: dict[int, int] = {}
        for layer in layers:
            position = within.setdefault(layer.part, 0)
            within[layer.part] += 1
            if any(fnmatchcase(layer.name, pattern) for pattern in self._patterns):
                positions, chosen = self._chosen.setdefault(layer.part, ([], []))
                positions.append(position)
                chosen.append(layer_names(layer.name))
        numbers = sum(len(chosen) for _, chosen in self._chosen.values()) * len(self._asked or quantities)
        self._thinning = _Thinning(self._every or max(1, ceil(numbers / _AT_EACH_STEP)))
        self._seen: set[str] = set()
        self.groups: set[str] = set()  # prefixes, before the slash, of the series mirrored so far
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
            self.end(run, self._step, _heatmap(run))
        never = [name for name in self._asked or () if name not in self._seen and name not in QUANTITIES]
        if never:
            LOG.warning("%s: not mirrored because never recorded: %s", type(self).__name__, ", ".join(never))

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
