"""Trials on a Ray instance of this machine, and on an instance that they start and stop themselves."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import gyroscope
from gyroscope.errors import MissingExtraError
from gyroscope_lab.engine import cluster
from gyroscope_lab.engine.cluster import connected, run_on_ray
from gyroscope_lab.engine.engine import run_trials
from gyroscope_lab.engine.run_one import run_one
from gyroscope_lab.errors import LabError
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.checkpoint import FILE as CHECKPOINT
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.tasks import task
from gyroscope_lab.training.training import Training
from gyroscope_lab.training.trial import Trial

DIGITS = task("digits").lasting(2)
RECORDED = Recipe("RMSprop", 3.0**-6, optimizer="rmsprop", records=True)
TRIALS = [
    Trial(DIGITS, Recipe("copy", 1.0, control="layca", copies=RECORDED)),
    Trial(DIGITS, Recipe("Layca", 3.0**-3, control="layca"), keeps=True),
    Trial(DIGITS, Recipe("SGD", 3.0**-1), seed=1),
]
LONG = Trial(task("digits").lasting(100_000), Recipe("SGD", 3.0**-2))


@pytest.fixture(scope="module")
def ray(tmp_path_factory):
    """A Ray instance of this machine that these tests share."""
    ray = pytest.importorskip("ray")
    handler = signal.getsignal(signal.SIGTERM)
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False, "include_dashboard": False}
    ray.init(address="local", num_cpus=1, **quiet)
    yield ray
    ray.shutdown()
    signal.signal(signal.SIGTERM, handler)


class Counted:
    """Workers that end one at a time, and record how many are at work."""

    def __init__(self, ray, archive, *_, **__):
        self.archive, self.most = archive, 0
        Counted.last = self

    def begin(self, trial):
        return trial

    def wait(self, running):
        self.most = max(self.most, len(running))
        return list(running)[:1]

    def outcome(self, task, trial):
        run_one(trial, self.archive)
        return cluster._Outcome()

    def notes(self):
        return []

    def close(self):
        pass


@pytest.mark.parametrize(("jobs", "most"), [(None, 3), (2, 2), (1, 1)])
def test_a_cluster_is_given_as_many_trials_at_a_time_as_jobs_says(tmp_path, monkeypatch, jobs, most):
    monkeypatch.setattr(cluster, "imported", lambda: None)
    monkeypatch.setattr(cluster, "connected", lambda ray: nullcontext())
    monkeypatch.setattr(cluster, "_Crew", Counted)
    trials = [Trial(task("digits-one-layer").lasting(1), Recipe("SGD", 0.1), seed) for seed in range(3)]
    assert len(run_trials(trials, Archive(tmp_path), engine="ray", jobs=jobs)) == 3
    assert Counted.last.most == most


@pytest.fixture(scope="module")
def serial(tmp_path_factory):
    """The archive and the results of one process, without their times."""
    archive = Archive(tmp_path_factory.mktemp("serial"))
    return archive, timeless(run_trials(TRIALS, archive, engine="serial"))


def timeless(results):
    return [replace(result, seconds=0.0) for result in results]


def holder(archive, trial):
    """The process that trains a trial."""
    return int((archive.root / ".claims" / trial.key[:16] / "run.lock").read_text().split()[0])


def alive(process):
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


def wait_until(holds, seconds=30.0):
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    assert holds()


@pytest.fixture
def unshared(monkeypatch):
    """Workers do not find the file that marks a shared archive, as on another machine."""

    @contextmanager
    def nowhere(archive):
        yield archive.root / "not there"

    monkeypatch.setattr(cluster, "_marked", nowhere)


def test_results_are_those_of_one_process_bit_for_bit_and_land_in_the_archive(ray, serial, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    archive, seen = Archive("archive"), []  # a relative folder, which workers could take for another
    results = run_trials(
        TRIALS,
        archive,
        engine="ray",
        on_note=lambda note: seen.append((note.key, note.epoch)),
        on_done=lambda trial, result: seen.append((trial.key, result)),
    )
    assert timeless(results) == serial[1]
    for trial in (TRIALS[0].source, *TRIALS):
        result = archive.result(trial)
        assert [what for key, what in seen if key == trial.key] == [1, 2, result]
        with gyroscope.load(archive.folder(trial)) as run:
            assert run.scalars["loss"].values.tolist() == result.loss
    assert seen.index((TRIALS[0].source.key, archive.result(TRIALS[0].source))) < seen.index((TRIALS[0].key, 1))
    assert ray.is_initialized()
    assert [one for one in (tmp_path / "archive" / ".claims").iterdir() if one.is_file()] == []


def test_machines_that_do_not_share_the_archive_send_what_they_trained(ray, serial, tmp_path, unshared):
    archive = Archive(tmp_path)
    interrupted = archive.folder(TRIALS[1])
    interrupted.mkdir(parents=True)
    for name in (CHECKPOINT, "run.sqlite", "run.sqlite-wal", "run.sqlite-journal"):
        (interrupted / name).write_bytes(b"of a training that was interrupted here")
    assert timeless(run_trials(TRIALS, archive, engine="ray")) == serial[1]
    for trial in (TRIALS[0].source, *TRIALS):
        here, there = archive.folder(trial), serial[0].folder(trial)
        names = {file.name for file in there.iterdir()} - {"run.lock"}
        assert {file.name for file in here.iterdir()} == names
        with gyroscope.load(here) as run, gyroscope.load(there) as other:
            assert (run.series("rotation") == other.series("rotation")).all()
    assert torch.equal(archive.rates(TRIALS[0]).tangents, serial[0].rates(TRIALS[0]).tangents)
    kept, expected = archive.weights(TRIALS[1])["tested"], serial[0].weights(TRIALS[1])["tested"]
    assert all(torch.equal(kept[name], value) for name, value in expected.items())


def test_a_killed_worker_is_retried_and_goes_on_from_the_checkpoint(ray, tmp_path):
    archive, trial = Archive(tmp_path / "archive"), Trial(task("digits").lasting(60), Recipe("SGD", 3.0**-2))
    training = Training(trial, DIGITS.source.load(), folder=archive.folder(trial))
    for _ in training.proceed(lambda now: now.save() if now.epoch == 5 else None):
        if training.epoch == 5:
            break
    training.close()
    epochs = []

    def kill_once(note):
        epochs.append(note.epoch)
        if len(epochs) == 1:
            os.kill(holder(archive, trial), signal.SIGKILL)

    [result] = run_trials([trial], archive, engine="ray", on_note=kill_once)
    assert epochs.count(6) == 2
    assert min(epochs) == 6
    assert epochs[-1] == 60
    assert timeless([result]) == timeless(run_trials([trial], Archive(tmp_path / "serial"), engine="serial"))


def test_failing_trials_are_named_and_the_others_are_finished_first(ray, tmp_path):
    """One cannot be trained, one copies it, and the worker of one is killed more often than it is retried."""
    archive, done = Archive(tmp_path), []
    broken = replace(RECORDED, name="broken", only=99)
    trials = [Trial(DIGITS, broken), Trial(DIGITS, Recipe("copy", 1.0, control="layca", copies=broken)), LONG]

    def kill(note):
        if note.key == LONG.key:
            with suppress(ProcessLookupError):  # of the epochs that it had told of before
                os.kill(holder(archive, LONG), signal.SIGKILL)

    with pytest.raises(LabError) as error:
        run_on_ray([*trials, TRIALS[2]], archive, on_note=kill, on_done=lambda trial, _: done.append(trial), retries=0)
    said = str(error.value)
    assert said.startswith(
        "3 of 4 trials failed: broken, seed 0: `only` must be one of the 7 layers of digits-cnn, got 99.; "
    )
    assert "; SGD, seed 0: its worker was killed, or ran out of memory, 1 times; " in said
    assert said.endswith("; copy, seed 0: the trial whose rates it copies failed")
    assert done == [TRIALS[2]]


def test_an_interrupt_ends_the_trials_and_leaves_the_cluster(ray, tmp_path):
    archive, workers = Archive(tmp_path), []

    def interrupt(note):
        workers.append(holder(archive, LONG))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_on_ray([LONG], archive, on_note=interrupt)
    wait_until(lambda: not alive(workers[0]))
    wait_until(lambda: ray.available_resources().get("CPU") == 1)
    assert [one for one in (tmp_path / ".claims").iterdir() if one.is_file()] == []


def test_gpus_that_the_cluster_does_not_have_are_refused(ray, tmp_path):
    with pytest.raises(LabError, match=r"^`gpus` must be at most the 0 GPUs of the cluster, got 0\.5\. Try gpus=0"):
        run_on_ray(TRIALS, Archive(tmp_path), gpus=0.5)


SCRIPT = """
import sys
from lab.test_cluster import LONG, TRIALS
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.engine.engine import run_trials

