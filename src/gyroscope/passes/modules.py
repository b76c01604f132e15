"""What a module is to somebody who looks at activations: a layer, a normalizer, a ReLU or its like, or nothing.

Modules are known by the names of their classes, so that transformers' and one's own count beside torch's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from gyroscope.layers.layer import Layer
from gyroscope.vectors.layout import is_sharded

Role = int | Literal["norm", "rectifier"]

_RECTIFIER = re.compile(r"relu|elu|silu|swish|mish|^threshold$", re.IGNORECASE)
_NORM = re.compile(r"Norm([123]d)?$")


def roles(model: nn.Module, layers: Sequence[Layer]) -> dict[int, Role]:
    """By the module's id: the position of the layer whose output it puts out, "norm" or "rectifier"; else nothing.

    >>> from gyroscope.layers.layer import layers
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.LeakyReLU(), nn.Tanh())
    >>> list(roles(net, layers(net)).values())
    [0, 'norm', 'rectifier']
    """
    found: dict[int, Role] = {}
    own = {id(layer.module): position for position, layer in enumerate(layers)}  # the last of several on one module
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            # It applies its `out_proj` without calling it: what it puts out is that layer's output.
            last = own.get(id(module.out_proj))
            if last is not None:
                found[id(module)] = last
        elif id(module) in own:
            # What holds other layers puts out theirs, and not that of a weight of its own.
            leaf = not module._modules
            if leaf or not any(id(child) in own for child in module.modules() if child is not module):
                found[id(module)] = own[id(module)]
        elif not any(True for _ in module.children()) and (role := _role_of(cast(Any, type(module)))) is not None:
            found[id(module)] = role
    return found


@lru_cache(maxsize=1024)
def _role_of(kind: Any) -> Literal["norm", "rectifier"] | None:
    names = [cls.__name__ for cls in kind.__mro__]
    if any(_NORM.search(name) for name in names):
        return "norm"
    return "rectifier" if any(_RECTIFIER.search(name) for name in names) else None


def activity_threshold(module: nn.Module) -> float:
    """Above which output a unit of a ReLU-like module is active: 0, but for `nn.Threshold`.

    ReLU, ReLU6, LeakyReLU, RReLU, PReLU with positive slopes, ELU, CELU, SELU, GELU, SiLU, Mish and Hardswish all put
    out something positive where what goes in is positive, and nowhere else. So the output tells, also of one that
    overwrites its input.

    >>> activity_threshold(nn.Threshold(0.1, 0.0)), activity_threshold(nn.GELU())
    (0.1, 0.0)
    """
    return float(module.threshold) if isinstance(module, nn.Threshold) else 0.0


def first_tensor(output: Any) -> Tensor | None:
    """The activations in what a module put out: the tensor, or the first of a tuple; None where none can be seen."""
    while isinstance(output, tuple | list):  # tuples of tuples: a packed sequence beside its last state
        output = next((item for item in output if isinstance(item, Tensor | tuple | list)), None)
    if not isinstance(output, Tensor) or not output.is_floating_point() or output.numel() == 0 or output.dim() == 0:
        return None
    # Inside `torch.func` transforms, and of tensors that lie on several ranks, parts are all one would see.
    strange = is_sharded(output) or output.is_nested or output.layout is not torch.strided
    return None if strange or torch._C._functorch.is_functorch_wrapped_tensor(output) else output


@dataclass(frozen=True)
class Layout:
    """Where the channels of a layer lie in what it puts out.

    Attributes:
        width: how many there are.
        spatial: the dimensions of an image's positions, 1 to 3 for a convolution and else 0.
    """

    width: int
    spatial: int

    @classmethod
    def of(cls, layer: Layer, x: Tensor) -> Layout:
        """That of a layer which put out `x`."""
        if isinstance(layer.module, nn.modules.conv._ConvNd):
            spatial = len(layer.module.kernel_size)
            return cls(x.shape[x.dim() - spatial - 1], spatial)
        return cls(x.shape[-1], 0)

    def place(self, x: Tensor) -> tuple[Tensor, int, bool]:
        """Activations with a batch dimension, the axis of their channels, and whether positions follow it.

        As the layer puts them out, unless the shape says otherwise: pooled, flattened, or with channels moved.

        >>> Layout(8, 2).place(torch.zeros(4, 8, 5, 5))[1:], Layout(8, 2).place(torch.zeros(4, 5, 5, 8))[1:]
        ((1, True), (3, False))
        """
        if x.dim() == 1 or (self.spatial and x.dim() == self.spatial + 1 and x.shape[0] == self.width):
            x = x[None]
        last = x.shape[-1] == self.width
        if self.spatial and x.dim() == self.spatial + 2 and (x.shape[1] == self.width or not last):
            return x, 1, True
        moved = not last and x.dim() > 2 and x.shape[1] == self.width
        return x, 1 if moved else x.dim() - 1, False
