"""Running averages of many layers at once, that start without bias and are not spoilt by what is not finite.

The t-th batch of a layer has the weight max(1/t, 1 − decay): the mean of all batches at first, an exponential average
later. Vectors of all layers lie in one buffer, which is updated in place and by a number of operations that does not
grow with the layers'. How many batches there were is kept on the device, so that an update may be part of a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from gyroscope.errors import DynamicsError
from gyroscope.vectors.launch import is_capturing


def weights(counts: Tensor, decay: float) -> Tensor:
    """The weight of the t-th batch, t = 1, 2, …

    >>> weights(torch.tensor([1.0, 2.0, 4.0, 5.0]), 0.75)
    tensor([1.0000, 0.5000, 0.2500, 0.2500])
    """
    return counts.reciprocal().clamp_min_(1 - decay)


def refuse_in_a_graph() -> None:
    """Called before something is made on the host that was not needed so far."""
    if is_capturing():
        raise DynamicsError(
            "A CUDA graph is being captured, and it has layers or images of sizes that no step before it had. Take "
            "three steps like it before, on the stream that it is captured on."
        )


class Counts:
    """How many batches of each layer there were.

    Args:
        layers: how many layers there are.
        decay: of the averages.
        like: has the dtype and the device.

    >>> counts = Counts(2, 0.5, torch.zeros(()))
    >>> counts.add([True, True]); counts.add([True, False])
    >>> counts.weights()                         # of their last batches; nothing is new of the second layer
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
        """The weights of the last batch, [layers]; 0 for layers that it had nothing of."""
        found = weights(self.value, self.decay)
        return found if self._new is None else torch.where(self._new, found, 0.0)


def noise(kind: torch.dtype) -> float:
    """A share of a number that means of numbers equal to it, in this type, are closer to it than."""
    return 16 * torch.finfo(kind).eps


class Averages:
    """Running averages of vectors of several sizes.

    Args:
        sizes: of the vectors.
        decay: of the averages.
        like: has the dtype and the device.

    >>> averages = Averages([1, 2], decay=0.5, like=torch.zeros(()))
    >>> for batch in (1.0, 2.0, 4.0):
    ...     averages.update([torch.tensor([batch]), None])
    >>> averages.value, averages.counts.value    # 1, (1 + 2)/2, (1.5 + 4)/2
    (tensor([[2.7500, 0.0000, 0.0000]]), tensor([3., 0.]))
    """

    #: Numbers that are kept of each coordinate.
    kept = 1

    def __init__(self, sizes: Sequence[int], decay: float, like: Tensor) -> None:
        self.sizes = list(sizes)
        self._starts = list(accumulate(self.sizes, initial=0))
        self.value = torch.zeros(self.kept, sum(sizes), dtype=like.dtype, device=like.device)
        self.counts = Counts(len(sizes), decay, like)
        lengths = torch.tensor(self.sizes, device="cpu")
        #: How many coordinates each layer has, [layers].
        self.lengths = lengths.to(like)
        self._owner = torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), lengths).to(like.device)
        self._work = torch.zeros_like(self.value)

    def update(self, *new: Sequence[Tensor | None]) -> None:
        """Take a batch in, a vector for each layer or None; one that is not finite counts as what is known."""
        self.value.lerp_(self._work, self._taken(new))

    def each(self, flat: Tensor) -> tuple[Tensor, ...]:
        """A vector over all coordinates, in parts that are the layers'."""
        return tuple(flat.split_with_sizes(self.sizes))

    def part(self, flat: Tensor, layer: int) -> Tensor:
        """The part of one layer, without a look at the others.

        >>> Averages([1, 2], decay=0.5, like=torch.zeros(())).part(torch.tensor([1.0, 2.0, 3.0]), 1)
        tensor([2., 3.])
        """
        return flat.narrow(0, self._starts[layer], self.sizes[layer])

    def sums(self, flat: Tensor) -> Tensor:
        """The sum of the magnitudes of each layer's coordinates, [layers]."""
        return torch.stack(torch._foreach_norm(self.each(flat), 1))

    def spread(self, of_layers: Tensor) -> Tensor:
        """A number of each layer, at all of its coordinates."""
        return of_layers.index_select(0, self._owner)

    def _taken(self, new: Sequence[Sequence[Tensor | None]]) -> Tensor:
        """Put what is new beside the averages, and weigh it, [coordinates]; with 0 where there is nothing."""
        known = (self.each(row) for row in self.value)
        pairs = (pair for olds, ones in zip(known, new, strict=True) for pair in zip(olds, ones, strict=True))
        torch.cat([old if one is None else one for old, one in pairs], out=self._work.view(-1))
        self.counts.add([one is not None for one in new[0]])
        # The last kept is not finite where any is not: the variance, where the mean is not.
        use = torch.isfinite(self.sums(self._work[-1]))
        w = self.spread(self.counts.weights() * use)
        torch.where(w > 0, self._work, self.value, out=self._work)
        return w


class Spreads(Averages):
    """Running means and variances, without taking a difference of large squares.

    A mixture of the old with weight 1 − w and a batch with weight w has the variance
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
        """m of all layers."""
        return self.value[0]

    @property
    def variance(self) -> Tensor:
        """v."""
        return self.value[1]

    def update(self, *new: Sequence[Tensor | None]) -> None:
        """Take a batch in: its means, and its variances."""
        w = self._taken(new)
        apart = self._work[0] - self.mean
        self.value.lerp_(self._work, w)
        self.variance.addcmul_(apart.mul_(apart), torch.addcmul(w, w, w, value=-1))


def mixed(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The mean and variance of parts that weigh the same.

    >>> mixed([(torch.tensor(2.0), torch.tensor(1.0)), (torch.tensor(6.0), torch.tensor(1.0))])
    (tensor(4.), tensor(5.))
    """
    mean, variance = parts[0]
    for k, (m, v) in enumerate(parts[1:], start=2):
        w = 1 / k
        mean, variance = mean.lerp(m, w), variance.lerp(v, w) + (w * (1 - w)) * (m - mean).square()
    return mean, variance
