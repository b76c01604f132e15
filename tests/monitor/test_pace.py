"""How often is measured: by the interval, by request, and by a budget, with a clock that the tests move."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from watched import backward, inputs, mlp, train

import gyroscope
from gyroscope.monitor import clock as clocks
from gyroscope.monitor.clock import LEARNING, Clock, Pace
from gyroscope.monitor.monitor import Loop
from gyroscope.monitor.recorder import _requested
from gyroscope.monitor.track import Track


class Hands:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def hands(monkeypatch):
    """The monitor's clock; measuring a step takes 2 ms on it, and the writer no time."""
    hands = Hands()
    real = Track.measure

    def measure(self, **options):
        hands.now += 0.002
        return real(self, **options)

    monkeypatch.setattr(Track, "measure", measure)
    monkeypatch.setattr(clocks, "perf_counter", hands)
    monkeypatch.setattr("gyroscope.monitor.recorder.thread_time", lambda: 0.0)
    monkeypatch.setattr(clocks, "SECONDS", 0.0)  # so that short runs show what long ones do
    return hands


def run(tmp_path, hands, steps, *, seconds=0.01, **options):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    backward(model, inputs(1)[0])
    monitor = gyroscope.watch(model, optimizer, tmp_path / "run", activations=False, **options)
    for _ in range(steps):
        hands.now += seconds
        optimizer.step()
    return monitor


@pytest.mark.parametrize(("steps", "seconds", "stretched"), [(400, 0.01, False), (900, 1e-4, False), (600, 0.01, True)])
def test_a_run_of_less_than_five_seconds_is_kept_whole(tmp_path, hands, monkeypatch, steps, seconds, stretched):
    monkeypatch.setattr(clocks, "SECONDS", 5.0)
    monitor = run(tmp_path, hands, steps, seconds=seconds, budget=0.01)
    assert (monitor.interval > 1) == stretched
    assert (monitor.cost().measured < steps) == stretched
    monitor.close()


def test_a_thousand_measured_steps_are_enough_to_stretch_the_interval(tmp_path, hands, monkeypatch):
    monkeypatch.setattr(clocks, "SECONDS", 5.0)
    monitor = run(tmp_path, hands, 1100, seconds=1e-4, budget=0.01)
    assert monitor.interval > 1
    assert 1000 <= monitor.cost().measured < 1020
    monitor.close()


def test_the_interval_is_stretched_to_the_budget_once_the_price_is_known(tmp_path, hands):
    monitor = run(tmp_path, hands, 400, budget=0.01)
    assert monitor.interval == pytest.approx(20, abs=1)  # 2 ms of 10 ms is 20 %
    assert monitor.every == 1
    cost = monitor.cost()
    assert cost.share <= 0.0101
    assert cost.seconds == pytest.approx(0.002)
    assert cost.step_seconds == pytest.approx(0.01)
    assert cost.steps == 400
    assert f"every {monitor.interval} steps" in str(cost)
    assert cost.share_so_far == pytest.approx(cost.measured * 0.002 / (400 * 0.01), rel=0.01)
    assert cost.share_so_far > 3 * cost.share  # the steps that the price was learnt from
    assert f"so far {cost.measured} of 400 steps measured, about {100 * cost.share_so_far:.3g} %" in str(cost)
    monitor.close()
    with gyroscope.load(monitor.path) as recorded:
        assert recorded.steps[: LEARNING + 1].tolist() == list(range(LEARNING + 1))
        assert (np.diff(recorded.steps[LEARNING + 2 : -1]) == monitor.interval).all()
        assert [e.text for e in recorded.events if e.kind == "interval"] == [
            f"measuring every {monitor.interval} steps to stay within the budget"
        ]


def test_a_stretched_interval_is_a_multiple_of_the_one_asked_for(tmp_path, hands):
    monitor = run(tmp_path, hands, 600, budget=0.01, every=8)
    assert monitor.interval == 24
    monitor.close()
    with gyroscope.load(monitor.path) as recorded:
        assert not (recorded.steps % 8).any()


