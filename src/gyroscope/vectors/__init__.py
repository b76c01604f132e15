"""The two primitives everything on the weight side is made of: `dots` and `combine_`."""

from gyroscope.vectors.interface import backend, combine_, dots
from gyroscope.vectors.layout import local

__all__ = ["backend", "combine_", "dots", "local"]
