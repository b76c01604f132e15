"""Initializers have the distributions of their names, and do not use the caller's random state."""

from math import erf, exp, pi, sqrt

import pytest
import torch
from scipy import stats
from torch import nn

from gyroscope_lab.models.initialization import (
    INITIALIZERS,
    glorot_uniform_,
    he_normal_fan_out_,
    he_normal_truncated_,
    he_uniform_,
    initialized,
    orthogonal_,
)

# [outputs, inputs, *kernel] -> fan_in, fan_out, counted by hand
SHAPES = {(64, 32, 3, 3): (288, 576), (500, 64): (64, 500), (64, 100, 1, 3): (300, 192)}
DISTRIBUTIONS = {
    "he_uniform": lambda fan_in, fan_out: _uniform(sqrt(6 / fan_in)),
    "glorot_uniform": lambda fan_in, fan_out: _uniform(sqrt(6 / (fan_in + fan_out))),
    "uniform": lambda fan_in, fan_out: _uniform(1 / sqrt(fan_in)),
    "he_normal": lambda fan_in, fan_out: stats.norm(scale=sqrt(2 / fan_in)),
    "he_normal_fan_out": lambda fan_in, fan_out: stats.norm(scale=sqrt(2 / fan_out)),
    "he_normal_truncated": lambda fan_in, fan_out: stats.truncnorm(-2, 2, scale=sqrt(2 / fan_in)),
}


def _uniform(bound):
    return stats.uniform(-bound, 2 * bound)


def _drawn(name, shape, seed=3):
    return INITIALIZERS[name](torch.full(shape, torch.nan), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_weights_follow_the_distribution_of_their_initializer(name, shape):
    expected = DISTRIBUTIONS[name](*SHAPES[shape])
    drawn = _drawn(name, shape).double().flatten().numpy()
    assert stats.kstest(drawn, expected.cdf).pvalue > 0.01
    assert drawn.mean() == pytest.approx(0, abs=4 * expected.std() / sqrt(drawn.size))
    assert drawn.std() == pytest.approx(expected.std(), rel=0.02)


@pytest.mark.parametrize("name", ["he_uniform", "glorot_uniform", "uniform", "he_normal_truncated"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bounded_weights_fill_their_interval_and_no_more(name, shape):
    low, high = DISTRIBUTIONS[name](*SHAPES[shape]).support()
    weight = _drawn(name, shape)
    assert weight.min() >= torch.tensor(low)
    assert weight.max() <= torch.tensor(high)
    assert weight.min() < 0.99 * low
    assert weight.max() > 0.99 * high


def test_truncation_at_two_deviations_leaves_0_8796_of_one():
    density = exp(-2) / sqrt(2 * pi)
    left = sqrt(1 - 4 * density / erf(sqrt(2)))
    assert left == pytest.approx(0.8796, abs=1e-4)
    weight = he_normal_truncated_(torch.empty(1000, 1000), generator=torch.Generator().manual_seed(0))
    assert weight.std().item() == pytest.approx(left * sqrt(2 / 1000), rel=0.003)


def test_the_tails_of_truncation_are_not_heaped_at_its_bounds():
    weight = he_normal_truncated_(torch.empty(1000, 1000), generator=torch.Generator().manual_seed(0))
    bound = 2 * sqrt(2 / 1000)
    share = (weight.abs() > 0.99 * bound).double().mean().item()
    expected = 2 * stats.truncnorm(-2, 2).sf(1.98)
    assert share == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5), (8, 3, 3, 3), (30, 2, 3, 3)], ids=str)
def test_orthogonal_weights_keep_lengths_of_the_smaller_side(shape):
    weight = orthogonal_(torch.empty(shape), generator=torch.Generator().manual_seed(0)).flatten(1).double()
    gram = weight @ weight.T if weight.shape[0] <= weight.shape[1] else weight.T @ weight
    torch.testing.assert_close(gram, torch.eye(len(gram), dtype=torch.float64), rtol=0, atol=1e-5)


def test_orthogonal_weights_prefer_no_sign():
    generator = torch.Generator().manual_seed(0)
    corners = torch.stack([orthogonal_(torch.empty(3, 3), generator=generator)[0, 0] for _ in range(400)])
    assert (corners > 0).double().mean().item() == pytest.approx(0.5, abs=0.1)


def test_a_convolution_in_groups_sums_over_the_channels_of_its_group():
    grouped = nn.Conv2d(32, 64, 3, groups=4, bias=False).weight
    weight = he_uniform_(grouped, generator=torch.Generator().manual_seed(0))
    bound = sqrt(6 / (8 * 9))
    assert 0.99 * bound < weight.abs().max() <= bound


def test_fans_count_the_kernel():
    def largest(initializer, *shape):
        return initializer(torch.empty(shape), generator=torch.Generator().manual_seed(0)).abs().max().item()

    assert largest(glorot_uniform_, 100, 50, 5, 5) == pytest.approx(sqrt(6 / (25 * 150)), rel=1e-3)
    fan_out = he_normal_fan_out_(torch.empty(100, 50, 5, 5), generator=torch.Generator().manual_seed(0))
    assert fan_out.std().item() == pytest.approx(sqrt(2 / (25 * 100)), rel=0.01)


@pytest.mark.parametrize("name", INITIALIZERS)
def test_equal_generators_give_equal_weights_in_place_and_leave_the_random_state_alone(name):
    before = torch.get_rng_state()
    first, again, other = (_drawn(name, (20, 10), seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    weight = nn.Parameter(torch.empty(20, 10))
    assert INITIALIZERS[name](weight, generator=torch.Generator().manual_seed(1)) is weight
    assert torch.equal(weight, first)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_is_drawn_in_the_order_of_its_layers_and_its_biases_are_zero():
    model = initialized(
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(27, 4)),
        generator=torch.Generator().manual_seed(5),
        initializer=he_uniform_,
        linear=glorot_uniform_,
    )
    generator = torch.Generator().manual_seed(5)
    assert torch.equal(model[0].weight, he_uniform_(torch.empty(3, 2, 3, 3), generator=generator))
    assert torch.equal(model[3].weight, glorot_uniform_(torch.empty(4, 27), generator=generator))
    assert model[0].bias.tolist() == [0.0] * 3
    assert model[3].bias.tolist() == [0.0] * 4
    assert model[1].weight.tolist() == [1.0] * 3
