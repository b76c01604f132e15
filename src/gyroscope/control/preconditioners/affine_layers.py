"""Linear layers and convolutions as affine maps s = [W b] ā of activations with a homogeneous coordinate, ā = (a, 1).

A linear layer is s = [W b] ā for every row of its input. A convolution is the same for every patch that it sees: a is
the patch at an output position, in the order of `torch.nn.functional.unfold`.

The moments of patches need no patches. One position of the kernel sees some rows and columns of the image, the same for
all images and channels. With m and v the mean and the variance of each pixel over the images, the mean at that position
is the mean of m over these pixels, and the variance is the mean of v plus the variance of m: sums over rows and
columns.

Layers of one shape form a cohort, so that an operation on all of them is one operation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from gyroscope.errors import DynamicsError
from gyroscope.layers.class_names import ancestry
from gyroscope.passes.patches import patch_count, patch_gram

Parts = tuple[Tensor, Tensor | None]

_SHORT = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class Place:
    """A layer whose gradient can be preconditioned.

    Attributes:
        name: the name of the module in its model.
        module: a linear layer or a convolution without groups.
        biased: whether a bias is trained with the weights, so that activations have a homogeneous coordinate.
    """

    name: str
    module: nn.Linear | nn.Conv2d
    biased: bool

    @property
    def inputs(self) -> int:
        """The length of a, without the homogeneous coordinate."""
        return self.module.weight[0].numel()

    @property
    def outputs(self) -> int:
        """The length of s."""
        return self.module.weight.shape[0]

    @property
    def bias(self) -> Tensor | None:
        """The bias b, or None if it is not trained."""
        return self.module.bias if self.biased else None

    def gradient(self) -> Parts | None:
        """Return ∇W and ∇b in their own shapes, in float32 or better; None where there is no gradient."""
        grad, bias = self.module.weight.grad, self.bias
        if grad is None:
            return None
        of_weight = at_least_float32(grad)
        if bias is None:
            return of_weight, None
        return of_weight, of_weight.new_zeros(len(grad)) if bias.grad is None else bias.grad.to(of_weight.dtype)

    def exchanged(self, direction: Parts) -> list[tuple[Tensor, Tensor]]:
        """Return pairs of a parameter and the direction that replaces its gradient."""
        (of_weight, of_bias), weight, bias = direction, self.module.weight, self.bias
        pairs: list[tuple[Tensor, Tensor]] = [(weight, of_weight.to(weight.dtype))]
        if bias is not None and bias.grad is not None and of_bias is not None:
            pairs.append((bias, of_bias.to(bias.dtype)))
        return pairs

    def parameters(self) -> list[Tensor]:
        """Return W, and b if it is trained."""
        return [self.module.weight] if self.bias is None else [self.module.weight, self.bias]

    def pixel_moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and variances over rows, [inputs]; for a convolution of pixels, [channels, height, width].

        >>> Place("", nn.Linear(2, 1), True).pixel_moments(torch.tensor([[1.0, 0.0], [3.0, 0.0]]))
        (tensor([2., 0.]), tensor([1., 0.]))
        """
        x = at_least_float32(x)
        if isinstance(self.module, nn.Linear):
            return _moments_over(x.reshape(-1, x.shape[-1]), (0,))
        return _moments_over(x if x.dim() == 4 else x.unsqueeze(0), (0,))

    def norms(self, g: Tensor) -> Tensor:
        """Return the norms over rows of a gradient at the output, [outputs].

        >>> Place("", nn.Linear(1, 2), True).norms(torch.tensor([[3.0, 0.0], [4.0, 1.0]]))
        tensor([5., 1.])
        """
        g = at_least_float32(g)
        unit = g.dim() - (3 if isinstance(self.module, nn.Conv2d) else 1)
        return _norm_over(g, tuple(d for d in range(g.dim()) if d != unit))

    def second_moment(self, x: Tensor) -> Tensor:
        """Return E[ā āᵀ] over all rows or patches of an input; without a bias, ā has no homogeneous coordinate.

        >>> Place("", nn.Linear(1, 1), True).second_moment(torch.tensor([[1.0], [3.0]]))
        tensor([[5., 2.],
                [2., 1.]])
        """
        x = at_least_float32(x)
        if isinstance(self.module, nn.Linear):
            rows = x.reshape(-1, x.shape[-1])
            inner, mean = (rows.T @ rows).div_(len(rows)), rows.mean(0) if self.biased else None
        else:
            x = x if x.dim() == 4 else x.unsqueeze(0)
            at = self.module
            padding: Any = at.padding
            gram = patch_gram(
                x, kernel_size=at.kernel_size, stride=at.stride, padding=padding, dilation=at.dilation,
                padding_mode=at.padding_mode, dtype=x.dtype,
            )  # fmt: skip
            positions = patch_count(
                x.shape, kernel_size=at.kernel_size, stride=at.stride, padding=padding, dilation=at.dilation,
                padding_mode=at.padding_mode,
            )  # fmt: skip
            inner = gram.div_(positions)
            mean = self._patch_mean(x.mean(0)) if self.biased else None
        if mean is None or not self.biased:
            return inner
        whole = inner.new_ones(self.inputs + 1, self.inputs + 1)
        whole[:-1, :-1], whole[:-1, -1], whole[-1, :-1] = inner, mean, mean
        return whole

    def rows(self, g: Tensor) -> Tensor:
        """Return the output of the layer, or the gradient there, as [rows, outputs]."""
        g = at_least_float32(g)
        if isinstance(self.module, nn.Conv2d):
            g = g.movedim(-3, -1)
        return g.reshape(-1, g.shape[-1])

    def _patch_mean(self, image: Tensor) -> Tensor:
        """Return the mean patch of one image [C, H, W]; of the mean image it is that of all images, by linearity."""
        assert isinstance(self.module, nn.Conv2d)
        return windows(self.module, image).mean(image).flatten()


