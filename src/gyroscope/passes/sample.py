"""Which of many elements to look at: a fixed choice that is spread evenly and falls in step with nothing."""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 40503  # 2¹⁶ divided by the golden ratio: its multiples fill 0..2¹⁶ evenly


def spread(n: int, most: int, device: torch.device) -> Tensor:
    """At most `most` of the positions 0..n−1 in ascending order: all of them, or one of each of `most` equal stretches.

    Where in its stretch a position lies goes around by the golden ratio, so that the choice does not fall in step with
    rows, image sizes or anything else that repeats. No random numbers are drawn, and nothing waits for the device.

    >>> spread(4, 10, torch.device("cpu")).tolist()
    [0, 1, 2, 3]
    >>> spread(1000, 5, torch.device("cpu")).tolist()
    [0, 323, 447, 770, 894]
    """
    if n <= most:
        return torch.arange(n, device=device)
    i = torch.arange(most + 1, device=device)
    edge = i * n // most
    start, length = edge[:-1], edge[1:] - edge[:-1]
    return start + ((i[:-1] * _GOLDEN % 65536) * length) // 65536
