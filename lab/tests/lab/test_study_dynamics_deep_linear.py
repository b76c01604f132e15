"""Balanced factors compared with descent, and the penalty on the product that a penalty on factors implies."""

from __future__ import annotations

import pytest
import torch

from gyroscope_lab.errors import LabError
from gyroscope_lab.papers.dynamics.deep_linear import (
    balanced_factors,
    descended_factors,
    imbalance,
    penalty,
    product,
    schatten,
    shrunk,
    smallest_penalty,
    threshold,
)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("depth", [1, 2, 3, 6])
@pytest.mark.parametrize("width", [None, 7])
@pytest.mark.parametrize("shape", [(3, 5), (4, 2)])
def test_balanced_factors_have_the_product_and_the_smallest_penalty(depth, width, shape):
    w = noise(*shape)
    factors = balanced_factors(w, depth, width=width)
    torch.testing.assert_close(product(factors), w)
    torch.testing.assert_close(penalty(factors), smallest_penalty(w, depth))
    assert len(factors) == depth
    assert imbalance(factors) < 1e-14


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_descent_over_all_factors_of_a_matrix_ends_at_the_schatten_norm(depth):
    factors = [noise(3, 4, seed=1), *(noise(3, 3, seed=k) for k in range(2, depth)), noise(5, 3, seed=9)]
    before, w = penalty(factors), product(factors)
    found = descended_factors(factors)
    torch.testing.assert_close(product(found), w)
    torch.testing.assert_close(penalty(found), smallest_penalty(w, depth), rtol=1e-7, atol=0)
    assert penalty(found) < 0.9 * before
    assert imbalance(found) < 1e-3


def test_no_other_factors_of_a_product_have_a_smaller_penalty():
    w = noise(3, 3)
    for seed in range(20):
        g = noise(3, 3, seed=seed)
        assert penalty([g @ w, torch.linalg.inv(g)]) >= smallest_penalty(w, 2)


def test_one_unit_a_layer_gives_equal_weights_up_to_sign():
    factors = balanced_factors(torch.tensor([[-32.0]]), 5)
    assert [abs(f.item()) for f in factors] == pytest.approx([2.0] * 5)
    assert product(factors).item() == pytest.approx(-32.0)
    assert smallest_penalty(torch.tensor([[-32.0]]), 5).item() == pytest.approx(5 * 32 ** (2 / 5))


def test_the_schatten_norm_is_frobenius_for_two_and_nuclear_for_one():
    w = noise(4, 3)
    torch.testing.assert_close(schatten(w, 2), w.square().sum())
    torch.testing.assert_close(schatten(w, 1), torch.linalg.matrix_norm(w, "nuc"))


def test_a_layer_narrower_than_the_rank_is_refused_and_one_as_narrow_is_enough():
    w = noise(4, 2) @ noise(2, 4, seed=1)
    torch.testing.assert_close(product(balanced_factors(w, 3, width=2)), w)
    with pytest.raises(LabError, match="`width` must be at least the rank of W, 2, got 1"):
        balanced_factors(w, 3, width=1)


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("decay", [0.0, 0.3, 2.0])
def test_what_is_learned_under_the_penalty_is_the_best_of_a_fine_grid(depth, decay):
    b = torch.tensor([-4.0, -0.2, 0.0, 0.7, 1.1, 2.3, 6.0], dtype=torch.float64)
    grid = torch.linspace(-6, 6, 240_001, dtype=torch.float64)
    costs = 0.5 * decay * depth * grid.abs() ** (2 / depth)
    best = torch.stack([grid[(0.5 * (grid - one) ** 2 + costs).argmin()] for one in b])
    torch.testing.assert_close(shrunk(b, decay=decay, depth=depth), best, atol=1e-4, rtol=0)


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_a_target_just_below_the_threshold_is_not_learned_and_one_just_above_is(depth):
    at = threshold(0.4, depth)
    below, above = shrunk(torch.tensor([at - 1e-9, at + 1e-9], dtype=torch.float64), decay=0.4, depth=depth)
    assert below == 0
    assert above >= (0.4 * (depth - 2)) ** (depth / (2 * depth - 2))
    assert above > 0


def test_training_the_factors_with_weight_decay_learns_the_shrunken_singular_values():
    target, decay = torch.diag(torch.tensor([3.0, 2.0], dtype=torch.float64)), 0.2
    factors = [f.requires_grad_() for f in balanced_factors(target, 3)]
    for _ in range(300):
        loss = 0.5 * (product(factors) - target).square().sum() + 0.5 * decay * penalty(factors)
        for f, g in zip(factors, torch.autograd.grad(loss, factors), strict=True):
            f.data -= 0.05 * g
    expected = shrunk(target.diagonal(), decay=decay, depth=3)
    torch.testing.assert_close(torch.linalg.svdvals(product(factors).detach()), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: balanced_factors(torch.eye(2), 0), "`depth` must be a whole number ≥ 1, got 0"),
        (lambda: schatten(torch.eye(2), 0.0), "`p` must be a finite number > 0, got 0.0"),
        (lambda: schatten(torch.ones(3), 1.0), "`w` must be a real matrix of finite numbers"),
        (lambda: product([]), "`factors` must be matrices"),
        (lambda: penalty([torch.ones(2, 3), torch.ones(2, 3)]), "in the order of layers"),
        (lambda: threshold(-1.0, 2), "`decay` must be a finite number ≥ 0, got -1.0"),
    ],
)
def test_what_is_no_network_is_refused(call, says):
    with pytest.raises(LabError, match=says):
        call()
