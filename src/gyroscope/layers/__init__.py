"""What a layer is: which parameters, their order and names; the output layer, and a normalization before it."""

from gyroscope.layers.layer import Layer, layers, zero_norm
from gyroscope.layers.untouched import untouched

__all__ = ["Layer", "layers", "untouched", "zero_norm"]
