"""Hooks of a monitor in other people's objects: they must not be in the way of copying, compiling or computing."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gyroscope.base.alone import listens
from gyroscope.vectors.launch import is_capturing

Told = Callable[[dict[str, Any]], None]


class LossHook:
    """Tells what a loss module computes; copies of the module, which may go anywhere, tell nothing."""

    def __init__(self, tell: Told | None) -> None:
        self.tell = None if tell is None else weakref.WeakMethod(tell)

    def __call__(self, module: nn.Module, arguments: Any, value: Any) -> None:
        """The forward hook."""
        if torch.compiler.is_compiling() or self.tell is None or is_capturing() or not listens(self):
            return
        tell = self.tell()
        if tell is not None and isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad:
            tell({"loss": value.detach()})

    def __reduce__(self) -> tuple[type[LossHook], tuple[None]]:
        return LossHook, (None,)


@contextmanager
def plainly() -> Iterator[None]:
    """Without gradients; nor in the precision of a surrounding autocast, nor in a surrounding inference mode.

    Inner products would lose their digits in the first, and tensors of the second cannot be used again.

    >>> with torch.inference_mode(), plainly():
    ...     torch.zeros(1).is_inference()
    False
    """
    with torch.inference_mode(False), torch.no_grad():
        if torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                yield
        else:
            yield
