"""Predicted equilibria beside random walks of the rules themselves, and beside torch's optimizers on a real loss."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch

from gyroscope.errors import DynamicsError
from gyroscope.theory.adaptive import adam
from gyroscope.theory.decay import sgd, with_decay, with_l2
from gyroscope.theory.equilibrium import Equilibrium, approach, equilibrium, fixed_point, norm_squares, steps_until
from oracles.random_walk import random_walk

SIZE = 64
CASES = {
    "sgd": (
        with_l2(partial(sgd, lr=0.05), decay=0.04),
        equilibrium(0.05, 0.04, gradient=1.5),
        "sgd",
    ),
    "momentum": (
        with_l2(partial(sgd, lr=0.005, momentum=0.9), decay=0.04),
        equilibrium(0.005, 0.04, momentum=0.9, gradient=1.5),
        "sgd",
    ),
    "adamw": (
        with_decay(partial(adam, lr=0.01, betas=(0.9, 0.95), eps=0.0), lr=0.01, decay=0.1),
        equilibrium(0.01, 0.1, momentum=0.9, kind="adamw", gradient=math.sqrt(SIZE)),
        "adamw",
    ),
}


@pytest.mark.parametrize(("rule", "at", "kind"), CASES.values(), ids=CASES)
def test_walks_turn_by_the_predicted_angle_at_the_predicted_norm(rule, at, kind):
    walk = random_walk(rule, round(4 * at.half_life), start=at.norm, gradient=1.5, size=SIZE, walks=16)
    settled = round(1.5 * at.half_life)
    assert math.sqrt(np.square(walk.angle[settled:]).mean()) == pytest.approx(at.rate, rel=0.015)
    assert walk.norm[settled:].mean() == pytest.approx(at.norm, rel=0.02)


@pytest.mark.parametrize("away", [0.5, 2.0])
@pytest.mark.parametrize(("rule", "at", "kind"), CASES.values(), ids=CASES)
def test_walks_approach_the_equilibrium_as_predicted_and_in_the_predicted_time(rule, at, kind, away):
    steps = round(5 * at.half_life)
    walk = random_walk(rule, steps, start=away * at.norm, gradient=1.5, size=SIZE, walks=16)
    seen = walk.norm.mean(1)
    predicted = approach(at, np.arange(steps + 1), start=away * at.norm, kind=kind)
    # What momentum and second moments remember has to build up first: 10 and 20 steps' worth.
    assert np.abs(seen / predicted - 1)[40:].max() < 0.05
    arrived = int(np.argmax(np.abs(seen / at.norm - 1) <= 0.2))
    assert arrived == pytest.approx(steps_until(at, start=away * at.norm, within=0.2, kind=kind), rel=0.15)


def test_the_norm_of_plain_sgd_does_not_depend_on_where_gradients_point():
    rule = with_l2(partial(sgd, lr=0.1), decay=0.5)
    walk = random_walk(rule, 40, start=2.0, gradient=3.0, walks=2, agreement=0.9, size=5)
    expected = np.sqrt(norm_squares(0.1, 0.5, 40, start=2.0, gradient=3.0))
    assert walk.norm == pytest.approx(np.stack([expected, expected], axis=1), rel=1e-12)


def test_the_angle_of_plain_sgd_at_its_fixed_point_is_exact():
    lr, decay = 0.5, 0.2
    at = fixed_point(lr, decay)
    walk = random_walk(with_l2(partial(sgd, lr=lr), decay=decay), 10, start=math.sqrt(at.square))
    assert walk.angle == pytest.approx(math.acos(1 - lr * decay), rel=1e-9)


def test_the_rate_under_momentum_is_the_same_where_successive_gradients_agree():
    rule, at, _ = CASES["momentum"]
    walk = random_walk(rule, round(6 * at.half_life), start=1.5 * at.norm, walks=16, size=SIZE, agreement=0.9)
    assert math.sqrt(np.square(walk.angle[-round(3 * at.half_life) :]).mean()) == pytest.approx(at.rate, rel=0.03)


def test_the_correlation_of_successive_directions_is_the_agreement():
    seen = []

    def rule(w, g, state):
        seen.append(g)
        return w, None

    random_walk(rule, 300, size=400, agreement=0.7)
    cosines = [torch.cosine_similarity(a, b).item() for a, b in pairwise(seen)]
    assert np.mean(cosines) == pytest.approx(0.7, abs=0.01)
    assert torch.cat(seen).norm(dim=1).numpy() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("build", "at"),
    [
        (
            partial(torch.optim.SGD, lr=0.02, momentum=0.8, weight_decay=0.02),
            equilibrium(0.02, 0.02, momentum=0.8, gradient=math.sqrt(SIZE)),
        ),
        (
            partial(torch.optim.AdamW, lr=0.01, weight_decay=0.2, betas=(0.9, 0.98)),
            equilibrium(0.01, 0.2, momentum=0.9, kind="adamw", gradient=math.sqrt(SIZE)),
        ),
    ],
    ids=["momentum", "adamw"],
)
def test_torchs_optimizers_turn_a_layer_before_a_normalizer_by_the_predicted_angle(build, at: Equilibrium):
    # What a normalized unit sends on is w/‖w‖; noise pulls it in a new direction at every step.
    generator = torch.Generator().manual_seed(1)
    w = torch.randn(SIZE, dtype=torch.float64, generator=generator)
    w = torch.nn.Parameter(w * at.norm / w.norm())
    optimizer, squares = build([w]), []
    for _ in range(round(5 * at.half_life)):
        before = w.detach().clone()
        pull = torch.randn(SIZE, dtype=torch.float64, generator=generator)
        w.grad = torch.autograd.grad((pull * w / w.norm()).sum(), w)[0]
        optimizer.step()
        cosine = torch.cosine_similarity(before, w.detach(), dim=0)
        squares.append(math.acos(min(1.0, cosine.item())) ** 2)
    assert math.sqrt(np.mean(squares[-round(3 * at.half_life) :])) == pytest.approx(at.rate, rel=0.06)


def test_a_start_that_is_near_enough_takes_no_time():
    at = equilibrium(0.1, 0.01, gradient=1.0)
    assert steps_until(at, start=1.04 * at.norm) == 0
    k = steps_until(at, start=3 * at.norm, within=0.1)
    assert approach(at, k, start=3 * at.norm) == pytest.approx(1.1 * at.norm)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: equilibrium(0.1, 0.0), "nothing decays"),
        (lambda: equilibrium(0.0, 0.1), "nothing decays"),
        (lambda: equilibrium(2.0, 1.0, gradient=1.0), "must be < 1, got 2 · 1 = 2"),
        (lambda: equilibrium(10.0, 0.5, kind="adamw"), "must be < 1, got 10 · 0.5 = 5"),
        (lambda: approach(Equilibrium(0.0, math.inf, math.inf), 3, start=1.0), "nothing decays"),
        (lambda: steps_until(equilibrium(0.1, 0.1), start=1.0), "Give `gradient`"),
        (lambda: steps_until(equilibrium(0.1, 0.1, gradient=1.0), start=0.0), "`start` must .* got 0.0"),
        (lambda: steps_until(equilibrium(0.1, 0.1, gradient=1.0), start=1.0, within=0.0), "`within` must .* got 0.0"),
        (lambda: approach(equilibrium(0.1, 0.1, gradient=1.0), 1, start=1.0, kind="lion"), "`kind` must .* got 'lion'"),
    ],
)
def test_what_has_no_equilibrium_is_refused(call, says):
    with pytest.raises(DynamicsError, match=says):
        call()
