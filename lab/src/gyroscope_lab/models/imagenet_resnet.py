"""The residual networks for ImageNet, with and without the conditioning paper's LastBN (its appendix D)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from gyroscope_lab.errors import LabError
from gyroscope_lab.models.building import add_classifier, conv3x3, require_images, require_share
from gyroscope_lab.models.initialization import he_normal_fan_out_, initialized, uniform_
from gyroscope_lab.models.residual import BasicBlock, Block, normalized_shortcut

#: depth -> (whether its blocks are bottlenecks, blocks in each stage)
DEPTHS = {
    18: (False, (2, 2, 2, 2)),
    34: (False, (3, 4, 6, 3)),
    50: (True, (3, 4, 6, 3)),
    101: (True, (3, 4, 23, 3)),
    152: (True, (3, 8, 36, 3)),
}


def imagenet_resnet(
    seed: int,
    *,
    depth: int,
    classes: int = 1000,
    channels: int = 3,
    dropout: float = 0.0,
    last_norm: bool = False,
    classifier_bias: bool = True,
    checkpointed: bool = False,
) -> nn.Sequential:
    """Return the ResNet of 18, 34, 50, 101 or 152 layers: a 7×7 convolution, pooling, four stages, a classifier.

    Stages have 64, 128, 256 and 512 channels, four times as many at the outputs of bottlenecks (from 50 layers on). The
    last three halve the image in their first block, at its first 3×3 convolution and in its shortcut. Where the shape
    changes, the shortcut is a 1×1 convolution with batch normalization (B). Convolutions start from N(0,
    2/(k²·outputs)), the classifier's weights from U(±1/√fan_in) and its bias at 0, gains at 1.

    Args:
        seed: the seed of the weights; equal seeds give equal kernels with and without LastBN.
        depth: 18, 34, 50, 101 or 152.
        classes: the number of outputs.
        channels: the number of channels of the images.
        dropout: the share of features dropped before the classifier, in training (after LastBN); 0.3 in the paper's
            variant.
        last_norm: normalize the averages over pixels (LastBN); gains start from U(0, 1), as in Torch 7.
        classifier_bias: True for a classifier with a bias.
        checkpointed: True for blocks that keep only their inputs and recompute the rest in the backward pass.

    >>> sum(p.numel() for p in imagenet_resnet(0, depth=18).parameters())
    11689512
    """
    if depth not in DEPTHS:
        raise LabError(f"`depth` must be one of {', '.join(map(str, DEPTHS))}, got {depth}.")
    require_images(channels, classes)
    require_share(dropout)
    generator = torch.Generator().manual_seed(seed)
    model = initialized(
        lambda: _build(depth, channels, classes, dropout, last_norm, classifier_bias),
        generator=generator,
        initializer=he_normal_fan_out_,
        linear=uniform_,
    )
    if last_norm:
        # Drawn after the kernels, so that the kernels do not depend on it.
        nn.init.uniform_(model.get_parameter("last_norm.weight"), generator=generator)
    for module in model:
        if isinstance(module, Block):
            module.checkpointed = checkpointed
    return model


def imagenet_resnet_lastbn(
    seed: int,
    *,
    depth: int,
    classes: int = 1000,
    channels: int = 3,
    dropout: float = 0.0,
    classifier_bias: bool = True,
    checkpointed: bool = False,
) -> nn.Sequential:
    """Return `imagenet_resnet` with batch normalization of the averages over pixels, before the classifier.

    >>> [name for name, _ in imagenet_resnet_lastbn(0, depth=18, dropout=0.3).named_children()][-3:]
    ['last_norm', 'dropout', 'classifier']
    """
    return imagenet_resnet(
        seed, depth=depth, classes=classes, channels=channels, dropout=dropout, last_norm=True,
        classifier_bias=classifier_bias, checkpointed=checkpointed,
    )  # fmt: skip


class Bottleneck(Block):
    """y = ReLU(BN(W₃ ∗ ReLU(BN(W₂ ∗ ReLU(BN(W₁ ∗ x))))) + s(x)): 1×1 to `width`, 3×3, and 1×1 to four times as many.

    Args:
        channels: the channels of x.
        width: the channels within the block; y has four times as many.
        stride: the stride of the 3×3 convolution; 2 halves the image.

    >>> Bottleneck(3, 4, stride=2)(torch.zeros(2, 3, 8, 8)).shape
    torch.Size([2, 16, 4, 4])
    """

    def __init__(self, channels: int, width: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, kernel_size=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU()
        self.conv2 = conv3x3(width, width, stride=stride)
        self.norm2 = nn.BatchNorm2d(width)
        self.relu2 = nn.ReLU()
        self.conv3 = nn.Conv2d(width, 4 * width, kernel_size=1, bias=False)
        self.norm3 = nn.BatchNorm2d(4 * width)
        self.shortcut = normalized_shortcut(channels, 4 * width, stride=stride)
        self.relu3 = nn.ReLU()

    def compute(self, x: Tensor) -> Tensor:
        """Return y."""
        y = self.relu1(self.norm1(self.conv1(x)))
        y = self.relu2(self.norm2(self.conv2(y)))
        out: Tensor = self.relu3(self.norm3(self.conv3(y)) + self.shortcut(x))
        return out


def _blocks(depth: int) -> Iterator[tuple[str, Block]]:
    bottlenecks, counts = DEPTHS[depth]
    channels = 64
    for stage, count in enumerate(counts, start=1):
        width = 32 * 2**stage
        for number in range(1, count + 1):
            stride = 2 if stage > 1 and number == 1 else 1
            if bottlenecks:
                block: Block = Bottleneck(channels, width, stride=stride)
            else:
                block = BasicBlock(channels, width, stride=stride, norm=nn.BatchNorm2d)
                block.shortcut = normalized_shortcut(channels, width, stride=stride)
            yield f"stage{stage}_block{number}", block
            channels = 4 * width if bottlenecks else width


def _build(
    depth: int, channels: int, classes: int, dropout: float, last_norm: bool, classifier_bias: bool
) -> nn.Sequential:
    model = nn.Sequential()
    model.add_module("conv", nn.Conv2d(channels, 64, kernel_size=7, stride=2, padding=3, bias=False))
    model.add_module("norm", nn.BatchNorm2d(64))
    model.add_module("relu", nn.ReLU())
    model.add_module("pool", nn.MaxPool2d(3, stride=2, padding=1))
    for name, block in _blocks(depth):
        model.add_module(name, block)
    width = 2048 if DEPTHS[depth][0] else 512
    before: dict[str, nn.Module] = {"last_norm": nn.BatchNorm1d(width)} if last_norm else {}
    if dropout:
        before["dropout"] = nn.Dropout(dropout)
    add_classifier(model, width, classes, bias=classifier_bias, before=before)
    return model
