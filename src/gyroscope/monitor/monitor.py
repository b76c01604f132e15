"""The monitor: its public methods, what happens around each step, and the wall that keeps errors out of training."""

from __future__ import annotations

import logging
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from numbers import Integral, Real
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from gyroscope.base.accepted import real, text
from gyroscope.base.hooks import is_capturing, listens, register_outermost
from gyroscope.diagnosis.course import RANKS_DIFFER
from gyroscope.diagnosis.finding import Finding, FindingError
from gyroscope.errors import GyroscopeError, MonitorError, StoreError
from gyroscope.layers.layer import Layer
from gyroscope.monitor import clock
from gyroscope.monitor.adapters import AdaptedDetail
from gyroscope.monitor.clock import Cost, Pace, Stopwatch
from gyroscope.monitor.detail import Detail, layer_modules
from gyroscope.monitor.recorder import About, Chronicle, Recorder
from gyroscope.monitor.reference import Reference, frozen_like
from gyroscope.monitor.replicas import Replicas
from gyroscope.monitor.resume import Saved, check_state
from gyroscope.monitor.track import Track
from gyroscope.store import Run, load
from gyroscope.store.folder import REQUEST

if TYPE_CHECKING:
    from gyroscope.conditioning.schedule import Schedule

_LOG = logging.getLogger("gyroscope")
T = TypeVar("T")


