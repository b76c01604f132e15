"""Which examples are trained on, and which are held out."""

from __future__ import annotations

import torch

from gyroscope_lab.errors import LabError


def choose(
    labels: torch.Tensor, *, classes: int, validation: float, per_class: int | None, seed: int, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the places of the examples to train on and of those held out, both in increasing order.

    All examples are shuffled, by the seed alone. The first, a share `validation` of all, are held out; of those after
    them, all are trained on, or the first `per_class` of each class.

    >>> train, held_out = choose(
    ...     torch.tensor([0, 1, 0, 1, 0, 1, 0, 1]), classes=2, validation=0.25, per_class=2, seed=0, name="made"
    ... )
    >>> len(train), len(held_out), set(train.tolist()) & set(held_out.tolist())
    (4, 2, set())
    """
    count = round(validation * len(labels))
    if validation and not 0 < count < len(labels):
        raise LabError(
            f"a share of {validation} of the {len(labels):,} training examples of {name} is {count:,}: "
            "hold out one or more, and leave one or more to train on"
        )
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    held_out, rest = order[:count], order[count:]
    if per_class is not None:
        rest = first_of_each_class(labels, rest, classes=classes, per_class=per_class, name=name)
    return rest.sort().values, held_out.sort().values


def first_of_each_class(
    labels: torch.Tensor, order: torch.Tensor, *, classes: int, per_class: int, name: str
) -> torch.Tensor:
    """Return the first `per_class` places of each class among the places `order`, class by class.

    >>> first_of_each_class(
    ...     torch.tensor([0, 0, 1, 1]), torch.tensor([3, 0, 2, 1]), classes=2, per_class=1, name="made"
    ... )
    tensor([0, 3])
    """
    fewest = int(torch.bincount(labels[order], minlength=classes).min())
    if not 1 <= per_class <= fewest:
        raise LabError(f"per_class is {per_class}; {name} allows 1 to {fewest:,} once others are held out")
    return torch.cat([order[labels[order] == c][:per_class] for c in range(classes)])
