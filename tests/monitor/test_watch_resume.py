"""A resumed run: from a state, from the weights alone, from a step; what is kept, and what is refused."""

from __future__ import annotations

import copy
import logging
import sqlite3
from contextlib import closing

import numpy as np
import pytest
import torch
from resume_models import adam, assert_same_curves, go, hooks, momentum, net, rotations, weights
from torch import nn

import gyroscope
from gyroscope import Layca
from gyroscope.errors import MonitorError

NAMES = ("0.weight", "2.weight", "4.weight")
# Sampled steps differ after a resumption, which is looked at in detail; these tests are about the weights.
PLAIN = {"budget": None, "activations": False, "detail_every": 1000}
MAKERS = {
    "momentum": lambda model: momentum(model.parameters()),
    "adam": lambda model: adam(model.parameters()),
    "layca": lambda model: Layca(momentum(model.parameters()), model),
}


def checkpoint(model, optimizer, monitor, file):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state | ({} if monitor is None else {"monitor": monitor.state_dict()}), file)


def restored(file, make):
    """Other objects, as in another process: model and optimizer of a checkpoint, and the state of its monitor."""
    found = torch.load(file, weights_only=True)
    model = net(seed=99)
    model.load_state_dict(found["model"])
    optimizer = make(model)
    optimizer.load_state_dict(found["optimizer"])
    return model, optimizer, found.get("monitor")


def in_one_go(folder, make=MAKERS["momentum"], steps=20, **options):
    model = net()
    optimizer = make(model)
    with gyroscope.watch(model, optimizer, folder, **PLAIN | options) as monitor:
        go(model, optimizer, range(steps), monitor)
    return gyroscope.load(folder)


def interrupted(folder, file, make=MAKERS["momentum"], *, at=10, until=None, state=True, **options):
    """A run that has a checkpoint of step `at` and went on until another one."""
    model = net()
    optimizer = make(model)
    with gyroscope.watch(model, optimizer, folder, **PLAIN | options) as monitor:
        go(model, optimizer, range(at), monitor)
        checkpoint(model, optimizer, monitor if state else None, file)
        go(model, optimizer, range(at, until or at), monitor)


def rows(folder, sql):
    with closing(sqlite3.connect(folder / "run.sqlite")) as database:
        return database.execute(sql).fetchall()


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("until", [10, 15])
@pytest.mark.parametrize("state", [True, False])
def test_a_resumed_run_has_the_curves_of_one_that_was_not_interrupted(make, until, state, tmp_path):
    whole = in_one_go(tmp_path / "whole", MAKERS[make])
    interrupted(tmp_path / "run", tmp_path / "c.pt", MAKERS[make], until=until, state=state)
    model, optimizer, saved = restored(tmp_path / "c.pt", MAKERS[make])
    with gyroscope.watch(model, optimizer, tmp_path / "run", **PLAIN) as monitor:
        if saved is not None:
            monitor.load_state_dict(saved)
        go(model, optimizer, range(10, 20), monitor)
        assert monitor.error is None
    run = gyroscope.load(tmp_path / "run")
    assert_same_curves(run, whole, resumed=[11])
    assert run.scalars["loss"].steps.tolist() == whole.scalars["loss"].steps.tolist()
    np.testing.assert_array_equal(run.scalars["loss"].values, whole.scalars["loss"].values)
    assert [(a.number, a.start_step) for a in run.attempts] == [(1, 0), (2, 10)]
    assert [e.step for e in run.events if e.kind == "resume"] == [10]


def test_what_was_recorded_after_the_checkpoint_is_superseded_by_another_branch_and_kept(tmp_path):
    interrupted(tmp_path / "run", tmp_path / "c.pt", until=15)
    before = rows(tmp_path / "run", "SELECT * FROM series WHERE attempt = 1 ORDER BY step, quantity")
    old = gyroscope.load(tmp_path / "run").series("rotation")
    model, optimizer, saved = restored(tmp_path / "c.pt", MAKERS["momentum"])
    optimizer.param_groups[0]["lr"] = 0.2
    with gyroscope.watch(model, optimizer, tmp_path / "run", **PLAIN) as monitor:
        monitor.load_state_dict(saved)
        go(model, optimizer, range(10, 20), monitor)
    run = gyroscope.load(tmp_path / "run")
    assert run.steps.tolist() == list(range(21))
    np.testing.assert_array_equal(run.series("rotation")[:11], old[:11])
    assert (run.series("rotation")[11:16] != old[11:16]).all()
    np.testing.assert_allclose(run.series("lr")[[10, 11], 0], [0.05, 0.2], rtol=1e-6)
    np.testing.assert_allclose(run.series("rotation")[-1], rotations(model, weights(net()), NAMES), rtol=1e-5)
    assert rows(tmp_path / "run", "SELECT * FROM series WHERE attempt = 1 ORDER BY step, quantity") == before


