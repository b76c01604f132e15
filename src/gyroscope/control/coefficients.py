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
from typing import Literal

import torch
from torch import Tensor

# A tangent below this share of the displacement (squared) is rounding noise: there is no direction to turn to.
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


def coefficients(dots: Tensor, rate: Tensor, radius: Tensor, law: Law) -> tuple[Tensor, Tensor, Tensor]:
    """(a, b, moved) from `dots` = [⟨w,w⟩, ⟨w,s⟩, ⟨s,s⟩] a layer, `rate` = ρ and `radius` = ‖w₀‖.

    Where there is nothing to do or no direction to do it in (ρ = 0, s = 0, s parallel to w under operation 1,
    w = 0, anything not finite), a = 1, b = 0 and `moved` is False.

    >>> w_and_s = torch.tensor([[1.0, 0.0, 4.0]], dtype=torch.float64)   # w = (1, 0), s = (0, 2)
    >>> a, b, moved = coefficients(w_and_s, torch.tensor([1.0]), torch.tensor([1.0]), Law())
    >>> torch.stack([a, 2 * b], 1)                                       # w' = (a, 2b): turned by 45°
    tensor([[0.7071, 0.7071]], dtype=torch.float64)
    """
    ww, ws, ss = dots.unbind(1)
    along = ws / ww
    square = ss - along * ws if law.project else ss
    moved = torch.isfinite(ww + ws.abs() + ss) & (ww > 0) & (ss > 0)
    moved = moved & (rate > 0) & torch.isfinite(rate) & (square > TANGENT_FLOOR * ss)
    norm = ww.sqrt()
    c = rate * (norm if law.scale == "relative" else 1.0) / square.sqrt()
    if law.project:
        a = 1 - c * along
        new = (ww + c * c * square).sqrt()
    else:
        a = torch.ones_like(c)
        new = (ww + 2 * c * ws + c * c * ss).sqrt()
    if law.reproject:
        k = radius / new
    elif law.growth is not None:
        k = ((norm + law.growth * radius) / new).clamp(max=1.0)
    else:
        k = torch.ones_like(new)
    one, zero = torch.ones_like(a), torch.zeros_like(a)
    return torch.where(moved, k * a, one), torch.where(moved, k * c, zero), moved
