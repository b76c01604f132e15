"""Findings made while a run is written, on the writer's thread: the rules, dominated layers and stalls, each once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf, isfinite, isnan, nan
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gyroscope.diagnosis.course import DETAILS, MOST, RANKS_DIFFER, SERIES, Course, course_of, loss_of, thinned
from gyroscope.diagnosis.diagnose import findings, ordered
from gyroscope.diagnosis.domination import Episodes, known_steps, norms_ratio, of_stall, seen
from gyroscope.diagnosis.finding import Finding
from gyroscope.diagnosis.stall import FALLEN, GROWN, PATIENCE, Stall, found_in, stalls
from gyroscope.errors import GyroscopeError
from gyroscope.store import Run
from gyroscope.store.record import Event, LayerInfo

# Rows after which the rules are evaluated first, and the factor between one evaluation and the next.
_FIRST, _APART = 10, 1.3
# Steps after which a finding about a whole course may be stated, and how much the learning rate may still rise then.
_PATIENCE, _RISING = 500, 1.2
# Losses that are kept: twice as many at most, half of which are then left out evenly.
_LOSSES = 4 * MOST
# Kinds that hold at once, whatever follows.
_AT_ONCE = frozenset({
    "replaced", "not_in_optimizer", "frozen", "ranks_differ", "gradients_accumulate", "large_weights", "zero_weights",
    "symmetric", "eval_mode", "double_softmax", "input_scale", "jump", "too_fast", "not_finite",
})  # fmt: skip
# The number of measurements of a resumed run that determine the state of its layers.
_LATEST = 64
# The most losses and measurements, together, that are kept to detect the beginning of a stall; half of it at least.
_ROWS = 512

Values = npt.NDArray[np.float32]


class Live:
    """Follows a run and states its alarms, each kind once.

    At most twice `MOST` rows of the past are kept: of a longer run, rows between the first and the last ones are left
    out evenly, as for a recorded run.

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
        self._losses: deque[tuple[int, Mapping[str, float]]] = deque()
        self._seen, self._next, self._stated = 0, float(_FIRST), set[str]()
        self._resumes = resumes

    def heard(self, step: int, values: Mapping[str, float]) -> None:
        """Record numbers of the whole network; called on any thread."""
        self._losses.append((step, values))

    def measured(self, part: int, steps: Iterable[int], values: Mapping[str, Values]) -> None:
        """Record the values [steps, layers of the part] of some steps."""
        known = [name for name in (*SERIES, *DETAILS) if name in values]
        for i, step in enumerate(steps):
            row = self._rows.setdefault(int(step), {})
            self._seen += 1
            for name in known:
                column = row.setdefault(name, np.full(len(self._layers), np.nan))
                column[self._members[part]] = values[name][i]

    def stated(self) -> list[Finding]:
        """Return the alarms that were not stated before, if it is time to look for them."""
        if self._seen < self._next or len(self._rows) < _FIRST:
            return []
        self._next = self._seen * _APART
        if self._resumes is not None:
            self._recall(self._resumes)
            self._resumes = None
        self._thin()
        course = self._course()
        settled = self._settled(course)
        found = []
        for one in ordered(findings(course), self._mute):
            if one.is_alarm and one.kind not in self._stated and (settled or one.kind in _AT_ONCE):
                self._stated.add(one.kind)
                found.append(one)
        return found

    def _recall(self, path: Path) -> None:
        """Continue from the course of the earlier run; what it showed already counts as stated."""
        with suppress(GyroscopeError), Run(path) as run:
            before = course_of(run)
            first = min(self._rows)
            for i, step in enumerate(before.steps.tolist()):
                if step < first:
                    self._rows[step] = {name: values[i] for name, values in before.series.items()}
            until = replace(before, steps=before.steps[before.steps < first])
            kept = len(until.steps)
            until = replace(until, series={name: values[:kept] for name, values in before.series.items()})
            self._stated |= {one.kind for one in findings(until)}

    def _thin(self) -> None:
        steps = sorted(self._rows)
        if len(steps) > 2 * MOST:
            kept = {steps[i] for i in thinned(len(steps)).tolist()}
            kept |= {step for step in steps if any(name in self._rows[step] for name in DETAILS)}
            self._rows = {step: self._rows[step] for step in steps if step in kept}
        while len(self._losses) > 2 * _LOSSES:
            self._losses = deque(list(self._losses)[::2])

    def _course(self) -> Course:
        steps = sorted(self._rows)
        unknown = np.full(len(self._layers), np.nan)
        names = {name for row in self._rows.values() for name in row}
        series = {name: np.array([self._rows[step].get(name, unknown) for step in steps]) for name in names}
        curves: dict[str, tuple[list[int], list[float]]] = {}
        for step, values in list(self._losses):
            for name, value in values.items():
                at, curve = curves.setdefault(name, ([], []))
                at.append(step)
                curve.append(value)
        loss_steps, loss = loss_of(curves)
        at_all = np.array(steps, dtype=np.int64)
        apart = tuple(zip(*curves.get(RANKS_DIFFER, ((), ())), strict=True))
        return Course(self._layers, at_all, series, loss_steps, loss, self._meta, apart=apart)

    @staticmethod
    def _settled(course: Course) -> bool:
        """Return True if the run is long enough to speak of its course, and warm-up is over."""
        if course.steps[-1] < _PATIENCE or not course.known("lr"):
            return False
        lr = np.nanmax(np.where(np.isfinite(course["lr"]), course["lr"], 0.0), axis=1)
        half = int(np.searchsorted(course.steps, course.steps[-1] / 2))
        return bool(lr[-1] <= _RISING * max(float(lr[min(half, len(lr) - 1)]), 1e-30))


