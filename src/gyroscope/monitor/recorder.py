"""The way of a measurement from the device into the run: by the writer's thread, where it becomes quantities."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from time import thread_time
from typing import Any
from weakref import WeakMethod, finalize

import numpy as np
import torch
from torch import Tensor

from gyroscope.diagnose.naming import Naming
from gyroscope.errors import StoreError
from gyroscope.monitor import request
from gyroscope.monitor.clock import Clock
from gyroscope.monitor.detail import Detail
from gyroscope.monitor.measured import Measured, arriving, products_of
from gyroscope.monitor.products import Products
from gyroscope.monitor.quantities import Quantity, compute
from gyroscope.monitor.resume import Saved, write_all
from gyroscope.monitor.track import Track
from gyroscope.store import Deferred, Event, LayerInfo, QuantityInfo, Rows, Scalars, Sink, Writer
from gyroscope.store.lock import Lock
from gyroscope.store.record import Record, Values

_LOG = logging.getLogger("gyroscope")


@dataclass(frozen=True)
class Numbers:
    """Numbers of the whole network at a step, on their way to host memory.

    Attributes:
        step: how often the optimizer was called.
        values: the numbers.
        skips: how many of these calls it skipped, where only a GPU knows.
        done: an event after which they are there; None on a CPU.
    """

    step: int
    values: dict[str, Any]
    skips: Any
    done: Any

    @classmethod
    def of(cls, step: int, values: Mapping[str, Any], skips: Tensor | None) -> Numbers:
        """Send them on their way."""
        on_gpu = [v for v in (*values.values(), skips) if isinstance(v, Tensor) and v.device.type == "cuda"]
        coming = {name: arriving(value) for name, value in values.items()}
        there, done = arriving(skips), None
        if on_gpu:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(torch.cuda.current_stream(on_gpu[0].device))
        return cls(step, coming, there, done)


class Recorder:
    """Writes what the tracks of a monitor measure.

    Attributes:
        asked: number of steps that somebody has asked for in detail, through the signal file; 0 if nobody has.
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
    ) -> None:
        self.path = path
        self.asked = 0
        self._used = 0.0  # seconds of the writer's thread
        self._lost = self._lost_at = 0
        self._tracks, self._details, self._quantities, self._clock = tracks, details, list(quantities), clock
        self._last = [0] * len(tracks)
        infos: dict[str, QuantityInfo] = {one.info.name: one.info for one in quantities}
        for detail in details:
            infos |= detail.infos
        spectral = [detail.conditioned is not None for detail in details]
        self._naming = Naming(path, layers, spectral, resumes=step > 0)
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
        # The writer's thread holds no recorder, and so no model: with the last that does, the run is finished.
        self._dropped = finalize(self, self.writer.finish)
        self._dropped.atexit = False  # the writer sees to that

    def start(self) -> None:
        """Count from the steps that the tracks are at."""
        self._last = [track.taken for track in self._tracks]

    def measured(self, part: int, measured: Measured, detail: dict[str, Tensor]) -> bool:
        """Hand a measurement over; False if the writer has no room for it."""
        return self.writer.put(Deferred(self._resolve, (part, measured, detail)))

    def scalars(self, numbers: Numbers) -> None:
        """Hand numbers over; those on a GPU are not waited for."""
        if numbers.done is not None:
            self._put(Deferred(self._told, numbers, small=True), numbers.step)
            return
        for record in self._told([numbers]):
            self._put(record, record.step)

    def event(self, step: int, kind: str, text: str) -> None:
        """Hand an event over."""
        self._put(Event(step, kind, text), step)

    def _put(self, record: Scalars | Event | Deferred, step: int) -> None:
        if self.writer.put(record) or not self.writer.open:
            return
        if self._lost == 0:
            _LOG.warning("%s: the disk cannot keep up; what is logged now is dropped (reported once)", self.path)
        self._lost, self._lost_at = self._lost + 1, step

    def flush(self, timeout: float | None = None) -> None:
        """Return when everything that was handed over is on the disk.

        Raises:
            StoreError: writing has failed, took too long, or had no space for what was logged since the last flush.
        """
        self.writer.flush(timeout)
        if self._lost:
            text = f"{self._lost} logged values and notes up to here were dropped: the disk could not keep up"
            lost, self._lost = f"{self._lost} logged values and notes up to step {self._lost_at}", 0
            self.event(self._lost_at, "error", text)
            self.writer.flush(timeout)
            raise StoreError(
                f"{self.path} lacks {lost}: they were dropped, because the disk could not keep up. All others are on "
                "disk. Log less often, or flush in between."
            )

    def reference(self, saved: Saved, file: str) -> None:
        """Have the reference written beside the run."""
        self.writer.put(Deferred(write_all, (saved, self.path / file)))

    def close(self, *, interrupted: bool = False) -> None:
        """Finish the run, and let go of the model."""
        if self._lost and self.writer.open:
            with suppress(StoreError):  # it is in the log and in the run
                self.flush()
        self.writer.close(interrupted=interrupted)
        self._tracks, self._details = (), ()
        self._dropped.detach()

    # On the writer's thread.

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
            if not measured.skipped or step > last:  # a skipped step shows the weights of the one before
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
        analysed: dict[int, dict[str, Values]] = {}
        for i, (_, detail) in enumerate(kept):
            if detail:
                found = self._details[part].resolve(detail)
                yield Rows(part, np.array([steps[i]]), {name: value[None] for name, value in found.items()})
                analysed[i] = found
        yield from self._naming.events(part, steps, products, analysed)

    def _told(self, payloads: Sequence[Numbers]) -> Iterator[Scalars]:
        for record in _scalars(payloads):
            self._naming.heard(record.step, record.values)
            yield record

    def _tick(self) -> None:
        used, self._used = self._used, thread_time()
        self._clock.wrote(self._used - used)
        if steps := request.take(self.path):
            self.asked = steps


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """A call of a method of an object that it does not keep alive."""
    found = WeakMethod(method)

    def call() -> None:
        if (alive := found()) is not None:
            alive()

    return call


def _computed(one: Quantity, products: Products) -> tuple[Values, str | None]:
    """A quantity's values; where it fails, those of the steps it does not fail at, and why."""
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


def _scalars(payloads: Sequence[Numbers]) -> Iterator[Scalars]:
    for numbers in payloads:
        if numbers.done is not None:
            numbers.done.synchronize()
        step = numbers.step - (0 if numbers.skips is None else int(numbers.skips.item()))
        yield Scalars(step, {name: float(value) for name, value in numbers.values.items()})
