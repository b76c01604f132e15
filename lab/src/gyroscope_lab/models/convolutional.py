"""Convolutional networks without shortcuts.

The rotation papers' networks in stages, C10-CNN1, its light version and tiny-CNN, with the demo's digits-cnn; their
C10-CNN2; and the conditioning paper's VGG style.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from gyroscope_lab.errors import LabError
from gyroscope_lab.models.building import add_classifier, conv3x3, keras_norm, require_images
from gyroscope_lab.models.initialization import (
    he_normal_fan_out_,
    he_normal_truncated_,
    he_uniform_,
    initialized,
    uniform_,
)
from gyroscope_lab.models.resnet import WIDTHS


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

    Convolutions are 3×3 and keep the size of the image; 2×2 maximum pooling halves it between stages. It rounds up,
    where Keras rounds down, so that images of any size are accepted; those of the papers halve evenly. Batch
    normalization comes after the ReLU and has neither gain nor bias, and no layer has a bias: every parameter is a
    kernel. Kernels start he_uniform.

    Args:
        seed: the seed of the weights.
        widths: the number of channels of each stage.
        convolutions: the number of layers in each stage.
        channels: the number of channels of the images.
        classes: the number of outputs.
        eps: ε of batch normalization; Keras's default.
        momentum: the weight of a new batch in the running averages; 0.01 is 0.99 in Keras.

    >>> model = stages(0, widths=[4, 8], convolutions=2, channels=1, classes=3)
    >>> model(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 3])
    >>> [name for name, _ in model.named_children()][:7]
    ['conv1', 'relu1', 'norm1', 'conv2', 'relu2', 'norm2', 'pool2']
    """
    require_images(channels, classes)
    return initialized(
        lambda: _stages(widths, convolutions, channels, classes, eps, momentum),
        generator=torch.Generator().manual_seed(seed),
        initializer=he_uniform_,
    )


