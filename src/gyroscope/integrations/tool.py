"""Tools that may not be installed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from gyroscope.errors import MissingExtraError


def imported(module: str, *, sink: str, extra: str) -> Any:
    """Import `module`, or say which extra brings it.

    >>> imported("json", sink="Json", extra="json").__name__
    'json'
    >>> imported("no_such_tool", sink="NoSuch", extra="nosuch")
    Traceback (most recent call last):
        ...
    gyroscope.errors.MissingExtraError: the NoSuch sink cannot import no_such_tool
    (No module named 'no_such_tool'): pip install 'gyroscope[nosuch]'
    """
    try:
        found = import_module(module)
        if found.__spec__ is not None and found.__spec__.origin is None:
            # wandb keeps runs in a folder called wandb, which Python takes for a package without code.
            raise ImportError(f"{next(iter(found.__path__))} is a folder, not the package")
    except ImportError as error:
        message = f"the {sink} sink cannot import {module} ({error}): pip install 'gyroscope[{extra}]'"
        raise MissingExtraError(message) from error
    return found
