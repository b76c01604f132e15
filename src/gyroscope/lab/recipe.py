"""What a trial trains with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from gyroscope.control import Layca


@dataclass(frozen=True)
class Recipe:
    """An optimizer and its control, by name: SGD at `rate`, steered by Layca unless `alpha` is None.

    Under Layca the rate is ρ, the tangent of the angle each layer turns by in a step, and `alpha`
    prioritises the first layers (negative), the last layers (positive) or none (0).

    >>> from gyroscope.lab import models
    >>> model = models.make("digits-cnn", seed=0)
    >>> Recipe("SGD", rate=0.1).optimizer(model).param_groups[0]["lr"]
    0.1
    """

    name: str
    rate: float
    alpha: float | None = None
    weight_decay: float = 0.0

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer for `model`."""
        sgd = torch.optim.SGD(model.parameters(), lr=self.rate, weight_decay=self.weight_decay)
        return sgd if self.alpha is None else Layca(sgd, model, alpha=self.alpha)
