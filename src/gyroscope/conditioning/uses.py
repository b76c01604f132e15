"""What a use of a layer's weight adds to its two factors: the samples in its input and in its output gradient.

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

Reads = Callable[[Factor, Tensor], None]


@dataclass
class Use:
    """A layer's weight as it is used in one orientation, with what was seen of it.

    Attributes:
        name: of the layer; a part of a weight has its rows in brackets.
        kind: of the layer, or what it is used as.
        position: of the layer among those that are looked at.
        x, g: the factors Σx and Σ∇h.
        calls: how often the weight was applied, in the open batch.
        arrived: how many gradients have come by, of these.
        early: whether that tells when all of them have.
        done: whether its factors are complete, and have been given away.
        why_not: why it cannot be treated, if so.
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
    """Layer by layer, and the parts of a weight by their rows."""

    def place(key: tuple[int, str]) -> tuple[int, int, str]:
        rows = uses[key].rows
        return key[0], 0 if rows is None else rows.start, key[1]

    return [uses[key] for key in sorted(uses, key=place)]


@dataclass(frozen=True)
class Reader:
    """How the input and the output gradient of a module are read as samples."""

    x: Reads
    g: Reads


def reader(module: nn.Module, *, patches: bool) -> Reader | str:
    """How a module that multiplies its input by one weight is read, or why it cannot be.

    >>> reader(nn.Bilinear(2, 2, 2), patches=False)
    'a Bilinear has two inputs'
    """
    match module:
        case nn.Embedding():
            size = module.num_embeddings
            return Reader(lambda f, x: f.add_counts(x, size), features)
        case nn.EmbeddingBag():
            return "an EmbeddingBag adds up its tokens before its output can be seen"
        case nn.Bilinear():
            return "a Bilinear has two inputs"
        case nn.modules.conv._ConvTransposeNd():
            if patches:
                return "a transposed convolution has no patches"
            # A weight [in, out/groups, ...]: the groups are pooled in what goes out.
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
    """Every row [..., d] is a sample."""
    factor.add(a.reshape(-1, a.shape[-1]).T)


def channels(spatial: int, groups: int = 1) -> Reads:
    """Every position of [batch, d, *spatial] is a sample of its channels; groups of channels are further samples."""

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
        """As keyword arguments."""
        return dict(vars(self))


def convolution(shape: Convolution, *, patches: bool) -> Reader:
    """How a convolution is read: by its channels at each position, or by the patches it sees."""
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
    """Why samples cannot be read from a tensor, if so."""
    from gyroscope.vectors.layout import is_sharded

    if is_sharded(a):
        return "its activations are sharded over ranks"
    if a.is_nested or a.layout is not torch.strided:
        return "its activations are nested or sparse"
    if a.is_complex():
        return "its activations are complex"
    return None
