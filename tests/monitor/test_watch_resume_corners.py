"""Corners of resuming, of references and of several ranks that have cut somebody: each claim was once false."""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import threading
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import watch_ranks as ranks
from resume_models import go, momentum, net, rotations, weights
from torch import nn

import forked
import gyroscope
from gyroscope.errors import MonitorError, StoreError
from gyroscope.monitor import reference

NAMES = ("0.weight", "2.weight", "4.weight")
PLAIN = {"budget": None, "activations": False, "detail_every": 1000}


def train(model, folder, steps, *, load=None, lr=None, **options):
    optimizer = momentum(model.parameters())
    if lr is not None:
        optimizer.param_groups[0]["lr"] = lr
    with gyroscope.watch(model, optimizer, folder, **PLAIN | options) as monitor:
        if load is not None:
            monitor.load_state_dict(load)
        go(model, optimizer, steps)
        return monitor.state_dict()


def test_after_a_resumption_off_the_interval_multiples_of_it_are_measured(tmp_path):
    model = net()
    train(model, tmp_path / "run", range(10), every=4)
    train(model, tmp_path / "run", range(10, 21), every=4)
    assert gyroscope.load(tmp_path / "run").steps.tolist() == [0, 4, 8, 10, 12, 16, 20, 21]


def test_after_steps_that_were_asked_for_multiples_of_the_interval_are_measured(tmp_path):
    model = net()
    optimizer = momentum(model.parameters())
    with gyroscope.watch(model, optimizer, tmp_path / "run", every=4, **PLAIN) as monitor:
        go(model, optimizer, range(5))
        monitor.sample(next_steps=2)
        go(model, optimizer, range(5, 13))
    assert gyroscope.load(tmp_path / "run").steps.tolist() == [0, 4, 6, 7, 8, 12, 13]


def test_a_run_started_over_with_the_same_weights_begins_at_step_0(tmp_path):
    train(net(), tmp_path / "run", range(6), lr=1e-5)  # as in a warm-up: hardly anything moves
    train(net(), tmp_path / "run", range(2), lr=1e-5)
    run = gyroscope.load(tmp_path / "run")
    assert [a.start_step for a in run.attempts] == [0, 0]
    assert run.steps.tolist() == [0, 1, 2]


@pytest.mark.parametrize("logs", [False, True])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("weights", ["other", "of step 3", "state of step 3"])
def test_a_run_stays_as_it_is_until_a_step_is_taken(tmp_path, caplog, logs, fails, weights):
    """As when a script is started a second time, and is stopped before its first step."""
    model = net()
    state = train(model, tmp_path / "run", range(3))
    at_3 = copy.deepcopy(model.state_dict())
    train(model, tmp_path / "run", range(3, 6))
    before = (tmp_path / "run" / "run.sqlite").read_bytes()
    model = net(seed=5)
    if weights != "other":
        model.load_state_dict(at_3)
    with (
        contextlib.suppress(KeyboardInterrupt),
        gyroscope.watch(model, momentum(model.parameters()), tmp_path / "run", **PLAIN) as monitor,
    ):
        if weights == "state of step 3":
            monitor.load_state_dict(state)
        if logs:
            monitor.log(accuracy=0.1)
        monitor.record()
        if not logs:
            assert monitor.run.steps.tolist() == list(range(7))
        if fails:
            raise KeyboardInterrupt
        monitor.close()
    assert monitor.error is None
    with pytest.raises(StoreError, match=r"no step was taken.* dropped: 1") if logs else contextlib.nullcontext():
        monitor.flush()
    assert (tmp_path / "run" / "run.sqlite").read_bytes() == before
    assert gyroscope.load(tmp_path / "run").state == "ended"
    assert caplog.text.count("What was logged is dropped") == logs
    train(model, tmp_path / "run", range(2))  # nobody holds its lock


