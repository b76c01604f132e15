"""Whatever goes wrong in a monitor, training goes on, it is said once, and what was recorded stays."""

from __future__ import annotations

import errno
import logging
import os
import resource
import shutil
import sqlite3
from contextlib import suppress

import numpy as np
import pytest
import torch
import torch.nn.utils.prune
from watched import inputs, mlp, train

import gyroscope
from gyroscope.errors import MonitorError, StoreError
from gyroscope.monitor.detail import Detail, Neurons
from gyroscope.monitor.recorder import Recorder
from gyroscope.monitor.track import Track
from gyroscope.passes.activations import ActivationProbe
from gyroscope.store import Deferred, Writer, writer


class After:
    """Stands for a method, and fails from the n-th call on."""

    def __init__(self, real, calls: int, error: Exception) -> None:
        self.real, self.left, self.error = real, calls, error

    def __get__(self, instance, owner):
        return lambda *args, **kwargs: self(instance, *args, **kwargs)

    def __call__(self, *args, **kwargs):
        self.left -= 1
        if self.left < 0:
            raise self.error
        return self.real(*args, **kwargs)


PLACES = {
    "before": (Track, "before"),
    "measure": (Track, "measure"),
    "collect": (Detail, "collect"),
    "attach": (Detail, "attach"),
    "neurons": (Neurons, "measure"),
    "activations": (ActivationProbe, "collect"),
    "handing over": (Recorder, "measured"),
    "numbers": (Recorder, "scalars"),
}


@pytest.mark.parametrize("error", [ValueError("made up"), KeyError("made up"), MemoryError("made up")])
@pytest.mark.parametrize(("owner", "method"), PLACES.values(), ids=PLACES.keys())
def test_an_exception_in(tmp_path, monkeypatch, caplog, owner, method, error):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = gyroscope.watch(model, optimizer, tmp_path / "run", detail_every=1, neurons=True, budget=None)
    train(model, optimizer, inputs(3)[:2])
    monitor.flush()
    with gyroscope.load(monitor.path) as run:
        before = run.series("rotation")
        assert run.steps.tolist() == [0, 1, 2]
    monkeypatch.setattr(owner, method, After(getattr(owner, method), 0, error))
    with caplog.at_level(logging.WARNING, "gyroscope"):
        for x in inputs(3)[2:]:
            train(model, optimizer, [x])
            monitor.log(loss=1.0)
            monitor.note("words")
        train(model, optimizer, inputs(2, seed=9))
        monitor.close()
    bare = mlp()
    train(bare, torch.optim.SGD(bare.parameters(), 0.1), [*inputs(3), *inputs(2, seed=9)])
    for a, b in zip(bare.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert monitor.error is error
    assert len([r for r in caplog.records if "made up" in r.getMessage()]) == 1
    assert all(not module._forward_hooks for module in model.modules())
    assert not optimizer._optimizer_step_post_hooks
    with gyroscope.load(monitor.path) as run:
        np.testing.assert_array_equal(run.series("rotation")[:3], before)


def test_what_made_it_stop_is_in_the_run(tmp_path, monkeypatch):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monkeypatch.setattr(Track, "measure", After(Track.measure, 3, ValueError("made up")))
    with gyroscope.watch(model, optimizer, tmp_path / "run") as monitor:
        train(model, optimizer, inputs(5))
    with gyroscope.load(monitor.path) as run:
        assert run.steps.tolist() == [0, 1, 2]
        assert [e.text for e in run.events if e.kind == "error"] == ["recording stopped: ValueError: made up"]


def test_an_exception_in_training_is_noted_and_passed_on(tmp_path):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def breaks_off():
        with gyroscope.watch(model, optimizer, tmp_path / "run"):
            train(model, optimizer, inputs(2))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        breaks_off()
    with gyroscope.load(tmp_path / "run") as run:
        assert run.steps.tolist() == [0, 1, 2]
        assert any(e.kind == "stop" and "ZeroDivisionError" in e.text for e in run.events)


def test_a_step_that_fails_is_none_and_the_next_is_measured(tmp_path):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def fails():
        raise ZeroDivisionError

    with gyroscope.watch(model, optimizer, tmp_path / "run") as monitor:
        train(model, optimizer, inputs(2))
        with pytest.raises(ZeroDivisionError):
            optimizer.step(fails)
        train(model, optimizer, inputs(2))
    assert monitor.error is None
    with gyroscope.load(monitor.path) as run:
        assert run.steps.tolist() == [0, 1, 2, 3, 4]


class Failing:
    """A sink that fails at a given moment."""

    def __init__(self, when: str) -> None:
        self.when, self.records = when, 0

    def open(self, layers, quantities, meta) -> None:
        self._maybe("open")

    def write(self, record) -> None:
        self.records += 1
        self._maybe("write")

    def close(self, run) -> None:
        self._maybe("close")

    def _maybe(self, moment: str) -> None:
        if moment == self.when:
            raise RuntimeError("made up")


def test_a_layer_that_is_pruned_during_training_is_named(tmp_path):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gyroscope.watch(model, optimizer, tmp_path / "run") as monitor:
        train(model, optimizer, inputs(2))
        torch.nn.utils.prune.random_unstructured(model[2], "weight", 0.5)
        train(model, optimizer, inputs(2))
    assert isinstance(monitor.error, MonitorError)
    assert "'2.weight' is no longer a parameter of its module" in str(monitor.error)
    with gyroscope.load(monitor.path) as run:
        assert run.steps.tolist() == [0, 1, 2]


@pytest.mark.parametrize("when", ["open", "write", "close"])
def test_a_sink_that_fails_does_not_stop_the_recording(tmp_path, caplog, when):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with (
        caplog.at_level(logging.WARNING, "gyroscope"),
        gyroscope.watch(model, optimizer, tmp_path / "run", sinks=[Failing(when)]) as monitor,
    ):
        for x in inputs(4):
            train(model, optimizer, [x])
            monitor.flush()
    assert monitor.error is None
    assert len([r for r in caplog.records if "made up" in r.getMessage()]) == 1
    with gyroscope.load(monitor.path) as run:
        assert run.steps.tolist() == [0, 1, 2, 3, 4]


def full_disk(*_args, **_kwargs):
    raise OSError(28, "No space left on device")


def test_a_full_disk_stops_the_recording_and_not_training(tmp_path, monkeypatch):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = gyroscope.watch(model, optimizer, tmp_path / "run")
    train(model, optimizer, inputs(2))
    monitor.flush()
    monkeypatch.setattr(monitor._recorder.writer._scribe, "_commit", full_disk)
    train(model, optimizer, inputs(2))
    with pytest.raises(StoreError, match="the disk is full"):
        monitor.flush()
    train(model, optimizer, inputs(2))
    monitor.close()
    assert isinstance(monitor.error, StoreError)
    with gyroscope.load(monitor.path) as run:
        assert run.steps.tolist() == [0, 1, 2]


def test_a_folder_that_cannot_be_made_is_refused_at_once(tmp_path):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="file"):
        gyroscope.watch(model, optimizer, tmp_path / "file" / "run")
    assert not optimizer._optimizer_step_post_hooks


