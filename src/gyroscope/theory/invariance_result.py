"""What a search for scale-invariant layers finds: a row a layer, as a table, dicts or a data frame."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gyroscope.base.by_layer import ByLayer
from gyroscope.errors import DynamicsError

ScaleInvariant = Literal[
    "unit",
    "tensor",
    "no",
    "undecided: no gradient",
    "undecided: the weight is zero",
    "undecided: one weight a unit",
]


@dataclass(frozen=True)
class LayerInvariance:
    """One layer.

    Attributes:
        layer: its name.
        kind: its kind, such as "linear" or "conv".
        scale_invariant: "unit" where the weights of every single unit can be rescaled, "tensor" where only all
            together can, "no", or "undecided" and why.
        cosine_unit: the largest |⟨w_j,∇_j⟩|/(‖w_j‖‖∇_j‖) of its units, at the model's weights, or None.
        cosine_tensor: ⟨w,∇⟩/(‖w‖‖∇‖) of the whole tensor there, or None.
        deviation_unit, deviation_tensor: √n times the largest |cosine| at any point: what was judged by.
        units: how many units there are; 0 where the layer cannot be taken apart into units.
        silent_units: how many of them have no gradient or no weight, so that nothing is known of them.
        weight_norm, gradient_norm: ‖w‖ and ‖∇‖, at the model's weights.
        change_unit, change_tensor: by how much outputs changed when the weights of units, or all, were rescaled, as a
            share of their change when these were turned, where cosines left a doubt; None elsewhere.
        by_rescaling: whether it was judged by these changes.
    """

    layer: str
    kind: str
    scale_invariant: ScaleInvariant
    cosine_unit: float | None
    cosine_tensor: float | None
    deviation_unit: float | None
    deviation_tensor: float | None
    units: int
    silent_units: int
    weight_norm: float
    gradient_norm: float
    change_unit: float | None = None
    change_tensor: float | None = None
    by_rescaling: bool = False


@dataclass(frozen=True)
class Invariance(ByLayer[LayerInvariance]):
    """Which layers of a network are scale-invariant. Printed, it is a table.

    Attributes:
        entries: one a layer, in the order of `gyroscope.layers`.
        tolerance: the largest √n |cosine| that counted as zero.
        points: at how many weights it had to hold.
        loss: at the model's own.

    >>> entry = LayerInvariance("0.weight", "linear", "unit", 2e-6, -1e-7, 4e-5, 9e-6, 8, 0, 1.5, 0.2)
    >>> print(Invariance((entry,), 0.1, 4, 1.1))
    layer     scale-invariant  largest cos w_j,∇_j  cos w,∇  deviation a unit  as a whole  silent units   ‖w‖  ‖∇‖
    0.weight  a unit                         2e-06   -1e-07             4e-05       9e-06           0/8   1.5  0.2
    """

    _error = DynamicsError

    entries: tuple[LayerInvariance, ...]
    tolerance: float
    points: int
    loss: float

    @property
    def invariant(self) -> tuple[str, ...]:
        """The names of those that are scale-invariant, a unit at a time or as a whole."""
        return tuple(entry.layer for entry in self.entries if entry.scale_invariant in ("unit", "tensor"))

    def __str__(self) -> str:
        heads = ["layer", "scale-invariant", "largest cos w_j,∇_j", "cos w,∇", "deviation a unit", "as a whole"]
        heads += ["silent units", "‖w‖", "‖∇‖"]
        lines = [heads]
        for e in self.entries:
            numbers = (e.cosine_unit, e.cosine_tensor, e.deviation_unit, e.deviation_tensor)
            silent = f"{e.silent_units}/{e.units}" if e.units else "–"
            said = {"unit": "a unit", "tensor": "as a whole"}.get(e.scale_invariant, e.scale_invariant)
            said += ", by rescaling" if e.by_rescaling else ""
            norms = (e.weight_norm, e.gradient_norm)
            lines.append([e.layer, said, *map(_number, numbers), silent, *map(_number, norms)])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(_line(line, widths) for line in lines)


def _line(cells: list[str], widths: list[int]) -> str:
    """Names and words to the left, numbers to the right."""
    padded = [cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths, strict=True))]
    return "  ".join(padded).rstrip()


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
