"""Schedules of a training: its length, its batches, and its rate over time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, cos, inf, pi

from gyroscope_lab.errors import LabError
from gyroscope_lab.kinds import require_kinds


@dataclass(frozen=True)
class Schedule:
    """Epochs, batches, and the rate over time: a linear warm-up, then cuts or half a cosine.

    Attributes:
        epochs: the number of epochs, of `passes` passes over the examples each.
        batch: examples per step. The last batch of an epoch is smaller if the examples do not divide evenly.
        cuts: when the rate is divided, as fractions of all epochs.
        factor: the divisor of the rate at each cut.
        warmup: epochs in which the rate increases linearly, step by step, from a tenth; 0 for none.
        drop_last: leave out the smaller batch at the end of an epoch.
        passes: passes over the examples per epoch; small datasets need no evaluation after every pass.
        restarts: set the optimizer's momentum to zero at every cut.
        drawn: steps per epoch, with batches drawn with replacement, in place of passes; 0 for passes.
        cosine: lower the rate to 0 along half a cosine, step by step; `cuts` then are empty.

    >>> schedule = Schedule(epochs=100, cuts=(0.8, 0.9, 0.97))
    >>> schedule.milestones, [round(schedule.multiplier(epoch), 3) for epoch in (0, 79, 80, 90, 97)]
    ([80, 90, 97], [1.0, 1.0, 0.2, 0.04, 0.008])
    """

    epochs: int = 60
    batch: int = 32
    cuts: tuple[float, ...] = (0.8, 0.9)
    factor: float = 5.0
    warmup: float = 0.0
    drop_last: bool = False
    passes: int = 1
    restarts: bool = False
    drawn: int = 0
    cosine: bool = False

    def __post_init__(self) -> None:
        require_kinds(self)
        for name, least in (("epochs", 1), ("batch", 1), ("passes", 1), ("drawn", 0)):
            if getattr(self, name) < least:
                raise LabError(f"`{name}` must be a whole number ≥ {least}, got {getattr(self, name)}.")
        if not all(0 <= cut <= 1 for cut in self.cuts):
            raise LabError(f"`cuts` must be shares of all epochs, from 0 to 1, got {self.cuts}. Try (0.8, 0.9).")
        if self.cosine and self.cuts:
            raise LabError(f"`cuts` must be empty with a cosine, got {self.cuts}. Try cuts=().")
        if not 0 < self.factor < inf:
            raise LabError(f"`factor` must be a finite number > 0, got {self.factor}.")
        if not 0 <= self.warmup < inf:
            raise LabError(f"`warmup` must be a finite number of epochs ≥ 0, got {self.warmup}.")

    @property
    def milestones(self) -> list[int]:
        """The epochs, counted from 0, at whose start the rate is cut; epoch 0 only for cuts at 0.

        >>> Schedule(epochs=1, cuts=(0.4, 0.68, 0.88)).milestones
        [1, 1, 1]
        """
        return [max(round(cut * self.epochs), int(cut > 0)) for cut in self.cuts]

    def multiplier(self, epoch: int, within: float = 0.0) -> float:
        """Return the factor of the rate in epoch `epoch`, counted from 0, after the fraction `within` of it.

        >>> [round(Schedule(epochs=4, cuts=(), cosine=True).multiplier(epoch), 2) for epoch in (0, 2, 3)]
        [1.0, 0.5, 0.15]
        """
        over = epoch + within
        cut: float = self.factor ** -sum(epoch >= milestone for milestone in self.milestones)
        if self.cosine:
            cut = (1.0 + cos(pi * over / self.epochs)) / 2.0
        if over >= self.warmup:
            return cut
        share = over / self.warmup
        return cut * (share + 0.1 * (1.0 - share))

    def batches(self, examples: int) -> Iterator[int]:
        """Yield the batch sizes of an epoch of `examples`; a batch may span two passes.

        >>> list(Schedule(batch=128).batches(300)), list(Schedule(batch=128, passes=2).batches(100))
        ([128, 128, 44], [128, 72])
        >>> list(Schedule(batch=128, drawn=3).batches(100))
        [128, 128, 128]
        """
        if self.drawn:
            yield from [self.batch] * self.drawn
            return
        whole, rest = divmod(examples * self.passes, self.batch)
        yield from [self.batch] * whole
        if rest and not (self.drop_last and whole):
            yield rest

    def steps(self, examples: int) -> int:
        """The number of steps of an epoch.

        >>> Schedule(batch=128).steps(45_000)
        352
        """
        if self.drawn:
            return self.drawn
        taken = examples * self.passes
        return max(1, taken // self.batch) if self.drop_last else ceil(taken / self.batch)

    def lasting(self, epochs: int) -> Schedule:
        """Return the schedule over another number of epochs; cuts and warm-up keep their fractions.

        >>> Schedule(epochs=100, cuts=(0.8, 0.9)).lasting(10).milestones
        [8, 9]
        """
        return replace(self, epochs=epochs, warmup=self.warmup * epochs / self.epochs)
