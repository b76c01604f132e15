"""Boxes of minutes: trainings end in time, are saved, archived and collected, and resume without a difference."""

import io
import json
import os
import shutil
import signal
import sqlite3
import tarfile
import time
from dataclasses import replace

import pytest
import torch

import gyroscope
from gyroscope.store.example import write_example
from gyroscope_lab.engine import population
from gyroscope_lab.engine.box import _merge_log, collect, run_box
from gyroscope_lab.engine.population import Deadline, _pace, _Population, _Seat, run_population
from gyroscope_lab.engine.run_one import run_one
from gyroscope_lab.errors import LabError
from gyroscope_lab.training import checkpoint, last_layer
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.tasks import task
from gyroscope_lab.training.training import RATES, WEIGHTS, Training, train
from gyroscope_lab.training.trial import Trial
from lab.trainings import recorded

DIGITS = replace(task("digits"), model="mlp-2x8", options=(("inputs", 64),)).lasting(4)
SPLIT = DIGITS.source.load()
ENDLESS = DIGITS.lasting(100_000)
ADAM = Recipe("Adam-Layca", 3.0**-5, optimizer="adam", control="layca", records=True)
TRIALS = [
    Trial(DIGITS, ADAM, seed=1, keeps=True),
    Trial(DIGITS, Recipe("SGD", 0.1, momentum=0.9), follows=True),
    Trial(replace(DIGITS, name="again"), Recipe("AdaptCopy", 1.0, control="layca", copies=ADAM), seed=1, keeps=True),
]


@pytest.fixture(scope="module", autouse=True)
def warm():
    """Train once: the first training of a process takes seconds to begin, which tests of time must not include."""
    train(Trial(DIGITS, Recipe("SGD", 0.1)), SPLIT)


def box(trials, folder, **options):
    """A box on the CPU, by default with ample time."""
    options = {"minutes": 10.0, "path": folder / "box.tar", "device": "cpu", **options}
    return run_box(trials, Archive(folder / "there"), **options)


def stop_after(epoch, action):
    """Call `action` when each training ends that epoch."""
    return lambda note: action() if note.epoch == epoch else None


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def statuses(made):
    return [one.status for one in made.trials]


def snapshot(*folders):
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and path.name != "run.lock"]
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def same(one, other):
    """Return whether two folders hold the same training, bit for bit."""
    results = [json.loads((folder / "result.json").read_text())["result"] for folder in (one, other)]
    for result in results:
        result.pop("seconds")
    (steps, _, numbers), (others_steps, _, others_numbers) = recorded(one), recorded(other)
    files = [name for name in (RATES, WEIGHTS, last_layer.FILE) if (one / name).exists()]
    assert files == [name for name in (RATES, WEIGHTS, last_layer.FILE) if (other / name).exists()]
    return results[0] == results[1] and steps == others_steps and numbers == others_numbers


# A population with a deadline


class Clock:
    """A clock on which a training step takes one second and a checkpoint five."""

    sleep, time, perf_counter = time.sleep, time.time, time.perf_counter

    def __init__(self, monkeypatch):
        self.now, clock = 1000.0, self

        class Timed(Training):
            def step(self, count):
                super().step(count)
                clock.now += 1.0

            def save(self):
                super().save()
                self.pace.took = 5.0
                clock.now += 5.0

        monkeypatch.setattr(population, "Training", Timed)
        for module in ("population", "box"):
            monkeypatch.setattr(f"gyroscope_lab.engine.{module}.time", self)

    def monotonic(self):
        return self.now


@pytest.mark.parametrize("seconds", [200.0, 207.0, 213.0, 250.0])
def test_every_training_is_saved_at_the_end_of_its_last_epoch_before_the_deadline(tmp_path, monkeypatch, seconds):
    clock = Clock(monkeypatch)
    trials = [Trial(ENDLESS, Recipe("SGD", 0.1), seed) for seed in range(3)]
    until, epochs = clock.now + seconds, {}

    def end_epoch(training):
        if training.epoch == 1:
            training.save()  # so that it is known how long that takes
        epochs[training.trial.seed] = training.epoch

    outcome = run_population(
        trials, lambda trial: SPLIT, Archive(tmp_path), device="cpu", until=until, on_epoch=end_epoch
    )
    assert sorted(trial.seed for trial in outcome.left) == [0, 1, 2]
    # Three trainings of seven steps: an epoch of each takes 21 seconds. Not two of them are left unused.
    assert until - 2 * 21 - 3 * 5 <= clock.now <= until
    for trial in trials:
        assert checkpoint.epoch(Archive(tmp_path).folder(trial)) == epochs[trial.seed] > 1