def test_no_budget_never_stretches(tmp_path, hands):
    monitor = run(tmp_path, hands, 200, budget=None)
    assert monitor.interval == 1
    assert monitor.cost().share == pytest.approx(0.2)
    assert monitor.cost().share_so_far == pytest.approx(0.2)
    monitor.close()
    with gyroscope.load(monitor.path) as recorded:
        assert recorded.steps.tolist() == list(range(201))


def test_a_budget_that_is_kept_to_stretches_nothing(tmp_path, hands):
    monitor = run(tmp_path, hands, 150, budget=0.01, seconds=1.0)
    assert monitor.interval == 1
    assert monitor.cost().share == pytest.approx(0.002)
    monitor.close()


def test_the_interval_shrinks_again_when_training_becomes_slower(tmp_path, hands):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    backward(model, inputs(1)[0])
    monitor = gyroscope.watch(model, optimizer, tmp_path / "run", activations=False, budget=0.01)
    for i in range(600):
        hands.now += 0.01 if i < 200 else 0.1
        optimizer.step()
    assert monitor.interval <= 4
    monitor.close()


def test_pauses_between_steps_count_for_little(tmp_path, hands):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    backward(model, inputs(1)[0])
    monitor = gyroscope.watch(model, optimizer, tmp_path / "run", activations=False, budget=0.01)
    for i in range(300):
        hands.now += 60.0 if i % 100 == 99 else 0.01
        optimizer.step()
    assert monitor.interval >= 12
    monitor.close()


def test_every_set_by_hand_is_taken_at_once(tmp_path, hands):
    monitor = run(tmp_path, hands, 100, budget=0.01)
    assert monitor.interval > 1
    monitor.every = 3
    assert monitor.interval == monitor.every == 3
    monitor.close()


def test_a_monitor_that_has_done_nothing_costs_nothing(tmp_path):
    model = mlp()
    with gyroscope.watch(model, torch.optim.SGD(model.parameters(), 0.1), tmp_path / "run") as monitor:
        cost = monitor.cost()
    assert (cost.share, cost.seconds, cost.steps, cost.measured, cost.total_seconds) == (0, 0, 0, 0, 0)
    assert cost.share_so_far == 0
    assert "float32" in str(cost)


def put_signal(monitor: gyroscope.Monitor, text: str) -> None:
    """Put the file there, whole, and wait until the writer's thread has seen it."""
    new = monitor.path / "new"
    new.write_text(text)
    new.rename(monitor.path / "sample")
    deadline = time.monotonic() + 30
    while not monitor._recorder.asked:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not (monitor.path / "sample").exists()


def test_a_file_in_the_folder_of_the_run_asks_for_detail(tmp_path):
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    monitor = gyroscope.watch(model, optimizer, tmp_path / "run", every=50, detail_every=1000, budget=None)
    train(model, optimizer, inputs(3))
    put_signal(monitor, "2\n")
    train(model, optimizer, inputs(6))
    monitor.close()
    with gyroscope.load(monitor.path) as run:
        assert run.steps.tolist() == [0, 5, 6, 9]  # step 4 was on its way when it was asked
        assert run.where("activation_mean").tolist() == [5, 6]
        assert run.where("moment_p50").tolist() == [5, 6]
        assert any("'sample'" in event.text for event in run.events)


@pytest.mark.parametrize("text", ["", "many", "-3", "0", "2.5"])
def test_a_file_that_holds_no_count_asks_for_five_steps(tmp_path, text):
    model = mlp()
    with gyroscope.watch(model, torch.optim.SGD(model.parameters(), 0.1), tmp_path / "run") as monitor:
        put_signal(monitor, text)
        assert monitor._recorder.asked == 5


def test_pace_measures_multiples_of_the_interval():
    pace = Pace(every=5, budget=None, detail_every=10)
    last, due = 0, []
    for step in range(1, 31):
        if pace.due(step, last):
            due.append(step)
            last = step
        pace.account(outside=0.01, own=0.0, measured=last == step, sampled=False, exposed=True)
    assert due == [5, 10, 15, 20, 25, 30]


