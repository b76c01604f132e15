"""The layers of a model: which parameters they are, their order and names, the output layer and its normalization."""

from gyroscope.layers.layer import Layer, layers, zero_norm
from gyroscope.layers.untouched import untouched

__all__ = ["Layer", "layers", "untouched", "zero_norm"]
