"""Equation 19 on networks with batch normalization, and the laws that are made of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from gyroscope.errors import DynamicsError
from gyroscope.theory.batch_norm import batch_norm
from gyroscope.theory.effective_rate import decay_time, effective_lr, figure6, fit_norms, implicit_decay, norm_growth


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Network:
    """Two layers, the first behind batch normalization; J of the first layer's weights, or of one unit's."""

    def __init__(self) -> None:
        self.x, self.y = drawn(20, 5), torch.arange(20) % 3
        self.w, self.v = drawn(4, 5, seed=1), drawn(3, 4, seed=2)

    def cost(self, w: Tensor) -> Tensor:
        return F.cross_entropy(torch.tanh(batch_norm(self.x @ w.T)) @ self.v.T, self.y)

    def of_unit(self, w: Tensor, j: int = 2) -> Tensor:
        return self.cost(torch.cat([self.w[:j], w[None], self.w[j + 1 :]]))


def test_the_norm_of_a_trained_layer_grows_by_equation_19_exactly():
    net, lr, steps = Network(), 0.7, 40
    w, norms, slopes = net.w[2].clone(), [], []
    for _ in range(steps):
        leaf = w.clone().requires_grad_()
        (g,) = torch.autograd.grad(net.of_unit(leaf), leaf)
        norms.append(float(w.norm()))
        slopes.append(float(g.norm() * w.norm()))
        w = w - lr * g
    predicted = norm_growth(lr, steps, norm=norms[0], gradient=slopes)
    assert predicted[:-1] == pytest.approx(norms, rel=1e-12)
    assert predicted[-1] == pytest.approx(float(w.norm()), rel=1e-12)


@pytest.mark.parametrize(("lr", "norm", "slope"), [(0.05, 1.0, 1.0), (0.5, 2.0, 0.5)])
def test_the_decay_law_follows_from_equation_19_where_the_gradient_stays_the_same(lr, norm, slope):
    k0 = decay_time(lr, norm=norm, gradient=slope)
    steps = int(20 * k0)
    norms = norm_growth(lr, steps, norm=norm, gradient=slope)
    rates, k = effective_lr(lr, norms), np.arange(steps + 1)
    np.testing.assert_allclose(rates, implicit_decay(k, k0, start=rates[0]), rtol=0.01)
    np.testing.assert_allclose(norms, norm * (1 + k / k0) ** 0.25, rtol=0.005)
    fitted = fit_norms(k, norms, lr=lr)
    assert (fitted.k0, fitted.e0) == pytest.approx((k0, rates[0]), rel=0.01)
    assert fitted.r2 > 0.9999


def test_fitting_norms_is_fitting_through_changes_of_the_learning_rate():
    lr = np.repeat([0.2, 0.02, 0.1], 400)
    norms = norm_growth(lr, len(lr), norm=2.0)
    k = np.arange(len(lr))
    # A norm belongs to the steps before it.
    fitted = fit_norms(k, norms[1:], lr=lr)
    assert fitted.k0 == pytest.approx(decay_time(0.2, norm=2.0), rel=0.02)


def test_a_layer_that_does_not_move_does_not_decay():
    assert decay_time(0.0) == math.inf
    assert implicit_decay([0, 10], math.inf).tolist() == [1.0, 1.0]
    assert norm_growth(0.0, 3, norm=2.0).tolist() == [2.0] * 4
    assert fit_norms(range(5), [2.0] * 5).k0 == math.inf


def test_figure_6_ends_on_one_trend_whatever_the_explicit_learning_rate():
    found = figure6(steps=4000)
    assert found.norms.shape == found.rates.shape == (4, 4001)
    for alpha, norms, rates in zip(found.lr, found.norms, found.rates, strict=True):
        squares, literal = 1.0, [1.0]
        for _ in range(4000):
            squares = squares + alpha**2 / squares
            literal.append(math.sqrt(squares))
        np.testing.assert_allclose(norms, literal, rtol=1e-12)
        np.testing.assert_allclose(rates, alpha / np.square(literal), rtol=1e-12)
    assert found.rates[1:, -1] * math.sqrt(2 * 4000) == pytest.approx(1, abs=0.02)
    assert found.rates[:, 0] == pytest.approx(found.lr)
    assert (np.diff(found.norms, axis=0) > 0)[:, 1:].all()  # larger rates have larger norms throughout


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (lambda: norm_growth(0.1, -1), "`steps` must be a whole number ≥ 0"),
        (lambda: norm_growth(0.1, 3, norm=0.0), "`norm` must be a finite number > 0"),
        (lambda: norm_growth([0.1, 0.2], 3), r"shape \(2,\)"),
        (lambda: norm_growth(math.nan, 3), "`lr` must be one finite number ≥ 0"),
        (lambda: decay_time(-1.0), "`lr` must .* got -1.0"),
        (lambda: implicit_decay([1], 0.0), "`k0` must .* got 0.0"),
        (lambda: figure6((0.1, -1.0)), "learning rates > 0"),
        (lambda: effective_lr(0.1, 1.0, momentum=1.0), "`momentum` must .* got 1.0"),
    ],
)
def test_what_makes_no_sense_is_refused(asked, says):
    with pytest.raises(DynamicsError, match=says):
        asked()
