"""Weights of a scale-invariant layer that walk at random: what an update rule does where there is nothing to learn.

The gradient of a scale-invariant loss is orthogonal to w, and its norm is g̃/‖w‖ (section 4.3). Directions drawn anew at
every step, or kept in part, put a rule into the situation that theory speaks of, and into no other.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gyroscope.base.accepted import real, whole
from gyroscope.errors import DynamicsError
from gyroscope.theory.decay import Rule
from gyroscope.theory.domains import generator

S = TypeVar("S")
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Walk:
    """What was seen on the way.

    Attributes:
        norm: ‖w‖ after 0, 1, … steps [steps + 1, walks].
        angle: by how much w turned in each step, in radians [steps, walks].
    """

    norm: Floats
    angle: Floats


def random_walk(
    rule: Rule[S],
    steps: int,
    *,
    start: float = 1.0,
    gradient: float = 1.0,
    size: int = 64,
    walks: int = 1,
    agreement: float = 0.0,
    seed: int = 0,
) -> Walk:
    """Let a rule walk: g ⟂ w with ‖g‖ = g̃/‖w‖ at each step, in float64.

    Args:
        rule: (w, g, state) → (w, state), of `gyroscope.theory.decay` or `adaptive`, with its options bound.
        steps: how many.
        start: ‖w‖ at the start.
        gradient: g̃.
        size: the number of elements of w.
        walks: how many walks of their own, side by side; the rule is given [walks, size].
        agreement: the correlation c of successive directions u ← c u + √(1 − c²) noise, before what is along w is
            taken out of them.
        seed: of the directions.

    >>> from functools import partial
    >>> from gyroscope.theory.decay import sgd, with_decay
    >>> walk = random_walk(with_decay(partial(sgd, lr=0.5), lr=0.5, decay=0.2), 2)
    >>> (walk.norm[:, 0] ** 2).round(4)                   # equation 23, whatever the directions
    array([1.    , 1.06  , 1.0944])
    """
    for name, value in (("start", start), ("gradient", gradient)):
        if not 0 < real(value) < inf:
            raise DynamicsError(f"{name} is {value!r}; accepted are finite norms above 0.")
    if not -1 <= real(agreement) <= 1:
        raise DynamicsError(f"agreement is {agreement!r}; accepted are correlations from -1 to 1.")
    many, elements, beside = whole(steps, 0), whole(size, 2), whole(walks, 1)
    if many is None or elements is None or beside is None:
        raise DynamicsError(f"{steps} steps of {walks} walks of size {size}: at least 0, 1 and 2 are needed.")
    draws = generator(seed)

    def drawn() -> Tensor:
        return torch.randn(beside, elements, dtype=torch.float64, generator=draws)

    w, way = drawn(), drawn()
    w = w * (start / w.norm(dim=1, keepdim=True))
    state: S | None = None
    norms, angles = [w.norm(dim=1)], []
    for _ in range(many):
        unit = w / norms[-1][:, None]
        way = agreement * way + sqrt(1 - agreement**2) * drawn()
        aside = way - (way * unit).sum(1, keepdim=True) * unit
        g = aside * (gradient / (aside.norm(dim=1) * norms[-1]))[:, None]
        w, state = rule(w, g, state)
        norms.append(w.norm(dim=1))
        turned = w / norms[-1][:, None]
        angles.append(2 * torch.atan2((turned - unit).norm(dim=1), (turned + unit).norm(dim=1)))
    return Walk(torch.stack(norms).numpy(), torch.stack(angles).numpy() if angles else np.empty((0, beside)))
