"""Cropping and resizing of images."""

from __future__ import annotations

import torch
from torch.nn import functional as F  # noqa: N812  (the name torch's own documentation uses)

from gyroscope_lab.errors import LabError


def center_crop(images: torch.Tensor, side: int) -> torch.Tensor:
    """Return the middle `side`×`side` pixels of `images`, [..., height, width].

    If they cannot be exactly in the middle, they are shifted by half a pixel to the top and left.

    >>> center_crop(torch.arange(16).reshape(4, 4), 2)
    tensor([[ 5,  6],
            [ 9, 10]])
    """
    height, width = images.shape[-2:]
    if not 1 <= side <= min(height, width):
        raise LabError(f"`side` must be from 1 to {min(height, width)} for images of {height}×{width}, got {side}.")
    top, left = (height - side) // 2, (width - side) // 2
    return images[..., top : top + side, left : left + side]


def resize(images: torch.Tensor, side: int) -> torch.Tensor:
    """Return `images`, [N, channels, height, width], with `side`×`side` pixels.

    Pixels are interpolated linearly in both directions, with antialiasing if the image shrinks. This preserves the
    brightness and the range.

    >>> resize(torch.ones(1, 1, 8, 8), 12).shape
    torch.Size([1, 1, 12, 12])
    """
    if side < 1:
        raise LabError(f"`side` must be a whole number ≥ 1, got {side}.")
    return F.interpolate(images, size=(side, side), mode="bilinear", antialias=True, align_corners=False)
