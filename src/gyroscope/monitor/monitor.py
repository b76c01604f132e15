"""The monitor: what a user holds, what happens around each step, and the wall between both and training."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from numbers import Integral, Real
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from gyroscope.base.accepted import real, text
from gyroscope.base.alone import listens
from gyroscope.base.outermost import register_outermost
from gyroscope.errors import GyroscopeError, MonitorError, StoreError
from gyroscope.layers.layer import Layer
from gyroscope.monitor.clock import Cost, Pace, Stopwatch
from gyroscope.monitor.detail import Detail
from gyroscope.monitor.recorder import About, Chronicle, Recorder
from gyroscope.monitor.reference import Reference
from gyroscope.monitor.resume import Saved, check_state
from gyroscope.monitor.track import Track
from gyroscope.store import Run, load
from gyroscope.store.folder import REQUEST
from gyroscope.vectors.chunks import is_capturing

if TYPE_CHECKING:
    from gyroscope.conditioning.schedule import Schedule

_LOG = logging.getLogger("gyroscope")


@contextmanager
def plainly() -> Iterator[None]:
    """Without gradients; nor in the precision of a surrounding autocast, nor in a surrounding inference mode.

    Inner products would lose their digits in the first, and tensors of the second cannot be used again.

    >>> with torch.inference_mode(), plainly():
    ...     torch.zeros(1).is_inference()
    False
    """
    with torch.inference_mode(False), torch.no_grad():
        if torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                yield
        else:
            yield


class Monitor:
    """Measures the layers of a model at the steps of its optimizer; made by `gyroscope.watch`, which says how.

    Attributes:
        path: the run's folder; None where `run` was not given and another rank, which holds a replica, records.
        layers: the names of the layers, in forward order.
        error: what made the monitor stop, if something did. Training is never stopped by it.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        optimizers: Sequence[Optimizer],
        about: About,
        pace: Pace,
        *,
        path: Path | None,
        loss: Any,
        activations: bool,
        neurons: bool,
        threshold: float,
        conditioning: Schedule | None,
        reference: Sequence[Tensor] | None,
        step: int | None,
    ) -> None:
        self.path = path
        self.layers = tuple(layer.name for layer in layers)
        self.error: Exception | None = None
        self._sharded, self._held, self._table = about.shared, about.held, about.layers
        # Ranks that hold replicas have nothing to add; ranks that hold shards are all needed.
        self._active = about.shared or about.writes
        self._pace = pace
        self._tracks: list[Track] = []
        self._details: list[Detail] = []
        self._handles: list[Any] = []
        self._chronicle = Chronicle(about, step=step, own_reference=reference is not None)
        try:
            moves = any({"pp", "vp"} & one.needs for one in about.quantities)
            precision, place = about.held
            with plainly():
                for members, its_optimizer in zip(about.members if self._active else (), optimizers, strict=False):
                    its = [layers[i] for i in members]
                    start = None if reference is None else [reference[i] for i in members]
                    weights = [layer.parameter for layer in its]
                    held = Reference.take(weights, start, precision=precision, place=place)
                    self._tracks.append(Track(its, its_optimizer, held, moves=moves))
                    detail = Detail(
                        model, its, its_optimizer, activations=activations, spread=neurons, threshold=threshold,
                        conditioning=conditioning, shared=about.shared,
                    )  # fmt: skip
                    self._details.append(detail)
                self._chronicle.prepare(self._tracks, self._details, pace.clock)
            given_loss = None if isinstance(loss, nn.Module) else loss
            self._loop = Loop(self._tracks, self._details, pace, self._chronicle, given_loss)
            self._attach(loss)
        except BaseException:
            for handle in self._handles:
                handle.remove()
            with suppress(OSError):  # the failure is what is said
                self._chronicle.discard()
            raise
        self._safely(self._loop.arm)

    @property
    def every(self) -> int:
        """Measure every so many steps; can be changed at any time. After a while the budget may stretch it again.

        Of a sharded model the first rank decides, and the others hear of it within 32 measurements.
        """
        return self._pace.every

    @every.setter
    def every(self, value: int) -> None:
        check_numbers(every=value)
        self._pace.set_every(int(value))
        self._safely(self._loop.arm)

    @property
    def interval(self) -> int:
        """The number of steps between measurements now: `every`, or more where the budget asks for it."""
        return self._pace.interval

    @property
    def steps(self) -> int:
        """How many steps the optimizer has taken; of several, the one that has taken most."""
        return self._chronicle.steps

    @property
    def run(self) -> Run:
        """The run, to read, with everything measured so far in it."""
        if self.path is None:
            raise MonitorError("The first rank records this run, in a new folder: ask there, or give watch a `run`.")
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
        self._safely(self._chronicle.log, numbers(values, named))

    def note(self, text: str) -> None:
        """Record something that happened at this step, in words."""
        self._safely(self._chronicle.event, "note", str(text))

    def sample(self, next_steps: int = 5) -> None:
        """Measure the next steps, every one of them and in detail, whatever the interval.

        Of a sharded model the first rank decides, and the others hear of it within 32 measurements.
        """
        check_numbers(next_steps=next_steps)
        if self._sharded:  # all ranks must look at the same steps: the first one asks, when they next agree
            self._pace.requested = int(next_steps)
        else:
            self._safely(self._loop.ask_for, int(next_steps))

    @property
    def looks_inside(self) -> bool:
        """Whether the coming step is one whose activations or conditioning are recorded, by hooks on the model.

        No hook runs while a CUDA graph is replayed. Take such a step without the graph, through `optimizer.step`.
        """
        return self._loop.looks_inside

    def measure(self) -> None:
        """Count a step, and measure it if it is due, in a loop that does not call `optimizer.step`.

        For steps that are replayed as a CUDA graph, which no hook sees. The first time there is nothing to compare the
        weights with, so rates begin with the second. Before a replay ask `looks_inside`.
        """
        for track in self._tracks:
            with self._loop.stopwatch:
                self._safely(self._loop.by_hand, track, joining=self._sharded)

    def cost(self) -> Cost:
        """What measuring costs, as a share of the training time and in seconds."""
        pace = self._pace
        return pace.clock.cost(
            interval=pace.interval, details=pace.detail_interval, steps=pace.taken, measured=pace.measurements,
            held=self.held, analyses=pace.analysis_interval,
        )  # fmt: skip

    def flush(self, timeout: float | None = None) -> None:
        """Return when everything measured and logged so far is on disk.

        The run of a sharded model begins with its first step, and the weights before it are recorded then.

        Raises:
            StoreError: some of it could not be worked out or written, recording has stopped (see `error`), or a sharded
                model has not taken its first step since its run was resumed.
        """
        check_numbers(timeout=timeout)
        # Ranks that measure together begin together, at a step.
        self._safely(self._chronicle.drain if self._sharded else self._chronicle.begin)
        if self._recorder is not None:
            self._recorder.flush(None if timeout is None else float(timeout))
        if self.error is not None:
            said = str(self.error) or type(self.error).__name__
            raise StoreError(f"Recording of {self.path} has stopped, and what came after is lost: {said}")
        if self._chronicle.waits:
            raise StoreError(
                f"{self.path} is resumed at the first step of all ranks. What was logged before waits until then; "
                "flush after it."
            )

    def close(self, *, interrupted: bool = False) -> None:
        """Record the last step, take every hook off and finish the run; its state is "ended" unless `interrupted`."""
        self._detach()
        self._safely(self._loop.end)
        self._finish(interrupted=interrupted)

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._loop.rest()

    def _finish(self, *, interrupted: bool = False) -> None:
        self._active = self._loop.alive = False
        self._chronicle.drain()
        for track in self._tracks:
            track.release()
        self._chronicle.close(interrupted=interrupted)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None:
            try:
                said = f"{type(error).__name__}: {error}"
            except Exception:  # its __str__ fails
                said = type(error).__name__
            self._safely(self._chronicle.event, "stop", f"stopped by {said}")
        if error is None or not self._sharded:
            self.close(interrupted=error is not None)
        else:
            self._detach()  # other ranks may not come here, so there is nothing that waits for them
            self._finish(interrupted=True)

    def __repr__(self) -> str:
        every = f"every {self.interval} steps" if self.interval > 1 else "every step"
        where = "recorded by the first rank" if self.path is None else repr(str(self.path))
        return f"Monitor({where}: {len(self.layers)} layers, {every}, {self.steps} steps so far)"

    def __reduce__(self) -> NoReturn:
        raise MonitorError(
            "A monitor cannot be copied or pickled: it hangs on an optimizer, and writes a run. Leave it out of what "
            "is copied; its state_dict() can be."
        )

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
        check_state(state, self.layers, [info.shape for info in self._table], len(self._tracks))
        saved = Saved(state["reference"], state["squares"])
        with plainly():
            references = [saved.hold(track, *self._held) for track in self._tracks]
            for track, held, taken in zip(self._tracks, references, state["steps"], strict=True):
                track.exchange(held)
                track.start(int(taken))
        self._chronicle.restart()
        self._safely(self._loop.arm)

    @property
    def _recorder(self) -> Recorder | None:
        return self._chronicle.recorder

    def _attach(self, loss: Any) -> None:
        handles = self._handles
        for track in self._tracks:
            before, after = (self._hook(act, track) for act in (self._loop.before, self._loop.after))
            handles += register_outermost(track.optimizer, before, after)
        if isinstance(loss, nn.Module) and self._active:
            handles.append(loss.register_forward_hook(_LossHook(self._computed)))

    def _computed(self, numbers: dict[str, Any]) -> None:
        self._safely(self._chronicle.log, numbers)

    def _hook(self, act: Callable[[Track], None], track: Track) -> Callable[..., None]:
        stopwatch = self._loop.stopwatch

        def hook(*_: Any) -> None:
            if torch.compiler.is_compiling():
                self._uncompiled(act, track)
            elif not is_capturing():  # hooks are not part of a graph, and its steps are replayed without them
                with stopwatch:
                    self._safely(act, track, joining=self._sharded, within=nullcontext)

        return hook

    @_disable_dynamo
    def _uncompiled(self, act: Callable[[Track], None], track: Track) -> None:
        with self._loop.stopwatch:
            self._safely(act, track, joining=self._sharded)

    def _safely(
        self,
        act: Callable[..., None],
        *arguments: Any,
        joining: bool = False,
        within: Callable[[], AbstractContextManager[None]] = plainly,
    ) -> None:
        """Whatever goes wrong here, training goes on: it is said once, and recording stops.

        With `joining` it is done even then, because other ranks wait for this one's part.
        """
        if not self._active or (self.error is not None and not joining):
            return
        try:
            with within():
                act(*arguments)
        except Exception as error:
            if self.error is None:
                self.error = error
                self._loop.recording, self._loop.alive = False, self._sharded
                with suppress(Exception):
                    self._say(error)

    def _say(self, error: Exception) -> None:
        self._loop.rest()
        if self._recorder is not None and error is self._recorder.writer.error:
            return  # the writer has said it
        expected = isinstance(error, GyroscopeError)
        said = str(error) if expected else f"{type(error).__name__}: {error}"
        _LOG.error("The monitor of %s has stopped, training goes on. %s", self.path, said, exc_info=not expected)
        self._chronicle.event("error", f"recording stopped: {said}")
        self._chronicle.drain()


