"""The network of the demo: small enough for a laptop, deep enough for its layers to differ."""

from __future__ import annotations

import torch
from torch import nn

from gyroscope.lab.models.initialization import he_uniform_

WIDTHS = (16, 16, 32, 32, 64, 64)
POOLED_AFTER = (2, 4)


def digits_cnn(seed: int) -> nn.Sequential:
    """Return six 3×3 convolutions (16-16-32-32-64-64), global average pooling and a linear classifier.

    Each convolution is followed by ReLU, then batch normalization without gain or bias, as in the
    rotation paper's CNNs; no layer has a bias, so the seven kernels are all there is to train.

    >>> import torch
    >>> digits_cnn(0)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    # PyTorch's own initialization, overwritten below, draws from the caller's random state.
    with torch.random.fork_rng(devices=[]):
        model = _build()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        he_uniform_(parameter, generator=generator)
    return model


def _build() -> nn.Sequential:
    model = nn.Sequential()
    channels = 1
    for number, width in enumerate(WIDTHS, start=1):
        model.add_module(f"conv{number}", nn.Conv2d(channels, width, kernel_size=3, padding=1, bias=False))
        model.add_module(f"relu{number}", nn.ReLU())
        model.add_module(f"norm{number}", nn.BatchNorm2d(width, affine=False))
        if number in POOLED_AFTER:
            model.add_module(f"pool{number}", nn.MaxPool2d(2))
        channels = width
    model.add_module("average", nn.AdaptiveAvgPool2d(1))
    model.add_module("flatten", nn.Flatten())
    model.add_module("classifier", nn.Linear(channels, 10, bias=False))
    return model
