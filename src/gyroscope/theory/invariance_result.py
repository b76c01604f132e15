"""The result of `invariance`: one row per layer, as a table, dicts or a data frame. It is read without torch."""

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
    "undecided: one weight per unit",
]


@dataclass(frozen=True)
class LayerInvariance:
    """The result for one layer.

    Attributes:
        layer: its name.
        kind: its kind, such as "linear" or "conv".
        scale_invariant: "unit" if the weights of every single unit can be rescaled, "tensor" if only all of them
            together can, "no", or "undecided" with the reason.
        cosine_unit: the largest |⟨w_j,∇_j⟩|/(‖w_j‖‖∇_j‖) over its units, at the model's weights, or None.
        cosine_tensor: ⟨w,∇⟩/(‖w‖‖∇‖) of the whole tensor there, or None.
        deviation_unit, deviation_tensor: √n times the largest |cosine| at any point; the verdict is based on these.
        units: number of units; 0 if the layer cannot be split into units.
        silent_units: number of units without a gradient or a weight, about which nothing is known.
        weight_norm, gradient_norm: ‖w‖ and ‖∇‖, at the model's weights.
        change_unit, change_tensor: change of the outputs when the weights of units, or all weights, were rescaled,
            relative to the change when they were turned, if cosines left a doubt; None otherwise.
        by_rescaling: whether the verdict is based on these changes.
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
    """Scale invariance of the layers of a network. Printed, it is a table.

    Attributes:
        entries: one per layer, in the order of `gyroscope.layers`.
        tolerance: the largest √n |cosine| that counted as zero.
        points: number of weights at which it had to hold.
        loss: loss at the model's own weights.

    >>> entry = LayerInvariance("0.weight", "linear", "unit", 2e-6, -1e-7, 4e-5, 9e-6, 8, 0, 1.5, 0.2)
    >>> print(Invariance((entry,), 0.1, 4, 1.1))
    layer     scale-invariant  largest cos w_j,∇_j  cos w,∇  deviation per unit  as a whole  silent units   ‖w‖  ‖∇‖
    0.weight  per unit                       2e-06   -1e-07               4e-05       9e-06           0/8   1.5  0.2
    """

    _error = DynamicsError

    entries: tuple[LayerInvariance, ...]
    tolerance: float
    points: int
    loss: float

    @property
    def invariant(self) -> tuple[str, ...]:
        """Names of the scale-invariant layers, per unit or as a whole."""
        return tuple(entry.layer for entry in self.entries if entry.scale_invariant in ("unit", "tensor"))

    def __str__(self) -> str:
        heads = ["layer", "scale-invariant", "largest cos w_j,∇_j", "cos w,∇", "deviation per unit", "as a whole"]
        heads += ["silent units", "‖w‖", "‖∇‖"]
        lines = [heads]
        for e in self.entries:
            numbers = (e.cosine_unit, e.cosine_tensor, e.deviation_unit, e.deviation_tensor)
            silent = f"{e.silent_units}/{e.units}" if e.units else "–"
            said = {"unit": "per unit", "tensor": "as a whole"}.get(e.scale_invariant, e.scale_invariant)
            said += ", by rescaling" if e.by_rescaling else ""
            norms = (e.weight_norm, e.gradient_norm)
            lines.append([e.layer, said, *map(_number, numbers), silent, *map(_number, norms)])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(_line(line, widths) for line in lines)


def _line(cells: list[str], widths: list[int]) -> str:
    """Join the cells of a row: names and words aligned left, numbers right."""
    padded = [cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths, strict=True))]
    return "  ".join(padded).rstrip()


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
