"""How long trainings still take, by how long they took so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite

# So many trainings that have ended tell how long others take, also if none tells how long it took to start.
_ENOUGH = 3
# Notes come in bunches, so that what they tell within less time than this is not a speed.
_TELLS = 2.0


@dataclass
class Running:
    """A training as its notes tell it.

    Attributes:
        weight: the seconds it is expected to take, which is what it counts for in the whole.
        first: the epoch before the first note: where a resumed training went on.
        since: when that note came.
        epoch: the last one that is over.
        epochs: all of them.

    >>> resumed = Running(weight=20.0, epochs=10)
    >>> resumed.noted(7, now=1.0)
    >>> resumed.noted(8, now=3.0)
    >>> resumed.before, resumed.here, resumed.left(now=3.0)
    (12.0, 4.0, 4.0)
    """

    weight: float
    epochs: int
    first: int | None = None
    since: float = 0.0
    epoch: int = 0

    def noted(self, epoch: int, now: float) -> None:
        """A note has come."""
        if self.first is None:
            self.first, self.since = epoch - 1, now
        self.epoch = epoch

    @property
    def here(self) -> float:
        """What was done of it here, in the seconds it counts for."""
        return self.weight * (self.epoch - (self.first or 0)) / self.epochs

    @property
    def before(self) -> float:
        """What had been done of it before."""
        return self.weight * (self.first or 0) / self.epochs

    def pace(self, now: float) -> float | None:
        """The seconds that an epoch took; None until the second note."""
        over = self.epoch - (self.first or 0) - 1  # the first of them was not timed
        return None if over < 1 else (now - self.since) / over

    def left(self, now: float) -> float | None:
        """The seconds it still takes, by the time its epochs took; None until the second note."""
        pace = self.pace(now)
        return None if pace is None else pace * (self.epochs - self.epoch)


@dataclass
class Whole:
    """Trainings that are run together.

    What goes by before the first epoch begins (data are read, steps are compiled) is not taken for the speed of what
    follows: how long it was is known from the first training that tells of two epochs.

    Attributes:
        began: when they began.
        open: those that have not ended, by key.
        trials: how many there are.
        done: how many have ended.

    >>> whole = Whole(began=0.0)
    >>> whole.add("a", weight=10.0, epochs=10)
    >>> whole.add("b", weight=30.0, epochs=10)
    >>> whole.note("a", 1, now=6.0)
    >>> whole.left(now=6.0)
    >>> whole.note("a", 5, now=10.0)
    >>> whole.share, whole.left(now=10.0)
    (0.125, 35.0)
    """

    began: float
    open: dict[str, Running] = field(default_factory=dict)
    trials: int = 0
    done: int = 0
    _total: float = 0.0
    _finished: float = 0.0
    _start_up: float | None = None

    def add(self, key: str, *, weight: float, epochs: int) -> None:
        """A training will be run."""
        self.open[key] = Running(weight, epochs)
        self.trials += 1
        self._total += weight

    def note(self, key: str, epoch: int, *, now: float) -> None:
        """A training has ended an epoch."""
        if key not in self.open:
            return
        running = self.open[key]
        running.noted(epoch, now)
        if self._start_up is None and now - running.since >= _TELLS and (pace := running.pace(now)) is not None:
            self._start_up = max(running.since - pace - self.began, 0.0)

    def finish(self, key: str) -> None:
        """A training has ended, at its last epoch or before."""
        ended = self.open.pop(key, None)
        if ended is not None:
            self.done += 1
            self._total -= ended.before  # what had been done before says nothing about the speed
            self._finished += ended.weight - ended.before

    @property
    def share(self) -> float:
        """The share of what is to be done here that is over, in expected seconds."""
        over = self._finished + sum(one.here for one in self.open.values())
        total = self._total - sum(one.before for one in self.open.values())
        return over / total if total > 0 else 1.0

    def left(self, now: float) -> float | None:
        """The seconds they still take, if they go on as they went; None before anything is known."""
        if self.share <= 0 or (self._start_up is None and self.done < _ENOUGH):
            return None
        return (now - self.began - (self._start_up or 0.0)) * (1.0 - self.share) / self.share


def clock(seconds: float | None) -> str:
    """Seconds as a clock shows them.

    >>> clock(75.4), clock(3671.0), clock(None)
    ('1:15', '1:01:11', '–:––')
    """
    if seconds is None or not isfinite(seconds):
        return "–:––"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