def test_a_state_goes_through_a_file_of_tensors_unchanged(tmp_path):
    model = net()
    optimizer = momentum(model.parameters())
    with gyroscope.watch(model, optimizer, tmp_path / "run", **PLAIN) as monitor:
        start = weights(model)
        go(model, optimizer, range(4))
        state = monitor.state_dict()
        torch.save(state, tmp_path / "s.pt")
        found = torch.load(tmp_path / "s.pt", weights_only=True)
        assert found.keys() == state.keys()
        assert found["steps"] == [4]
        assert found["layers"] == list(NAMES)
        assert all(torch.equal(found["reference"][name], w) for name, w in start.items())
        monitor.load_state_dict(found)
        again = monitor.state_dict()
        assert {k: v for k, v in again.items() if k != "reference"} == {
            k: v for k, v in state.items() if k != "reference"
        }
        assert all(torch.equal(again["reference"][name], w) for name, w in start.items())


def test_a_state_is_of_its_moment(tmp_path):
    model = net()
    optimizer = momentum(model.parameters())
    with gyroscope.watch(model, optimizer, tmp_path / "run", **PLAIN) as monitor:
        state = monitor.state_dict()
        kept = copy.deepcopy(state)
        go(model, optimizer, range(4))
        assert state["steps"] == kept["steps"] == [0]
        assert all(torch.equal(state["reference"][name], kept["reference"][name]) for name in NAMES)


@pytest.mark.parametrize("state", [True, False])
def test_a_rounded_reference_resumes_as_it_was(state, tmp_path):
    options = {"reference_dtype": "bfloat16"}
    whole = in_one_go(tmp_path / "whole", **options)
    interrupted(tmp_path / "run", tmp_path / "c.pt", until=12, state=state, **options)
    model, optimizer, saved = restored(tmp_path / "c.pt", MAKERS["momentum"])
    with gyroscope.watch(model, optimizer, tmp_path / "run", **PLAIN | options) as monitor:
        if saved is not None:
            monitor.load_state_dict(saved)
        go(model, optimizer, range(10, 20))
    run = gyroscope.load(tmp_path / "run")
    assert run.steps.tolist() == whole.steps.tolist()
    np.testing.assert_allclose(run.series("rotation"), whole.series("rotation"), rtol=1e-5, atol=1e-7)


def test_several_optimizers_resume_each_at_its_own_step(tmp_path):
    def parts(model):
        return [momentum(model[0].parameters()), adam(model[2:].parameters())]

    def train(model, both, steps):
        for step in steps:
            go(model, both[0], [step])
            if step % 2:
                go(model, both[1], [step])

    runs = []
    for name, pause in (("whole", None), ("run", 10)):
        model = net()
        both = parts(model)
        with gyroscope.watch(model, both, tmp_path / name, **PLAIN) as monitor:
            train(model, both, range(pause or 16))
            saved = monitor.state_dict()
        if pause:
            assert saved["steps"] == [10, 5]
            other = net(seed=9)
            other.load_state_dict(model.state_dict())
            again = parts(other)
            for one, state_of in zip(again, both, strict=True):
                one.load_state_dict(state_of.state_dict())
            with gyroscope.watch(other, again, tmp_path / name, **PLAIN) as monitor:
                monitor.load_state_dict(saved)
                train(other, again, range(pause, 16))
                steps = monitor.state_dict()["steps"]
        runs.append(gyroscope.load(tmp_path / name))
    whole, run = runs
    assert steps == [16, 8]
    np.testing.assert_array_equal(run.series("rotation"), whole.series("rotation"))
    assert np.isnan(run.series("rotation")[9:, 1:]).all()


