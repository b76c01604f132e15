"""Gyroscope measures, explains and steers how each layer of a neural network trains."""

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

from gyroscope import errors
from gyroscope.base.lazy import lazy
from gyroscope.errors import GyroscopeError

if TYPE_CHECKING:
    from gyroscope import conditioning, control, diagnosis, figures, integrations, monitor, page, store, theory, vectors
    from gyroscope.conditioning import Conditioning
    from gyroscope.conditioning.condition import condition
    from gyroscope.control import Graft, Layca, SGD_AMom, steer
    from gyroscope.diagnosis.diagnose import diagnose
    from gyroscope.diagnosis.explain import explain
    from gyroscope.layers import Layer, layers
    from gyroscope.layers.last_norm import last_norm
    from gyroscope.monitor.monitor import Monitor
    from gyroscope.monitor.watch import watch
    from gyroscope.page.report import report
    from gyroscope.store import Run, load, runs
    from gyroscope.theory.invariance import invariance

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
    "diagnose",
    "diagnosis",
    "errors",
    "explain",
    "figures",
    "integrations",
    "invariance",
    "last_norm",
    "layers",
    "load",
    "monitor",
    "page",
    "report",
    "runs",
    "steer",
    "store",
    "theory",
    "vectors",
    "watch",
]

if sys.modules.get("matplotlib") is None and find_spec("matplotlib") is None:
    # `from gyroscope import *` takes what there is; gyroscope.figures by name says what to install.
    __all__.remove("figures")


if not TYPE_CHECKING:  # to a type checker, what is not listed above is a mistake
    __getattr__ = lazy(
        __name__,
        {
            "conditioning": "Conditioning condition",
            "control": "Graft Layca SGD_AMom steer",
            "diagnosis": "diagnose explain",
            "layers": "Layer layers",
            "layers.last_norm": "last_norm",
            "monitor": "Monitor watch",
            "page": "report",
            "store": "Run load runs",
            "theory": "invariance",
        },
    )
