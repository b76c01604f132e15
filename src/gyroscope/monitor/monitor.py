"""The monitor: hooks around an optimizer's step that measure, and never disturb, what happens there."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from gyroscope.errors import GyroscopeError
from gyroscope.layer import Layer
from gyroscope.monitor import given, neurons
from gyroscope.monitor.clock import Cost, Stopwatch
from gyroscope.monitor.detail import Detail
from gyroscope.monitor.pace import Pace
from gyroscope.monitor.quantities import find
from gyroscope.monitor.recorder import SIGNAL, Numbers, Recorder
from gyroscope.monitor.reference import Place, Precision, Reference, Source, from_source
from gyroscope.monitor.resume import Beginning, Existing, Saved, agreed, beginning, file_of
from gyroscope.monitor.track import Track
from gyroscope.store import LayerInfo, Run, Sink, load
from gyroscope.vectors.chunks import is_capturing
from gyroscope.vectors.sharded import any_sharded

_LOG = logging.getLogger("gyroscope")


class Monitor:
    """Measures the layers of a model at the steps of its optimizer; made by `gyroscope.watch`, which says how.

    Attributes:
        path: the run's folder.
        layers: the names of the layers, in forward order.
        error: what made the monitor stop, if something did. Training is never stopped by it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        run: str | Path | None,
        *,
        every: int,
        budget: float | None,
        layers: Sequence[Layer] | str | Iterable[str] | None,
        quantities: Sequence[str] | None,
        neurons: bool,
        loss: Any,
        activations: bool,
        detail_every: int,
        threshold: float,
        reference: Source | None,
        reference_dtype: Precision,
        reference_device: Place,
        step: int | None,
        meta: Mapping[str, Any] | None,
        sinks: Sequence[Sink],
    ) -> None:
        given.check_numbers(every=every, budget=budget, detail_every=detail_every, step=step, threshold=threshold)
        given.check_choices(reference_dtype, reference_device)
        given.check_flags(neurons=neurons, activations=activations)
        given.check_loss(loss)
        self._sinks = given.sinks(sinks)
        optimizers = given.optimizers(optimizer)
        chosen = given.layers(model, layers)
        self._members = given.parts(chosen, optimizers)
        self._quantities = find(quantities)
        every, budget = int(every), None if budget is None else float(budget)
        self._meta = given.meta(meta, model, optimizers, every=every, budget=budget)
        values = None if reference is None else from_source(reference, chosen)
        self._sharded = any_sharded(layer.parameter for layer in chosen)
        _check_neurons(chosen, neurons, self._sharded)
        part_of = {i: part for part, members in enumerate(self._members) for i in members}
        self._table = [
            LayerInfo(layer.name, layer.kind, tuple(layer.parameter.shape), part_of[i])
            for i, layer in enumerate(chosen)
        ]
        self.path = given.folder(run)
        self.layers = tuple(layer.name for layer in chosen)
        self.error: Exception | None = None
        self._writes = given.rank() == 0
        # Ranks that hold replicas have nothing to add; ranks that hold shards are all needed.
        self._active = self._sharded or self._writes
        self._held: tuple[Precision, Place] = (reference_dtype, reference_device)
        self._own_reference, self._loaded = reference is not None, False
        self._step_given = None if step is None else int(step)
        self._pace = Pace(every=every, budget=budget, detail_every=int(detail_every), shared=self._sharded)
        self._tracks: list[Track] = []
        self._details: list[Detail] = []
        self._recorder: Recorder | None = None
        self._begun = False
        self._waiting: list[tuple[str, Any]] = []
        self._existing: Existing | None = None
        self._find_run()
        moves = any({"pp", "vp"} & one.needs for one in self._quantities)
        with _plainly():
            for members, its_optimizer in zip(self._members if self._active else (), optimizers, strict=False):
                its = [chosen[i] for i in members]
                start = None if values is None else [values[i] for i in members]
                weights = [layer.parameter for layer in its]
                held = Reference.take(weights, start, precision=reference_dtype, place=reference_device)
                self._tracks.append(Track(its, its_optimizer, held, moves=moves))
                self._details.append(
                    Detail(model, its, its_optimizer, activations=activations, spread=neurons, threshold=threshold)
                )
            self._zero = [track.measure(gradients=False) for track in self._tracks]
        if self._writes and self._existing is None:
            self._open(self._step_given or 0, file_of(1))  # what is wrong with the folder is said now
        self._own = Stopwatch()
        self._outside = 0.0
        self._left: float | None = None
        self._loss = None if isinstance(loss, nn.Module) else loss
        self._handles = self._attach(loss)
        self._arm()

    def _find_run(self) -> None:
        """Look for a run to go on with; what does not belong together is refused, on all ranks that take part."""
        problem: GyroscopeError | None = None
        if self._writes:
            try:
                self._existing = Existing.at(self.path, self._table)
            except GyroscopeError as error:
                problem = error
        if self._active:
            (problem,) = agreed((problem,), self._sharded)
        if problem is not None:
            raise problem

    @property
    def every(self) -> int:
        """Measure every so many steps; can be changed at any time. The budget may stretch it."""
        return self._pace.every

    @every.setter
    def every(self, value: int) -> None:
        given.check_numbers(every=value)
        self._pace.set_every(int(value))
        self._arm()

    @property
    def interval(self) -> int:
        """The number of steps between measurements now: `every`, or more where the budget asks for it."""
        return self._pace.interval

    @property
    def steps(self) -> int:
        """How many steps the optimizer has taken; of several, the one that has taken most."""
        return max((track.taken for track in self._tracks), default=0)

    @property
    def run(self) -> Run:
        """The run, to read, with everything measured so far in it."""
        self.flush()
        return load(self.path)

    @property
    def held(self) -> str:
        """How the reference weights are held."""
        return "; ".join(track.reference.held for track in self._tracks)

    @property
    def bytes(self) -> int:
        """What is held between steps, on this rank: the reference, and the last displacement."""
        return sum(bundle.bytes for track in self._tracks for bundle in track.reference.bundles)

    def log(self, values: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        """Record numbers of the whole network at this step, such as a loss; tensors are not waited for."""
        numbers = given.numbers(values, named)
        self._safely(self._log, numbers)

    def note(self, text: str) -> None:
        """Record something that happened at this step, in words."""
        self._safely(self._event, "note", str(text))

    def sample(self, next_steps: int = 5) -> None:
        """Measure the next steps, every one of them and in detail, whatever the interval."""
        given.check_numbers(next_steps=next_steps)
        self._ask_for(int(next_steps))

    def measure(self) -> None:
        """Count a step, and measure it if it is due, in a loop that does not call `optimizer.step`.

        For steps that are replayed as a CUDA graph, which no hook sees. The first time there is nothing to compare the
        weights with, so rates begin with the second.
        """
        for track in self._tracks:
            self._safely(self._by_hand, track)

    def cost(self) -> Cost:
        """What measuring costs, as a share of the training time and in seconds."""
        pace = self._pace
        return pace.clock.cost(interval=pace.interval, steps=self.steps, measured=pace.measurements, held=self.held)

    def flush(self, timeout: float | None = None) -> None:
        """Return when everything measured so far is on disk.

        Raises:
            StoreError: it could not be written.
        """
        if not self._sharded:  # ranks that measure together begin together, at a step
            self._safely(self._begin)
        if self._recorder is not None:
            self._recorder.writer.flush(timeout)

    def close(self) -> None:
        """Record the last step, take every hook off and finish the run."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for detail in self._details:
            detail.detach()
        self._safely(self._end)
        self._active = False
        if self._recorder is not None:
            self._recorder.close()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None:
            self._safely(self._event, "stop", f"stopped by {type(error).__name__}: {error}")
        self.close()

    def __repr__(self) -> str:
        every = f"every {self.interval} steps" if self.interval > 1 else "every step"
        return f"Monitor({str(self.path)!r}: {len(self.layers)} layers, {every}, {self.steps} steps so far)"

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs so that a later run goes on with these curves: the steps, and the reference.

        All ranks of a sharded model ask for it together.
        """
        saved = Saved.of(self._tracks)
        return {
            "version": 1,
            "layers": list(self.layers),
            "shapes": [list(info.shape) for info in self._table],
            "steps": [track.taken for track in self._tracks],
            "reference": {name: tensor.cpu() for name, tensor in saved.tensors.items()},
            "squares": dict(saved.squares),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint: the curves continue at its step, against its reference.

        Raises:
            MonitorError: it is of another model; nothing has been changed.
        """
        if not self._active:
            return
        given.check_state(state, self.layers, [info.shape for info in self._table], len(self._members))
        saved = Saved(state["reference"], state["squares"])
        references = [saved.hold(track, *self._held) for track in self._tracks]
        for track, held, taken in zip(self._tracks, references, state["steps"], strict=True):
            track.exchange(held)
            track.start(int(taken))
        self._loaded = True
        if self._begun and self._recorder is not None:
            # The run goes on as a new attempt from here; what came after this step is kept, but no longer shown.
            self._recorder.writer.close()
            self._existing, self._recorder = Existing.at(self.path, self._table), None
        self._begun = False
        self._arm()

    # Around a step.

    def _attach(self, loss: Any) -> list[Any]:
        handles: list[Any] = []
        for track in self._tracks:
            handles.append(track.optimizer.register_step_pre_hook(self._hook(self._before, track)))
            handles.append(track.optimizer.register_step_post_hook(self._hook(self._after, track)))
        if isinstance(loss, nn.Module) and self._writes:
            handles.append(loss.register_forward_hook(_LossHook(self)))
        return handles

    def _hook(self, act: Callable[[Track], None], track: Track) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if torch.compiler.is_compiling():
                self._uncompiled(act, track)
            elif not is_capturing():  # hooks are not part of a graph, and its steps are replayed without them
                self._safely(act, track, joining=self._sharded)

        return hook

    @_disable_dynamo
    def _uncompiled(self, act: Callable[[Track], None], track: Track) -> None:
        self._safely(act, track, joining=self._sharded)

    def _safely(self, act: Callable[..., None], *arguments: Any, joining: bool = False) -> None:
        """Whatever goes wrong here, training goes on: it is said once, and recording stops.

        With `joining` it is done even then, because other ranks wait for this one's part.
        """
        if not self._active or (self.error is not None and not joining):
            return
        try:
            with _plainly():
                act(*arguments)
        except Exception as error:
            if self.error is None:
                self.error = error
                with suppress(Exception):
                    self._say(error)

    def _say(self, error: Exception) -> None:
        writer = None if self._recorder is None else self._recorder.writer
        for detail in self._details:
            detail.detach()
        if writer is not None and error is writer.error:
            return  # the writer has said it
        expected = isinstance(error, GyroscopeError)
        said = str(error) if expected else f"{type(error).__name__}: {error}"
        _LOG.error("The monitor of %s has stopped, training goes on. %s", self.path, said, exc_info=not expected)
        if self._recorder is not None:
            self._recorder.event(self.steps, "error", f"recording stopped: {said}")

    def _before(self, track: Track) -> None:
        self._arrive()
        with self._own:
            track.measuring = self._due(track)
            self._begin()
            if track.measuring:
                track.before()
            else:
                track.pass_by()
        self._left = perf_counter()

    def _after(self, track: Track) -> None:
        self._arrive()
        measured, sampled = track.measuring, track.sampling
        track.measuring = False
        with self._own:
            if track.skipped():
                track.leave()
                return
            track.taken += 1
            if measured:
                self._hand_over(track)
        if sampled:
            track.next_detail = track.taken + self._pace.detail_interval
        if track is self._tracks[0]:
            self._account(measured, sampled)
        self._arm(track)
        self._left = perf_counter()

    def _due(self, track: Track) -> bool:
        return self._pace.due(track.taken + 1, track.tried_at)

    def _by_hand(self, track: Track) -> None:
        self._begin()
        track.taken += 1
        if self._pace.due(track.taken, track.tried_at):
            self._hand_over(track)
            track.anchor()
            self._pace.measurements += 1
            self._pace.forced = max(0, self._pace.forced - 1)

    def _hand_over(self, track: Track) -> None:
        part = self._tracks.index(track)
        measured = track.measure()
        detail = self._details[part].collect(track) if track.sampling else {}
        recorder = self._recorder if self.error is None else None
        taken = recorder is None or recorder.measured(part, measured, detail)
        track.settle(recorded=taken or self._sharded)
        if recorder is None:
            return
        if not taken:
            if recorder.writer.error is not None:
                raise recorder.writer.error
            if not self._sharded:
                self._event("interval", self._pace.overrun())
        if self._loss is not None and part == 0:
            self._log(given.numbers(None, {"loss": self._loss()}))

    def _arrive(self) -> None:
        if self._left is not None:
            self._outside += perf_counter() - self._left

    def _account(self, measured: bool, sampled: bool) -> None:
        """Learn what this step cost, and decide on the next."""
        outside, self._outside = self._outside, 0.0
        first = self._tracks[0]
        self._pace.account(
            outside=outside, own=self._own.take(), measured=measured, sampled=sampled, exposed=first.caught_up
        )
        said = None
        if not self._sharded:
            said = self._pace.stretch()
        elif measured:
            said = self._pace.agree(first.parameters()[0].device)
        if said is not None:
            self._event("interval", said)
        if self._recorder is not None and self._recorder.asked and not self._sharded:
            steps, self._recorder.asked = self._recorder.asked, 0
            self._event("note", f"{steps} steps in detail were asked for through the file {SIGNAL!r}")
            self._ask_for(steps)

    def _ask_for(self, steps: int) -> None:
        """Measure the next steps, all of them and in detail."""
        self._pace.sample(steps)
        for track in self._tracks:
            track.next_detail = track.taken + 1
        self._arm()

    def _arm(self, only: Track | None = None) -> None:
        """Put forward hooks on where the coming step is looked at in detail, and take them off where it is not."""
        for track, detail in zip(self._tracks, self._details, strict=True):
            if only is not None and track is not only:
                continue
            coming = track.taken + 1
            wanted = coming >= track.next_detail or self._pace.forced > 0
            alive = self._active and (self.error is None or self._sharded)
            track.sampling = alive and wanted and self._due(track)
            if track.sampling:
                self._safely(detail.attach)
            else:
                detail.detach()

    # The first row, the last, and what is not measured.

    def _begin(self) -> None:
        """Open the run, where it was left off if it exists, and record the weights before the first step."""
        if self._begun:
            return
        self._begun = True
        start = beginning(
            self._existing, self._tracks, self._members, loaded=self._loaded, step=self._step_given,
            own_reference=self._own_reference, shared=self._sharded,
        )  # fmt: skip
        for track in self._tracks:
            if start.adopt is not None:
                track.exchange(start.adopt.hold(track, *self._held))
            if not self._loaded:
                track.start(start.step)
            track.measuring = self._due(track)
            track.sampling = track.sampling and track.measuring
        saved = Saved.of(self._tracks) if start.new_reference else None
        if self._writes:
            self._write(start, saved)

    def _write(self, start: Beginning, saved: Saved | None) -> None:
        """The first rows of the run, or of its next attempt."""
        if start.warning is not None:
            _LOG.warning("%s %s", self.path, start.warning)
        file = file_of(1 if self._existing is None else self._existing.attempts + 1)
        recorder = self._recorder or self._open(start.step, file if saved is not None else None)
        recorder.start()
        self._event("start" if self._existing is None else "resume", f"{start.said}; reference held in {self.held}")
        for why in {detail.why_not for detail in self._details} - {None}:
            self._event("note", f"activations are not measured: {why}")
        if saved is not None:
            recorder.reference(saved, file)
        if start.step == 0 and not self._loaded:
            for part, measured in enumerate(self._zero):
                recorder.measured(part, measured, {})
        waiting, self._waiting = self._waiting, []
        for what, payload in waiting:
            self._put(what, payload)

    def _open(self, step: int, reference_file: str | None) -> Recorder:
        meta = self._meta if reference_file is None else {**self._meta, "reference_file": reference_file}
        self._recorder = Recorder(
            self.path, self._table, self._tracks, self._details, self._quantities, self._pace.clock,
            step=step, meta=meta, sinks=self._sinks,
        )  # fmt: skip
        return self._recorder

    def _end(self) -> None:
        self._begin()
        for part, track in enumerate(self._tracks):
            if track.taken > track.measured_at:
                measured = track.measure(gradients=False)
                track.settle()
                if self._recorder is not None:
                    self._recorder.measured(part, measured, {})
        if self._pace.dropped:
            self._event("interval", f"{self._pace.dropped} measurements were dropped: the disk could not keep up")

    def _log(self, numbers: Mapping[str, Any]) -> None:
        if self._writes:
            skips = self._tracks[0].skips
            self._put("numbers", Numbers.of(self.steps, numbers, skips))

    def _event(self, kind: str, text: str) -> None:
        if self._writes:
            self._put("event", (self.steps, kind, text))

    def _put(self, what: str, payload: Any) -> None:
        """Hand something over, or keep it until the run has begun."""
        if self._recorder is None or not self._begun:
            self._waiting.append((what, payload))
        elif what == "numbers":
            self._recorder.scalars(payload)
        else:
            self._recorder.event(*payload)


class _LossHook:
    """Records what a loss module computes; copies of the module, which may go anywhere, record nothing."""

    def __init__(self, monitor: Monitor | None) -> None:
        self.monitor = None if monitor is None else weakref.ref(monitor)

    def __call__(self, module: nn.Module, arguments: Any, value: Any) -> None:
        if torch.compiler.is_compiling() or self.monitor is None or is_capturing():
            return
        monitor = self.monitor()
        if monitor is not None and isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad:
            monitor._safely(monitor._log, {"loss": value.detach()})

    def __reduce__(self) -> tuple[type[_LossHook], tuple[None]]:
        return _LossHook, (None,)


@contextmanager
def _plainly() -> Iterator[None]:
    """Without gradients; nor in the precision of a surrounding autocast, nor in a surrounding inference mode.

    Inner products would lose their digits in the first, and tensors of the second cannot be used again.
    """
    with torch.inference_mode(False), torch.no_grad():
        if torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                yield
        else:
            yield


def _check_neurons(layers: Sequence[Layer], wanted: bool, sharded: bool) -> None:
    if wanted:
        neurons.check(layers, sharded)
