"""The way of a measurement from the device into the run: by the writer's thread, where it becomes quantities."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gyroscope.monitor.clock import Clock
from gyroscope.monitor.detail import Detail
from gyroscope.monitor.quantities import Quantity, compute
from gyroscope.monitor.resume import Saved, write_all
from gyroscope.monitor.track import Measured, Track, arriving
from gyroscope.store import Deferred, Event, LayerInfo, QuantityInfo, Rows, Scalars, Sink, Writer
from gyroscope.store.record import Record

#: A file of this name in a run's folder makes a running monitor measure the next steps in detail.
SIGNAL = "sample"


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
    ) -> None:
        self.path = path
        self.asked = 0
        self._tracks, self._details, self._quantities, self._clock = tracks, details, quantities, clock
        self._last = [0] * len(tracks)
        infos: dict[str, QuantityInfo] = {one.info.name: one.info for one in quantities}
        for detail in details:
            infos |= detail.infos
        self.writer = Writer(path, layers, infos, meta=meta, step=step, sinks=sinks, on_tick=self._look_for_signal)

    def start(self) -> None:
        """Count from the steps that the tracks are at."""
        self._last = [track.taken for track in self._tracks]

    def measured(self, part: int, measured: Measured, detail: dict[str, Tensor]) -> bool:
        """Hand a measurement over; False if the writer has no room for it."""
        return self.writer.put(Deferred(self._resolve, (part, measured, detail)))

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Hand numbers over; tensors on a GPU are not waited for."""
        on_gpu = [v for v in values.values() if isinstance(v, Tensor) and v.device.type == "cuda"]
        coming = {name: arriving(value) for name, value in values.items()}
        if not on_gpu:
            self.writer.put(Scalars(step, {name: float(value) for name, value in coming.items()}))
            return
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(on_gpu[0].device))
        self.writer.put(Deferred(_scalars, (step, coming, done)))

    def event(self, step: int, kind: str, text: str) -> None:
        """Hand an event over."""
        self.writer.put(Event(step, kind, text))

    def reference(self, saved: Saved, file: str) -> None:
        """Have the reference written beside the run."""
        self.writer.put(Deferred(write_all, (saved, self.path / file)))

    # On the writer's thread.

    def _resolve(self, payloads: Sequence[tuple[int, Measured, dict[str, Tensor]]]) -> Iterator[Record]:
        for part, group in groupby(payloads, lambda payload: payload[0]):
            began = thread_time()
            items = [(measured, detail) for _, measured, detail in group]
            device = sum(measured.wait() for measured, _ in items)
            yield from self._rows(part, [(m, d) for m, d in items if not m.skipped])
            self._clock.worked_out(device=device, writer=thread_time() - began, count=len(items))

    def _rows(self, part: int, items: Sequence[tuple[Measured, dict[str, Tensor]]]) -> Iterator[Record]:
        if not items:
            return
        steps = np.array([measured.true_step for measured, _ in items], dtype=np.int64)
        since = np.maximum(np.diff(steps, prepend=self._last[part]), 1).astype(np.float64)
        self._last[part] = int(steps[-1])
        products = self._tracks[part].products([measured for measured, _ in items])
        products = products.with_(steps=np.broadcast_to(since[:, None], products.ww.shape))
        values = compute(self._quantities, products)
        yield Rows(part, steps, {name: value.astype(np.float32) for name, value in values.items()})
        for step, (_, detail) in zip(steps, items, strict=True):
            if detail:
                found = self._details[part].resolve(detail)
                yield Rows(part, np.array([step]), {name: value[None] for name, value in found.items()})

    def _look_for_signal(self) -> None:
        """A file in the run's folder asks a running job for detail; it may hold the number of steps."""
        file = self.path / SIGNAL
        if file.exists():
            text = file.read_text().strip()
            with suppress(OSError):
                os.unlink(file)
            self.asked = int(text) if text.isdecimal() and int(text) > 0 else 5


def _scalars(payloads: Sequence[tuple[int, dict[str, Any], Any]]) -> Iterator[Record]:
    for step, values, done in payloads:
        done.synchronize()
        yield Scalars(step, {name: float(value) for name, value in values.items()})
