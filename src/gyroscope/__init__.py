"""Gyroscope measures, explains and steers how each layer of a neural network trains."""

from gyroscope import errors
from gyroscope.errors import GyroscopeError

__version__ = "0.1.0"

__all__ = ["GyroscopeError", "errors"]
