"""Trials in worker processes of one thread each, which end when the parent stops, fails or dies."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Lock
from pathlib import Path

import torch

from gyroscope_lab.engine.run_one import Note, run_one
from gyroscope_lab.errors import LabError, TrialError
from gyroscope_lab.orphans import end_with_parent
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.result import Result
from gyroscope_lab.training.trial import Trial


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

    A trial that copies the rates of another begins when that one has ended.
    """
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    receiving, sending = context.Pipe(duplex=False)
    with ProcessPoolExecutor(jobs, context, initializer=_start, initargs=(sending, context.Lock())) as pool:
        try:
            waiting, futures = list(trials), dict[Future[Result], Trial]()
            while waiting or futures:
                ready = [t for t in waiting if t.source is None or archive.result(t.source) is not None]
                if ready:  # an interrupt that comes meanwhile is lost, so not every time
                    with _children_ignore_interrupts():
                        futures |= {pool.submit(run_one, trial, archive, data, _tell): trial for trial in ready}
                    waiting = [t for t in waiting if t not in ready]
                elif not futures:
                    said = ", ".join(trial.recipe.name for trial in waiting)
                    raise LabError(f"{said}: what is to be copied is neither known nor among the trials to run")
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
                raise TrialError("a worker process was killed, or ran out of memory; try one job") from error
            raise
        finally:
            sending.close()
            receiving.close()


@contextmanager
def _children_ignore_interrupts() -> Iterator[None]:
    # Ctrl-C reaches every process of the terminal. Children started while it is ignored ignore it for
    # good, so the parent alone decides. Only the main thread may set a handler.
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
    # Of messages that are longer than a pipe writes whole, some systems' 512 bytes, several would be mixed.
    with _turns:
        _sending.send(note)