if __name__ == "__main__":
    try:
        run_trials([LONG, TRIALS[2]], Archive(sys.argv[1]), engine="ray", on_done=lambda *_: print("done", flush=True))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")
def test_an_instance_of_its_own_is_quiet_and_leaves_nothing_running_after_an_interrupt(tmp_path):
    pytest.importorskip("ray")
    mark, tests = uuid.uuid4().hex, Path(__file__).parents[1]
    environment = os.environ | {"RAY_ADDRESS": "local", "PYTHONPATH": str(tests), "GYROSCOPE_TEST": mark}

    def left():
        return [one for one in Path("/proc").glob("[0-9]*/environ") if mark.encode() in _content(one)]

    driver = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    with driver:
        try:
            assert driver.stdout.readline() == "done\n"
            assert len(left()) > 2  # the driver, and what Ray has started
            os.killpg(driver.pid, signal.SIGINT)  # as a terminal does, to every process
            said, error = driver.communicate(timeout=120)
        finally:
            driver.kill()
    assert (driver.returncode, said, error) == (0, "interrupted\n", "")
    wait_until(lambda: left() == [])
    assert Archive(tmp_path).result(TRIALS[2]) is not None
    assert Archive(tmp_path).result(LONG) is None


def _content(file):
    try:
        return file.read_bytes()
    except OSError:
        return b""