def test_a_folder_that_is_removed_does_not_stop_training(tmp_path):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = gyroscope.watch(model, optimizer, tmp_path / "run")
    train(model, optimizer, inputs(2))
    monitor.flush()
    shutil.rmtree(monitor.path)
    train(model, optimizer, inputs(2))
    monitor.close()
    bare = mlp()
    train(bare, torch.optim.SGD(bare.parameters(), 0.1), [*inputs(2), *inputs(2)])
    for a, b in zip(bare.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_writer_that_cannot_keep_up_makes_the_interval_longer_and_says_so(tmp_path, monkeypatch):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = gyroscope.watch(model, optimizer, tmp_path / "run", budget=None)
    train(model, optimizer, inputs(1))
    real = Writer.put
    monkeypatch.setattr(Writer, "put", lambda self, r: False if isinstance(r, Deferred) else real(self, r))
    train(model, optimizer, inputs(5))  # steps 2, 4 are refused
    monkeypatch.setattr(Writer, "put", real)
    assert monitor.interval == 4
    train(model, optimizer, inputs(6))
    monitor.close()
    assert monitor.error is None
    with gyroscope.load(monitor.path) as run:
        assert run.steps[:2].tolist() == [0, 1]
        assert (np.diff(run.steps[1:]) >= 4).all()
        assert run.steps[-1] == 12
        said = [e.text for e in run.events if e.kind == "interval"]
        assert "every 2 steps" in said[0]
        assert "every 4 steps" in said[1]
        assert "2 measurements were dropped" in said[2]


@pytest.mark.parametrize(
    ("error", "state"), [(None, "ended"), (ValueError, "interrupted"), (KeyboardInterrupt, "interrupted")]
)
def test_training_that_is_stopped_by_an_exception_is_an_interrupted_run(tmp_path, error, state):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with suppress(ValueError, KeyboardInterrupt), gyroscope.watch(model, optimizer, tmp_path / "run"):
        train(model, optimizer, inputs(3))
        if error is not None:
            raise error
    run = gyroscope.load(tmp_path / "run")
    assert run.state == state
    assert run.steps[-1] == 3


def test_a_loop_of_ones_own_says_whether_it_came_to_its_end(tmp_path):
    model = mlp()
    monitor = gyroscope.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path / "run")
    monitor.close(interrupted=True)
    monitor.close()
    assert gyroscope.load(tmp_path / "run").state == "interrupted"


