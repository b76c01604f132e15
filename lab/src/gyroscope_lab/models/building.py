"""Parts that the networks for images share: their beginning, their end, and checks of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import nn

from gyroscope_lab.errors import LabError

Norm = Callable[[int], nn.Module]

#: Keras's batch normalization as in the rotation papers: no gain, no bias; its momentum is 0.99 in Keras's terms
keras_norm: Norm = partial(nn.BatchNorm2d, eps=1e-3, momentum=0.01, affine=False)


def require_images(channels: int, classes: int) -> None:
    """Reject images without channels and classifiers without classes.

    >>> require_images(3, 0)
    Traceback (most recent call last):
    gyroscope_lab.errors.LabError: `channels` and `classes` must be whole numbers ≥ 1, got 3 and 0.
    """
    if min(channels, classes) < 1:
        raise LabError(f"`channels` and `classes` must be whole numbers ≥ 1, got {channels} and {classes}.")


def require_share(dropout: float) -> None:
    """Reject a dropout that is not in [0, 1).

    >>> require_share(1.0)
    Traceback (most recent call last):
    gyroscope_lab.errors.LabError: `dropout` must be a share ≥ 0 and < 1, got 1.0.
    """
    if not 0 <= dropout < 1:
        raise LabError(f"`dropout` must be a share ≥ 0 and < 1, got {dropout}.")


def conv3x3(channels: int, width: int, *, stride: int = 1, padding: int = 1) -> nn.Conv2d:
    """Return a 3×3 convolution without bias.

    >>> conv3x3(16, 32, stride=2)
    Conv2d(16, 32, kernel_size=(3, 3), stride=(2, 2), padding=(1, 1), bias=False)
    """
    return nn.Conv2d(channels, width, kernel_size=3, stride=stride, padding=padding, bias=False)


def add_classifier(
    model: nn.Sequential, width: int, classes: int, *, bias: bool, before: Mapping[str, nn.Module] | None = None
) -> None:
    """Add to `model` the average over pixels, the modules of `before`, and a linear classifier of `width` inputs.

    >>> model = nn.Sequential()
    >>> add_classifier(model, 64, 10, bias=False)
    >>> [name for name, _ in model.named_children()]
    ['average', 'flatten', 'classifier']
    """
    model.add_module("average", nn.AdaptiveAvgPool2d(1))
    model.add_module("flatten", nn.Flatten())
    for name, module in (before or {}).items():
        model.add_module(name, module)
    model.add_module("classifier", nn.Linear(width, classes, bias=bias))
