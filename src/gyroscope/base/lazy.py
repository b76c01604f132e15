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
    __all__: list[str]

    def __setattr__(self, name: str, value: object) -> None:
        # What Python does when a file of a package is first imported, whoever imports it.
        if not (name in self._where and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *self.__all__})

    def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
        # Tools that send functions to other processes know plain modules alone.
        return import_module, (self.__name__,)


def lazy(package: str, files: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package: its public names, and its files, are loaded when they are first asked for.

    Args:
        package: its name.
        files: by the name of a file or package within, the public names that are taken from it, with spaces between.

    >>> import gyroscope
    >>> gyroscope.layers.__module__, gyroscope.vectors.__name__
    ('gyroscope.layers.layer', 'gyroscope.vectors')
    >>> hasattr(gyroscope, "layerz")
    False
    """
    where = {name: file for file, names in files.items() for name in names.split()}
    module = sys.modules[package]
    for name in where:
        module.__dict__.pop(name, None)  # a package that is loaded again takes what its files have now
    module.__dict__["_where"] = where
    module.__class__ = Lazy

    def find(name: str) -> Any:
        if name in where:
            found = getattr(import_module(f"{package}.{where[name]}"), name)
            setattr(module, name, found)
            return found
        path = f"{package}.{name}"
        if path in sys.modules or (name.isidentifier() and not name.startswith("_") and find_spec(path) is not None):
            return import_module(path)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
