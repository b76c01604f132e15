"""The mean and the standard deviation of pixels, exactly."""

from __future__ import annotations

from math import sqrt

import torch

from gyroscope_lab.errors import LabError

# Images at a time: a memory-mapped file is never in memory as a whole.
_CHUNK = 4096


def histogram(images: torch.Tensor) -> torch.Tensor:
    """Return how often each value of a byte occurs in each channel of images [N, C, H, W], as [C, 256] whole numbers.

    >>> histogram(torch.tensor([[[[3, 3, 255]]]], dtype=torch.uint8))[0, [0, 3, 255]]
    tensor([0, 2, 1])
    """
    counts = torch.zeros(images.shape[1], 256, dtype=torch.int64)
    for chunk in torch.split(images, _CHUNK):
        for channel, count in enumerate(counts):
            count += torch.bincount(chunk[:, channel].flatten(), minlength=256)
    return counts


def moments(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return μ = Σ h(v) v / n and σ = √(Σ h(v) v² / n − μ²), where h(v) of the n pixels have the value v.

    Both are worked out in whole numbers, σ from n Σ h(v) v² − (Σ h(v) v)², and rounded once, so that they do not
    depend on the order of the pixels, as sums of 180 million floats would.

    Args:
        counts: h, [256], or [C, 256] for moments of each channel apart.

    >>> moments(torch.bincount(torch.tensor([0, 0, 4, 4]), minlength=256))
    (tensor(2.), tensor(2.))
    """
    if counts.dim() == 1:
        mean, std = _moments(counts.tolist())
        return torch.tensor(mean, dtype=torch.float32), torch.tensor(std, dtype=torch.float32)
    means, stds = zip(*(_moments(count) for count in counts.tolist()), strict=True)
    return torch.tensor(means, dtype=torch.float32), torch.tensor(stds, dtype=torch.float32)


def _moments(counts: list[int]) -> tuple[float, float]:
    n = sum(counts)
    first = sum(count * value for value, count in enumerate(counts))
    second = sum(count * value**2 for value, count in enumerate(counts))
    spread = n * second - first**2
    if not spread:
        raise LabError("all pixels to train on are equal, so they cannot be divided by their standard deviation")
    return first / n, sqrt(spread) / n
