"""Gyroscope measures, explains and steers how each layer of a neural network trains."""

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from gyroscope import conditioning, control, dynamics, errors, monitor, store, vectors
from gyroscope.conditioning import Conditioning, condition
from gyroscope.control import Graft, Layca, SGD_AMom
from gyroscope.errors import GyroscopeError
from gyroscope.last_norm import last_norm
from gyroscope.layer import Layer, layers
from gyroscope.monitor import Monitor, watch
from gyroscope.store import Run, load, runs

if TYPE_CHECKING:
    from gyroscope import figures, integrations
    from gyroscope.dynamics import explain, invariance

__version__ = "0.1.0"

__all__ = [
    "Conditioning",
    "Graft",
    "GyroscopeError",
    "Layca",
    "Layer",
    "Monitor",
    "Run",
    "SGD_AMom",
    "condition",
    "conditioning",
    "control",
    "dynamics",
    "errors",
    "explain",
    "figures",
    "integrations",
    "invariance",
    "last_norm",
    "layers",
    "load",
    "monitor",
    "runs",
    "store",
    "vectors",
    "watch",
]

if sys.modules.get("matplotlib") is None and find_spec("matplotlib") is None:
    # `from gyroscope import *` takes what there is; gyroscope.figures by name says what to install.
    __all__.remove("figures")


if not TYPE_CHECKING:  # to a type checker, what is not listed above is a mistake

    def __getattr__(name: str) -> Any:
        """Rooms that need more than torch and numpy are loaded when they are first used, and so is the theory."""
        if name in ("figures", "integrations"):
            from importlib import import_module

            return import_module(f"gyroscope.{name}")
        if name in ("explain", "invariance"):
            return getattr(dynamics, name)
        raise AttributeError(f"module 'gyroscope' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
