"""The times at which a training saves."""

from types import SimpleNamespace

import pytest

import gyroscope_lab.training.checkpoint as module
from gyroscope_lab.training.checkpoint import Pace


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(at=100.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now.at))
    return now


def passed(clock, pace, *, took):
    """Seconds from one action, which took `took` seconds, to the next."""
    with pace.taken():
        clock.at += took
    since = clock.at
    while not pace.due:
        clock.at += 1.0
    return clock.at - since


def test_what_takes_little_is_due_as_often_as_asked(clock):
    pace = Pace(30.0)
    assert not pace.due
    assert [passed(clock, pace, took=0.1) for _ in range(3)] == [30.0, 30.0, 30.0]


def test_what_takes_long_takes_no_more_than_a_fiftieth_of_the_time(clock):
    assert passed(clock, Pace(30.0), took=2.0) == 100.0


def test_what_took_long_once_is_due_as_asked_when_it_takes_little_again(clock):
    pace = Pace(30.0)
    assert [passed(clock, pace, took=took) for took in (0.1, 20.0, 0.1)] == pytest.approx([30.0, 1000.0, 30.0], abs=1.5)


def test_what_is_asked_for_always_is_always_due(clock):
    pace = Pace(0.0)
    assert pace.due
    assert passed(clock, pace, took=60.0) == 0.0


def test_what_fails_stays_due(clock):
    pace = Pace(30.0)
    clock.at += 31.0
    with pytest.raises(OSError, match="full"), pace.taken():
        raise OSError("full")
    assert pace.due
