"""Uses of a layer's weight, and the samples that each adds to the two factors: its input and its output gradient.

A sample is a row of a batch, a token of a sequence, or a position of an image.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gyroscope.conditioning.factors import Factor, accumulated_in
from gyroscope.passes.patches import patch_columns, patch_count, patch_gram
from gyroscope.vectors.layout import is_sharded

Reads = Callable[[Factor, Tensor], None]


@dataclass
class Use:
    """A layer's weight used in one orientation, with its factors.

    Attributes:
        name: the layer's name; a part of a weight has its rows in brackets.
        kind: the layer's kind, or what the weight is used as.
        position: the layer's index among the analyzed ones.
        rows: the rows of the weight that are used; None for all.
        x, g: the factors Σx and Σ∇h.
        calls: how often the weight was applied in the open batch.
        arrived: the number of these calls whose gradient has arrived.
        early: True if the use is complete as soon as all gradients have arrived.
        done: True if its factors are complete and were handed over.
        why_not: why it cannot be treated; None if it can.
    """

    name: str
    kind: str
    position: int
    rows: slice | None = None
    x: Factor = field(default_factory=Factor)
    g: Factor = field(default_factory=Factor)
    calls: int = 0
    arrived: int = 0
    early: bool = True
    done: bool = False
    why_not: str | None = None


def in_order(uses: dict[tuple[int, str], Use]) -> list[Use]:
    """Return the uses in the order of layers, and the parts of a weight in the order of rows."""

    def place(key: tuple[int, str]) -> tuple[int, int, str]:
        rows = uses[key].rows
        return key[0], 0 if rows is None else rows.start, key[1]

    return [uses[key] for key in sorted(uses, key=place)]


@dataclass(frozen=True)
class Reader:
    """Functions that read the input and the output gradient of a module as samples."""

    x: Reads
    g: Reads


def reader(module: nn.Module, *, patches: bool) -> Reader | str:
    """Return how to read a module that multiplies its input by one weight, or why it cannot be read.

    >>> reader(nn.Bilinear(2, 2, 2), patches=False)
    'a Bilinear has two inputs'
    """
    match module:
        case nn.Embedding():
            size = module.num_embeddings
            return Reader(lambda f, x: f.add_counts(x, size), features)
        case nn.EmbeddingBag():
            return "an EmbeddingBag sums its tokens before its output can be seen"
        case nn.Bilinear():
            return "a Bilinear has two inputs"
        case nn.modules.conv._ConvTransposeNd():
            if patches:
                return "a transposed convolution has no patches"
            # Its weight is [in, out/groups, ...]: the groups of its output are pooled.
            spatial, groups = len(module.kernel_size), module.groups
            return Reader(channels(spatial), channels(spatial, groups))
        case nn.modules.conv._ConvNd():
            shape = Convolution(
                tuple(module.kernel_size), tuple(module.stride), module.padding, tuple(module.dilation), module.groups,
                module.padding_mode,
            )  # fmt: skip
            return convolution(shape, patches=patches)
        case _:
            return Reader(features, features)


def features(factor: Factor, a: Tensor) -> None:
    """Read every row of [..., d] as a sample."""
    factor.add(a.reshape(-1, a.shape[-1]).T)


def channels(spatial: int, groups: int = 1) -> Reads:
    """Return a reader of [batch, d, *spatial]: each position is a sample of the channels, or one per group of them."""

    def read(factor: Factor, a: Tensor) -> None:
        a = a if a.dim() == spatial + 2 else a.unsqueeze(0)
        if groups > 1:
            a = torch.unflatten(a, 1, (groups, -1)).movedim(2, 0)
        else:
            a = a.movedim(1, 0)
        factor.add(a)

    return read


@dataclass(frozen=True)
class Convolution:
    """The arguments of a convolution."""

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: Any
    dilation: tuple[int, ...]
    groups: int
    padding_mode: str = "zeros"

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments as a dict."""
        return dict(vars(self))


def convolution(shape: Convolution, *, patches: bool) -> Reader:
    """Return how to read a convolution: by its channels at each position, or by the patches it sees."""
    spatial = len(shape.kernel_size)
    if not patches:
        return Reader(channels(spatial, shape.groups), channels(spatial))

    def read(factor: Factor, x: Tensor) -> None:
        x = x if x.dim() == spatial + 2 else x.unsqueeze(0)
        count = patch_count(x.shape, **shape.arguments)
        dimension = x.shape[1] // shape.groups
        for size in shape.kernel_size:
            dimension *= size
        if factor.keeps(dimension, count):
            factor.add(patch_columns(x, **shape.arguments))
        else:
            gram = patch_gram(x, **shape.arguments, dtype=accumulated_in(x.device))
            factor.add_gram(gram, samples=count, like=x)

    return Reader(read, channels(spatial))


def unreadable(a: Tensor) -> str | None:
    """Return why samples cannot be read from a tensor; None if they can."""
    if is_sharded(a):
        return "its activations are sharded over ranks"
    if a.is_nested or a.layout is not torch.strided:
        return "its activations are nested or sparse"
    if a.is_complex():
        return "its activations are complex"
    return None
