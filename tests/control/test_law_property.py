"""One step turns every layer by arctan ρ and keeps its norm, whatever its shape, dtype and scale."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gyroscope
from oracles.control import angle, distance, four_operations

CLAIM = settings(derandomize=True, deadline=None, max_examples=40)

# What one rounding to the dtype can change in a vector, relative to its length.
ROUNDING = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def draw(seed, shape, dtype, magnitude):
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (noise * magnitude).to(dtype)


def one_step(w, g, lr, **options):
    p = torch.nn.Parameter(w.clone())
    p.grad = g.clone()
    optimizer = gyroscope.Layca(torch.optim.SGD([p], lr=lr), **options)
    optimizer.step()
    return p.detach()


shapes = st.one_of(
    st.tuples(st.integers(2, 64), st.integers(1, 64)),
    st.tuples(st.integers(1, 16), st.integers(2, 16), st.integers(1, 9)),
    st.tuples(st.integers(2, 12), st.integers(1, 12), st.integers(1, 5), st.integers(1, 5)),
)
exponents = st.floats(-20, 20)
seeds = st.integers(0, 2**16)


@CLAIM
@given(shapes, st.sampled_from([torch.float32, torch.float64]), exponents, exponents, st.floats(-4, 0.5), seeds)
def test_a_layer_turns_by_arctan_rho_and_keeps_its_norm(shape, dtype, w_exponent, g_exponent, rho_exponent, seed):
    w = draw(seed, shape, dtype, 10**w_exponent)
    g = draw(seed + 1, shape, dtype, 10**g_exponent)
    rho = 10**rho_exponent
    new = one_step(w, g, rho)
    assert angle(w, new) == pytest.approx(math.atan(rho), rel=1e-3 if dtype == torch.float32 else 1e-9)
    assert float(new.double().norm()) == pytest.approx(float(w.double().norm()), rel=8 * ROUNDING[dtype])


@CLAIM
@given(shapes, st.sampled_from([torch.float32, torch.float64]), exponents, exponents, st.floats(-4, 0.5), seeds)
def test_the_new_weights_are_those_of_the_four_operations(shape, dtype, w_exponent, g_exponent, rho_exponent, seed):
    w = draw(seed, shape, dtype, 10**w_exponent)
    g = draw(seed + 1, shape, dtype, 10**g_exponent)
    rho = 10**rho_exponent
    expected = four_operations(w, -g, rho, float(w.double().norm()))
    # A displacement that is nearly parallel to few weights loses as many digits as its tangent is shorter than it.
    s, unit = g.double(), w.double() / w.double().norm()
    loss = float(s.norm() / (s - (s * unit).sum() * unit).norm())
    assert distance(one_step(w, g, rho), expected) < 16 * ROUNDING[dtype] * (1 + rho * loss)


@CLAIM
@given(shapes, st.sampled_from([torch.bfloat16, torch.float16]), st.floats(-2, 2), st.floats(-2, 2), seeds)
def test_half_precision_weights_are_the_exact_ones_rounded_once(shape, dtype, w_exponent, g_exponent, seed):
    w = draw(seed, shape, dtype, 10**w_exponent)
    g = draw(seed + 1, shape, dtype, 10**g_exponent)
    expected = four_operations(w, -g, 0.1, float(w.double().norm()))
    new = one_step(w, g, 0.1).double()
    # Half a unit in the last place of the weight itself, and of the smallest number the dtype holds.
    half = expected.abs() * ROUNDING[dtype] * 1.01 + torch.finfo(dtype).smallest_normal * ROUNDING[dtype]
    assert bool(((new - expected).abs() <= half).all())


@CLAIM
@given(st.integers(2, 4), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), exponents, exponents, seeds)
def test_one_number_has_no_direction_to_turn_to(dims, dtype, w_exponent, g_exponent, seed):
    w = draw(seed, (1,) * dims, dtype, 10**w_exponent)
    g = draw(seed + 1, (1,) * dims, dtype, 10**g_exponent)
    assert torch.equal(one_step(w, g, 0.1), w)


@CLAIM
@given(shapes, st.floats(-3, 3), st.sampled_from([1e-3, 0.1, 1.0]), seeds)
def test_a_displacement_close_to_the_weights_still_turns_by_arctan_rho(shape, share, rho, seed):
    w = draw(seed, shape, torch.float64, 1.0)
    g = draw(seed + 1, shape, torch.float64, 1.0) + 10**share * w
    assert angle(w, one_step(w, g, rho)) == pytest.approx(math.atan(rho), rel=1e-6)


@CLAIM
@given(shapes, st.floats(-2, 0.3), st.floats(0, 10), seeds)
def test_gradient_scale_and_weight_decay_do_not_matter(shape, rho_exponent, decay, seed):
    w = draw(seed, shape, torch.float64, 1.0)
    g = draw(seed + 1, shape, torch.float64, 1.0)
    p = torch.nn.Parameter(w.clone())
    p.grad = 1e-6 * g
    rho = 10**rho_exponent
    gyroscope.Layca(torch.optim.SGD([p], lr=rho, weight_decay=decay * 1e-6)).step()
    assert distance(p, one_step(w, g, rho)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_norm_does_not_drift_over_2000_steps(dtype):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(12, 10).to(dtype))
    start = float(p.detach().double().norm())
    optimizer = gyroscope.Layca(torch.optim.SGD([p], lr=0.05))
    for _ in range(2000):
        p.grad = torch.randn(12, 10).to(dtype)
        optimizer.step()
    # No more than one step's rounding: errors do not add up, because the radius is that of the first step.
    bound = {torch.float64: 1e-15, torch.float32: 1e-7, torch.bfloat16: 1e-3}[dtype]
    assert float(p.detach().double().norm()) == pytest.approx(start, rel=bound)


def test_two_hundred_float32_steps_follow_the_literal_trajectory():
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(20, 30))
    w = p.detach().double()
    radius = float(w.norm())
    optimizer = gyroscope.Layca(torch.optim.SGD([p], lr=3**-3))
    for _ in range(200):
        p.grad = torch.randn(20, 30)
        w = four_operations(w, -p.grad, 3**-3, radius)
        optimizer.step()
    assert distance(p, w) < 3e-6
