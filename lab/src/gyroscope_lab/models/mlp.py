"""Multilayer perceptrons of any depth and width, as in the conditioning paper and in the other papers on MNIST."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Literal

import torch
from torch import nn

from gyroscope_lab.errors import LabError
from gyroscope_lab.models.initialization import INITIALIZERS, initialized

Gain = Literal["ones", "uniform"]
Activation = Literal["relu", "linear"]


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
    eps: float = 1e-5,
    momentum: float = 0.1,
    biases: bool = False,
    activation: Activation = "relu",
    init: str = "uniform",
) -> nn.Sequential:
    """Return x_k = ReLU(BN(W_k x_{k−1})), k = 1 … depth − 1, and a last linear layer h = W x without either (eq. 3).

    By default there are no biases, and the weights start from the paper's "random initialization", U(−1/√fan_in,
    1/√fan_in). Its code adds no bias either (the layer that measures draws one and does not use it). The paper does not
    say whether its networks normalize the outputs of the last layer. Here they do not, since logits need no
    normalization.

    Args:
        seed: the seed of the weights; equal seeds give equal weights with and without batch normalization.
        depth: the number of linear layers, the last one included.
        width: the number of units of each layer except the last.
        inputs: the size of the input, flattened; 144 for 12×12 images of one channel.
        classes: the number of outputs.
        batch_norm: True to normalize each layer's outputs over the batch, before the ReLU.
        affine: True for a normalization with trained gain and bias: γ s + β.
        gain: the initial γ: "ones", or "uniform", from U(0, 1) as in Torch 7, which the paper used.
        eps: ε of the normalization; 1e-3 in Keras.
        momentum: the weight of a new batch in its running averages; 0.01 in Keras, which calls it 0.99.
        biases: True for linear layers with biases, which start at 0.
        activation: "relu", or "linear" for none.
        init: the initializer of the weights, one of `gyroscope_lab.models.initialization.INITIALIZERS`.

    >>> model = mlp(0, depth=8, width=24)
    >>> model(torch.zeros(2, 1, 12, 12)).shape
    torch.Size([2, 10])
    >>> [name for name, _ in mlp(0, depth=2, width=24, batch_norm=True).named_children()]
    ['flatten', 'linear1', 'norm1', 'relu1', 'linear2']

    The rotation paper's network for MNIST:

    >>> keras = {"affine": True, "eps": 1e-3, "momentum": 0.01, "biases": True, "init": "glorot_uniform"}
    >>> sum(p.numel() for p in mlp(0, depth=2, width=784, inputs=784, batch_norm=True, **keras).parameters())
    624858
    """
    if min(depth, width, inputs, classes) < 1:
        given = f"depth {depth}, width {width}, {inputs} inputs, {classes} classes"
        raise LabError(f"All sizes of an MLP must be whole numbers ≥ 1, got {given}.")
    if gain not in ("ones", "uniform"):
        raise LabError(f"`gain` must be 'ones' or 'uniform', got {gain!r}.")
    if (affine and not batch_norm) or (gain == "uniform" and not affine):
        raise LabError("affine=True needs batch_norm=True, and gain='uniform' needs affine=True.")
    if activation not in ("relu", "linear"):
        raise LabError(f"`activation` must be 'relu' or 'linear', got {activation!r}.")
    if init not in INITIALIZERS:
        raise LabError(f"`init` must be one of {', '.join(INITIALIZERS)}, got {init!r}.")
    norm = partial(nn.BatchNorm1d, eps=eps, momentum=momentum, affine=affine) if batch_norm else None
    generator = torch.Generator().manual_seed(seed)
    model = initialized(
        lambda: _build([inputs, *[width] * (depth - 1), classes], norm, biases, activation == "relu"),
        generator=generator,
        initializer=INITIALIZERS[init],
    )
    # Drawn after the weights, so that the weights do not depend on it.
    for module in model:
        if isinstance(module, nn.BatchNorm1d) and gain == "uniform":
            nn.init.uniform_(module.weight, generator=generator)
    return model


def _build(sizes: list[int], norm: Callable[[int], nn.Module] | None, biases: bool, relu: bool) -> nn.Sequential:
    model = nn.Sequential()
    model.add_module("flatten", nn.Flatten())
    for number, (inputs, outputs) in enumerate(pairwise(sizes), start=1):
        model.add_module(f"linear{number}", nn.Linear(inputs, outputs, bias=biases))
        if number == len(sizes) - 1:
            break
        if norm is not None:
            model.add_module(f"norm{number}", norm(outputs))
        if relu:
            model.add_module(f"relu{number}", nn.ReLU())
    return model
