import multiprocessing
import os

import pytest
import torch

from gyroscope.lab import data
from gyroscope.lab.engine import run_trials
from gyroscope.lab.errors import LabError
from gyroscope.lab.recipe import Recipe
from gyroscope.lab.training import Schedule
from gyroscope.lab.trial import Trial

RECIPES = (Recipe("Layca", rate=3.0**-3, alpha=0.6), Recipe("SGD", rate=3.0**-1))
TRIALS = [Trial(recipe, seed, schedule=Schedule(epochs=1)) for recipe in RECIPES for seed in (0, 1)]
LONG = Schedule(epochs=100_000)


@pytest.fixture(scope="module")
def split():
    return data.digits()


class Dying(Trial):
    """A trial whose process is killed, as the system does when memory runs out."""

    def run(self, split):
        os._exit(9)


def test_results_do_not_depend_on_the_number_of_jobs(split):
    done = []
    parallel = run_trials(TRIALS, split, jobs=2, on_done=done.append)
    assert len(done) == 4
    assert set(done) == set(TRIALS)
    assert parallel == run_trials(TRIALS, split, jobs=1)


def test_a_serial_run_reports_in_order_and_gives_the_threads_back(split):
    threads, done = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        run_trials(TRIALS[:2], split, on_done=done.append)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert done == TRIALS[:2]


def test_a_failing_worker_ends_the_run_and_names_its_trial(split):
    endless = Trial(RECIPES[1], seed=0, schedule=LONG)
    unknown = Trial(RECIPES[1], seed=7, model="resnet")
    with pytest.raises(LabError, match=r"^SGD, seed 7: no model is called 'resnet'"):
        run_trials([endless, unknown], split, jobs=2)
    assert multiprocessing.active_children() == []


def test_a_worker_that_dies_is_reported(split):
    with pytest.raises(LabError, match="a worker process was killed"):
        run_trials([Dying(RECIPES[1], seed=0), Dying(RECIPES[1], seed=1)], split, jobs=2)


def test_an_interrupt_ends_the_workers(split):
    def interrupt(trial):
        raise KeyboardInterrupt

    endless = Trial(RECIPES[1], seed=0, schedule=LONG)
    with pytest.raises(KeyboardInterrupt):
        run_trials([TRIALS[0], endless, endless], split, jobs=2, on_done=interrupt)
    assert multiprocessing.active_children() == []
