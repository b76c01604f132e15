"""Residual networks for small images.

ResNets of 6n + 2 layers: the conditioning paper's, including LastBN, and the rotation papers'. The conditioning paper's
PreResNet and PreResNet_v1, with pre-activation. Wide residual networks, as in the rotation paper's C100-WRN.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import torch
from torch import nn

from gyroscope_lab.errors import LabError
from gyroscope_lab.models.building import Norm, add_classifier, conv3x3, keras_norm, require_images, require_share
from gyroscope_lab.models.initialization import (
    glorot_uniform_,
    he_normal_fan_out_,
    he_normal_truncated_,
    initialized,
    uniform_,
)
from gyroscope_lab.models.residual import BasicBlock, PreactBlock

WIDTHS = (16, 32, 64)


def resnet(
    seed: int,
    *,
    depth: int,
    classes: int = 10,
    channels: int = 3,
    keras: bool = False,
    batch_norm: bool = True,
    last_norm: bool = False,
    pool_norm: bool = False,
    divisor: float = 1.0,
    classifier_bias: bool = True,
    checkpointed: bool = False,
) -> nn.Sequential:
    """Return a ResNet: conv-BN-ReLU, three stages of n = (depth − 2)/6 blocks of 16-32-64 channels, a classifier.

    Each block is y = ReLU(BN(W₂ ∗ ReLU(BN(W₁ ∗ x))) + s(x)); the second and third stages halve the image first, and the
    output of the last stage is averaged over pixels. By default it is the conditioning paper's: shortcuts without
    weights (A), batch normalization with gain and bias, convolutions from N(0, 2/(k²·outputs)), the classifier's
    weights from U(±1/√fan_in) and its bias 0.

    Args:
        seed: the seed of the weights; equal seeds give equal kernels with and without LastBN or normalization.
        depth: 6n + 2: the number of 3×3 convolutions and the classifier.
        classes: the number of outputs.
        channels: the number of channels of the images.
        keras: the rotation papers' variant instead: 1×1 convolutions where the shape changes (two further layers, each
            after its block's own), no gains, no biases, everything from Keras 2.1's `he_normal`, and TensorFlow's
            padding, epsilon and momentum.
        batch_norm: False for a network without normalization.
        last_norm: normalize the averages over pixels as well (the conditioning paper's LastBN); gains start from
            U(0, 1), as in Torch 7.
        pool_norm: normalize the output of the last block, before the average over pixels; with batch_norm=False it is
            the only normalization, as in Bjorck et al. (2018).
        divisor: the constant by which the averages over pixels are divided.
        classifier_bias: True for a classifier with a bias; with `keras` it has none.
        checkpointed: True for blocks that keep only their inputs and recompute the rest in the backward pass: less
            memory, more work, the same numbers.

    >>> model = resnet(0, depth=8)
    >>> model(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    >>> sum(p.numel() for p in resnet(0, depth=32, classes=100, keras=True).parameters())
    470192
    """
    blocks = blocks_per_stage(depth)
    require_images(channels, classes)
    if keras and (last_norm or pool_norm or divisor != 1 or not batch_norm):
        raise LabError(
            "`keras` must be False with batch_norm=False, last_norm=True, pool_norm=True or a divisor: it is one "
            "network as it is."
        )
    if not 0 < divisor < inf:
        raise LabError(f"`divisor` must be a finite number > 0, got {divisor}.")
    generator = torch.Generator().manual_seed(seed)
    convolutions, linear = (he_normal_truncated_, None) if keras else (he_normal_fan_out_, uniform_)
    norm: Norm = keras_norm if keras else nn.BatchNorm2d if batch_norm else _unnormalized
    before: dict[str, nn.Module] = {"last_norm": nn.BatchNorm1d(WIDTHS[-1])} if last_norm else {}
    if divisor != 1:
        before["divided"] = Divided(divisor)

    def build() -> nn.Sequential:
        model = _without_classifier(blocks, channels, norm, keras, checkpointed)
        if pool_norm:
            model.add_module("pool_norm", nn.BatchNorm2d(WIDTHS[-1]))
        add_classifier(model, WIDTHS[-1], classes, bias=classifier_bias and not keras, before=before)
        return model

    model = initialized(
        build,
        generator=generator,
        initializer=convolutions,
        linear=linear,
    )
    if last_norm:
        # Drawn after the kernels, so that the kernels do not depend on it.
        nn.init.uniform_(model.get_parameter("last_norm.weight"), generator=generator)
    return model


def resnet_lastbn(
    seed: int,
    *,
    depth: int,
    classes: int = 10,
    channels: int = 3,
    classifier_bias: bool = True,
    checkpointed: bool = False,
) -> nn.Sequential:
    """Return `resnet` with batch normalization of the averages over pixels, before the classifier.

    >>> [name for name, _ in resnet_lastbn(0, depth=8).named_children()][-4:]
    ['average', 'flatten', 'last_norm', 'classifier']
    """
    return resnet(
        seed, depth=depth, classes=classes, channels=channels, last_norm=True, classifier_bias=classifier_bias,
        checkpointed=checkpointed,
    )  # fmt: skip


def blocks_per_stage(depth: int) -> int:
    """Return n for a depth of 6n + 2.

    >>> blocks_per_stage(110)
    18
    >>> blocks_per_stage(18)
    Traceback (most recent call last):
    gyroscope_lab.errors.LabError: `depth` must be 6n + 2: 8, 14, 20, …, got 18. Try 20.
    """
    blocks, left = divmod(depth - 2, 6)
    if blocks < 1 or left:
        near = 6 * max(1, round((depth - 2) / 6)) + 2
        raise LabError(f"`depth` must be 6n + 2: 8, 14, 20, …, got {depth}. Try {near}.")
    return blocks


def shapes(blocks: int) -> Iterator[tuple[str, int, int, int]]:
    """Yield the name, the input channels, the output channels and the stride of each block of the three stages.

    >>> list(shapes(1))
    [('stage1_block1', 16, 16, 1), ('stage2_block1', 16, 32, 2), ('stage3_block1', 32, 64, 2)]
    """
    channels = WIDTHS[0]
    for stage, width in enumerate(WIDTHS, start=1):
        for block in range(1, blocks + 1):
            yield f"stage{stage}_block{block}", channels, width, 2 if stage > 1 and block == 1 else 1
            channels = width


class Divided(nn.Module):
    """y = x/c with a constant c.

    >>> Divided(4.0)(torch.ones(2)).tolist()
    [0.25, 0.25]
    """

    def __init__(self, divisor: float) -> None:
        super().__init__()
        self.divisor = divisor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return y."""
        return x / self.divisor

    def extra_repr(self) -> str:
        """Return the constant, as shown by `print`."""
        return f"{self.divisor:g}"


def _without_classifier(blocks: int, channels: int, norm: Norm, keras: bool, checkpointed: bool) -> nn.Sequential:
    model = nn.Sequential()
    model.add_module("conv", conv3x3(channels, WIDTHS[0]))
    model.add_module("norm", norm(WIDTHS[0]))
    model.add_module("relu", nn.ReLU())
    for name, narrow, wide, stride in shapes(blocks):
        block = BasicBlock(narrow, wide, stride=stride, norm=norm, projection=keras, same=keras)
        block.checkpointed = checkpointed
        model.add_module(name, block)
    return model


def _unnormalized(_: int) -> nn.Module:
    return nn.Identity()


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
        seed: the seed of the weights.
        depth: 6n + 2: the number of 3×3 convolutions and the classifier.
        classes: the number of outputs.
        channels: the number of channels of the images.
        final_norm: True to normalize the output of the last block; False in PreResNet_v1.
        classifier_bias: True for a classifier with a bias.
        checkpointed: True for blocks that keep only their inputs and recompute the rest in the backward pass.

    >>> preresnet(0, depth=8)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    blocks = blocks_per_stage(depth)
    require_images(channels, classes)
    return initialized(
        lambda: _preresnet(blocks, channels, classes, final_norm, classifier_bias, checkpointed),
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


def _preresnet(
    blocks: int, channels: int, classes: int, final_norm: bool, bias: bool, checkpointed: bool
) -> nn.Sequential:
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


def wrn(
    seed: int, *, depth: int, width: int, classes: int = 10, channels: int = 3, dropout: float = 0.3
) -> nn.Sequential:
    """Return WRN-depth-width: a convolution, three stages of n = (depth − 4)/6 blocks, BN-ReLU and a classifier.

    Each block is y = W₂ ∗ dropout(ReLU(BN(W₁ ∗ ReLU(BN(x))))) + s(x), with 16, 32 and 64 times `width` channels and a
    1×1 convolution of x for s where the shape changes (registered after its block's own). Batch normalization has no
    gain and no bias, no layer has a bias, and kernels start glorot_uniform, Keras's default.

    Args:
        seed: the seed of the weights.
        depth: 6n + 4: the number of convolutions, including one in the shortcut of each stage's first block.
        width: the width as a multiple of a ResNet's.
        classes: the number of outputs.
        channels: the number of channels of the images.
        dropout: the share of activations dropped within each block, in training.

    >>> sum(p.numel() for p in wrn(0, depth=10, width=1).parameters())
    77360
    """
    blocks, left = divmod(depth - 4, 6)
    if blocks < 1 or left:
        near = 6 * max(1, round((depth - 4) / 6)) + 4
        raise LabError(f"`depth` must be 6n + 4: 10, 16, 22, …, got {depth}. Try {near}.")
    require_images(channels, classes)
    require_share(dropout)
    return initialized(
        lambda: _wrn(blocks, width, channels, classes, dropout),
        generator=torch.Generator().manual_seed(seed),
        initializer=glorot_uniform_,
    )


def _wrn(blocks: int, width: int, channels: int, classes: int, dropout: float) -> nn.Sequential:
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