def test_details_are_sampled_at_their_own_interval(tmp_path):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with gyroscope.watch(model, optimizer, tmp_path / "run", every=5, budget=None, detail_every=10):
        train(model, optimizer, inputs(40))
    with gyroscope.load(tmp_path / "run") as recorded:
        assert recorded.where("dying").tolist() == [5, 15, 25, 35]


def test_a_budget_of_everything_never_stretches():
    clock = Clock(budget=1.0)
    for _ in range(200):
        clock.step(0.01)
        clock.measured(0.005)
    assert clock.stretched(every=1) == 1


def test_the_writers_time_counts_where_it_is_in_the_way():
    clock = Clock(budget=0.01)
    for _ in range(600):
        clock.step(0.01)
        clock.measured(0.0)
        clock.worked_out(device=[0.0])
        clock.wrote(0.001)
    assert clock.stretched(every=1) == pytest.approx(10, abs=1)


def test_the_writers_time_counts_where_it_comes_in_batches():
    """The first comes after many measurements, and its own price, of opening things, is no guide."""
    clock = Clock(budget=0.01)
    for batch in range(20):
        for _ in range(100):
            clock.step(0.01)
            clock.measured(0.0)
        clock.wrote(0.1 if batch else 5.0)
    assert clock.writer == pytest.approx(0.001)


def test_the_devices_time_counts_where_it_is_first_heard_of_late():
    clock = Clock(budget=0.01)
    for _ in range(100):
        clock.measured(0.0)
    clock.worked_out(device=[0.002])
    assert clock.price == pytest.approx(0.002)


def test_the_price_of_steps_between_counts_and_does_not_grow_with_the_interval():
    pace = Pace(every=1, budget=0.01, detail_every=100)
    for step in range(1, 20_001):
        measured = pace.due(step, last=step - step % pace.interval if step % pace.interval else step - pace.interval)
        pace.account(
            outside=0.01, own=0.001 if measured else 2e-5, measured=measured, sampled=False, exposed=True
        )  # fmt: skip
        if measured:
            pace.stretch()
    found = pace.clock.cost(interval=pace.interval, details=0, steps=step, measured=1, held="")
    assert found.idle_seconds == pytest.approx(2e-5)
    assert found.share == pytest.approx(0.01, rel=0.25)
    assert 10 <= pace.interval <= 16  # 0.001 / (0.01 · 0.01 - 2e-5) = 12.5


def test_bookkeeping_that_takes_all_of_the_budget_leaves_measuring_a_quarter():
    clock = Clock(budget=0.01)
    for _ in range(2000):
        clock.step(0.01)
        clock.measured(0.001)
        clock.idled(0.0005)
    assert clock.stretched(every=1) == 40


def test_everything_from_the_entry_of_a_hook_to_its_end_counts(tmp_path, hands, monkeypatch):
    """And none of it as training."""
    arms, breaks = Loop.arm, Track.breaks

    def arm(self, only=None):
        hands.now += 0.001
        arms(self, only)

    def slow(self):
        hands.now += 0.001
        return breaks(self)

    with monkeypatch.context() as patched:
        patched.setattr(Loop, "arm", arm)  # after the account of a step, which is then that of the next one
        monitor = run(tmp_path / "every", hands, 30, every=1, budget=None)
        assert monitor.cost().step_seconds == pytest.approx(0.01)
        assert monitor.cost().seconds == pytest.approx(0.003)
        monitor.close()
    monkeypatch.setattr(Track, "breaks", slow)
    monitor = run(tmp_path / "tenth", hands, 30, every=10, budget=None)
    assert monitor.cost().step_seconds == pytest.approx(0.01)
    assert monitor.cost().idle_seconds == pytest.approx(0.001)
    monitor.close()