def test_no_step_is_taken_after_the_deadline_where_an_epoch_lasts_longer_than_those_before(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    trials, steps = [Trial(ENDLESS, Recipe("SGD", 0.1), seed) for seed in range(3)], []
    until = clock.now + 150.0

    def end_epoch(training):
        if training.epoch == 3:
            training.save()
            step = training.step

            def slow(count):
                steps.append(clock.now)
                step(count)
                clock.now += 9.0

            training.step = slow

    outcome = run_population(
        trials, lambda trial: SPLIT, Archive(tmp_path), device="cpu", until=until, on_epoch=end_epoch
    )
    assert sorted(trial.seed for trial in outcome.left) == [0, 1, 2]
    assert until - 10.0 <= max(steps) < until
    assert all(checkpoint.epoch(Archive(tmp_path).folder(trial)) == 3 for trial in trials)


def test_a_training_that_was_left_resumes_to_the_result_of_one_that_was_not_bit_for_bit(tmp_path):
    whole, parts = Archive(tmp_path / "whole"), Archive(tmp_path / "parts")
    load = lambda trial: SPLIT  # noqa: E731
    run_population(TRIALS, load, whole, device="cpu")
    seen = []
    for _ in range(20):
        deadline = Deadline(time.monotonic() + 600.0)

        def end_epoch(training, deadline=deadline):
            seen.append((training.trial.recipe.name, training.epoch))
            deadline.stop(within=60.0)

        outcome = run_population(TRIALS, load, parts, device="cpu", until=deadline, on_epoch=end_epoch)
        torch.rand(3)
        if not parts.missing(TRIALS):
            break
    assert not outcome.failed
    assert len(seen) == len(set(seen)) == 12  # no epoch is trained twice
    for trial in TRIALS:
        assert same(whole.folder(trial), parts.folder(trial))
        assert not (parts.folder(trial) / checkpoint.FILE).exists()


def test_a_training_that_could_not_end_its_tests_in_time_is_saved_after_its_last_epoch(tmp_path):
    deadline = Deadline(time.monotonic() + 600.0)

    def end_epoch(training):
        if training.epoch == 4:
            deadline.stop(within=0.0)

    outcome = run_population(
        TRIALS[:1], lambda trial: SPLIT, Archive(tmp_path), device="cpu", until=deadline, on_epoch=end_epoch
    )
    assert (outcome.left, outcome.finished) == (TRIALS[:1], [])
    assert checkpoint.epoch(Archive(tmp_path).folder(TRIALS[0])) == 4
    assert run_population(TRIALS[:1], lambda trial: SPLIT, Archive(tmp_path), device="cpu").finished == TRIALS[:1]


def waiting(trials, folder, *, seconds, epochs):
    """A population that has not begun, with a known epoch length for each trial."""
    nothing = lambda *given: None  # noqa: E731
    deadline = Deadline(time.monotonic() + seconds)
    made = _Population(trials, nothing, Archive(folder), 8, "cpu", False, deadline, nothing, nothing, nothing)
    made.paces = {_pace(trial): lasts for trial, lasts in zip(trials, epochs, strict=True)}
    return made


def test_trials_that_end_in_time_come_first_and_others_only_if_they_end_an_epoch(tmp_path):
    slow = Trial(replace(task("digits-deep"), name="slow").lasting(100), Recipe("SGD", 0.1))
    fast = Trial(DIGITS, Recipe("SGD", 0.1))
    made = waiting([slow, fast], tmp_path, seconds=200.0, epochs=[1.0, 1.0])
    assert made._next() is slow  # in the order given, where all end in time
    made.deadline.at = time.monotonic() + 50.0
    assert made._next() is fast
    made.waiting.remove(fast)
    assert made._next() is slow  # it becomes a checkpoint
    made.deadline.at = time.monotonic() + 1.0
    assert made._next() is None


def test_trials_that_no_box_of_this_length_could_end_keep_their_place(tmp_path):
    long = Trial(replace(task("digits-deep"), name="long").lasting(100), Recipe("SGD", 0.1))
    fast = Trial(DIGITS, Recipe("SGD", 0.1))
    assert waiting([long, fast], tmp_path, seconds=200.0, epochs=[5.0, 1.0])._next() is long


def test_trials_that_no_box_of_this_length_could_end_do_not_overtake_others(tmp_path):
    slow = Trial(replace(task("digits-deep"), name="slow").lasting(100), Recipe("SGD", 0.1))
    long = Trial(replace(task("digits-deep"), name="long", model="resnet-32").lasting(100), Recipe("SGD", 0.1))
    fast = Trial(DIGITS, Recipe("SGD", 0.1))
    made = waiting([slow, long, fast], tmp_path, seconds=200.0, epochs=[1.0, 5.0, 1.0])
    made.deadline.at = time.monotonic() + 50.0
    assert made._next() is fast
    made.waiting.remove(fast)
    assert made._next() is slow


def test_epochs_of_a_checkpoint_count_as_done(tmp_path):
    trial = Trial(DIGITS, Recipe("SGD", 0.1))
    other = Trial(replace(task("digits-deep"), name="other").lasting(2), Recipe("SGD", 0.1))
    folder = Archive(tmp_path).folder(trial)
    folder.mkdir(parents=True)
    made = waiting([trial, other], tmp_path, seconds=10.0, epochs=[2.0, 1.0])
    made.deadline.at -= 3.0
    assert made._next() is other
    checkpoint.save(folder, {"key": trial.key, "epoch": 3})
    made = waiting([trial, other], tmp_path, seconds=10.0, epochs=[2.0, 1.0])
    made.deadline.at -= 3.0
    assert made._next() is trial


def test_few_trainings_that_are_not_captured_run_at_once_on_a_gpu(tmp_path):
    eager = [Trial(DIGITS, Recipe("Adagrad", 0.1, optimizer="adagrad"), seed) for seed in range(3)]
    captured = Trial(DIGITS, Recipe("SGD", 0.1))
    made = waiting([*eager, captured], tmp_path, seconds=1000.0, epochs=[0.1] * 4)
    made.on_gpu = True
    for number in range(2):
        assert made._next() is eager[number]
        made.waiting.remove(eager[number])
        training = Training(eager[number], SPLIT)
        made.seats.append(_Seat(eager[number], training, iter(()), "a stream", None))
    assert made._next() is captured


def test_another_training_is_seated_only_while_the_memory_allows(tmp_path, monkeypatch):
    free = [100]
    monkeypatch.setattr("gyroscope_lab.engine.population.free_memory", lambda device: free[0])
    monkeypatch.setattr("gyroscope_lab.engine.population._reclaim", lambda: None)
    made = waiting([], tmp_path, seconds=10.0, epochs=[])
    made.on_gpu = True
    assert made._has_memory()
    made.seats.append("one that takes 40")
    free[0] = 60
    assert made._has_memory()
    made.seats.append("another one")
    free[0] = 20
    assert not made._has_memory()
    made.seats.pop()
    free[0] = 60
    assert made._has_memory()


class Crowded(Training):
    """A training that leaves no memory for another."""

    alive = 0

    def __init__(self, *given, **options):
        if Crowded.alive:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        super().__init__(*given, **options)
        Crowded.alive += 1

    def close(self):
        super().close()
        Crowded.alive -= 1


def test_a_trial_without_memory_waits_for_a_seat_and_does_not_fail(tmp_path, monkeypatch):
    monkeypatch.setattr("gyroscope_lab.engine.population.Training", Crowded)
    outcome = run_population(TRIALS[:2], lambda trial: SPLIT, Archive(tmp_path), device="cpu")
    assert outcome.finished == TRIALS[:2]


class TooLarge(Training):
    """A training whose steps run out of memory, with the error of a failed capture."""

    def step(self, count):
        raise RuntimeError("the capture failed") from torch.cuda.OutOfMemoryError("CUDA out of memory")


def test_a_trial_that_fits_into_no_memory_fails(tmp_path, monkeypatch):
    monkeypatch.setattr("gyroscope_lab.engine.population.Training", TooLarge)
    with pytest.raises(LabError, match="1 of 1 trials failed: SGD, seed 0: RuntimeError: the capture failed"):
        run_population(TRIALS[1:2], lambda trial: SPLIT, Archive(tmp_path), device="cpu")


# A box and its archive


def test_a_box_ends_in_time_with_its_archive_and_says_what_it_did(tmp_path, monkeypatch):
    trials = [TRIALS[0], Trial(ENDLESS, Recipe("SGD", 0.1)), Trial(DIGITS, Recipe("nowhere", 0.1, only=99))]
    clock = Clock(monkeypatch)
    end = clock.now + 60 * 5.0
    made = box(trials, tmp_path, minutes=5.0)
    assert end - 100 < clock.now <= end
    assert sorted(statuses(made)) == ["failed", "finished", "resumable"]
    with tarfile.open(made.path) as tar:
        about = json.load(tar.extractfile("box.json"))
        names = set(tar.getnames())
    assert (about["minutes"], about["signal"], about["gpu"], about["torch"]) == (5.0, None, None, torch.__version__)
    assert 0 < about["used"] <= 5.0
    by_status = {one["status"]: one for one in about["trials"]}
    assert by_status["failed"]["reason"].startswith("LabError: `only` must be one of the")
    assert (by_status["finished"]["epochs"], by_status["finished"]["of"]) == (4, 4)
    assert by_status["resumable"]["epochs"] > 0
    place = by_status["finished"]["folder"]
    assert {f"{place}/{name}" for name in ("result.json", "run.sqlite", RATES, WEIGHTS)} <= names
    assert f"{by_status['resumable']['folder']}/checkpoint.pt" in names
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".new"]


