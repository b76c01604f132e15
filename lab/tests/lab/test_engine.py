import multiprocessing
import os
import signal
import threading
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import gyroscope
from gyroscope_lab.engine import engine, population
from gyroscope_lab.engine.captured import Captured
from gyroscope_lab.engine.engine import run_in_workers, run_trials
from gyroscope_lab.engine.population import run_population
from gyroscope_lab.engine.run_one import Note
from gyroscope_lab.errors import LabError
from gyroscope_lab.papers.beyond.problems import LSTM
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.tasks import task
from gyroscope_lab.training.training import train
from gyroscope_lab.training.trial import Trial
from lab.trainings import HELD

QUICK = replace(HELD, model="mlp-2x8", options=(("inputs", 64),)).lasting(1)
SPLIT = QUICK.source.load()
RECIPES = (Recipe("Layca", 3.0**-3, control="layca", alpha=0.6), Recipe("SGD", 3.0**-1))
RECORDED = Recipe("RMSprop", 0.01, optimizer="rmsprop", records=True)
COPY = Trial(QUICK, Recipe("copy", 1.0, control="layca", copies=RECORDED))
TRIALS = [Trial(QUICK, recipe, seed) for recipe in RECIPES for seed in (0, 1)]
CONVOLUTIONS = Trial(HELD.lasting(1), RECIPES[0])
ENDLESS = Trial(QUICK.lasting(1_000_000), RECIPES[1])
UNKNOWN = Trial(replace(QUICK, model="resnet"), RECIPES[1], seed=7)


@dataclass(frozen=True)
class Dying(Trial):
    """A trial whose process is killed, as the system does when it runs out of memory."""

    def network(self):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.usefixtures("forked_workers")
def test_results_depend_neither_on_the_engine_nor_on_the_number_of_jobs(tmp_path):
    """Nor on the order of the trials: one waits for the trial that it copies."""
    trials = [COPY, *TRIALS, CONVOLUTIONS]
    done, notes = [], []
    parallel = run_trials(
        trials,
        Archive(tmp_path / "parallel"),
        engine="workers",
        jobs=2,
        on_note=notes.append,
        on_done=lambda trial, result: done.append((trial, result)),
    )
    assert {trial.key for trial, _ in done} == {trial.key for trial in [COPY.source, *trials]}
    assert len(done) == 7
    assert sorted(note.name for note in notes) == sorted(
        f"digits: {trial.recipe.name}, seed {trial.seed}" for trial in [COPY.source, *trials]
    )
    serial = run_trials(trials, Archive(tmp_path / "serial"), engine="serial")
    assert parallel == serial
    assert [dict(done)[trial] for trial in trials] == serial
    for trial, result in zip(trials[1:], serial[1:], strict=True):
        assert result == train(trial, SPLIT)
    assert multiprocessing.active_children() == []


def test_a_serial_run_reports_in_order_and_gives_the_threads_back(tmp_path):
    threads, done, seen = torch.get_num_threads(), [], []
    torch.set_num_threads(2)
    try:
        run_trials(
            TRIALS[:2],
            Archive(tmp_path),
            engine="serial",
            on_note=lambda note: seen.append((note.epoch, note.epochs, torch.get_num_threads())),
            on_done=lambda trial, result: done.append(trial),
        )
        assert torch.get_num_threads() == 2
        with pytest.raises(LabError):
            run_trials([UNKNOWN], Archive(tmp_path), engine="serial")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert done == TRIALS[:2]
    assert seen == [(1, 1, 1), (1, 1, 1)]


def test_results_come_in_the_order_of_the_trials_and_known_ones_are_not_run(tmp_path):
    archive = Archive(tmp_path)
    first = run_trials(TRIALS, archive, engine="serial")
    done = []
    again = run_trials((trial for trial in reversed(TRIALS)), archive, on_done=lambda trial, result: done.append(trial))
    assert again == first[::-1]
    assert done == []


@pytest.mark.usefixtures("forked_workers")
def test_a_failing_worker_ends_the_run_and_names_its_trial(tmp_path):
    with pytest.raises(LabError, match=r"^SGD, seed 7: The model must be one of .*, got 'resnet'"):
        run_trials([UNKNOWN, ENDLESS, replace(ENDLESS, seed=1)], Archive(tmp_path), engine="workers", jobs=1)
    assert multiprocessing.active_children() == []


