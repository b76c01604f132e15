"""How far weights have turned from where they started."""

from __future__ import annotations

import torch


def rotation(weight: torch.Tensor, initial: torch.Tensor) -> float:
    """Return the cosine distance 1 − ⟨w, w₀⟩ / (‖w‖ ‖w₀‖), computed in float64.

    It is computed as ½ ‖w/‖w‖ − w₀/‖w₀‖‖², which is equal, exactly 0 when nothing moved, and keeps its
    digits at small angles where one minus the cosine loses them. A zero tensor has no direction: nan.

    >>> import torch
    >>> rotation(torch.tensor([0.0, 3.0]), torch.tensor([2.0, 0.0]))
    1.0
    """
    w, w0 = weight.detach().double().flatten(), initial.detach().double().flatten()
    norm, norm0 = w.norm(), w0.norm()
    if norm == 0 or norm0 == 0:
        return float("nan")
    difference = w / norm - w0 / norm0
    return 0.5 * float(difference @ difference)