def test_a_run_that_was_set_back_and_then_stopped_says_both(tmp_path):
    model = net()
    optimizer = momentum(model.parameters())
    with (
        contextlib.suppress(KeyboardInterrupt),
        gyroscope.watch(model, optimizer, tmp_path / "run", **PLAIN) as monitor,
    ):
        go(model, optimizer, range(3))
        state = monitor.state_dict()
        go(model, optimizer, range(3, 6))
        monitor.load_state_dict(state)
        raise KeyboardInterrupt
    run = gyroscope.load(tmp_path / "run")
    assert run.state == "interrupted"
    assert run.steps.tolist() == [0, 1, 2, 3]
    assert [event.kind for event in run.events] == ["start", "resume", "stop"]


def test_a_run_that_was_only_opened_is_not_set_back_without_a_step(tmp_path):
    model = net()
    state = train(model, tmp_path / "run", range(3))
    train(model, tmp_path / "run", range(3, 6))
    with gyroscope.watch(model, momentum(model.parameters()), tmp_path / "run", **PLAIN) as monitor:
        monitor.flush()
        monitor.load_state_dict(state)
    assert gyroscope.load(tmp_path / "run").steps.tolist() == list(range(7))


def test_shards_that_end_with_an_exception_say_that_what_was_logged_is_dropped(tmp_path, caplog, monkeypatch):
    model = net()
    optimizer = momentum(model.parameters())
    with (
        contextlib.suppress(KeyboardInterrupt),
        gyroscope.watch(model, optimizer, tmp_path / "run", **PLAIN) as monitor,
    ):
        go(model, optimizer, range(3))
        monitor.load_state_dict(monitor.state_dict())
        monitor.log(accuracy=0.1)
        monkeypatch.setattr(monitor, "_sharded", True)
        raise KeyboardInterrupt
    assert "What was logged is dropped" in caplog.text
    with pytest.raises(StoreError, match=r"or a state was loaded.* dropped: 1"):
        monitor.flush()


def test_what_is_logged_of_the_weights_of_a_run_is_kept_without_a_step(tmp_path):
    model = net()
    train(model, tmp_path / "run", range(6))
    with gyroscope.watch(model, momentum(model.parameters()), tmp_path / "run", **PLAIN) as monitor:
        monitor.log(accuracy=0.1)
    run = gyroscope.load(tmp_path / "run")
    assert run.steps.tolist() == list(range(7))
    assert run.scalars["accuracy"].steps.tolist() == [6]


@pytest.mark.parametrize(("at", "how"), [(10, "weights"), (10, "state"), (12, "state")])
def test_losses_after_the_last_measured_step_of_a_killed_run_stay_until_a_step_is_taken(tmp_path, at, how):
    model = net()
    optimizer = momentum(model.parameters())
    with gyroscope.watch(model, optimizer, tmp_path / "run", every=10, **PLAIN) as monitor:
        go(model, optimizer, range(at), monitor)
        kept, state = copy.deepcopy(model.state_dict()), monitor.state_dict()
        go(model, optimizer, range(at, 15), monitor)
        monitor.flush()
        shutil.copytree(tmp_path / "run", tmp_path / "killed")
    model.load_state_dict(kept)
    with gyroscope.watch(model, momentum(model.parameters()), tmp_path / "killed", every=10, **PLAIN) as monitor:
        if how == "state":
            monitor.load_state_dict(state)
        monitor.log(accuracy=0.1)
        with pytest.raises(StoreError, match="with the first step"):
            monitor.flush()
    run = gyroscope.load(tmp_path / "killed")
    assert run.steps.tolist() == [0, 10]
    assert run.scalars["loss"].steps.tolist() == list(range(1, 16))


def test_a_run_is_read_while_what_was_logged_waits_for_a_step_and_after_it_was_dropped(tmp_path):
    model = net()
    train(model, tmp_path / "run", range(3))
    at_3 = copy.deepcopy(model.state_dict())
    train(model, tmp_path / "run", range(3, 6))
    model.load_state_dict(at_3)
    monitor = gyroscope.watch(model, momentum(model.parameters()), tmp_path / "run", **PLAIN)
    monitor.log(accuracy=0.1)
    for said in ("with the first step", "dropped: 1"):
        assert monitor.run.steps.tolist() == list(range(7))
        assert list(gyroscope.diagnose(monitor)) == list(gyroscope.diagnose(tmp_path / "run"))
        with pytest.raises(StoreError, match=said):
            monitor.flush()
        monitor.close()