@pytest.mark.parametrize("quantities", [["rotation"], ["rotation", "lr"], ["rotation", "weight_norm"]])
def test_weights_are_recognized_by_their_recorded_rotations(quantities, tmp_path):
    interrupted(tmp_path / "run", tmp_path / "c.pt", until=15, state=False, quantities=quantities)
    model, optimizer, _ = restored(tmp_path / "c.pt", MAKERS["momentum"])
    with gyroscope.watch(model, optimizer, tmp_path / "run", quantities=quantities, **PLAIN) as monitor:
        go(model, optimizer, range(10, 12))
        assert monitor.steps == 12
    other = net(seed=5)
    with gyroscope.watch(other, momentum(other.parameters()), tmp_path / "run", **PLAIN) as monitor:
        assert monitor.steps == 0


def test_a_run_without_rotations_is_said_to_have_none(tmp_path, caplog):
    interrupted(tmp_path / "run", tmp_path / "c.pt", state=False, quantities=["weight_norm"])
    model, optimizer, _ = restored(tmp_path / "c.pt", MAKERS["momentum"])
    with gyroscope.watch(model, optimizer, tmp_path / "run", **PLAIN):
        go(model, optimizer, range(10, 12))
    assert "but it has no recorded rotations to compare the current weights with: a new" in caplog.text


def test_a_step_that_is_given_is_where_the_run_goes_on(tmp_path):
    whole = in_one_go(tmp_path / "whole")
    interrupted(tmp_path / "run", tmp_path / "c.pt", until=15, state=False)
    model, optimizer, _ = restored(tmp_path / "c.pt", MAKERS["momentum"])
    with torch.no_grad():
        model[0].weight += 1e-4  # the weights of no step
    with gyroscope.watch(model, optimizer, tmp_path / "run", step=10, **PLAIN) as monitor:
        go(model, optimizer, range(10, 20))
        assert monitor.steps == 20
    run = gyroscope.load(tmp_path / "run")
    assert run.steps.tolist() == list(range(21))
    np.testing.assert_array_equal(run.series("rotation")[:11], whole.series("rotation")[:11])
    np.testing.assert_allclose(run.series("rotation")[-1], rotations(model, weights(net()), NAMES), rtol=1e-5)


def test_a_step_that_is_given_begins_a_new_run_there(tmp_path):
    model = net()
    optimizer = momentum(model.parameters())
    with gyroscope.watch(model, optimizer, tmp_path / "run", step=100, **PLAIN):
        go(model, optimizer, range(3))
    assert gyroscope.load(tmp_path / "run").steps.tolist() == [101, 102, 103]


def test_other_weights_begin_a_new_attempt_and_nothing_is_lost(tmp_path, caplog):
    in_one_go(tmp_path / "run", steps=15).close()
    before = rows(tmp_path / "run", "SELECT * FROM series ORDER BY step, quantity")
    kept = (tmp_path / "run" / "reference.pt").read_bytes()
    model = net(seed=5)
    start = weights(model)
    optimizer = momentum(model.parameters())
    with (
        caplog.at_level(logging.WARNING, "gyroscope"),
        gyroscope.watch(model, optimizer, tmp_path / "run", **PLAIN) as monitor,
    ):
        go(model, optimizer, range(5))
    assert "up to step 15" in caplog.text
    assert "a new attempt is recorded from step 0" in caplog.text
    assert monitor.error is None
    run = gyroscope.load(tmp_path / "run")
    assert run.steps.tolist() == list(range(6))
    assert (run.series("rotation")[0] == 0).all()
    np.testing.assert_allclose(run.series("rotation")[-1], rotations(model, start, NAMES), rtol=1e-5)
    assert rows(tmp_path / "run", "SELECT * FROM series WHERE attempt = 1 ORDER BY step, quantity") == before
    assert (tmp_path / "run" / "reference.pt").read_bytes() == kept
    # The new attempt has a reference of its own, and can be resumed as well.
    with gyroscope.watch(model, optimizer, tmp_path / "run", **PLAIN):
        go(model, optimizer, range(5, 8))
    run = gyroscope.load(tmp_path / "run")
    assert run.steps.tolist() == list(range(9))
    np.testing.assert_allclose(run.series("rotation")[-1], rotations(model, start, NAMES), rtol=1e-5)


def wide():
    return net(width=7)


def longer():
    return nn.Sequential(*net(), nn.Linear(2, 2))


def named():
    return nn.Sequential(*(nn.Sequential(net()[0]), *net()[1:]))


def one(model):
    return momentum(model.parameters())


