"""Pace of measuring: which steps are measured, what that costs, and how often it may happen within the budget."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter as perf_counter  # also read by the loop, whose steps a test can set the time of
from typing import Any, Literal

import torch

# Steps that are measured before the interval is stretched: the cost has to be known first, and the first calls cost
# more than the rest (kernels are compiled, memory is allocated).
LEARNING = 50
# The seconds of training, or measured steps, before which the interval is not stretched: a short run is recorded whole.
SECONDS, MEASURED = 5.0, 1000
_WARM = 3
_SMOOTH = 0.05
_OUTLIERS_FROM = 5
# The share of the budget that is reserved for sampled steps, if there are any, and what they may use of the budget. The
# rest is for what no hook sees, such as torch's calls of hooks, and for intervals that are adapted late.
_DETAILS, _SAMPLED = 0.3, 0.2
# The share that is reserved for analyses of conditioning, if the budget spaces them.
_ANALYSES = 0.3
# The smallest share of the budget for measuring, however much the bookkeeping of other steps takes.
_LEAST = 0.25
# An interval may be too short by this part of `every`: costs are averages, which come close to a number from above.
_CLOSE = 0.01
# The number of steps from the first analysis to the second: the cost of the first says little in a new process.
_SECOND = 32


@dataclass(frozen=True)
class Cost:
    """Cost of a monitor so far.

    Attributes:
        share: share of the training time at the current interval, including detail.
        seconds: time of one measured step: the larger of the host's and the device's time, plus the time of the
            writer's thread, including sinks. The host's time includes what the training steps around a measured one
            take longer than others, where the interval is long enough to compare them.
        idle_seconds: time of one step that is not measured.
        step_seconds: time of one training step, without the monitor.
        interval: the current number of steps between measurements.
        steps: number of steps since the monitor began; of several optimizers, those of the first.
        measured: number of these steps that were measured.
        total_seconds: time of the training thread, in all.
        held: precision, place and size of the reference weights w₀.
        bytes: bytes that are held between steps on this rank, for w₀ and the last displacement.
        reference_bytes: those of w₀ alone, including the positions of samples.
        sampled_share: share of the elements of sampled layers that are held; 1 if no layer is sampled.
        share_so_far: share of the training time since the monitor began, at the current cost per measurement. It
            includes the steps that were measured before the interval was found, so it is above `share` in a short run.

    >>> print(Cost(0.01, 4e-4, 1e-3, 40, 100, 52, 0.02, held="float32 on cpu", share_so_far=0.208))
    at present 1.00 % of the training time: 0.40 ms per measured step, every 40 steps, compared with 1.00 ms per
    training step; so far 52 of 100 steps measured, about 20.8 % of the training time; reference held in float32 on cpu
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
    bytes: int = 0
    reference_bytes: int = 0
    sampled_share: float = 1.0

    def __str__(self) -> str:
        every = "every step" if self.interval == 1 else f"every {self.interval} steps"
        return (
            f"at present {100 * self.share:.2f} % of the training time: {1e3 * self.seconds:.2f} ms per measured "
            f"step, {every}, compared with {1e3 * self.step_seconds:.2f} ms per training step; so far {self.measured} "
            f"of {self.steps} steps measured, about {100 * self.share_so_far:.3g} % of the training time; "
            f"reference held in {self.held}"
        )


