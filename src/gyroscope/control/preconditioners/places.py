"""Layers as matrices: W and b as one [W b] that multiplies activations with a homogeneous coordinate, ā = (a, 1).

A linear layer is s = [W b] ā for every row of its input. A convolution is that too, for every patch it sees: a is the
patch at an output position, in the order of `torch.nn.functional.unfold`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from gyroscope.control.preconditioners.patch_moments import moments_over, norm_over, patch_moments, windows
from gyroscope.errors import DynamicsError
from gyroscope.layers.class_names import ancestry
from gyroscope.passes.patches import patch_count, patch_gram

Parts = tuple[Tensor, Tensor | None]

_SHORT = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class Place:
    """A layer whose gradient can be preconditioned.

    Attributes:
        name: of the module in its model.
        module: a linear layer or a convolution without groups.
        biased: whether a bias is trained with the weights, so that activations have a homogeneous coordinate.
    """

    name: str
    module: nn.Linear | nn.Conv2d
    biased: bool

    @property
    def inputs(self) -> int:
        """The size of a, without the homogeneous coordinate."""
        return self.module.weight[0].numel()

    @property
    def outputs(self) -> int:
        """The size of s."""
        return self.module.weight.shape[0]

    @property
    def bias(self) -> Tensor | None:
        """b, if it is trained."""
        return self.module.bias if self.biased else None

    def gradient(self) -> Parts | None:
        """∇W and ∇b as they are shaped, in float32 or better; None where there is none."""
        grad, bias = self.module.weight.grad, self.bias
        if grad is None:
            return None
        of_weight = at_least_float32(grad)
        if bias is None:
            return of_weight, None
        return of_weight, of_weight.new_zeros(len(grad)) if bias.grad is None else bias.grad.to(of_weight.dtype)

    def exchanged(self, direction: Parts) -> list[tuple[Tensor, Tensor]]:
        """Parameters, and what they get for their gradients."""
        (of_weight, of_bias), weight, bias = direction, self.module.weight, self.bias
        pairs: list[tuple[Tensor, Tensor]] = [(weight, of_weight.to(weight.dtype))]
        if bias is not None and bias.grad is not None and of_bias is not None:
            pairs.append((bias, of_bias.to(bias.dtype)))
        return pairs

    def parameters(self) -> list[Tensor]:
        """W, and b if it is trained."""
        return [self.module.weight] if self.bias is None else [self.module.weight, self.bias]

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """E[a] and the variances of the coordinates of a, each [inputs], over all rows or patches of an input.

        >>> Place("", nn.Linear(2, 1), True).moments(torch.tensor([[1.0, 0.0], [3.0, 0.0]]))
        (tensor([2., 0.]), tensor([1., 0.]))
        """
        mean, variance = self.pixel_moments(x)
        if isinstance(self.module, nn.Linear):
            return mean, variance
        images = torch.stack([mean, variance]).unsqueeze(1)
        means, variances = patch_moments(images, windows(self.module, mean))
        return means[0], variances[0]

    def pixel_moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """E[a] and variances over rows, each [inputs]; of a convolution those of pixels, [channels, height, width]."""
        x = at_least_float32(x)
        if isinstance(self.module, nn.Linear):
            return moments_over(x.reshape(-1, x.shape[-1]), (0,))
        return moments_over(x if x.dim() == 4 else x.unsqueeze(0), (0,))

    def norms(self, g: Tensor) -> Tensor:
        """The square root of the sum over rows of the squares of a gradient at the output, [outputs].

        >>> Place("", nn.Linear(1, 2), True).norms(torch.tensor([[3.0, 0.0], [4.0, 1.0]]))
        tensor([5., 1.])
        """
        g = at_least_float32(g)
        unit = g.dim() - (3 if isinstance(self.module, nn.Conv2d) else 1)
        return norm_over(g, tuple(d for d in range(g.dim()) if d != unit))

    def second_moment(self, x: Tensor) -> Tensor:
        """E[ā āᵀ] over all rows or patches of an input, with or without the homogeneous coordinate.

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
        """What comes out of the layer, or the gradient there, as [rows, outputs]."""
        g = at_least_float32(g)
        if isinstance(self.module, nn.Conv2d):
            g = g.movedim(-3, -1)
        return g.reshape(-1, g.shape[-1])

    def _patch_mean(self, image: Tensor) -> Tensor:
        """The mean patch of one image [C, H, W]; of a mean image, that of all: patches are linear in it."""
        assert isinstance(self.module, nn.Conv2d)
        return windows(self.module, image).mean(image).flatten()


def joined(parts: Parts) -> Tensor:
    """[W b] as one matrix, or as one for each layer.

    >>> joined((torch.tensor([[1.0, 2.0]]), torch.tensor([3.0])))
    tensor([[1., 2., 3.]])
    """
    W, b = parts
    return W if b is None else torch.cat([W, b.unsqueeze(-1)], dim=-1)


def split(matrix: Tensor, biased: bool) -> Parts:
    """[W b] as W and b.

    >>> split(torch.tensor([[1.0, 2.0, 3.0]]), True)
    (tensor([[1., 2.]]), tensor([3.]))
    """
    return (matrix[..., :-1], matrix[..., -1].contiguous()) if biased else (matrix, None)


def places(model: nn.Module) -> tuple[tuple[Place, ...], dict[str, str]]:
    """The layers of a model that can be preconditioned, and why other modules with trained parameters cannot.

    >>> found, others = places(nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.Linear(2, 2, bias=False)))
    >>> [(place.name, place.biased) for place in found]
    [('0', True), ('2', False)]
    >>> others
    {'1': 'LayerNorm is neither a linear layer nor a convolution'}
    """
    if not isinstance(model, nn.Module):
        raise DynamicsError(f"The model is a {type(model).__name__}; accepted is a torch.nn.Module.")
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
    """Digits enough for sums.

    >>> at_least_float32(torch.ones((), dtype=torch.bfloat16))
    tensor(1.)
    """
    return x.float() if x.dtype in _SHORT else x