def test_the_larger_of_host_and_device_counts():
    clock = Clock(budget=0.01)
    for _ in range(LEARNING + 50):
        clock.step(0.01)
        clock.measured(0.0005)
        clock.worked_out(device=[0.002])
    assert clock.price == pytest.approx(0.002, rel=0.05)


def test_steps_that_cost_no_time_are_no_reason_to_stretch():
    clock = Clock(budget=0.01)
    for _ in range(LEARNING + 50):
        clock.step(0.0)
        clock.measured(0.001)
    assert clock.stretched(every=7) == 7
    assert clock.cost(interval=7, details=100, steps=100, measured=100, held="").share == 0.0


def test_a_slow_first_step_does_not_put_details_off():
    pace = Pace(every=1, budget=0.01, detail_every=100)
    sampled, following = [], 1
    for step in range(1, 2001):
        detail = step >= following
        outside = 5.0 if step == 1 else 0.0101 if detail else 0.01  # the detail itself costs 0.1 ms
        pace.account(outside=outside, own=0.0, measured=True, sampled=detail, exposed=True)
        if detail:
            sampled.append(step)
            following = step + pace.detail_interval
    assert len(sampled) == pytest.approx(20, abs=1)


@pytest.mark.parametrize("by_hand", [False, True])
def test_steps_that_are_asked_for_are_so_many_of_each_optimizer(tmp_path, by_hand):
    model = mlp()
    first, second = (torch.optim.SGD(part.parameters(), 0.01) for part in (model[:1], model[2:]))
    with gyroscope.watch(model, [first, second], tmp_path / "run", every=100, budget=None) as monitor:
        for i in range(8):
            if i == 2:
                monitor.sample(3)
            backward(model, inputs(1)[0])
            if by_hand:
                monitor.measure()
            else:
                first.step()
                second.step()
    with gyroscope.load(monitor.path) as recorded:
        norms = recorded.series("weight_norm")
        assert recorded.steps.tolist() == [0, 3, 4, 5, 8]
        assert np.isfinite(norms).all()


def test_what_measuring_has_cost_is_counted_from_where_a_run_was_resumed(tmp_path, hands):
    monitor = run(tmp_path, hands, 30, budget=None)
    state = monitor.state_dict()
    monitor.close()
    monitor = run(tmp_path, hands, 0, budget=None)
    monitor.load_state_dict(state)
    for _ in range(10):
        hands.now += 0.01
        monitor._tracks[0].optimizer.step()
    assert monitor.steps == 40
    assert "so far 10 of 10 steps measured, about 20 %" in str(monitor.cost())
    monitor.close()


def test_a_loop_measured_by_hand_keeps_to_the_budget_and_hears_the_file_that_asks_for_detail(tmp_path, hands):
    monitor = run(tmp_path, hands, 0, budget=0.01)
    for _ in range(200):
        hands.now += 0.01
        monitor.measure()
    assert monitor.interval == pytest.approx(20, abs=1)  # 2 ms of 10 ms is 20 %
    put_signal(monitor, "3")
    for _ in range(4):
        monitor.measure()
    assert monitor.run.steps[-3:].tolist() == [202, 203, 204]
    monitor.close()


def test_a_wish_that_no_tensor_holds_reaches_the_ranks_that_wait_for_it(monkeypatch):
    told = []
    monkeypatch.setattr(torch.distributed, "broadcast", lambda wishes, _: told.append(wishes.tolist()))
    pace = Pace(every=10**30, budget=None, detail_every=10, shared=True)
    pace.requested = 10**20
    pace.agree(torch.device("cpu"))
    assert [wish > 10**18 for wish in told[0]] == [True, True, True, False, False]


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_step_that_could_not_be_measured_is_counted_where_other_ranks_count_on_it(tmp_path, hands, by_hand):
    monitor = run(tmp_path, hands, 0, budget=None)
    loop, track = monitor._loop, monitor._tracks[0]
    loop.pace.shared = True

    def fail(track):
        raise RuntimeError("no memory left")

    loop._measure = fail
    if not by_hand:
        loop.before(track)
    with pytest.raises(RuntimeError, match="no memory left"):
        loop.by_hand(track) if by_hand else loop.after(track)
    assert (loop.pace.taken, loop.pace.measurements) == (1, 1)
    monitor.close()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_regular_file_called_sample_asks_for_nothing_and_stops_nothing(tmp_path, make):
    make(tmp_path / "sample")
    asked = []
    thread = threading.Thread(target=lambda: asked.append(_requested(tmp_path)), daemon=True)
    thread.start()
    thread.join(timeout=30)
    assert asked == [0]