def test_without_ray_the_engine_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'gyroscope-lab\[ray\]'"):
        run_trials(TRIALS, Archive(tmp_path), engine="ray")
    assert list(tmp_path.iterdir()) == []


class OneDone:
    """Workers, one of which has sent its training."""

    def wait(self, running):
        return [next(iter(running))]

    def notes(self):
        return []

    def outcome(self, done, trial):
        return cluster._Outcome(parcel={"result.json": b"no result"})


def test_a_result_that_cannot_be_kept_is_a_failure_of_its_trial_alone(tmp_path):
    running = {"first": TRIALS[1], "second": TRIALS[2]}
    [said] = cluster._ended(OneDone(), Archive(tmp_path), running, lambda note: None, lambda trial, result: None)
    assert said.startswith(f"Layca, seed 0: {tmp_path}")
    assert running == {"second": TRIALS[2]}


def test_a_result_that_another_machine_has_written_is_waited_for_and_missed_in_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "_SEEN_WITHIN", 0.5)
    answers = iter([None, None, "a result"])
    archive = Archive(tmp_path)
    monkeypatch.setattr(archive, "result", lambda trial: next(answers, None))
    assert cluster._seen(archive, TRIALS[1]) == "a result"
    with pytest.raises(LabError, match=r"has none\. Do the machines share that folder"):
        cluster._seen(archive, TRIALS[1])


class NoCluster:
    """Ray without a cluster that answers."""

    def __init__(self):
        self.asked = []

    def is_initialized(self):
        return False

    def init(self, address=None, **options):
        self.asked.append(address)
        if address != "local":
            raise ConnectionError("nobody there")

    def shutdown(self):
        self.asked.append("shutdown")


def test_a_cluster_that_does_not_answer_is_named(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
            monkeypatch.setenv("RAY_ADDRESS", address)
            ray = NoCluster()
            with pytest.raises(LabError, match=rf"answers at RAY_ADDRESS={address} \(nobody there\)"), connected(ray):
                pass
            assert ray.asked == [None, "shutdown"]
    ray = NoCluster()
    with pytest.raises(LabError, match=r"answers at RAY_ADDRESS=.* \(.*Connection refused\)"), connected(ray):
        pass
    assert ray.asked == ["shutdown"]  # Ray itself would try for minutes


def test_where_a_cluster_was_one_of_this_machine_is_started_and_stopped(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    ray, handler = NoCluster(), signal.getsignal(signal.SIGTERM)
    with connected(ray):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as Ray sets its own
        assert ray.asked == [None, "local"]
    assert ray.asked[2:] == ["shutdown"]
    assert signal.getsignal(signal.SIGTERM) == handler
    with socket.create_server(("127.0.0.1", 0)) as server:
        gone = server.getsockname()[1]
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{gone}")  # where `ray start` notes it
    ray = NoCluster()
    with connected(ray):
        assert ray.asked == ["local"]
