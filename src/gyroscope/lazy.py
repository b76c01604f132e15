"""Packages whose names are loaded when they are first used.

What reads runs needs no torch, whose import takes seconds, and so it must not be the price of `import gyroscope`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class Lazy(ModuleType):
    """A package with functions in files of the same name: the function is what the package calls so."""

    _where: Mapping[str, str] = {}

    def __setattr__(self, name: str, value: object) -> None:
        # What Python does when a file of a package is first imported, whoever imports it.
        if not (name in self._where and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


def lazy(package: str, files: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package: its public names, and its files, are loaded when they are first asked for.

    Args:
        package: its name.
        files: by the name of a file or package within, the public names that are taken from it, with spaces between.

    >>> import gyroscope
    >>> gyroscope.layers.__module__, gyroscope.layer.__name__
    ('gyroscope.layer', 'gyroscope.layer')
    >>> hasattr(gyroscope, "layerz")
    False
    """
    where = {name: file for file, names in files.items() for name in names.split()}
    module = sys.modules[package]
    module.__dict__["_where"] = where
    module.__class__ = Lazy

    def find(name: str) -> Any:
        if name in where:
            found = getattr(import_module(f"{package}.{where[name]}"), name)
            setattr(module, name, found)
            return found
        if not name.startswith("_") and find_spec(f"{package}.{name}") is not None:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