def test_a_signal_ends_a_box_with_an_archive_of_what_could_be_saved(tmp_path):
    handler = signal.getsignal(signal.SIGTERM)
    made = box([Trial(ENDLESS, Recipe("SGD", 0.1)), TRIALS[0]], tmp_path, on_note=stop_after(2, terminate))
    assert made.signal == "SIGTERM"
    assert made.used < 1
    assert statuses(made) == ["resumable", "resumable"]
    assert all(1 < one.epochs < 4 for one in made.trials)
    assert [one.status for one in collect(made.path, tmp_path / "runs", tmp_path / "kept")] == statuses(made)
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_second_interruption_ends_a_box_at_once_and_leaves_an_archive(tmp_path):
    def interrupt(note):
        if note.epoch == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        box([Trial(ENDLESS, Recipe("SGD", 0.1))], tmp_path, on_note=interrupt)
    [one] = collect(tmp_path / "box.tar", tmp_path / "runs", tmp_path / "kept")
    assert one.status == "started"  # a checkpoint is due after half a minute


def test_an_archive_that_would_be_too_large_leaves_checkpoints_out_the_least_advanced_first(tmp_path):
    trials = [TRIALS[0], Trial(ENDLESS, Recipe("SGD", 0.1)), Trial(ENDLESS.lasting(50_000), Recipe("SGD", 0.1))]
    for name, limit in (("all", None), ("one", 1), ("none", 0)):
        whole = (tmp_path / "all" / "box.tar").stat().st_size if limit is not None else 0
        size = None if limit is None else whole - 1 if limit else 1
        made = box(trials, tmp_path / name, limit=size, on_note=stop_after(6, terminate))
        with tarfile.open(made.path) as tar:
            files = [path for path in tar.getnames() if path.endswith((checkpoint.FILE, "result.json"))]
        slugs = {path.split("/")[1] for path in files}
        left = {"all": trials, "one": [trials[0], trials[2]], "none": trials[:1]}[name]
        assert slugs == {trial.slug for trial in left}
        assert statuses(made).count("resumable") == 2
        again = collect(made.path, tmp_path / f"{name}-runs", tmp_path / f"{name}-kept")
        assert sorted(one.status for one in again) == sorted(
            ["finished", *["resumable"] * (len(left) - 1), *["started"] * (3 - len(left))]
        )


