"""ResNets of 6n + 2 layers for small images."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from gyroscope.lab.errors import LabError
from gyroscope.lab.models.initialization import he_normal_fan_out_, he_normal_truncated_, initialized, uniform_
from gyroscope.lab.models.residual import BasicBlock, Norm

WIDTHS = (16, 32, 64)


def resnet(
    seed: int, *, depth: int, classes: int = 10, channels: int = 3, keras: bool = False, last_norm: bool = False
) -> nn.Sequential:
    """Return a ResNet: conv-BN-ReLU, three stages of n = (depth − 2)/6 blocks of 16-32-64 channels, a classifier.

    Each block is y = ReLU(BN(W₂ ∗ ReLU(BN(W₁ ∗ x))) + s(x)); the second and third stages halve the image first, and the
    last one is averaged over pixels. By default it is the conditioning paper's: shortcuts without weights (A), batch
    normalization with gain and bias, convolutions from N(0, 2/(k²·outputs)), the classifier's weights from
    U(±1/√fan_in) and its bias 0.

    Args:
        seed: of the weights.
        depth: 6n + 2: the number of 3×3 convolutions and the classifier.
        classes: the number of outputs.
        channels: the number of channels of the images.
        keras: the rotation papers' variant instead: 1×1 convolutions where the shape changes (two layers more, each
            after its block's own), no gains, no biases, everything from Keras 2.1's `he_normal`, and TensorFlow's
            padding, epsilon and momentum.
        last_norm: normalize the averages over pixels as well (the conditioning paper's LastBN); gains start from
            U(0, 1), as in Torch 7.

    >>> model = resnet(0, depth=8)
    >>> model(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    >>> sum(p.numel() for p in resnet(0, depth=32, classes=100, keras=True).parameters())
    470192
    """
    if depth < 8 or (depth - 2) % 6 != 0:
        near = max(1, round((depth - 2) / 6))
        raise LabError(f"a ResNet has 6n + 2 layers: 8, 14, 20, …; {depth} is not of them, {6 * near + 2} is")
    if min(channels, classes) < 1:
        raise LabError(f"images have channels and a classifier classes; asked for: {channels} and {classes}")
    if keras and last_norm:
        raise LabError("keras=True and last_norm=True are of different papers; choose one")
    generator = torch.Generator().manual_seed(seed)
    convolutions, linear = (he_normal_truncated_, None) if keras else (he_normal_fan_out_, uniform_)
    model = initialized(
        lambda: _build((depth - 2) // 6, channels, classes, keras, last_norm),
        generator=generator,
        initializer=convolutions,
        linear=linear,
    )
    if last_norm:
        # After the kernels, so that these do not depend on it.
        nn.init.uniform_(model.get_parameter("last_norm.weight"), generator=generator)
    return model


def _build(blocks: int, channels: int, classes: int, keras: bool, last_norm: bool) -> nn.Sequential:
    norm: Norm = partial(nn.BatchNorm2d, eps=1e-3, momentum=0.01, affine=False) if keras else nn.BatchNorm2d
    model = nn.Sequential()
    width = WIDTHS[0]
    model.add_module("conv", nn.Conv2d(channels, width, kernel_size=3, padding=1, bias=False))
    model.add_module("norm", norm(width))
    model.add_module("relu", nn.ReLU())
    for stage, wider in enumerate(WIDTHS, start=1):
        for block in range(1, blocks + 1):
            stride = 2 if stage > 1 and block == 1 else 1
            made = BasicBlock(width, wider, stride=stride, norm=norm, projection=keras, same=keras)
            model.add_module(f"stage{stage}_block{block}", made)
            width = wider
    model.add_module("average", nn.AdaptiveAvgPool2d(1))
    model.add_module("flatten", nn.Flatten())
    if last_norm:
        model.add_module("last_norm", nn.BatchNorm1d(width))
    model.add_module("classifier", nn.Linear(width, classes, bias=not keras))
    return model
