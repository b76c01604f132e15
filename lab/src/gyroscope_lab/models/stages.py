"""Plain convolutional networks in stages, as the rotation papers build them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from gyroscope_lab.models.building import add_classifier, conv3x3, require_images
from gyroscope_lab.models.initialization import he_uniform_, initialized


def stages(
    seed: int,
    *,
    widths: Sequence[int],
    convolutions: int,
    channels: int,
    classes: int,
    eps: float = 1e-3,
    momentum: float = 0.01,
) -> nn.Sequential:
    """Return x_k = BN(ReLU(W_k ∗ x_{k−1})), stage by stage, then global average pooling and a linear classifier.

    Convolutions are 3×3 and keep the size of the image; 2×2 maximum pooling halves it between stages (rounding up,
    where Keras rounds down, so that images of any size will do; those of the papers halve evenly). Batch normalization
    comes after the ReLU and has neither gain nor bias, and no layer has a bias: every parameter is a kernel. Kernels
    start he_uniform.

    Args:
        seed: of the weights.
        widths: the number of channels of each stage.
        convolutions: the number of layers in each stage.
        channels: the number of channels of the images.
        classes: the number of outputs.
        eps: what batch normalization adds to the variance; Keras's default.
        momentum: the weight of a new batch in the running averages; Keras says 0.99 for 0.01.

    >>> model = stages(0, widths=[4, 8], convolutions=2, channels=1, classes=3)
    >>> model(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 3])
    >>> [name for name, _ in model.named_children()][:7]
    ['conv1', 'relu1', 'norm1', 'conv2', 'relu2', 'norm2', 'pool2']
    """
    require_images(channels, classes)
    return initialized(
        lambda: _build(widths, convolutions, channels, classes, eps, momentum),
        generator=torch.Generator().manual_seed(seed),
        initializer=he_uniform_,
    )


def _build(
    widths: Sequence[int], convolutions: int, channels: int, classes: int, eps: float, momentum: float
) -> nn.Sequential:
    model = nn.Sequential()
    number = 0
    for stage, width in enumerate(widths, start=1):
        for _ in range(convolutions):
            number += 1
            model.add_module(f"conv{number}", conv3x3(channels, width))
            model.add_module(f"relu{number}", nn.ReLU())
            model.add_module(f"norm{number}", nn.BatchNorm2d(width, eps, momentum, affine=False))
            channels = width
        if stage < len(widths):
            model.add_module(f"pool{number}", nn.MaxPool2d(2, ceil_mode=True))
    add_classifier(model, channels, classes, bias=False)
    return model
