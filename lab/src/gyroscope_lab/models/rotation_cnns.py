"""The plain convolutional networks of the rotation papers' first tasks: C10-CNN1, its light version, tiny-CNN."""

from __future__ import annotations

from torch import nn

from gyroscope_lab.models.stages import stages


def c10_cnn1(seed: int, *, classes: int = 10, channels: int = 3) -> nn.Sequential:
    """Return C10-CNN1: four stages of six convolutions, 32-64-128-256 channels; 25 layers, 4,307,296 weights.

    The network of the task of that name: CIFAR-10 without augmentation.

    >>> sum(p.numel() for p in c10_cnn1(0).parameters())
    4307296
    """
    return stages(seed, widths=(32, 64, 128, 256), convolutions=6, channels=channels, classes=classes)


def c10_cnn1_light(seed: int, *, classes: int = 10, channels: int = 3) -> nn.Sequential:
    """Return the light C10-CNN1: four stages of three convolutions, 16-32-64-128; 13 layers, 490,160 weights.

    The network of the speed paper's figure 7, there for being fast to train.

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
