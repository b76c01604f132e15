"""The rules beside torch.optim, and the identities of section 2."""

from __future__ import annotations

import pytest
import torch

from gyroscope.errors import DynamicsError
from gyroscope.theory.adaptive import Sum, adagrad, adagrad_as_rmsprop, adam, rmsprop

STEPS = 30


def gradients(steps: int = STEPS, size: int = 7) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    scales = torch.logspace(-6, 3, size, dtype=torch.float64)
    return torch.randn(steps, size, dtype=torch.float64, generator=generator) * scales


def of_torch(optimizer: torch.optim.Optimizer, w: torch.nn.Parameter) -> torch.Tensor:
    path = []
    for g in gradients():
        w.grad = g.clone()
        optimizer.step()
        path.append(w.detach().clone())
    return torch.stack(path)


def of_rule(rule, **options) -> torch.Tensor:
    w, state, path = torch.ones(7, dtype=torch.float64), None, []
    for g in gradients():
        w, state = rule(w, g, state, **options)
        path.append(w)
    assert state.step == STEPS
    return torch.stack(path)


@pytest.mark.parametrize(
    ("rule", "options", "peer", "names"),
    [
        (rmsprop, {"lr": 0.01, "beta": 0.9, "eps": 1e-3}, torch.optim.RMSprop, {"alpha": 0.9}),
        (adagrad, {"lr": 0.1, "eps": 1e-3}, torch.optim.Adagrad, {}),
        (adam, {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-3}, torch.optim.Adam, {"betas": (0.8, 0.95)}),
    ],
    ids=["rmsprop", "adagrad", "adam"],
)
def test_a_rule_with_epsilon_beside_the_root_is_torchs_to_the_last_digits(rule, options, peer, names):
    w = torch.nn.Parameter(torch.ones(7, dtype=torch.float64))
    theirs = of_torch(peer([w], lr=options["lr"], eps=options["eps"], **names), w)
    torch.testing.assert_close(of_rule(rule, **options, inside=False), theirs, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("rule", [rmsprop, adagrad, adam])
def test_epsilon_under_the_root_acts_as_its_own_root_beside_it_where_the_gradient_is_zero(rule):
    w, g = torch.ones(1, dtype=torch.float64), torch.full((1,), 1e-9, dtype=torch.float64)
    under, _ = rule(w, g, lr=1.0, eps=1e-4, inside=True)
    beside, _ = rule(w, g, lr=1.0, eps=1e-2, inside=False)
    assert float(w - under) == pytest.approx(1e-7, rel=1e-5)
    torch.testing.assert_close(under, beside, rtol=1e-12, atol=0)


@pytest.mark.parametrize("inside", [True, False])
def test_adagrad_is_rmsprop_with_a_rate_that_falls_as_one_over_the_root_of_k(inside):
    w, state, path = torch.ones(7, dtype=torch.float64), None, []
    for k, g in enumerate(gradients(), start=1):
        pace = adagrad_as_rmsprop(k, lr=0.1, eps=1e-3, inside=inside)
        w, state = rmsprop(w, g, state, **pace._asdict(), inside=inside)
        path.append(w)
    expected = of_rule(adagrad, lr=0.1, eps=1e-3, inside=inside)
    torch.testing.assert_close(torch.stack(path), expected, rtol=1e-12, atol=1e-13)


def test_steps_of_equal_gradients_are_alpha_under_adam_and_fall_as_one_over_the_root_of_k_under_adagrad():
    g = torch.tensor([1e-3, -40.0], dtype=torch.float64)
    a = b = torch.zeros(2, dtype=torch.float64)
    of_a = of_b = None
    for k in range(1, 50):
        (a, of_a), before_a = adam(a, g, of_a, lr=0.1, eps=0.0), a
        (b, of_b), before_b = adagrad(b, g, of_b, lr=0.1, eps=0.0), b
        torch.testing.assert_close(before_a - a, 0.1 * g.sign(), rtol=1e-12, atol=0)
        torch.testing.assert_close(before_b - b, 0.1 / k**0.5 * g.sign(), rtol=1e-12, atol=0)


def test_rmsprop_from_a_settled_mean_moves_every_element_by_alpha():
    g = torch.tensor([1e-5, 1.0, 1e5], dtype=torch.float64)
    w, _ = rmsprop(torch.zeros_like(g), g, Sum(1000, g * g), lr=1e-3, eps=0.0)
    torch.testing.assert_close(w, torch.full_like(g, -1e-3), rtol=1e-12, atol=0)


def test_nothing_given_is_changed():
    w, g = torch.ones(3), torch.ones(3)
    _, state = adam(w, g, lr=0.1)
    kept = [t.clone() for t in (w, g, state.mean, state.square)]
    adam(w, g, state, lr=0.1)
    assert all(torch.equal(a, b) for a, b in zip(kept, (w, g, state.mean, state.square), strict=True))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda w: rmsprop(w, w, lr=-1.0), "`lr` must .* got -1.0"),
        (lambda w: rmsprop(w, w, lr=0.1, beta=1.0), "`beta` must .* got 1.0"),
        (lambda w: adagrad(w, w, lr=0.1, eps=float("nan")), "`eps` must .* got nan"),
        (lambda w: adam(w, w, lr=0.1, betas=(0.9, 1.5)), "`beta2` must .* got 1.5"),
        (lambda w: adagrad_as_rmsprop(0, lr=0.1), "`k` must be a whole number ≥ 1, got 0"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(call, says):
    with pytest.raises(DynamicsError, match=says):
        call(torch.ones(2))
