"""Gyroscope measures, explains and steers how each layer of a neural network trains."""

from gyroscope import control, errors, vectors
from gyroscope.control import Graft, Layca, SGD_AMom
from gyroscope.errors import GyroscopeError
from gyroscope.layer import Layer, layers

__version__ = "0.1.0"

__all__ = ["Graft", "GyroscopeError", "Layca", "Layer", "SGD_AMom", "control", "errors", "layers", "vectors"]