class Clock:
    """Averages the cost of a measured step and the time of a training step.

    >>> clock = Clock(budget=0.01)
    >>> for _ in range(LEARNING + 1):
    ...     clock.step(0.100); clock.measured(0.010)
    >>> clock.stretched(every=1)
    10
    """

    def __init__(self, budget: float | None, *, details: bool = False, analyses: bool = False) -> None:
        self.budget = budget
        # The share of the budget that is not for measuring.
        self._share = (_DETAILS if details else 0.0) + (_ANALYSES if analyses else 0.0)
        self.analysis = 0.0  # seconds of a whole step with an analysis of conditioning
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
        self.refill = 0.0
        self._plain = self._slowed = 0
        self._idled = self._timed = 0
        self._records = 0  # measurements that the writer has been given, with and without detail
        self._batches = -1  # the first one opens files and writes the reference
        self._writing = 0.0
        self._written = 0
        self._lock = threading.Lock()

    def step(self, seconds: float, *, slowed: bool = False) -> None:
        """Count a training step that took `seconds`, without the monitor's own time.

        A step that a measurement has `slowed` tells how long training takes only as long as there are no others.
        """
        self.steps += 1
        self.trained += seconds
        self._plain += not slowed
        if self.steps > _WARM and not (slowed and self._plain):
            count = self.steps - _WARM
            self.train = _average(self.train, seconds, count if slowed else min(count, _OUTLIERS_FROM + self._plain))

    def slowed(self, seconds: float) -> None:
        """Count by how many `seconds` the training steps around a measured one were longer than others.

        Caches that are filled again take no longer than what has emptied them: a pause is not counted in full.
        """
        self._slowed += 1
        seconds = max(-self.host, min(seconds, self.host))
        self.refill += (seconds - self.refill) * max(1.0 / self._slowed, _SMOOTH)

    def measured(self, host: float, *, exposed: bool = True) -> None:
        """Count a measured step that took `host` seconds of the training thread.

        `exposed` is False where the host runs ahead of a GPU and waits for space in its queue: then training does not
        wait for the host's own time.
        """
        with self._lock:
            self._records += 1
            self.count += 1
            self.total += host
            if self.count > _WARM:
                self.host = _average(self.host, host if exposed else 0.0, self.count - _WARM)
                self.exposed = _average(self.exposed, float(exposed), self.count - _WARM)

    def idled(self, seconds: float) -> None:
        """Count a step that is not measured and took `seconds` of the training thread."""
        self._idled += 1
        self.idle = _average(self.idle, seconds, self._idled)

    def worked_out(self, *, device: Sequence[float]) -> None:
        """Count the seconds of the device for each of some measurements."""
        with self._lock:
            if self.count > _WARM:
                for seconds in device:
                    self._timed += 1
                    self.device = _average(self.device, seconds, self._timed)

    def wrote(self, seconds: float) -> None:
        """Count seconds of the writer's thread, for everything that was measured since the last call."""
        with self._lock:
            self._writing += seconds
            measured = self._records - self._written
            if measured > 0:
                self._batches += 1
                if self._batches > 0:
                    self.writer = _average(self.writer, self._writing / measured, self._batches)
                self._written, self._writing = self._records, 0.0

    def paced(self) -> None:
        """Average the writer's time anew: at another interval, other numbers of measurements are written at once."""
        with self._lock:
            self._batches = min(self._batches, 0)

    def sampled(self, seconds: float) -> None:
        """Count the additional seconds for the detail of a sampled step."""
        with self._lock:
            self._records += 1
        self.details += 1
        self.total += max(seconds, 0.0)
        self.detail = _average(self.detail, max(seconds, 0.0), self.details)

    def analyzed(self, seconds: float) -> None:
        """Count a step with an analysis of conditioning, which took `seconds` including training."""
        self.analyses += 1
        self.total += max(0.0, seconds - self.train) if self.train > 0 else 0.0
        self.analysis = seconds if self.analyses <= 2 else _average(self.analysis, seconds, self.analyses - 1)

    @property
    def analysis_price(self) -> float:
        """Seconds for one analysis of conditioning, beyond those of the step that it is part of."""
        return max(0.0, self.analysis - self.train - self.price)

    def analyses_stretched(self) -> int:
        """Return the steps between analyses that keep to their share of the budget; 0 before the cost is known."""
        if self.budget is None or self.analyses == 0 or self.steps <= _WARM + _OUTLIERS_FROM or self.train <= 0:
            return 0
        if self.analyses == 1:
            return _SECOND
        return max(1, math.ceil(self.analysis_price / (_ANALYSES * self.budget * self.train) - 1e-9))

    @property
    def price(self) -> float:
        """Seconds for one measured step. Host and device work at the same time, so the larger of the two counts."""
        return max(self.host + max(self.refill, 0.0), self.device) + self.writer * self.exposed

    def stretched(self, every: int) -> int:
        """Return the interval, a multiple of `every`, that keeps to the budget."""
        early = self.count <= LEARNING or (self.trained < SECONDS and self.count < MEASURED)
        if self.budget is None or early or self.train <= 0:
            return every
        allowed = (1 - self._share) * self.budget * self.train
        # The bookkeeping of every step is paid whatever the interval.
        least = self.price / max(allowed - self.idle * self.exposed, _LEAST * allowed)
        return every * max(1, math.ceil(least / every - _CLOSE))

    def details_stretched(self, every: int) -> int:
        """Return the interval of sampled steps, a multiple of `every`, that keeps to their share of the budget."""
        if self.budget is None or self.details < 2 or self.train <= 0:
            return every
        least = self.detail / (_SAMPLED * self.budget * self.train)
        return every * max(1, math.ceil(least / every - _CLOSE))

    def cost(
        self, *, interval: int, details: int, steps: int, measured: int, held: str, analyses: int = 0, **memory: Any
    ) -> Cost:  # fmt: skip
        """Return the cost of `steps` under this clock; `analyses` is the steps between two of them, 0 for none.

        `memory` is what a `Cost` has about it.
        """
        idle = self.idle * self.exposed
        every_step = idle + self.price / interval + self.detail / max(details, interval)
        every_step += self.analysis_price / analyses if analyses else 0.0
        share = every_step / self.train if self.train > 0 else 0.0
        spent = idle * steps + self.price * measured + self.detail * self.details + self.analysis_price * self.analyses
        trained = self.train * steps
        return Cost(
            share=share, seconds=self.price, step_seconds=self.train, interval=interval, steps=steps,
            measured=measured, total_seconds=self.total, held=held,
            share_so_far=spent / trained if trained > 0 else 0.0, idle_seconds=self.idle, **memory,
        )  # fmt: skip