def test_a_run_that_could_not_be_resumed_at_its_first_step_says_that_recording_stopped(tmp_path, caplog):
    model = net()
    train(model, tmp_path / "run", range(6))
    (tmp_path / "run" / "reference.pt").unlink()
    optimizer = momentum(model.parameters())
    with gyroscope.watch(model, optimizer, tmp_path / "run", step=6, **PLAIN) as monitor:
        monitor.log(accuracy=0.1)
        go(model, optimizer, range(6, 8))
    assert "recording stopped before its first step. What was logged is dropped" in caplog.text
    assert "no step was taken" not in caplog.text


@pytest.mark.parametrize("how", ["weights", "state", "step", "new"])
def test_what_is_logged_before_the_first_step_is_of_the_step_that_training_is_at(tmp_path, how):
    """As by a script that validates first: it must not replace what was logged at step 0."""
    model = net()
    state = train(model, tmp_path / "run", range(6))
    folder, step = tmp_path / ("other" if how == "new" else "run"), 6 if how in ("step", "new") else None
    optimizer = momentum(model.parameters())
    with gyroscope.watch(model, optimizer, folder, step=step, **PLAIN) as monitor:
        monitor.log(accuracy=0.1)
        monitor.note("validated")
        if how == "state":
            monitor.load_state_dict(state)
        go(model, optimizer, range(6, 8))
    run = gyroscope.load(folder)
    assert run.scalars["accuracy"].steps.tolist() == [6]
    assert [event.step for event in run.events if event.text == "validated"] == [6]


def test_a_slow_run_goes_on_at_the_step_of_its_checkpoint(tmp_path):
    model = net()
    train(model, tmp_path / "run", range(4), lr=1e-5)
    kept = {k: v.clone() for k, v in model.state_dict().items()}
    train(model, tmp_path / "run", range(4, 8), lr=1e-5)
    model.load_state_dict(kept)
    train(model, tmp_path / "run", range(4, 6), lr=1e-5)
    assert [a.start_step for a in gyroscope.load(tmp_path / "run").attempts] == [0, 4, 4]


def test_a_loaded_reference_is_the_one_the_run_keeps(tmp_path):
    model = net()
    state = train(model, tmp_path / "first", range(5))
    train(net(seed=3), tmp_path / "second", range(2))  # begun from other weights
    train(model, tmp_path / "second", range(5, 8), load=state)
    with gyroscope.load(tmp_path / "second") as run:
        file = run.meta["reference_file"]
    kept = torch.load(tmp_path / "second" / file, weights_only=True)["tensors"]
    assert all(torch.equal(kept[name], w) for name, w in weights(net()).items())


def test_a_loaded_reference_lets_the_run_be_gone_on_with_by_its_weights(tmp_path):
    model = net()
    state = train(model, tmp_path / "first", range(5))
    train(net(seed=3), tmp_path / "second", range(2))
    train(model, tmp_path / "second", range(5, 8), load=state)
    train(model, tmp_path / "second", range(8, 10))
    run = gyroscope.load(tmp_path / "second")
    assert run.steps[-1] == 10
    np.testing.assert_allclose(run.series("rotation")[-1], rotations(model, weights(net()), NAMES), rtol=1e-4)


def test_what_was_measured_before_a_state_is_loaded_stays_as_it_was_measured(tmp_path):
    state = train(net(), tmp_path / "first", range(9))
    model = net(seed=3)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)  # another norm of the reference
    start = weights(model)
    optimizer = momentum(model.parameters())
    with gyroscope.watch(model, optimizer, tmp_path / "second", **PLAIN) as monitor:
        go(model, optimizer, range(3))
        expected = rotations(model, start, NAMES)
        monitor.load_state_dict(state)
        go(model, optimizer, range(9, 11))
    run = gyroscope.load(tmp_path / "second")
    np.testing.assert_allclose(run.series("rotation", steps=[3])[0], expected, rtol=1e-4)


