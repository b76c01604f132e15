"""The monitor: hooks around an optimizer's step that measure, and never disturb, what happens there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from time import perf_counter, strftime
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
from gyroscope.monitor.recorder import SIGNAL, Recorder
from gyroscope.monitor.reference import Place, Precision, Reference, Source, from_source
from gyroscope.monitor.resume import Existing, Saved, file_of
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
        given.check_loss(loss)
        optimizers = given.optimizers(optimizer)
        chosen = given.layers(model, layers)
        self._members = given.parts(chosen, optimizers)
        self._quantities = find(quantities)
        self._meta = given.meta(meta, model, optimizers, every=every, budget=budget)
        values = None if reference is None else from_source(reference, chosen)
        self._sharded = any_sharded(layer.parameter for layer in chosen)
        _check_neurons(chosen, neurons, self._sharded)
        part_of = {i: part for part, members in enumerate(self._members) for i in members}
        self._table = [
            LayerInfo(layer.name, layer.kind, tuple(layer.parameter.shape), part_of[i])
            for i, layer in enumerate(chosen)
        ]
        self.path = given.unused(Path("runs") / strftime("%Y-%m-%d_%H-%M-%S")) if run is None else Path(run)
        self.layers = tuple(layer.name for layer in chosen)
        self.error: Exception | None = None
        self._writes = given.rank() == 0
        # Ranks that hold replicas have nothing to add; ranks that hold shards are all needed.
        self._active = self._sharded or self._writes
        self._existing = Existing.at(self.path, self._table) if self._active else None
        self._held: tuple[Precision, Place] = (reference_dtype, reference_device)
        self._own_reference, self._loaded, self._step_given = reference is not None, False, step
        self._sinks = tuple(sinks)
        self._pace = Pace(every=every, budget=budget, detail_every=detail_every, shared=self._sharded)
        self._tracks: list[Track] = []
        self._details: list[Detail] = []
        moves = any({"pp", "vp"} & one.needs for one in self._quantities)
        for members, its_optimizer in zip(self._members if self._active else (), optimizers, strict=False):
            its = [chosen[i] for i in members]
            start = None if values is None else [values[i] for i in members]
            weights = [layer.parameter for layer in its]
            held = Reference.take(weights, start, precision=reference_dtype, place=reference_device)
            self._tracks.append(Track(its, its_optimizer, held, moves=moves))
            self._details.append(
                Detail(model, its, its_optimizer, activations=activations, spread=neurons, threshold=threshold)
            )
        self._recorder: Recorder | None = None
        self._begun = False
        if self._writes and self._existing is None:
            self._open(step or 0, file_of(1))  # what is wrong with the folder is said now
        self._sampling = False
        self._own = Stopwatch()
        self._outside = 0.0
        self._left: float | None = None
        self._loss = None if isinstance(loss, nn.Module) else loss
        self._handles = self._attach(loss)
        self._arm()

    @property
    def every(self) -> int:
        """Measure every so many steps; can be changed at any time. The budget may stretch it."""
        return self._pace.every

    @every.setter
    def every(self, value: int) -> None:
        given.check_numbers(every=value)
        self._pace.set_every(value)
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
        numbers = given.numbers({**(values or {}), **named})
        self._safely(self._log, numbers)

    def note(self, text: str) -> None:
        """Record something that happened at this step, in words."""
        self._safely(self._event, "note", str(text))

    def sample(self, next_steps: int = 5) -> None:
        """Measure the next steps, every one of them and in detail, whatever the interval."""
        given.check_numbers(next_steps=next_steps)
        self._pace.sample(next_steps, after=self.steps)
        self._arm()

    def measure(self) -> None:
        """Count a step, and measure it if it is due, in a loop that does not call `optimizer.step`.

        For steps that are replayed as a CUDA graph, which no hook sees. The first time there is nothing to compare the
        weights with, so rates begin with the second.
        """
        for track in self._tracks:
            self._safely(self._by_hand, track)

    def cost(self) -> Cost:
        """What measuring costs, as a share of the training time and in seconds."""
        return self._pace.clock.cost(interval=self.interval, steps=self.steps, held=self.held)

    def flush(self, timeout: float | None = None) -> None:
        """Return when everything measured so far is on disk.

        Raises:
            StoreError: it could not be written.
        """
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
            self._recorder.writer.close()

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
        given.check_state(state, self.layers, [info.shape for info in self._table], len(self._members))
        saved = Saved(state["reference"], state["squares"])
        references = [saved.hold(track, *self._held) for track in self._tracks]
        for track, held, taken in zip(self._tracks, references, state["steps"], strict=False):
            track.exchange(held)
            track.start(int(taken))
        self._loaded = True
        if self._begun and self._recorder is not None:
            # The run goes on as a new attempt from here; what came after this step is kept, but no longer shown.
            self._recorder.writer.close()
            self._existing, self._recorder = Existing.at(self.path, self._table), None
        self._begun = False
        self._pace.next_detail = self.steps + 1
        self._arm()

    # Around a step.

    def _attach(self, loss: Any) -> list[Any]:
        handles: list[Any] = []
        for track in self._tracks:
            handles.append(track.optimizer.register_step_pre_hook(self._hook(self._before, track)))
            handles.append(track.optimizer.register_step_post_hook(self._hook(self._after, track)))
        if isinstance(loss, nn.Module) and self._writes:
            handles.append(loss.register_forward_hook(self._computed))
        return handles

    def _hook(self, act: Callable[[Track], None], track: Track) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if torch.compiler.is_compiling():
                self._uncompiled(act, track)
            elif not is_capturing():  # hooks are not part of a graph, and its steps are replayed without them
                self._safely(act, track)

        return hook

    @_disable_dynamo
    def _uncompiled(self, act: Callable[[Track], None], track: Track) -> None:
        self._safely(act, track)

    def _safely(self, act: Callable[..., None], *arguments: Any) -> None:
        """Whatever goes wrong here, training goes on: it is said once, and recording stops."""
        if not self._active or self.error is not None:
            return
        try:
            # Inner products must not be taken in the precision of a surrounding autocast.
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                act(*arguments)
        except Exception as error:
            self.error = error
            expected = isinstance(error, GyroscopeError)
            said = str(error) if expected else f"{type(error).__name__}: {error}"
            _LOG.error("The monitor of %s has stopped, training goes on. %s", self.path, said, exc_info=not expected)
            if self._recorder is not None:
                self._recorder.event(self.steps, "error", f"recording stopped: {said}")
            for detail in self._details:
                detail.detach()

    def _before(self, track: Track) -> None:
        self._arrive()
        with self._own:
            self._begin()
            track.measuring = self._pace.due(track.taken + 1, track.measured_at)
            if track.measuring:
                track.before()
            elif track.fresh:
                track.anchor()
        self._left = perf_counter()

    def _after(self, track: Track) -> None:
        self._arrive()
        measured, sampled = track.measuring, self._sampling
        with self._own:
            track.taken += 1
            track.count_skipped()
            if measured:
                track.measuring = False
                self._hand_over(track)
        if track is self._tracks[0]:
            self._account(measured, sampled)
        self._left = perf_counter()

    def _by_hand(self, track: Track) -> None:
        self._begin()
        track.taken += 1
        if self._pace.due(track.taken, track.measured_at):
            self._hand_over(track)
            track.anchor()
            self._pace.forced = max(0, self._pace.forced - 1)

    def _hand_over(self, track: Track) -> None:
        part = self._tracks.index(track)
        measured = track.measure()
        detail = self._details[part].collect(track) if self._sampling else {}
        if self._recorder is None:
            return
        if not self._recorder.measured(part, measured, detail):
            if self._recorder.writer.error is not None:
                raise self._recorder.writer.error
            if not self._sharded:
                self._event("interval", self._pace.overrun())
        if self._loss is not None and part == 0:
            self._log(given.numbers({"loss": self._loss()}))

    def _arrive(self) -> None:
        if self._left is not None:
            self._outside += perf_counter() - self._left

    def _account(self, measured: bool, sampled: bool) -> None:
        """Learn what this step cost, and decide on the next."""
        outside, self._outside = self._outside, 0.0
        own = self._own.take()
        self._pace.account(
            self.steps, outside=outside, own=own, measured=measured, sampled=sampled, exposed=self._tracks[0].caught_up
        )
        said = None
        if not self._sharded:
            said = self._pace.stretch()
        elif measured:
            said = self._pace.agree(self._tracks[0].parameters()[0].device)
        if said is not None:
            self._event("interval", said)
        if self._recorder is not None and self._recorder.asked and not self._sharded:
            steps, self._recorder.asked = self._recorder.asked, 0
            self._event("note", f"{steps} steps in detail were asked for through the file {SIGNAL!r}")
            self._pace.sample(steps, after=self.steps)
        self._arm()

    def _arm(self) -> None:
        """Put forward hooks on where the coming step is looked at in detail, and take them off where it is not."""
        self._sampling = False
        if self._tracks and self._active and self.error is None:
            first = self._tracks[0]
            coming = first.taken + 1
            self._sampling = self._pace.due(coming, first.measured_at) and self._pace.detailed(coming)
        for detail in self._details:
            if self._sampling:
                self._safely(detail.attach)
            else:
                detail.detach()

    # The first row, the last, and what is not measured.

    def _begin(self) -> None:
        """Open the run, where it was left off if it exists, and record the weights before the first step."""
        if self._begun:
            return
        self._begun = True
        start, said, new_reference = self._where_to_begin()
        if not self._loaded:
            for track in self._tracks:
                track.start(start)
        file = file_of(1 if self._existing is None else self._existing.attempts + 1)
        if self._writes and self._recorder is None:
            self._open(start, file if new_reference else None)
        if self._recorder is not None:
            self._recorder.start()
        self._event("start" if self._existing is None else "resume", f"{said}; reference held in {self.held}")
        for why in {detail.why_not for detail in self._details} - {None}:
            self._event("note", f"activations are not measured: {why}")
        if new_reference:
            saved = Saved.of(self._tracks)
            if self._recorder is not None:
                self._recorder.reference(saved, file)
        if start == 0:
            self._measure_without_gradients()
        self._pace.next_detail = max(self._pace.next_detail, start + 1)

    def _where_to_begin(self) -> tuple[int, str, bool]:
        """The step, the reason in words, and whether the reference is a new one."""
        before = self._existing
        if before is None:
            return self.steps if self._loaded else self._step_given or 0, f"{len(self.layers)} layers", True
        if self._loaded:
            return self.steps, f"resumed from a checkpoint at step {self.steps}", False
        step = self._step_given if self._step_given is not None else before.step_of(self._tracks, self._members)
        if step is None:
            _LOG.warning(
                "%s holds a run of this model up to step %d, and the weights are those of none of its steps: a new "
                "attempt is recorded from step 0, the old one is kept. To go on with it, load its checkpoint before "
                "`watch`, give `step=`, or call `monitor.load_state_dict`.", self.path, before.last,
            )  # fmt: skip
            return 0, f"a new attempt; the one before had reached step {before.last}", True
        if not self._own_reference:
            saved = before.reference()
            for track in self._tracks:
                track.exchange(saved.hold(track, *self._held))
        return step, f"resumed at step {step}", self._own_reference

    def _open(self, step: int, reference_file: str | None) -> None:
        meta = self._meta if reference_file is None else {**self._meta, "reference_file": reference_file}
        self._recorder = Recorder(
            self.path, self._table, self._tracks, self._details, self._quantities, self._pace.clock,
            step=step, meta=meta, sinks=self._sinks,
        )  # fmt: skip

    def _measure_without_gradients(self) -> None:
        for part, track in enumerate(self._tracks):
            measured = track.measure(gradients=False)
            if self._recorder is not None:
                self._recorder.measured(part, measured, {})

    def _end(self) -> None:
        self._begin()
        if any(track.taken > track.measured_at for track in self._tracks):
            self._measure_without_gradients()
        if self._pace.dropped:
            self._event("interval", f"{self._pace.dropped} measurements were dropped: the disk could not keep up")

    def _log(self, numbers: Mapping[str, Any]) -> None:
        self._begin()
        if self._recorder is not None:
            self._recorder.scalars(self.steps, numbers)

    def _computed(self, _: nn.Module, __: Any, value: Any) -> None:
        """The loss module has computed a value."""
        if isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad and not is_capturing():
            self._safely(self._log, {"loss": value.detach()})

    def _event(self, kind: str, text: str) -> None:
        if self._recorder is not None:
            self._recorder.event(self.steps, kind, text)


def _check_neurons(layers: Sequence[Layer], wanted: bool, sharded: bool) -> None:
    if wanted:
        neurons.check(layers, sharded)
