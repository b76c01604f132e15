"""What measuring costs, and how often it may happen to stay under a share of the time."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

# Steps that are measured before the interval is stretched: the price has to be known first, and the first calls are
# dearer than the rest (kernels are compiled, memory is allocated).
LEARNING = 50
# Nor is it stretched before so many seconds of training or so many measured steps: a short run is kept whole.
SECONDS, MEASURED = 5.0, 1000
_WARM = 3
_SMOOTH = 0.05
_OUTLIERS_FROM = 5
# The share of the budget that is left to sampled steps, where there are any.
_DETAILS = 0.3
# And to analyses of conditioning, where they go by the budget.
_ANALYSES = 0.3
# The least share of the budget for measuring, where the bookkeeping of steps that are not measured takes the rest.
_LEAST = 0.25
# The second comes so many steps after the first, which says little of the price in a process that has just begun.
_SECOND = 32


@dataclass(frozen=True)
class Cost:
    """What a monitor has cost so far.

    Attributes:
        share: of the training time, at the interval as it is now; detail included.
        seconds: for one measured step: the larger of the host's and the device's time, and on top all that the writer's
            thread uses, sinks included.
        idle_seconds: for one step that is not measured.
        step_seconds: for one training step, without the monitor.
        interval: the number of steps between two measured ones, as it is now.
        steps: how many were taken since the monitor began; of several optimizers, by the first.
        measured: how many of them were measured.
        total_seconds: of the training thread, in all.
        held: how the reference weights are held.
        share_so_far: of the training time since the monitor began, at the price as it is now: the steps that were
            measured before the interval was found are in it, so that it is above `share` in a short run.

    >>> print(Cost(0.01, 4e-4, 1e-3, 40, 100, 52, 0.02, held="float32 on cpu", share_so_far=0.208))
    at present 1.00 % of the training time: 0.40 ms for a measured step, every 40 steps, beside 1.00 ms for a training
    step; so far 52 of 100 steps measured, about 20.8 % of the training time; reference held in float32 on cpu
    """

    share: float
    seconds: float
    step_seconds: float
    interval: int
    steps: int
    measured: int
    total_seconds: float
    held: str = ""
    share_so_far: float = 0.0
    idle_seconds: float = 0.0

    def __str__(self) -> str:
        every = "every step" if self.interval == 1 else f"every {self.interval} steps"
        return (
            f"at present {100 * self.share:.2f} % of the training time: {1e3 * self.seconds:.2f} ms for a measured "
            f"step, {every}, beside {1e3 * self.step_seconds:.2f} ms for a training step; so far {self.measured} of "
            f"{self.steps} steps measured, about {100 * self.share_so_far:.3g} % of the training time; "
            f"reference held in {self.held}"
        )


class Clock:
    """Averages the price of a measured step and the time of a training step.

    >>> clock = Clock(budget=0.01)
    >>> for _ in range(LEARNING + 1):
    ...     clock.step(0.100); clock.measured(0.010)
    >>> clock.stretched(every=1)
    10
    """

    def __init__(self, budget: float | None, *, details: bool = False, analyses: bool = False) -> None:
        self.budget = budget
        self._share = (_DETAILS if details else 0.0) + (_ANALYSES if analyses else 0.0)  # of the budget, for the rest
        self.analysis = 0.0  # a step with an analysis of conditioning, all of it
        self.analyses = 0
        self.count = 0
        self.total = 0.0
        self.host = 0.0
        self.device = 0.0
        self.writer = 0.0
        self.exposed = 1.0
        self.train = 0.0
        self.detail = 0.0
        self.details = 0
        self.steps = 0
        self.trained = 0.0
        self.idle = 0.0
        self._idled = self._timed = 0
        self._batches = -1  # the first has to open what is written, and writes the reference
        self._writing = 0.0
        self._written = 0
        self._lock = threading.Lock()

    def step(self, seconds: float) -> None:
        """A training step took so long, the monitor's own time not counted."""
        self.steps += 1
        self.trained += seconds
        if self.steps > _WARM:
            self.train = _average(self.train, seconds, self.steps - _WARM)

    def measured(self, host: float, *, exposed: bool = True) -> None:
        """A measured step cost so many seconds of the training thread; `exposed` unless that waits for a GPU anyway.

        A host that runs ahead of a GPU waits for room in its queue: then its own time is not what training waits for.
        """
        with self._lock:
            self.count += 1
            self.total += host
            if self.count > _WARM:
                self.host = _average(self.host, host if exposed else 0.0, self.count - _WARM)
                self.exposed = _average(self.exposed, float(exposed), self.count - _WARM)

    def idled(self, seconds: float) -> None:
        """A step that is not measured cost so many seconds of the training thread."""
        self._idled += 1
        self.idle = _average(self.idle, seconds, self._idled)

    def worked_out(self, *, device: Sequence[float]) -> None:
        """Measurements have cost so many seconds of the device, each."""
        with self._lock:
            if self.count > _WARM:
                for seconds in device:
                    self._timed += 1
                    self.device = _average(self.device, seconds, self._timed)

    def wrote(self, seconds: float) -> None:
        """The writer's thread has used so many seconds more, for whatever was measured since."""
        with self._lock:
            self._writing += seconds
            measured = self.count - self._written
            if measured > 0:
                self._batches += 1
                if self._batches > 0:
                    self.writer = _average(self.writer, self._writing / measured, self._batches)
                self._written, self._writing = self.count, 0.0

    def sampled(self, seconds: float) -> None:
        """The detail of a sampled step cost so many seconds more."""
        self.details += 1
        self.total += max(seconds, 0.0)
        self.detail = _average(self.detail, max(seconds, 0.0), self.details)

    def analysed(self, seconds: float) -> None:
        """A step with an analysis of conditioning took so many seconds, training included."""
        self.analyses += 1
        self.total += max(0.0, seconds - self.train) if self.train > 0 else 0.0
        self.analysis = seconds if self.analyses <= 2 else _average(self.analysis, seconds, self.analyses - 1)

    @property
    def analysis_price(self) -> float:
        """Seconds for one analysis of conditioning, beyond those of the step it is part of."""
        return max(0.0, self.analysis - self.train - self.price)

    def analyses_stretched(self) -> int:
        """The steps between two analyses that keep to their share of the budget; 0 before the price is known."""
        if self.budget is None or self.analyses == 0 or self.steps <= _WARM + _OUTLIERS_FROM or self.train <= 0:
            return 0
        if self.analyses == 1:
            return _SECOND
        return max(1, math.ceil(self.analysis_price / (_ANALYSES * self.budget * self.train) - 1e-9))

    @property
    def price(self) -> float:
        """Seconds for one measured step: host and device work side by side, so the larger of the two counts."""
        return max(self.host, self.device) + self.writer * self.exposed

    def stretched(self, every: int) -> int:
        """The interval, a multiple of `every`, that keeps to the budget."""
        early = self.count <= LEARNING or (self.trained < SECONDS and self.count < MEASURED)
        if self.budget is None or early or self.train <= 0:
            return every
        allowed = (1 - self._share) * self.budget * self.train
        # What every step costs is spent whatever the interval.
        least = self.price / max(allowed - self.idle * self.exposed, _LEAST * allowed)
        return every * max(1, math.ceil(least / every - 1e-9))

    def details_stretched(self, every: int) -> int:
        """The same for sampled steps."""
        if self.budget is None or self.details < 2 or self.train <= 0:
            return every
        least = self.detail / (_DETAILS * self.budget * self.train)
        return every * max(1, math.ceil(least / every - 1e-9))

    def cost(
        self, *, interval: int, details: int, steps: int, measured: int, held: str, analyses: int = 0
    ) -> Cost:  # fmt: skip
        """What `steps` under this clock have come to; `analyses` is the steps between two of them, 0 for none."""
        idle = self.idle * self.exposed
        every_step = idle + self.price / interval + self.detail / max(details, 1)
        every_step += self.analysis_price / analyses if analyses else 0.0
        share = every_step / self.train if self.train > 0 else 0.0
        spent = idle * steps + self.price * measured + self.detail * self.details + self.analysis_price * self.analyses
        trained = self.train * steps
        return Cost(
            share=share, seconds=self.price, step_seconds=self.train, interval=interval, steps=steps,
            measured=measured, total_seconds=self.total, held=held,
            share_so_far=spent / trained if trained > 0 else 0.0, idle_seconds=self.idle,
        )  # fmt: skip


class Stopwatch:
    """Divides the time of the training thread: the monitor's own, between entering and leaving, and the rest."""

    def __init__(self) -> None:
        self._own = self._outside = 0.0
        self._since: float | None = None
        self._depth = 0

    def __enter__(self) -> Stopwatch:
        self._depth += 1
        if self._depth == 1:
            now = perf_counter()
            self._outside += 0.0 if self._since is None else now - self._since
            self._since = now
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._stop()

    def take(self) -> tuple[float, float]:
        """Seconds outside, and of the monitor, since the last time they were taken; asked from within."""
        self._stop()
        outside, own = self._outside, self._own
        self._outside = self._own = 0.0
        return outside, own

    def _stop(self) -> None:
        now = perf_counter()
        self._own += now - (now if self._since is None else self._since)
        self._since = now


def _average(old: float, new: float, count: int) -> float:
    """A plain mean at first, then one that forgets; an evaluation or a pause between two steps counts for little."""
    if count > _OUTLIERS_FROM:
        new = min(new, 4.0 * old)
    return old + (new - old) * max(1.0 / count, _SMOOTH)
