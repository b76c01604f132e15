"""Run many trials, one after the other or side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gyroscope.lab.data import Split
from gyroscope.lab.training import Result
from gyroscope.lab.trial import Trial
from gyroscope.lab.workers import run_in_workers


def run_trials(
    trials: Sequence[Trial],
    split: Split,
    *,
    jobs: int = 1,
    on_done: Callable[[Trial], None] = lambda trial: None,
) -> list[Result]:
    """Return the result of each trial, in order, calling `on_done` as each one ends.

    Every trial runs on one thread, so the results do not depend on `jobs`. With `jobs` > 1 worker
    processes are started afresh, so a script that calls this needs an `if __name__ == "__main__":`.

    >>> from gyroscope.lab import data
    >>> from gyroscope.lab.recipe import Recipe
    >>> from gyroscope.lab.training import Schedule
    >>> trial = Trial(Recipe("SGD", rate=0.1), seed=0, schedule=Schedule(epochs=1))
    >>> [result] = run_trials([trial], data.digits())
    >>> len(result.rotation)
    2
    """
    jobs = min(jobs, len(trials))
    if jobs > 1:
        return run_in_workers(trials, split, jobs=jobs, on_done=on_done)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        results = []
        for trial in trials:
            results.append(trial.run(split))
            on_done(trial)
        return results
    finally:
        torch.set_num_threads(threads)