def test_where_results_alone_fit_databases_are_left_out_but_not_those_with_more_than_epochs(tmp_path):
    """Nor those that hold what a study reads."""
    trials = [*TRIALS[:2], replace(TRIALS[1], every=1), replace(TRIALS[1], seed=7)]
    made = box(trials, tmp_path, limit=1, whole=trials[3:])
    assert (made.left_out, made.lean) == (0, 2)
    with tarfile.open(made.path) as tar:
        databases = [path.split("/")[1] for path in tar.getnames() if path.endswith("run.sqlite")]
        assert len([path for path in tar.getnames() if path.endswith("result.json")]) == 4
    assert sorted(databases) == sorted(trial.slug for trial in trials[2:])
    rows = collect(made.path, tmp_path / "runs", tmp_path / "kept")
    assert [(row.status, row.kept) for row in rows] == [("finished", True)] * 4
    assert all((tmp_path / "there" / trial.task.name / trial.slug / "run.sqlite").is_file() for trial in trials)


@pytest.mark.parametrize("minutes", [0.0, -1.0, float("nan"), float("inf")])
def test_a_box_of_no_length_is_refused(tmp_path, minutes):
    with pytest.raises(LabError, match="`minutes` must be a finite number > 0"):
        box(TRIALS, tmp_path, minutes=minutes)


