"""What rescaling a layer's weights does to a network, beside what turning them does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gyroscope.errors import LayerError
from gyroscope.layers.layer import Layer, split
from gyroscope.theory.alignment import norm
from gyroscope.theory.changes import relative_change

Seen = Callable[[Sequence[Tensor]], list[Tensor]]

_DRAWS = 3  # of each change: one may leave things where they were by chance
_MOST = 4.0  # the largest γ
# Of what ε does, 1/16 is left where weights are four times as large; where they are small it does less than that more.
_FADES, _GROWS = (1 / 40, 1 / 10), (4.0, 20.0)
_ROUNDING = 64  # times the type's precision: a change that small is none


class Rescaled(NamedTuple):
    """The largest changes when a layer is rescaled, as shares of the largest when it is turned.

    Attributes:
        unit: with another γ from 1 to 4 for each unit; None where there are no units to tell apart.
        tensor: with one γ for all, 1/4 and 4.
        fades: whether what rescaling does falls as 1/γ², as it does where all of it is the ε of a normalizer. Units
            that saturate change little with a large γ too, but not so.
    """

    unit: float | None
    tensor: float
    fades: bool


def rescaled(see: Seen, layer: Layer, weights: Sequence[Tensor], i: int, draw: torch.Generator) -> Rescaled | None:
    """How much less rescaling a layer does than turning it:

        max ‖f(Γw) − f(w)‖ / max ‖f(w′) − f(w)‖,        ‖w′‖ = ‖w‖ in any direction

    Args:
        see: f, what is looked at: outputs or the loss, for the weights of all layers.
        layer: says what its units are.
        weights: of all layers.
        i: which of them are the layer's.
        draw: of γ and of directions.

    Returns:
        None where turning the weights changes nothing either.

    >>> from gyroscope.layers.layer import layers
    >>> [linear], w = layers(torch.nn.Linear(2, 3)), torch.tensor([[3.0, 4.0], [0.0, 1.0], [1.0, 1.0]])
    >>> draw = torch.Generator().manual_seed(0)
    >>> found = rescaled(lambda weights: [weights[0] / weights[0].norm()], linear, [w], 0, draw)
    >>> found.tensor < 1e-6, found.unit > 0.1
    (True, True)
    """
    weight, here = weights[i], see(weights)

    def there(other: Tensor) -> list[Tensor]:
        return see([*weights[:i], other, *weights[i + 1 :]])

    def change(*others: Tensor) -> float:
        return max(relative_change(there(other), here) for other in others)

    def turned() -> Tensor:
        other = torch.randn(weight.shape, generator=draw, dtype=torch.float64).to(weight)
        return other * (norm(weight) / norm(other))

    def scales(count: int) -> Tensor:
        # Larger ones only: smaller ones would have the ε of a normalizer matter where it does not.
        return (1 + (_MOST - 1) * torch.rand(count, generator=draw, dtype=torch.float64)).to(weight)

    matters = change(*(turned() for _ in range(_DRAWS)))
    if not matters > _ROUNDING * torch.finfo(weight.dtype).eps:
        return None
    larger = there(weight * _MOST)
    up, down = relative_change(larger, here), change(weight / _MOST)
    further = relative_change(there(weight * _MOST**2), larger)
    fades = _FADES[0] * up <= further <= _FADES[1] * up and _GROWS[0] * up <= down <= _GROWS[1] * up
    tensor = max(down, up) / matters
    try:
        rows = split(layer, "row")
    except LayerError:  # units along two dimensions
        return Rescaled(None, tensor, fades)
    shape = (-1, *[1] * (weight.dim() - 1))
    units = [rows.view(weight) * scales(rows.segments).view(shape) for _ in range(_DRAWS)]
    return Rescaled(change(*(one.movedim(0, rows.dim) for one in units)) / matters, tensor, fades)
