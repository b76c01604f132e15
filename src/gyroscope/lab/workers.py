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
from pathlib import Path
from tempfile import TemporaryDirectory

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
    others = set(multiprocessing.active_children())
    with (
        _on_disk(split) as path,
        ProcessPoolExecutor(jobs, context, initializer=_start, initargs=(path,)) as pool,
    ):
        try:
            with _children_ignore_interrupts():
                futures = {pool.submit(_run, trial): trial for trial in trials}
            for future in as_completed(futures):
                future.result()
                on_done(futures[future])
        except BaseException as error:
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()
            pool.shutdown(wait=True, cancel_futures=True)
            if isinstance(error, BrokenProcessPool):
                raise LabError("a worker process was killed, or ran out of memory; try one job") from error
            raise
        return [future.result() for future in futures]


@contextmanager
def _on_disk(split: Split) -> Iterator[Path]:
    # As an argument of the workers it would go through a pipe, and starting one would wait until the
    # one before has imported torch and reads; as shared memory it would not fit in some containers.
    with TemporaryDirectory(prefix="gyroscope-") as folder:
        path = Path(folder, "split.pickle")
        path.write_bytes(pickle.dumps(split))
        yield path


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


def _start(path: Path) -> None:
    global _split
    _split = pickle.loads(path.read_bytes())
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    # A parent that is killed outright cannot tell its workers, who would wait for work for ever.
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(trial: Trial) -> Result:
    return trial.run(_split)