class Squares(Protocol):
    """Inner products [steps, layers]: of the weights before and after each step, its update, and the gradient."""

    @property
    def bb(self) -> npt.NDArray[Any]: ...  # noqa: D102
    @property
    def ww(self) -> npt.NDArray[Any]: ...  # noqa: D102
    @property
    def uu(self) -> npt.NDArray[Any]: ...  # noqa: D102
    @property
    def gg(self) -> npt.NDArray[Any]: ...  # noqa: D102


class Naming:
    """Reports dominated layers while a run is written, on the writer's thread, each once.

    Args:
        path: the run's folder.
        layers: its layers.
        spectral: for each part, True if its conditioning is analyzed. Then only these measurements count.
        resumes: True if the run resumes an earlier one, whose findings are not reported again.
    """

    def __init__(self, path: Path, layers: Sequence[LayerInfo], spectral: Sequence[bool], *, resumes: bool) -> None:
        self._path, self._resumes = path, resumes
        self._layers, self._stalling = layers, Stalling(layers)
        self._parts = [
            Episodes([layer for layer in layers if layer.part == part], spectral=one)
            for part, one in enumerate(spectral)
        ]

    def heard(self, step: int, values: Mapping[str, float]) -> None:
        """Record numbers of the whole network; called on any thread."""
        self._stalling.heard(step, values)

    def events(
        self, part: int, steps: Sequence[int], products: Squares, analysed: Mapping[int, Mapping[str, Values]]
    ) -> Iterator[Event]:
        """Yield the findings that the measurements of a part establish.

        Args:
            part: the part that was measured.
            steps: the steps of the measurements [S].
            products: the inner products [S, L].
            analysed: by index into `steps`, the conditioning of the layers as [L] by quantity.
        """
        if self._resumes:
            self._resumes = False
            self._recall()
        episodes = self._parts[part]
        d = products
        with np.errstate(all="ignore"):
            update = np.where(d.bb > 0, np.sqrt(d.uu / d.bb), np.nan).astype(np.float32)
            norms = np.sqrt(d.ww)
            ratio = norms_ratio(np.sqrt(d.gg), norms)
        for i, step in enumerate(steps):
            self._stalling.measured(part, step, norms[i], analysed.get(i, {}).get("lambda_x"))
        if episodes.spectral:
            rows = [i for i, known in analysed.items() if "domination" in known]
            steps, update = [steps[i] for i in rows], update[rows]
            ratio = np.array([analysed[i]["domination"] for i in rows], dtype=np.float64).reshape(update.shape)
        begun = episodes.see(steps, ratio, update)
        for step, one in begun:
            yield Event(step, "finding", str(one))
        stall = self._stalling.begun()
        if stall is not None:
            unused = np.empty((0, len(self._layers)))  # the text of a stall does not mention the ratios
            step = self._stalling.held(stall.since)
            yield Event(step, "finding", str(of_stall(stall, self._layers, unused, spectral=False)))

    def _recall(self) -> None:
        """Restore the state of the layers from the last measurements of the earlier run."""
        with suppress(GyroscopeError), Run(self._path) as run:
            for mine, known in zip(self._parts, seen(run, known_steps(run)[-_LATEST:]), strict=True):
                mine.go_on(known)
        with suppress(GyroscopeError), Run(self._path) as run:
            self._stalling.go_on(run)


