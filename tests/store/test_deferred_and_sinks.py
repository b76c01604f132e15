import logging
import re
import threading
import weakref

import numpy as np
import pytest
from runs_for_tests import LAYERS, QUANTITIES, rows, writer

from gyroscope.errors import StoreError
from gyroscope.store import Deferred, Event, Rows, Scalars, load


@pytest.fixture
def told(caplog):
    """Messages logged at warning or above."""
    caplog.set_level(logging.WARNING, logger="gyroscope")
    return lambda: [record.getMessage() for record in caplog.records]


def test_deferred_records_that_wait_together_are_worked_out_together_in_order(tmp_path):
    asked = []

    def resolve(payloads):
        asked.append(list(payloads))
        return [rows(step) for step in payloads]

    def other(payloads):
        asked.append(("other", *payloads))
        return [Scalars(step, {"loss": 1.0}) for step in payloads]

    with writer(tmp_path / "run", tick=600) as w:
        for step in (0, 1):
            w.put(Deferred(resolve, step))
        w.put(Deferred(other, 1))
        w.put(Deferred(resolve, 2))
        w.put(rows(3))
        w.put(Deferred(resolve, 4))
        w.flush()
        assert asked == [[0, 1, 2, 4], ("other", 1)]
    np.testing.assert_array_equal(load(w.path).steps, [0, 1, 2, 3, 4])


def test_a_flush_returns_after_payloads_are_released(tmp_path):
    """They hold page-locked memory, which may not be freed while whoever flushed captures a CUDA graph."""
    released, checked = [], threading.Event()
    slow = Mirror()
    slow.write = lambda record: checked.wait(10)
    with writer(tmp_path / "run", tick=600, sinks=[slow]) as w:
        payload = np.array(3)
        weakref.finalize(payload, released.append, True)
        w.put(Deferred(lambda payloads: [rows(int(one)) for one in payloads], payload))
        del payload
        w.flush()  # while the sink still writes
        assert released == [True]
        checked.set()


def test_methods_of_one_object_are_the_same_resolve(tmp_path):
    class Device:
        asked = 0

        def resolve(self, payloads):
            self.asked += 1
            return []

    device = Device()
    with writer(tmp_path / "run", tick=600) as w:
        for _ in range(5):
            w.put(Deferred(device.resolve, None))
        w.flush()
    assert device.asked == 1


def test_a_failing_resolve_is_told_once_and_stops_nothing(tmp_path, told):
    def resolve(payloads):
        yield rows(payloads[0])
        raise RuntimeError("device lost")

    with writer(tmp_path / "run") as w:
        for step in range(3):
            w.put(Deferred(resolve, step))
            with pytest.raises(StoreError, match=r"lacks records .* failed: RuntimeError: device lost"):
                w.flush()
        w.put(rows(10))
        w.flush()  # what is missing was told
    assert w.error is None
    assert len(told()) == 1
    assert "device lost" in told()[0]
    run = load(w.path)
    np.testing.assert_array_equal(run.steps, [0, 1, 2, 10])
    (event,) = run.events
    assert event.kind == "error"
    assert "resolve failed: RuntimeError: device lost" in event.text


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (rows(1, layers=2), r"shape \(1, 3\) \(1 steps, 3 layers of part 0\), got \(1, 2\)"),
        (Rows(7, np.array([1]), {"rotation": np.ones((1, 3))}), r"one of the run's parts \[0\], got 7"),
        (rows(1, angle=np.ones((1, 3))), "The quantity 'angle' is not registered"),
        (rows(2**63), "A step must be an integer of 64 bits, got 9223372036854775808"),
        (rows(0.5), "A step must be a whole number, got"),
        (rows(1, rotation=[["a", "b", "c"]]), "could not convert"),
        (Scalars(1, {"loss": "low"}), "could not convert"),
        ("loss 0.5", "A record must be Rows, Scalars or an Event, got str"),
    ],
)
def test_a_record_that_does_not_belong_is_told_and_the_others_are_written(tmp_path, told, record, says):
    with writer(tmp_path / "run") as w:
        w.put(rows(0))
        w.put(record)
        w.put(rows(2))
        with pytest.raises(StoreError, match="lacks records that were put since the last flush"):
            w.flush()
    assert w.error is None
    run = load(w.path)
    np.testing.assert_array_equal(run.steps, [0, 2])
    (event,) = run.events
    assert event.kind == "error"
    assert re.search(says, event.text)
    assert len(told()) == 1


