"""Asynchronous copies between host and device.

They go through page-locked memory. When the system has none left, or refuses it, copies are synchronous, which is
slower and gives the same result.
"""

from __future__ import annotations

import warnings
from functools import cache

from torch import Tensor


def pinned(values: Tensor) -> Tensor:
    """Return host values in page-locked memory, from which a device copies by itself; unchanged if there is none."""
    try:
        return values.pin_memory()
    except RuntimeError as error:
        _say(str(error).partition("\n")[0])
        return values


def to_host(values: Tensor) -> Tensor:
    """Return a copy in host memory, valid once the stream has reached it; a tensor on the host is returned itself.

    >>> import torch
    >>> to_host(torch.ones(2))
    tensor([1., 1.])
    """
    try:
        return values.to("cpu", non_blocking=True)
    except RuntimeError as error:
        copy = values.to("cpu")  # any other fault of the device is raised here
        _say(str(error).partition("\n")[0])
        return copy


@cache
def _say(why: str) -> None:
    """Warn once per reason."""
    warnings.warn(
        f"Page-locked memory is not available ({why}). Copies between host and device are synchronous, which makes "
        "measured steps slower; results do not change.",
        stacklevel=4,
    )
