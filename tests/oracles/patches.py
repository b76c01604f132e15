"""The patches of a convolution, one number at a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
from torch import Tensor


def patches(
    x: Tensor,
    *,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int] | str,
    dilation: Sequence[int],
    groups: int = 1,
    padding_mode: str = "zeros",
) -> np.ndarray:
    """[samples · output positions · groups, C/groups · kernel positions] in float64, one row a patch."""
    image = x.detach().double().numpy()
    samples, channels, *sizes = image.shape
    spatial = len(sizes)
    if padding == "same":
        # Where the zeros do not part evenly, the odd one comes after the image.
        before = [dilation[d] * (kernel_size[d] - 1) // 2 for d in range(spatial)]
        outputs = list(sizes)
    else:
        before = [0] * spatial if padding == "valid" else list(padding)
        outputs = [
            (sizes[d] + 2 * before[d] - dilation[d] * (kernel_size[d] - 1) - 1) // stride[d] + 1 for d in range(spatial)
        ]
    rows = []
    for sample, group, *q in product(range(samples), range(groups), *map(range, outputs)):
        row = []
        for c, *i in product(range(channels // groups), *map(range, kernel_size)):
            at = [
                _inside(stride[d] * q[d] + dilation[d] * i[d] - before[d], sizes[d], padding_mode)
                for d in range(spatial)
            ]
            place = (sample, group * (channels // groups) + c, *at)
            row.append(0.0 if None in at else image[place])
        rows.append(row)
    return np.array(rows, dtype=np.float64).reshape(len(rows), channels // groups * int(np.prod(kernel_size)))


def _inside(p: int, size: int, mode: str) -> int | None:
    """Where the number at position p, maybe outside of the image, comes from; None for a zero."""
    if 0 <= p < size:
        return p
    if mode == "zeros":
        return None
    if mode == "circular":
        return p % size
    if mode == "replicate":
        return min(max(p, 0), size - 1)
    return -p if p < 0 else 2 * (size - 1) - p