@pytest.mark.usefixtures("forked_workers")
def test_a_worker_that_dies_is_reported_and_its_trial_can_be_run_again(tmp_path):
    dying = Dying(QUICK, RECIPES[1])
    with pytest.raises(LabError, match=r"A worker process was killed, or ran out of memory\. Try one job"):
        run_trials([dying], Archive(tmp_path), engine="workers", jobs=1)
    assert multiprocessing.active_children() == []
    alive = Trial(QUICK, RECIPES[1])
    assert alive.key == dying.key
    assert run_trials([alive], Archive(tmp_path), engine="serial") == [train(alive, SPLIT)]


@pytest.mark.usefixtures("forked_workers")
def test_an_interrupt_ends_the_workers_and_leaves_a_run_that_can_be_gone_on_with(tmp_path):
    def interrupt(note):
        if note.epoch == 3:
            raise KeyboardInterrupt

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run_trials([ENDLESS], Archive(tmp_path), engine="workers", jobs=1, on_note=interrupt)
    assert multiprocessing.active_children() == []
    assert signal.getsignal(signal.SIGINT) is handler
    with Archive(tmp_path).claimed_if_free(ENDLESS) as folder:
        assert folder is not None
        with gyroscope.load(folder) as run:
            assert run.layers == ("linear1.weight", "linear2.weight")


def test_workers_that_wait_for_what_nobody_runs_say_so(tmp_path):
    with pytest.raises(LabError, match="copy: the trial to copy has no result, and is not among the trials to run"):
        run_in_workers([COPY], Archive(tmp_path), jobs=1, data=None, on_note=print, on_done=print)


# What is refused before anything is written.


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"engine": "gpu"}, "`engine` must be one of auto, serial, workers, population, ray, got 'gpu'"),
        ({"jobs": 0}, "`jobs` must be a whole number ≥ 1, got 0"),
        ({"jobs": -2}, "`jobs` must be a whole number ≥ 1, got -2"),
        ({"jobs": "2"}, "`jobs` must be a whole number ≥ 1, got '2'"),
        ({"jobs": 1.5}, "`jobs` must be a whole number ≥ 1, got 1.5"),
        ({"jobs": True}, "`jobs` must be a whole number ≥ 1, got True"),
    ],
    ids=["engine", "no jobs", "fewer than no jobs", "text", "half a job", "a truth value"],
)
def test_what_cannot_be_done_is_refused_before_anything_is_written(tmp_path, given, says):
    with pytest.raises(LabError, match=says):
        run_trials(TRIALS, Archive(tmp_path / "archive"), **given)
    assert not (tmp_path / "archive").exists()


@pytest.mark.parametrize("folder", [None, "no/such/folder", "."])
def test_a_task_without_its_data_is_refused_before_anything_is_written(tmp_path, monkeypatch, folder):
    monkeypatch.delenv("GYROSCOPE_DATA", raising=False)
    data = None if folder is None else tmp_path / folder
    with pytest.raises(LabError, match=r"(?s)^SGD, seed 0: .*(cifar|CIFAR)"):
        run_trials([Trial(task("c10-cnn1"), RECIPES[1])], Archive(tmp_path / "archive"), data=data, engine="serial")
    assert not (tmp_path / "archive").exists()


def test_no_trials_have_no_results_and_nothing_is_written(tmp_path):
    """This is the case for studies that train nothing."""
    assert run_trials([], Archive(tmp_path / "archive")) == []
    assert not (tmp_path / "archive").exists()


def test_a_result_that_vanishes_meanwhile_is_said(tmp_path):
    archive = Archive(tmp_path)

    def remove(trial, result):
        (archive.folder(trial) / "result.json").unlink()

    with pytest.raises(LabError, match=rf"The results of {TRIALS[0].slug.replace('^', '.')} are not in {tmp_path}"):
        run_trials(TRIALS[:1], archive, engine="serial", on_done=remove)


def test_captured_steps_are_refused_where_they_cannot_be_before_anything_is_written(tmp_path):
    with pytest.raises(LabError, match="Steps are captured on CUDA devices, got a training on cpu"):
        Captured(TRIALS[0], SPLIT, folder=tmp_path / "run", device="cpu")
    with pytest.raises(LabError, match=r".*cannot be captured\. Train it step by step"):
        Captured(Trial(LSTM.full, Recipe("", 0.1)), SPLIT, folder=tmp_path / "run", device="cuda")
    assert not (tmp_path / "run").exists()


# Populations next to other processes; on a CPU, where trainings take turns step by step.


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(population, "_LOOK_EVERY", 0.01)


ADAGRAD = [Trial(QUICK, Recipe("Adagrad", 0.01, optimizer="adagrad"), seed) for seed in range(3)]


def populate(trials, archive, **options):
    run_population(trials, lambda trial: SPLIT, archive, device="cpu", **options)


