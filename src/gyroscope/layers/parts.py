"""The equal parts of a layer: the whole tensor, its output units, its blocks, its experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from torch import nn

from gyroscope.errors import LayerError
from gyroscope.layers.class_names import is_conv1d

if TYPE_CHECKING:
    from gyroscope.layers.layer import Layer

Granularity = Literal["tensor", "row", "block", "expert"]


def split(layer: Layer, granularity: Granularity) -> Layer:
    """The same layer in the parts of another granularity.

    >>> from gyroscope.layers.layer import layers
    >>> split(layers(nn.Linear(3, 2))[0], "row").segments
    2
    """
    shape = layer.parameter.shape
    segments, dim = 1, 0
    match granularity:
        case "row":
            transposed = layer.kind == "conv_transpose"
            if transposed and layer.module.groups != 1:
                raise LayerError(
                    f"granularity='row' cannot split {layer.name!r}: a transposed convolution in "
                    f"{layer.module.groups} groups has its output units along two dimensions, "
                    "[in, out/groups, ...]. Exclude it, or use granularity='tensor'."
                )
            dim = 1 if transposed or (layer.kind == "linear" and is_conv1d(layer.module)) else 0
            segments = shape[dim]
        case "block":
            segments, dim = _blocks(layer, shape)
        case "expert":
            segments = shape[0] if layer.kind == "other" and len(shape) == 3 else 1
    return replace(layer, segments=segments, dim=dim)


def _blocks(layer: Layer, shape: Sequence[int]) -> tuple[int, int]:
    name = layer.name.split(".")
    if layer.kind == "attention" and name[-1] == "in_proj_weight":
        return 3, 0
    if layer.kind == "recurrent" and not name[-1].startswith("weight_hr"):
        gates = {(nn.LSTM, nn.LSTMCell): 4, (nn.GRU, nn.GRUCell): 3}
        return next((n for classes, n in gates.items() if isinstance(layer.module, classes)), 1), 0
    if layer.kind == "linear" and is_conv1d(layer.module) and name[-2:] == ["c_attn", "weight"]:
        # [width, 3 width] holds q, k, v; in cross-attention [width, 2 width] holds k, v.
        return (shape[1] // shape[0], 1) if shape[1] % shape[0] == 0 else (1, 0)
    return 1, 0
