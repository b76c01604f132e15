"""The run of a monitor: where it begins, what is told to it, and where it ends."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyroscope.errors import GyroscopeError, StoreError
from gyroscope.monitor.clock import Clock
from gyroscope.monitor.detail import Detail
from gyroscope.monitor.measured import Measured
from gyroscope.monitor.quantities import Quantity
from gyroscope.monitor.recorder import Numbers, Recorder
from gyroscope.monitor.reference import Place, Precision
from gyroscope.monitor.resume import Beginning, Existing, Saved, agreed, beginning, file_of
from gyroscope.monitor.track import Track
from gyroscope.store import LayerInfo, Sink, lock, schema

_LOG = logging.getLogger("gyroscope")


@dataclass(frozen=True)
class About:
    """What a run is of.

    Attributes:
        path: its folder.
        layers: its layers.
        members: for each optimizer, the positions of its layers.
        quantities: what is recorded of them.
        meta: what is remembered of where it came from.
        sinks: where it is mirrored to.
        writes: whether this rank writes it.
        shared: whether several ranks measure it together.
        held: how references are held.
    """

    path: Path
    layers: Sequence[LayerInfo]
    members: Sequence[Sequence[int]]
    quantities: Sequence[Quantity]
    meta: Mapping[str, Any]
    sinks: Sequence[Sink]
    writes: bool
    shared: bool
    held: tuple[Precision, Place]


class Chronicle:
    """Begins a run, or goes on with one, once the first step is about to be taken; until then what is told waits.

    Attributes:
        recorder: who writes; None on ranks that do not, and before an existing run is opened again.
        begun: whether it has begun.
        loaded: whether the tracks' steps and references come from a loaded state.
    """

    def __init__(self, about: About, *, step: int | None, own_reference: bool) -> None:
        self.about = about
        self.recorder: Recorder | None = None
        self.begun = False
        self.loaded = False
        self._step_given, self._own_reference = step, own_reference
        self._waiting: list[tuple[str, Any]] = []
        self._existing: Existing | None = None
        self._zero: list[Measured] = []
        self._tracks: Sequence[Track] = ()
        self._details: Sequence[Detail] = ()
        self._new_folders: list[Path] = []  # innermost first
        self._find()

    def _find(self) -> None:
        """Look for a run to go on with; what does not belong together is refused, on all ranks that take part."""
        problem: GyroscopeError | None = None
        if self.about.writes:
            try:
                self._existing = Existing.at(self.about.path, self.about.layers)
            except GyroscopeError as error:
                problem = error
        self._raise_together(problem)

    def prepare(self, tracks: Sequence[Track], details: Sequence[Detail], clock: Clock) -> None:
        """Take the weights as they are now for step 0; a new run is opened, so that what is wrong is said now."""
        self._tracks, self._details, self._clock = tracks, details, clock
        self._zero = [track.measure(gradients=False) for track in tracks]
        problem: GyroscopeError | None = None
        if self.about.writes and self._existing is None:
            try:
                self._open(self._step_given or 0, file_of(1))
            except GyroscopeError as error:
                problem = error
        self._raise_together(problem)

    def _raise_together(self, problem: GyroscopeError | None) -> None:
        """Raise what went wrong on the rank that writes, on all ranks that take part."""
        if self.about.writes or self.about.shared:
            (problem,) = agreed((problem,), self.about.shared)
        if problem is not None:
            raise problem

    @property
    def steps(self) -> int:
        """How often the optimizer was called; of several, the one that was called most."""
        return max((track.taken for track in self._tracks), default=0)

    def begin(self) -> None:
        """Open the run, where it was left off if it exists, and record the weights before the first step."""
        if self.begun:
            return
        self.begun = True
        start = beginning(
            self._existing, self._tracks, self.about.members, loaded=self.loaded, step=self._step_given,
            own_reference=self._own_reference, shared=self.about.shared,
        )  # fmt: skip
        for track in self._tracks:
            if start.adopt is not None:
                track.exchange(start.adopt.hold(track, *self.about.held))
            if not self.loaded:
                track.start(start.step)
        saved = Saved.of(self._tracks) if start.new_reference else None
        if self.about.writes:
            self._write(start, saved)

    def restart(self) -> None:
        """A state was loaded: go on as a new attempt from there; what came after is kept, but no longer shown."""
        self.loaded = True
        if self.begun and self.recorder is not None:
            self.recorder.close()
            self._existing, self.recorder = Existing.at(self.about.path, self.about.layers), None
        self.begun = False

    def measured(self, part: int, measured: Measured, detail: dict[str, Any]) -> bool:
        """Hand a measurement over; False if there is no room for it."""
        return self.recorder is None or self.recorder.measured(part, measured, detail)

    def log(self, numbers: Mapping[str, Any]) -> None:
        """Hand numbers of the whole network over; those on a GPU are not waited for."""
        if self.about.writes:
            self._put("numbers", Numbers.of(self.steps, numbers, self._tracks[0].skips))

    def event(self, kind: str, text: str) -> None:
        """Hand an event over."""
        if self.about.writes:
            # What is no text, such as a file's name with stray bytes in it, is spelled out.
            self._put("event", (self.steps, kind, text.encode("utf-8", "backslashreplace").decode()))

    def warn(self, text: str) -> None:
        """Say in the log, and record, that something is not as it should be."""
        if self.about.writes:
            _LOG.warning("%s: %s", self.about.path, text)
        self.event("error", text)

    def end(self) -> None:
        """Record the last step, where it was not measured."""
        self.begin()
        for part, track in enumerate(self._tracks):
            if track.taken > track.measured_at:
                measured = track.measure(gradients=False)
                track.settle()
                if not self.measured(part, measured, {}) and self.recorder is not None:
                    with suppress(StoreError):  # what earlier records lack is told by the monitor's flush
                        self.recorder.writer.flush()  # makes room: the last step is always recorded
                    self.measured(part, measured, {})

    def _write(self, start: Beginning, saved: Saved | None) -> None:
        """The first rows of the run, or of its next attempt."""
        if start.warning is not None:
            _LOG.warning("%s %s", self.about.path, start.warning)
        file = file_of(1 if self._existing is None else self._existing.attempts + 1)
        recorder = self.recorder or self._open(start.step, file if saved is not None else None)
        recorder.start()
        held = "; ".join(track.reference.held for track in self._tracks)
        self.event("start" if self._existing is None else "resume", f"{start.said}; reference held in {held}")
        for why in {detail.why_not for detail in self._details} - {None}:
            self.event("note", f"activations, and conditioning if asked for, are not measured: {why}")
        if saved is not None:
            recorder.reference(saved, file)
        if start.step == 0 and not self.loaded:
            for part, measured in enumerate(self._zero):
                recorder.measured(part, measured, {})
        waiting, self._waiting = self._waiting, []
        for what, payload in waiting:
            self._put(what, payload)

    def _open(self, step: int, reference_file: str | None) -> Recorder:
        about = self.about
        self._new_folders = [one for one in (about.path, *about.path.parents) if not os.path.exists(one)]
        meta = about.meta if reference_file is None else {**about.meta, "reference_file": reference_file}
        self.recorder = Recorder(
            about.path, about.layers, self._tracks, self._details, about.quantities, self._clock,
            step=step, meta=meta, sinks=about.sinks, lock=None if self._existing is None else self._existing.lock,
        )  # fmt: skip
        return self.recorder

    def close(self, *, interrupted: bool) -> None:
        """Finish the run, or let go of one that was not opened again."""
        if self.recorder is not None:
            self.recorder.close(interrupted=interrupted)
        elif self._existing is not None:
            self._existing.lock.release()

    def discard(self) -> None:
        """Close the run, and remove it again where it is new; for a monitor that could not be made."""
        is_new = self.recorder is not None and self._existing is None
        self.close(interrupted=True)
        self.recorder = None
        if is_new:
            for file in self.about.path.iterdir():
                if file.name.startswith((lock.FILE, schema.FILE)):
                    file.unlink()
            for folder in self._new_folders:
                folder.rmdir()

    @property
    def waits(self) -> bool:
        """Whether something was told that will be handed over when the run begins."""
        return bool(self._waiting)

    def drain(self) -> None:
        """Hand over what still waits for the beginning, where the run is open already."""
        if self.recorder is None:
            return
        waiting, self._waiting = self._waiting, []
        for what, payload in waiting:
            self._put(what, payload, late=True)

    def _put(self, what: str, payload: Any, *, late: bool = False) -> None:
        if self.recorder is None or not (self.begun or late):
            self._waiting.append((what, payload))
        elif what == "numbers":
            self.recorder.scalars(payload)
        else:
            self.recorder.event(*payload)
