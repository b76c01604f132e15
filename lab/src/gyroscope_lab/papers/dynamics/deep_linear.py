"""The L2 penalty on the factors of a deep linear network, as a penalty on their product (section 5 of the chapter).

A network z = W_K ⋯ W_1 x computes z = Wx. Of all factors with the product W, those with the smallest sum of squared
norms are balanced, each with the K-th roots of the singular values σ_i of W, and

    min Σ_l ‖W_l‖²  =  K Σ_i σ_i^{2/K}  =  K ‖W‖^{2/K}_{2/K},

the Schatten quasi-norm. With one unit per layer this is K|β|^{2/K}: an L2 penalty on weights is an L_{2/K} penalty on
the function that the network computes. From K = 2 on it produces exact zeros. (The chapter writes L|β|^{2/K} for
K|β|^{2/K}.)

Factors are listed in the order in which they are applied, W_1 first; two-dimensional tensors [outputs, inputs].
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf

import torch
from torch import Tensor

from gyroscope_lab.errors import LabError


def product(factors: Sequence[Tensor]) -> Tensor:
    """W_K ⋯ W_1, the matrix of a deep linear network.

    >>> product([torch.tensor([[2.0]]), torch.tensor([[3.0], [1.0]])])
    tensor([[6.],
            [2.]])
    """
    _check_factors(factors)
    w = factors[0]
    for factor in factors[1:]:
        w = factor @ w
    return w


def penalty(factors: Sequence[Tensor]) -> Tensor:
    """Σ_l ‖W_l‖², the penalty of weight decay.

    >>> penalty([torch.tensor([[2.0]]), torch.tensor([[3.0], [1.0]])])
    tensor(14.)
    """
    _check_factors(factors)
    return torch.stack([factor.square().sum() for factor in factors]).sum()


def schatten(w: Tensor, p: float) -> Tensor:
    """Σ_i σ_i^p, the p-th power of the Schatten (quasi-)norm ‖W‖_p; for p = 2 the squared Frobenius norm.

    >>> schatten(torch.diag(torch.tensor([4.0, 9.0])), 0.5)
    tensor(5.)
    """
    if not 0 < p < inf:
        raise LabError(f"`p` must be a finite number > 0, got {p!r}.")
    return _singular(w).pow(p).sum()


def smallest_penalty(w: Tensor, depth: int) -> Tensor:
    """K Σ_i σ_i^{2/K}: the smallest Σ_l ‖W_l‖² of K factors whose product is W.

    >>> smallest_penalty(torch.tensor([[8.0]]), 3)                 # 2² + 2² + 2²
    tensor(12.)
    """
    _check_depth(depth)
    return depth * schatten(w, 2 / depth)


def balanced_factors(w: Tensor, depth: int, *, width: int | None = None) -> list[Tensor]:
    """K factors with the product W = UΣVᵀ and the smallest Σ_l ‖W_l‖²: Σ^{1/K}Vᵀ, Σ^{1/K}, …, UΣ^{1/K}.

    They are balanced, W_{l+1}ᵀ W_{l+1} = W_l W_lᵀ, which gradient flow preserves.

    Args:
        w: W.
        depth: K.
        width: the width of the layers in between, at least the rank of W; by default the smaller side of W.

    >>> factors = balanced_factors(torch.tensor([[8.0, 0.0], [0.0, 1.0]]), 3)
    >>> factors[1].abs()
    tensor([[2., 0.],
            [0., 1.]])
    """
    _check_depth(depth)
    _check_matrix(w)
    if depth == 1:
        return [w.clone()]
    u, values, vh = torch.linalg.svd(w, full_matrices=False)
    tiny = max(w.shape) * torch.finfo(w.dtype).eps * values.max() if len(values) else 0.0
    rank, most = int((values > tiny).sum()), len(values) if width is None else width
    if most < rank:
        raise LabError(f"`width` must be at least the rank of W, {rank}, got {most}.")
    roots = torch.zeros(most, dtype=w.dtype, device=w.device)
    kept = min(most, len(values))
    roots[:kept] = values[:kept] ** (1 / depth)
    first, last = w.new_zeros(most, w.shape[1]), w.new_zeros(w.shape[0], most)
    first[:kept] = roots[:kept, None] * vh[:kept]
    last[:, :kept] = u[:, :kept] * roots[:kept]
    return [first, *(torch.diag(roots) for _ in range(depth - 2)), last]


def descended_factors(factors: Sequence[Tensor], *, iterations: int = 200) -> list[Tensor]:
    """Factors with the same product and the smallest Σ_l ‖W_l‖² that descent finds, from the given ones.

    W_l → G_l W_l G_{l−1}⁻¹ with G_0 = G_K = I leaves the product unchanged. Quasi-Newton steps (L-BFGS) are taken in
    the logarithms of symmetric G_l, since rotations change no norm. Singular values are not used, so this is a check of
    `balanced_factors`.

    >>> given = [torch.tensor([[w]], dtype=torch.float64) for w in (8.0, 1.0, 1.0)]
    >>> [round(factor.item(), 6) for factor in descended_factors(given)]
    [2.0, 2.0, 2.0]
    """
    _check_factors(factors)
    given = [factor.detach() for factor in factors]
    logs = [torch.zeros(len(f), len(f), dtype=f.dtype, device=f.device, requires_grad=True) for f in given[:-1]]
    if not logs:
        return [given[0].clone()]

    def regauged() -> list[Tensor]:
        found = list(given)
        for i, log in enumerate(logs):
            found[i] = torch.matrix_exp((log + log.T) / 2) @ found[i]
            found[i + 1] = found[i + 1] @ torch.matrix_exp(-(log + log.T) / 2)
        return found

    optimizer = torch.optim.LBFGS(
        logs, max_iter=iterations, tolerance_grad=1e-12, tolerance_change=1e-15, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = penalty(regauged())
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        return regauged()


def imbalance(factors: Sequence[Tensor]) -> float:
    """The largest ‖W_{l+1}ᵀW_{l+1} − W_lW_lᵀ‖, as a share of the largest ‖W_l‖²: 0 for balanced factors.

    >>> imbalance([torch.tensor([[2.0]]), torch.tensor([[2.0]])])
    0.0
    """
    _check_factors(factors)
    most = max(float(factor.square().sum()) for factor in factors)
    gaps = [float((after.T @ after - before @ before.T).norm()) for before, after in pairwise(factors)]
    return max(gaps, default=0.0) / most if most > 0 else 0.0


def shrunk(target: Tensor, *, decay: float, depth: int) -> Tensor:
    """Return argmin_β ½(β − b)² + ½λK|β|^{2/K} elementwise: the target b as learned under an L2 penalty on K layers.

    One layer shrinks everything by 1/(1 + λ). Two layers subtract λ, down to zero. From three layers on, values below a
    `threshold` become zero, and values far above it hardly change. For matrices it acts on singular values.

    >>> b = torch.tensor([0.5, 2.0, 10.0])
    >>> for depth in (1, 2, 3):
    ...     shrunk(b, decay=1.0, depth=depth)
    tensor([0.2500, 1.0000, 5.0000])
    tensor([0., 1., 9.])
    tensor([0.0000, 1.0000, 9.5283])
    """
    at = threshold(decay, depth)
    size, power = target.abs(), 2 / depth - 1
    if depth == 1 or decay == 0:
        return target / (1 + decay if depth == 1 else 1)
    if depth == 2:
        return target.sign() * (size - decay).clamp_min(0)
    # Above the threshold the equation β − b + λβ^(2/K − 1) = 0 is convex in β, and Newton's method descends from b to
    # its larger root without overshooting.
    alive = size >= at
    b = torch.where(alive, size, torch.ones_like(size) * max(at, 1.0))
    beta = b
    for _ in range(60):
        slope = 1 + decay * power * beta ** (power - 1)
        beta = beta - (beta - b + decay * beta**power) / slope
    return torch.where(alive, target.sign() * beta, torch.zeros_like(beta))


def threshold(decay: float, depth: int) -> float:
    """The |b| below which `shrunk` gives zero: 0 for one layer, λ for two, β + λβ^{2/K−1} for K > 2.

    β = (λ(K − 2))^{K/(2K−2)} is the smallest nonzero value that is learned: for K > 2 there is a gap between it and
    zero.

    >>> [round(threshold(1.0, depth), 3) for depth in (1, 2, 3, 4)]
    [0.0, 1.0, 2.0, 2.381]
    """
    _check_depth(depth)
    if not 0 <= decay < inf:
        raise LabError(f"`decay` must be a finite number ≥ 0, got {decay!r}.")
    if depth == 1 or decay == 0:
        return 0.0
    if depth == 2:
        return decay
    smallest = (decay * (depth - 2)) ** (depth / (2 * depth - 2))
    return float(smallest + decay * smallest ** (2 / depth - 1))


def _singular(w: Tensor) -> Tensor:
    _check_matrix(w)
    values: Tensor = torch.linalg.svdvals(w)
    return values


def _check_matrix(w: Tensor) -> None:
    if w.dim() != 2 or not w.is_floating_point() or not bool(torch.isfinite(w).all()):
        raise LabError(f"`w` must be a real matrix of finite numbers, got {w.dtype} of shape {tuple(w.shape)}.")


def _check_depth(depth: int) -> None:
    if depth < 1:
        raise LabError(f"`depth` must be a whole number ≥ 1, got {depth!r}.")


def _check_factors(factors: Sequence[Tensor]) -> None:
    shapes = [tuple(factor.shape) for factor in factors]
    fit = all(len(shape) == 2 for shape in shapes) and all(a[0] == b[1] for a, b in pairwise(shapes))
    if not shapes or not fit:
        raise LabError(f"`factors` must be matrices [outputs, inputs] in the order of layers, got shapes {shapes}.")
