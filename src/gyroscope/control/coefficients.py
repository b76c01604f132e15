"""Every controlled update as w' = a w + b s, with a and b from three inner products a layer.

With s the displacement the inner optimizer proposes, ρ the rate and w₀ the initial weights, Algorithm 1 of the
layer-rotation paper is

    1  u  = s − (⟨s,w⟩/⟨w,w⟩) w          onto the tangent of the sphere          (`project`)
    2  u ← u ‖w‖/‖u‖                     the rate becomes an angle               (`scale="relative"`)
    3  w' = w + ρ u
    4  w' ← w' ‖w₀‖/‖w'‖                 back to the sphere                      (`reproject`)

u is orthogonal to w, so ‖u‖² = ⟨s,s⟩ − ⟨w,s⟩²/⟨w,w⟩ and ‖w'‖² = ⟨w,w⟩ + ρ²‖w‖²: no further reduction is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = TypeVar("Array", Tensor, npt.NDArray[np.float64])

# A tangent below this share of the displacement (squared) is rounding noise: there is no direction to turn to. So are
# weights that a step took back to this share of their length, and of its own.
TANGENT_FLOOR = 1e-14


@dataclass(frozen=True)
class Law:
    """Which of the four operations are performed.

    Attributes:
        project: operation 1.
        scale: operation 2: `"relative"` makes the step ρ‖w‖ long, `"unit"` makes it ρ long.
        reproject: operation 4.
        growth: without operation 4, the most a norm may grow in one step, as a share of ‖w₀‖.
    """

    project: bool = True
    scale: Literal["relative", "unit"] = "relative"
    reproject: bool = True
    growth: float | None = None


def coefficients(dots: Array, rate: Array, radius: Array, law: Law) -> tuple[Array, Array, Array]:
    """(a, b, moved) from `dots` = [⟨w,w⟩, ⟨w,s⟩, ⟨s,s⟩] a layer, `rate` = ρ and `radius` = ‖w₀‖.

    Where there is nothing to do or no direction to do it in (ρ = 0, s = 0, s parallel to w under operation 1, a step
    that ends at 0 before operation 4, w = 0, anything not finite), a = 1, b = 0 and `moved` is False. Tensors or NumPy
    arrays: on a CPU the latter cost a fraction of the former at these sizes.

    >>> w_and_s = torch.tensor([[1.0, 0.0, 4.0]], dtype=torch.float64)   # w = (1, 0), s = (0, 2)
    >>> a, b, moved = coefficients(w_and_s, torch.tensor([1.0]), torch.tensor([1.0]), Law())
    >>> torch.stack([a, 2 * b], 1)                                       # w' = (a, 2b): turned by 45°
    tensor([[0.7071, 0.7071]], dtype=torch.float64)
    """
    xp: Any = torch if isinstance(dots, Tensor) else np
    ww, ws, ss = dots[:, 0], dots[:, 1], dots[:, 2]
    along = ws / ww
    square = ss - along * ws if law.project else ss
    moved = xp.isfinite(ww + abs(ws) + ss) & (ww > 0) & (ss > 0)
    moved = moved & (rate > 0) & xp.isfinite(rate) & (square > TANGENT_FLOOR * ss)
    norm = xp.sqrt(ww)
    length = rate * (norm if law.scale == "relative" else xp.ones_like(norm))
    c = length / xp.sqrt(square)
    one = xp.ones_like(c)
    # ‖c u‖ is the length, whatever c: of a tiny displacement c² would be infinite.
    far = ww + length * length
    if law.project:
        a = 1 - c * along
        new = xp.sqrt(far)
    else:
        a = one
        new = xp.sqrt((far + 2 * c * ws).clip(0))
    moved = moved & xp.isfinite(new)
    if law.reproject:
        moved = moved & (new * new > TANGENT_FLOOR * far)
        k = radius / new
    elif law.growth is not None:
        k = xp.minimum(one, (norm + law.growth * radius) / new)
    else:
        k = one
    return xp.where(moved, k * a, one), xp.where(moved, k * c, xp.zeros_like(c)), moved
