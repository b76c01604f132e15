"""A dataset divided into the examples to train on and the examples to test on."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Split:
    """Training and test examples: inputs `[N, ...]` and integer labels `[N]`.

    >>> import torch
    >>> x, y = torch.zeros(3, 1, 8, 8), torch.tensor([0, 1, 2])
    >>> Split(x_train=x, y_train=y, x_test=x[:1], y_test=y[:1]).x_train.shape
    torch.Size([3, 1, 8, 8])
    """

    x_train: torch.Tensor
    y_train: torch.Tensor
    x_test: torch.Tensor
    y_test: torch.Tensor