OTHERS = {
    "shapes": (wide, one, r"'0\.weight'.*shape \(6, 4\).*shape \(7, 4\)|'0\.weight' has shape \(7, 4\), got \(6, 4\)"),
    "names": (named, one, r"'0\.weight'.*'0\.0\.weight'"),
    "number of layers": (longer, one, r"3 layers, this one 4|with 4 layers, got 3"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_run_of_another_model_is_refused_before_anything_is_changed(other, tmp_path):
    in_one_go(tmp_path / "run", steps=3).close()
    before = {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()}
    build, make, said = OTHERS[other]
    model = build()
    optimizer = make(model)
    with pytest.raises(MonitorError, match=said):
        gyroscope.watch(model, optimizer, tmp_path / "run")
    assert hooks(optimizer) == 0
    assert {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()} == before


def two(model):
    return [momentum(model[:2].parameters()), momentum(model[2:].parameters())]


@pytest.mark.parametrize("other", [*OTHERS, "number of optimizers"])
def test_a_state_of_another_model_is_refused_before_anything_is_changed(other, tmp_path):
    interrupted(tmp_path / "first", tmp_path / "c.pt", at=3)
    state = torch.load(tmp_path / "c.pt", weights_only=True)["monitor"]
    build, make, said = (net, two, "must be of 2 optimizers, got 1") if "opt" in other else OTHERS[other]
    model = build()
    optimizer = make(model)
    steps = optimizer if isinstance(optimizer, list) else [optimizer]
    with gyroscope.watch(model, optimizer, tmp_path / "second", **PLAIN) as monitor:
        before = monitor.state_dict()
        with pytest.raises(MonitorError, match=said):
            monitor.load_state_dict(state)
        after = monitor.state_dict()
        assert after["steps"] == before["steps"]
        assert all(torch.equal(after["reference"][name], w) for name, w in before["reference"].items())
        for step in steps:
            go(model, step, range(2))
        assert monitor.error is None
    run = gyroscope.load(tmp_path / "second")
    assert run.steps.tolist() == [0, 1, 2]
    assert len(run.attempts) == 1


def test_other_optimizers_of_a_run_are_refused(tmp_path):
    in_one_go(tmp_path / "run", steps=3).close()
    model = net()
    both = two(model)
    with pytest.raises(MonitorError):
        gyroscope.watch(model, both, tmp_path / "run")
    assert hooks(both[0]) == hooks(both[1]) == 0


@pytest.mark.parametrize("given", [{}, {"steps": [1]}, [1], None])
def test_what_is_no_state_is_refused(given, tmp_path):
    model = net()
    with (
        gyroscope.watch(model, momentum(model.parameters()), tmp_path / "run") as monitor,
        pytest.raises(MonitorError, match=r"Pass what state_dict\(\) returned"),
    ):
        monitor.load_state_dict(given)


def harm(folder, how):
    file = folder / "reference.pt"
    if how == "missing":
        file.unlink()
    elif how == "cut off":
        file.write_bytes(file.read_bytes()[:300])
    else:
        torch.save([1, 2, 3], file)


@pytest.mark.parametrize("how", ["missing", "cut off", "of another kind"])
def test_without_its_reference_a_run_is_gone_on_with_as_a_new_attempt(how, tmp_path):
    interrupted(tmp_path / "run", tmp_path / "c.pt", state=False)
    harm(tmp_path / "run", how)
    model, optimizer, _ = restored(tmp_path / "c.pt", MAKERS["momentum"])
    with gyroscope.watch(model, optimizer, tmp_path / "run", **PLAIN) as monitor:
        go(model, optimizer, range(10, 13))
    assert monitor.error is None
    run = gyroscope.load(tmp_path / "run")
    assert run.steps.tolist() == [0, 1, 2, 3]
    assert len(run.attempts) == 2


@pytest.mark.parametrize("how", ["missing", "cut off", "of another kind"])
def test_a_step_cannot_be_given_for_a_run_without_its_reference(how, tmp_path, caplog):
    interrupted(tmp_path / "run", tmp_path / "c.pt", state=False)
    harm(tmp_path / "run", how)
    model, optimizer, _ = restored(tmp_path / "c.pt", MAKERS["momentum"])
    with gyroscope.watch(model, optimizer, tmp_path / "run", step=10, **PLAIN) as monitor:
        go(model, optimizer, range(10, 13))
    assert isinstance(monitor.error, MonitorError)
    assert "reference.pt" in str(monitor.error)
    assert "reference=..." in caplog.text
    assert "training continues" in caplog.text
    assert gyroscope.load(tmp_path / "run").steps.tolist() == list(range(11)), "what was recorded is still there"


@pytest.mark.parametrize("given", ["a state", "a reference"])
def test_a_run_without_its_reference_goes_on_with(given, tmp_path):
    whole = in_one_go(tmp_path / "whole")
    interrupted(tmp_path / "run", tmp_path / "c.pt")
    (tmp_path / "run" / "reference.pt").unlink()
    model, optimizer, saved = restored(tmp_path / "c.pt", MAKERS["momentum"])
    options = {} if given == "a state" else {"reference": net(), "step": 10}
    with gyroscope.watch(model, optimizer, tmp_path / "run", **PLAIN | options) as monitor:
        if given == "a state":
            monitor.load_state_dict(saved)
        go(model, optimizer, range(10, 20), monitor)
    assert_same_curves(gyroscope.load(tmp_path / "run"), whole, resumed=[11])


def test_a_state_loaded_after_some_steps_takes_the_run_back(tmp_path):
    whole = in_one_go(tmp_path / "whole")
    model = net()
    optimizer = MAKERS["momentum"](model)
    with gyroscope.watch(model, optimizer, tmp_path / "run", **PLAIN) as monitor:
        go(model, optimizer, range(8), monitor)
        checkpoint(model, optimizer, monitor, tmp_path / "c.pt")
        go(model, optimizer, range(50, 57), monitor)
        found = torch.load(tmp_path / "c.pt", weights_only=True)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        monitor.load_state_dict(found["monitor"])
        assert monitor.steps == 8
        go(model, optimizer, range(8, 20), monitor)
        assert monitor.error is None
    run = gyroscope.load(tmp_path / "run")
    assert_same_curves(run, whole, resumed=[9])
    assert [a.start_step for a in run.attempts] == [0, 8]


def test_a_state_loaded_into_a_new_folder_goes_on_counting_there(tmp_path):
    whole = in_one_go(tmp_path / "whole")
    interrupted(tmp_path / "first", tmp_path / "c.pt")
    model, optimizer, saved = restored(tmp_path / "c.pt", MAKERS["momentum"])
    with gyroscope.watch(model, optimizer, tmp_path / "second", **PLAIN) as monitor:
        monitor.load_state_dict(saved)
        go(model, optimizer, range(10, 20), monitor)
    run = gyroscope.load(tmp_path / "second")
    assert run.steps.tolist() == list(range(11, 21))
    np.testing.assert_array_equal(run.series("rotation"), whole.series("rotation")[11:])
    kept = torch.load(tmp_path / "second" / "reference.pt", weights_only=True)["tensors"]
    assert all(torch.equal(kept[name], w) for name, w in weights(net()).items())
    # And is resumed, by the weights.
    with gyroscope.watch(model, optimizer, tmp_path / "second", **PLAIN):
        go(model, optimizer, range(20, 22))
    assert gyroscope.load(tmp_path / "second").steps.tolist() == list(range(11, 23))


@pytest.mark.parametrize("state", [True, False])
def test_a_last_step_off_the_interval_is_where_a_run_goes_on(state, tmp_path):
    interrupted(tmp_path / "run", tmp_path / "c.pt", at=10, every=4, state=state)
    assert gyroscope.load(tmp_path / "run").steps.tolist() == [0, 4, 8, 10]
    model, optimizer, saved = restored(tmp_path / "c.pt", MAKERS["momentum"])
    with gyroscope.watch(model, optimizer, tmp_path / "run", every=4, **PLAIN) as monitor:
        if saved is not None:
            monitor.load_state_dict(saved)
        go(model, optimizer, range(10, 21))
        assert monitor.steps == 21
    run = gyroscope.load(tmp_path / "run")
    found = run.steps.tolist()
    assert found[:4] == [0, 4, 8, 10]
    assert found[-3:] == [16, 20, 21]
    whole = in_one_go(tmp_path / "whole", steps=21)
    for name in ("rotation", "weight_norm", "gradient_norm", "update_norm"):
        one, other = run.series(name), whole.series(name, steps=run.steps)
        known = ~np.isnan(one)
        np.testing.assert_array_equal(one[known], other[known])
        assert known[found.index(16) :].all() or name.endswith(("gradient_norm", "update_norm"))
    # Rates are angles between measured weights, over as many steps as lie between.
    since = np.diff(found)
    rate, per_step = run.series("rate")[1:], run.series("rate_per_step")[1:]
    np.testing.assert_allclose(rate / per_step, np.broadcast_to(since[:, None], rate.shape), rtol=1e-6)
