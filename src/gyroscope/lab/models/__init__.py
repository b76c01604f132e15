"""Networks, made by name."""

from gyroscope.lab.models.registry import MODELS, make

__all__ = ["MODELS", "make"]