def test_the_folder_of_a_run_stands_for_the_reference_of_its_last_attempt(tmp_path):
    train(net(), tmp_path / "first", range(2))
    train(net(seed=3), tmp_path / "first", range(2))  # begun anew: this is what the run shows
    model = net(seed=5)
    train(model, tmp_path / "second", range(2), reference=tmp_path / "first")
    found = gyroscope.load(tmp_path / "second").series("rotation")[-1]
    np.testing.assert_allclose(found, rotations(model, weights(net(seed=3)), NAMES), rtol=1e-5)


def test_another_number_of_optimizers_is_named_as_what_differs(tmp_path):
    train(net(), tmp_path / "run", range(2))
    model = net()
    both = [momentum(model[:2].parameters()), momentum(model[2:].parameters())]
    with pytest.raises(MonitorError, match="optimizer"):
        gyroscope.watch(model, both, tmp_path / "run")


def test_a_missing_reference_is_said_to_be_what_is_missing(tmp_path, caplog):
    model = net()
    train(model, tmp_path / "run", range(4))
    (tmp_path / "run" / "reference.pt").unlink()
    train(model, tmp_path / "run", range(4, 6))
    assert "reference.pt" in caplog.text
    assert "the weights are those of none of its steps" not in caplog.text


def test_a_reference_file_of_other_layers_is_as_good_as_none(tmp_path):
    model = net()
    train(model, tmp_path / "run", range(4))
    torch.save({"tensors": {}, "squares": {}}, tmp_path / "run" / "reference.pt")
    optimizer = momentum(model.parameters())
    with gyroscope.watch(model, optimizer, tmp_path / "run", **PLAIN) as monitor:
        go(model, optimizer, range(4, 6))
    assert monitor.error is None


def test_a_state_without_some_layers_is_refused_in_words(tmp_path):
    model = net()
    state = train(model, tmp_path / "run", range(2))
    state["squares"].pop("2.weight")
    with pytest.raises(MonitorError, match=r"2\.weight"):
        train(model, tmp_path / "second", range(2), load=state)


def test_a_state_of_a_newer_version_is_refused(tmp_path):
    model = net()
    state = train(model, tmp_path / "run", range(2))
    with pytest.raises(MonitorError, match="version 2"):
        train(model, tmp_path / "second", range(2), load={**state, "version": 2})


def test_a_rounded_reference_gives_zero_at_step_0(tmp_path):
    train(net(width=60), tmp_path / "run", range(1), reference_dtype="bfloat16")
    assert (gyroscope.load(tmp_path / "run").series("rotation")[0] == 0).all()


def test_a_rounded_reference_stays_what_it_is_when_the_weights_change_their_layout(tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 32, 3), nn.Flatten(), nn.Linear(32 * 4, 2))
    start = weights(model)
    optimizer = momentum(model.parameters())
    with gyroscope.watch(model, optimizer, tmp_path / "run", reference_dtype="bfloat16", **PLAIN) as monitor:
        for step in range(2):
            if step == 1:
                held = monitor.held
                model.to(memory_format=torch.channels_last)
            optimizer.zero_grad()
            (model(torch.ones(3, 4, 4, 4)) - 1).square().mean().backward()
            optimizer.step()
        assert monitor.error is None
        assert monitor.held == held
        squares = monitor.state_dict()["squares"]
    for name, w in start.items():
        assert squares[name][0] == pytest.approx(float(w.double().square().sum()), rel=1e-12)


def test_a_float16_reference_of_a_bfloat16_model_keeps_its_norm_and_correction(tmp_path):
    model = net(width=60).bfloat16()
    origin = net(seed=4, width=60).half()
    train(model, tmp_path / "run", range(2), reference=origin)
    found = gyroscope.load(tmp_path / "run").series("rotation")[-1]
    expected = rotations(model, weights(origin), NAMES)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


# Two ranks. Each claim is a process group of its own, since one that does not hold may leave the other rank waiting.


