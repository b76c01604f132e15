"""Decay and L2 beside torch.optim, where they are one and where they are not, and equations 23 to 25."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from gyroscope.errors import DynamicsError
from gyroscope.theory.adaptive import adagrad, adam, rmsprop
from gyroscope.theory.decay import disagreement, norm_of, preconditioned, sgd, with_decay, with_l2, with_norm
from gyroscope.theory.equilibrium import (
    figure7,
    fixed_point,
    norm_squares,
    rate_at_rest,
    square_at_rest,
    steps_to_rest,
)

LR, DECAY = 0.05, 0.3


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def matrix(size: int = 5) -> torch.Tensor:
    a = noise(size, size, seed=3)
    return a @ a.T + torch.eye(size, dtype=torch.float64)


def run(rule, steps: int = 25) -> torch.Tensor:
    w, state = noise(5, seed=1), None
    for g in noise(steps, 5):
        w, state = rule(w, g, state)
    return w


def run_torch(build) -> torch.Tensor:
    w = torch.nn.Parameter(noise(5, seed=1))
    optimizer = build([w])
    for g in noise(25, 5):
        w.grad = g.clone()
        optimizer.step()
    return w.detach()


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


TORCH = {
    "sgd": (
        with_l2(partial(sgd, lr=LR), decay=DECAY),
        partial(torch.optim.SGD, lr=LR, weight_decay=DECAY),
    ),
    "momentum": (
        with_l2(partial(sgd, lr=LR, momentum=0.9), decay=DECAY),
        partial(torch.optim.SGD, lr=LR, momentum=0.9, weight_decay=DECAY),
    ),
    "adam": (
        with_l2(partial(adam, lr=LR), decay=DECAY),
        partial(torch.optim.Adam, lr=LR, weight_decay=DECAY),
    ),
    "adamw": (
        with_decay(partial(adam, lr=LR), lr=LR, decay=DECAY),
        partial(torch.optim.AdamW, lr=LR, weight_decay=DECAY),
    ),
    "rmsprop": (
        with_l2(partial(rmsprop, lr=LR, inside=False), decay=DECAY),
        partial(torch.optim.RMSprop, lr=LR, weight_decay=DECAY),
    ),
    "adagrad": (
        with_l2(partial(adagrad, lr=LR, inside=False), decay=DECAY),
        partial(torch.optim.Adagrad, lr=LR, weight_decay=DECAY),
    ),
}


@pytest.mark.parametrize(("rule", "build"), TORCH.values(), ids=TORCH)
def test_a_rule_with_decay_or_l2_is_torchs(rule, build):
    assert gap(run(rule), run_torch(build)) < 1e-13


def test_decay_and_l2_are_one_under_gradient_descent():
    base = partial(sgd, lr=LR)
    assert gap(run(with_decay(base, lr=LR, decay=DECAY)), run(with_l2(base, decay=DECAY))) < 1e-14


def test_a_decay_that_is_not_multiplied_by_the_rate_is_l2_scaled_by_it():
    base = partial(sgd, lr=LR)
    assert gap(run(with_decay(base, lr=LR, decay=LR * DECAY, by_rate=False)), run(with_l2(base, decay=DECAY))) < 1e-14
    assert gap(run(with_decay(base, lr=LR, decay=DECAY, by_rate=False)), run(with_l2(base, decay=DECAY))) > 0.1


@pytest.mark.parametrize(
    "base",
    [partial(adam, lr=LR), partial(rmsprop, lr=LR), partial(adagrad, lr=LR), partial(sgd, lr=LR, momentum=0.9)],
    ids=["adam", "rmsprop", "adagrad", "momentum"],
)
def test_decay_and_l2_are_two_things_under_rules_that_remember(base):
    assert gap(run(with_decay(base, lr=LR, decay=DECAY)), run(with_l2(base, decay=DECAY))) > 0.02


def test_adam_with_l2_shrinks_by_the_sign_of_a_weight_where_the_loss_is_flat():
    # λw/√(λ²w²): every weight loses α, the small ones as much as the large ones. Decay takes a share of each.
    w, zero = torch.tensor([1.0, 100.0], dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    l2, _ = with_l2(partial(adam, lr=LR, eps=0.0), decay=DECAY)(w, zero, None)
    torch.testing.assert_close(w - l2, torch.full_like(w, LR))
    decayed, _ = with_decay(partial(adam, lr=LR), lr=LR, decay=DECAY)(w, zero, None)
    torch.testing.assert_close(decayed, (1 - LR * DECAY) * w)


def test_decay_is_l2_in_the_norm_of_the_preconditioner_and_not_in_the_plain_one():
    C = matrix()
    base = partial(preconditioned, lr=LR, solve=lambda v: torch.linalg.solve(C, v))
    decayed = run(with_decay(base, lr=LR, decay=DECAY))
    assert gap(decayed, run(with_norm(base, decay=DECAY, product=lambda v: C @ v))) < 1e-13
    assert gap(decayed, run(with_l2(base, decay=DECAY))) > 0.05


def test_the_penalty_of_equation_27_has_the_gradient_that_the_rule_is_given():
    C, w = matrix(), noise(5, seed=2).requires_grad_()
    (0.5 * DECAY * norm_of(w, lambda v: C @ v) ** 2).backward()
    torch.testing.assert_close(w.grad, DECAY * C @ w.detach())


def test_one_step_of_decay_and_of_l2_differ_by_what_is_said():
    C, w, g = matrix(), noise(5, seed=2), noise(5, seed=4)
    solve = lambda v: torch.linalg.solve(C, v)  # noqa: E731
    base = partial(preconditioned, lr=LR, solve=solve)
    decayed, _ = with_decay(base, lr=LR, decay=DECAY)(w, g, None)
    penalized, _ = with_l2(base, decay=DECAY)(w, g, None)
    torch.testing.assert_close(decayed - penalized, disagreement(w, solve, lr=LR, decay=DECAY))
    assert not disagreement(w, lambda v: v, lr=LR, decay=DECAY).any()


def test_an_indefinite_matrix_has_no_norm():
    with pytest.raises(DynamicsError, match="positive semi-definite"):
        norm_of(torch.ones(2), lambda v: -v)


@pytest.mark.parametrize("lr", [1e-2, 0.3, 0.9])
@pytest.mark.parametrize("start", [0.3, 3.0])
def test_the_recurrence_ends_at_its_fixed_point_wherever_it_starts(lr, start):
    at = fixed_point(lr, 1.0, gradient=2.0)
    squares = norm_squares(lr, 1.0, 2000, start=start, gradient=2.0)
    assert squares[-1] == pytest.approx(at.square, rel=1e-12)
    assert lr / squares[-1] == pytest.approx(at.rate, rel=1e-12)


@pytest.mark.parametrize("share", [0.01, 0.2, 0.7])
def test_a_small_distance_from_the_fixed_point_shrinks_by_the_contraction(share):
    at = fixed_point(share, 1.0)
    squares = norm_squares(share, 1.0, 3, start=at.square**0.5 * (1 + 1e-7))
    assert np.diff(squares)[1:] / np.diff(squares)[:-1] == pytest.approx(at.contraction, rel=1e-3, abs=1e-6)


def test_equations_24_and_25_are_first_order_in_the_product():
    for lr in (1e-1, 1e-2, 1e-3):
        at = fixed_point(lr, 0.5, gradient=3.0)
        assert at.square == pytest.approx(square_at_rest(lr, 0.5, gradient=3.0), rel=lr * 0.5)
        ratio = rate_at_rest(lr, 0.5, gradient=3.0) / at.rate
        assert ratio**2 == pytest.approx(1 / (1 - lr * 0.5 / 2), rel=1e-12)


def test_half_of_a_small_distance_is_gone_after_the_steps_to_rest():
    lr, decay = 0.1, 0.01
    at, half = fixed_point(lr, decay), round(steps_to_rest(lr, decay))
    squares = norm_squares(lr, decay, half, start=(1.001 * at.square) ** 0.5)
    assert (squares[-1] - at.square) / (squares[0] - at.square) == pytest.approx(0.5, rel=5e-3)
    assert steps_to_rest(lr, decay, within=0.01) == pytest.approx(np.log2(100) * steps_to_rest(lr, decay))


def test_the_recurrence_is_that_of_vectors_that_step_at_a_right_angle():
    lr, decay, w = 0.2, 0.5, np.array([0.6, 0.8, 0.0])
    found = [w @ w]
    draw = np.random.default_rng(0)
    for _ in range(50):
        way = np.cross(w, draw.standard_normal(3))
        gradient = 1.5 * way / np.linalg.norm(way) / np.linalg.norm(w)
        w = (1 - lr * decay) * w - lr * gradient
        found.append(w @ w)
    assert norm_squares(lr, decay, 50, gradient=1.5) == pytest.approx(np.array(found), rel=1e-12)


def test_figure_7_levels_off_at_equation_25_and_at_one_value_only_where_the_product_is_one():
    apart = figure7([0.01, 0.1, 1.0], decay=0.02, steps=20_000)
    assert apart.rate[:, -1] == pytest.approx(apart.exact, rel=1e-6)
    assert apart.rate[:, -1] == pytest.approx(apart.limit, rel=0.01)
    assert apart.limit == pytest.approx(np.sqrt(2 * np.array([0.01, 0.1, 1.0]) * 0.02))
    together = figure7([0.01, 0.1, 1.0], product=2e-3, steps=20_000)
    assert np.ptp(together.rate[:, -1]) < 1e-9
    assert together.rate[:, 0] == pytest.approx([0.01, 0.1, 1.0])
    assert np.allclose(apart.rate * apart.norm**2, apart.lr[:, None], rtol=1e-12)


def test_without_decay_the_rate_of_any_alpha_falls_along_one_curve():
    rates = [lr / norm_squares(lr, 0.0, 10_000)[-1] for lr in (0.1, 1.0)]
    assert rates == pytest.approx([(2 * 10_000) ** -0.5] * 2, rel=0.01)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: with_decay(sgd, lr=0.5, decay=2.0), "must be < 1, got 0.5 · 2 = 1"),
        (lambda: with_decay(sgd, lr=0.1, decay=1.0, by_rate=False), "must be < 1, got 1 · 1 = 1"),
        (lambda: norm_squares(1.0, 1.5, 10), "must be < 1, got 1 · 1.5 = 1.5"),
        (lambda: fixed_point(2.0, 0.5), "must be < 1, got 2 · 0.5 = 1"),
        (
            lambda: fixed_point(0.1, 0.0),
            "`decay` must be > 0 for an equilibrium, got 0: without decay the norm grows forever",
        ),
        (lambda: square_at_rest(0.1, 0.0), "`decay` must be > 0 for an equilibrium"),
        (lambda: rate_at_rest(0.1, 0.0), "`decay` must be > 0 for an equilibrium"),
        (lambda: steps_to_rest(0.1, 0.0), "`decay` must be > 0 for an equilibrium"),
        (lambda: figure7(decay=0.0, steps=1), "`decay` must be > 0 for an equilibrium"),
        (lambda: rate_at_rest(0.0, 0.1), "`lr` must be > 0 for an equilibrium"),
        (lambda: fixed_point(0.1, 0.1, gradient=0.0), "`gradient` must be > 0 for an equilibrium"),
        (lambda: with_l2(sgd, decay=-1.0), "`decay` must .* got -1.0"),
        (lambda: norm_squares(0.1, 0.1, 10, start=0.0), "`start` must be a finite number > 0"),
        (lambda: norm_squares(0.1, 0.1, -1), "`steps` must .* got -1"),
        (lambda: steps_to_rest(0.1, 0.1, within=1.0), "`within` must .* got 1.0"),
        (lambda: figure7([0.1], decay=0.1, product=0.1), "got both"),
        (lambda: figure7([]), r"`rates` must .* got \[\]"),
    ],
)
def test_where_decay_has_no_meaning_it_is_said_why(call, says):
    with pytest.raises(DynamicsError, match=says):
        call()
