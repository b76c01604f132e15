"""Batch normalization taken apart: direct path, statistics path, and the effect of centering on weight gradients.

Grosse's chapter, sections 4 and 4.2. A batch is [B, D], or [B, D, ...] with positions after the units: the
statistics of unit j are taken over all entries that belong to it.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from gyroscope.base.accepted import choice, real
from gyroscope.errors import DynamicsError
from gyroscope.theory.domains import count, nonnegative

Through = Literal["both", "direct", "statistics"]


class Paths(NamedTuple):
    """The gradient at a normalizer's input along each of its paths (figure 4); all have the input's shape.

    Attributes:
        direct: with the statistics held fixed.
        mean: through μ.
        deviation: through σ; zero for batch centering.

    >>> paths = batch_center_paths(torch.tensor([[1.0], [3.0]]))
    >>> paths.direct.flatten().tolist(), paths.statistics.flatten().tolist(), paths.total.flatten().tolist()
    ([1.0, 3.0], [-2.0, -2.0], [-1.0, 1.0])
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
        """The sum of both paths, as backpropagation gives it."""
        return self.direct + self.statistics


def batch_norm(x: Tensor, *, eps: float = 0.0, through: Through = "both") -> Tensor:
    """Batch normalization without gain and bias (equation 11).

        X̃ = BN(X) = (X − 1μ(X)ᵀ) ⊘ 1σ(X)ᵀ,        σ² = mean of (x − μ)², plus ε

    Args:
        x: [B, D, ...].
        eps: ε; 0 as in the chapter, above 0 as in practice.
        through: the paths that gradients take back; the value is the same. "direct" holds μ and σ fixed,
            "statistics" holds X fixed.

    >>> batch_norm(torch.tensor([[1.0], [3.0]])).flatten().tolist()
    [-1.0, 1.0]
    """
    choice(through, "through", get_args(Through), DynamicsError)
    mean, deviation = _statistics(x, eps)
    if through == "direct":
        mean, deviation = mean.detach(), deviation.detach()
    elif through == "statistics":
        x = x.detach()
    return (x - mean) / deviation


