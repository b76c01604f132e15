import threading

import numpy as np
import pytest
from runs_for_tests import rows, writer

from gyroscope.errors import StoreError
from gyroscope.store import Deferred, Event, Scalars, load
from gyroscope.store.writer import SMALL, Mailbox


class Held:
    """A deferred record that the writer's thread works on until it is let go."""

    def __init__(self):
        self.begun, self.free = threading.Event(), threading.Event()

    def __call__(self, payloads):
        self.begun.set()
        assert self.free.wait(30)
        return []


def test_a_full_queue_refuses_at_once_and_keeps_nothing(tmp_path):
    held = Held()
    with writer(tmp_path / "run", queue=4, tick=0.01) as w:
        assert w.put(Deferred(held, None))
        assert held.begun.wait(30)
        taken = [w.put(rows(step)) for step in range(10)]
        held.free.set()
    assert taken == [True] * 4 + [False] * 6
    np.testing.assert_array_equal(load(w.path).steps, [0, 1, 2, 3])


def test_scalars_and_events_are_taken_when_the_queue_is_full(tmp_path):
    held = Held()
    with writer(tmp_path / "run", queue=1, tick=0.01) as w:
        w.put(Deferred(held, None))
        assert held.begun.wait(30)
        assert w.put(rows(0))
        assert not w.put(rows(1))
        assert all(w.put(Scalars(step, {"loss": 0.5})) for step in range(1000))
        assert w.put(Event(3, "note", "still here"))
        held.free.set()
    assert len(load(w.path).scalars["loss"].steps) == 1000
    assert [event.text for event in load(w.path).events] == ["still here"]


def test_what_waits_is_bounded_for_small_things_too():
    box = Mailbox(1)
    assert sum(box.put(None, small=True) for _ in range(SMALL + 10)) == SMALL


def test_flush_returns_when_everything_put_before_can_be_read(tmp_path):
    with writer(tmp_path / "run", tick=600) as w:
        for step in range(20):
            w.put(rows(step))
            w.flush()
            with load(w.path) as run:
                assert run.steps[-1] == step


def test_flush_from_many_threads(tmp_path):
    failed = []

    def measure(first):
        try:
            for step in range(first, first + 20):
                while not w.put(rows(step)):
                    pass
                w.flush(timeout=60)
                with load(w.path) as run:
                    assert step in run.steps
        except BaseException as error:
            failed.append(error)

    with writer(tmp_path / "run", tick=600, queue=8) as w:
        threads = [threading.Thread(target=measure, args=(100 * i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failed == []
    assert len(load(w.path).steps) == 120


def test_flush_says_when_it_takes_too_long(tmp_path):
    held = Held()
    with writer(tmp_path / "run") as w:
        w.put(Deferred(held, None))
        with pytest.raises(StoreError, match=r"not written within 0.01 s"):
            w.flush(timeout=0.01)
        held.free.set()
        w.flush()


def test_flush_from_the_writers_own_thread_is_refused_rather_than_waiting_forever(tmp_path):
    def resolve(payloads):
        w.flush()
        return []

    with writer(tmp_path / "run") as w:
        w.put(Deferred(resolve, None))
    (event,) = load(w.path).events
    assert "cannot wait for itself" in event.text


def test_a_half_full_queue_is_written_without_waiting_for_the_tick(tmp_path):
    written = threading.Event()

    def resolve(payloads):
        written.set()
        return []

    with writer(tmp_path / "run", tick=600, queue=4) as w:
        w.put(Deferred(resolve, None))
        assert not written.wait(0.1)
        w.put(Deferred(resolve, None))
        assert written.wait(30)


def test_after_closing_nothing_is_taken_and_closing_again_does_nothing(tmp_path):
    w = writer(tmp_path / "run")
    w.put(rows(0))
    w.close()
    assert not w.put(rows(1))
    assert not w.put(Event(1, "note", "late"))
    w.flush()
    w.close()
    assert w.error is None
    np.testing.assert_array_equal(load(w.path).steps, [0])


def test_the_thread_says_how_long_it_worked_and_ends_on_closing(tmp_path):
    before = threading.active_count()
    with writer(tmp_path / "run", tick=0.01) as w:
        w.put(rows(*range(1000)))
    assert 0.0 < w.busy_seconds < 60.0
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"layers": []}, "no layers"),
        ({"queue": 0}, "`queue` must be a number ≥ 1, got 0"),
        ({"tick": 0}, "`tick` must be a finite number of seconds > 0, got 0"),
        ({"meta": {"lr": np.ones(2)}}, "`meta` must be a dict that JSON can hold"),
        ({"meta": {"lr": float("nan")}}, "`meta` must be a dict that JSON can hold"),
        ({"meta": 3}, "`meta` must be a dict that JSON can hold"),
        ({"layers": ["conv1"]}, "got 'conv1' in it"),
        ({"quantities": ["rotation"]}, "dict of QuantityInfo"),
        ({"quantities": {"rotation": "1"}}, "QuantityInfo"),
        ({"step": 1.5}, "A step must be a whole number, got 1.5"),
        ({"step": "3"}, "A step must be a whole number, got '3'"),
        ({"queue": "3"}, "`queue` must be a number ≥ 1, got '3'"),
        ({"tick": None}, "`tick` must be a finite number of seconds > 0, got None"),
    ],
)
def test_what_cannot_be_written_is_refused_before_a_folder_is_made(tmp_path, options, says):
    with pytest.raises(StoreError, match=says):
        writer(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_the_same_layer_twice_is_refused(tmp_path):
    from runs_for_tests import LAYERS

    with pytest.raises(StoreError, match=r"'conv1.weight' twice"):
        writer(tmp_path / "run", layers=[*LAYERS, LAYERS[0]])
