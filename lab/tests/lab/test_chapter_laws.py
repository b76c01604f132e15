"""Statements of Grosse's chapter that no study trains for, on networks small enough to form everything in float64.

Equations 15 to 18: the degree of homogeneity of a layer behind batch normalization, and of its gradient. Equation 26:
the damping of a second-order step weighs ‖w‖² times as much. Section 5: an L2 penalty on the factors of a deep linear
network is a penalty on their product.
"""

from __future__ import annotations

from functools import reduce
from math import log

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from gyroscope.conditioning import fisher
from gyroscope.theory import batch_norm


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Equations 15 to 18


def homogeneity(function, x: Tensor, factor: float = 2.0) -> tuple[float, float]:
    """k of g(γx) = γᵏ g(x) (equation 15) by the norms of both sides, and their relative distance."""
    here, there = function(x), function(factor * x)
    k = log(there.norm() / here.norm()) / log(factor)
    return k, float((there - factor**k * here).norm() / there.norm())


def gradient(function, x: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(function(leaf), leaf)[0]


class Network:
    """Two layers, the first followed by batch normalization; J of the first layer's weights, or of one unit's."""

    x, y, w, v = drawn(20, 5), torch.arange(20) % 3, drawn(4, 5, seed=1), drawn(3, 4, seed=2)

    def cost(self, w: Tensor) -> Tensor:
        return F.cross_entropy(torch.tanh(batch_norm.batch_norm(self.x @ w.T)) @ self.v.T, self.y)

    def of_unit(self, w: Tensor, j: int = 2) -> Tensor:
        return self.cost(torch.cat([self.w[:j], w[None], self.w[j + 1 :]]))

    def of_output(self, v: Tensor) -> Tensor:
        return F.cross_entropy(torch.tanh(batch_norm.batch_norm(self.x @ self.w.T)) @ v.T, self.y)


@pytest.mark.parametrize("factor", [0.01, 0.5, 3.0, 1000.0])
def test_the_gradient_behind_batch_norm_is_homogeneous_of_degree_minus_one(factor):
    net = Network()
    for function, w in ((net.cost, net.w), (net.of_unit, net.w[2])):
        assert homogeneity(function, w, factor) == pytest.approx((0, 0), abs=1e-11)
        assert homogeneity(lambda w, f=function: gradient(f, w), w, factor) == pytest.approx((-1, 0), abs=1e-11)
        assert float((w * gradient(function, w)).sum()) == pytest.approx(0, abs=1e-14)


def test_the_gradient_of_the_output_layer_is_not_homogeneous():
    net = Network()
    assert homogeneity(lambda v: gradient(net.of_output, v), net.v)[1] > 0.01
    assert abs(float((net.v * gradient(net.of_output, net.v)).sum())) > 0.01


@pytest.mark.parametrize("degree", [-2, 1, 3])
def test_a_function_of_degree_k_obeys_eulers_theorem_and_has_a_gradient_of_degree_k_minus_one(degree):
    x = drawn(4)

    def function(x: Tensor) -> Tensor:
        return x.norm() ** (degree - 1) * x[0]

    slope = gradient(function, x)
    assert homogeneity(function, x)[0] == pytest.approx(degree)
    assert homogeneity(lambda x: gradient(function, x), x)[0] == pytest.approx(degree - 1)
    assert float((x * slope).sum()) == pytest.approx(degree * float(function(x)), abs=1e-13)


def test_sgd_moves_the_direction_of_a_unit_by_the_effective_gradient():
    """‖w‖⁻² ∇J(ŵ) = ∇J(w)/‖w‖, of degree −2 (section 4.3)."""
    net, lr = Network(), 1e-6
    w = 3 * net.w[2]
    unit, slope = w / w.norm(), gradient(net.of_unit, w)
    effective = gradient(net.of_unit, unit) / w.norm() ** 2
    torch.testing.assert_close(slope / w.norm(), effective, rtol=1e-10, atol=1e-14)
    stepped = w - lr * slope
    torch.testing.assert_close(stepped / stepped.norm(), unit - lr * effective, rtol=0, atol=1e-12)


# Equation 26


def measured(scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of a layer before batch normalization, multiplied by `scale`, their curvature and their gradient."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(4, 3, bias=False), nn.BatchNorm1d(3, eps=1e-30, affine=False), nn.ReLU(), nn.Linear(3, 3)
    ).double()
    net[0].weight.data *= scale
    x, y = torch.randn(12, 4, dtype=torch.float64), torch.arange(12) % 3
    G = fisher.fisher(net, F.cross_entropy, (x, y), layers="0*").matrix
    [slope] = torch.autograd.grad(F.cross_entropy(net(x), y), net[0].weight)
    assert G is not None
    return net[0].weight.detach().flatten(), G, slope.flatten()


def damped(G: Tensor, slope: Tensor, damping: float) -> Tensor:
    """(G + ηI)⁻¹ ∇J."""
    return torch.linalg.solve(G + damping * torch.eye(len(slope), dtype=G.dtype), slope)


@pytest.mark.parametrize("scale", [0.2, 5.0])
def test_at_larger_weights_a_damped_step_is_that_of_a_larger_damping(scale):
    (w, G, slope), (large, there, its) = measured(1.0), measured(scale)
    torch.testing.assert_close((large, there, its), (scale * w, G / scale**2, slope / scale), rtol=1e-9, atol=1e-12)
    step, expected = damped(there, its, 0.1), damped(G, slope, scale**2 * 0.1)
    torch.testing.assert_close(step / large.norm(), expected / w.norm(), rtol=1e-9, atol=1e-12)


def test_without_damping_the_norm_makes_no_difference():
    (_, G, slope), (_, there, its) = measured(1.0), measured(7.0)
    # Curvature is zero along the rows of w, where it has no inverse.
    exact, larger = (torch.linalg.pinv(one, rtol=1e-8, hermitian=True) for one in (G, there))
    torch.testing.assert_close(larger @ its, 7.0 * exact @ slope)


def test_growing_weights_make_damped_steps_gradient_descent_at_the_effective_rate():
    w, G, slope = measured(1.0)
    cosines = [
        float(F.cosine_similarity(damped(G / s**2, slope / s, 1e-3), slope, dim=0))
        for s in (0.1, 1.0, 10.0, 100.0, 1000.0)
    ]
    assert cosines == sorted(cosines)
    assert cosines[0] < 0.8
    assert cosines[-1] == pytest.approx(1.0, abs=1e-6)
    # In units of the weights' norm the step is that of gradient descent on the unit vector at the rate 1/(η‖w‖²).
    norm = 1e5 * float(w.norm())
    moved = damped(G / 1e10, slope / 1e5, 1e-3) / norm
    torch.testing.assert_close(moved, slope * w.norm() / (1e-3 * norm**2), rtol=1e-3, atol=1e-9)


def test_along_an_eigenvector_a_share_of_newtons_step_is_left():
    """λ/(λ + γ²η): one half where the weights have grown by γ = √(λ/η)."""
    _, G, slope = measured(1.0)
    values, vectors = torch.linalg.eigh(G)
    seen, scale = values > 1e-8, 3.0
    newton = (vectors.T @ slope)[seen] / values[seen]
    step = (vectors.T @ damped(G / scale**2, slope / scale, 0.01) / scale)[seen]
    torch.testing.assert_close(step, newton * values[seen] / (values[seen] + scale**2 * 0.01), rtol=1e-8, atol=1e-12)


def test_only_the_second_factor_of_k_fac_changes_with_the_norm():
    x, head, w = drawn(50, 4), drawn(3, seed=1), drawn(3, 4, seed=2)

    def factors(scale: float) -> tuple[Tensor, Tensor]:
        s = (x @ (scale * w).T).requires_grad_()
        normalized = (s - s.mean(0)) / s.std(0, correction=0)
        [g] = torch.autograd.grad((normalized.relu() @ head).square().sum(), s)
        return x.T @ x, g.T @ g

    (A, S), (A_there, S_there) = factors(1.0), factors(4.0)
    torch.testing.assert_close((A_there, S_there), (A, S / 16))


# Deep linear networks: factors are listed in the order in which they are applied


def product(factors: list[Tensor]) -> Tensor:
    """W_K ⋯ W_1."""
    return reduce(lambda w, factor: factor @ w, factors)


def penalty(factors: list[Tensor]) -> Tensor:
    """Σ_l ‖W_l‖²."""
    return torch.stack([factor.square().sum() for factor in factors]).sum()


def smallest_penalty(w: Tensor, depth: int) -> Tensor:
    """K Σ_i σ_i^{2/K} = K ‖W‖^{2/K}_{2/K}, the smallest penalty of K factors with the product W. (The chapter writes
    L|β|^{2/K} for K|β|^{2/K}.)"""
    return depth * torch.linalg.svdvals(w).pow(2 / depth).sum()


def balanced(w: Tensor, depth: int) -> list[Tensor]:
    """Σ^{1/K}Vᵀ, Σ^{1/K}, …, UΣ^{1/K} of W = UΣVᵀ, K ≥ 2."""
    u, values, vh = torch.linalg.svd(w, full_matrices=False)
    root = torch.diag(values ** (1 / depth))
    return [root @ vh, *[root] * (depth - 2), u @ root]


def descended(factors: list[Tensor]) -> list[Tensor]:
    """Factors with the same product and the smallest penalty that descent finds, without singular values.

    W_l → G_l W_l G_{l−1}⁻¹ keeps the product; quasi-Newton steps are taken in the logarithms of symmetric G_l, since
    rotations change no norm.
    """
    logs = [torch.zeros(len(f), len(f), dtype=f.dtype, requires_grad=True) for f in factors[:-1]]

    def regauged() -> list[Tensor]:
        found = list(factors)
        for i, one in enumerate(logs):
            found[i] = torch.matrix_exp((one + one.T) / 2) @ found[i]
            found[i + 1] = found[i + 1] @ torch.matrix_exp(-(one + one.T) / 2)
        return found

    optimizer = torch.optim.LBFGS(
        logs, max_iter=200, tolerance_grad=1e-12, tolerance_change=1e-15, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = penalty(regauged())
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        return regauged()


def threshold(decay: float, depth: int) -> tuple[float, float]:
    """The |b| from which something is learned, and the smallest β ≠ 0 that is: (λ(K − 2))^{K/(2K−2)}; K ≥ 2."""
    least = (decay * (depth - 2)) ** (depth / (2 * depth - 2))
    return decay if depth == 2 else least + decay * least ** (2 / depth - 1), least


def learned(b: float, decay: float, depth: int) -> float:
    """argmin_β ½(β − b)² + ½λK|β|^{2/K} by a fine grid."""
    grid = torch.linspace(-6, 6, 240_001, dtype=torch.float64)
    return float(grid[(0.5 * (grid - b) ** 2 + 0.5 * decay * depth * grid.abs() ** (2 / depth)).argmin()])


@pytest.mark.parametrize("depth", [2, 3, 6])
@pytest.mark.parametrize("shape", [(3, 5), (4, 2), (1, 1)])
def test_balanced_factors_have_the_product_and_the_smallest_penalty(depth, shape):
    w = drawn(*shape)
    factors = balanced(w, depth)
    torch.testing.assert_close((product(factors), penalty(factors)), (w, smallest_penalty(w, depth)))


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_descent_over_all_factors_of_a_matrix_ends_at_the_schatten_norm(depth):
    factors = [drawn(3, 4, seed=1), *(drawn(3, 3, seed=k) for k in range(2, depth)), drawn(5, 3, seed=9)]
    w, found = product(factors), descended(factors)
    torch.testing.assert_close(product(found), w)
    torch.testing.assert_close(penalty(found), smallest_penalty(w, depth), rtol=1e-7, atol=0)
    assert penalty(found) < 0.9 * penalty(factors)


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_a_penalty_on_two_factors_or_more_gives_exact_zeros_below_a_threshold(depth):
    at, least = threshold(0.4, depth)
    assert learned(at - 0.01, 0.4, depth) == pytest.approx(0, abs=1e-12)
    assert learned(at + 0.01, 0.4, depth) > max(least, 0.009)
    assert learned(0.01, 0.4, 1) == pytest.approx(0.01 / 1.4, abs=1e-4)  # one factor only shrinks


def test_training_the_factors_with_weight_decay_learns_the_shrunken_singular_values():
    target, decay = torch.diag(torch.tensor([3.0, 2.0], dtype=torch.float64)), 0.2
    factors = [f.requires_grad_() for f in balanced(target, 3)]
    for _ in range(300):
        loss = 0.5 * (product(factors) - target).square().sum() + 0.5 * decay * penalty(factors)
        for f, g in zip(factors, torch.autograd.grad(loss, factors), strict=True):
            f.data -= 0.05 * g
    expected = [learned(float(b), decay, 3) for b in target.diagonal()]
    assert torch.linalg.svdvals(product(factors).detach()).tolist() == pytest.approx(expected, abs=1e-4)
