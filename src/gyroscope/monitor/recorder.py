"""The run of a monitor: where it begins and ends, and the path of a measurement from the device to its rows.

The `Chronicle` opens, resumes and closes the run. The `Recorder` turns measurements into rows, on the writer's thread.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from time import thread_time
from typing import Any
from weakref import WeakMethod, finalize

import numpy as np
import torch
from torch import Tensor

from gyroscope.diagnosis.finding import Finding
from gyroscope.diagnosis.live import Live
from gyroscope.diagnosis.rules import told
from gyroscope.errors import GyroscopeError, MonitorError, StoreError
from gyroscope.monitor.clock import Clock
from gyroscope.monitor.detail import Detail
from gyroscope.monitor.quantities import Products, Quantity, compute
from gyroscope.monitor.reference import FILE, Holding
from gyroscope.monitor.resume import Beginning, Existing, Saved, agreed, beginning, file_of, write_all
from gyroscope.monitor.track import Measured, Track, arriving, products_of
from gyroscope.store import Deferred, Event, LayerInfo, QuantityInfo, Rows, Scalars, Sink, Writer, lock, schema
from gyroscope.store.folder import REQUEST
from gyroscope.store.lock import Lock
from gyroscope.store.record import Record, Values
from gyroscope.vectors.layout import any_sharded

_LOG = logging.getLogger("gyroscope")
# The number of steps of a request that names none, and the number of bytes that are read of one.
_STEPS, _DIGITS = 5, 18


@dataclass(frozen=True)
class Numbers:
    """Numbers of the whole network at a step, on their way to host memory.

    Attributes:
        step: the number of calls of the optimizer so far.
        values: the numbers.
        skips: the number of these calls that the optimizer skipped, where only a GPU knows it.
        done: an event after which they are in host memory; None on a CPU.
    """

    step: int
    values: dict[str, Any]
    skips: Any
    done: Any

    @classmethod
    def of(cls, step: int, values: Mapping[str, Any], skips: Tensor | None) -> Numbers:
        """Start copying them to host memory."""
        on_gpu = [v for v in (*values.values(), skips) if isinstance(v, Tensor) and v.device.type == "cuda"]
        coming = {name: arriving(value) for name, value in values.items()}
        there, done = arriving(skips), None
        if on_gpu:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(torch.cuda.current_stream(on_gpu[0].device))
        return cls(step, coming, there, done)


class Recorder:
    """Writes the measurements of a monitor's tracks.

    Attributes:
        asked: the number of steps that were requested in detail, through a file in the run's folder; 0 if none were.
    """

    def __init__(
        self,
        path: Path,
        layers: Sequence[LayerInfo],
        tracks: Sequence[Track],
        details: Sequence[Detail],
        quantities: Sequence[Quantity],
        clock: Clock,
        *,
        step: int,
        meta: Mapping[str, Any],
        sinks: Sequence[Sink],
        lock: Lock | None = None,
        live: Live | None = None,
        on_finding: Callable[[Finding], object] | None = None,
    ) -> None:
        self.path = path
        self.asked = 0
        self._live, self._on_finding = live, on_finding
        self._used = 0.0  # seconds of the writer's thread
        self._lost = self._lost_at = 0
        self._tracks, self._details, self._quantities, self._clock = tracks, details, list(quantities), clock
        self._last = [0] * len(tracks)
        infos: dict[str, QuantityInfo] = {one.info.name: one.info for one in quantities}
        for detail in details:
            infos |= detail.infos
        self.writer = Writer(
            path,
            layers,
            infos,
            meta=meta,
            step=step,
            sinks=sinks,
            on_tick=_weakly(self._tick),
            lock=lock,
        )
        # The writer's thread holds neither the recorder nor the model: when the recorder is collected, the run ends.
        self._dropped = finalize(self, self.writer.finish)
        self._dropped.atexit = False  # the writer closes itself at exit

    def start(self) -> None:
        """Count steps from where the tracks are now."""
        self._last = [track.taken for track in self._tracks]

    def measured(self, part: int, measured: Measured, detail: dict[str, Tensor]) -> bool:
        """Pass a measurement to the writer; return False if its queue is full."""
        return self.writer.put(Deferred(self._resolve, (part, measured, detail)))

    def scalars(self, numbers: Numbers) -> None:
        """Pass numbers to the writer, without waiting for a GPU."""
        if numbers.done is not None:
            self._put(Deferred(self._told, numbers, small=True), numbers.step)
            return
        for record in self._told([numbers]):
            self._put(record, record.step)

    def event(self, event: Event) -> None:
        """Pass an event to the writer."""
        self._put(event, event.step)

    def _put(self, record: Scalars | Event | Deferred, step: int) -> None:
        if self.writer.put(record) or not self.writer.open:
            return
        if self._lost == 0:
            _LOG.warning("%s: the disk cannot keep up; logged values are dropped (reported once)", self.path)
        self._lost, self._lost_at = self._lost + 1, step

    def flush(self, timeout: float | None = None) -> None:
        """Return when everything that was passed to the writer is on disk.

        Raises:
            StoreError: writing failed, took too long, or values logged since the last flush were dropped.
        """
        self.writer.flush(timeout)
        if self._lost:
            text = f"{self._lost} logged values and notes up to here were dropped: the disk could not keep up"
            lost, self._lost = f"{self._lost} logged values and notes up to step {self._lost_at}", 0
            self.event(Event(self._lost_at, "error", text))
            self.writer.flush(timeout)
            raise StoreError(
                f"{self.path} lacks {lost}: they were dropped, because the disk could not keep up. All others are on "
                "disk. Log less often, or flush in between."
            )

    def reference(self, saved: Saved, file: str, *, adds: bool = False) -> None:
        """Write the reference into the run's folder, on the writer's thread; or what `adds` to that in `file`."""
        self.writer.put(Deferred(write_all, (saved, self.path / file, adds), small=True))

    def close(self, *, interrupted: bool = False) -> None:
        """Finish the run, and release the model."""
        if self._lost and self.writer.open:
            with suppress(StoreError):  # it is reported in the log and in the run
                self.flush()
        if self._live is not None and self.writer.open:
            with suppress(Exception):  # the run is closed in any case
                self.writer.put(Deferred(self._concluded, None, small=True))
        self.writer.close(interrupted=interrupted)
        self._tracks, self._details = (), ()
        self._dropped.detach()

    # The methods below run on the writer's thread.

    def _resolve(self, payloads: Sequence[tuple[int, Measured, dict[str, Tensor]]]) -> Iterator[Record]:
        for part, group in groupby(payloads, lambda payload: payload[0]):
            items = [(measured, detail) for _, measured, detail in group]
            spent = [seconds for measured, _ in items if (seconds := measured.wait()) is not None]
            yield from self._rows(part, items)
            self._clock.worked_out(device=spent)

    def _rows(self, part: int, items: Sequence[tuple[Measured, dict[str, Tensor]]]) -> Iterator[Record]:
        kept, steps = [], []
        last = self._last[part]
        for measured, detail in items:
            step = measured.true_step
            if not measured.skipped or step > last:  # a skipped step has the weights of the one before
                kept.append((measured, detail))
                steps.append(step)
                last = step
        if not kept:
            return
        at = np.array(steps, dtype=np.int64)
        since = np.maximum(np.diff(at, prepend=self._last[part]), 1).astype(np.float64)
        self._last[part] = steps[-1]
        products = products_of([measured for measured, _ in kept])
        products = products.with_(steps=np.broadcast_to(since[:, None], products.ww.shape))
        values: dict[str, Values] = {}
        for one in list(self._quantities):
            values[one.info.name], problem = _computed(one, products)
            if problem is not None:
                self._quantities.remove(one)
                text = f"the quantity {one.info.name!r} failed and is no longer recorded: {problem}"
                _LOG.warning("%s: %s", self.path, text)
                yield Event(steps[-1], "error", text)
        yield Rows(part, at, values)
        if self._live is not None:
            self._live.measured(part, steps, values)
        for i, (_, detail) in enumerate(kept):
            if detail:
                found = {name: value[None] for name, value in self._details[part].resolve(detail).items()}
                yield Rows(part, at[i : i + 1], found)
                if self._live is not None:
                    self._live.measured(part, [steps[i]], found)
        yield from self._diagnosed(steps[-1])

    def _concluded(self, _: object) -> Iterator[Event]:
        yield from self._diagnosed(max(self._last, default=0), ends=True)

    def _diagnosed(self, step: int, *, ends: bool = False) -> Iterator[Event]:
        """Yield the alarms that the rules state now; an error in them ends the live diagnosis, never the recording."""
        if self._live is None:
            return
        try:
            stated = self._live.stated(ends=ends)
        except Exception as error:
            self._live = None
            yield Event(step, "error", f"the live diagnosis failed and is off: {type(error).__name__}: {error}")
            return
        for one in stated:
            _LOG.warning("%s: %s %s", self.path, one.sentence, one.remedy)
            yield Event(step if one.since is None else one.since, "finding", f"{one.severity}: {one.sentence}")
            if self._on_finding is not None:
                try:
                    self._on_finding(one)
                except Exception as error:
                    yield Event(step, "error", f"on_finding failed: {type(error).__name__}: {error}")

    def _told(self, payloads: Sequence[Numbers]) -> Iterator[Scalars]:
        for record in _scalars(payloads):
            if self._live is not None:
                self._live.heard(record.step, record.values)
            yield record

    def _tick(self) -> None:
        used, self._used = self._used, thread_time()
        self._clock.wrote(self._used - used)
        if steps := _requested(self.path):
            self.asked = steps


def _requested(run: Path) -> int:
    """Return the number of steps that a request in the folder `run` asks for, and remove the request; 0 without one.

    Anything but a regular file is left alone.
    """
    file = run / REQUEST
    try:
        found = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a named pipe would wait for a writer
    except OSError:
        return 0
    try:
        if not stat.S_ISREG(os.fstat(found).st_mode):
            return 0
        text = os.read(found, _DIGITS).decode(errors="replace").strip()
    finally:
        os.close(found)
    with suppress(OSError):
        os.unlink(file)
    return int(text) if text.isdecimal() and int(text) > 0 else _STEPS


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls `method` without keeping its object alive."""
    found = WeakMethod(method)

    def call() -> None:
        if (alive := found()) is not None:
            alive()

    return call


