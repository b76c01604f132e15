"""Many trials at once on one GPU: each on its own stream, with its steps captured as CUDA graphs.

A population may have a deadline. A training can only be saved between two epochs, so a training that cannot complete
another epoch in time is saved at the end of the current one. No step is taken after the deadline.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from math import inf
from statistics import median

import torch

from gyroscope_lab.data.split import Split, free_memory
from gyroscope_lab.engine.captured import Captured
from gyroscope_lab.engine.cost import expected
from gyroscope_lab.errors import LabError, TrialError
from gyroscope_lab.training import checkpoint
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.result import Result
from gyroscope_lab.training.training import Training
from gyroscope_lab.training.trial import Trial

# The least total seconds of the trials of a kind that make it worthwhile to compile their network as a whole, which
# takes most of a minute and saves a third, or to compile its residual blocks, which takes a third of that.
_WHOLE, _BLOCKS = 120.0, 40.0
# The most unfinished steps in a trial's queue: enough to keep the device busy.
_AHEAD = 3
# Only one step is queued if steps last longer than this: launching a large graph again while it runs blocks the host,
# and with it all other trials.
_LONG = 0.02
# Seconds between checks whether another process has finished a trial.
_LOOK_EVERY = 2.0
# Eager trainings need the host for every kernel. This many run at once, and they get this share of the host's time
# while captured ones wait for it.
_EAGER, _EAGER_SHARE = 2, 1 / 3
# Before a deadline, an epoch is expected to last this many times the median of the last ones, and the tests after the
# last epoch this share of one.
_MARGIN, _TESTS = 1.25, 0.5
# Seconds until the first step of a compiled kind, until that of any other, and of an epoch without a price.
_START, _START_UNCOMPILED, _EPOCH = 45.0, 5.0, 10.0
# A checkpoint that was never measured: the weights, their initial values, and the momentum or the best weights, in
# bytes per second on a slow disk. A measured one may take 1.5 times as long.
_COPIES, _DISK, _SLOWER = 4, 1e8, 1.5


class Deadline:
    """The end of a population, as a moment of `time.monotonic()`.

    Attributes:
        at: that moment.
        stopped: True if no further training may begin.

    >>> deadline = Deadline(time.monotonic() + 60.0)
    >>> deadline.stop(within=10.0)
    >>> deadline.left <= 10.0, deadline.stopped
    (True, True)
    """

    def __init__(self, at: float) -> None:
        self.at = at
        self.stopped = False

    @property
    def left(self) -> float:
        """Seconds until the deadline, negative after it."""
        return self.at - time.monotonic()

    def stop(self, within: float) -> None:
        """End earlier: begin no further training, and end the running ones within `within` seconds."""
        self.at, self.stopped = min(self.at, time.monotonic() + within), True


@dataclass(frozen=True)
class Outcome:
    """The trials that a population worked on; trials that never began are in none of the lists.

    Attributes:
        finished: trials with a result in the archive.
        left: trials ended by the deadline; they resume from their checkpoint, or start again if they have none.
        failed: failed trials, with the reason.
    """

    finished: list[Trial] = field(default_factory=list)
    left: list[Trial] = field(default_factory=list)
    failed: list[tuple[Trial, str]] = field(default_factory=list)


def run_population(
    trials: Sequence[Trial],
    load: Callable[[Trial], Split],
    archive: Archive,
    *,
    at_once: int = 8,
    device: str = "cuda",
    compiled: bool | None = None,
    until: Deadline | float | None = None,
    on_epoch: Callable[[Training], None] = lambda training: None,
    on_done: Callable[[Trial, Result], None] = lambda trial, result: None,
    on_failed: Callable[[Trial, str], None] | None = None,
) -> Outcome:
    """Train all of `trials`, up to `at_once` side by side, and keep their results in `archive`.

    Small networks leave most of a large GPU idle: a step is hundreds of kernels, and each fills a few of its
    processors. Trials that share a GPU take turns. No trial waits for another, and none changes the result of
    another.

    A trial that does not fit into memory with the others is tried again when one of them has ended.

    Args:
        trials: the trials, the most important first; a trial that copies rates comes after their source.
        load: returns a trial's data, on the CPU. Data is loaded once and shared by all.
        archive: the archive of the results.
        at_once: the most trials that share the device.
        device: the GPU. On "cpu", trainings take turns step by step.
        compiled: True to compile the networks, which takes most of a minute per kind and makes their steps a third
            faster; None to compile only the kinds, or their residual blocks, whose trials take long enough.
        until: the `time.monotonic()` after which no step is taken. Trainings that end in time are preferred; all others
            are saved at the end of an epoch. None to train to the end.
        on_epoch: called as each training ends an epoch.
        on_done: called as each ends.
        on_failed: called with each trial that fails, and the reason.

    Raises:
        LabError: some trials failed, and there is no `on_failed`. It is raised after all others have finished and their
            results are kept.

    >>> import tempfile
    >>> from gyroscope_lab.training.recipe import Recipe
    >>> from gyroscope_lab.training.tasks import task
    >>> trials = [Trial(task("digits").lasting(1), Recipe("SGD", rate)) for rate in (0.1, 0.2)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     done = run_population(trials, lambda trial: trial.task.source.load(), Archive(folder), device="cpu")
    ...     [Archive(folder).result(trial) is not None for trial in trials]
    [True, True]
    """
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise LabError("The engine 'population' needs a GPU, and there is none. Use the engine 'workers'.")
    deadline = until if isinstance(until, Deadline) else Deadline(inf if until is None else until)
    told = on_failed or (lambda trial, why: None)
    population = _Population(trials, load, archive, at_once, device, compiled, deadline, on_epoch, on_done, told)
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
    try:
        outcome = population.run()
    finally:
        torch.backends.cudnn.benchmark = before
        population.close()
    if outcome.failed and on_failed is None:
        said = "; ".join(f"{trial.recipe.name}, seed {trial.seed}: {why}" for trial, why in outcome.failed)
        raise TrialError(f"{len(outcome.failed)} of {len(trials)} trials failed: {said}")
    return outcome


@dataclass
class _Seat:
    """A trial in training."""

    trial: Trial
    training: Training
    turns: Iterator[None]
    stream: torch.cuda.Stream | None
    claim: ExitStack
    asked: deque[torch.cuda.Event] = field(default_factory=deque)
    looked: float = 0.0
    lasts: float = 0.0
    began_steps: bool = False
    # When the epoch began, and how long the last ones took; the first of a process is separate, as it also compiles.
    began: float = field(default_factory=time.monotonic)
    first: float | None = None
    epochs: deque[float] = field(default_factory=lambda: deque(maxlen=5))

    @property
    def busy(self) -> bool:
        """True if its queue holds enough unfinished steps."""
        now, done = time.monotonic(), 0
        while self.asked and self.asked[0].query():  # type: ignore[no-untyped-call]
            self.asked.popleft()
            done += 1
        if done:
            self.looked, self.lasts = now, (now - self.looked) / done
        return len(self.asked) >= (1 if self.lasts > _LONG else _AHEAD)

    @property
    def eager(self) -> bool:
        """True if the host launches its kernels, or those of its optimizer, one by one."""
        return self.stream is not None and self.trial.eager

    @property
    def epoch(self) -> float | None:
        """Seconds per epoch, while sharing the device; None before the end of the first."""
        return median(self.epochs) if self.epochs else self.first

    @property
    def save(self) -> float:
        """Seconds that a checkpoint takes."""
        size = sum(parameter.nbytes for parameter in self.training.model.parameters())
        guess = 0.1 + _COPIES * size / _DISK
        return _SLOWER * self.training.pace.took or guess

    def end_epoch(self) -> None:
        """Record how long an epoch took."""
        lasted = time.monotonic() - self.began
        if self.first is None:
            self.first = lasted
        else:
            self.epochs.append(lasted)

    def on_stream(self) -> AbstractContextManager[object]:
        """Queue work on the stream of this training, within this context."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def turn(self) -> bool:
        """Let the training have its turn; return whether it continues."""
        try:
            next(self.turns)
        except StopIteration:
            return False
        if self.stream is not None:
            self.asked.append(self.stream.record_event())
        return True

    def leave(self) -> None:
        """Finish the run, and release the trial to other processes."""
        self.turns = iter(())  # the iterator refers to this seat, and so to the memory of its training
        try:
            with self.on_stream():
                self.training.close()
        finally:
            self.claim.close()


class _Left(Exception):  # noqa: N818  (not an error: it ends a training's loop at the end of an epoch)
    """The training was saved, because the next epoch would end after the deadline."""


@dataclass
class _Population:
    """The waiting trials, the seated trials, and the rules by which they change places."""

    trials: Sequence[Trial]
    load: Callable[[Trial], Split]
    archive: Archive
    at_once: int
    device: str
    compiled: bool | None
    deadline: Deadline
    on_epoch: Callable[[Training], None]
    on_done: Callable[[Trial, Result], None]
    on_failed: Callable[[Trial, str], None]

    def __post_init__(self) -> None:
        self.on_gpu = torch.device(self.device).type == "cuda"
        self.length = self.deadline.left
        self.outcome = Outcome()
        self.waiting, self.elsewhere, self.seats = list(self.trials), list[Trial](), list[_Seat]()
        self.splits: dict[str, Split] = {}
        self.kinds = _seconds_by_kind(self.trials, 2 * self.length)
        self.paces: dict[tuple[object, ...], float] = {}
        self.starts: dict[tuple[object, ...], float] = {}
        self.epochs_left = _epochs_left(self.trials, self.archive) if self.length < inf else {}
        self.free_before: int | None = None
        self.eager_again = 0.0

    def run(self) -> Outcome:
        look, again = True, 0.0
        while (self.waiting or self.elsewhere or self.seats) and self.deadline.left > 0:
            # Files are only read when something may have changed on disk, not between steps.
            if look:
                self._fill()
            if not self.seats and not self.elsewhere:
                self._give_up()
                break
            look = False
            if self.elsewhere and len(self.seats) < self.at_once and time.monotonic() >= again:
                look, again = True, time.monotonic() + _LOOK_EVERY
                self._look_elsewhere()
            if self.elsewhere and not self.seats:
                time.sleep(min(_LOOK_EVERY / 4, max(self.deadline.left, 0.0)))
            look |= self._serve()
        for seat in self.seats:
            self.outcome.left.append(seat.trial)
        return self.outcome

    def close(self) -> None:
        for seat in self.seats:
            with suppress(Exception):  # close all, even if some fail
                seat.leave()
        self.seats.clear()

    def _fail(self, trial: Trial, why: str) -> None:
        self.outcome.failed.append((trial, why))
        self.on_failed(trial, why)

    def _done(self, trial: Trial, result: Result) -> None:
        self.outcome.finished.append(trial)
        self.on_done(trial, result)

    def _fill(self) -> None:
        """Seat trials while there are places, memory and time."""
        while len(self.seats) < self.at_once and not self.deadline.stopped and self._has_memory():
            trial = self._next()
            if trial is None:
                return
            self.waiting.remove(trial)
            try:
                seat = self._seat(trial)
            except Exception as error:
                self._part(trial, error)
            else:
                self.elsewhere += [trial] if seat is None else []
                self.seats += [] if seat is None else [seat]

    def _part(self, trial: Trial, error: Exception) -> None:
        """Let a trial wait for memory if others hold it; otherwise count it as failed."""
        if _is_out_of_memory(error) and self.seats:
            self.at_once = len(self.seats)
            self.waiting.insert(0, trial)
        else:
            self._fail(trial, _in_words(error))

    def _has_memory(self) -> bool:
        """True if another training fits, assuming that it needs as much memory as each seated one."""
        if not self.on_gpu:
            return True
        free = free_memory(self.device) or 0
        if not self.seats:
            self.free_before = free
            return True
        each = ((self.free_before or free) - free) / len(self.seats)
        if free < 1.2 * each:
            _reclaim()
            free = free_memory(self.device) or 0
        return free >= 1.2 * each

    def _next(self) -> Trial | None:
        """Return the trial to seat next, or None if there is none for now.

        Without a deadline, it is the first that is ready. With a deadline, it is the first that ends in time, or
        otherwise the first that completes an epoch in time. A trial too long for the whole time keeps its place before
        later ones.
        """
        fallback = None
        eager = sum(seat.eager for seat in self.seats)
        for trial in list(self.waiting):
            if self.on_gpu and eager >= _EAGER and trial.eager:
                continue
            try:
                ready = trial.source is None or self.archive.holds(trial.source)
            except LabError as error:
                self.waiting.remove(trial)
                self._fail(trial, _in_words(error))
                continue
            if not ready:
                continue
            if self.length == inf:
                return trial
            # Seated trials that have not begun compile first, one after another.
            starts = sum(self._start(seat.trial) for seat in self.seats if not seat.began_steps)
            left = self.deadline.left - starts - self._start(trial) - self._saves()
            epoch = self._epoch(trial)
            # The seated trials wait while this one is compiled, and have to end their epoch after that.
            if left < _MARGIN * (epoch + max((seat.epoch or epoch for seat in self.seats), default=0.0)):
                continue
            whole = epoch * (self.epochs_left[id(trial)] + _TESTS)
            if whole <= left or (whole > self.length and fallback is None):
                return trial
            fallback = fallback or trial
        return fallback

    def _start(self, trial: Trial) -> float:
        """Seconds from the seating of a trial to its first step, beyond the time of a later step."""
        if not self.on_gpu:
            return 0.0
        compiles = trial.capturable and self._compiles(trial) is not False
        new = _START if compiles else _START_UNCOMPILED
        return self.starts.get(_kind(trial), new)

    def _epoch(self, trial: Trial) -> float:
        """Seconds per epoch while sharing with the seated trials: measured, or estimated from the trial's price."""
        if _pace(trial) in self.paces:
            return self.paces[_pace(trial)]
        price = _price(trial)
        if price is None:
            return _EPOCH
        sharing = len(self.seats) + 1
        ratios = [
            seat.epoch / (known * len(self.seats))
            for seat in self.seats
            if seat.epochs and seat.epoch and (known := _price(seat.trial))
        ]
        return price * sharing * (median(ratios) if ratios else 1.0)

    def _saves(self) -> float:
        """Seconds for the checkpoints of all seated trials, one after another."""
        return sum(seat.save for seat in self.seats)

    def _seat(self, trial: Trial) -> _Seat | None:
        """A seat for a trial, or None if another process trains it or has trained it. Waiting while holding other
        trials may deadlock.
        """
        split = self._split(trial)
        wanted = self._compiles(trial)
        with ExitStack() as claim:
            folder = claim.enter_context(self.archive.claimed_if_free(trial))
            if folder is None or self.archive.holds(trial):
                return None
            began = time.monotonic()
            stream = _stream(self.device) if self.on_gpu else None
            with torch.cuda.stream(stream) if stream is not None else nullcontext():
                rates = self.archive.rates(trial)
                training = (
                    Captured(trial, split, folder=folder, device=self.device, rates=rates, compiled=wanted)
                    if stream is not None and trial.capturable
                    else Training(trial, split, folder=folder, device=self.device, rates=rates)
                )
            seat = _Seat(trial, training, iter(()), stream, claim.pop_all(), began=began)
            seat.turns = training.proceed(lambda training: self._end_epoch(seat))
            return seat
        raise AssertionError("unreachable")

    def _compiles(self, trial: Trial) -> bool | None:
        """Return True to compile a trial's network as a whole, None for its residual blocks only, False for nothing."""
        if trial.conditions is not None:  # code compiled without hooks does not run them
            return False
        if trial.task.source.is_text:  # trainings of minutes, each of which would be compiled by itself
            return False
        if self.compiled is not None:
            return self.compiled
        seconds = self.kinds.get(_kind(trial), 0.0)
        return True if seconds >= _WHOLE else None if seconds >= _BLOCKS else False

    def _split(self, trial: Trial) -> Split:
        name = repr(trial.task.source)
        if name not in self.splits:
            self.splits[name] = self.load(trial).to(self.device)
        return self.splits[name]

    def _end_epoch(self, seat: _Seat) -> None:
        """Save and leave a training that cannot complete its next epoch, or its tests, in time."""
        training = seat.training
        seat.end_epoch()
        if len(seat.epochs) == 1 and seat.first is not None:
            self.starts[_kind(seat.trial)] = max(seat.first - seat.epochs[0], 0.0)
        if seat.epochs:
            self.paces[_pace(seat.trial)] = median(seat.epochs)
        self.on_epoch(training)
        over = training.ended is not None or training.epoch >= training.trial.schedule.epochs
        needed = (_TESTS if over else _MARGIN) * (seat.epoch or 0.0)
        if (self.deadline.stopped and not over) or needed + self._saves() > self.deadline.left:
            training.save()
            raise _Left
        seat.began = time.monotonic()

    def _serve(self) -> bool:
        """Give a turn to each training that is not busy; return whether a seat became free."""
        freed, worked = False, False
        captured = any(not seat.eager for seat in self.seats)
        for seat in [seat for seat in self.seats if not seat.busy]:
            if self.deadline.left <= 0:
                break
            if not seat.began_steps and self._start(seat.trial) + self._saves() > self.deadline.left:
                continue  # it would compile past the deadline
            seat.began_steps = True
            began = time.monotonic()
            if seat.eager and captured and began < self.eager_again:
                continue
            worked |= not seat.training.waiting
            goes_on = self._goes_on(seat)
            if seat.eager:
                now = time.monotonic()
                self.eager_again = now + (now - began) * (1 / _EAGER_SHARE - 1)
            if not goes_on:
                freed = True
        if self.seats and not worked:
            time.sleep(1e-4)  # polling without a pause would slow other threads
        return freed

    def _goes_on(self, seat: _Seat) -> bool:
        """Let a training have its turn; after its last one, keep its result and free its seat."""
        failure: Exception | None = None
        try:
            with seat.on_stream():
                if seat.turn():
                    return True
                result = seat.training.finish()
            self._done(seat.trial, result)
        except _Left:
            self.outcome.left.append(seat.trial)
        except Exception as error:
            failure = error
        self.seats.remove(seat)
        with suppress(Exception):  # only the original error is reported
            seat.leave()
        if failure is not None:
            self._part(seat.trial, failure)
        return False

    def _look_elsewhere(self) -> None:
        """Remove the trials that other processes have finished; the rest wait again."""
        missing = []
        for trial in self.elsewhere:
            try:
                result = self.archive.result(trial)
            except LabError as error:
                self._fail(trial, _in_words(error))
                continue
            if result is None:
                missing.append(trial)
            else:
                self._done(trial, result)
        self.waiting[:0], self.elsewhere = missing, []

    def _give_up(self) -> None:
        """Count trials whose source has failed as failed; without a deadline no other trials can be waiting."""
        failed = {trial.key for trial, _ in self.outcome.failed}
        unlimited = self.length == inf and not self.deadline.stopped
        for trial in self.waiting:
            if unlimited or any(one.key in failed for one in trial.lineage[:-1]):
                failed.add(trial.key)
                self._fail(trial, "LabError: the trial whose rates it copies failed")
        self.waiting.clear()


def _in_words(error: Exception) -> str:
    """The error in words; the error object itself would keep the training and its memory alive."""
    return f"{type(error).__name__}: {error}"


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether the device ran out of memory; during a capture, that error is the cause of another one."""
    while error is not None:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _kind(trial: Trial) -> tuple[object, ...]:
    """Trials of a kind run the same compiled network."""
    return trial.task.model, trial.task.options, trial.schedule.batch, trial.precision, trial.conditions is None


def _pace(trial: Trial) -> tuple[object, ...]:
    """Trials whose epochs take equally long."""
    return (*_kind(trial), trial.task.source, trial.schedule.passes, trial.conditions, trial.every, trial.follows)


def _price(trial: Trial) -> float | None:
    """Seconds of the device that an epoch takes."""
    whole = expected(trial)
    return None if whole is None else whole.seconds / trial.schedule.epochs


def _epochs_left(trials: Sequence[Trial], archive: Archive) -> dict[int, int]:
    """The epochs left to each trial after its checkpoint, by the trial's identity."""
    folders = [path.parent for path in archive.root.glob(f"*/*/{checkpoint.FILE}")]
    saved = {folder.name[-8:]: checkpoint.epoch(folder) for folder in folders}
    return {id(trial): max(trial.schedule.epochs - saved.get(trial.key[:8], 0), 0) for trial in trials}


def _seconds_by_kind(trials: Sequence[Trial], seconds: float) -> dict[tuple[object, ...], float]:
    """The total seconds of the trials of each kind, among the first trials that take `seconds` in all."""
    found: dict[tuple[object, ...], float] = {}
    for trial in trials:
        if seconds <= 0:
            break
        whole = expected(trial)
        price = inf if whole is None else whole.seconds
        found[_kind(trial)] = found.get(_kind(trial), 0.0) + price
        seconds -= price if price < inf else 0.0
    return found


def _stream(device: str) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    return stream


def _reclaim() -> None:
    """Free the memory of ended trainings: they are reference cycles, and torch caches their memory."""
    gc.collect()
    torch.cuda.empty_cache()