def test_a_record_of_which_one_quantity_is_wrong_is_not_written_by_halves(tmp_path, told):
    with writer(tmp_path / "run") as w:
        w.put(rows(1, rotation=np.ones((1, 3)), rate=np.ones((1, 2))))
    assert len(load(w.path).steps) == 0
    assert len(told()) == 1


def test_text_that_is_no_unicode_does_not_stop_the_writer(tmp_path):
    with writer(tmp_path / "run") as w:
        w.put(Event(1, "note", "half a pair: \ud800"))
    assert load(w.path).events[0].text == "half a pair: \\ud800"


class Mirror:
    def __init__(self, failing=()):
        self.calls, self.failing, self.threads = [], failing, set()

    def _called(self, name, *given):
        self.calls.append((name, *given))
        self.threads.add(threading.current_thread())
        if name in self.failing:
            raise OSError(f"no {name} today")

    def open(self, layers, quantities, meta):
        self._called("open", layers, quantities, meta)

    def write(self, record):
        self._called("write", record)

    def close(self, run):
        self._called("close", run.steps.tolist())


def test_a_sink_sees_everything_in_order_from_one_thread(tmp_path):
    mirror, given = Mirror(), [rows(0), Scalars(1, {"loss": 1.0}), Event(1, "note", "hello"), rows(2)]
    with writer(tmp_path / "run", sinks=[mirror], meta={"lr": 0.1}) as w:
        for record in given:
            w.put(record)
        w.put(Deferred(lambda payloads: given[3:], None))
    assert mirror.calls[0] == ("open", tuple(LAYERS), QUANTITIES, {"lr": 0.1})
    assert [call[1] for call in mirror.calls[1:-1]] == [*given, given[3]]
    assert mirror.calls[-1] == ("close", [0, 2])
    assert len(mirror.threads) == 1
    assert threading.current_thread() not in mirror.threads


@pytest.mark.parametrize("where", ["open", "write", "close"])
def test_a_failing_sink_is_told_once_and_stops_neither_the_run_nor_other_sinks(tmp_path, told, where):
    failing, good = Mirror(failing=[where]), Mirror()
    with writer(tmp_path / "run", sinks=[failing, good]) as w:
        for step in range(3):
            w.put(rows(step))
            w.flush()
    assert w.error is None
    assert len(told()) == 1
    assert f"no {where} today" in told()[0]
    assert [call[0] for call in good.calls].count("write") >= 3
    assert good.calls[-1] == ("close", [0, 1, 2])
    run = load(w.path)
    assert [event.kind for event in run.events] == ["error"]
    assert run.state == "ended"


def test_a_sink_that_does_not_open_is_not_asked_again(tmp_path, told):
    sink = Mirror(failing=["open"])
    with writer(tmp_path / "run", sinks=[sink]) as w:
        w.put(rows(0))
    assert [call[0] for call in sink.calls] == ["open"]


def test_on_tick_is_called_while_nothing_is_written_and_may_fail(tmp_path, told):
    ticked = threading.Semaphore(0)

    def tick():
        ticked.release()
        raise ValueError("no signal file")

    with writer(tmp_path / "run", on_tick=tick, tick=0.01) as w:
        for _ in range(5):
            assert ticked.acquire(timeout=30)
        w.put(rows(1))
    assert len(told()) == 1
    np.testing.assert_array_equal(load(w.path).steps, [1])
