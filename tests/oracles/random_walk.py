"""Weights of a scale-invariant layer that walk at random, under any update rule.

The gradient of a scale-invariant loss is orthogonal to w, and its norm is g̃/‖w‖ (section 4.3 of Grosse's chapter).
Directions that are drawn anew at every step, or kept in part, give a rule exactly what the theory supposes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gyroscope.theory.decay import Rule

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
    """
    draws = torch.Generator().manual_seed(seed)

    def drawn() -> Tensor:
        return torch.randn(walks, size, dtype=torch.float64, generator=draws)

    w, way = drawn(), drawn()
    w = w * (start / w.norm(dim=1, keepdim=True))
    state: S | None = None
    norms, angles = [w.norm(dim=1)], []
    for _ in range(steps):
        unit = w / norms[-1][:, None]
        way = agreement * way + sqrt(1 - agreement**2) * drawn()
        aside = way - (way * unit).sum(1, keepdim=True) * unit
        g = aside * (gradient / (aside.norm(dim=1) * norms[-1]))[:, None]
        w, state = rule(w, g, state)
        norms.append(w.norm(dim=1))
        turned = w / norms[-1][:, None]
        angles.append(2 * torch.atan2((turned - unit).norm(dim=1), (turned + unit).norm(dim=1)))
    return Walk(torch.stack(norms).numpy(), torch.stack(angles).numpy() if angles else np.empty((0, walks)))