class _LossHook:
    """Tells what a loss module computes; copies of the module, which may go anywhere, tell nothing."""

    def __init__(self, tell: Callable[[dict[str, Any]], None] | None) -> None:
        self.tell = None if tell is None else weakref.WeakMethod(tell)

    def __call__(self, module: nn.Module, arguments: Any, value: Any) -> None:
        """The forward hook."""
        if torch.compiler.is_compiling() or self.tell is None or is_capturing() or not listens(self):
            return
        tell = self.tell()
        if tell is not None and isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad:
            tell({"loss": value.detach()})

    def __reduce__(self) -> tuple[type[_LossHook], tuple[None]]:
        return _LossHook, (None,)


class Loop:
    """Measures the steps that are due, and decides which are.

    Attributes:
        recording: whether what is measured is still told; a rank that others wait for goes on without.
        alive: whether anything is measured at all.
        stopwatch: is entered around all of this, and what is around that.
    """

    def __init__(
        self,
        tracks: Sequence[Track],
        details: Sequence[Detail],
        pace: Pace,
        chronicle: Chronicle,
        loss: Callable[[], Any] | None,
    ) -> None:
        self.tracks, self.details, self.pace, self.chronicle = tracks, details, pace, chronicle
        self.recording = True
        self.alive = True
        self._loss = loss
        self._loss_failed = False
        self.stopwatch = Stopwatch()

    def before(self, track: Track) -> None:
        """A step is about to be taken."""
        # Decided before anything can fail: other ranks may be waiting for this one's part.
        track.measuring = self._due(track)
        if track.measuring or track.fresh or not self.chronicle.begun:
            with plainly():
                self._prepare(track)

    def after(self, track: Track) -> None:
        """It was taken."""
        measured = track.measuring
        track.measuring = False
        # Most steps are neither measured nor perhaps skipped, and do nothing that gradients could be in the way of.
        with plainly() if measured or track.may_skip else nullcontext():
            try:
                self._take(track, measured, analysed=track.conditioning)
            finally:
                self.arm(track)

    def _prepare(self, track: Track) -> None:
        if not self.chronicle.begun:
            self.chronicle.begin()
            track.measuring = self._due(track)  # the step may be another one now
            track.sampling = track.sampling and track.measuring
        if track.measuring:
            self._analyse(track)
            track.before()
        else:
            track.pass_by()

    def _take(self, track: Track, measured: bool, *, analysed: bool, seen: bool = True) -> None:
        """Count a step, measure it if it is to be, and say which are next; `seen` if a hook has seen it begin."""
        sampled = track.sampling
        try:
            if seen and track.skipped():
                track.leave()
                return
            self._count(track)
            if measured:
                self._measure(track)
            self._look_ahead(track, measured, sampled, analysed)
        except Exception:
            if self.pace.shared:  # other ranks go on to count on this one
                self._look_ahead(track, measured, sampled, analysed)
            raise

    def _look_ahead(self, track: Track, measured: bool, sampled: bool, analysed: bool) -> None:
        if sampled:
            track.next_detail = track.taken + self.pace.detail_interval
        if track is self.tracks[0]:
            self._account(measured, sampled, analysed)
        if analysed:
            track.analysed_at = track.taken
        if track.analysed_at is not None:
            # Known better with every step, as long as the price of the first is being learnt.
            track.next_conditioning = self.pace.next_conditioning(track.analysed_at)

    def _analyse(self, track: Track) -> None:
        conditioned = self.details[self.tracks.index(track)].conditioned
        if not track.conditioning or conditioned is None:
            return
        # A fused optimizer divides by the scale of the loss itself, within the step.
        problem = conditioned.analyse(scale=getattr(track.optimizer, "grad_scale", None))
        if problem is not None:
            self.chronicle.event("error", problem)

    def by_hand(self, track: Track) -> None:
        """A step was taken that no hook has seen."""
        try:
            self.chronicle.begin()
            track.unseen()
            measured = self._due(track)
            track.sampling = track.sampling and measured
            self._take(track, measured, analysed=False, seen=False)
        finally:
            self.arm(track)

    @property
    def looks_inside(self) -> bool:
        """Whether forward hooks are on, to look at the coming step."""
        return any(detail.looks_inside for detail in self.details)

    def ask_for(self, steps: int) -> None:
        """Measure the next steps, all of them and in detail."""
        self.pace.requested = 0
        for track in self.tracks:
            track.asked_for = max(track.asked_for, steps)
            track.next_detail = track.taken + 1
        self.arm()

    def arm(self, only: Track | None = None) -> None:
        """Put forward hooks on where the coming step is looked at in detail, and take them off where it is not."""
        for track, detail in zip(self.tracks, self.details, strict=True):
            if only is None or track is only:
                wanted = track.taken + 1 >= track.next_detail or track.asked_for > 0
                track.sampling = self.alive and wanted and self._due(track)
                if track.sampling:
                    with plainly():
                        detail.attach()
                elif detail.attached:
                    detail.detach()
                self._arm_conditioning(track, detail)

    def _arm_conditioning(self, track: Track, detail: Detail) -> None:
        conditioned = detail.conditioned
        if conditioned is not None:
            wanted = track.taken + 1 >= track.next_conditioning or track.asked_for > 0
            track.conditioning = self.alive and wanted and conditioned.error is None and self._due(track)
            if track.conditioning:
                with plainly():
                    conditioned.attach()
            else:
                conditioned.detach()

    def rest(self) -> None:
        """Take every forward hook off."""
        for detail in self.details:
            detail.detach()
            if detail.conditioned is not None:
                detail.conditioned.detach()

    def end(self) -> None:
        """The last step was taken."""
        self.chronicle.end()
        for detail in self.details:
            if (said := detail.exchanged.said(ended=True)) is not None:
                self.chronicle.event("note", said)
        if self.pace.dropped:
            text = f"{self.pace.dropped} measurements were dropped: the disk could not keep up"
            self.chronicle.event("interval", text)

    def _due(self, track: Track) -> bool:
        return self.pace.due(track.taken + 1, track.tried_at, asked_for=track.asked_for > 0)

    def _count(self, track: Track) -> None:
        """A step was taken. Each optimizer counts its own: others may have taken more, or be about to take theirs."""
        track.taken += 1
        track.asked_for = max(0, track.asked_for - 1)

    def _measure(self, track: Track) -> None:
        part = self.tracks.index(track)
        failed: Exception | None = None
        try:
            measured = track.measure()
        except Exception as error:
            if not self.pace.shared:
                raise
            failed = error
        # Other ranks take part in this too.
        detail = self.details[part].collect(track) if track.sampling or track.conditioning else {}
        if failed is not None:
            track.settle()
            raise failed
        if track.sampling:
            self._tell_exchanged(part)
        kept = not self.recording or self.chronicle.measured(part, measured, detail)
        track.settle(recorded=kept or self.pace.shared)
        recorder = self.chronicle.recorder
        if not kept and recorder is not None:
            if recorder.writer.error is not None:
                raise recorder.writer.error
            if not self.pace.shared:
                self.chronicle.event("interval", self.pace.overrun())
        if part == 0 and self.recording:
            self._tell_loss()

    def _tell_loss(self) -> None:
        if self._loss is None:
            return
        try:
            told = numbers(None, {"loss": self._loss()})
        except Exception as error:  # of the user's function, which may have no value yet; all else is recorded
            if not self._loss_failed:
                self._loss_failed = True
                said = f"the loss function failed: {type(error).__name__}: {error} (reported once; recording goes on)"
                self.chronicle.warn(said)
        else:
            self.chronicle.log(told)

    def _tell_exchanged(self, part: int) -> None:
        said = self.details[part].exchanged.said()
        if said is not None and self.recording:
            self.chronicle.warn(said)

    def _account(self, measured: bool, sampled: bool, analysed: bool) -> None:
        """Learn what this step cost, and decide on the next."""
        outside, own = self.stopwatch.take()
        first, recorder = self.tracks[0], self.chronicle.recorder
        self.pace.account(
            outside=outside, own=own, measured=measured, sampled=sampled, exposed=first.caught_up,
            analysed=analysed,
        )  # fmt: skip
        if recorder is not None and recorder.asked:
            self.pace.requested, recorder.asked = recorder.asked, 0
            text = f"{self.pace.requested} steps in detail were asked for through the file {REQUEST!r}"
            self.chronicle.event("note", text)
        said = None
        if not self.pace.shared:
            said = self.pace.stretch()
        elif measured:
            said = self.pace.agree(first.parameters()[0].device)
        if said is not None:
            self.chronicle.event("interval", said)
        if self.pace.requested and (not self.pace.shared or self.pace.agreed_on):
            self.ask_for(self.pace.requested)


