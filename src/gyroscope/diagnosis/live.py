"""Findings made while a run is written, on the writer's thread: the alarms of the rules, each kind once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from gyroscope.diagnosis.course import (
    DETAILS,
    LOSS_NAMES,
    MOST,
    RANKS_DIFFER,
    SERIES,
    Course,
    course_of,
    loss_of,
    thinned,
)
from gyroscope.diagnosis.diagnose import findings, ordered
from gyroscope.diagnosis.finding import Finding
from gyroscope.diagnosis.rules import may_be_healthy
from gyroscope.errors import GyroscopeError
from gyroscope.store import Run
from gyroscope.store.record import LayerInfo

# Rows after which the rules are evaluated first, and the factor between one evaluation and the next.
_FIRST, _APART = 10, 1.3
# Steps after which a finding about a whole course may be stated, and how much the learning rate may still rise then.
_PATIENCE, _RISING = 500, 1.2
# The most numbers of one name that are kept.
_NUMBERS = 8 * MOST
# Kinds that hold at once, whatever follows.
_AT_ONCE = frozenset({
    "replaced", "not_in_optimizer", "frozen", "ranks_differ", "gradients_accumulate", "large_weights", "zero_weights",
    "symmetric", "eval_mode", "double_softmax", "input_scale", "jump", "too_fast", "not_finite", "stalled", "dominated",
})  # fmt: skip

Values = npt.NDArray[np.float32]


class _Curve:
    """The numbers of one name, added and read on any thread: every n-th, and the last.

    When too many are kept, n doubles.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[int, float]] = []
        self._last = (0, 0.0)
        self._heard, self._every = 0, 1
        self._lock = Lock()

    def add(self, step: int, value: float) -> None:
        with self._lock:
            self._last = step, value
            if self._heard % self._every == 0:
                self._kept.append(self._last)
            self._heard += 1
            if len(self._kept) > _NUMBERS:
                self._kept, self._every = self._kept[::2], 2 * self._every

    def precede(self, earlier: list[tuple[int, float]]) -> None:
        """Put what an earlier run had before the rest, up to where the rest begins."""
        with self._lock:
            if self._kept:
                earlier = [one for one in earlier if one[0] < self._kept[0][0]]
            self._kept[:0] = earlier[:: 1 + len(earlier) // _NUMBERS]

    def all(self) -> list[tuple[int, float]]:
        with self._lock:
            fresh = self._heard > 0 and self._kept[-1] is not self._last
            return [*self._kept, self._last] if fresh else self._kept[:]


class Live:
    """Follows a run and states its alarms, each kind once.

    At most four times `MOST` rows of the past are kept: of a longer run, rows between the first and the last ones are
    left out evenly, as for a recorded run.

    Args:
        layers: the run's layers.
        meta: its meta.
        mute: kinds of finding that are left out.
        resumes: the folder of the run if it resumes an earlier one, whose findings are not stated again.
    """

    def __init__(
        self,
        layers: Sequence[LayerInfo],
        meta: Mapping[str, Any],
        *,
        mute: Iterable[str] = (),
        resumes: Path | None = None,
    ) -> None:
        self._layers, self._meta, self._mute = tuple(layers), meta, tuple(mute)
        parts = range(1 + max((layer.part for layer in layers), default=0))
        self._members = [[i for i, layer in enumerate(layers) if layer.part == part] for part in parts]
        self._rows: dict[int, dict[str, npt.NDArray[np.float64]]] = {}
        self._curves = {name: _Curve() for name in (*LOSS_NAMES, RANKS_DIFFER)}
        self._seen, self._next, self._stated = 0, float(_FIRST), set[str]()
        self._resumes = resumes

    def heard(self, step: int, values: Mapping[str, float]) -> None:
        """Record numbers of the whole network, of which the rules read some; called on any thread."""
        for name, value in values.items():
            if name in self._curves:
                self._curves[name].add(step, value)

    def measured(self, part: int, steps: Iterable[int], values: Mapping[str, Values]) -> None:
        """Record the values [steps, layers of the part] of some steps."""
        known = [name for name in (*SERIES, *DETAILS) if name in values]
        for i, step in enumerate(steps):
            row = self._rows.setdefault(int(step), {})
            self._seen += 1
            for name in known:
                column = row.setdefault(name, np.full(len(self._layers), np.nan))
                column[self._members[part]] = values[name][i]
        if len(self._rows) > 4 * MOST:
            self._thin()

    def stated(self, *, ends: bool = False) -> list[Finding]:
        """Return the alarms that were not stated before, if it is time to look for them: also when the run `ends`."""
        if not self._rows or (not ends and (self._seen < self._next or len(self._rows) < _FIRST)):
            return []
        self._next = self._seen * _APART
        if self._resumes is not None:
            self._recall(self._resumes)
            self._resumes = None
        self._thin()
        found = [one for one in self._due(self._course(), ends=ends) if one.kind not in self._stated]
        self._stated |= {one.kind for one in found}
        return found

    def _due(self, course: Course, *, ends: bool) -> list[Finding]:
        """Return the alarms that hold; their consequences are notes, also while an alarm waits."""
        settled = self._settled(course)
        hold = [one for one in findings(course) if settled or one.kind in _AT_ONCE]
        waits = {"too_fast"} if may_be_healthy(course) and not ends else set[str]()
        return [one for one in ordered(hold, self._mute) if one.is_alarm and one.kind not in waits]

    def _recall(self, path: Path) -> None:
        """Continue from the course of the earlier run; what it showed already counts as stated."""
        with suppress(GyroscopeError), Run(path) as run:
            before = course_of(run)
            first = min(self._rows)
            for name, curve in run.scalars.items():
                if name in self._curves:
                    self._curves[name].precede(list(zip(curve.steps.tolist(), curve.values.tolist(), strict=True)))
            kept = int((before.steps < first).sum())
            series = {name: values[:kept] for name, values in before.series.items()}
            until = replace(before, steps=before.steps[:kept], series=series)
            for i, step in enumerate(until.steps.tolist()):
                self._rows[step] = {name: values[i] for name, values in series.items()}
            said = {event.text for event in run.events if event.kind == "finding"}
            ended = {one.kind for one in self._due(until, ends=True) if f"{one.severity}: {one.sentence}" in said}
            self._stated |= {one.kind for one in self._due(until, ends=False)} | ended

    def _thin(self) -> None:
        steps = sorted(self._rows)
        if len(steps) > 2 * MOST:
            sampled = [step for step in steps if any(name in self._rows[step] for name in DETAILS)]
            kept = {some[i] for some in (steps, sampled) for i in thinned(len(some)).tolist()}
            self._rows = {step: self._rows[step] for step in steps if step in kept}

    def _course(self) -> Course:
        steps = sorted(self._rows)
        unknown = np.full(len(self._layers), np.nan)
        names = {name for row in self._rows.values() for name in row}
        series = {name: np.array([self._rows[step].get(name, unknown) for step in steps]) for name in names}
        curves = {name: curve.all() for name, curve in self._curves.items()}
        loss_steps, loss = loss_of({name: ([k for k, _ in of], [y for _, y in of]) for name, of in curves.items()})
        at_all = np.array(steps, dtype=np.int64)
        return Course(self._layers, at_all, series, loss_steps, loss, self._meta, apart=tuple(curves[RANKS_DIFFER]))

    @staticmethod
    def _settled(course: Course) -> bool:
        """Return True if the run is long enough to speak of its course, and warm-up is over."""
        if course.steps[-1] < _PATIENCE or not course.known("lr"):
            return False
        lr = np.nanmax(np.where(np.isfinite(course["lr"]), course["lr"], 0.0), axis=1)
        half = int(np.searchsorted(course.steps, course.steps[-1] / 2))
        return bool(lr[-1] <= _RISING * max(float(lr[min(half, len(lr) - 1)]), 1e-30))
