"""The variance of log v, taken apart: against all elements at once, for optimizers and for recorded runs."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import gyroscope
from gyroscope.errors import DynamicsError
from gyroscope.theory.moment_variance import optimizer_shares, recorded_shares, share_between, variance_shares


def lognormal(*layers: tuple[float, float, int]) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [(m + s * torch.randn(n, dtype=torch.float64, generator=draw)).exp() for m, s, n in layers]


def test_between_and_within_add_up_to_the_variance_of_all_elements():
    layers = lognormal((-8.0, 1.0, 300), (-5.0, 0.5, 100), (-6.0, 1.5, 50))
    found = variance_shares(layers)
    assert found.total == pytest.approx(float(torch.cat(layers).log().var(correction=0)))
    assert (found.layers, found.elements, found.zeros) == (3, 450, 0)
    replaced = [torch.full_like(v, v.log().mean().exp().item()) for v in layers]
    assert found.between == pytest.approx(float(torch.cat(replaced).log().var(correction=0)))


def test_layers_can_count_alike_whatever_their_size():
    large, small = lognormal((0.0, 1.0, 5000), (4.0, 2.0, 500))
    twice = variance_shares([large, small.repeat(10)])
    found = variance_shares([large, small], counting="layers")
    assert (found.between, found.within) == pytest.approx((twice.between, twice.within))
    assert found.share != pytest.approx(variance_shares([large, small]).share, rel=0.1)


def test_percentiles_tell_nearly_the_same_share():
    layers = lognormal((-8.0, 1.0, 4000), (-5.0, 0.5, 4000), (-6.0, 1.5, 4000))
    percentiles = np.stack([np.percentile(v.numpy(), [10, 50, 90]) for v in layers])
    assert share_between(percentiles) == pytest.approx(variance_shares(layers).share, abs=0.02)


def test_elements_without_a_gradient_are_counted_and_left_out():
    a, b = lognormal((-3.0, 1.0, 50), (0.0, 1.0, 50))
    found = variance_shares([torch.cat([a, torch.zeros(7, dtype=torch.float64)]), b, torch.zeros(3)])
    assert (found.zeros, found.layers) == (10, 2)
    assert found.share == variance_shares([a, b]).share


def test_moments_that_are_all_the_same_have_no_share():
    assert math.isnan(variance_shares([torch.ones(3), torch.ones(4)]).share)


@pytest.mark.parametrize(
    ("build", "moment"),
    [
        (partial(torch.optim.Adam, betas=(0.9, 0.9)), lambda g: 0.1 * (0.9 * g[0] ** 2 + g[1] ** 2)),
        (partial(torch.optim.RMSprop, alpha=0.9), lambda g: 0.1 * (0.9 * g[0] ** 2 + g[1] ** 2)),
        (torch.optim.Adagrad, lambda g: g[0] ** 2 + g[1] ** 2),
    ],
    ids=["adam", "rmsprop", "adagrad"],
)
def test_the_shares_of_an_optimizer_are_those_of_the_gradients_it_saw(build, moment):
    params = [nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(5))]
    optimizer, seen = build(params), []
    torch.manual_seed(0)
    for _ in range(2):
        for p, scale in zip(params, (0.01, 3.0), strict=True):
            p.grad = scale * torch.randn_like(p)
        seen.append([p.grad.double() for p in params])
        optimizer.step()
    expected = variance_shares([moment(pair) for pair in zip(*seen, strict=True)])
    found = optimizer_shares(optimizer)
    assert (found.between, found.within) == pytest.approx((expected.between, expected.within), rel=1e-4)
    assert found.share > 0.8
    assert optimizer_shares(optimizer, params[:1]).between == 0


def test_asking_leaves_no_trace_in_the_optimizer():
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([a, b])
    a.grad = torch.tensor([1.0, 2.0])
    optimizer.step()
    assert optimizer_shares(optimizer).layers == 1
    assert b not in optimizer.state


def test_a_recorded_run_tells_the_share_of_the_percentiles_it_holds(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 40))
    optimizer = torch.optim.Adam(model.parameters())
    layers = [layer.parameter for layer in gyroscope.layers(model)]
    seen = []
    with gyroscope.watch(model, optimizer, tmp_path / "run", every=1, detail_every=1, budget=None):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(256, 20)).square().mean().backward()
            optimizer.step()
            seen.append([np.percentile(optimizer.state[p]["exp_avg_sq"], [10, 50, 90]) for p in layers])
    with gyroscope.load(tmp_path / "run") as run:
        course = recorded_shares(run)
    assert len(course.steps) == 3
    assert course.share == pytest.approx([share_between(np.stack(one)) for one in seen], rel=1e-4)
    assert 0 < course.share.min() < course.share.max() < 1


def test_steps_at_which_nothing_was_known_are_not_numbers():
    table = np.array([[np.nan, np.nan], [1.0, 4.0]])
    run = SimpleNamespace(
        quantities={"moment_p10", "moment_p50", "moment_p90"},
        where=lambda name: np.array([1, 2]),
        series=lambda name, steps: table,
    )
    share = recorded_shares(run).share
    assert math.isnan(share[0])
    assert share[1] == 1.0


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: variance_shares([]), "Take a step first"),
        (lambda: variance_shares([torch.tensor([-1.0])]), "finite numbers ≥ 0"),
        (lambda: variance_shares([torch.tensor([math.nan])]), "finite numbers ≥ 0"),
        (lambda: variance_shares([torch.ones(2)], counting="rows"), "`counting` must .* got 'rows'"),
        (lambda: optimizer_shares(torch.optim.SGD([nn.Parameter(torch.ones(2))])), "SGD holds no second moments"),
        (lambda: recorded_shares(SimpleNamespace(quantities={})), "holds no moment_p10, moment_p50, moment_p90"),
    ],
)
def test_what_has_no_second_moments_is_refused(call, says):
    with pytest.raises(DynamicsError, match=says):
        call()
