"""Dying and full units, means, ν and rank of activations, one number at a time."""

from __future__ import annotations

import numpy as np
from torch import Tensor

_ROUNDING = {"torch.bfloat16": 2.0**-4, "torch.float16": 2.0**-7}


def statistics(passes: list[Tensor], *, threshold: float = 0.0, images: bool = False) -> dict[str, float]:
    """The statistics of activations over several forward passes.

    Images are [samples, channels, positions...], everything else is [..., channels].
    """
    tables = []
    for one in passes:
        x = one.detach().double().numpy()
        if images:
            tables.append(x.reshape(len(x), x.shape[1], -1))
        else:
            tables.append(x.reshape(-1, x.shape[-1], 1))
    samples, channels, positions = len(tables[0]), tables[0].shape[1], tables[0].shape[2]
    dying = full = 0
    dying_channels = full_channels = 0
    for c in range(channels):
        channel_ever, channel_always = False, True
        for p in range(positions):
            ever, always = False, True
            for table in tables:
                for s in range(len(table)):
                    active = table[s, c, p] > threshold
                    ever, always = ever or active, always and active
            dying, full = dying + (not ever), full + always
            channel_ever, channel_always = channel_ever or ever, channel_always and always
        dying_channels, full_channels = dying_channels + (not channel_ever), full_channels + channel_always
    means = [np.mean(np.concatenate([table[:, c].ravel() for table in tables])) for c in range(channels)]
    assert samples
    return {
        "dying": dying / (channels * positions),
        "full": full / (channels * positions),
        "dying_channels": dying_channels / channels,
        "full_channels": full_channels / channels,
        "activation_mean": float(np.mean(means)),
        "nu": float(np.sum(np.square(means)) + 1),
        "activation_rank": max(
            rank(table.transpose(0, 2, 1).reshape(-1, channels), str(one.dtype))
            for table, one in zip(tables, passes, strict=True)
        ),
    }


def rank(matrix: np.ndarray, dtype: str = "torch.float32") -> int:
    """How many singular values are above what rounding may leave."""
    values = np.linalg.svd(matrix, compute_uv=False)
    return int((values > _ROUNDING.get(dtype, 2.0**-16) * np.sqrt(np.mean(np.square(values)))).sum())
