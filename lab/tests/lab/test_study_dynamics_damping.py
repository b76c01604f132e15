"""The statements of section 5.2 on a network with batch normalization, whose curvature is formed exactly."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gyroscope.conditioning.fisher import fisher
from gyroscope_lab.papers.dynamics.mechanism2 import (
    balance_scale,
    curvature_shares,
    damped_step,
    effective_damping,
    first_order_cosine,
    first_order_rate,
    rescaled,
)


def measured(scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The weights of a layer before batch normalization, multiplied by `scale`, their curvature and their gradient."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(4, 3, bias=False), nn.BatchNorm1d(3, eps=1e-30, affine=False), nn.ReLU(), nn.Linear(3, 3)
    ).double()
    net[0].weight.data *= scale
    x, y = torch.randn(12, 4, dtype=torch.float64), torch.arange(12) % 3
    G = fisher(net, cross_entropy, (x, y), layers="0*").matrix
    [gradient] = torch.autograd.grad(cross_entropy(net(x), y), net[0].weight)
    assert G is not None
    return net[0].weight.detach().flatten(), G, gradient.flatten()


@pytest.fixture(scope="module")
def here() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return measured(1.0)


@pytest.mark.parametrize("scale", [0.2, 5.0])
def test_a_network_with_normalization_rescales_as_is_said(here, scale):
    _, G, gradient = here
    w, there, its = measured(scale)
    torch.testing.assert_close(w, scale * here[0])
    torch.testing.assert_close((there, its), rescaled(G, gradient, scale=scale), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("scale", [0.2, 5.0])
def test_the_step_at_larger_weights_is_that_of_a_larger_damping(here, scale):
    w, G, gradient = here
    large, there, its = measured(scale)
    step = damped_step(there, its, damping=0.1)
    expected = damped_step(G, gradient, damping=effective_damping(0.1, scale=scale))
    torch.testing.assert_close(step / large.norm(), expected / w.norm(), rtol=1e-9, atol=1e-12)


def test_without_damping_the_norm_makes_no_difference(here):
    _, G, gradient = here
    # Curvature is zero along the rows of w, where it has no inverse.
    exact = torch.linalg.pinv(G, rtol=1e-10, hermitian=True) @ gradient
    there, its = rescaled(G, gradient, scale=7.0)
    torch.testing.assert_close(torch.linalg.pinv(there, rtol=1e-10, hermitian=True) @ its, 7.0 * exact)


def test_growing_weights_make_damped_steps_gradient_descent(here):
    w, G, gradient = here
    cosines = [first_order_cosine(G, gradient, damping=1e-3, scale=s) for s in (0.1, 1.0, 10.0, 100.0, 1000.0)]
    assert cosines == sorted(cosines)
    assert cosines[0] < 0.8
    assert cosines[-1] == pytest.approx(1.0, abs=1e-6)
    there, its = rescaled(G, gradient, scale=1e5)
    # In units of the weights' norm, and for the gradient at the unit vector.
    moved = damped_step(there, its, damping=1e-3) / (1e5 * w.norm())
    rate = first_order_rate(1.0, damping=1e-3, norm=1e5 * float(w.norm()))
    torch.testing.assert_close(moved, rate * gradient * w.norm(), rtol=1e-3, atol=1e-9)


def test_the_shares_say_what_is_left_of_newtons_step(here):
    _, G, gradient = here
    values, vectors = torch.linalg.eigh(G)
    seen = values > 1e-8
    newton = (vectors.T @ gradient)[seen] / values[seen]
    there, its = rescaled(G, gradient, scale=3.0)
    step = (vectors.T @ damped_step(there, its, damping=0.01) / 3.0)[seen]
    shares = curvature_shares(values.clamp_min(0), damping=0.01, scale=3.0)[seen]
    torch.testing.assert_close(step, shares * newton, rtol=1e-8, atol=1e-12)
    assert (shares < curvature_shares(values[seen], damping=0.01)).all()


def test_at_the_balance_half_of_newtons_step_is_left():
    eigenvalue = torch.tensor([0.37], dtype=torch.float64)
    scale = balance_scale(0.37, damping=0.02)
    assert curvature_shares(eigenvalue, damping=0.02, scale=scale).item() == pytest.approx(0.5)


def test_directions_without_curvature_have_no_share_even_without_damping():
    assert curvature_shares(torch.tensor([0.0, 2.0]), damping=0.0).tolist() == [0.0, 1.0]


def test_only_the_second_factor_of_k_fac_changes_with_the_norm():
    torch.manual_seed(1)
    x, head = torch.randn(50, 4, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    w = torch.randn(3, 4, dtype=torch.float64)

    def factors(scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        s = (x @ (scale * w).T).requires_grad_()
        normalized = (s - s.mean(0)) / s.std(0, correction=0)
        [g] = torch.autograd.grad((normalized.relu() @ head).square().sum(), s)
        return x.T @ x, g.T @ g

    (A, S), (A_there, S_there) = factors(1.0), factors(4.0)
    torch.testing.assert_close(A_there, A)
    torch.testing.assert_close(S_there, S / 16)
