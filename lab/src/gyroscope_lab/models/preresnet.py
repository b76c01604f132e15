"""ResNets with pre-activation, as the conditioning paper compares them: PreResNet and PreResNet_v1."""

from __future__ import annotations

import torch
from torch import nn

from gyroscope_lab.models.building import add_classifier, conv3x3, require_images
from gyroscope_lab.models.initialization import he_normal_fan_out_, initialized, uniform_
from gyroscope_lab.models.residual import PreactBlock
from gyroscope_lab.models.resnet import WIDTHS, blocks_per_stage, shapes


def preresnet(
    seed: int,
    *,
    depth: int,
    classes: int = 10,
    channels: int = 3,
    final_norm: bool = True,
    classifier_bias: bool = True,
    checkpointed: bool = False,
) -> nn.Sequential:
    """Return a ResNet with pre-activation: a convolution, three stages of (depth − 2)/6 blocks, BN-ReLU, a classifier.

    Each block is y = W₂ ∗ ReLU(BN(W₁ ∗ p)) + s(x), p = ReLU(BN(x)); the first of each stage has s(p) for s(x).
    Shortcuts, normalization and initialization are those of the conditioning paper's ResNet (`resnet`).

    Args:
        seed: of the weights.
        depth: 6n + 2: the number of 3×3 convolutions and the classifier.
        classes: the number of outputs.
        channels: the number of channels of the images.
        final_norm: whether the sum that leaves the last block is normalized; not in PreResNet_v1.
        classifier_bias: whether the classifier has a bias.
        checkpointed: whether blocks keep their inputs alone and compute the rest again in the backward pass.

    >>> preresnet(0, depth=8)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    blocks = blocks_per_stage(depth)
    require_images(channels, classes)
    return initialized(
        lambda: _build(blocks, channels, classes, final_norm, classifier_bias, checkpointed),
        generator=torch.Generator().manual_seed(seed),
        initializer=he_normal_fan_out_,
        linear=uniform_,
    )


def preresnet_v1(
    seed: int,
    *,
    depth: int,
    classes: int = 10,
    channels: int = 3,
    classifier_bias: bool = True,
    checkpointed: bool = False,
) -> nn.Sequential:
    """Return `preresnet` without the batch normalization after the last block; the ReLU stays.

    >>> [name for name, _ in preresnet_v1(0, depth=8).named_children()][-4:]
    ['relu', 'average', 'flatten', 'classifier']
    """
    return preresnet(
        seed, depth=depth, classes=classes, channels=channels, final_norm=False, classifier_bias=classifier_bias,
        checkpointed=checkpointed,
    )  # fmt: skip


def _build(blocks: int, channels: int, classes: int, final_norm: bool, bias: bool, checkpointed: bool) -> nn.Sequential:
    model = nn.Sequential()
    model.add_module("conv", conv3x3(channels, WIDTHS[0]))
    for name, narrow, wide, stride in shapes(blocks):
        shared = name.endswith("_block1")
        block = PreactBlock(narrow, wide, stride=stride, norm=nn.BatchNorm2d, shared=shared)
        block.checkpointed = checkpointed
        model.add_module(name, block)
    if final_norm:
        model.add_module("norm", nn.BatchNorm2d(WIDTHS[-1]))
    model.add_module("relu", nn.ReLU())
    add_classifier(model, WIDTHS[-1], classes, bias=bias)
    return model
