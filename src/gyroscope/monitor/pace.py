"""When to measure: how often, how often in detail, and whether the budget asks for less."""

from __future__ import annotations

import sys
from typing import Literal

import torch

from gyroscope.monitor.clock import LEARNING, Clock

# Ranks of a sharded model agree on the interval every so many measured steps.
_AGREE = 32

# A wish that no tensor can hold would keep the other ranks waiting forever.
_MOST = 2**62

# So many measurements are waited for before the interval is changed again.
_PATIENCE = 4


class Pace:
    """Decides which steps are measured: with `details` beside it, and `shared` with other ranks.

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
        self._analyses_apart = 0  # as ranks that share a model have agreed
        self.every = every
        self.interval = every
        self.detail_every = detail_every
        self.shared = shared
        self.dropped = 0
        self.taken = 0
        self.measurements = 0
        self.requested = 0
        self.agreed_on = False  # whether all ranks have just heard of the request
        self._wanted: int | None = None
        self._adopted = -_PATIENCE
        self._carried = 0.0
        self._follows = False

    def set_every(self, every: int) -> None:
        """Another interval, from now on; of ranks that measure together the first one decides, when they next agree.

        It holds for as many measurements as the price takes to learn; then the budget has its say again.
        """
        if self.shared:
            self._wanted = every
            return
        self.every = self.interval = every
        self._adopted = self.measurements + LEARNING

    def due(self, step: int, last: int, *, asked_for: bool = False) -> bool:
        """Whether `step` is measured, after `last` was; one that was asked for is, whatever the interval."""
        on_time = self.interval == self.every or step - last >= self.interval
        return asked_for or (step % self.every == 0 and on_time)

    @property
    def detail_interval(self) -> int:
        """The steps between two that are looked at in detail."""
        # Ranks that measure together must also look at the same steps in detail, whatever each finds it costs.
        return self.detail_every if self.shared else self.clock.details_stretched(self.detail_every)

    @property
    def analysis_interval(self) -> int:
        """The steps between two analyses of conditioning; 0 where it is not known yet, or there are none."""
        if isinstance(self.conditioning, int):
            return self.conditioning
        if self.conditioning is None:
            return 0
        return self._analyses_apart if self.shared else self.clock.analyses_stretched()

    def next_conditioning(self, last: int) -> int:
        """The step of the next analysis of conditioning, the last one having been at `last`."""
        apart = self.analysis_interval
        if isinstance(self.conditioning, int):
            return (last // apart + 1) * apart
        return last + apart if apart else sys.maxsize

    def account(
        self, *, outside: float, own: float, measured: bool, sampled: bool, exposed: bool, analysed: bool = False
    ) -> None:
        """A step was taken: `outside` seconds of training and `own` seconds of measuring."""
        self.taken += 1
        self.measurements += measured
        if analysed:
            self.clock.analysed(outside + own)
        elif not sampled:
            self.clock.step(outside)
            if measured:
                self.clock.measured(own + self._carried, exposed=exposed)
                self._carried = 0.0
            elif self._follows:  # it keeps the weights of the measured one, for the sake of the next
                self._carried += max(0.0, own - self.clock.idle)
            else:
                self.clock.idled(own)
        elif self.clock.train > 0:  # what a step costs without detail must be known first
            self.clock.sampled(outside - self.clock.train + own - self.clock.host)
        self._follows = measured

    def stretch(self) -> str | None:
        """Adopt the interval the budget asks for, where it is clearly another one; says so then."""
        return self._adopt(self.clock.stretched(self.every))

    def agree(self, device: torch.device) -> str | None:
        """The same for ranks that must measure together, or wait for each other forever: the first one decides.

        Called after a measured step, by all; every so often it waits for the device.
        """
        self.agreed_on = False
        if self.measurements % _AGREE:
            return None
        every = self.every if self._wanted is None else self._wanted
        wishes = (every, self.clock.stretched(every), self.requested, self.clock.analyses_stretched())
        decided = torch.tensor([min(wish, _MOST) for wish in wishes], dtype=torch.int64, device=device)
        torch.distributed.broadcast(decided, 0)
        every, interval, self.requested, self._analyses_apart = map(int, decided.tolist())
        self.agreed_on, self._wanted = True, None
        if every != self.every:
            self.every = self.interval = every
            return f"measuring every {every} steps, as asked"
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