class Stalling:
    """Follows the loss, and λmax(Σx) and ‖W‖ of the last layer, while a run is written, to detect a stall.

    Two numbers of the past are kept, the largest λmax(Σx) and the first ‖W‖, and the latest losses. The losses are
    examined only if x is small and W large.

    Args:
        layers: the run's layers.
    """

    def __init__(self, layers: Sequence[LayerInfo]) -> None:
        self._layers = layers
        parts = range(1 + max((layer.part for layer in layers), default=0))
        self._members = [[i for i, layer in enumerate(layers) if layer.part == part] for part in parts]
        self._told: deque[tuple[int, float]] = deque()  # losses, from any thread
        self._batches = False  # True once the loss of a batch was recorded: means over epochs no longer count
        self._first: dict[int, float] = {}  # ‖W‖ of each layer
        self._layer = -1  # the last one whose input is known
        self._peak = self._x = self._w = nan
        # Step, loss, λmax(Σx) and ‖W‖, NaN if unknown; `_gone` summarizes rows that were dropped.
        self._gone: list[tuple[int, float, float, float]] = []
        self._rows: list[tuple[int, float, float, float]] = []
        self._lasts = False

    def heard(self, step: int, values: Mapping[str, float]) -> None:
        """Record a loss; called on any thread."""
        self._batches = self._batches or "batch_loss" in values
        loss = values.get("batch_loss" if self._batches else "loss")
        if loss is not None:
            self._told.append((step, loss if isfinite(loss) else inf))

    def measured(self, part: int, step: int, norms: npt.NDArray[np.float64], inputs: Values | None) -> None:
        """Record ‖W‖ of a part's layers, and λmax(Σx) if their inputs were analyzed."""
        members = self._members[part]
        if members and members[0] not in self._first:
            self._first |= dict(zip(members, norms.tolist(), strict=True)) | self._first
        known = [] if inputs is None else [i for i, x in zip(members, inputs.tolist(), strict=True) if isfinite(x)]
        if known and known[-1] > self._layer:
            self._layer, self._peak, self._x = known[-1], nan, nan
            self._gone = [(0, nan, nan, self._first[self._layer])]
            self._rows = [(at, loss, nan, nan) for at, loss, _, _ in self._rows]
        if self._layer in members:
            column = members.index(self._layer)
            self._w = float(norms[column])
            if inputs is not None and isfinite(inputs[column]):
                self._x = float(inputs[column])
                self._peak = float(np.fmax(self._peak, self._x))
            self._rows.append((step, nan, self._x, self._w))

    def begun(self) -> Stall | None:
        """Return the stall that has begun since the last call, or None."""
        while self._told:
            self._rows.append((*self._told.popleft(), nan, nan))
        lasting, before = None, self._lasts
        first = self._first.get(self._layer, nan)
        if before or (self._x <= FALLEN * self._peak and self._w >= GROWN * first):
            lasting = self._lasting()
            self._lasts = lasting is not None
        if len(self._rows) > _ROWS:
            del self._rows[: -_ROWS // 2]
            self._gone = [(0, nan, self._peak, first), (0, nan, self._x, self._w)]
        return None if before else lasting

    def held(self, since: int) -> int:
        """Return the step at which a stall that began at `since` had lasted long enough to be reported."""
        steps = sorted(step for step, loss, _, _ in self._rows if step >= since and not isnan(loss))
        return (steps[:PATIENCE] or [since])[-1]

    def _lasting(self) -> Stall | None:
        info = self._layers[self._layer]
        # The measurement of a step comes before its loss, whichever arrived first.
        rows = sorted(self._rows, key=lambda row: (row[0], not isnan(row[1])))
        steps, loss, x, w = np.array([*self._gone, *rows]).T
        with suppress(GyroscopeError):  # a layer of one output has no classes
            found = found_in(loss, x, w, steps.astype(np.int64), classes=info.shape[0], layer=info.name)
            return found[-1] if found and found[-1].until is None else None
        return None

    def go_on(self, run: Run) -> None:
        """Continue from the state of an earlier run."""
        inputs, norms = run.series("lambda_x"), run.series("weight_norm")
        known = np.flatnonzero(np.isfinite(inputs).any(axis=0)).tolist()
        if not known:
            return
        self._layer = known[-1]
        x, w = (column[np.isfinite(column)].tolist() for column in (inputs[:, self._layer], norms[:, self._layer]))
        if w:
            self._first[self._layer], self._w = w[0], w[-1]
        self._x, self._peak = x[-1], max(x)
        self._gone = [(0, nan, self._peak, self._first.get(self._layer, nan)), (0, nan, self._x, self._w)]
        self._lasts = any(one.until is None for one in stalls(run))