def _stages(
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


def c10_cnn1(seed: int, *, classes: int = 10, channels: int = 3) -> nn.Sequential:
    """Return C10-CNN1: four stages of six convolutions, 32-64-128-256 channels; 25 layers, 4,307,296 weights.

    The network of the task of that name: CIFAR-10 without augmentation.

    >>> sum(p.numel() for p in c10_cnn1(0).parameters())
    4307296
    """
    return stages(seed, widths=(32, 64, 128, 256), convolutions=6, channels=channels, classes=classes)


def c10_cnn1_light(seed: int, *, classes: int = 10, channels: int = 3) -> nn.Sequential:
    """Return the light C10-CNN1: four stages of three convolutions, 16-32-64-128; 13 layers, 490,160 weights.

    The network of the speed paper's figure 7, chosen there because it trains fast.

    >>> sum(p.numel() for p in c10_cnn1_light(0).parameters())
    490160
    """
    return stages(seed, widths=(16, 32, 64, 128), convolutions=3, channels=channels, classes=classes)


def tiny_cnn(seed: int, *, classes: int = 10, channels: int = 3) -> nn.Sequential:
    """Return tiny-CNN: five stages of two convolutions, 32-64-128-256-512 channels; 11 layers.

    The network of Tiny ImageNet, 64×64 pixels and 200 classes. The running averages of its batch normalization are
    ten times faster than C10-CNN1's (Keras's momentum 0.9).

    >>> sum(p.numel() for p in tiny_cnn(0, classes=200).parameters())
    4812640
    """
    widths = (32, 64, 128, 256, 512)
    return stages(seed, widths=widths, convolutions=2, channels=channels, classes=classes, momentum=0.1)


def digits_cnn(seed: int) -> nn.Sequential:
    """Return six 3×3 convolutions (16-16-32-32-64-64), global average pooling and a linear classifier.

    Each convolution is followed by ReLU, then batch normalization without gain or bias, as in the
    rotation paper's CNNs; no layer has a bias, so the seven kernels are the only parameters.

    >>> import torch
    >>> digits_cnn(0)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    # The running averages are faster than in the papers: the demo takes few steps.
    return stages(seed, widths=(16, 32, 64), convolutions=2, channels=1, classes=10, eps=1e-5, momentum=0.1)


C10_CNN2 = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def c10_cnn2(seed: int, *, classes: int = 10, channels: int = 3, dropout: bool = False) -> nn.Sequential:
    """Return C10-CNN2: 13 convolutions in five stages, 64 to 512 channels, and two linear layers; 14,977,728 weights.

    Each convolution is followed by batch normalization, then ReLU, and each stage by 2×2 maximum pooling (rounding up,
    so that images smaller than 32×32 are accepted). There are no gains and no biases; kernels start from Keras 2.1's
    `he_normal`.

    Args:
        seed: the seed of the weights.
        classes: the number of outputs.
        channels: the number of channels of the images.
        dropout: True for dropout as in the network this one is based on: 0.3 after the first convolution, 0.4 after the
            others except the last of each stage, 0.5 before each linear layer.

    >>> sum(p.numel() for p in c10_cnn2(0).parameters())
    14977728
    """
    require_images(channels, classes)
    return initialized(
        lambda: _c10_cnn2(channels, classes, dropout),
        generator=torch.Generator().manual_seed(seed),
        initializer=he_normal_truncated_,
    )


def vgg(
    seed: int,
    *,
    depth: int,
    classes: int = 10,
    channels: int = 3,
    batch_norm: bool = False,
    affine: bool = True,
    classifier_bias: bool = True,
) -> nn.Sequential:
    """Return a ResNet without its shortcuts: x_k = ReLU(BN(W_k ∗ x_{k−1})) in three stages, then a linear classifier.

    The first convolution has 16 channels; the others, also 3×3, are divided among stages of 16, 32 and 64 channels. The
    first convolution of the second and third stage halves the image with a stride of 2. Initialization is that of the
    conditioning paper's ResNet (`resnet`); convolutions have no bias.

    Args:
        seed: the seed of the weights; equal seeds give equal kernels with and without batch normalization.
        depth: the number of layers, the classifier included; 20 and 110 in the paper.
        classes: the number of outputs.
        channels: the number of channels of the images.
        batch_norm: True to normalize each convolution's outputs over the batch, before the ReLU.
        affine: True for a normalization with gain and bias.
        classifier_bias: True for a classifier with a bias.

    >>> vgg(0, depth=20, batch_norm=True)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    if depth < 5:
        raise LabError(f"`depth` must be a whole number ≥ 5 (one, one per stage, a classifier), got {depth}.")
    require_images(channels, classes)
    return initialized(
        lambda: _vgg(depth, channels, classes, batch_norm, affine, classifier_bias),
        generator=torch.Generator().manual_seed(seed),
        initializer=he_normal_fan_out_,
        linear=uniform_,
    )


def _c10_cnn2(channels: int, classes: int, dropout: bool) -> nn.Sequential:
    model = nn.Sequential()
    number = 0
    for stage, widths in enumerate(C10_CNN2, start=1):
        for place, width in enumerate(widths, start=1):
            number += 1
            model.add_module(f"conv{number}", conv3x3(channels, width))
            model.add_module(f"norm{number}", keras_norm(width))
            model.add_module(f"relu{number}", nn.ReLU())
            if dropout and place < len(widths):
                model.add_module(f"dropout{number}", nn.Dropout(0.3 if stage == 1 else 0.4))
            channels = width
        model.add_module(f"pool{number}", nn.MaxPool2d(2, ceil_mode=True))
    hidden: dict[str, nn.Module] = {
        "dropout14": nn.Dropout(0.5),
        "linear14": nn.Linear(channels, 512, bias=False),
        "norm14": nn.BatchNorm1d(512, eps=1e-3, momentum=0.01, affine=False),
        "relu14": nn.ReLU(),
        "dropout15": nn.Dropout(0.5),
    }
    if not dropout:
        hidden = {name: module for name, module in hidden.items() if not isinstance(module, nn.Dropout)}
    # 32×32 images are one pixel here, so averaging is flattening.
    add_classifier(model, 512, classes, bias=False, before=hidden)
    return model


def _vgg(depth: int, channels: int, classes: int, batch_norm: bool, affine: bool, bias: bool) -> nn.Sequential:
    model = nn.Sequential()
    number = 0
    for stage, width in enumerate(WIDTHS):
        # The first convolution counts as part of the first stage; the remainder of the division by three goes to the
        # first stages.
        convolutions = (depth - stage) // 3 + (1 if stage == 0 else 0)
        for place in range(convolutions):
            number += 1
            stride = 2 if stage > 0 and place == 0 else 1
            model.add_module(f"conv{number}", conv3x3(channels, width, stride=stride))
            if batch_norm:
                model.add_module(f"norm{number}", nn.BatchNorm2d(width, affine=affine))
            model.add_module(f"relu{number}", nn.ReLU())
            channels = width
    add_classifier(model, channels, classes, bias=bias)
    return model
