"""Equations 15 to 18 on networks with batch normalization."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from gyroscope.theory.batch_norm import batch_norm
from gyroscope_lab.errors import LabError
from gyroscope_lab.papers.dynamics.implicit_decay import (
    effective_gradient,
    euler,
    gradient,
    gradient_homogeneity,
    homogeneity,
)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Network:
    """Two layers, the first followed by batch normalization; J of the first layer's weights, or of one unit's."""

    def __init__(self) -> None:
        self.x, self.y = drawn(20, 5), torch.arange(20) % 3
        self.w, self.v = drawn(4, 5, seed=1), drawn(3, 4, seed=2)

    def cost(self, w: Tensor) -> Tensor:
        return F.cross_entropy(torch.tanh(batch_norm(self.x @ w.T)) @ self.v.T, self.y)

    def of_unit(self, w: Tensor, j: int = 2) -> Tensor:
        return self.cost(torch.cat([self.w[:j], w[None], self.w[j + 1 :]]))

    def of_output(self, v: Tensor) -> Tensor:
        return F.cross_entropy(torch.tanh(batch_norm(self.x @ self.w.T)) @ v.T, self.y)


@pytest.mark.parametrize("factor", [0.01, 0.5, 3.0, 1000.0])
def test_the_gradient_behind_batch_norm_is_homogeneous_of_degree_minus_one(factor):
    net = Network()
    for function, w in ((net.cost, net.w), (net.of_unit, net.w[2])):
        value, slope = homogeneity(function, w, factor=factor), gradient_homogeneity(function, w, factor=factor)
        assert (value.degree, slope.degree) == pytest.approx((0, -1), abs=1e-12)
        assert max(value.residual, slope.residual) < 1e-11
        assert euler(function, w) == pytest.approx(0, abs=1e-14)


def test_the_gradient_of_the_output_layer_is_not_homogeneous():
    net = Network()
    assert gradient_homogeneity(net.of_output, net.v).residual > 0.01
    assert abs(euler(net.of_output, net.v)) > 0.01


@pytest.mark.parametrize("degree", [-2, 1, 3])
def test_a_function_of_degree_k_obeys_eulers_theorem_and_has_a_gradient_of_degree_k_minus_one(degree):
    x = drawn(4)

    def function(x: Tensor) -> Tensor:
        return x.norm() ** (degree - 1) * x[0]

    assert homogeneity(function, x).degree == pytest.approx(degree)
    assert gradient_homogeneity(function, x).degree == pytest.approx(degree - 1)
    assert euler(function, x, degree) == pytest.approx(0, abs=1e-13)


def test_a_function_that_is_zero_has_no_degree():
    assert math.isnan(homogeneity(lambda x: 0 * x, drawn(3)).degree)


def test_the_effective_gradient_is_what_sgd_on_the_direction_is_given():
    net, lr = Network(), 1e-6
    w = 3 * net.w[2]
    found = effective_gradient(w, gradient(net.of_unit, w))
    unit = w / w.norm()
    torch.testing.assert_close(found, gradient(net.of_unit, unit) / w.norm() ** 2, rtol=1e-10, atol=1e-14)
    stepped = w - lr * gradient(net.of_unit, w)
    torch.testing.assert_close(stepped / stepped.norm(), unit - lr * found, rtol=0, atol=1e-12)
    torch.testing.assert_close(effective_gradient(2 * w, gradient(net.of_unit, 2 * w)), found / 4, rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (lambda: homogeneity(torch.sum, drawn(2), factor=1.0), "`factor` must be a finite number > 0 other than 1"),
        (lambda: gradient(lambda x: x, drawn(2)), "`function` must return one number"),
        (lambda: effective_gradient(drawn(2), drawn(3)), "`gradient` must have the shape of `weight`"),
        (lambda: effective_gradient(torch.zeros(2), torch.ones(2)), "`weight` must not be zero"),
    ],
)
def test_what_makes_no_sense_is_refused(asked, says):
    with pytest.raises(LabError, match=says):
        asked()
