"""Launching a kernel again without having every argument looked at again, which costs the host more than the launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def relauncher(compiled: Any, programs: int) -> Callable[..., None] | None:
    """What launches a compiled kernel with all its arguments; None where that is for the kernel itself to do.

    Args:
        compiled: what the first launch gave. The interpreter gives nothing.
        programs: how many of it run.

    >>> relauncher(None, 3)
    """
    if not hasattr(compiled, "function"):
        return None
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 3):
        return None  # a compiled kernel took its arguments without those that are compiled in
    launch: Callable[..., None] = compiled[(programs, 1, 1)]
    return launch
