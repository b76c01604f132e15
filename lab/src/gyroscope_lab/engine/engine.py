"""Run many trials: one after another, in worker processes, as a population on a GPU, or on a cluster."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Lock
from pathlib import Path
from typing import Literal, get_args

import torch

from gyroscope.base import whole
from gyroscope_lab.engine.run_one import Note, loaded, one_thread, run_one
from gyroscope_lab.errors import LabError, TrialError
from gyroscope_lab.orphans import end_with_parent
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.result import Result
from gyroscope_lab.training.trial import Trial

Engine = Literal["auto", "serial", "workers", "population", "ray"]

#: The trials of a population that share a GPU, and the most worker processes that are started by default.
AT_ONCE = 8


def run_trials(
    trials: Sequence[Trial],
    archive: Archive,
    *,
    engine: Engine = "auto",
    jobs: int | None = None,
    data: Path | str | None = None,
    on_note: Callable[[Note], None] = lambda note: None,
    on_done: Callable[[Trial, Result], None] = lambda trial, result: None,
) -> list[Result]:
    """Run the trials that `archive` does not hold, and return the result of each trial, in order.

    On a CPU every trial runs on one thread, so the results depend neither on the engine nor on `jobs`. Worker processes
    are spawned, so a script that uses them needs an `if __name__ == "__main__":`.

    Args:
        trials: the trials; equal ones are run once, and the source of copied rates is run first.
        archive: the archive of known and new results.
        engine: "serial", "workers" (processes on a CPU), "population" (a GPU), "ray" (a cluster), or "auto": a
            population if there is a GPU, workers if there is more than one job, otherwise serial.
        jobs: the most trials at a time; by default one per CPU, at most 8, and on a cluster as many as fit. "serial"
            ignores it and runs one.
        data: the folder of the datasets; by default GYROSCOPE_DATA.
        on_note: called as each training ends an epoch.
        on_done: called as each training ends; not called for results that were already in the archive.

    >>> import tempfile
    >>> from gyroscope_lab.training.recipe import Recipe
    >>> from gyroscope_lab.training.tasks import task
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     [result] = run_trials([Trial(task("digits").lasting(1), Recipe("SGD", 0.1))], Archive(folder), jobs=1)
    >>> len(result.rotation)
    2
    """
    if engine not in get_args(Engine):
        raise LabError(f"`engine` must be one of {', '.join(get_args(Engine))}, got {engine!r}.")
    if jobs is not None:
        given, jobs = jobs, whole(jobs, 1)
        if jobs is None:
            raise LabError(f"`jobs` must be a whole number ≥ 1, got {given!r}.")
    trials = list(trials)
    missing = archive.missing(trials)
    folder = None if data is None else Path(data)
    many = jobs if jobs is not None else min(os.cpu_count() or 1, AT_ONCE)
    chosen = _choice(engine, many, len(missing))
    if not missing:
        pass
    elif chosen == "population":
        from gyroscope_lab.engine.population import run_population

        run_population(
            missing,
            lambda trial: loaded(trial.task.source, folder),
            archive,
            at_once=jobs or AT_ONCE,
            on_epoch=lambda training: on_note(Note.of(training)),
            on_done=on_done,
        )
    elif chosen == "ray":
        from gyroscope_lab.engine.cluster import run_on_ray

        run_on_ray(missing, archive, data=folder, on_note=on_note, on_done=on_done, jobs=jobs)
    elif chosen == "workers":
        run_in_workers(missing, archive, jobs=min(many, len(missing)), data=folder, on_note=on_note, on_done=on_done)
    else:
        _run_serially(missing, archive, folder, on_note, on_done)
    results = [archive.result(trial) for trial in trials]
    lost = [trial.slug for trial, result in zip(trials, results, strict=True) if result is None]
    if lost:
        raise TrialError(
            f"The results of {', '.join(lost)} are not in {archive.root}. Were they deleted during the run?"
        )
    return [result for result in results if result is not None]


def _choice(engine: Engine, jobs: int, missing: int) -> Engine:
    if engine != "auto":
        return engine
    if torch.cuda.is_available():
        return "population"
    return "workers" if min(jobs, missing) > 1 else "serial"


def _run_serially(
    trials: Sequence[Trial],
    archive: Archive,
    data: Path | None,
    on_note: Callable[[Note], None],
    on_done: Callable[[Trial, Result], None],
) -> None:
    with one_thread():
        for trial in trials:
            on_done(trial, run_one(trial, archive, data, on_note))


def run_in_workers(
    trials: Sequence[Trial],
    archive: Archive,
    *,
    jobs: int,
    data: Path | None,
    on_note: Callable[[Note], None],
    on_done: Callable[[Trial, Result], None],
) -> None:
    """Train all of `trials`, `jobs` at a time; see `gyroscope_lab.engine.engine.run_trials`.

    A trial that copies rates begins when their source has ended.
    """
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    receiving, sending = context.Pipe(duplex=False)
    with ProcessPoolExecutor(jobs, context, initializer=_start, initargs=(sending, context.Lock())) as pool:
        try:
            waiting, futures = list(trials), dict[Future[Result], Trial]()
            while waiting or futures:
                ready = [t for t in waiting if t.source is None or archive.result(t.source) is not None]
                if ready:  # not every time: an interrupt that arrives here is lost
                    with uninterrupted():
                        futures |= {pool.submit(run_one, trial, archive, data, _tell): trial for trial in ready}
                    waiting = [t for t in waiting if t not in ready]
                elif not futures:
                    said = ", ".join(trial.recipe.name for trial in waiting)
                    raise LabError(f"{said}: the trial to copy has no result, and is not among the trials to run.")
                done, _ = wait(futures, timeout=0.2, return_when=FIRST_COMPLETED)
                while receiving.poll():
                    on_note(receiving.recv())
                for future in done:
                    on_done(futures.pop(future), future.result())
        except BaseException as error:
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()
            pool.shutdown(wait=True, cancel_futures=True)
            if isinstance(error, BrokenProcessPool):
                raise TrialError("A worker process was killed, or ran out of memory. Try one job.") from error
            raise
        finally:
            sending.close()
            receiving.close()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C within this context; processes that are started in it always ignore it."""
    # Ctrl-C reaches every process of the terminal, and only the parent decides. Only the main thread may set a handler.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


_sending: Connection
_turns: Lock


def _start(sending: Connection, turns: Lock) -> None:
    global _sending, _turns
    _sending, _turns = sending, turns
    torch.set_num_threads(1)
    end_with_parent()


def _tell(note: Note) -> None:
    # Pipes write messages atomically up to a limit, 512 bytes on some systems. Longer messages would be mixed.
    with _turns:
        _sending.send(note)
