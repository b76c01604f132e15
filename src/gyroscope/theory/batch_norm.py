"""Batch normalization taken apart: its direct path, its statistics path, and what centring does to weight gradients.

Grosse's chapter, sections 4 and 4.2. A batch is [B, D], or [B, D, ...] with positions behind the units: the statistics
of unit j are those of all entries that belong to it.
"""

from __future__ import annotations

from math import inf
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from gyroscope.base.accepted import real, whole
from gyroscope.errors import DynamicsError

Through = Literal["both", "direct", "statistics"]


class Paths(NamedTuple):
    """What arrives at a normalizer's input on each of its paths (figure 4); all have the input's shape.

    Attributes:
        direct: with the statistics held fixed.
        mean: through μ.
        deviation: through σ; zero for batch centring.
    """

    direct: Tensor
    mean: Tensor
    deviation: Tensor

    @property
    def statistics(self) -> Tensor:
        """The statistics path: through μ and σ together."""
        return self.mean + self.deviation

    @property
    def total(self) -> Tensor:
        """Both paths, as backpropagation gives it."""
        return self.direct + self.statistics


def batch_norm(x: Tensor, *, eps: float = 0.0, through: Through = "both") -> Tensor:
    """Batch normalization without gain and bias (equation 11).

        X̃ = BN(X) = (X − 1μ(X)ᵀ) ⊘ 1σ(X)ᵀ,        σ² = mean of (x − μ)², + ε where that is not zero

    Args:
        x: [B, D, ...].
        eps: ε; 0 as in the chapter, above 0 as in practice.
        through: which paths gradients take back; the value is the same. "direct" holds μ and σ fixed, "statistics" X.

    >>> batch_norm(torch.tensor([[1.0], [3.0]])).flatten().tolist()
    [-1.0, 1.0]
    """
    if through not in get_args(Through):
        raise DynamicsError(f"through is {through!r}; accepted are {', '.join(map(repr, get_args(Through)))}.")
    mean, deviation = _statistics(x, eps)
    if through == "direct":
        mean, deviation = mean.detach(), deviation.detach()
    elif through == "statistics":
        x = x.detach()
    return (x - mean) / deviation


def batch_norm_paths(x: Tensor, gradient: Tensor, *, eps: float = 0.0) -> Paths:
    """The two paths of the backward pass through batch normalization, for X̃̄ = `gradient` (equation 12 and below it).

        direct       X̃̄ ⊘ 1σᵀ
        statistics   −(1μ(X̃̄)ᵀ + X̃ ⊙ 1μ(X̃ ⊙ X̃̄)ᵀ) ⊘ 1σᵀ

    the first term of the second through the mean, the second through the standard deviation. The direct path makes
    gradients shrink as ‖w‖ grows, since σ is proportional to it; the path through σ makes them orthogonal to w.

    >>> x, g = torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([[1.0], [0.0], [0.0]])
    >>> paths = batch_norm_paths(x, g)
    >>> bool(torch.allclose(paths.total.sum(), torch.zeros(())))
    True
    """
    _check_same(x, gradient)
    mean, deviation = _statistics(x, eps)
    normal = (x - mean) / deviation
    return Paths(gradient / deviation, -_mean(gradient) / deviation, -normal * _mean(normal * gradient) / deviation)


def batch_center(r: Tensor) -> Tensor:
    """Batch centring (equation 13): BC(R) = R − 1μ(R)ᵀ.

    >>> batch_center(torch.tensor([[1.0], [3.0]])).flatten().tolist()
    [-1.0, 1.0]
    """
    _check(r)
    return r - _mean(r)


def batch_center_paths(gradient: Tensor) -> Paths:
    """The two paths of the backward pass through batch centring (equation 14): R̄ = S̄ − 1μ(S̄)ᵀ.

    >>> batch_center_paths(torch.tensor([[1.0], [3.0]])).total.flatten().tolist()
    [-1.0, 1.0]
    """
    _check(gradient)
    return Paths(gradient, -_mean(gradient).expand_as(gradient), torch.zeros_like(gradient))


