"""When there is nothing to do, or no direction to do it in, nothing moves: bit for bit, and the rest goes on."""

import math

import pytest
import torch

import gyroscope
from gyroscope.errors import ControlError
from oracles.control import angle, four_operations

pytestmark = pytest.mark.usefixtures("cpu_backend")

INNER = {
    "sgd": lambda ps, lr: torch.optim.SGD(ps, lr=lr),
    "momentum": lambda ps, lr: torch.optim.SGD(ps, lr=lr, momentum=0.9),
    "adam": lambda ps, lr: torch.optim.Adam(ps, lr=lr),
    "rmsprop": lambda ps, lr: torch.optim.RMSprop(ps, lr=lr),
    "adafactor": lambda ps, lr: torch.optim.Adafactor(ps, lr=lr),
}
every_inner = pytest.mark.parametrize("inner", INNER)


def two_layers(inner, lr=0.1, **options):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(4, 3)), torch.nn.Parameter(torch.randn(3, 5))]
    return params, gyroscope.Layca(INNER[inner](params, lr), **options)


def set_grads(params, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)


@pytest.mark.parametrize("inner", ["sgd", "momentum", "adam", "rmsprop"])
def test_a_zero_gradient_moves_nothing(inner):
    params, optimizer = two_layers(inner)
    before = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert all(torch.equal(p.detach(), w) for p, w in zip(params, before, strict=True))
    assert optimizer.skipped() == {}


@every_inner
def test_a_rate_of_zero_moves_nothing(inner):
    params, optimizer = two_layers(inner, lr=0.0)
    before = [p.detach().clone() for p in params]
    set_grads(params)
    optimizer.step()
    assert all(torch.equal(p.detach(), w) for p, w in zip(params, before, strict=True))


def test_a_multiplier_of_zero_moves_nothing_and_leaves_the_other_layers_to_turn():
    params, optimizer = two_layers("momentum", multipliers=[0.0, 1.0])
    before = [p.detach().clone() for p in params]
    set_grads(params)
    optimizer.step()
    assert torch.equal(params[0].detach(), before[0])
    assert not torch.equal(params[1].detach(), before[1])


@pytest.mark.parametrize("inner", ["sgd", "momentum"])
@pytest.mark.parametrize("factor", [2.0, -0.3, 7.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_displacement_along_the_weights_moves_nothing(inner, factor, dtype):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(40, 30).to(dtype))
    before = p.detach().clone()
    optimizer = gyroscope.Layca(INNER[inner]([p], 0.1))
    p.grad = factor * before
    optimizer.step()
    assert torch.equal(p.detach(), before)


@every_inner
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_layer_with_a_non_finite_gradient_sits_the_step_out(inner, bad):
    params, optimizer = two_layers(inner)
    for seed in (1, 2):
        set_grads(params, seed)
        optimizer.step()
    before = [p.detach().clone() for p in params]
    set_grads(params, 3)
    params[0].grad[1, 2] = bad
    optimizer.step()
    assert torch.equal(params[0].detach(), before[0])
    assert not torch.equal(params[1].detach(), before[1])
    assert optimizer.skipped() == {"group0.0": 1}
    for value in optimizer.state[params[0]].values():
        assert not isinstance(value, torch.Tensor) or bool(torch.isfinite(value).all())
    set_grads(params, 4)
    optimizer.step()
    assert not torch.equal(params[0].detach(), before[0])
    assert bool(torch.isfinite(params[0]).all())
    assert optimizer.skipped() == {"group0.0": 1}


def test_a_step_that_ends_at_zero_before_the_norm_is_put_back_moves_nothing():
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(20, 10))
    before = p.detach().clone()
    p.grad = p.detach().clone()  # so w + ρ‖w‖ s/‖s‖ = w − w at ρ = 1
    gyroscope.control.hyperball(torch.optim.SGD([p], lr=1.0)).step()
    assert torch.equal(p.detach(), before)


@pytest.mark.parametrize("tiny", [1e-158, 1e-150])
def test_gradients_whose_squares_all_but_vanish_in_float64_keep_the_norm(tiny):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(20, 10, dtype=torch.float64))
    before = p.detach().clone()
    p.grad = torch.randn(20, 10, dtype=torch.float64) * tiny
    gyroscope.Layca(torch.optim.SGD([p], lr=0.1)).step()
    assert angle(before, p) == pytest.approx(math.atan(0.1), rel=1e-6)
    assert float(p.detach().norm()) == pytest.approx(float(before.norm()), rel=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), complex(0, float("inf"))])
