"""Multilayer perceptrons of any depth and width, as the conditioning paper takes them apart."""

from __future__ import annotations

from math import sqrt
from typing import Literal

import torch
from torch import nn

from gyroscope.lab.errors import LabError

Gain = Literal["ones", "uniform"]


def mlp(
    seed: int,
    *,
    depth: int,
    width: int,
    inputs: int = 144,
    classes: int = 10,
    batch_norm: bool = False,
    affine: bool = False,
    gain: Gain = "ones",
) -> nn.Sequential:
    """Return x_k = ReLU(BN(W_k x_{k−1})), k = 1 … depth − 1, and a last linear layer h = W x without either (eq. 3).

    There are no biases, and the weights start from the paper's "random initialization", U(−1/√fan_in, 1/√fan_in). Its
    code adds no bias either (the layer that measures draws one, and leaves it out). Whether its networks normalize the
    outputs of the last layer is not said; here they do not, since a classifier's logits have no use for it.

    Args:
        seed: of the weights; equal seeds give equal weights with batch normalization and without.
        depth: the number of linear layers, the last one included.
        width: the number of units of each layer but the last.
        inputs: the size of the input, flattened; 144 for 12×12 images of one channel.
        classes: the number of outputs.
        batch_norm: whether to normalize each layer's outputs over the batch, before the ReLU.
        affine: whether the normalization has a gain and a bias, both trained: γ s + β.
        gain: where γ starts: "ones", or "uniform", from U(0, 1) as in Torch 7, which the paper used.

    >>> model = mlp(0, depth=8, width=24)
    >>> model(torch.zeros(2, 1, 12, 12)).shape
    torch.Size([2, 10])
    >>> [name for name, _ in mlp(0, depth=2, width=24, batch_norm=True).named_children()]
    ['flatten', 'linear1', 'norm1', 'relu1', 'linear2']
    """
    if min(depth, width, inputs, classes) < 1:
        given = f"depth {depth}, width {width}, {inputs} inputs, {classes} classes"
        raise LabError(f"an MLP needs at least one of everything; asked for: {given}")
    if gain not in ("ones", "uniform"):
        raise LabError(f"the gain of batch normalization starts at 'ones' or 'uniform', not {gain!r}")
    if (affine and not batch_norm) or (gain == "uniform" and not affine):
        raise LabError("affine=True needs batch_norm=True, and gain='uniform' needs affine=True")
    # PyTorch's own initialization, overwritten below, draws from the caller's random state.
    with torch.random.fork_rng(devices=[]):
        model = _build(depth, width, inputs, classes, batch_norm, affine)
    generator = torch.Generator().manual_seed(seed)
    for module in model:
        if isinstance(module, nn.Linear):
            bound = 1 / sqrt(module.in_features)
            nn.init.uniform_(module.weight, -bound, bound, generator=generator)
    # After the weights, so that these do not depend on it.
    for module in model:
        if isinstance(module, nn.BatchNorm1d) and gain == "uniform":
            nn.init.uniform_(module.weight, generator=generator)
    return model


def _build(depth: int, width: int, inputs: int, classes: int, batch_norm: bool, affine: bool) -> nn.Sequential:
    model = nn.Sequential()
    model.add_module("flatten", nn.Flatten())
    for number in range(1, depth):
        model.add_module(f"linear{number}", nn.Linear(inputs, width, bias=False))
        if batch_norm:
            model.add_module(f"norm{number}", nn.BatchNorm1d(width, affine=affine))
        model.add_module(f"relu{number}", nn.ReLU())
        inputs = width
    model.add_module(f"linear{depth}", nn.Linear(inputs, classes, bias=False))
    return model
