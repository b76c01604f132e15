"""Trials in worker processes of one thread each, which end when the parent stops, fails or dies."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.synchronize import Event

import torch

from gyroscope.lab.data import Split
from gyroscope.lab.errors import LabError
from gyroscope.lab.training import Result
from gyroscope.lab.trial import Trial


def run_in_workers(
    trials: Sequence[Trial], split: Split, *, jobs: int, on_done: Callable[[Trial], None]
) -> list[Result]:
    """Return the result of each trial, in order; see `gyroscope.lab.engine.run_trials`.

    >>> from gyroscope.lab import data
    >>> run_in_workers([], data.digits(), jobs=1, on_done=print)
    []
    """
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    # Pickled here because multiprocessing would move the tensors to shared memory, which containers
    # often keep too small.
    arguments = (pickle.dumps(split), stop)
    with ProcessPoolExecutor(jobs, context, initializer=_start, initargs=arguments) as pool:
        try:
            with _children_ignore_interrupts():
                futures = {pool.submit(_run, trial): trial for trial in trials}
            for future in as_completed(futures):
                future.result()
                on_done(futures[future])
        except BaseException as error:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            if isinstance(error, BrokenProcessPool):
                raise LabError(
                    "a worker process died (killed, or out of memory); try a single job"
                ) from error
            raise
        return [future.result() for future in futures]


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


_split: Split
_stop: Event


def _start(pickled_split: bytes, stop: Event) -> None:
    global _split, _stop
    _split, _stop = pickle.loads(pickled_split), stop
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    # A parent that is killed outright cannot tell its workers, who would wait for work for ever.
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(trial: Trial) -> Result:
    return trial.run(_split, after_epoch=_end_if_stopped)


def _end_if_stopped() -> None:
    if _stop.is_set():
        raise LabError("stopped")
