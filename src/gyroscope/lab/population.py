"""Many trials at once on one GPU: each on a stream of its own, its steps captured as CUDA graphs."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import torch

from gyroscope.lab.archive import Archive
from gyroscope.lab.captured import Captured
from gyroscope.lab.data.split import Split
from gyroscope.lab.errors import LabError
from gyroscope.lab.result import Result
from gyroscope.lab.training import Training
from gyroscope.lab.trial import Trial

# Half a minute of compiling is a fifth of this many trainings of C10-CNN1.
_WORTH_COMPILING = 4
# Steps that a trial may have asked for that are not done yet: enough to keep the device busy.
_AHEAD = 3
# Of steps that last longer than this, one: to ask for a large graph again while it runs makes the host wait for it, and
# with the host all others.
_LONG = 0.02
# Seconds until it is looked again whether another process has finished a trial.
_LOOK_EVERY = 2.0


@dataclass
class _Seat:
    """A trial that is being trained."""

    trial: Trial
    training: Training
    turns: Iterator[None]
    stream: torch.cuda.Stream
    claim: ExitStack
    asked: deque[torch.cuda.Event] = field(default_factory=deque)
    looked: float = 0.0
    lasts: float = 0.0

    @property
    def busy(self) -> bool:
        """Whether enough of its steps are still to be done."""
        now, done = time.monotonic(), 0
        while self.asked and self.asked[0].query():  # type: ignore[no-untyped-call]
            self.asked.popleft()
            done += 1
        if done:
            self.looked, self.lasts = now, (now - self.looked) / done
        return len(self.asked) >= (1 if self.lasts > _LONG else _AHEAD)


def run_population(
    trials: Sequence[Trial],
    load: Callable[[Trial], Split],
    archive: Archive,
    *,
    at_once: int = 8,
    device: str = "cuda",
    compiled: bool | None = None,
    on_epoch: Callable[[Training], None] = lambda training: None,
    on_done: Callable[[Trial, Result], None] = lambda trial, result: None,
) -> None:
    """Train all of `trials`, up to `at_once` side by side, and keep their results in `archive`.

    Small networks leave most of a large GPU idle: a step is hundreds of kernels that fill a few of its processors each.
    Trials that share it take turns; none waits for another, and none changes another's result.

    Args:
        trials: what to train; one that copies another's rates comes after that one.
        load: gives a trial's data, on the CPU. What is loaded once is shared by all.
        archive: where results go.
        at_once: how many share the device.
        device: the GPU.
        compiled: compile the networks, which takes half a minute for each kind and makes their steps a fifth faster;
            None for those of which there are enough to make up for it. Residual blocks are compiled by themselves,
            which takes seconds, unless this is False.
        on_epoch: called as each training ends an epoch.
        on_done: called as each ends.

    Raises:
        LabError: some trials failed; all others were finished, and their results kept, before this is raised.
    """
    if not torch.cuda.is_available():
        raise LabError("a population shares a GPU, and there is none; use the engine 'workers' on a CPU")
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
    splits: dict[str, Split] = {}
    kinds = Counter(map(_kind, trials))
    waiting, elsewhere, seats = list(trials), list[Trial](), list[_Seat]()
    failed: list[tuple[Trial, str]] = []

    def split_of(trial: Trial) -> Split:
        name = repr(trial.task.source)
        if name not in splits:
            splits[name] = load(trial).to(device)
        return splits[name]

    look, again = True, 0.0
    try:
        while waiting or elsewhere or seats:
            # What is on disk is looked at when something may have changed there, not between steps.
            while look and waiting and len(seats) < at_once and (trial := _next(waiting, archive, failed)) is not None:
                wanted = compiled if compiled is not None else (kinds[_kind(trial)] >= _WORTH_COMPILING or None)
                try:
                    seat = _seat(trial, split_of(trial), archive, device, wanted, on_epoch)
                except Exception as error:
                    failed.append((trial, _in_words(error)))
                else:
                    elsewhere += [trial] if seat is None else []
                    seats += [] if seat is None else [seat]
            look = False
            if waiting and not seats and not elsewhere:
                failed += [(trial, "LabError: the trial whose rates it copies failed") for trial in waiting]
                waiting.clear()
            if elsewhere and len(seats) < at_once and time.monotonic() >= again:
                look, again = True, time.monotonic() + _LOOK_EVERY
                waiting[:0], elsewhere = _still_missing(elsewhere, archive, on_done, failed), []
            if elsewhere and not seats:
                time.sleep(_LOOK_EVERY / 4)
            for seat in [seat for seat in seats if not seat.busy]:
                try:
                    with torch.cuda.stream(seat.stream):
                        if _turn(seat):
                            continue
                        result = seat.training.finish()
                    on_done(seat.trial, result)
                except Exception as error:
                    failed.append((seat.trial, _in_words(error)))
                seats.remove(seat)
                look = True
                _leave(seat)
            if seats and all(seat.training.waiting or seat.busy for seat in seats):
                time.sleep(1e-4)  # rather than ask without a pause, which other threads would feel
    finally:
        torch.backends.cudnn.benchmark = before
        for seat in seats:
            with suppress(Exception):  # each is left, whatever became of the others
                _leave(seat)
    if failed:
        said = "; ".join(f"{trial.recipe.name}, seed {trial.seed}: {why}" for trial, why in failed)
        raise LabError(f"{len(failed)} of {len(trials)} trials failed: {said}")


def _in_words(error: Exception) -> str:
    """What went wrong; not the error itself, which holds on to the training it was raised in, and so to its memory."""
    return f"{type(error).__name__}: {error}"


def _kind(trial: Trial) -> tuple[object, ...]:
    """Trials of a kind run the same compiled network."""
    return trial.task.model, trial.task.options, trial.schedule.batch, trial.precision


def _still_missing(
    trials: Sequence[Trial],
    archive: Archive,
    on_done: Callable[[Trial, Result], None],
    failed: list[tuple[Trial, str]],
) -> list[Trial]:
    """Those of the trials that others held which these have not finished."""
    missing = []
    for trial in trials:
        try:
            result = archive.result(trial)
        except LabError as error:
            failed.append((trial, _in_words(error)))
            continue
        if result is None:
            missing.append(trial)
        else:
            on_done(trial, result)
    return missing


def _next(waiting: list[Trial], archive: Archive, failed: list[tuple[Trial, str]]) -> Trial | None:
    """The first trial that can begin; one that copies another's rates waits for that one."""
    for trial in list(waiting):
        try:
            ready = trial.source is None or archive.result(trial.source) is not None
        except LabError as error:
            waiting.remove(trial)
            failed.append((trial, _in_words(error)))
            continue
        if ready:
            waiting.remove(trial)
            return trial
    return None


