"""Layca's relatives: the same four operations with some left out, by the names they are known under."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gyroscope.control.layca import Layca
from gyroscope.layers.layer import Layer

Layers = nn.Module | Sequence[Layer] | None


def hyperball(optimizer: Optimizer, model_or_layers: Layers = None, **options: Any) -> Layca:
    """Layca without operation 1: the relative step is taken as proposed, then the norm is put back.

        w' = ‖w₀‖ (w + ρ‖w‖ s/‖s‖) / ‖w + ρ‖w‖ s/‖s‖‖

    A layer turns by less than arctan ρ where its displacement has a part along w.

    >>> import torch
    >>> hyperball(torch.optim.SGD([torch.ones(2, 2)], lr=0.1)).law.project
    False
    """
    return Layca(optimizer, model_or_layers, project=False, **options)


def relative_update(optimizer: Optimizer, model_or_layers: Layers = None, **options: Any) -> Layca:
    """Operation 2 alone: every step is ρ times as long as the layer's weights, and norms are free.

        w' = w + ρ‖w‖ s/‖s‖

    >>> import torch
    >>> relative_update(torch.optim.SGD([torch.ones(2, 2)], lr=0.1)).law.reproject
    False
    """
    return Layca(optimizer, model_or_layers, project=False, reproject=False, **options)


def lars(optimizer: Optimizer, model_or_layers: Layers = None, *, growth: float | None = 1e-4, **options: Any) -> Layca:
    """LARS, or equivalently NG_adap, as the papers ran it: relative updates with the growth of norms limited.

        w' = w + ρ‖w‖ s/‖s‖, shrunk so that ‖w'‖ ≤ ‖w‖ + growth ‖w₀‖

    The papers limit the growth to 1e-4 ‖w₀‖ a step, to prevent numerical errors; `growth=None` does not.

    >>> import torch
    >>> lars(torch.optim.SGD([torch.ones(2, 2)], lr=0.1)).law.growth
    0.0001

    Reference:
        Ginsburg, Gitman and You, Large batch training of convolutional networks with layer-wise adaptive rate
        scaling; Yu et al., Normalized gradient with adaptive stepsize method for deep neural network training.
    """
    return Layca(optimizer, model_or_layers, project=False, reproject=False, growth=growth, **options)


def block_normalized(optimizer: Optimizer, model_or_layers: Layers = None, **options: Any) -> Layca:
    """Block-normalised updates: every layer's step has length ρ, whatever its weights.

        w' = w + ρ s/‖s‖

    >>> import torch
    >>> block_normalized(torch.optim.SGD([torch.ones(2, 2)], lr=0.1)).law.scale
    'unit'
    """
    return Layca(optimizer, model_or_layers, project=False, reproject=False, scale="unit", **options)
