"""Networks, made by name."""

from gyroscope_lab.models.registry import MODELS, defaults, make

__all__ = ["MODELS", "defaults", "make"]