def centred_weight_gradient(activations: Tensor, gradient: Tensor) -> Tensor:
    """The weight gradient of R = AWᵀ through batch centring, S = BC(R): W̄ = S̄ᵀÃ, with Ã = A − 1mᵀ (section 4.2).

    Where the activations lie does not matter: it is the gradient that centred activations would give. For batch
    normalization the same holds with S̄ = what arrives at the centred R, `batch_norm_paths(...)` less the path through
    the mean.

    Args:
        activations: A, [B, D'].
        gradient: S̄, [B, D].

    Returns:
        W̄, [D, D'].

    >>> a, s = torch.tensor([[1.0], [3.0]]), torch.tensor([[1.0], [0.0]])
    >>> centred_weight_gradient(a, s), centred_weight_gradient(a + 100, s)
    (tensor([[-1.]]), tensor([[-1.]]))
    """
    if activations.dim() != 2 or gradient.dim() != 2 or len(activations) != len(gradient):
        raise DynamicsError(
            f"The activations have shape {tuple(activations.shape)} and the gradient {tuple(gradient.shape)}; accepted "
            "are [B, D'] and [B, D]."
        )
    return gradient.T @ batch_center(activations)


class BatchCenter(nn.Module):
    """Batch centring as a layer: S = R − 1μ(R)ᵀ (+ 1bᵀ), and the running mean in place of μ in evaluation mode.

    Weight normalization together with this one has what batch normalization has: scale invariance a unit, and
    gradients that do not see where the activations lie (section 4.4).

    Args:
        features: D, the number of units.
        momentum: the weight of a new batch in the running mean.
        bias: whether to add a bias b, trained; 0 at first.

    >>> layer = BatchCenter(1)
    >>> layer(torch.tensor([[1.0], [3.0]])).flatten().tolist(), layer.running_mean.tolist()
    ([-1.0, 1.0], [0.20000000298023224])
    """

    running_mean: Tensor

    def __init__(self, features: int, *, momentum: float = 0.1, bias: bool = False) -> None:
        super().__init__()
        units = whole(features, 1)
        if units is None or not 0.0 <= real(momentum) <= 1.0:
            raise DynamicsError(
                f"features is {features!r} and momentum {momentum!r}; accepted are a whole number of features from 1 "
                "and a momentum in [0, 1]."
            )
        self.features, self.momentum = units, real(momentum)
        self.register_buffer("running_mean", torch.zeros(units))
        self.bias = nn.Parameter(torch.zeros(units)) if bias else None

    def forward(self, r: Tensor) -> Tensor:
        """S, of R's shape."""
        _check(r)
        if r.shape[1] != self.features:
            raise DynamicsError(f"The input has {r.shape[1]} units, shape {tuple(r.shape)}; this one {self.features}.")
        per_unit = (1, -1, *[1] * (r.dim() - 2))
        if self.training:
            if not r.numel():
                raise DynamicsError(f"The batch has shape {tuple(r.shape)}: it is empty, and has no mean to keep.")
            mean = _mean(r)
            with torch.no_grad():
                self.running_mean.lerp_(mean.flatten().to(self.running_mean.dtype), self.momentum)
        else:
            mean = self.running_mean.view(per_unit).to(r.dtype)
        centred = r - mean
        return centred if self.bias is None else centred + self.bias.view(per_unit)

    def extra_repr(self) -> str:
        """What it was made with."""
        return f"{self.features}, momentum={self.momentum}, bias={self.bias is not None}"


def _mean(x: Tensor) -> Tensor:
    return x.mean(dim=[d for d in range(x.dim()) if d != 1], keepdim=True)


def _statistics(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    _check(x)
    if not 0 <= real(eps) < inf:
        raise DynamicsError(f"eps is {eps!r}; accepted are finite numbers from 0.")
    mean = _mean(x)
    return mean, (_mean((x - mean) ** 2) + eps).sqrt()


def _check(x: Any) -> None:
    if not isinstance(x, Tensor) or x.dim() < 2 or not x.is_floating_point():
        given = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise DynamicsError(f"The batch is {given}; accepted is a floating-point tensor [B, D, ...].")


def _check_same(x: Tensor, gradient: Tensor) -> None:
    _check(x)
    _check(gradient)
    if x.shape != gradient.shape:
        raise DynamicsError(
            f"The batch has shape {tuple(x.shape)} and the gradient {tuple(gradient.shape)}; accepted are equal shapes."
        )
