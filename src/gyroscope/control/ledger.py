"""What a controller remembers of every layer between steps, in a few vectors on the layers' device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gyroscope.vectors.eager import accumulator


@dataclass(frozen=True)
class Ledger:
    """One entry a row; a row is a layer, or a segment of one.

    Attributes:
        multiplier: the row's share of the rate.
        radius: ‖w₀‖, and −1 until the first step has seen it.
        skipped: how many steps were left out because something was not finite.
        bad: whether the last step was.
        power1: β₁ᵗ of an inner rule with bias correction; for momentum 1 before the first step, then 0.
        power2: β₂ᵗ likewise.
    """

    multiplier: Tensor
    radius: Tensor
    skipped: Tensor
    bad: Tensor
    power1: Tensor
    power2: Tensor

    @classmethod
    def blank(cls, rows: int, device: torch.device) -> Ledger:
        """A ledger before the first step.

        >>> Ledger.blank(2, torch.device("cpu")).radius
        tensor([-1., -1.], dtype=torch.float64)
        """
        exact = accumulator(device)
        return cls(
            multiplier=torch.ones(rows, dtype=exact, device=device),
            radius=torch.full((rows,), -1.0, dtype=exact, device=device),
            skipped=torch.zeros(rows, dtype=torch.int64, device=device),
            bad=torch.zeros(rows, dtype=torch.int64, device=device),
            power1=torch.ones(rows, dtype=exact, device=device),
            power2=torch.ones(rows, dtype=exact, device=device),
        )
