"""The same layer in other coordinates: affine maps of activations and pre-activations, absorbed into its weights.

A layer computes s = W a + b (equation 6 of Grosse's chapter 5). With invertible, fixed affine maps on both sides

    ã = Ψ(a) = Ψ a + ψ        s = Ω(s̃) = Ω s̃ + ω

(figure 3) the layer s̃ = W̃ ã + b̃ between them computes the same function if

    W̃ = Ω⁻¹ W Ψ⁻¹        b̃ = Ω⁻¹ (b − ω) − W̃ ψ

Equations 7 to 9 are Ψ = Σ^(−1/2), ψ = −Σ^(−1/2) m and no Ω: W̃ = W Σ^(1/2), b̃ = b + W m.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from gyroscope.errors import DynamicsError
from gyroscope.vectors.eager import accumulator


@dataclass(frozen=True, eq=False)
class Affine:
    """An invertible affine map x → M x + c of vectors of d numbers.

    Attributes:
        matrix: M, [d, d]; or [d] for a diagonal matrix, which maps each coordinate on its own.
        shift: c, [d].

    >>> double = Affine(torch.tensor([2.0, 4.0]), torch.tensor([1.0, 0.0]))
    >>> double(torch.tensor([[1.0, 1.0]]))
    tensor([[3., 4.]])
    >>> double.inverse()(double(torch.tensor([5.0, 7.0])))
    tensor([5., 7.])
    """

    matrix: Tensor
    shift: Tensor

    def __post_init__(self) -> None:
        for name, given in (("matrix", self.matrix), ("shift", self.shift)):
            if not isinstance(given, Tensor) or not given.is_floating_point():
                kind = given.dtype if isinstance(given, Tensor) else f"a {type(given).__name__}"
                raise DynamicsError(f"`{name}` must be a floating-point tensor, got {kind}.")
        d = self.shift.shape[0] if self.shift.dim() == 1 else -1
        if self.matrix.shape not in ((d,), (d, d)):
            raise DynamicsError(
                "`shift` must be [d], and `matrix` [d, d] or, for a diagonal, [d]; got a matrix of "
                f"{list(self.matrix.shape)} and a shift of {list(self.shift.shape)}."
            )

    @property
    def diagonal(self) -> bool:
        """True if every coordinate is mapped on its own."""
        return self.matrix.dim() == 1

    def __call__(self, x: Tensor, *, dim: int = -1) -> Tensor:
        """Return M x + c along a dimension of x."""
        x = x.movedim(dim, -1)
        return ((x * self.matrix if self.diagonal else x @ self.matrix.T) + self.shift).movedim(-1, dim)

    def inverse(self) -> Affine:
        """Return the inverse map, x → M⁻¹ (x − c)."""
        matrix = 1 / self.matrix if self.diagonal else torch.linalg.inv_ex(self.matrix).inverse
        if not bool(torch.isfinite(matrix).all()):
            raise DynamicsError("`matrix` must be invertible, got a singular one. Give a matrix of full rank.")
        back = Affine(matrix, torch.zeros_like(self.shift))
        return Affine(matrix, -back(self.shift))


def standardizing(mean: Tensor, variance: Tensor) -> Affine:
    """Return the map to zero mean and unit variance, ã = Σ^(−1/2) (a − m), Σ = diag(variance) (equation 7).

    >>> standardizing(torch.tensor([3.0]), torch.tensor([4.0]))(torch.tensor([5.0]))
    tensor([1.])
    """
    for name, given in (("mean", mean), ("variance", variance)):
        if not isinstance(given, Tensor):
            raise DynamicsError(f"`{name}` must be a tensor [d], got a {type(given).__name__}.")
    if mean.shape != variance.shape or mean.dim() != 1 or not bool((variance > 0).all()):
        raise DynamicsError(
            f"`mean` and `variance` must both be [d], with variances > 0; got shapes {list(mean.shape)} and "
            f"{list(variance.shape)}. Leave constant coordinates out, or add a small number to their variance."
        )
    scale = variance.rsqrt()
    return Affine(scale, -scale * mean)


class FixedAffine(nn.Module):
    """An affine map as a module without parameters: Ψ or Ω of figure 3.

    Args:
        map: the map.
        dim: the dimension of the inputs that it mixes: −1 for features, 1 for the channels of images.

    >>> FixedAffine(Affine(torch.tensor([2.0]), torch.tensor([1.0])))(torch.tensor([[3.0]]))
    tensor([[7.]])
    """

    matrix: Tensor
    shift: Tensor

    def __init__(self, map: Affine, *, dim: int = -1) -> None:
        super().__init__()
        self.register_buffer("matrix", map.matrix.detach().clone())
        self.register_buffer("shift", map.shift.detach().clone())
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """Return M x + c."""
        return Affine(self.matrix, self.shift)(x, dim=self.dim)


L = TypeVar("L", bound=nn.Linear | nn.Conv2d)


@torch.no_grad()
def reparameterize(layer: L, *, activations: Affine | None = None, preactivations: Affine | None = None) -> L:
    """Return the layer W̃, b̃ that computes the same function between Ψ and Ω: Ω(W̃ Ψ(a) + b̃) = W a + b.

    The given layer is left unchanged. The new layer has a bias if the given one has, or if a map has a shift. For a
    convolution the maps act on channels, equally at all positions, and must be diagonal if it has groups.

    Args:
        layer: a linear layer or a convolution.
        activations: Ψ, from the inputs of `layer` to the inputs of the new layer.
        preactivations: Ω, from the outputs of the new layer to the outputs of `layer`.

    Raises:
        DynamicsError: there is no such layer. A convolution's zero padding is not shifted by ψ as the activations are,
            so with padding a shift cannot be absorbed.

    Example:
        Equations 7 to 9:

        >>> layer, m, variance = nn.Linear(2, 3), torch.tensor([1.0, 2.0]), torch.tensor([4.0, 9.0])
        >>> psi = standardizing(m, variance)
        >>> tilde = reparameterize(layer, activations=psi)
        >>> torch.allclose(tilde.weight, layer.weight * variance.sqrt())                  # W̃ = W Σ^(1/2)
        True
        >>> torch.allclose(tilde.bias, layer.bias + layer.weight @ m)                     # b̃ = b + W m
        True
        >>> a = torch.randn(5, 2)
        >>> torch.allclose(tilde(psi(a)), layer(a), atol=1e-5)
        True
    """
    if not isinstance(layer, nn.Linear | nn.Conv2d):
        raise DynamicsError(f"`layer` must be an nn.Linear or nn.Conv2d, got a {type(layer).__name__}.")
    _refuse_without_weights(layer)
    outputs, inputs = layer.weight.shape[0], _inputs(layer)
    psi = _like(layer.weight, activations, inputs, "activations")
    omega = _like(layer.weight, preactivations, outputs, "preactivations")
    if isinstance(layer, nn.Conv2d):
        _refuse_inexact(layer, psi, omega)
    back_in, back_out = psi.inverse(), omega.inverse()
    # [out, in/groups, kernel]; a linear layer has a kernel of 1. In float64: nearly singular matrices cost digits.
    W = (layer.weight.flatten(2) if layer.weight.dim() > 2 else layer.weight.unsqueeze(2)).to(psi.shift)
    if back_in.diagonal:
        W = W * _seen(back_in.matrix, layer).unsqueeze(2)
    else:
        W = torch.einsum("oik,ij->ojk", W, back_in.matrix)
    W = W * back_out.matrix.view(-1, 1, 1) if back_out.diagonal else torch.einsum("po,oik->pik", back_out.matrix, W)
    bias = None
    if layer.bias is not None or bool(psi.shift.any()) or bool(omega.shift.any()):
        bias = back_out(W.new_zeros(outputs) if layer.bias is None else layer.bias.to(W))
        bias -= torch.einsum("oik,oi->o", W, _seen(psi.shift, layer))
    new = deepcopy(layer)
    _set(new, W.reshape(layer.weight.shape), bias)
    return new


def between(
    layer: nn.Linear | nn.Conv2d, *, activations: Affine | None = None, preactivations: Affine | None = None
) -> nn.Sequential:
    """Net 2 of figure 3: Ψ, the reparameterized layer and Ω as one module that computes what `layer` computes.

    >>> layer = nn.Linear(2, 1)
    >>> net = between(layer, activations=Affine(torch.tensor([3.0, 5.0]), torch.tensor([1.0, -1.0])))
    >>> a = torch.randn(4, 2)
    >>> torch.allclose(net(a), layer(a), atol=1e-5)
    True
    """
    tilde: nn.Module = reparameterize(layer, activations=activations, preactivations=preactivations)
    dim = -1 if isinstance(layer, nn.Linear) else 1
    first = nn.Identity() if activations is None else FixedAffine(activations, dim=dim)
    last = nn.Identity() if preactivations is None else FixedAffine(preactivations, dim=dim)
    return nn.Sequential(first, tilde, last)


def _inputs(layer: nn.Linear | nn.Conv2d) -> int:
    return layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels


def _refuse_without_weights(layer: nn.Linear | nn.Conv2d) -> None:
    if is_parametrized(layer) or "weight" not in layer._parameters:
        raise DynamicsError(
            "The weights of `layer` are computed from other parameters and cannot be set. Give a layer whose weight "
            "is a parameter; torch.nn.utils.parametrize.remove_parametrizations makes it one."
        )
    if is_lazy(layer.weight) or layer.weight.is_meta:
        raise DynamicsError("`layer` has no values yet. Initialize it first.")


def _like(weight: Tensor, given: Affine | None, size: int, name: str) -> Affine:
    exact: dict[str, Any] = {"dtype": accumulator(weight.device), "device": weight.device}
    if given is None:
        return Affine(torch.ones(size, **exact), torch.zeros(size, **exact))
    if not isinstance(given, Affine):
        raise DynamicsError(f"`{name}` must be an Affine or None, got a {type(given).__name__}.")
    if given.shift.shape[0] != size:
        raise DynamicsError(
            f"`{name}` must map vectors of {size} numbers, as the layer has, got a map of {given.shift.shape[0]}."
        )
    return Affine(given.matrix.to(**exact), given.shift.to(**exact))


def _refuse_inexact(layer: nn.Conv2d, psi: Affine, omega: Affine) -> None:
    pads = any(layer._reversed_padding_repeated_twice)
    if pads and layer.padding_mode == "zeros" and bool(psi.shift.any()):
        raise DynamicsError(
            f"The convolution pads with zeros (padding={layer.padding}), which a shift of the activations does not "
            "move: no weights compute the same function. Give a map without a shift, or a convolution without padding "
            "or with another padding_mode."
        )
    if layer.groups > 1 and not (psi.diagonal and omega.diagonal):
        raise DynamicsError(
            f"The convolution has {layer.groups} groups, which a full matrix would mix. Give diagonal maps, with the "
            "diagonal as a vector."
        )


def _seen(of_input: Tensor, layer: nn.Linear | nn.Conv2d) -> Tensor:
    """Expand one number per input to [out, in/groups]: for each output, the numbers of the inputs in its group."""
    groups = layer.groups if isinstance(layer, nn.Conv2d) else 1
    return of_input.view(groups, 1, -1).repeat_interleave(layer.weight.shape[0] // groups, dim=1).flatten(0, 1)


def _set(layer: nn.Linear | nn.Conv2d, weight: Tensor, bias: Tensor | None) -> None:
    trains = layer.weight.requires_grad
    dtype = layer.weight.dtype
    layer.weight = nn.Parameter(weight.to(dtype, copy=True), requires_grad=trains)
    if bias is not None:
        trains = trains if layer.bias is None else layer.bias.requires_grad
        layer.bias = nn.Parameter(bias.to(dtype, copy=True), requires_grad=trains)
