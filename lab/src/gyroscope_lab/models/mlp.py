"""Multilayer perceptrons of any depth and width: those the conditioning paper takes apart, and the others' on MNIST."""

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

    There are no biases unless asked for, and the weights start from the paper's "random initialization",
    U(−1/√fan_in, 1/√fan_in). Its code adds no bias either (the layer that measures draws one, and leaves it out).
    Whether its networks normalize the outputs of the last layer is not said; here they do not, since a classifier's
    logits have no use for it.

    Args:
        seed: of the weights; equal seeds give equal weights with batch normalization and without.
        depth: the number of linear layers, the last one included.
        width: the number of units of each layer but the last.
        inputs: the size of the input, flattened; 144 for 12×12 images of one channel.
        classes: the number of outputs.
        batch_norm: whether to normalize each layer's outputs over the batch, before the ReLU.
        affine: whether the normalization has a gain and a bias, both trained: γ s + β.
        gain: where γ starts: "ones", or "uniform", from U(0, 1) as in Torch 7, which the paper used.
        eps: what the normalization adds to the variance; 1e-3 in Keras.
        momentum: the weight of a new batch in its running averages; 0.01 in Keras, which calls it 0.99.
        biases: whether the linear layers have one, 0 at first.
        activation: "relu", or "linear" for none.
        init: where the weights start, one of `gyroscope_lab.models.initialization.INITIALIZERS`.

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
        raise LabError(f"All sizes of an MLP must be whole numbers >= 1, got {given}.")
    if gain not in ("ones", "uniform"):
        raise LabError(f"`gain` must be 'ones' or 'uniform', got {gain!r}.")
    if (affine and not batch_norm) or (gain == "uniform" and not affine):
        raise LabError("affine=True needs batch_norm=True, and gain='uniform' needs affine=True")
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
    # After the weights, so that these do not depend on it.
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