def _computed(one: Quantity, products: Products) -> tuple[Values, str | None]:
    """Return the values of a quantity, and why it failed, if it did: then steps at which it fails are NaN."""
    problem = None
    try:
        value = compute([one], products)[one.info.name]
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        value = np.full(products.ww.shape, np.nan)
        for row in range(len(value)):
            with suppress(Exception):
                value[row] = compute([one], products.at(slice(row, row + 1)))[one.info.name][0]
    with np.errstate(all="ignore"):
        return value.astype(np.float32), problem


# The reasons of `Track.wake`, in words.
_WOKEN = {
    "trains": "{0} {1} begun to train; rotation is measured from {2} weights before this step",
    "moves": "{0} {1} changed though frozen; rotation is measured from {2} weights before this step",
    "points": "{0} {1} a direction now; rotation is measured from {2} weights before this step",
}


def _unmeasured(tracks: Sequence[Track]) -> Iterator[str]:
    """Yield which layers have no rotation at first, and why."""
    frozen = [track.layers[i].name for track in tracks for i in np.flatnonzero(track.reference.asleep).tolist()]
    zero = [track.layers[i].name for track in tracks for i in track.directionless]
    if frozen:
        yield f"{told(frozen)} {'is' if len(frozen) == 1 else 'are'} frozen: neither measured nor part of averages"
    if zero:
        one = len(zero) == 1
        yield (
            f"{told(zero)} {'is' if one else 'are'} zero: without a direction, and so without rotation, until a step "
            f"changes {'it' if one else 'them'}"
        )