def sgd(model):
    """An optimizer of few operations: torch takes long to find out how each is divided, in every process anew."""
    return torch.optim.SGD(model.parameters(), lr=0.01)


def _simple(folder, model=None, path="run", make=sgd, **options):
    model = ranks.shard(ranks.Kinds()) if model is None else model
    optimizer = make(model)
    return model, optimizer, gyroscope.watch(model, optimizer, folder / path, **ranks.PLAIN | options)


def an_exception_on_one_rank_does_not_stop_training(folder: Path) -> None:
    from gyroscope.monitor.track import Track

    model, optimizer, monitor = _simple(folder)
    ranks.go(model, optimizer, range(2), split=True)
    if dist.get_rank() == 1:
        Track.before = lambda self: 1 / 0
    ranks.go(model, optimizer, range(2, 12), split=True)
    monitor.close()


def a_full_disk_on_rank_0_does_not_stop_training(folder: Path) -> None:
    model, optimizer, monitor = _simple(folder)
    ranks.go(model, optimizer, range(2), split=True)
    if dist.get_rank() == 0:
        from gyroscope.errors import StoreError

        monitor._recorder.writer._mail.fail()
        monitor._recorder.writer.error = StoreError("the disk is full")
    ranks.go(model, optimizer, range(2, 12), split=True)
    monitor.close()


def a_state_can_be_loaded_after_some_steps(folder: Path) -> None:
    model, optimizer, monitor = _simple(folder, make=ranks.adamw)
    ranks.go(model, optimizer, range(3), split=True)
    state = monitor.state_dict()
    ranks.go(model, optimizer, range(3, 5), split=True)
    monitor.load_state_dict(state)
    ranks.go(model, optimizer, range(5, 8), split=True)
    assert monitor.error is None, monitor.error
    monitor.close()


def only_rank_0_sees_the_folder(folder: Path) -> None:
    """Nodes without a common disk: a resumed run exists for rank 0 alone."""
    own = folder / f"node-{dist.get_rank()}"
    model, optimizer, monitor = _simple(own)
    ranks.go(model, optimizer, range(3), split=True)
    monitor.close()
    dist.barrier()
    optimizer = sgd(model)
    with gyroscope.watch(model, optimizer, own / "run", **ranks.PLAIN) as monitor:
        ranks.go(model, optimizer, range(3, 6), split=True)
        assert monitor.error is None, monitor.error


def a_run_that_is_sharded_after_watch_says_so_to_the_rank_that_asks(folder: Path) -> None:
    """As it looks for its weights among the steps of the run: of shards, it would wait for the other rank."""
    model, optimizer, monitor = _simple(folder, ranks.Kinds())
    ranks.go(model, optimizer, range(2), split=True)
    monitor.close()
    dist.barrier()
    model, optimizer, monitor = _simple(folder, model)
    optimizer.param_groups[0]["params"] = list(ranks.shard(model).parameters())
    if dist.get_rank() == 0:
        with pytest.raises(StoreError, match="was sharded after `watch`"):
            monitor.flush()
    ranks.go(model, optimizer, range(2, 4), split=True)
    assert isinstance(monitor.error, MonitorError) == (dist.get_rank() == 0)
    monitor.close()


def rank_0_logs_alone_before_the_first_step(folder: Path) -> None:
    model, optimizer, monitor = _simple(folder)
    if dist.get_rank() == 0:
        monitor.log(loss=1.0)
    ranks.go(model, optimizer, range(3), split=True)
    assert monitor.error is None, monitor.error
    monitor.close()


def shards_of_unequal_size_are_rounded_alike(folder: Path) -> None:
    reference._LARGE, reference._WORTH_ROUNDING = 8, 1
    model, optimizer, monitor = _simple(folder)
    ranks.go(model, optimizer, range(3), split=True)
    state = monitor.state_dict()
    assert monitor.error is None, monitor.error
    fresh = {layer.name: layer.parameter.detach() for layer in gyroscope.layers(ranks.Kinds())}
    for name, w in fresh.items():
        torch.testing.assert_close(state["reference"][name].float(), w, rtol=2**-8, atol=0)
    monitor.close()