def joined(parts: Parts) -> Tensor:
    """Return [W b] as one matrix, or as one matrix per layer.

    >>> joined((torch.tensor([[1.0, 2.0]]), torch.tensor([3.0])))
    tensor([[1., 2., 3.]])
    """
    W, b = parts
    return W if b is None else torch.cat([W, b.unsqueeze(-1)], dim=-1)


def split(matrix: Tensor, biased: bool) -> Parts:
    """Split [W b] into W and b.

    >>> split(torch.tensor([[1.0, 2.0, 3.0]]), True)
    (tensor([[1., 2.]]), tensor([3.]))
    """
    return (matrix[..., :-1], matrix[..., -1].contiguous()) if biased else (matrix, None)


def places(model: nn.Module) -> tuple[tuple[Place, ...], dict[str, str]]:
    """Return the layers of a model that can be preconditioned, and why other modules with trained parameters cannot.

    >>> found, others = places(nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.Linear(2, 2, bias=False)))
    >>> [(place.name, place.biased) for place in found]
    [('0', True), ('2', False)]
    >>> others
    {'1': 'LayerNorm is neither a linear layer nor a convolution'}
    """
    if not isinstance(model, nn.Module):
        raise DynamicsError(f"`model` must be a torch.nn.Module, got a {type(model).__name__}.")
    found: list[Place] = []
    others: dict[str, str] = {}
    owners: defaultdict[int, list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        for p in module.parameters(recurse=False):
            owners[id(p)].append(name)
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if not any(p.requires_grad for p in own):
            continue
        shares = next((one for p in own for one in owners[id(p)] if one != name), None)
        why = _unsupported(module) or (None if shares is None else f"it shares parameters with {shares or 'the model'}")
        if why is None and isinstance(module, nn.Linear | nn.Conv2d):
            found.append(Place(name, module, module.bias is not None and module.bias.requires_grad))
        else:
            others[name] = str(why)
    return tuple(found), others


def _unsupported(module: nn.Module) -> str | None:
    kind = type(module).__name__
    if not isinstance(module, nn.Linear | nn.Conv2d):
        return f"{kind} is neither a linear layer nor a convolution"
    if isinstance(module, nn.Conv2d) and module.groups > 1:
        return f"a convolution with {module.groups} groups is as many layers"
    if is_parametrized(module) or "weight" not in module._parameters:
        return "its weights are computed from other parameters"
    weight = module.weight
    if is_lazy(weight) or "DTensor" in ancestry(weight) or not weight.is_floating_point():
        return "its weights are lazy, sharded or not real numbers"
    return None if weight.requires_grad else "its weights are frozen"


def at_least_float32(x: Tensor) -> Tensor:
    """Return a tensor in float32 or better, for sums.

    >>> at_least_float32(torch.ones((), dtype=torch.bfloat16))
    tensor(1.)
    """
    return x.float() if x.dtype in _SHORT else x


_SMALL = 1 << 20


@dataclass(frozen=True, eq=False)
class Windows:
    """The rows and columns of an image that each position of a kernel sees.

    Attributes:
        rows: [kernel height, image height], the share of output rows at which a kernel row sees an image row.
        columns: [image width, kernel width], the same for columns.
        inside: [kernel height · kernel width], the share that is inside the image, not in the zeros around it; None if
            all of it is.
        outside: 1 − inside.
        pixels: [image height · image width, kernel height · kernel width], rows and columns in one matrix where that is
            small, so that one product is enough.
    """

    rows: Tensor
    columns: Tensor
    inside: Tensor | None
    outside: Tensor | None
    pixels: Tensor | None

    def mean(self, images: Tensor) -> Tensor:
        """Return the mean of what each position of the kernel sees, [..., kernel height · kernel width]."""
        if self.pixels is not None:
            return images.flatten(-2) @ self.pixels
        return torch.matmul(self.rows, images @ self.columns).flatten(-2)


def windows(module: nn.Conv2d, image: Tensor) -> Windows:
    """Return the windows of a convolution on images of the size of `image`, [..., height, width].

    >>> windows(nn.Conv2d(1, 1, (1, 3), padding=(0, 1)), torch.zeros(1, 4)).columns.T
    tensor([[0.2500, 0.2500, 0.2500, 0.0000],
            [0.2500, 0.2500, 0.2500, 0.2500],
            [0.0000, 0.2500, 0.2500, 0.2500]])
    """
    around = module._reversed_padding_repeated_twice
    rows, columns = (
        _seen(size, module.kernel_size[d], module.stride[d], module.dilation[d], around[2 - 2 * d : 4 - 2 * d], module)
        for d, size in enumerate(image.shape[-2:])
    )
    inside = torch.outer(rows.sum(1), columns.sum(1)).flatten()
    short = module.padding_mode == "zeros" and any(around)
    small = rows.numel() * columns.numel() <= _SMALL
    rows, columns, inside = (one.to(image.device, image.dtype) for one in (rows, columns.T.contiguous(), inside))
    pixels = torch.kron(rows.T.contiguous(), columns) if small else None
    return Windows(rows, columns, inside if short else None, 1 - inside if short else None, pixels)


def _seen(size: int, kernel: int, stride: int, dilation: int, around: list[int], module: nn.Conv2d) -> Tensor:
    """Return [kernel, size]: the share of output positions at which a kernel position sees an image row."""
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    # Counted from 1, so that padding is 0; on the CPU, whatever the default device.
    places = torch.arange(1, size + 1, dtype=torch.float64, device="cpu").reshape(1, 1, size)
    padded = functional.pad(places, around, mode=mode)[0, 0].long()
    at = padded.unfold(0, dilation * (kernel - 1) + 1, stride)[:, ::dilation]
    return functional.one_hot(at, size + 1)[..., 1:].double().mean(0)


def patch_moments(images: Tensor, within: Windows) -> tuple[Tensor, Tensor]:
    """Return the mean and variance of patches, each [layers, channels · kernel], as of `torch.nn.functional.unfold`.

    Args:
        images: m and v of each pixel, [2, layers, channels, height, width]; overwritten.
        within: the windows.
    """
    m, v = images
    # Centered by channels, for the digits of the variance; zeros around the image are then c too low.
    c = m.mean((2, 3), keepdim=True)
    m.sub_(c)
    v.addcmul_(m, m)
    first, second = within.mean(images)
    second.addcmul_(first, first, value=-1)
    c = c.flatten(2)
    if within.inside is None or within.outside is None:
        first.add_(c)
    else:
        mean = torch.addcmul(first, c, within.inside)
        # 2 c (1 − f) first + c² f (1 − f)
        second.addcmul_(c * within.outside, first.add_(mean))
        first = mean
    return first.flatten(1), second.flatten(1).clamp_min_(0)


def _moments_over(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the mean and the variance over some dimensions, without cancellation in the variance.

    >>> _moments_over(torch.tensor([[1.0, 0.0], [3.0, 0.0]]), (0,))
    (tensor([2., 0.]), tensor([1., 0.]))
    """
    if x.is_cuda:
        variance, mean = torch.var_mean(x, dims, correction=0)
        return mean, variance
    # torch.var_mean is one operation, but a slow one on a CPU.
    mean = x.mean(dims, keepdim=True)
    centered = x - mean
    return mean.squeeze(dims), centered.mul_(centered).mean(dims)


def _norm_over(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return the 2-norm over some dimensions; over none it is |x|.

    >>> _norm_over(torch.tensor([[3.0, 0.0], [4.0, 1.0]]), (0,))
    tensor([5., 1.])
    """
    if not dims:
        return x.abs()
    # As above: the single operation is slow on a CPU.
    return torch.linalg.vector_norm(x, dim=dims) if x.is_cuda else x.square().sum(dims).sqrt_()


@dataclass(frozen=True)
class Cohort:
    """Layers of one shape.

    Attributes:
        indices: their indices among the places.
        shape: the shape of their weights.
        biased: whether a bias is trained with the weights.
    """

    indices: tuple[int, ...]
    shape: torch.Size
    biased: bool

    @property
    def inputs(self) -> int:
        """The size of a, without the homogeneous coordinate."""
        return self.shape[1:].numel()

    @property
    def outputs(self) -> int:
        """The size of s."""
        return self.shape[0]

    def stacked(self, gradients: Mapping[int, Parts]) -> Parts:
        """Return the gradients of all layers as [layers, outputs, inputs], with zeros where there is none.

        >>> W, b = Cohort((3, 5), torch.Size([1, 1]), False).stacked({5: (torch.tensor([[2.0]]), None)})
        >>> W.flatten(), b
        (tensor([0., 2.]), None)
        """
        some = next(gradients[i] for i in self.indices if i in gradients)
        parts = [gradients[i] if i in gradients else tuple(map(_zeros, some)) for i in self.indices]
        biases = [b for _, b in parts if b is not None]
        W = _stack([W for W, _ in parts if W is not None])
        return W.flatten(2), _stack(biases) if biases else None

    def unstacked(self, parts: Parts, gradients: Mapping[int, Parts]) -> dict[int, Parts]:
        """Return the parts of each layer in the shape of its weights, for layers that have a gradient."""
        W, b = parts
        each = zip(W.reshape(len(W), *self.shape).unbind(), [None] * len(W) if b is None else b.unbind(), strict=True)
        return {i: own for i, own in zip(self.indices, each, strict=True) if i in gradients}


def _stack(several: list[Tensor]) -> Tensor:
    return torch.stack(several) if len(several) > 1 else several[0].unsqueeze(0)  # without a copy


def _zeros(like: Tensor | None) -> Tensor | None:
    return None if like is None else torch.zeros_like(like)


@dataclass(frozen=True, eq=False)
class Shelf:
    """The layers on one device, cohort by cohort.

    Attributes:
        cohorts: the layers.
        like: a tensor with the device and the dtype of their statistics.
    """

    cohorts: tuple[Cohort, ...]
    like: Tensor

    @property
    def order(self) -> list[int]:
        """The indices of the layers among the places, cohort after cohort."""
        return [i for cohort in self.cohorts for i in cohort.indices]


def shelves(places: Sequence[Place]) -> list[Shelf]:
    """Group all layers by the device of their weights.

    >>> from torch import nn
    >>> made = [Place("", nn.Linear(inputs, 2), True) for inputs in (3, 4, 3)]
    >>> [cohort.indices for cohort in shelves(made)[0].cohorts]
    [(0, 2), (1,)]
    """
    by_device: defaultdict[torch.device, list[int]] = defaultdict(list)
    for i, place in enumerate(places):
        by_device[place.module.weight.device].append(i)

    def shape(i: int) -> tuple[torch.Size, bool, str]:
        place = places[i]
        return place.module.weight.shape, place.biased, str(place.module.weight.dtype)

    found = []
    for device, indices in by_device.items():
        groups = groupby(sorted(indices, key=shape), key=shape)
        cohorts = tuple(Cohort(tuple(group), *key[:2]) for key, group in groups)
        long = any(places[i].module.weight.dtype == torch.float64 for i in indices)
        like = torch.empty((), dtype=torch.float64 if long else torch.float32, device=device)
        found.append(Shelf(cohorts, like))
    return found