def batch_norm_paths(x: Tensor, gradient: Tensor, *, eps: float = 0.0) -> Paths:
    """Return both paths of the backward pass through batch normalization, for X̃̄ = `gradient` (equation 12 and below).

        direct       X̃̄ ⊘ 1σᵀ
        statistics   −(1μ(X̃̄)ᵀ + X̃ ⊙ 1μ(X̃ ⊙ X̃̄)ᵀ) ⊘ 1σᵀ

    The first term of the statistics path goes through the mean, the second through the standard deviation. The direct
    path makes gradients shrink as ‖w‖ grows, because σ is proportional to it; the path through σ makes them orthogonal
    to w.

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
    """Batch centering (equation 13): BC(R) = R − 1μ(R)ᵀ.

    >>> batch_center(torch.tensor([[1.0], [3.0]])).flatten().tolist()
    [-1.0, 1.0]
    """
    _check(r)
    return r - _mean(r)


def batch_center_paths(gradient: Tensor) -> Paths:
    """Return the two paths of the backward pass through batch centering (equation 14): R̄ = S̄ − 1μ(S̄)ᵀ.

    >>> batch_center_paths(torch.tensor([[1.0], [3.0]])).total.flatten().tolist()
    [-1.0, 1.0]
    """
    _check(gradient)
    return Paths(gradient, -_mean(gradient).expand_as(gradient), torch.zeros_like(gradient))


def centered_weight_gradient(activations: Tensor, gradient: Tensor) -> Tensor:
    """Weight gradient of R = AWᵀ through batch centering, S = BC(R): W̄ = S̄ᵀÃ, with Ã = A − 1mᵀ (section 4.2).

    The mean of the activations does not matter: this is the gradient that centered activations would give. The same
    holds for batch normalization with S̄ = the gradient at the centered R, which is `batch_norm_paths(...)` without
    the path through the mean.

    Args:
        activations: A, [B, D'].
        gradient: S̄, [B, D].

    Returns:
        W̄, [D, D'].

    >>> a, s = torch.tensor([[1.0], [3.0]]), torch.tensor([[1.0], [0.0]])
    >>> centered_weight_gradient(a, s), centered_weight_gradient(a + 100, s)
    (tensor([[-1.]]), tensor([[-1.]]))
    """
    if activations.dim() != 2 or gradient.dim() != 2 or len(activations) != len(gradient):
        raise DynamicsError(
            f"`activations` and `gradient` must have shapes [B, D'] and [B, D], got {tuple(activations.shape)} and "
            f"{tuple(gradient.shape)}."
        )
    return gradient.T @ batch_center(activations)


class BatchCenter(nn.Module):
    """Batch centering as a layer: S = R − 1μ(R)ᵀ (+ 1bᵀ), with the running mean in place of μ in evaluation mode.

    Weight normalization followed by this layer has the two properties of batch normalization: scale invariance per
    unit, and gradients that do not depend on the mean of the activations (section 4.4).

    Args:
        features: D, the number of units.
        momentum: weight of a new batch in the running mean.
        bias: whether to add a trained bias b, which starts at 0.

    >>> layer = BatchCenter(1)
    >>> layer(torch.tensor([[1.0], [3.0]])).flatten().tolist(), layer.running_mean.tolist()
    ([-1.0, 1.0], [0.20000000298023224])
    """

    running_mean: Tensor

    def __init__(self, features: int, *, momentum: float = 0.1, bias: bool = False) -> None:
        super().__init__()
        units = count("features", features, least=1)
        if not 0.0 <= real(momentum) <= 1.0:
            raise DynamicsError(f"`momentum` must be a number from 0 to 1, got {momentum!r:.80}. Try 0.1.")
        self.features, self.momentum = units, real(momentum)
        self.register_buffer("running_mean", torch.zeros(units))
        self.bias = nn.Parameter(torch.zeros(units)) if bias else None

    def forward(self, r: Tensor) -> Tensor:
        """Return S, of R's shape."""
        _check(r)
        if r.shape[1] != self.features:
            raise DynamicsError(
                f"The input must have {self.features} units, got {r.shape[1]} in shape {tuple(r.shape)}."
            )
        per_unit = (1, -1, *[1] * (r.dim() - 2))
        if self.training:
            if not r.numel():
                raise DynamicsError(
                    f"The batch must not be empty in training mode, got shape {tuple(r.shape)}: an empty batch has no "
                    "mean."
                )
            mean = _mean(r)
            with torch.no_grad():
                self.running_mean.lerp_(mean.flatten().to(self.running_mean.dtype), self.momentum)
        else:
            mean = self.running_mean.view(per_unit).to(r.dtype)
        centered = r - mean
        return centered if self.bias is None else centered + self.bias.view(per_unit)

    def extra_repr(self) -> str:
        """Return the arguments that the layer was made with."""
        return f"{self.features}, momentum={self.momentum}, bias={self.bias is not None}"


def _mean(x: Tensor) -> Tensor:
    return x.mean(dim=[d for d in range(x.dim()) if d != 1], keepdim=True)


def _statistics(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    _check(x)
    nonnegative("eps", eps, hint="1e-5")
    mean = _mean(x)
    return mean, (_mean((x - mean) ** 2) + eps).sqrt()


def _check(x: Any) -> None:
    if not isinstance(x, Tensor) or x.dim() < 2 or not x.is_floating_point():
        given = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise DynamicsError(f"The batch must be a floating-point tensor [B, D, ...], got {given}.")


def _check_same(x: Tensor, gradient: Tensor) -> None:
    _check(x)
    _check(gradient)
    if x.shape != gradient.shape:
        raise DynamicsError(
            f"The batch and `gradient` must have equal shapes, got {tuple(x.shape)} and {tuple(gradient.shape)}."
        )