def each_data_parallel_rank_loads_the_state_it_saved(folder: Path) -> None:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(ranks.Kinds())
    _, optimizer, monitor = _simple(folder, model, make=ranks.adamw)
    ranks.go(model, optimizer, range(2), split=True)
    monitor.load_state_dict(monitor.state_dict())
    monitor.close()


def a_failed_measurement_on_one_rank_does_not_stop_training(folder: Path) -> None:
    """At the first step, which is sampled too, and past the next agreement on the interval."""
    from gyroscope.monitor import clock
    from gyroscope.monitor.track import Track

    clock._AGREE = 4
    real, count = Track._matrix, 0

    def fails_once(self, *given):
        nonlocal count
        count += 1
        if dist.get_rank() == 1 and count == 2:  # the first is that of step 0
            raise MemoryError("made up")
        return real(self, *given)

    Track._matrix = fails_once
    model, optimizer, monitor = _simple(folder, make=ranks.adamw, detail_every=3)
    ranks.go(model, optimizer, range(12), split=True)
    assert (monitor.error is not None) == (dist.get_rank() == 1)
    monitor.close()


def a_wish_of_the_first_rank_alone_is_heard_by_all(folder: Path) -> None:
    from gyroscope.monitor import clock

    clock._AGREE = 4
    model, optimizer, monitor = _simple(folder, every=2)
    if dist.get_rank() == 0:
        monitor.sample(next_steps=3)
    ranks.go(model, optimizer, range(14), split=True)
    if dist.get_rank() == 0:
        monitor.every = 1
    ranks.go(model, optimizer, range(14, 26), split=True)
    assert monitor.error is None, monitor.error
    assert monitor.every == 1
    monitor.close()
    dist.barrier()
    steps = gyroscope.load(folder / "run").steps.tolist()
    assert {8, 9, 10, 11} <= set(steps)  # agreed at the fourth measurement, step 8


def an_error_of_one_rank_in_training_is_raised_at_once(folder: Path) -> None:
    model = ranks.shard(ranks.Kinds())
    optimizer = sgd(model)
    failing = dist.get_rank() == 1
    watched = gyroscope.watch(model, optimizer, folder / "run", **ranks.PLAIN | {"every": 4})
    with contextlib.suppress(ZeroDivisionError), watched as monitor:
        ranks.go(model, optimizer, range(6), split=True)
        if failing:
            raise ZeroDivisionError
        monitor._detach()  # this rank would go on training; here it only must not wait
        monitor._finish()
    assert not optimizer._optimizer_step_post_hooks


CLAIMS = [
    a_failed_measurement_on_one_rank_does_not_stop_training,
    a_wish_of_the_first_rank_alone_is_heard_by_all,
    an_error_of_one_rank_in_training_is_raised_at_once,
    an_exception_on_one_rank_does_not_stop_training,
    a_full_disk_on_rank_0_does_not_stop_training,
    a_state_can_be_loaded_after_some_steps,
    only_rank_0_sees_the_folder,
    a_run_that_is_sharded_after_watch_says_so_to_the_rank_that_asks,
    rank_0_logs_alone_before_the_first_step,
    shards_of_unequal_size_are_rounded_alike,
    each_data_parallel_rank_loads_the_state_it_saved,
]


def rank(number: int, name: str, folder: str) -> None:
    torch.set_num_threads(1)
    threading.Timer(100, os._exit, (3,)).start()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=number, world_size=2, timeout=timedelta(seconds=60)
    )
    globals()[name](Path(folder))
    dist.barrier()
    Path(folder, f"done-{number}").touch()
    os._exit(0)


@pytest.mark.parametrize("claim", [claim.__name__ for claim in CLAIMS])
def test_two_ranks_agree_that(claim, tmp_path):
    forked.start(rank, claim, str(tmp_path), processes=2)
    assert all((tmp_path / f"done-{i}").exists() for i in range(2))