def test_an_exception_that_has_no_words_leaves_the_block_as_it_is(tmp_path):
    class WordlessError(Exception):
        def __str__(self):
            raise ValueError("no words")

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(WordlessError), gyroscope.watch(model, optimizer, tmp_path / "run"):
        raise WordlessError
    assert gyroscope.load(tmp_path / "run").state == "interrupted"


def test_flush_raises_once_the_monitor_has_stopped(tmp_path, monkeypatch):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = gyroscope.watch(model, optimizer, tmp_path / "run", budget=None)
    train(model, optimizer, inputs(2))
    monitor.flush()
    monkeypatch.setattr(Track, "measure", After(Track.measure, 0, ValueError("made up")))
    train(model, optimizer, inputs(1))
    monitor.log(loss=1.0)
    for _ in range(2):
        with pytest.raises(StoreError, match="has stopped, and everything after that is lost: made up"):
            monitor.flush()
    monitor.close()


def test_flush_raises_where_a_measurement_could_not_be_worked_out(tmp_path, monkeypatch):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gyroscope.watch(model, optimizer, tmp_path / "run", budget=None) as monitor:
        train(model, optimizer, inputs(1))
        monitor.flush()
        with monkeypatch.context() as patch:
            patch.setattr(Detail, "resolve", After(Detail.resolve, 0, ValueError("made up")))
            monitor.sample(1)
            train(model, optimizer, inputs(1))
            with pytest.raises(StoreError, match=r"lacks records .* failed: ValueError: made up"):
                monitor.flush()
        train(model, optimizer, inputs(1))
        monitor.flush()
    assert monitor.error is None
    with gyroscope.load(tmp_path / "run") as run:
        assert run.steps.tolist() == [0, 1, 2, 3]


def test_a_loss_function_that_fails_is_reported_once_and_all_else_is_recorded(tmp_path, caplog):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    known = {}
    monitor = gyroscope.watch(model, optimizer, tmp_path / "run", budget=None, loss=lambda: known["loss"])
    with caplog.at_level(logging.WARNING, "gyroscope"):
        for k in range(4):
            train(model, optimizer, inputs(1))
            monitor.log(accuracy=k)
            monitor.note(f"epoch {k}")
            if k == 1:
                known["loss"] = 0.5
    monitor.flush()
    with gyroscope.load(monitor.path) as run:
        assert run.steps.tolist() == [0, 1, 2, 3, 4]
        assert run.scalars["accuracy"].values.tolist() == [0, 1, 2, 3]
        assert run.scalars["loss"].steps.tolist() == [3, 4]
        assert [e.text for e in run.events if e.kind == "note"][-4:] == [f"epoch {k}" for k in range(4)]
        (said,) = [e.text for e in run.events if e.kind == "error"]
    assert said.startswith("the loss function failed: KeyError: 'loss'")
    assert len([r for r in caplog.records if "loss function" in r.getMessage()]) == 1
    assert monitor.error is None
    monitor.close()


