"""Recognizing modules by the names of their classes, without importing the packages they come from."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from torch import nn

_WRAPPED = {
    "OptimizedModule": "_orig_mod",
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "ActivationWrapper": "_checkpoint_wrapped_module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
}


def ancestry(thing: object) -> tuple[str, ...]:
    """Return the names of an object's classes, its own first."""
    kind: Any = type(thing)
    return _names_of(kind)


@lru_cache(maxsize=1024)
def _names_of(kind: Any) -> tuple[str, ...]:
    return tuple(cls.__name__ for cls in kind.__mro__)


@lru_cache(maxsize=1024)
def is_norm(module: Any) -> bool:
    """Return True if the name of a class of modules, or of an ancestor, says that it normalizes."""
    return any(re.search(r"Norm([123]d)?$", cls) for cls in _names_of(module))


def wrapped_in(module: nn.Module) -> str | None:
    """Return the attribute in which a known wrapper keeps the user's module; None if `module` is not a wrapper."""
    attributes = (_WRAPPED[cls] for cls in ancestry(module) if cls in _WRAPPED)
    return next((attribute for attribute in attributes if attribute in module._modules), None)


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the user's module, without known wrappers around it."""
    while (wrapped := wrapped_in(module)) is not None:
        module = getattr(module, wrapped)
    return module


def is_conv1d(module: nn.Module) -> bool:
    """Return True for transformers' `Conv1D`, a linear module with weight [in, out]."""
    return "Conv1D" in ancestry(module) and hasattr(module, "nf")


def snake(name: str) -> str:
    """Return the name of a class in snake case.

    >>> snake("_WeightNorm")
    'weight_norm'
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.lstrip("_")).lower()
