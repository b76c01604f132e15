"""Copies between host and device that nobody waits for.

They go through page-locked memory. A system may run out of it, or refuse it: then copies are made that are waited for,
which is slower and gives the same.
"""

from __future__ import annotations

import warnings
from functools import cache

from torch import Tensor


def pinned(values: Tensor) -> Tensor:
    """Values of the host in page-locked memory, from which a device copies by itself; as they are if there is none."""
    try:
        return values.pin_memory()
    except RuntimeError as error:
        _say(str(error).partition("\n")[0])
        return values


def to_host(values: Tensor) -> Tensor:
    """A copy in host memory, which has arrived once the stream has come there; the same tensor if it is there already.

    >>> import torch
    >>> to_host(torch.ones(2))
    tensor([1., 1.])
    """
    try:
        return values.to("cpu", non_blocking=True)
    except RuntimeError as error:
        copy = values.to("cpu")  # what else may be wrong with the device is raised here
        _say(str(error).partition("\n")[0])
        return copy


@cache
def _say(why: str) -> None:
    """Once for each reason."""
    warnings.warn(
        f"No page-locked memory is to be had ({why}). Copies between host and device are waited for, which makes "
        "measured steps slower; results do not change.",
        stacklevel=4,
    )
