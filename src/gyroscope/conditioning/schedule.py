"""How often a watched training is analysed, and how."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gyroscope.base.accepted import real, whole
from gyroscope.conditioning.spectra import P, check_p
from gyroscope.errors import ConditioningError


@dataclass(frozen=True)
class Schedule:
    """When and how `gyroscope.watch` analyses the conditioning of layers.

    Attributes:
        every: steps between two analyses; "budget" spaces them so that the monitor's budget is kept.
        p: which κ_p are recorded; none at all for λmax alone, which is cheaper.
        patches: read convolutions by the patches they see, as K-FAC does.
        scale: what the loss is multiplied by before the backward pass, or a function that says so, such as the
            `get_scale` of a `GradScaler`.

    >>> Schedule(every=100, p=(0.5,)).p
    (0.5,)
    """

    every: int | Literal["budget"] = "budget"
    p: Sequence[float] = P
    patches: bool = False
    scale: float | Callable[[], float] = 1.0

    def __post_init__(self) -> None:
        every: Any = self.every
        scale: Any = self.scale
        if not (isinstance(every, str) and every == "budget"):
            steps = whole(every, 1)
            if steps is None:
                raise ConditioningError(
                    f'conditioning={every!r} was given; accepted is a number of steps from 1, or "budget".'
                )
            object.__setattr__(self, "every", steps)
        if not callable(scale):
            # A tensor may be written to later, as a GradScaler does: what it is now says nothing about then.
            factor = math.nan if hasattr(scale, "detach") else real(scale)
            if not 0 < factor < math.inf:
                raise ConditioningError(
                    f"The scale of the loss is {scale!r}; accepted is a finite number above 0, or a function that "
                    "gives it."
                )
            object.__setattr__(self, "scale", factor)
        object.__setattr__(self, "p", check_p(self.p))