def test_a_population_gives_what_each_trial_gives_alone(tmp_path, impatient):
    archive = Archive(tmp_path)
    populate(ADAGRAD, archive, at_once=2)
    assert [archive.result(trial) for trial in ADAGRAD] == [train(trial, SPLIT) for trial in ADAGRAD]


@contextmanager
def held_elsewhere(archive, trial, meanwhile):
    """Another process that trains a trial, and ends with its result once it is requested."""
    asked, finished = threading.Event(), threading.Event()

    def hold():
        with archive.claimed(trial) as folder:
            asked.set()
            if finished.wait(20):
                meanwhile(folder)

    thread = threading.Thread(target=hold)
    thread.start()
    asked.wait(60)
    try:
        yield finished.set
    finally:
        finished.set()
        thread.join()


def test_a_population_does_not_wait_for_a_trial_of_another_process_while_it_has_others(tmp_path, impatient):
    """Two populations that wait for each other would deadlock; a trial of the other is not trained again."""
    archive, result, done = Archive(tmp_path), train(ADAGRAD[0], SPLIT), []

    def finish(folder):
        folder.mkdir(parents=True)
        result.write(folder / "result.json", ADAGRAD[0].description)

    with held_elsewhere(archive, ADAGRAD[0], finish) as let_finish:

        def note(trial, result):
            done.append(trial)
            if len(done) == 2:
                let_finish()

        populate(ADAGRAD, archive, at_once=2, on_done=note)
    assert done == [ADAGRAD[1], ADAGRAD[2], ADAGRAD[0]]
    assert [path.name for path in archive.folder(ADAGRAD[0]).iterdir()] == ["result.json"]


def test_a_population_does_not_train_what_another_process_has_finished_meanwhile(tmp_path, impatient):
    archive, done = Archive(tmp_path), []
    result = run_trials(ADAGRAD[:1], archive, engine="serial")
    populate(ADAGRAD[:1], archive, on_epoch=pytest.fail, on_done=lambda trial, result: done.append(result))
    assert done == result


def test_a_population_trains_what_another_process_gave_up(tmp_path, impatient):
    archive, done = Archive(tmp_path), []
    with held_elsewhere(archive, ADAGRAD[0], lambda folder: None) as let_go:

        def note(trial, result):
            done.append(trial)
            let_go()

        populate(ADAGRAD[:2], archive, at_once=2, on_done=note)
    assert done == [ADAGRAD[1], ADAGRAD[0]]
    assert archive.result(ADAGRAD[0]) == train(ADAGRAD[0], SPLIT)


def test_a_failing_trial_of_a_population_does_not_take_others_along_but_what_copies_it(tmp_path, impatient):
    archive = Archive(tmp_path)
    adagrad = Recipe("Adagrad", 0.01, optimizer="adagrad", records=True, only=9)
    copy = Trial(QUICK, Recipe("copy", 1.0, control="layca", optimizer="adagrad", copies=adagrad))
    with pytest.raises(
        LabError, match=r"(?s)^2 of 3 trials failed: .*`only` must be one of.*the trial whose rates it copies"
    ):
        populate([copy.source, copy, ADAGRAD[0]], archive)
    assert archive.result(ADAGRAD[0]) is not None


@pytest.mark.parametrize(("jobs", "count", "workers"), [(1, 2, []), (4, 1, []), (4, 3, [3]), (np.int64(2), 4, [2])])
def test_without_a_gpu_several_trials_with_several_jobs_run_in_workers(tmp_path, monkeypatch, jobs, count, workers):
    chosen = []

    def pretend(trials, archive, *, jobs, data, on_note, on_done):
        chosen.append(jobs)
        engine._run_serially(trials, archive, data, on_note, on_done)

    monkeypatch.setattr("gyroscope_lab.engine.engine.run_in_workers", pretend)
    assert len(run_trials(TRIALS[:count], Archive(tmp_path), jobs=jobs)) == count
    assert chosen == workers


def test_notes_of_several_workers_are_not_mixed_however_long_they_are(monkeypatch):
    receiving, sending = multiprocessing.Pipe(duplex=False)
    monkeypatch.setattr(engine, "_sending", sending, raising=False)
    monkeypatch.setattr(engine, "_turns", multiprocessing.Lock(), raising=False)
    sent = [Note(str(place), str(place) * 100_000, 1, 1, 0.0, 0.0, 0.0) for place in range(20)]
    told = [threading.Thread(target=engine._tell, args=(note,), daemon=True) for note in sent]
    for thread in told:
        thread.start()
    assert sorted((receiving.recv() for _ in sent), key=lambda note: int(note.key)) == sent