# Its collection


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The archive of a box in which all trials ended."""
    folder = tmp_path_factory.mktemp("finished")
    made = box(TRIALS, folder)
    assert statuses(made) == ["finished"] * 3
    return made.path


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory):
    """The archives of boxes that stopped after one and after two epochs of the first two trials."""
    paths = []
    for epochs in (1, 2):
        folder = tmp_path_factory.mktemp(f"unfinished-{epochs}")
        paths.append(box(TRIALS[:2], folder, on_note=stop_after(epochs, terminate)).path)
    return paths


def accuracies(archive):
    return [None if result is None else result.test_accuracy for result in map(archive.result, TRIALS)]


def test_everything_goes_to_the_runs_and_small_results_to_those_that_are_kept(tmp_path, finished):
    rows = collect(finished, tmp_path / "runs", tmp_path / "kept")
    runs, kept = Archive(tmp_path / "runs"), Archive(tmp_path / "kept")
    assert [(row.trial, row.status, row.taken, row.kept, row.before) for row in rows] == [
        (trial, "finished", True, True, None) for trial in TRIALS
    ]
    assert accuracies(runs) == [row.test for row in rows]
    assert accuracies(kept) == pytest.approx(accuracies(runs), abs=1e-6)
    assert runs.rates(TRIALS[2]) is not None
    assert runs.weights(TRIALS[0]).keys() == {"initial", "tested"}
    files = [sorted(path.name for path in kept.folder(trial).iterdir()) for trial in TRIALS]
    assert files == [["result.json"], [last_layer.FILE, "result.json"], ["result.json"]]
    assert not list((tmp_path / "runs").glob(".collect-*"))


def test_collecting_twice_changes_nothing(tmp_path, finished, unfinished):
    for path in (unfinished[1], finished):
        collect(path, tmp_path / "runs", tmp_path / "kept")
        before = snapshot(tmp_path / "runs", tmp_path / "kept")
        rows = collect(path, tmp_path / "runs", tmp_path / "kept")
        assert not any(row.taken or row.kept for row in rows)
        assert snapshot(tmp_path / "runs", tmp_path / "kept") == before


def test_a_collected_checkpoint_resumes_to_the_result_of_an_uninterrupted_training(tmp_path, unfinished):
    collect(unfinished[1], tmp_path / "runs", tmp_path / "kept")
    runs, whole = Archive(tmp_path / "runs"), Archive(tmp_path / "whole")
    for trial in TRIALS[:2]:
        epochs = []
        run_one(trial, runs, tell=lambda note, epochs=epochs: epochs.append(note.epoch))
        assert epochs[0] > 2
        run_one(trial, whole)
        assert same(runs.folder(trial), whole.folder(trial))


def test_a_later_checkpoint_is_not_replaced_by_an_earlier_one(tmp_path, unfinished):
    earlier, later = unfinished
    runs = Archive(tmp_path / "runs")
    for path, taken in ((earlier, True), (later, True), (earlier, False)):
        rows = collect(path, runs.root, tmp_path / "kept")
        assert [row.taken for row in rows] == [taken, taken]
    assert all(checkpoint.epoch(runs.folder(trial)) >= 2 for trial in TRIALS[:2])


def test_a_finished_result_is_not_replaced_by_an_unfinished_training(tmp_path, finished, unfinished):
    collect(finished, tmp_path / "runs", tmp_path / "kept")
    before = snapshot(tmp_path / "runs", tmp_path / "kept")
    rows = collect(unfinished[1], tmp_path / "runs", tmp_path / "kept")
    assert [(row.status, row.taken, row.test) for row in rows] == [("resumable", False, None)] * 2
    assert [row.before for row in rows] == pytest.approx(accuracies(Archive(tmp_path / "runs"))[:2], abs=1e-6)
    rows = collect(unfinished[1], tmp_path / "runs", tmp_path / "others")
    assert [(row.taken, row.kept) for row in rows] == [(False, True)] * 2  # what the runs have is kept there
    assert snapshot(tmp_path / "runs", tmp_path / "kept") == before


def test_a_result_ends_the_checkpoint_of_its_trial(tmp_path, finished, unfinished):
    collect(unfinished[1], tmp_path / "runs", tmp_path / "kept")
    collect(finished, tmp_path / "runs", tmp_path / "kept")
    assert not list((tmp_path / "runs").rglob(checkpoint.FILE))
    assert None not in accuracies(Archive(tmp_path / "runs"))


def test_a_kept_result_stays_and_its_trial_is_resumed_for_its_rates_alone(tmp_path, finished, unfinished):
    kept, runs = Archive(tmp_path / "kept"), Archive(tmp_path / "runs")
    collect(finished, tmp_path / "elsewhere", kept.root)
    for trial in TRIALS[:2]:
        result = kept.result(trial)
        replace(result, test_accuracy=0.5).write(kept.folder(trial) / "result.json", trial.description, small=True)
    rows = collect(unfinished[1], runs.root, kept.root)
    assert [row.taken for row in rows] == [True, False]  # the first one records its rates
    rows = collect(finished, runs.root, kept.root)
    assert accuracies(kept)[:2] == [row.before for row in rows[:2]] == [0.5, 0.5]
    assert runs.rates(TRIALS[2]) is not None


def test_a_result_without_its_rates_is_replaced_with_them(tmp_path, finished):
    runs = Archive(tmp_path / "runs")
    collect(finished, runs.root, tmp_path / "kept")
    (runs.folder(TRIALS[0]) / RATES).unlink()
    rows = collect(finished, runs.root, tmp_path / "kept")
    assert [row.taken for row in rows] == [True, False, False]
    assert runs.rates(TRIALS[2]) is not None


def test_a_trial_that_is_being_trained_is_not_collected(tmp_path, finished):
    with (
        Archive(tmp_path / "runs").claimed(TRIALS[0]),
        pytest.raises(LabError, match=r"is being trained\. Collect again"),
    ):
        collect(finished, tmp_path / "runs", tmp_path / "kept")


def changed(path, new, change):
    """A copy of an archive in which `change` may replace each member; it maps (entry, content) to the same."""
    with tarfile.open(path) as old, tarfile.open(new, "w") as tar:
        for entry in old.getmembers():
            for other, content in change(entry, old.extractfile(entry).read()):
                if content is not None:
                    other.size = len(content)
                tar.addfile(other, None if content is None else io.BytesIO(content))
    return new


def named(name, **about):
    entry = tarfile.TarInfo(name)
    for key, value in about.items():
        setattr(entry, key, value)
    return entry


def beside(*entries):
    """Add entries after box.json."""
    return lambda entry, content: [(entry, content), *(entries if entry.name == "box.json" else [])]


def with_folder(folder):
    """Give the first trial another folder."""

    def change(entry, content):
        if entry.name == "box.json":
            about = json.loads(content)
            about["trials"][0]["folder"] = folder
            content = json.dumps(about).encode()
        return [(entry, content)]

    return change


def of_another_trial(entry, content):
    """Put the result of another trial into a trial's folder."""
    if entry.name.endswith("result.json"):
        content = json.dumps(json.loads(content) | {"trial": replace(TRIALS[0], seed=7).description}).encode()
    return [(entry, content)]


