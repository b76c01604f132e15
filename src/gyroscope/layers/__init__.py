"""What a layer is: which parameters, their order and names; the output layer, and a normalization before it."""

from gyroscope.layers.layer import Layer, layers, zero_norm

__all__ = ["Layer", "layers", "zero_norm"]