def _scalars(payloads: Sequence[Numbers]) -> Iterator[Scalars]:
    for numbers in payloads:
        if numbers.done is not None:
            numbers.done.synchronize()
        step = numbers.step - (0 if numbers.skips is None else int(numbers.skips.item()))
        yield Scalars(step, {name: float(value) for name, value in numbers.values.items()})


@dataclass(frozen=True)
class About:
    """Contents of a run.

    Attributes:
        path: the run's folder.
        layers: its layers.
        members: the positions of the layers of each optimizer.
        quantities: the quantities that are recorded.
        meta: the information that is kept with the run.
        sinks: the places that it is mirrored to.
        writes: True on the rank that writes it.
        shared: True if several ranks measure it together.
        held: the way references are held.
        diagnoses: True if the rules are evaluated while the run is written.
        mute: kinds of finding that are left out then.
        on_finding: called with each alarm, on the writer's thread.
    """

    path: Path
    layers: Sequence[LayerInfo]
    members: Sequence[Sequence[int]]
    quantities: Sequence[Quantity]
    meta: Mapping[str, Any]
    sinks: Sequence[Sink]
    writes: bool
    shared: bool
    held: Holding
    diagnoses: bool = True
    mute: tuple[str, ...] = ()
    on_finding: Callable[[Finding], object] | None = None