def test_raise_looks_at_complex_gradients_of_other_parameters_too(bad):
    layer, other = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    optimizer = gyroscope.Layca(torch.optim.SGD([layer, other], lr=0.1), nonfinite="raise")
    layer.grad, other.grad = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.ones(3, dtype=torch.complex64).conj()
    optimizer.step()
    assert not torch.equal(other.detach(), torch.ones(3, dtype=torch.complex64))
    other.grad = torch.full((3,), bad, dtype=torch.complex64)
    with pytest.raises(ControlError, match="The gradients of parameter 0 of group 1 are not finite"):
        optimizer.step()


def test_a_non_finite_gradient_leaves_the_other_layer_where_the_four_operations_put_it():
    params, optimizer = two_layers("sgd")
    w = params[1].detach().clone()
    set_grads(params)
    params[0].grad.fill_(float("nan"))
    optimizer.step()
    expected = four_operations(w, -params[1].grad, 0.1, float(w.double().norm()))
    torch.testing.assert_close(params[1].detach().double(), expected, rtol=1e-6, atol=1e-7)


@every_inner
def test_raise_names_the_layer_whose_gradient_is_not_finite_and_changes_nothing(inner):
    params, optimizer = two_layers(inner, nonfinite="raise")
    set_grads(params)
    optimizer.step()
    before = [p.detach().clone() for p in params]
    states = [{k: v.clone() for k, v in optimizer.state[p].items() if isinstance(v, torch.Tensor)} for p in params]
    params[1].grad[0, 0] = float("nan")
    with pytest.raises(ControlError, match=r"group0\.1 are not finite; nothing was changed.*nonfinite=\"skip\""):
        optimizer.step()
    assert all(torch.equal(p.detach(), w) for p, w in zip(params, before, strict=True))
    for p, state in zip(params, states, strict=True):
        assert all(torch.equal(optimizer.state[p][k], v) for k, v in state.items())


def test_raise_covers_parameters_that_are_not_layers():
    model = torch.nn.Linear(3, 2)
    optimizer = gyroscope.Layca(torch.optim.SGD(model.parameters(), lr=0.1), model, nonfinite="raise")
    model(torch.ones(1, 3)).sum().backward()
    model.bias.grad[0] = float("inf")
    with pytest.raises(ControlError, match="parameter 0 of group 1"):
        optimizer.step()


@every_inner
def test_a_layer_of_zeros_is_refused_by_name_and_nothing_changes(inner):
    params, optimizer = two_layers(inner)
    params[1].data.zero_()
    before = params[0].detach().clone()
    set_grads(params)
    with pytest.raises(ControlError, match=r"zero norm.*group0\.1; nothing was changed.*exclude.*zero_norm=\"skip\""):
        optimizer.step()
    assert torch.equal(params[0].detach(), before)
    assert not params[1].detach().any()
    assert "radius" not in optimizer.state[params[0]]
    assert "momentum_buffer" not in optimizer.state[params[0]]


@every_inner
def test_a_layer_of_zeros_may_be_left_as_it_is(inner):
    params, optimizer = two_layers(inner, zero_norm="skip")
    params[1].data.zero_()
    before = params[0].detach().clone()
    for seed in (1, 2):
        set_grads(params, seed)
        optimizer.step()
    assert not params[1].detach().any()
    assert not torch.equal(params[0].detach(), before)
    assert optimizer.skipped() == {}


def test_a_row_of_zeros_is_refused_where_rows_are_layers():
    model = torch.nn.Linear(3, 4, bias=False)
    model.weight.data[2] = 0
    layers = gyroscope.layers(model, granularity="row")
    optimizer = gyroscope.Layca(torch.optim.SGD(model.parameters(), lr=0.1), layers)
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(ControlError, match=r"zero norm.*: weight \(1 of its 4 segments\);"):
        optimizer.step()


@pytest.mark.parametrize("inner", ["sgd", "adam"])
def test_a_layer_of_zeros_that_is_initialised_later_turns_from_then_on(inner):
    params, optimizer = two_layers(inner, zero_norm="skip")
    params[1].data.zero_()
    set_grads(params)
    optimizer.step()
    params[1].data.normal_()
    before = params[1].detach().clone()
    optimizer.step()
    assert angle(before, params[1]) == pytest.approx(math.atan(0.1), rel=1e-3)
    assert float(params[1].detach().norm()) == pytest.approx(float(before.norm()), rel=1e-6)
