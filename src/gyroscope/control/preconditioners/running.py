"""Running averages of many layers at once, which start without bias and ignore what is not finite.

The t-th batch of a layer has the weight max(1/t, 1 − decay): the mean of all batches at first, an exponential average
later. The vectors of all layers are in one buffer, which is updated in place, and the number of operations does not
grow with the number of layers. The number of batches is kept on the device, so that an update can be part of a CUDA
graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from gyroscope.base.hooks import is_capturing
from gyroscope.errors import DynamicsError


def _weights(counts: Tensor, decay: float) -> Tensor:
    """Return the weight of the t-th batch, t = 1, 2, …

    >>> _weights(torch.tensor([1.0, 2.0, 4.0, 5.0]), 0.75)
    tensor([1.0000, 0.5000, 0.2500, 0.2500])
    """
    return counts.reciprocal().clamp_min_(1 - decay)


def refuse_in_a_graph() -> None:
    """Raise if a CUDA graph is being captured; called before something new is made on the host."""
    if is_capturing():
        raise DynamicsError(
            "A CUDA graph captures a step with layers or images of sizes that no step before it had. Take three such "
            "steps first, on the stream of the capture."
        )


class Counts:
    """The number of batches of each layer.

    Args:
        layers: the number of layers.
        decay: the decay of the averages.
        like: a tensor with the dtype and the device.

    >>> counts = Counts(2, 0.5, torch.zeros(()))
    >>> counts.add([True, True]); counts.add([True, False])
    >>> counts.weights()                         # of the last batch, which has nothing of the second layer
    tensor([0.5000, 0.0000])
    """

    def __init__(self, layers: int, decay: float, like: Tensor) -> None:
        self.decay = decay
        self.value = torch.zeros(layers, dtype=like.dtype, device=like.device)
        self._new: Tensor | None = None
        self._masks: dict[tuple[bool, ...], Tensor] = {}

    def add(self, new: Sequence[bool]) -> None:
        """Count a batch of some layers."""
        key = tuple(new)
        if all(key):
            self._new = None
            self.value.add_(1)
            return
        if key not in self._masks:
            refuse_in_a_graph()
            self._masks[key] = torch.tensor(key, device="cpu").to(self.value.device)
        self._new = self._masks[key]
        self.value.add_(self._new)

    def weights(self) -> Tensor:
        """Return the weights of the last batch, [layers]; 0 for layers that were not in it."""
        found = _weights(self.value, self.decay)
        return found if self._new is None else torch.where(self._new, found, 0.0)


def noise(kind: torch.dtype) -> float:
    """Return a bound on the relative rounding error of the mean of equal numbers in this type."""
    return 16 * torch.finfo(kind).eps


class Averages:
    """Running averages of vectors of several sizes.

    Args:
        sizes: the sizes of the vectors.
        decay: the decay of the averages.
        like: a tensor with the dtype and the device.

    >>> averages = Averages([1, 2], decay=0.5, like=torch.zeros(()))
    >>> for batch in (1.0, 2.0, 4.0):
    ...     averages.update([torch.tensor([batch]), None])
    >>> averages.value, averages.counts.value    # 1, (1 + 2)/2, (1.5 + 4)/2
    (tensor([[2.7500, 0.0000, 0.0000]]), tensor([3., 0.]))
    """

    #: The number of values per coordinate.
    kept = 1

    def __init__(self, sizes: Sequence[int], decay: float, like: Tensor) -> None:
        self.sizes = list(sizes)
        self._starts = list(accumulate(self.sizes, initial=0))
        self.value = torch.zeros(self.kept, sum(sizes), dtype=like.dtype, device=like.device)
        self.counts = Counts(len(sizes), decay, like)
        lengths = torch.tensor(self.sizes, device="cpu")
        #: The number of coordinates of each layer, [layers].
        self.lengths = lengths.to(like)
        self._owner = torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), lengths).to(like.device)
        self._work = torch.zeros_like(self.value)

    def update(self, *new: Sequence[Tensor | None]) -> None:
        """Add a batch: one vector or None per layer. A vector that is not finite leaves the average as it is."""
        self.value.lerp_(self._work, self._taken(new))

    def each(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Split a vector over all coordinates into one part per layer."""
        return tuple(flat.split_with_sizes(self.sizes))

    def part(self, flat: Tensor, layer: int) -> Tensor:
        """Return the part of one layer, without splitting off the others.

        >>> Averages([1, 2], decay=0.5, like=torch.zeros(())).part(torch.tensor([1.0, 2.0, 3.0]), 1)
        tensor([2., 3.])
        """
        return flat.narrow(0, self._starts[layer], self.sizes[layer])

    def sums(self, flat: Tensor) -> Tensor:
        """Return the sum of the magnitudes of the coordinates of each layer, [layers]."""
        return torch.stack(torch._foreach_norm(self.each(flat), 1))

    def spread(self, of_layers: Tensor) -> Tensor:
        """Return one number per layer, repeated for each of its coordinates."""
        return of_layers.index_select(0, self._owner)

    def _taken(self, new: Sequence[Sequence[Tensor | None]]) -> Tensor:
        """Copy a batch into the work buffer, and return its weights, [coordinates]; 0 where there is nothing."""
        known = (self.each(row) for row in self.value)
        pairs = (pair for olds, ones in zip(known, new, strict=True) for pair in zip(olds, ones, strict=True))
        torch.cat([old if one is None else one for old, one in pairs], out=self._work.view(-1))
        self.counts.add([one is not None for one in new[0]])
        # The last value is not finite where any is not: the variance, where the mean is not.
        use = torch.isfinite(self.sums(self._work[-1]))
        w = self.spread(self.counts.weights() * use)
        torch.where(w > 0, self._work, self.value, out=self._work)
        return w


class Spreads(Averages):
    """Running means and variances, without a difference of large squares.

    The mixture of the old with weight 1 − w and a batch with weight w has the variance
    (1 − w) v + w v' + w (1 − w) (m' − m)².

    >>> spreads = Spreads([1], decay=0.9, like=torch.zeros(()))
    >>> for batch in (torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0], [7.0]])):
    ...     spreads.update([batch.mean(0)], [batch.var(0, correction=0)])
    >>> spreads.mean, spreads.variance           # of 1, 3, 5 and 7
    (tensor([4.]), tensor([5.]))
    """

    kept = 2

    @property
    def mean(self) -> Tensor:
        """The means m of all layers."""
        return self.value[0]

    @property
    def variance(self) -> Tensor:
        """The variances v of all layers."""
        return self.value[1]

    def update(self, *new: Sequence[Tensor | None]) -> None:
        """Add a batch: its means and its variances."""
        w = self._taken(new)
        apart = self._work[0] - self.mean
        self.value.lerp_(self._work, w)
        self.variance.addcmul_(apart.mul_(apart), torch.addcmul(w, w, w, value=-1))


def mixed(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the mean and variance of a mixture of parts of equal weight.

    >>> mixed([(torch.tensor(2.0), torch.tensor(1.0)), (torch.tensor(6.0), torch.tensor(1.0))])
    (tensor(4.), tensor(5.))
    """
    mean, variance = parts[0]
    for k, (m, v) in enumerate(parts[1:], start=2):
        w = 1 / k
        mean, variance = mean.lerp(m, w), variance.lerp(v, w) + (w * (1 - w)) * (m - mean).square()
    return mean, variance
