"""Residual networks for small images, as the conditioning paper and the rotation papers run them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

Norm = Callable[[int], nn.BatchNorm2d]


class SamePad(nn.Module):
    """Pad images for a 3×3 convolution of stride 2, as TensorFlow's "same" does: by 1 in all where a size is even.

    That pixel goes to the end, so outputs stand at pixels 1, 3, 5, …; `padding=1` has them at 0, 2, 4, … Odd sizes are
    padded at both ends, as by `padding=1`.

    >>> SamePad()(torch.ones(1, 1, 2, 3))[0, 0].tolist()
    [[0.0, 1.0, 1.0, 1.0, 0.0], [0.0, 1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0]]
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pad x [N, C, H, W]."""
        height, width = x.shape[-2:]
        return F.pad(x, (width % 2, 1, height % 2, 1))


class PaddedShortcut(nn.Module):
    """Shortcut A: every other pixel, and zeros for the channels there are not.

    >>> PaddedShortcut(1, 2, stride=2)(torch.arange(4.0).view(1, 1, 2, 2)).flatten().tolist()
    [0.0, 0.0]
    """

    def __init__(self, channels: int, width: int, *, stride: int) -> None:
        super().__init__()
        self.stride, self.missing = stride, width - channels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what is added to the block's own output."""
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.missing))


class BasicBlock(nn.Module):
    """y = ReLU(BN(W₂ ∗ ReLU(BN(W₁ ∗ x))) + s(x)), with s the identity or a shortcut that changes the shape.

    Args:
        channels: those of x.
        width: those of y.
        stride: of the first convolution: 2 halves the image.
        norm: makes a batch normalization of so many channels.
        projection: whether a shortcut that changes the shape is a 1×1 convolution (its weight is registered, and used,
            after those of the block's own) or has no weights (`PaddedShortcut`).
        same: whether strided convolutions pad as TensorFlow does (`SamePad`).

    >>> BasicBlock(3, 4, stride=2, norm=nn.BatchNorm2d)(torch.zeros(2, 3, 8, 8)).shape
    torch.Size([2, 4, 4, 4])
    """

    def __init__(
        self,
        channels: int,
        width: int,
        *,
        stride: int,
        norm: Norm,
        projection: bool = False,
        same: bool = False,
    ) -> None:
        super().__init__()
        self.pad: nn.Module = SamePad() if same and stride == 2 else nn.Identity()
        padding = 0 if same and stride == 2 else 1
        self.conv1 = nn.Conv2d(channels, width, kernel_size=3, stride=stride, padding=padding, bias=False)
        self.norm1 = norm(width)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, kernel_size=3, padding=1, bias=False)
        self.norm2 = norm(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != width:
            if projection:
                self.shortcut = nn.Conv2d(channels, width, kernel_size=1, stride=stride, bias=False)
            else:
                self.shortcut = PaddedShortcut(channels, width, stride=stride)
        self.relu2 = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return y."""
        y = self.relu1(self.norm1(self.conv1(self.pad(x))))
        y = self.norm2(self.conv2(y))
        return self.relu2(y + self.shortcut(x))  # type: ignore[no-any-return]