def check_numbers(**values: Any) -> None:
    """Counts are whole numbers from 1 (steps from 0), a budget is a share, a timeout seconds, a threshold a number."""
    for name, value in values.items():
        if value is None and name in ("budget", "step", "timeout"):
            continue
        least = 0 if name == "step" else 1
        match name:
            case "threshold":
                fine, accepted = _is_real(value), "a finite number"
            case "budget":
                fine, accepted = _is_real(value) and value > 0, "a share of the time above 0, or None"
            case "timeout":
                fine, accepted = 0 <= real(value) <= TIMEOUT_MAX, "a number of seconds from 0, or None to wait"
            case _:
                fine = not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= least
                accepted = f"a whole number from {least}"
        if not fine:
            raise MonitorError(f"{name} is {value!r}; accepted is {accepted}.")


def _is_real(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(real(value))


def numbers(values: Any, named: Mapping[str, Any]) -> dict[str, Any]:
    """What `log` was given: numbers, and tensors of one element."""
    if values is not None and not isinstance(values, Mapping):
        raise MonitorError(f"log was given {values!r}; accepted are names and numbers, such as log(loss=0.3).")
    return {_named(name): _number(name, value) for name, value in {**(values or {}), **named}.items()}


def _named(name: Any) -> str:
    if not text(name):
        raise MonitorError(f"log was given the name {name!r}; accepted are words, such as log(loss=0.3).")
    return str(name)


def _number(name: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.numel() == 1 and not value.is_complex():
            return value.detach()
    elif isinstance(value, Real) or (isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "fiub"):
        try:
            return float(value.item() if isinstance(value, np.ndarray) else value)
        except (OverflowError, TypeError, ValueError):
            pass
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    raise MonitorError(
        f"log was given {name}={type(value).__name__}{shape}; accepted are numbers and tensors of one element "
        "(`.mean()` makes one). Words go to `note`."
    )
