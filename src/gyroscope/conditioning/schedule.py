"""`Schedule`: when and how the conditioning of a watched training is analyzed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gyroscope.base.accepted import flag, real, whole
from gyroscope.conditioning.spectra import P, check_p
from gyroscope.errors import ConditioningError


@dataclass(frozen=True)
class Schedule:
    """When and how `gyroscope.watch` analyzes the conditioning of layers.

    Attributes:
        every: steps between two analyses; "budget" spaces them to keep the monitor's budget.
        p: which κ_p are recorded; empty for λmax alone, which is cheaper.
        patches: read convolutions by the patches they see, as K-FAC does.
        scale: the factor that the loss is multiplied by before the backward pass, or a function that returns it, such
            as the `get_scale` of a `GradScaler`.

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
                    f'`conditioning` must be a whole number of steps ≥ 1 or "budget", got {every!r}. Try 100.'
                )
            object.__setattr__(self, "every", steps)
        if not callable(scale):
            # A tensor may change later, as that of a GradScaler does: its value now does not count.
            factor = math.nan if hasattr(scale, "detach") else real(scale)
            if not 0 < factor < math.inf:
                raise ConditioningError(
                    f"`scale` must be a finite number > 0 or a function that returns one, got {scale!r}. Try "
                    "scaler.get_scale."
                )
            object.__setattr__(self, "scale", factor)
        object.__setattr__(self, "patches", flag(self.patches, "patches", ConditioningError))
        object.__setattr__(self, "p", check_p(self.p))
