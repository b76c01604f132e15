"""Means and variances of the patches a convolution sees, for several layers at once and without making a patch.

The number at one position of the kernel runs over some rows and columns of the image, the same for all images and
channels. So with m and v the mean and the variance of each pixel over the images, its mean is that of m over these
pixels, and its variance that of v plus the variance of m: all of it sums over rows and columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

_SMALL = 1 << 20


@dataclass(frozen=True, eq=False)
class Windows:
    """Which rows and columns of an image the positions of a kernel run over.

    Attributes:
        rows: [kernel height, image height], how often a row is seen over the number of output rows.
        columns: [image width, kernel width], the same for columns.
        inside: [kernel height · kernel width], how much is of the image, and not of zeros around it; None if all is.
        outside: the rest.
        pixels: [image height · image width, kernel height · kernel width], rows and columns at once where that is
            small; one product for two.
    """

    rows: Tensor
    columns: Tensor
    inside: Tensor | None
    outside: Tensor | None
    pixels: Tensor | None

    def mean(self, images: Tensor) -> Tensor:
        """What each position of the kernel sees on average, [..., kernel height · kernel width]."""
        if self.pixels is not None:
            return images.flatten(-2) @ self.pixels
        return torch.matmul(self.rows, images @ self.columns).flatten(-2)


def windows(module: nn.Conv2d, image: Tensor) -> Windows:
    """The windows of a convolution on images like one of [..., height, width].

    >>> windows(nn.Conv2d(1, 1, (1, 3), padding=(0, 1)), torch.zeros(1, 4)).columns.T
    tensor([[0.2500, 0.2500, 0.2500, 0.0000],
            [0.2500, 0.2500, 0.2500, 0.2500],
            [0.0000, 0.2500, 0.2500, 0.2500]])
    """
    around = module._reversed_padding_repeated_twice
    rows, columns = (
        _seen(size, module.kernel_size[d], module.stride[d], module.dilation[d], around[2 - 2 * d : 4 - 2 * d], module)
        for d, size in enumerate(image.shape[-2:])
    )
    inside = torch.outer(rows.sum(1), columns.sum(1)).flatten()
    short = module.padding_mode == "zeros" and any(around)
    small = rows.numel() * columns.numel() <= _SMALL
    rows, columns, inside = (one.to(image.device, image.dtype) for one in (rows, columns.T.contiguous(), inside))
    pixels = torch.kron(rows.T.contiguous(), columns) if small else None
    return Windows(rows, columns, inside if short else None, 1 - inside if short else None, pixels)


def _seen(size: int, kernel: int, stride: int, dilation: int, around: list[int], module: nn.Conv2d) -> Tensor:
    """[kernel, size]: the share of output positions at which a position of the kernel is over a row of the image."""
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    # Counted from 1, so that zeros around it are 0; on the CPU, whatever the default device.
    places = torch.arange(1, size + 1, dtype=torch.float64, device="cpu").reshape(1, 1, size)
    padded = functional.pad(places, around, mode=mode)[0, 0].long()
    at = padded.unfold(0, dilation * (kernel - 1) + 1, stride)[:, ::dilation]
    return functional.one_hot(at, size + 1)[..., 1:].double().mean(0)


def patch_moments(images: Tensor, within: Windows) -> tuple[Tensor, Tensor]:
    """The mean and variance of patches, each [layers, channels · kernel], as of `torch.nn.functional.unfold`.

    Args:
        images: m and v of each pixel, [2, layers, channels, height, width]; they are changed.
        within: the windows.
    """
    m, v = images
    # Centred by channels, for the digits of the variance; zeros around the image are then c too low.
    c = m.mean((2, 3), keepdim=True)
    m.sub_(c)
    v.addcmul_(m, m)
    first, second = within.mean(images)
    second.addcmul_(first, first, value=-1)
    c = c.flatten(2)
    if within.inside is None or within.outside is None:
        first.add_(c)
    else:
        mean = torch.addcmul(first, c, within.inside)
        # 2 c (1 − f) first + c² f (1 − f)
        second.addcmul_(c * within.outside, first.add_(mean))
        first = mean
    return first.flatten(1), second.flatten(1).clamp_min_(0)


def moments_over(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The mean and the variance over some dimensions, with the digits of the variance.

    >>> moments_over(torch.tensor([[1.0, 0.0], [3.0, 0.0]]), (0,))
    (tensor([2., 0.]), tensor([1., 0.]))
    """
    if x.is_cuda:
        variance, mean = torch.var_mean(x, dims, correction=0)
        return mean, variance
    # One pass is one operation, but on a CPU a slow one.
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    return mean.squeeze(dims), centred.mul_(centred).mean(dims)


def norm_over(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The 2-norm over some dimensions; over none it is |x|.

    >>> norm_over(torch.tensor([[3.0, 0.0], [4.0, 1.0]]), (0,))
    tensor([5., 1.])
    """
    if not dims:
        return x.abs()
    # As above: the operation for it is a slow one on a CPU.
    return torch.linalg.vector_norm(x, dim=dims) if x.is_cuda else x.square().sum(dims).sqrt_()