def _seat(
    trial: Trial,
    split: Split,
    archive: Archive,
    device: str,
    compiled: bool | None,
    on_epoch: Callable[[Training], None],
) -> _Seat | None:
    """A seat for a trial; None if another process trains it, or has: to wait while holding others may be for ever."""
    with ExitStack() as claim:
        folder = claim.enter_context(archive.claimed_if_free(trial))
        if folder is None or archive.result(trial) is not None:
            return None
        stream = _stream(device)
        with torch.cuda.stream(stream):
            rates = archive.rates(trial)
            training = (
                Captured(trial, split, folder=folder, device=device, rates=rates, compiled=compiled)
                if trial.recipe.capturable and trial.conditions is None  # hooks see nothing of replayed steps
                else Training(trial, split, folder=folder, device=device, rates=rates)
            )
        return _Seat(trial, training, training.proceed(on_epoch), stream, claim.pop_all())
    raise AssertionError("unreachable")


def _stream(device: str) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    return stream


def _turn(seat: _Seat) -> bool:
    """Let a training have its turn; whether it goes on."""
    try:
        next(seat.turns)
    except StopIteration:
        return False
    seat.asked.append(seat.stream.record_event())
    return True


def _leave(seat: _Seat) -> None:
    with torch.cuda.stream(seat.stream):
        seat.training.close()
    seat.claim.close()