def sparse(name):
    """Let a member claim a terabyte, of which the archive holds no byte."""
    about = {"GNU.sparse.map": "1099511627776,0", "GNU.sparse.size": "1099511627776"}

    def change(entry, content):
        return [(named(entry.name, pax_headers=about) if entry.name.endswith(name) else entry, content)]

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (sparse("box.json"), "'box.json' is sparse"),
        (sparse("result.json"), r"result\.json' is sparse"),
        (beside((named("../outside.txt"), b"no")), r"holds '\.\./outside\.txt', which no box writes"),
        (beside((named("/outside.txt"), b"no")), r"holds '/outside\.txt'"),
        (beside((named("digits/other/setup.py"), b"no")), r"holds 'digits/other/setup\.py'"),
        (beside((named("link", type=tarfile.SYMTYPE, linkname="/etc"), None)), "holds 'link'"),
        (beside((named("box.json"), b"{}")), "which no box writes|cannot be read"),
        (with_folder("../elsewhere"), "which no box writes"),
        (of_another_trial, "is damaged: .* holds the result of another trial"),
        (lambda entry, content: [(entry, content[:-1])], "cannot be read|is damaged"),
        (lambda entry, content: [] if entry.name == "box.json" else [(entry, content)], "its box.json cannot be read"),
    ],
)
def test_what_no_box_has_written_is_refused_and_nothing_is_changed(tmp_path, finished, change, says):
    path = changed(finished, tmp_path / "changed.tar", change)
    with pytest.raises(LabError, match=says):
        collect(path, tmp_path / "runs", tmp_path / "kept")
    assert snapshot(tmp_path) == snapshot_of(path)


