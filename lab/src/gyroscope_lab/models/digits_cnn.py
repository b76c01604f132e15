"""The network of the demo: small enough for a laptop, deep enough for its layers to differ."""

from __future__ import annotations

from torch import nn

from gyroscope_lab.models.stages import stages


def digits_cnn(seed: int) -> nn.Sequential:
    """Return six 3×3 convolutions (16-16-32-32-64-64), global average pooling and a linear classifier.

    Each convolution is followed by ReLU, then batch normalization without gain or bias, as in the
    rotation paper's CNNs; no layer has a bias, so the seven kernels are all there is to train.

    >>> import torch
    >>> digits_cnn(0)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    # The averages follow faster than the papers': the demo takes few steps.
    return stages(seed, widths=(16, 32, 64), convolutions=2, channels=1, classes=10, eps=1e-5, momentum=0.1)