class Stopwatch:
    """Divides the time of the training thread into the monitor's own, between entering and leaving, and the rest.

    Attributes:
        outside, own: seconds of the rest and of the monitor since they were last taken.
        since: the time up to which they are counted.
    """

    __slots__ = ("_depth", "outside", "own", "since")

    def __init__(self) -> None:
        self.own = self.outside = 0.0
        self.since = math.nan
        self._depth = 0

    def __enter__(self) -> Stopwatch:
        self._depth += 1
        if self._depth == 1:
            now = perf_counter()
            self.outside += now - self.since if self.since == self.since else 0.0
            self.since = now
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._stop()

    def take(self) -> tuple[float, float]:
        """Return the seconds outside and those of the monitor since the last call; to be called inside."""
        self._stop()
        outside, own = self.outside, self.own
        self.outside = self.own = 0.0
        return outside, own

    def _stop(self) -> None:
        now = perf_counter()
        self.own += now - self.since
        self.since = now


def _average(old: float, new: float, count: int) -> float:
    """Update a mean, at first a plain one, then an exponential one; outliers such as a pause are clipped."""
    if count > _OUTLIERS_FROM:
        new = min(new, 4.0 * old)
    return old + (new - old) * max(1.0 / count, _SMOOTH)


# The number of measured steps after which ranks of a sharded model agree on the interval.
_AGREE = 32

# A number that no tensor can hold would keep the other ranks waiting forever.
_MOST = 2**62

# The number of steps after a measured one in which training fills its caches again.
_SLOWED = 2

# The number of measurements before the interval is changed again.
_PATIENCE = 4


