"""Running averages that start without bias, take batches in parts, and are not spoilt by what is not finite.

The t-th batch has the weight max(1/t, 1 − decay): the mean of all batches at first, an exponential average later.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def weight(t: int, decay: float) -> float:
    """The weight of the t-th batch, t = 1, 2, …

    >>> [weight(t, 0.75) for t in (1, 2, 3, 4, 5)]
    [1.0, 0.5, 0.3333333333333333, 0.25, 0.25]
    """
    return max(1 / t, 1 - decay)


class Average:
    """The running average of a tensor that is a sum of parts in each batch.

    >>> average = Average(decay=0.5)
    >>> for batch in (1.0, 2.0, 4.0):
    ...     average.add(torch.tensor(batch), object()); average.fold()
    >>> average.value                           # (1, 1.5 = (1 + 2)/2, 2.75 = (1.5 + 4)/2)
    tensor(2.7500)
    """

    def __init__(self, decay: float) -> None:
        self.decay, self.count = decay, 0
        self._value: Tensor | None = None
        self._open: Tensor | None = None
        self._batches: list[object] = []

    @property
    def value(self) -> Tensor:
        """The average; there is one once something was folded in."""
        assert self._value is not None
        return self._value

    def add(self, part: Tensor, batch: object) -> None:
        """Add a part; those of the same `batch` are summed, those of several before the next `fold` are averaged."""
        self._open = part if self._open is None else self._open + part
        if batch is None or not any(batch is one for one in self._batches):
            self._batches.append(batch)

    def fold(self) -> None:
        """Take the batch into the average; one that is not finite counts as the average itself, or as 0."""
        if self._open is None:
            return
        new, self.count = self._open / len(self._batches), self.count + 1
        self._open, self._batches = None, []
        old = torch.zeros_like(new) if self._value is None else self._value
        new = torch.where(torch.isfinite(new).all(), new, old)
        self._value = old.lerp(new, weight(self.count, self.decay))

    def load(self, value: Tensor | None, count: int, device: torch.device) -> None:
        """Go on from an average."""
        self._value, self.count = None if value is None else value.detach().to(device, copy=True), int(count)
        self._open, self._batches = None, []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None, "_batches": []}


class Spread:
    """The running mean and variance of numbers that come in batches, without taking a difference of large squares.

    A mixture of the old with weight 1 − w and a batch with weight w has the variance
    (1 − w) v + w v' + w (1 − w) (m' − m)².

    >>> spread = Spread(decay=0.9)
    >>> for batch in (torch.tensor([1.0, 3.0]), torch.tensor([5.0, 7.0])):
    ...     spread.add(batch.mean(), batch.var(correction=0)); spread.fold()
    >>> spread.mean, spread.variance            # of 1, 3, 5 and 7
    (tensor(4.), tensor(5.))
    """

    def __init__(self, decay: float) -> None:
        self.decay, self.count = decay, 0
        self._value: tuple[Tensor, Tensor] | None = None
        self._open: list[tuple[Tensor, Tensor]] = []

    @property
    def mean(self) -> Tensor:
        """m; there is one once something was folded in."""
        assert self._value is not None
        return self._value[0]

    @property
    def variance(self) -> Tensor:
        """v."""
        assert self._value is not None
        return self._value[1]

    def add(self, mean: Tensor, variance: Tensor) -> None:
        """Add the mean and the variance of a part; parts before the next `fold` weigh the same."""
        self._open.append((mean, variance))

    def fold(self) -> None:
        """Take the batch in; one that is not finite counts as what is known already, or as 0."""
        if not self._open:
            return
        mean, variance = self._open[0]
        for k, (m, v) in enumerate(self._open[1:], start=2):
            mean, variance = _mixed(mean, variance, m, v, 1 / k)
        self._open, self.count = [], self.count + 1
        finite = torch.isfinite(mean).all() & torch.isfinite(variance).all()
        old, spread = (torch.zeros_like(mean), torch.zeros_like(variance)) if self._value is None else self._value
        mean, variance = torch.where(finite, mean, old), torch.where(finite, variance, spread)
        self._value = _mixed(old, spread, mean, variance, weight(self.count, self.decay))

    def load(self, mean: Tensor | None, variance: Tensor | None, count: int, device: torch.device) -> None:
        """Go on from a mean and a variance."""
        self._value = None
        if mean is not None and variance is not None:
            self._value = (mean.detach().to(device, copy=True), variance.detach().to(device, copy=True))
        self.count, self._open = int(count), []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": []}


def _mixed(m: Tensor, v: Tensor, other: Tensor, its: Tensor, w: float) -> tuple[Tensor, Tensor]:
    """The mean and variance of a mixture of two, with weight w on the other."""
    return m.lerp(other, w), v.lerp(its, w) + (w * (1 - w)) * (other - m).square()
