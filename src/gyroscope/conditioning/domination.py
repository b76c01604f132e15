"""Weight domination: how small a step's gradient is beside the weight it moves (Definition 1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def spectral_norms(matrices: Sequence[Tensor]) -> Tensor:
    """σmax of tensors taken as matrices [out, everything else], as [n] in float64.

    >>> spectral_norms([torch.tensor([[3.0, 0.0], [0.0, -4.0]]), torch.ones(2, 2, 2)])
    tensor([4.0000, 2.8284], dtype=torch.float64)
    """
    found = []
    for m in matrices:
        matrix = m.detach().reshape(len(m), -1).to(torch.float64)
        found.append(torch.linalg.svdvals(matrix)[0] if matrix.numel() else matrix.new_zeros(()))
    return torch.stack(found) if found else torch.zeros(0, dtype=torch.float64)


def domination(weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """σmax(∂L/∂W)/σmax(W) of each layer, as [n] in float64; weight domination is when it is far below 1.

    A weight of zero gives infinity, or NaN if its gradient is zero too: then nothing dominates.

    >>> domination([2 * torch.eye(2), torch.zeros(1, 1)], [torch.eye(2), torch.zeros(1, 1)])
    tensor([0.5000,    nan], dtype=torch.float64)
    """
    return spectral_norms(gradients) / spectral_norms(weights)