def test_a_request_of_any_length_is_understood(tmp_path):
    (tmp_path / "sample").write_text("7" * 5000)
    assert _requested(tmp_path) == int("7" * 18)
    (tmp_path / "sample").write_text("x" * 5000)
    assert _requested(tmp_path) == 5


@pytest.mark.parametrize("interval", [4, 50])
def test_the_time_in_which_training_fills_its_caches_again_counts(interval):
    """And not that of a pause, such as an evaluation, that always comes after a measured step."""
    slower = {0: 0.0001, 1: 0.0006, 2: 0.0003}
    refilled, paused = (Pace(every=interval, budget=None, detail_every=100) for _ in range(2))
    for step in range(interval, 100 * interval):
        since = step % interval
        given = {"own": 0.0 if since else 0.002, "measured": not since, "sampled": False, "exposed": True}
        refilled.account(outside=0.01 + slower.get(since, 0.0), **given)
        paused.account(outside=5.0 if since == 1 else 0.01, **given)
    assert refilled.clock.train == pytest.approx(0.01, rel=0.01)
    assert refilled.clock.price == pytest.approx(0.003, rel=0.01)
    assert paused.clock.train == pytest.approx(0.01, rel=0.01)
    assert paused.clock.price == pytest.approx(0.004, rel=0.01)  # as much again as the measurement itself, at most


@pytest.mark.parametrize("interval", [1, 3])
def test_where_all_steps_are_close_to_a_measured_one_their_time_is_that_of_training(interval):
    pace = Pace(every=interval, budget=None, detail_every=100)
    for step in range(1, 200):
        pace.account(
            outside=0.01, own=0.0 if step % interval else 0.002, measured=not step % interval, sampled=False,
            exposed=True,
        )  # fmt: skip
    assert pace.clock.train == pytest.approx(0.01)
    assert pace.clock.price == pytest.approx(0.002)


@pytest.mark.parametrize("layers", [2, 60])
def test_a_step_in_which_nothing_is_due_calls_few_functions(tmp_path, layers):
    """However many layers there are: 15 of 16 such steps."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    own = str(Path(gyroscope.__file__).parent)
    calls = []

    def heard(frame, event, _):
        calls[-1] += event == "call" and frame.f_code.co_filename.startswith(own)

    model(torch.ones(1, 4)).sum().backward()
    with gyroscope.watch(model, optimizer, tmp_path / "run", every=1000, budget=None):
        for _ in range(2):
            optimizer.step()
        for _ in range(32):
            calls.append(0)
            sys.setprofile(heard)
            try:
                optimizer.step()
            finally:
                sys.setprofile(None)
    assert sum(count <= 8 for count in calls) == 30


def test_the_writers_time_counts_where_every_measurement_has_detail():
    clock = Clock(budget=0.01)
    for _ in range(100):
        clock.step(0.01)
        clock.sampled(0.0)
        clock.wrote(0.003)
    assert clock.writer == pytest.approx(0.003)


def test_the_writers_time_is_averaged_anew_at_another_interval():
    """Many measurements that are written at once take less time each than one alone."""
    clock = Clock(budget=0.01)
    for batch in range(20):
        if batch == 10:
            clock.paced()
        for _ in range(100 if batch < 10 else 1):
            clock.measured(0.0)
        clock.wrote(0.1 if batch < 10 else 0.003)
    assert clock.writer == pytest.approx(0.003)
