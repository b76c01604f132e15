"""Layers of one shape side by side, so that an operation on them is one operation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from gyroscope.control.preconditioners.places import Parts, Place


@dataclass(frozen=True)
class Cohort:
    """Layers of one shape.

    Attributes:
        indices: which of the places.
        shape: of their weights.
        biased: whether a bias is trained with the weights.
    """

    indices: tuple[int, ...]
    shape: torch.Size
    biased: bool

    @property
    def inputs(self) -> int:
        """The size of a, without the homogeneous coordinate."""
        return self.shape[1:].numel()

    @property
    def outputs(self) -> int:
        """The size of s."""
        return self.shape[0]

    def stacked(self, gradients: Mapping[int, Parts]) -> Parts:
        """The gradients of all layers as [layers, outputs, inputs]; with zeros where there is none.

        >>> W, b = Cohort((3, 5), torch.Size([1, 1]), False).stacked({5: (torch.tensor([[2.0]]), None)})
        >>> W.flatten(), b
        (tensor([0., 2.]), None)
        """
        some = next(gradients[i] for i in self.indices if i in gradients)
        parts = [gradients[i] if i in gradients else tuple(map(_zeros, some)) for i in self.indices]
        biases = [b for _, b in parts if b is not None]
        W = _stack([W for W, _ in parts if W is not None])
        return W.flatten(2), _stack(biases) if biases else None

    def unstacked(self, parts: Parts, gradients: Mapping[int, Parts]) -> dict[int, Parts]:
        """The layers' own in the shape of their weights, of those that have a gradient."""
        W, b = parts
        each = zip(W.reshape(len(W), *self.shape).unbind(), [None] * len(W) if b is None else b.unbind(), strict=True)
        return {i: own for i, own in zip(self.indices, each, strict=True) if i in gradients}


def _stack(several: list[Tensor]) -> Tensor:
    return torch.stack(several) if len(several) > 1 else several[0].unsqueeze(0)  # without a copy


def _zeros(like: Tensor | None) -> Tensor | None:
    return None if like is None else torch.zeros_like(like)


@dataclass(frozen=True, eq=False)
class Shelf:
    """The layers on one device, cohort by cohort.

    Attributes:
        cohorts: the layers.
        like: has the device, and the dtype of their statistics.
    """

    cohorts: tuple[Cohort, ...]
    like: Tensor

    @property
    def order(self) -> list[int]:
        """Which of the places, one after another."""
        return [i for cohort in self.cohorts for i in cohort.indices]


def shelves(places: Sequence[Place]) -> list[Shelf]:
    """All layers, by where their weights are now.

    >>> from torch import nn
    >>> made = [Place("", nn.Linear(inputs, 2), True) for inputs in (3, 4, 3)]
    >>> [cohort.indices for cohort in shelves(made)[0].cohorts]
    [(0, 2), (1,)]
    """
    by_device: defaultdict[torch.device, list[int]] = defaultdict(list)
    for i, place in enumerate(places):
        by_device[place.module.weight.device].append(i)

    def shape(i: int) -> tuple[torch.Size, bool, str]:
        place = places[i]
        return place.module.weight.shape, place.biased, str(place.module.weight.dtype)

    found = []
    for device, indices in by_device.items():
        groups = groupby(sorted(indices, key=shape), key=shape)
        cohorts = tuple(Cohort(tuple(group), *key[:2]) for key, group in groups)
        long = any(places[i].module.weight.dtype == torch.float64 for i in indices)
        like = torch.empty((), dtype=torch.float64 if long else torch.float32, device=device)
        found.append(Shelf(cohorts, like))
    return found
