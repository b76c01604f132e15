"""When to measure: how often, how often in detail, and whether the budget asks for less."""

from __future__ import annotations

import torch

from gyroscope.monitor.clock import Clock

# Ranks of a sharded model agree on the interval every so many measured steps.
_AGREE = 32

# So many measurements are waited for before the interval is changed again.
_PATIENCE = 4


class Pace:
    """Decides which steps are measured; `shared` where several ranks must do so together.

    >>> pace = Pace(every=10, budget=None, detail_every=100)
    >>> pace.due(step=20, last=10), pace.due(step=21, last=20)
    (True, False)
    >>> pace.sample(2)
    >>> pace.due(step=21, last=20)
    True
    """

    def __init__(self, *, every: int, budget: float | None, detail_every: int, shared: bool = False) -> None:
        self.clock = Clock(budget)
        self.every = every
        self.interval = every
        self.detail_every = detail_every
        self.shared = shared
        self.forced = 0
        self.dropped = 0
        self.measurements = 0
        self._adopted = -_PATIENCE

    def set_every(self, every: int) -> None:
        """Another interval, from now on."""
        self.every = self.interval = every

    def due(self, step: int, last: int) -> bool:
        """Whether `step` is measured, after `last` was."""
        on_time = self.interval == self.every or step - last >= self.interval
        return self.forced > 0 or (step % self.every == 0 and on_time)

    def sample(self, steps: int) -> None:
        """Measure the next steps, whatever the interval."""
        self.forced = max(self.forced, steps)

    @property
    def detail_interval(self) -> int:
        """The steps between two that are looked at in detail."""
        # Ranks that measure together must also look at the same steps in detail, whatever each finds it costs.
        return self.detail_every if self.shared else self.clock.details_stretched(self.detail_every)

    def account(self, *, outside: float, own: float, measured: bool, sampled: bool, exposed: bool) -> None:
        """A step was taken: `outside` seconds of training and `own` seconds of measuring."""
        self.measurements += measured
        if not sampled:
            self.clock.step(outside)
            if measured:
                self.clock.measured(own, exposed=exposed)
        elif self.clock.train > 0:  # what a step costs without detail must be known first
            self.clock.sampled(outside - self.clock.train + own - self.clock.host)
        self.forced = max(0, self.forced - 1)

    def stretch(self) -> str | None:
        """Adopt the interval the budget asks for, where it is clearly another one; says so then."""
        return self._adopt(self.clock.stretched(self.every))

    def agree(self, device: torch.device) -> str | None:
        """The same for ranks that must measure together, or wait for each other forever: the first one decides.

        Called after a measured step, by all; every so often it waits for the device.
        """
        if self.measurements % _AGREE:
            return None
        decided = torch.tensor([self.clock.stretched(self.every), self.forced], dtype=torch.int64, device=device)
        torch.distributed.broadcast(decided, 0)
        interval, self.forced = (int(value) for value in decided.tolist())
        return self._adopt(interval)

    def overrun(self) -> str:
        """A measurement could not be handed over: measure less often rather than let memory grow."""
        self.dropped += 1
        self.interval *= 2
        return f"the disk cannot keep up: measuring every {self.interval} steps from now on"

    def _adopt(self, interval: int) -> str | None:
        # The price is never known exactly, and an interval that jumps about is worse than one a little off.
        close = 0.5 <= interval / self.interval <= 1.25
        if close or self.measurements < self._adopted + _PATIENCE or (interval < self.interval and self.dropped):
            return None
        self.interval, self._adopted = interval, self.measurements
        return f"measuring every {interval} steps to stay within the budget"