class Pace:
    """Decides which steps are measured; `details` if some are sampled, `shared` if ranks measure together.

    Attributes:
        passed: seconds outside and of the monitor, of steps in which nothing was due and that are still to be counted.

    >>> pace = Pace(every=10, budget=None, detail_every=100)
    >>> pace.due(step=20, last=10), pace.due(step=21, last=20)
    (True, False)
    >>> pace.due(step=21, last=20, asked_for=True)
    True
    """

    def __init__(
        self,
        *,
        every: int,
        budget: float | None,
        detail_every: int,
        details: bool = False,
        shared: bool = False,
        conditioning: int | Literal["budget"] | None = None,
    ) -> None:
        self.clock = Clock(budget, details=details, analyses=conditioning == "budget")
        self.conditioning = conditioning
        self._analyses_apart = 0  # agreed among ranks that share a model
        self.every = every
        self.interval = every
        self.detail_every = detail_every
        self.shared = shared
        self.dropped = 0
        self.taken = 0
        self.measurements = 0
        self.requested = 0
        self.agreed_on = False  # True once all ranks have received the request
        self.stopping = self.stopped = False  # the first rank wants all of them to stop; all of them know it
        self._wanted: int | None = None
        self._adopted = -_PATIENCE
        self._carried = 0.0
        self._since = 0  # steps since the last measured one
        self._around: list[float] = []  # seconds of training in that step and the next ones, which it has slowed down
        self.passed: list[tuple[float, float]] = []

    def set_every(self, every: int) -> None:
        """Set another interval; of ranks that measure together the first one decides, when they next agree.

        It holds for as many measurements as it takes to learn the cost; then the budget may stretch it again.
        """
        if self.shared:
            self._wanted = every
            return
        self.every = self.interval = every
        self._adopted = self.measurements + LEARNING

    def quiet(self, step: int, last: int) -> int:
        """Return the number of steps after `step` that are not due, where `last` was measured before.

        >>> Pace(every=10, budget=None, detail_every=100).quiet(step=13, last=10)
        6
        """
        earliest = step + 1 if self.interval == self.every else max(step + 1, last + self.interval)
        return -(-earliest // self.every) * self.every - step - 1

    def due(self, step: int, last: int, *, asked_for: bool = False) -> bool:
        """Return whether to measure `step`, where `last` was measured before; always if it was asked for."""
        on_time = self.interval == self.every or step - last >= self.interval
        return asked_for or (step % self.every == 0 and on_time)

    @property
    def detail_interval(self) -> int:
        """Number of steps between sampled steps."""
        # Ranks that measure together must also sample the same steps, whatever the cost on each.
        return self.detail_every if self.shared else self.clock.details_stretched(self.detail_every)

    @property
    def analysis_interval(self) -> int:
        """Number of steps between analyses of conditioning; 0 if it is not known yet, or there are none."""
        if isinstance(self.conditioning, int):
            return self.conditioning
        if self.conditioning is None:
            return 0
        return self._analyses_apart if self.shared else self.clock.analyses_stretched()

    def next_conditioning(self, last: int) -> int:
        """Return the step of the next analysis of conditioning, after one at step `last`."""
        apart = self.analysis_interval
        if isinstance(self.conditioning, int):
            return (last // apart + 1) * apart
        return last + apart if apart else sys.maxsize

    def account(
        self, *, outside: float, own: float, measured: bool, sampled: bool, exposed: bool, analyzed: bool = False
    ) -> None:
        """Count a step of `outside` seconds of training and `own` seconds of measuring."""
        self.average()
        self.taken += 1
        self.measurements += measured
        if analyzed:
            self.clock.analyzed(outside + own)
        elif not measured:
            self._between(outside, own)
        elif not sampled:
            self.clock.step(outside, slowed=True)
            self.clock.measured(own + self._carried, exposed=exposed)
            self._carried = 0.0
        elif self.clock.train > 0:  # the cost of a step without detail must be known first
            self.clock.sampled(outside - self.clock.train + own - self.clock.host)
        if measured:
            if self._since > _SLOWED:
                self.clock.slowed(sum(self._around) - len(self._around) * self.clock.train)
            self._since, self._around = 0, [] if sampled or analyzed else [outside]

    def _between(self, outside: float, own: float) -> None:
        """Count a step that is not measured."""
        self._since += 1
        slowed = self._since <= _SLOWED
        if self._since == 1:  # it copies the weights of the measured step, for the next measurement
            self._carried += max(0.0, own - self.clock.idle)
        else:
            self.clock.idled(own)
        self.clock.step(outside, slowed=slowed)
        if slowed:
            self._around.append(outside)

    def average(self) -> None:
        """Count the steps in `passed`."""
        self.taken += len(self.passed)
        for seconds in self.passed:
            self._between(*seconds)
        self.passed.clear()

    def stretch(self) -> str | None:
        """Adopt the interval that the budget allows, if it clearly differs; return a message then."""
        return self._adopt(self.clock.stretched(self.every))

    def agree(self, device: torch.device) -> str | None:
        """Do the same for ranks that measure together, which would otherwise wait forever: the first one decides.

        All ranks call it after a measured step; every `_AGREE` steps it waits for the device.
        """
        self.agreed_on = False
        if self.measurements % _AGREE:
            return None
        every = self.every if self._wanted is None else self._wanted
        wishes = (
            every, self.clock.stretched(every), self.requested, self.clock.analyses_stretched(), int(self.stopping),
        )  # fmt: skip
        decided = torch.tensor([min(wish, _MOST) for wish in wishes], dtype=torch.int64, device=device)
        torch.distributed.broadcast(decided, 0)
        every, interval, self.requested, self._analyses_apart, stopped = map(int, decided.tolist())
        self.stopped = bool(stopped)
        self.agreed_on, self._wanted = True, None
        if every != self.every:
            self.every = self.interval = every
            return f"measuring every {every} steps, as requested"
        return self._adopt(interval)

    def overrun(self) -> str:
        """Measure less often after a measurement was dropped, rather than let memory grow."""
        self.dropped += 1
        self.interval *= 2
        return f"the disk cannot keep up: measuring every {self.interval} steps from now on"

    def _adopt(self, interval: int) -> str | None:
        # The cost is never known exactly, and an interval that changes often is worse than one that is slightly off.
        close = 0.5 < interval / self.interval <= 1.1
        if close or self.measurements < self._adopted + _PATIENCE or (interval < self.interval and self.dropped):
            return None
        self.interval, self._adopted = interval, self.measurements
        self.clock.paced()
        return f"measuring every {interval} steps to stay within the budget"
