"""Wide residual networks, as the rotation paper's C100-WRN runs them."""

from __future__ import annotations

import torch
from torch import nn

from gyroscope_lab.errors import LabError
from gyroscope_lab.models.building import add_classifier, conv3x3, keras_norm, require_images, require_share
from gyroscope_lab.models.initialization import glorot_uniform_, initialized
from gyroscope_lab.models.residual import PreactBlock


def wrn(
    seed: int, *, depth: int, width: int, classes: int = 10, channels: int = 3, dropout: float = 0.3
) -> nn.Sequential:
    """Return WRN-depth-width: a convolution, three stages of n = (depth − 4)/6 blocks, BN-ReLU and a classifier.

    Each block is y = W₂ ∗ dropout(ReLU(BN(W₁ ∗ ReLU(BN(x))))) + s(x), with 16, 32 and 64 times `width` channels and a
    1×1 convolution of x for s where the shape changes (registered after its block's own). Batch normalization has no
    gain and no bias, no layer has a bias, and kernels start glorot_uniform, Keras's default.

    Args:
        seed: of the weights.
        depth: 6n + 4: the number of convolutions, one in the shortcut of each stage's first block included.
        width: how many times wider than a ResNet.
        classes: the number of outputs.
        channels: the number of channels of the images.
        dropout: the share of activations left out within each block, in training.

    >>> sum(p.numel() for p in wrn(0, depth=10, width=1).parameters())
    77360
    """
    blocks, left = divmod(depth - 4, 6)
    if blocks < 1 or left:
        near = 6 * max(1, round((depth - 4) / 6)) + 4
        raise LabError(f"a wide residual network has 6n + 4 convolutions: 10, 16, 22, …; not {depth}, but {near}")
    require_images(channels, classes)
    require_share(dropout)
    return initialized(
        lambda: _build(blocks, width, channels, classes, dropout),
        generator=torch.Generator().manual_seed(seed),
        initializer=glorot_uniform_,
    )


def _build(blocks: int, width: int, channels: int, classes: int, dropout: float) -> nn.Sequential:
    model = nn.Sequential()
    model.add_module("conv", conv3x3(channels, 16))
    channels = 16
    for stage, wide in enumerate((16 * width, 32 * width, 64 * width), start=1):
        for block in range(1, blocks + 1):
            stride = 2 if stage > 1 and block == 1 else 1
            made = PreactBlock(channels, wide, stride=stride, norm=keras_norm, projection=True, dropout=dropout)
            model.add_module(f"stage{stage}_block{block}", made)
            channels = wide
    model.add_module("norm", keras_norm(channels))
    model.add_module("relu", nn.ReLU())
    add_classifier(model, channels, classes, bias=False)
    return model
