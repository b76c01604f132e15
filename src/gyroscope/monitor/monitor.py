"""The monitor: what a user holds of all this, and the wall between it and training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from gyroscope.base.outermost import register_outermost
from gyroscope.errors import ConditioningError, GyroscopeError, MonitorError, StoreError
from gyroscope.layers.layer import Layer
from gyroscope.monitor import given
from gyroscope.monitor.chronicle import About, Chronicle
from gyroscope.monitor.clock import Cost
from gyroscope.monitor.detail import Detail
from gyroscope.monitor.hooks import LossHook, plainly
from gyroscope.monitor.loop import Loop
from gyroscope.monitor.pace import Pace
from gyroscope.monitor.quantities import find
from gyroscope.monitor.recorder import Recorder
from gyroscope.monitor.reference import Place, Precision, Reference, Source, from_source
from gyroscope.monitor.resume import Saved
from gyroscope.monitor.track import Track
from gyroscope.store import LayerInfo, Run, Sink, load
from gyroscope.vectors.launch import is_capturing
from gyroscope.vectors.layout import any_sharded

if TYPE_CHECKING:
    from gyroscope.conditioning.schedule import Schedule

_LOG = logging.getLogger("gyroscope")


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
        conditioning: Any,
    ) -> None:
        given.check_numbers(every=every, budget=budget, detail_every=detail_every, step=step, threshold=threshold)
        given.check_choices(reference_dtype, reference_device)
        given.check_flags(neurons=neurons, activations=activations)
        given.check_loss(loss)
        analyses = None if conditioning is None else _schedule(conditioning, budget)
        every, budget = int(every), None if budget is None else float(budget)
        places = given.sinks(sinks)
        optimizers = given.optimizers(optimizer)
        chosen = given.layers(model, layers)
        parts = given.parts(chosen, optimizers)
        wanted = find(quantities)
        remembered = given.meta(meta, model, optimizers, every=every, budget=budget)
        values = None if reference is None else from_source(reference, chosen)
        self._sharded = any_sharded(layer.parameter for layer in chosen)
        given.check_neurons(chosen, neurons, self._sharded)
        self.path = given.folder(run, shared=self._sharded)
        self.layers = tuple(layer.name for layer in chosen)
        self.error: Exception | None = None
        # Ranks that hold replicas have nothing to add; ranks that hold shards are all needed.
        self._active = self._sharded or given.rank() == 0
        part_of = {i: part for part, members in enumerate(parts) for i in members}
        self._table = [
            LayerInfo(layer.name, layer.kind, tuple(layer.parameter.shape), part_of[i])
            for i, layer in enumerate(chosen)
        ]
        self._held: tuple[Precision, Place] = (reference_dtype, reference_device)
        folder = self.path or Path()  # ranks that do not know it do not look there
        about = About(
            folder, self._table, parts, wanted, remembered, places, given.rank() == 0, self._sharded, self._held
        )
        # Everything has been checked but the folder, and nothing was changed.
        step = None if step is None else int(step)
        self._chronicle = Chronicle(about, step=step, own_reference=reference is not None)
        self._pace = Pace(
            every=every, budget=budget, detail_every=int(detail_every), details=activations or neurons,
            shared=self._sharded, conditioning=None if analyses is None else analyses.every,
        )  # fmt: skip
        self._tracks: list[Track] = []
        self._details: list[Detail] = []
        self._handles: list[Any] = []
        try:
            moves = any({"pp", "vp"} & one.needs for one in wanted)
            with plainly():
                for members, its_optimizer in zip(parts if self._active else (), optimizers, strict=False):
                    its = [chosen[i] for i in members]
                    start = None if values is None else [values[i] for i in members]
                    weights = [layer.parameter for layer in its]
                    held = Reference.take(weights, start, precision=reference_dtype, place=reference_device)
                    self._tracks.append(Track(its, its_optimizer, held, moves=moves))
                    detail = Detail(
                        model, its, its_optimizer, activations=activations, spread=neurons, threshold=threshold,
                        conditioning=analyses, shared=self._sharded,
                    )  # fmt: skip
                    self._details.append(detail)
                self._chronicle.prepare(self._tracks, self._details, self._pace.clock)
            given_loss = None if isinstance(loss, nn.Module) else loss
            self._loop = Loop(self._tracks, self._details, self._pace, self._chronicle, given_loss)
            self._attach(loss)
        except BaseException:
            for handle in self._handles:
                handle.remove()
            with suppress(OSError):  # the failure is what is said
                self._chronicle.discard()
            if run is None and self.path is not None:
                with suppress(OSError):  # it holds a run already
                    self.path.rmdir()
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
        given.check_numbers(every=value)
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
        numbers = given.numbers(values, named)
        self._safely(self._chronicle.log, numbers)

    def note(self, text: str) -> None:
        """Record something that happened at this step, in words."""
        self._safely(self._chronicle.event, "note", str(text))

    def sample(self, next_steps: int = 5) -> None:
        """Measure the next steps, every one of them and in detail, whatever the interval.

        Of a sharded model the first rank decides, and the others hear of it within 32 measurements.
        """
        given.check_numbers(next_steps=next_steps)
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
        given.check_numbers(timeout=timeout)
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
        given.check_state(state, self.layers, [info.shape for info in self._table], len(self._tracks))
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
            handles.append(loss.register_forward_hook(LossHook(self._computed)))

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


def _schedule(given: Any, budget: float | None) -> Schedule:
    """When to analyze conditioning, whose modules are loaded where it is asked for."""
    from gyroscope.conditioning.schedule import Schedule

    schedule = given if isinstance(given, Schedule) else Schedule(every=given)
    if schedule.every == "budget" and budget is None:
        raise ConditioningError(
            "conditioning='budget' was asked for with budget=None; give a budget, or a number of steps."
        )
    return schedule
