"""The two primitives behind every measurement and update of weights: `dots` and `combine_`."""

from gyroscope.vectors.interface import backend, combine_, dots
from gyroscope.vectors.layout import local

__all__ = ["backend", "combine_", "dots", "local"]
