"""Packages whose names are loaded on first use, and modules that may not be installed.

Reading runs does not need torch, whose import takes seconds, so `import gyroscope` must not import it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from gyroscope.errors import MissingExtraError


class Lazy(ModuleType):
    """A package in which a function may share its name with the file it is in; the name means the function."""

    _where: Mapping[str, str] = {}
    __all__: list[str]

    def __setattr__(self, name: str, value: object) -> None:
        # Python sets a package's attribute to the submodule whenever that is first imported, by anyone.
        if not (name in self._where and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *self.__all__})

    def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
        # Tools that send functions to other processes only know plain modules.
        return import_module, (self.__name__,)


def lazy(package: str, files: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that loads its public names and its submodules on first use.

    Args:
        package: name of the package.
        files: for each submodule, the public names taken from it, separated by spaces.

    >>> import gyroscope
    >>> gyroscope.layers.__module__, gyroscope.vectors.__name__
    ('gyroscope.layers.layer', 'gyroscope.vectors')
    >>> hasattr(gyroscope, "layerz")
    False
    """
    where = {name: file for file, names in files.items() for name in names.split()}
    module = sys.modules[package]
    for name in where:
        module.__dict__.pop(name, None)  # a reloaded package takes the current names of its files
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


def required(module: str, what: str, extra: str) -> Any:
    """Return a module that an extra installs, or raise an error that says how to install it.

    Args:
        module: name of the module.
        what: what needs it, as the subject of the error.
        extra: the extra, as pip is given it.

    >>> required("json", "Export", "gyroscope[export]").__name__
    'json'
    >>> required("no_such_tool", "Export", "gyroscope[export]")
    Traceback (most recent call last):
    gyroscope.errors.MissingExtraError: Export needs no_such_tool, which is not installed: pip install
    'gyroscope[export]'
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingExtraError(f"{what} needs {package}, which is not installed: pip install '{extra}'") from error