class Chronicle:
    """Begins or resumes a run when the first step is about to be taken; numbers and events wait until then.

    Attributes:
        recorder: writes the run; None on ranks that do not, and before an existing run is opened again.
        begun: True once the run has begun.
        loaded: True if the tracks' steps and references come from a loaded state.
    """

    def __init__(self, about: About, *, step: int | None, own_reference: bool) -> None:
        self.about = about
        self.recorder: Recorder | None = None
        self.begun = False
        self.loaded = False
        self._dropped = 0  # logged values and notes for which there was no step
        self._closed = False
        self._late = 0  # logged values and notes that came after the end
        self._strays = False  # the weights change without steps, which was said
        self._restarted = False
        self._began_at: list[int] = []  # the steps of the tracks
        self._step_given, self._own_reference = step, own_reference
        self._waiting: list[Numbers | Event] = []
        self._existing: Existing | None = None
        self._zero: list[Measured] = []
        self._tracks: Sequence[Track] = ()
        self._details: Sequence[Detail] = ()
        self._new_folders: list[Path] = []  # innermost first
        self._file = FILE
        self._find()

    def _find(self) -> None:
        """Look for a run to resume; a run of other layers is rejected, on all ranks that take part."""
        problem: GyroscopeError | None = None
        if self.about.writes:
            try:
                self._existing = Existing.at(self.about.path, self.about.layers)
            except GyroscopeError as error:
                problem = error
        self._raise_together(problem)

    def prepare(self, tracks: Sequence[Track], details: Sequence[Detail], clock: Clock) -> None:
        """Measure the current weights as step 0, and open a new run, so that its errors are raised now."""
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
        """Raise an error of the rank that writes on all ranks that take part."""
        if self.about.writes or self.about.shared:
            (problem,) = agreed((problem,), self.about.shared)
        if problem is not None:
            raise problem

    @property
    def steps(self) -> int:
        """Number of calls of the optimizer; of several optimizers, the largest number."""
        return max((track.taken for track in self._tracks), default=0)

    def begin(self, start: Beginning | None = None) -> None:
        """Open the run, resuming it if it exists, and record the weights before the first step."""
        if self.begun:
            return
        self.begun = True
        start = start or self._beginning()
        for track in self._tracks:
            if start.adopt is not None:
                track.exchange(start.adopt.hold(track, self.about.held))
            if not self.loaded:
                track.start(start.step)
        self._began_at = [track.taken for track in self._tracks]
        saved = Saved.of(self._tracks) if start.new_reference else None
        if self.about.writes:
            self._write(start, saved)

    def _beginning(self) -> Beginning:
        if not self.about.shared and any_sharded(p for track in self._tracks for p in track.parameters()):
            raise MonitorError(
                "The model was sharded after `watch`, so other ranks do not take part in measuring. Call watch after "
                "fully_shard, or after accelerator.prepare, on all ranks."
            )
        return beginning(
            self._existing, self._tracks, self.about.members, loaded=self.loaded, step=self._step_given,
            own_reference=self._own_reference, shared=self.about.shared,
        )  # fmt: skip

    @property
    def stepped(self) -> bool:
        """True if a step was taken since the run began."""
        return self.begun and [track.taken for track in self._tracks] != self._began_at

    def restart(self, *, stepped: bool) -> None:
        """Prepare a new attempt from a loaded state; it begins at the next step, and hides later records.

        If steps were recorded before (`stepped`), `flush` and `close` begin it too.
        """
        if not self.loaded and not self.begun:
            self._place()
        self.loaded = True
        if self.begun and self.recorder is not None:
            self.recorder.close()
            self._existing, self.recorder = Existing.at(self.about.path, self.about.layers), None
        self._restarted, self.begun = self._restarted or stepped, False

    def measured(self, part: int, measured: Measured, detail: dict[str, Any]) -> bool:
        """Pass a measurement to the recorder; return False if the queue is full."""
        return self.recorder is None or self.recorder.measured(part, measured, detail)

    def log(self, numbers: Mapping[str, Any]) -> None:
        """Pass numbers of the whole network to the recorder, without waiting for a GPU."""
        if self.about.writes:
            self._put(Numbers.of(self.steps, numbers, self._tracks[0].skips))
            self._check_optimizers()

    def event(self, kind: str, text: str) -> None:
        """Pass an event to the recorder."""
        if self.about.writes:
            # Invalid Unicode, such as stray bytes in a file name, is escaped.
            self._put(Event(self.steps, kind, text.encode("utf-8", "backslashreplace").decode()))

    def warn(self, text: str) -> None:
        """Log a warning, and record it as an error."""
        if self.about.writes:
            _LOG.warning("%s: %s", self.about.path, text)
        self.event("error", text)

    def drops(self, what: str) -> bool:
        """Return True if the run is closed, so that `what` is dropped; the first time, log a warning."""
        if self._closed and self.about.writes:
            self._late += 1
            if self._late == 1:
                said = "%s is closed, so %s was dropped, as is all that is logged later. Log it before close()."
                _LOG.warning(said, self.about.path, what)
        return self._closed

    def _check_optimizers(self) -> None:
        """Warn once if weights change without steps, as they do when an optimizer was exchanged."""
        if not self._strays and any(track.strays() for track in self._tracks):
            self._strays = True
            self.warn(
                f"The weights have changed many times after step {self.steps} without a step of the optimizer that is "
                "watched. If another optimizer steps them now, its steps are not recorded: call watch again for it."
            )

    def woken(self, track: Track, why: Mapping[str, Sequence[int]]) -> None:
        """Record that layers are measured from their current weights; all ranks of a sharded model must call it."""
        names = {reason: [track.layers[i].name for i in which] for reason, which in why.items()}
        saved = Saved.of([track], only={name for several in names.values() for name in several})
        if self.recorder is not None:
            self.recorder.reference(saved, self._file, adds=True)
        for reason, several in names.items():
            verb = "has" if len(several) == 1 else "have"
            self.event("note", _WOKEN[reason].format(told(several), verb, "its" if len(several) == 1 else "their"))

    def end(self) -> None:
        """Record the last step. If no step was taken, an earlier run stays as it is, except for what was logged."""
        if not self.begun:
            (changes,) = agreed((self._existing is None or self._restarted or self._logged > 0,), self.about.shared)
            if changes:
                self.open()
        if self.about.writes:
            self._check_optimizers()
        self.record()

    def open(self) -> None:
        """Begin before a step, unless that would hide later steps of an earlier run.

        A run that this monitor has set back to an earlier state is set back in any case.
        """
        if not self.begun:
            start = self._beginning()
            if self._restarted or not start.hides:
                self.begin(start)

    @property
    def _logged(self) -> int:
        """The number of logged values and notes that wait for the beginning."""
        return sum(not isinstance(one, Event) or one.kind == "note" for one in self._waiting)

    def record(self) -> None:
        """Record the last step, if it was not measured."""
        if not self.begun:
            return  # no step was taken
        for part, track in enumerate(self._tracks):
            if track.taken > track.measured_at:
                measured = track.measure(gradients=False)
                track.settle()
                if not self.measured(part, measured, {}) and self.recorder is not None:
                    with suppress(StoreError):  # the monitor's flush reports missing records
                        self.recorder.writer.flush()  # makes space: the last step is always recorded
                    self.measured(part, measured, {})

    def _write(self, start: Beginning, saved: Saved | None) -> None:
        """Write the first rows of the run, or of its next attempt."""
        if start.warning is not None:
            _LOG.warning("%s %s", self.about.path, start.warning)
        file = file_of(1 if self._existing is None else self._existing.attempts + 1)
        self._file = (
            file if saved is not None or self._existing is None else self._existing.meta.get("reference_file", FILE)
        )
        recorder = self.recorder or self._open(start.step, file if saved is not None else None)
        recorder.start()
        held = "; ".join(track.reference.held for track in self._tracks)
        self.event("start" if self._existing is None else "resume", f"{start.said}; reference held in {held}")
        for said in _unmeasured(self._tracks):
            self.event("note", said)
        for why in {detail.why_not for detail in self._details} - {None}:
            self.event("note", f"activations, and conditioning if asked for, are not measured: {why}")
        if saved is not None:
            recorder.reference(saved, file)
        if start.step == 0 and not self.loaded:
            for part, measured in enumerate(self._zero):
                recorder.measured(part, measured, {})
        if not self.loaded:
            self._place()
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            self._put(one)

    def _place(self) -> None:
        """Give what was logged before the step was known its step."""
        self._waiting = [replace(one, step=self.steps) for one in self._waiting]

    def _open(self, step: int, reference_file: str | None) -> Recorder:
        about = self.about
        self._new_folders = [one for one in (about.path, *about.path.parents) if not os.path.exists(one)]
        meta = about.meta if reference_file is None else {**about.meta, "reference_file": reference_file}
        self.recorder = Recorder(
            about.path, about.layers, self._tracks, self._details, about.quantities, self._clock,
            step=step, meta=meta, sinks=about.sinks, lock=None if self._existing is None else self._existing.lock,
            live=self._live(step, meta), on_finding=about.on_finding,
        )  # fmt: skip
        return self.recorder

    def _live(self, step: int, meta: Mapping[str, Any]) -> Live | None:
        about = self.about
        earlier = about.path if step > 0 else None
        return Live(about.layers, meta, mute=about.mute, resumes=earlier) if about.diagnoses else None

    def close(self, *, interrupted: bool) -> None:
        """Finish the run, or unlock one that was not opened again. What waited for its first step is then dropped."""
        if self.recorder is not None:
            self.recorder.close(interrupted=interrupted)
        elif self._existing is not None:
            self._existing.lock.release()
        if self._logged:
            why = "recording stopped before its first step" if self.begun else "no step was taken"
            _LOG.warning("%s stays as it is: %s. What was logged is dropped.", self.about.path, why)
        self._dropped += self._logged
        self._waiting = []
        self._closed = True

    def discard(self) -> None:
        """Close the run and, if it is new, remove it, for a monitor that could not be made."""
        is_new = self.recorder is not None and self._existing is None
        self.close(interrupted=True)
        self.recorder = None
        if is_new:
            for file in self.about.path.iterdir():
                if file.name.startswith((lock.FILE, schema.FILE)):
                    file.unlink()
            for folder in self._new_folders:
                folder.rmdir()

    def unwritten(self) -> str | None:
        """Return what of the logged values is not on its way to the disk, and why."""
        path = self.about.path
        if self._late:
            return f"{path} is closed. Logged values and notes that came later and were dropped: {self._late}."
        if self._dropped:
            return (
                f"{path} stays as it is, because no step was taken after it was opened or a state was loaded. "
                f"Logged values and notes that were dropped: {self._dropped}."
            )
        return f"Logged values are written to {path} with the first step. Flush after it." if self._waiting else None

    def drain(self) -> None:
        """Pass on what still waits for the beginning, if the run is open."""
        if self.recorder is None:
            return
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            self._put(one, late=True)

    def _put(self, one: Numbers | Event, *, late: bool = False) -> None:
        if self.recorder is None or not (self.begun or late):
            self._waiting.append(one)
        elif isinstance(one, Event):
            self.recorder.event(one)
        else:
            self.recorder.scalars(one)
