"""Layer-wise conditioning: where the loss is steep, and which layer is hard to train (Huang et al., 2020)."""

from typing import Any

from gyroscope.conditioning.condition import condition
from gyroscope.conditioning.result import Conditioning, LayerConditioning, Spectra
from gyroscope.conditioning.schedule import Schedule
from gyroscope.conditioning.spectra import Spectrum

__all__ = ["Conditioning", "LayerConditioning", "Schedule", "Spectra", "Spectrum", "condition", "curvature", "fisher"]


def __getattr__(name: str) -> Any:
    """Exact curvature loads torch.func, which most users of this room do not need."""
    if name in ("curvature", "fisher"):
        from importlib import import_module

        return import_module(f"gyroscope.conditioning.{name}")
    raise AttributeError(f"module 'gyroscope.conditioning' has no attribute {name!r}")