def snapshot_of(path):
    return {path: (path.stat().st_mtime_ns, path.read_bytes())}


def test_a_file_that_is_no_archive_is_refused(tmp_path):
    (tmp_path / "text.tar").write_text("no archive")
    for path in (tmp_path / "text.tar", tmp_path / "nowhere.tar"):
        with pytest.raises(LabError, match="cannot be read as the archive of a box"):
            collect(path, tmp_path / "runs", tmp_path / "kept")


def test_a_source_that_lacks_its_rates_is_trained_again_for_who_copies_them(tmp_path):
    archive = Archive(tmp_path / "there")
    made = box([TRIALS[0]], tmp_path)
    (archive.folder(TRIALS[0]) / RATES).unlink()
    made.path.unlink()
    again = box([TRIALS[0], TRIALS[2]], tmp_path)
    assert statuses(again) == ["finished", "finished"]
    assert (archive.folder(TRIALS[0]) / RATES).exists()


def test_an_archive_that_could_not_be_written_is_refused_before_training(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(LabError, match="cannot be written"):
        box(TRIALS[:1], tmp_path, path=tmp_path / "file" / "box.tar")
    assert not (tmp_path / "there").exists()


def test_what_a_kill_left_half_committed_is_undone_before_a_run_is_packed_without_its_journal(tmp_path, monkeypatch):
    monkeypatch.setenv("GYROSCOPE_JOURNAL", "rollback")
    write_example(tmp_path / "run").close()
    file = tmp_path / "run" / "run.sqlite"
    connection = sqlite3.connect(file, isolation_level=None)
    connection.execute("PRAGMA journal_mode = TRUNCATE")
    connection.execute("PRAGMA cache_size = 1")  # so that pages go to the file before the commit
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("UPDATE meta SET value = 'half'")
    connection.execute("CREATE TABLE more AS SELECT zeroblob(100000)")
    (tmp_path / "killed").mkdir()
    for name in ("run.sqlite", "run.sqlite-journal"):
        shutil.copyfile(file.with_name(name), tmp_path / "killed" / name)
    connection.close()
    file = tmp_path / "killed" / "run.sqlite"
    before = file.read_bytes()
    _merge_log(file)
    assert file.read_bytes() != before
    file.with_name("run.sqlite-journal").unlink(missing_ok=True)
    with gyroscope.load(tmp_path / "killed") as run:
        run.check()
        assert run.meta["task"] == "example"
