"""Layer-wise conditioning: where the loss is steep, and which layer is hard to train (Huang et al., 2020)."""

from typing import TYPE_CHECKING

from gyroscope.base.lazy import lazy

if TYPE_CHECKING:
    from gyroscope.conditioning import curvature, fisher
    from gyroscope.conditioning.condition import condition
    from gyroscope.conditioning.eigen import eigenvalues, largest_by_squaring
    from gyroscope.conditioning.outliers import Outliers, outliers
    from gyroscope.conditioning.result import Conditioning, LayerConditioning, Spectra, percent, quantity
    from gyroscope.conditioning.schedule import Schedule
    from gyroscope.conditioning.spectra import P, Spectrum

__all__ = [
    "Conditioning",
    "LayerConditioning",
    "Outliers",
    "P",
    "Schedule",
    "Spectra",
    "Spectrum",
    "condition",
    "curvature",
    "eigenvalues",
    "fisher",
    "largest_by_squaring",
    "outliers",
    "percent",
    "quantity",
]

if not TYPE_CHECKING:  # to a type checker, what is not listed above is a mistake
    __getattr__ = lazy(
        __name__,
        {
            "condition": "condition",
            "eigen": "eigenvalues largest_by_squaring",
            "outliers": "Outliers outliers",
            "result": "Conditioning LayerConditioning Spectra percent quantity",
            "schedule": "Schedule",
            "spectra": "P Spectrum",
        },
    )