@contextmanager
def plainly() -> Iterator[None]:
    """Disable gradients, autocast and inference mode.

    Under autocast, inner products would lose digits; tensors made in inference mode could not be used again.

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


class Raised:
    """Keeps a serious finding until the training loop takes its next step, where it is raised.

    Ranks that measure together raise together, when they next agree; those that do not record raise a finding without
    details.
    """

    def __init__(self) -> None:
        self.pace: Pace | None = None
        self._finding: Finding | None = None

    def __call__(self, finding: Finding) -> None:
        """Keep the first serious finding."""
        if finding.severity == "serious" and self._finding is None:
            self._finding = finding
            if self.pace is not None:
                self.pace.stopping = True

    def throw(self) -> None:
        """Raise the finding that is kept, once."""
        if self.pace is not None and self.pace.shared:
            if not self.pace.stopped:
                return
            self.pace.stopped = self.pace.stopping = False
            unknown = Finding("unknown", "serious", (), None, "The first rank has a serious finding.")
            raise FindingError(self._finding or unknown)
        kept, self._finding = self._finding, None
        if kept is not None:
            raise FindingError(kept)


class Monitor:
    """Measures the layers of a model at the steps of its optimizer; made by `gyroscope.watch`.

    Attributes:
        path: the run's folder; None on a rank that holds a replica, where `run` was not given.
        layers: the names of the layers, in forward order.
        error: the error that stopped the monitor, or None. Errors of the monitor never stop training.
        live: the address of the page that shows the run, where `watch(live=True)` has started one; None otherwise.

    >>> import tempfile, torch, gyroscope
    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with tempfile.TemporaryDirectory() as folder, gyroscope.watch(model, optimizer, folder) as monitor:
    ...     for _ in range(2):
    ...         model(torch.ones(1, 3)).sum().backward(); optimizer.step()
    ...     monitor.note("two steps")
    ...     monitor.flush()
    ...     monitor.layers, monitor.error, monitor.run.steps.tolist()
    (('weight',), None, [0, 1, 2])
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
        self.live: str | None = None
        self._sharded, self._held, self._table = about.shared, about.held, about.layers
        # A replica adds nothing to what the first rank measures; shards are all needed.
        self._active = about.shared or about.writes
        self._pace = pace
        self._tracks: list[Track] = []
        self._details: list[Detail] = []
        self._handles: list[Any] = []
        self._raised = about.on_finding if isinstance(about.on_finding, Raised) else None
        if self._raised is not None:
            self._raised.pace = pace
        self._chronicle = Chronicle(about, step=step, own_reference=reference is not None)
        try:
            moves = any({"pp", "vp"} & one.needs for one in about.quantities)
            modules = layer_modules(model)
            with plainly():
                for members, its_optimizer in zip(about.members if self._active else (), optimizers, strict=False):
                    its = [layers[i] for i in members]
                    start = None if reference is None else [reference[i] for i in members]
                    weights = [layer.parameter for layer in its]
                    held = Reference.take(weights, start, about.held, frozen=frozen_like(weights, start))
                    self._tracks.append(Track(its, its_optimizer, held, moves=moves))
                    detail = AdaptedDetail(
                        model, its, its_optimizer, modules=modules, activations=activations, spread=neurons,
                        threshold=threshold, conditioning=conditioning, shared=about.shared,
                        ends=len(layers) - 1 in members,
                    )  # fmt: skip
                    self._details.append(detail)
                self._chronicle.prepare(self._tracks, self._details, pace.clock)
            given_loss = None if isinstance(loss, nn.Module) else loss
            self._loop = Loop(self._tracks, self._details, pace, self._chronicle, given_loss)
            self._attach(loss)
            if about.diagnoses and not about.shared:
                # Frozen weights are the same on all ranks, whatever happens to the others.
                trained = [layer for layer in layers if layer.parameter.requires_grad]
                replicas = Replicas.of(trained or layers, self._compared if about.writes else None)
                if replicas is not None:
                    self._handles.append(replicas.follow(optimizers[0]))
        except BaseException:
            for handle in self._handles:
                handle.remove()
            with suppress(OSError):  # the first error is the one to raise
                self._chronicle.discard()
            raise
        self._safely(self._loop.arm)

    @property
    def every(self) -> int:
        """Number of steps between measurements, which you can change at any time; the budget may stretch it later.

        For a sharded model the first rank decides, and the others follow within 32 measurements.
        """
        return self._pace.every

    @every.setter
    def every(self, value: int) -> None:
        check_numbers(every=value)
        self._pace.set_every(int(value))
        self._safely(self._loop.arm)

    @property
    def interval(self) -> int:
        """Current number of steps between measurements: `every`, or more to stay within the budget."""
        return self._pace.interval

    @property
    def steps(self) -> int:
        """Number of steps that the optimizer has taken; of several optimizers, the largest number."""
        return self._chronicle.steps

    @property
    def run(self) -> Run:
        """The run, to read, with everything that was measured so far, and logged since the first step."""
        if self.path is None:
            raise MonitorError("The first rank records this run, in a new folder. Ask there, or pass `run` to watch.")
        self._write_out()
        return load(self.path)

    @property
    def held(self) -> str:
        """Precision, place and size of the reference weights, in words."""
        return "; ".join(track.reference.held for track in self._tracks)

    @property
    def bytes(self) -> int:
        """Bytes that are held between steps on this rank, for the reference and the last displacement."""
        return sum(bundle.bytes for track in self._tracks for bundle in track.reference.all_bundles)

    def log(self, values: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        """Record numbers of the whole network at this step, such as a loss; does not wait for tensors on a GPU."""
        numbers = _numbers(values, named)
        if not self._chronicle.drops(", ".join(numbers)):
            self._safely(self._chronicle.log, numbers)

    def note(self, text: str) -> None:
        """Record something that happened at this step, in words."""
        if not self._chronicle.drops("a note"):
            self._safely(self._chronicle.event, "note", str(text))

    def progress(self, iterable: Iterable[T], **options: Any) -> Iterable[T]:
        """Loop over `iterable` with a tqdm that also shows the step, the logged loss, the mean rotation and findings.

        The line is drawn a few times per second, from what is in host memory already: it never waits for a GPU. Ranks
        that do not record show none.

        Args:
            iterable: for example a data loader.
            **options: of tqdm, such as desc="epoch 1" or leave=False.

        Raises:
            MissingExtraError: tqdm is not installed.

        Example: `for x, y in monitor.progress(loader): ...` shows
            64%|██████▍   | 750/1172 [00:31<00:17, 24.1it/s, step 1,922, loss 0.312, rotation 0.41, 1 finding]
        """
        from gyroscope.monitor.progress import progress

        return progress(iterable, self, **options)

    def sample(self, next_steps: int = 5) -> None:
        """Measure each of the next steps in detail, whatever the interval.

        For a sharded model the first rank decides, and the others follow within 32 measurements.
        """
        check_numbers(next_steps=next_steps)
        if self._sharded:  # all ranks must measure the same steps: the first one asks when they next agree
            self._pace.requested = int(next_steps)
        else:
            self._safely(self._loop.ask_for, int(next_steps))

    @property
    def looks_inside(self) -> bool:
        """True if hooks on the model will record the activations or the conditioning of the coming step.

        Hooks do not run while a CUDA graph is replayed. Take such a step without the graph, through `optimizer.step`.
        """
        return self._loop.looks_inside

    def measure(self) -> None:
        """Count a step, and measure it if it is due, in a loop that does not call `optimizer.step`.

        Use it for steps that are replayed as a CUDA graph, which hooks do not see. Rotation rates begin with the second
        call, because the first has no earlier weights to compare with. Check `looks_inside` before a replay.
        """
        for track in self._tracks:
            with self._loop.stopwatch:
                self._safely(self._loop.by_hand, track, joining=self._sharded)
        self._throw()

    def record(self) -> None:
        """Record the weights after the last step, if that step was not due; `close` does the same.

        Use it before the weights are replaced, for example by those of the best checkpoint. All ranks of a sharded
        model must call it together.
        """
        self._safely(self._chronicle.record, joining=self._sharded)

    def cost(self) -> Cost:
        """Return the cost of measuring, as a share of the training time and in seconds."""
        pace = self._pace
        pace.average()
        return pace.clock.cost(
            interval=pace.interval, details=pace.detail_interval, steps=pace.taken, measured=pace.measurements,
            held=self.held, analyses=pace.analysis_interval, bytes=self.bytes,
            reference_bytes=sum(track.reference.bytes for track in self._tracks),
            sampled_share=min((track.reference.sampled_share for track in self._tracks), default=1.0),
        )  # fmt: skip

    def flush(self, timeout: float | None = None) -> None:
        """Return when everything measured and logged so far is on disk.

        The run of a sharded model begins at its first step, and the weights before that step are recorded then.

        Raises:
            StoreError: some of it could not be computed or written, recording has stopped (see `error`), logged
                values wait for the first step (of a sharded model, or of an attempt that will hide later steps), or
                came after `close`.
        """
        check_numbers(timeout=timeout)
        self._write_out(timeout)
        unwritten = self._chronicle.unwritten()
        if unwritten is not None:
            raise StoreError(unwritten)

    def _write_out(self, timeout: float | None = None) -> None:
        # Ranks that measure together begin together, at a step.
        self._safely(self._chronicle.drain if self._sharded else self._chronicle.open)
        if self._recorder is not None:
            self._recorder.flush(None if timeout is None else float(timeout))
        if self.error is not None:
            said = str(self.error) or type(self.error).__name__
            raise StoreError(f"Recording of {self.path} has stopped, and everything after that is lost: {said}")

    def close(self, *, interrupted: bool = False) -> None:
        """Record the last step, remove all hooks and finish the run; its state is "ended" unless `interrupted`."""
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
            self._detach()  # other ranks may not get here, so nothing may wait for them
            self._finish(interrupted=True)

    def __repr__(self) -> str:
        every = f"every {self.interval} steps" if self.interval > 1 else "every step"
        where = "recorded by the first rank" if self.path is None else repr(str(self.path))
        return f"Monitor({where}: {len(self.layers)} layers, {every}, {self.steps} steps so far)"

    def __reduce__(self) -> NoReturn:
        raise MonitorError(
            "A monitor cannot be copied or pickled: it has hooks on an optimizer and writes a run. Copy its "
            "state_dict() instead."
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs so that a later run can continue these curves: the steps and the reference.

        All ranks of a sharded model must call it together.
        """
        saved = Saved.of(self._tracks)
        return {
            "version": 1,
            "layers": list(self.layers),
            "shapes": [list(info.shape) for info in self._table],
            "steps": [track.taken for track in self._tracks],
            "reference": {name: tensor.cpu() for name, tensor in saved.tensors.items()},
            "squares": dict(saved.squares),
            "samples": {name: tensor.cpu() for name, tensor in saved.samples.items()},
            "frozen": list(saved.frozen),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a checkpoint: the curves continue at its step, measured from its reference.

        Raises:
            MonitorError: the state belongs to another model; nothing was changed.
        """
        if not self._active:
            return
        check_state(state, self.layers, [info.shape for info in self._table], len(self._tracks))
        saved = Saved(state["reference"], state["squares"], state.get("samples", {}), state.get("frozen", ()))
        stepped = self._chronicle.stepped
        with plainly():
            references = [saved.hold(track, self._held) for track in self._tracks]
            for track, held, taken in zip(self._tracks, references, state["steps"], strict=True):
                track.exchange(held)
                track.start(int(taken))
        self._chronicle.restart(stepped=stepped)
        self._safely(self._loop.arm)

    @property
    def _recorder(self) -> Recorder | None:
        return self._chronicle.recorder

    def _attach(self, loss: Any) -> None:
        handles = self._handles
        for track in self._tracks:
            unreal = self._hook(Track.rewritten, track)
            handles += register_outermost(track.optimizer, self._before(track), self._after(track), unreal)
        if isinstance(loss, nn.Module) and self._active:
            handles.append(loss.register_forward_hook(_LossHook(self._computed)))

    def _compared(self, value: float) -> None:
        self._safely(self._chronicle.log, {RANKS_DIFFER: value})

    def _computed(self, numbers: dict[str, Any]) -> None:
        self._safely(self._chronicle.log, numbers)

    def _before(self, track: Track) -> Callable[..., Any]:
        """Return the hook before a step. A closure that computes the gradients is followed by what needs them."""
        plain, evaluated = self._hook(self._loop.before, track), self._hook(self._loop.computed, track)

        skims = self._loop.skims

        def hook(optimizer: Optimizer, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
            if track.quiet > 0 and not named and len(given) == 1 and skims(track):
                return None
            closure: Any = None
            if named or len(given) > 1:
                closure = named.get("closure", given[1] if len(given) > 1 else None)
            track.closure = callable(closure) and not torch.compiler.is_compiling()
            plain()
            if not (track.closure and track.measuring):
                return None

            def followed(*arguments: Any, **more: Any) -> Any:
                loss = closure(*arguments, **more)
                evaluated()
                return loss

            if "closure" in named:
                return given, {**named, "closure": followed}
            return (given[0], followed, *given[2:]), named

        return hook

    def _after(self, track: Track) -> Callable[..., None]:
        """Return the hook after a step."""
        plain, skimmed = self._hook(self._loop.after, track), self._loop.skimmed

        def hook(*_: Any) -> None:
            if track.skimming:
                skimmed(track)
            else:
                plain()

        return hook

    def _hook(self, act: Callable[[Track], None], track: Track) -> Callable[..., None]:
        stopwatch = self._loop.stopwatch

        # Most steps are not measured: then this, around a few comparisons in `act`, is what they cost.
        def hook(*_: Any) -> None:
            if torch.compiler.is_compiling():
                self._uncompiled(act, track)
            elif not is_capturing():  # hooks are not part of a graph, and do not run when it is replayed
                with stopwatch:
                    if self._active and (self.error is None or self._sharded):
                        try:
                            act(track)
                        except Exception as error:
                            self._failed(error)
                self._throw()

        return hook

    @_disable_dynamo
    def _uncompiled(self, act: Callable[[Track], None], track: Track) -> None:
        with self._loop.stopwatch:
            self._safely(act, track, joining=self._sharded)
        self._throw()

    def _throw(self) -> None:
        if self._raised is not None:
            self._raised.throw()

    def _safely(self, act: Callable[..., None], *arguments: Any, joining: bool = False) -> None:
        """Call `act`. An error is reported once and stops recording; training continues.

        With `joining`, `act` is called even after an error, because other ranks wait for this one's part.
        """
        if not self._active or (self.error is not None and not joining):
            return
        try:
            with plainly():
                act(*arguments)
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        """Stop recording, and say so the first time."""
        if self.error is None:
            self.error = error
            self._loop.recording, self._loop.alive = False, self._sharded
            with suppress(Exception):
                self._say(error)

    def _say(self, error: Exception) -> None:
        self._loop.rest()
        if self._recorder is not None and error is self._recorder.writer.error:
            return  # the writer has reported it
        expected = isinstance(error, GyroscopeError)
        said = str(error) if expected else f"{type(error).__name__}: {error}"
        _LOG.error("The monitor of %s has stopped; training continues. %s", self.path, said, exc_info=not expected)
        self._chronicle.event("error", f"recording stopped: {said}")
        self._chronicle.drain()


class _LossHook:
    """Reports the loss that a module computes; copies of the module report nothing."""

    def __init__(self, tell: Callable[[dict[str, Any]], None] | None) -> None:
        self.tell = None if tell is None else weakref.WeakMethod(tell)

    def __call__(self, module: nn.Module, arguments: Any, value: Any) -> None:
        """Report the loss of one forward pass."""
        if torch.compiler.is_compiling() or self.tell is None or is_capturing() or not listens(self):
            return
        tell = self.tell()
        if tell is not None and isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad:
            tell({"loss": value.detach()})

    def __reduce__(self) -> tuple[type[_LossHook], tuple[None]]:
        return _LossHook, (None,)


# The number of steps after which one is looked at again, if nothing was due before.
_LOOK = 15

# Fractional parts of its multiples are spread evenly, whatever period they are compared with.
_GOLDEN = (math.sqrt(5) - 1) / 2


class Loop:
    """Decides which steps are due, and measures them.

    Attributes:
        recording: False once recording has stopped; a rank that others wait for still measures.
        alive: False once nothing is measured any more.
        stopwatch: entered around everything that happens here.
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

    def skims(self, track: Track) -> bool:
        """Begin a step in which nothing is due and return True, or return False if `before` has to look at it.

        Most steps are of this kind: `skims` and `skimmed` are what the monitor costs them. Training has just filled the
        processor's caches with other things, so that every function they call costs half a microsecond: they call few.
        """
        recorder = self.chronicle.recorder
        if torch.compiler.is_compiling() or (track.on_cuda and is_capturing()) or not self.recording:
            return False
        if recorder is not None and recorder.asked:
            return False
        watch, start = self.stopwatch, clock.perf_counter()
        # By hand what `Stopwatch` does.
        watch.outside += start - watch.since
        broken = track.breaks()
        track.skimming = not broken and getattr(track.optimizer, "found_inf", None) is None
        track.broken = broken
        watch.since = end = clock.perf_counter()
        watch.own += end - start
        return track.skimming

    def skimmed(self, track: Track) -> None:
        """End such a step."""
        watch, start = self.stopwatch, clock.perf_counter()
        watch.outside += start - watch.since
        track.skimming = False
        track.taken += 1
        track.quiet -= 1
        if track is self.tracks[0]:
            self.pace.passed.append((watch.outside, watch.own))
            watch.outside = watch.own = 0.0
        watch.since = end = clock.perf_counter()
        watch.own += end - start

    def before(self, track: Track) -> None:
        """Act before a step."""
        # Decided before anything can fail, because other ranks may wait for this one's part.
        track.measuring = self._due(track) or track.broken or track.breaks()
        track.skimming = track.broken = False
        if track.measuring or track.fresh or track.thaws or not self.chronicle.begun:
            with plainly():
                self._prepare(track)

    def computed(self, track: Track) -> None:
        """Act after the closure of a step has computed its gradients; it may do so several times."""
        with plainly():
            if track.closure:
                track.closure = False
                self._analyze(track)
            track.computed()

    def after(self, track: Track) -> None:
        """Act after a step."""
        measured, track.measuring = track.measuring, False
        try:
            if measured or track.may_skip:
                with plainly():
                    self._take(track, measured, analyzed=track.conditioning)
            else:  # nothing runs that autograd would record
                self._take(track, False, analyzed=track.conditioning)
        finally:
            self.arm(track)

    def _prepare(self, track: Track) -> None:
        if not self.chronicle.begun:
            self.chronicle.begin()
            track.measuring = self._due(track)  # a resumed run may be at another step
            track.sampling = track.sampling and track.measuring
        self._wake(track)
        if track.measuring:
            if not track.closure:
                self._analyze(track)
            track.before(closure=track.closure)
        else:
            track.pass_by()

    def _wake(self, track: Track) -> None:
        """Begin to measure layers that were frozen or zero, if they are not so any more."""
        if (track.measuring or track.thaws) and (why := track.wake()):
            self.chronicle.woken(track, why)

    def _take(self, track: Track, measured: bool, *, analyzed: bool, seen: bool = True) -> None:
        """Count a step, measure it if `measured`, and decide on the next ones; `seen` if a hook saw it begin."""
        sampled = track.sampling
        try:
            if seen and track.skipped():
                track.leave()
                return
            # Each optimizer counts its own steps; others may have taken more or fewer.
            track.taken += 1
            track.asked_for = max(0, track.asked_for - 1)
            if measured:
                self._measure(track)
            self._look_ahead(track, measured, sampled, analyzed)
        except Exception:
            if self.pace.shared:  # other ranks rely on this one
                self._look_ahead(track, measured, sampled, analyzed)
            raise

    def _look_ahead(self, track: Track, measured: bool, sampled: bool, analyzed: bool) -> None:
        if sampled:
            apart = self.pace.detail_interval
            track.next_detail = track.taken + apart
            # Before it, by another part of the interval each time: gradients may be cleared at every sampled step.
            track.next_compared = track.next_detail - int((track.taken // apart + 1) * _GOLDEN % 1 * apart)
        elif measured and track.comparing:
            track.next_compared = sys.maxsize  # until the next sampled step
        if track is self.tracks[0]:
            self._account(measured, sampled, analyzed)
        if analyzed:
            track.analyzed_at = track.taken
        if track.analyzed_at is not None:
            # The estimate improves with every step while the cost of the first analysis is being learned.
            track.next_conditioning = self.pace.next_conditioning(track.analyzed_at)

    def _analyze(self, track: Track) -> None:
        conditioned = self.details[self.tracks.index(track)].conditioned
        if not track.conditioning or conditioned is None:
            return
        # A fused optimizer divides by the loss scale within its step.
        problem = conditioned.analyze(scale=getattr(track.optimizer, "grad_scale", None))
        if problem is not None:
            self.chronicle.event("error", problem)

    def by_hand(self, track: Track) -> None:
        """Act after a step that hooks did not see."""
        try:
            self.chronicle.begin()
            track.unseen()
            measured = track.measuring = self._due(track)
            track.sampling = track.sampling and measured
            self._wake(track)
            track.measuring = False
            self._take(track, measured, analyzed=False, seen=False)
        finally:
            self.arm(track)

    @property
    def looks_inside(self) -> bool:
        """True if forward hooks are attached for the coming step."""
        return any(detail.looks_inside for detail in self.details)

    def ask_for(self, steps: int) -> None:
        """Measure each of the next steps in detail."""
        self.pace.requested = 0
        for track in self.tracks:
            track.asked_for = max(track.asked_for, steps)
            track.next_detail = track.taken + 1
        self.arm()

    def arm(self, only: Track | None = None) -> None:
        """Attach forward hooks if the coming step is sampled, and remove them if it is not."""
        for track, detail in zip(self.tracks, self.details, strict=True):
            if only is None or track is only:
                due = self.alive and self._due(track)
                if due or track.sampling or track.comparing or track.conditioning:
                    self._arm(track, detail, due)
                calm = self.alive and track.calm and self.chronicle.begun and not self.pace.requested
                # The last step before one that is due is looked at, to attach the hooks of the due one.
                track.quiet = min(self.pace.quiet(track.taken, track.tried_at) - 1, _LOOK) if calm else 0

    def _arm(self, track: Track, detail: Detail, due: bool) -> None:
        coming = track.taken + 1
        track.sampling = due and (coming >= track.next_detail or track.asked_for > 0)
        if track.sampling:
            with plainly():
                detail.attach()
        elif detail.listens:
            detail.detach()
        # After `detach`, which takes the hook of `fresh` off too.
        compared, track.comparing = track.comparing, due and (coming >= track.next_compared or track.asked_for > 0)
        if track.comparing:
            with plainly():
                detail.fresh.attach()
        elif compared:
            detail.fresh.detach()
        conditioned = detail.conditioned
        if conditioned is not None:
            wanted = coming >= track.next_conditioning or track.asked_for > 0
            track.conditioning = due and wanted and conditioned.error is None
            if track.conditioning:
                with plainly():
                    conditioned.attach()
            else:
                conditioned.detach()

    def rest(self) -> None:
        """Remove all forward hooks."""
        for detail in self.details:
            detail.detach()
            if detail.conditioned is not None:
                detail.conditioned.detach()

    def end(self) -> None:
        """Act after the last step."""
        self.chronicle.end()
        for detail in self.details:
            if (said := detail.exchanged.said(ended=True)) is not None:
                self.chronicle.event("note", said)
        if self.pace.dropped:
            text = f"{self.pace.dropped} measurements were dropped: the disk could not keep up"
            self.chronicle.event("interval", text)

    def _due(self, track: Track) -> bool:
        return self.pace.due(track.taken + 1, track.tried_at, asked_for=track.asked_for > 0)

    def _measure(self, track: Track) -> None:
        part = self.tracks.index(track)
        failed: Exception | None = None
        try:
            measured = track.measure()
        except Exception as error:
            if not self.pace.shared:
                raise
            failed = error
        # Other ranks take part in this, also after an error here.
        looked_into = track.sampling or track.comparing or track.conditioning
        detail = self.details[part].collect(track) if looked_into else {}
        if failed is not None:
            track.settle()
            raise failed
        if track.sampling and (said := self.details[part].exchanged.said()) is not None and self.recording:
            self.chronicle.warn(said)
        if detail:  # its copies were queued after the event of the measurement
            measured = track.awaiting_more(measured)
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
            told = _numbers(None, {"loss": self._loss()})
        except Exception as error:  # the user's function may have no value yet; everything else is recorded
            if not self._loss_failed:
                self._loss_failed = True
                said = f"the loss function failed: {type(error).__name__}: {error} (reported once; recording continues)"
                self.chronicle.warn(said)
        else:
            self.chronicle.log(told)

    def _account(self, measured: bool, sampled: bool, analyzed: bool) -> None:
        """Update the cost estimates with this step, and decide on the next steps."""
        outside, own = self.stopwatch.take()
        first, recorder = self.tracks[0], self.chronicle.recorder
        self.pace.account(
            outside=outside, own=own, measured=measured, sampled=sampled, exposed=first.caught_up,
            analyzed=analyzed,
        )  # fmt: skip
        if recorder is not None and recorder.asked:
            self.pace.requested, recorder.asked = recorder.asked, 0
            text = f"{self.pace.requested} steps in detail were requested through the file {REQUEST!r}"
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
    """Reject counts below 1 (steps below 0), and budgets, timeouts and thresholds that are not valid numbers."""
    for name, value in values.items():
        if value is None and name in ("budget", "step", "timeout"):
            continue
        least = 0 if name == "step" else 1
        match name:
            case "threshold":
                fine, accepted, hint = _is_real(value), "a finite number", 0.0
            case "budget":
                fine, accepted, hint = _is_real(value) and value > 0, "a share of the time > 0 or None", 0.01
            case "timeout":
                fine, accepted, hint = 0 <= real(value) <= TIMEOUT_MAX, "a number of seconds ≥ 0 or None", 60
            case _:
                fine = not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= least
                accepted, hint = f"a whole number ≥ {least}", least
        if not fine:
            raise MonitorError(f"`{name}` must be {accepted}, got {value!r:.80}. Try {hint}.")


def _is_real(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(real(value))


def _numbers(values: Any, named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers and tensors of one element that were passed to `log`."""
    if values is not None and not isinstance(values, Mapping):
        raise MonitorError(f"`values` must be a dict of numbers by name, got {values!r:.80}. Try log(loss=0.3).")
    return {_named(name): _number(name, value) for name, value in {**(values or {}), **named}.items()}


def _named(name: Any) -> str:
    if not text(name):
        raise MonitorError(f"`values` must have names that are text, got {name!r:.80}. Try log(loss=0.3).")
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
        f"`{name}` must be a number or a tensor of one element, got a {type(value).__name__}{shape}. Try `.mean()`; "
        "use `note` for text."
    )
