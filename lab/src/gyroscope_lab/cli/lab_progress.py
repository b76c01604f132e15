"""Progress of the laboratory's trials, and the time left: bars in a terminal, one line per trial elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column

if TYPE_CHECKING:
    from gyroscope_lab.engine.run_one import Note
    from gyroscope_lab.training.result import Result
    from gyroscope_lab.training.trial import Trial


# The assumed seconds per epoch of a training of unknown pace.
_UNKNOWN = 0.1
# Terminals up to this width have space for names, but not for bars.
_WIDE = 100
_FIELDS = ("epoch", "loss", "accuracy", "rotation", "left")


class LabProgress:
    """Progress of a laboratory: pass its methods to `Lab` as `on_begin`, `on_note` and `on_done`.

    A terminal shows one bar per current training, with its loss, training accuracy, mean rotation and time left, and
    one bar for all of them. While nothing is trained, a line says that the `study` is at work. Elsewhere, one line is
    printed per training that ends. The output goes to standard error.

    >>> from gyroscope_lab.training.archive import Archive
    >>> from gyroscope_lab.engine.laboratory import Lab
    >>> with LabProgress() as progress:
    ...     lab = Lab(Archive("runs"), **progress.hooks)
    """

    def __init__(
        self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic, study: str | None = None
    ) -> None:
        self.console = Console(stderr=True) if console is None else console
        self._clock = clock
        self._whole = Whole(began=clock())
        narrow = self.console.width < _WIDE
        name = Column(no_wrap=True, overflow="ellipsis", ratio=1) if narrow else Column(no_wrap=True)
        self._progress = Progress(
            TextColumn("{task.description}", table_column=name, markup=False),
            *(() if narrow else (BarColumn(bar_width=20),)),
            *(TextColumn(f"{{task.fields[{field}]}}", justify="right") for field in _FIELDS),
            console=self.console,
            expand=narrow,
            transient=True,
        )
        self._bars: dict[str, TaskID] = {}
        self._all: TaskID | None = None
        self._idle = None if study is None else self._add(f"{study}: at work", total=None)

    @property
    def hooks(self) -> dict[str, Any]:
        """The callbacks of a `Lab`."""
        return {"on_begin": self.on_begin, "on_note": self.on_note, "on_done": self.on_done}

    def __enter__(self) -> LabProgress:
        if self.console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.console.is_terminal:
            self._progress.stop()

    def on_begin(self, trials: Sequence[Trial]) -> None:
        """Start the display of the trials that are about to run."""
        from gyroscope_lab.engine.cost import expected

        for key in list(self._bars):
            self._progress.remove_task(self._bars.pop(key))
        self._whole = Whole(began=self._clock())
        for trial in trials:
            known, epochs = expected(trial), trial.schedule.epochs
            self._whole.add(trial.key, weight=known.seconds if known else _UNKNOWN * epochs, epochs=epochs)
        self._update()

    def on_note(self, note: Note) -> None:
        """A training has ended an epoch."""
        now = self._clock()
        self._whole.note(note.key, note.epoch, now=now)
        running = self._whole.open.get(note.key)
        if running is None or not self.console.is_terminal:
            return
        if note.key not in self._bars:
            self._bars[note.key] = self._add(note.name, total=note.epochs)
        self._progress.update(
            self._bars[note.key],
            completed=note.epoch,
            epoch=f"{note.epoch}/{note.epochs}",
            loss=f"{note.loss:.3g}",
            accuracy=f"{100 * note.accuracy:.1f}",
            rotation=f"{note.rotation:.3f}",
            left=f"{clock(running.left(now))} left",
        )
        self._update()

    def on_done(self, trial: Trial, result: Result) -> None:
        """A training has ended."""
        self._whole.finish(trial.key)
        if self.console.is_terminal:
            if trial.key in self._bars:
                self._progress.remove_task(self._bars.pop(trial.key))
            self._update()
        else:
            place = f"{self._whole.done}/{self._whole.trials}"
            self.console.print(f"{place} {described(trial, result)}", highlight=False, markup=False, soft_wrap=True)

    def _update(self) -> None:
        if not self.console.is_terminal or not self._whole.trials:
            return
        if self._idle is not None:
            self._progress.update(self._idle, visible=not self._whole.open)
        if self._all is None:
            # Its other columns are the headings of those below.
            self._all = self._add("", total=1.0)
            self._progress.update(self._all, epoch="epoch", loss="loss", accuracy="acc %", rotation="rotation")
        whole = self._whole
        trainings = "training" if whole.trials == 1 else "trainings"
        self._progress.update(
            self._all,
            description=f"{whole.done} of {whole.trials} {trainings}",
            completed=whole.share,
            left=f"{clock(whole.left(self._clock()))} left",
        )

    def _add(self, name: str, *, total: float | None) -> TaskID:
        blank: dict[str, Any] = dict.fromkeys(_FIELDS, "")
        return self._progress.add_task(name, total=total, **blank)


def described(trial: Trial, result: Result) -> str:
    """Describe an ended training in one line.

    >>> from gyroscope_lab.training.recipe import Recipe
    >>> from gyroscope_lab.training.result import Result
    >>> from gyroscope_lab.training.tasks import task
    >>> from gyroscope_lab.training.trial import Trial
    >>> result = Result(1.0, 0.9, loss=[0.25], layers=["fc"], rotation=[[0.0], [0.1]], seconds=3.21)
    >>> described(Trial(task("digits"), Recipe("SGD", 0.1)), result)
    'digits: SGD, seed 0: train 100.0 %, test 90.0 %, loss 0.25, mean rotation 0.100, 3.2 s'
    """
    turned = sum(result.final_rotation) / len(result.final_rotation)
    ended = f"; {result.ended}" if result.ended else ""
    return (
        f"{trial.title}: train {100 * result.train_accuracy:.1f} %, test {100 * result.test_accuracy:.1f} %, "
        f"loss {result.loss[-1]:.3g}, mean rotation {turned:.3f}, {result.seconds:.1f} s{ended}"
    )


# After this many ended trainings, their duration predicts that of others, even if the time to start is unknown.
_ENOUGH = 3
# Notes arrive in bunches, so a speed is not computed from less time than this.
_TELLS = 2.0


@dataclass
class Running:
    """A training as its notes describe it.

    Attributes:
        weight: the seconds it is expected to take; its weight in the whole.
        first: the epoch before the first note, from which a resumed training continued.
        since: when that note arrived.
        epoch: the last completed epoch.
        epochs: the number of epochs.

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
        """Record a note."""
        if self.first is None:
            self.first, self.since = epoch - 1, now
        self.epoch = epoch

    @property
    def here(self) -> float:
        """The part done here, in expected seconds."""
        return self.weight * (self.epoch - (self.first or 0)) / self.epochs

    @property
    def before(self) -> float:
        """The part done before, in expected seconds."""
        return self.weight * (self.first or 0) / self.epochs

    def pace(self, now: float) -> float | None:
        """The seconds per epoch; None until the second note."""
        over = self.epoch - (self.first or 0) - 1  # the first epoch was not timed
        return None if over < 1 else (now - self.since) / over

    def left(self, now: float) -> float | None:
        """The seconds left, at the pace of its epochs so far; None until the second note."""
        pace = self.pace(now)
        return None if pace is None else pace * (self.epochs - self.epoch)


@dataclass
class Whole:
    """Trainings that are run together.

    The time before the first epoch (reading data, compiling steps) does not count for the speed. Its length is known
    from the first training with two completed epochs.

    Attributes:
        began: when they began.
        open: the trainings that have not ended, by key.
        trials: the number of trainings.
        done: the number of ended trainings.

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
        """Add a training that will be run."""
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
        """Record the end of a training, at its last epoch or before."""
        ended = self.open.pop(key, None)
        if ended is not None:
            self.done += 1
            self._total -= ended.before  # work done before does not count for the speed
            self._finished += ended.weight - ended.before

    @property
    def share(self) -> float:
        """The completed share of the work to be done here, in expected seconds."""
        over = self._finished + sum(one.here for one in self.open.values())
        total = self._total - sum(one.before for one in self.open.values())
        return over / total if total > 0 else 1.0

    def left(self, now: float) -> float | None:
        """The seconds left at the pace so far; None before anything is known."""
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