def resumable(path):
    """A model and its optimizer that have been watched in `path`."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gyroscope.watch(model, optimizer, path, budget=None):
        train(model, optimizer, inputs(2))
    return model, optimizer


def test_a_second_resumer_of_a_run_is_refused_before_either_steps(tmp_path):
    model, optimizer = resumable(tmp_path / "run")
    first = gyroscope.watch(model, optimizer, tmp_path / "run", budget=None)
    with pytest.raises(StoreError, match="is being written by another writer"):
        gyroscope.watch(model, optimizer, tmp_path / "run", budget=None)
    train(model, optimizer, inputs(1))
    first.flush()
    first.close()
    with gyroscope.watch(model, optimizer, tmp_path / "run", budget=None) as third:
        train(model, optimizer, inputs(1))
    assert third.error is None
    with gyroscope.load(tmp_path / "run") as run:
        assert [attempt.start_step for attempt in run.attempts] == [0, 2, 3]


def test_a_watch_that_fails_leaves_the_run_unlocked(tmp_path, monkeypatch):
    model, optimizer = resumable(tmp_path / "run")
    with monkeypatch.context() as patched:
        patched.setattr(Track, "measure", After(Track.measure, 0, ValueError("made up")))
        with pytest.raises(ValueError, match="made up"):
            gyroscope.watch(model, optimizer, tmp_path / "run")
    gyroscope.watch(model, optimizer, tmp_path / "run").close()


def test_resuming_on_a_full_disk_is_refused_in_watch(tmp_path):
    model, optimizer = resumable(tmp_path / "run")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))  # enough to open the run, too little to go on with it
    try:
        with pytest.raises(StoreError, match=r"run\.sqlite cannot be written"):
            gyroscope.watch(model, optimizer, tmp_path / "run", budget=None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not optimizer._optimizer_step_post_hooks
    with gyroscope.watch(model, optimizer, tmp_path / "run", budget=None):
        train(model, optimizer, inputs(1))
    with gyroscope.load(tmp_path / "run") as run:
        assert run.steps.tolist() == [0, 1, 2, 3]


def test_a_disk_without_space_is_called_full(tmp_path, monkeypatch):
    model, optimizer = resumable(tmp_path / "run")

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match=r"the disk is full\. Free some space and resume the run"):
        gyroscope.watch(model, optimizer, tmp_path / "run")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_child_does_not_keep_a_run_locked_that_was_not_begun(tmp_path):
    model, optimizer = resumable(tmp_path / "run")
    monitor = gyroscope.watch(model, optimizer, tmp_path / "run")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)  # lives until the parent lets it go
        os._exit(0)
    os.close(reading)
    monitor.close()
    gyroscope.watch(model, optimizer, tmp_path / "run").close()
    os.close(writing)
    os.waitpid(child, 0)


def test_logged_values_that_find_no_room_are_counted_and_flush_raises(tmp_path, monkeypatch, caplog):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = gyroscope.watch(model, optimizer, tmp_path / "run", budget=None)
    train(model, optimizer, inputs(1))
    monitor.flush()
    monkeypatch.setattr(writer, "SMALL", 8)
    locked = sqlite3.connect(tmp_path / "run" / "run.sqlite", isolation_level=None)
    locked.execute("BEGIN IMMEDIATE")
    with caplog.at_level(logging.WARNING, "gyroscope"):
        for k in range(40):
            monitor.log({f"number {k}": k})
    locked.execute("ROLLBACK")
    locked.close()
    with pytest.raises(StoreError, match=r"lacks \d+ logged values and notes up to step 1"):
        monitor.flush()
    assert len([r for r in caplog.records if "cannot keep up" in r.getMessage()]) == 1
    with gyroscope.load(monitor.path) as run:
        (said,) = [e.text for e in run.events if e.kind == "error"]
        assert len(run.scalars) + int(said.split()[0]) == 40
    monitor.log(late=1.0)
    monitor.flush()  # each loss is reported once
    monitor.close()
    assert monitor.error is None
    with gyroscope.load(monitor.path) as run:
        assert run.scalars["late"].values.tolist() == [1.0]


def test_values_logged_after_close_are_dropped_with_one_warning_and_flush_raises(tmp_path, caplog):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gyroscope.watch(model, optimizer, tmp_path / "run", budget=None) as monitor:
        train(model, optimizer, inputs(1))
        monitor.log(loss=1.0)
    monitor.flush()
    with caplog.at_level(logging.WARNING, "gyroscope"):
        monitor.log(test_accuracy=0.9)
        monitor.note("tested")
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{monitor.path} is closed, so test_accuracy was dropped")
    with pytest.raises(StoreError, match="came later and were dropped: 2"):
        monitor.flush()
    assert monitor.error is None
    with monitor.run as run:
        assert list(run.scalars) == ["loss"]


def test_values_that_were_dropped_before_the_end_are_counted_in_the_run(tmp_path, monkeypatch):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gyroscope.watch(model, optimizer, tmp_path / "run", budget=None) as monitor:
        train(model, optimizer, inputs(1))
        real = Writer.put
        monkeypatch.setattr(Writer, "put", lambda self, r: False)
        monitor.note("lost")
        monkeypatch.setattr(Writer, "put", real)
    with gyroscope.load(monitor.path) as run:
        assert "1 logged values and notes up to here were dropped" in run.events[-1].text
