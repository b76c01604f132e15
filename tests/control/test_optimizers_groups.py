"""Groups, gradients that are missing, frozen parameters, and parameters that are not layers."""

import math

import pytest
import torch
from torch import nn

import gyroscope
from gyroscope.errors import ControlError
from oracles.control import LiteralLayca, angle, distance

optim = torch.optim
INNER = {
    "sgd": lambda ps, lr: optim.SGD(ps, lr=lr, weight_decay=0.1),
    "momentum": lambda ps, lr: optim.SGD(ps, lr=lr, momentum=0.9),
    "adamw": lambda ps, lr: optim.AdamW(ps, lr=lr, weight_decay=0.1),
    "rmsprop": lambda ps, lr: optim.RMSprop(ps, lr=lr),
    "adafactor": lambda ps, lr: optim.Adafactor(ps, lr=lr),
}
every_inner = pytest.mark.parametrize("inner", INNER)


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)).to(dtype)


def give_gradients(model, step, scale=1.0):
    generator = torch.Generator().manual_seed(10 + step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype) * scale


@every_inner
def test_other_parameters_do_exactly_what_the_plain_inner_optimizer_does(inner):
    model, plain = network(), network()
    optimizer = gyroscope.Layca(INNER[inner](model.parameters(), 0.05), model)
    reference = INNER[inner](plain.parameters(), 0.05)
    for t in range(4):
        give_gradients(model, t)
        give_gradients(plain, t)
        optimizer.step()
        reference.step()
    others = [name for name, p in model.named_parameters() if p.dim() == 1]
    assert others == ["0.bias", "2.weight", "2.bias", "3.bias"]
    for name in others:
        assert torch.equal(model.get_parameter(name), plain.get_parameter(name)), name


@every_inner
def test_frozen_others_stay_bit_for_bit_and_layers_turn_all_the_same(inner):
    model, twin = network(), network()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = gyroscope.Layca(INNER[inner](model.parameters(), 0.05), model, others="frozen")
    inner_others = gyroscope.Layca(INNER[inner](twin.parameters(), 0.05), twin)
    for t in range(3):
        for one, its in ((model, optimizer), (twin, inner_others)):
            give_gradients(one, t)
            its.step()
    for name, p in model.named_parameters():
        assert torch.equal(p.detach(), start[name]) == (p.dim() == 1), name
        if p.dim() > 1:
            assert torch.equal(p, twin.get_parameter(name))


@every_inner
def test_others_lr_is_the_learning_rate_of_the_others_and_of_nothing_else(inner):
    model, plain = network(), network()
    start = model[0].weight.detach().clone()
    optimizer = gyroscope.Layca(INNER[inner](model.parameters(), 0.05), model, others_lr=0.003)
    reference = INNER[inner](plain.parameters(), 0.003)
    give_gradients(model, 0)
    give_gradients(plain, 0)
    optimizer.step()
    reference.step()
    assert torch.equal(model[0].bias, plain[0].bias)
    assert torch.equal(model[2].weight, plain[2].weight)
    assert angle(start, model[0].weight) == pytest.approx(math.atan(0.05), rel=1e-3)


@every_inner
def test_every_group_turns_at_its_own_rate(inner):
    model = network()
    groups = [
        {"params": [model[0].weight, model[0].bias], "lr": 0.02},
        {"params": [model[3].weight], "lr": 0.2},
        {"params": [model[3].bias]},
    ]
    optimizer = gyroscope.Layca(INNER[inner](groups, 0.05), model)
    for t in range(3):
        before = [model[0].weight.detach().clone(), model[3].weight.detach().clone()]
        give_gradients(model, t)
        optimizer.step()
        assert angle(before[0], model[0].weight) == pytest.approx(math.atan(0.02), rel=1e-3)
        assert angle(before[1], model[3].weight) == pytest.approx(math.atan(0.2), rel=1e-3)
    assert optimizer.rates() == {"0.weight": 0.02, "3.weight": 0.2}
    assert [g["lr"] for g in optimizer.param_groups] == [0.02, 0.2, 0.05, 0.02]


@every_inner
def test_groups_with_options_of_their_own_follow_the_literal_procedure(inner):
    model = network(torch.float64)
    params = list(model.parameters())

    def make(ps):
        return INNER[inner]([{"params": ps[:2], "lr": 0.02, "weight_decay": 0.4}, {"params": ps[2:]}], 0.05)

    literal = LiteralLayca(make, params)
    optimizer = gyroscope.Layca(make(params), model)
    for t in range(4):
        give_gradients(model, t)
        optimizer.step()
        literal.step([p.grad for p in params])
        assert all(distance(p, w) < 1e-10 for p, w in zip(params, literal.params, strict=True))


@every_inner
def test_a_layer_without_gradient_and_its_state_are_left_alone(inner):
    model = network()
    optimizer = gyroscope.Layca(INNER[inner](model.parameters(), 0.05), model)
    for t in range(2):
        give_gradients(model, t)
        optimizer.step()
    weight, bias = model[0].weight, model[0].bias
    kept = {p: p.detach().clone() for p in (weight, bias)}
    states = {p: {k: v.clone() for k, v in optimizer.state[p].items() if isinstance(v, torch.Tensor)} for p in kept}
    other = model[3].weight.detach().clone()
    give_gradients(model, 2)
    weight.grad = bias.grad = None
    optimizer.step()
    for p, w in kept.items():
        assert torch.equal(p.detach(), w)
        assert all(torch.equal(optimizer.state[p][k], v) for k, v in states[p].items())
    assert angle(other, model[3].weight) == pytest.approx(math.atan(0.05), rel=1e-3)


@every_inner
def test_a_layer_that_misses_some_steps_follows_the_literal_procedure(inner):
    model = network(torch.float64)
    params = list(model.parameters())
    literal = LiteralLayca(lambda ps: INNER[inner](ps, 0.05), params)
    optimizer = gyroscope.Layca(INNER[inner](params, 0.05), model)
    for t in range(7):
        give_gradients(model, t)
        if t in (0, 3, 4):
            params[0].grad = None
        if t in (2, 4):
            params[1].grad = params[4].grad = None
        optimizer.step()
        literal.step([p.grad for p in params])
        assert all(distance(p, w) < 1e-10 for p, w in zip(params, literal.params, strict=True))


@every_inner
def test_parameters_that_require_no_gradient_stay(inner):
    model = network()
    model[0].requires_grad_(False)
    start = [p.detach().clone() for p in model[0].parameters()]
    optimizer = gyroscope.Layca(INNER[inner](model.parameters(), 0.05), model)
    before = model[3].weight.detach().clone()
    model(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()
    assert all(torch.equal(p.detach(), w) for p, w in zip(model[0].parameters(), start, strict=True))
    assert angle(before, model[3].weight) == pytest.approx(math.atan(0.05), rel=1e-3)


def test_a_frozen_layer_may_be_missing_from_the_optimizer():
    model = network()
    model[0].requires_grad_(False)
    optimizer = gyroscope.Layca(optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05), model)
    assert optimizer.layers == ("3.weight",)


def test_no_gradients_at_all_is_no_step():
    model = network()
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = gyroscope.Layca(optim.Adam(model.parameters(), lr=0.05), model)
    optimizer.step()
    assert all(torch.equal(p.detach(), w) for p, w in zip(model.parameters(), start, strict=True))
    assert not any(optimizer.state.values())


def test_chosen_layers_are_controlled_and_the_rest_follows_the_inner_optimizer():
    model, plain = network(), network()
    optimizer = gyroscope.Layca(optim.SGD(model.parameters(), lr=0.05), gyroscope.layers(model, exclude="3.*"))
    reference = optim.SGD(plain.parameters(), lr=0.05)
    before = model[0].weight.detach().clone()
    for one, its in ((model, optimizer), (plain, reference)):
        give_gradients(one, 0)
        its.step()
    assert optimizer.layers == ("0.weight",)
    assert torch.equal(model[3].weight, plain[3].weight)
    assert angle(before, model[0].weight) == pytest.approx(math.atan(0.05), rel=1e-3)


@every_inner
@pytest.mark.parametrize("alpha", [-0.6, 0.4])
def test_alpha_multiplies_the_rate_of_each_layer(inner, alpha):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(4)))
    optimizer = gyroscope.Layca(INNER[inner](model.parameters(), 0.2), model, alpha=alpha)
    before = [layer.weight.detach().clone() for layer in model]
    give_gradients(model, 0)
    optimizer.step()
    shares = [(1 - abs(alpha)) ** (5 * k / 3) for k in range(4)]
    if alpha > 0:
        shares.reverse()
    tangents = [math.tan(angle(w, layer.weight)) for w, layer in zip(before, model, strict=True)]
    assert tangents == pytest.approx([0.2 * share for share in shares], rel=1e-3)


@every_inner
def test_a_rate_in_a_tensor_is_the_same_rate(inner):
    model, twin = network(), network()
    optimizer = gyroscope.Layca(INNER[inner](model.parameters(), torch.tensor(0.05)), model)
    reference = gyroscope.Layca(INNER[inner](twin.parameters(), 0.05), twin)
    for t in range(3):
        for one, its in ((model, optimizer), (twin, reference)):
            give_gradients(one, t)
            its.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def with_rate(rate):
    """A layer, its weights, and its controller, whose rate is in a tensor and became `rate` before the first step."""
    model = nn.Linear(5, 4, bias=False)
    lr = torch.tensor(0.1)
    optimizer = gyroscope.Layca(optim.SGD(model.parameters(), lr=lr), model)
    lr.fill_(rate)
    give_gradients(model, 0)
    return model.weight, model.weight.detach().clone(), optimizer


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -0.1])
def test_a_bad_rate_in_a_tensor_is_refused_where_it_is_at_hand(rate):
    weight, before, optimizer = with_rate(rate)
    with pytest.raises(ControlError, match=r"`lr` of group 0 must be a finite number ≥ 0.*got tensor\("):
        optimizer.step()
    assert torch.equal(weight.detach(), before)


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -0.1])
def test_a_bad_rate_on_a_device_moves_no_layer(rate, monkeypatch):
    """There it is not looked at, which would wait; so the layers simply stay."""
    monkeypatch.setattr("gyroscope.control.layca.is_rate", lambda lr: True)
    weight, before, optimizer = with_rate(rate)
    optimizer.step()
    assert torch.equal(weight.detach(), before)


@pytest.mark.parametrize("change", ["reversed", "replaced", "taken out"])
def test_groups_changed_by_hand_are_refused_and_nothing_moves(change):
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 6, bias=False))
    optimizer = gyroscope.Layca(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model(torch.ones(2, 6)).square().sum().backward()
    optimizer.step()
    params = optimizer.param_groups[0]["params"]
    if change == "reversed":
        params.reverse()
    elif change == "replaced":
        params[1] = nn.Parameter(torch.randn(6, 8))
        params[1].grad = torch.randn(6, 8)
    else:
        params.pop()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ControlError, match="nothing was changed"):
        optimizer.step()
    with pytest.raises(ControlError, match="nothing was changed"):
        optimizer.state_dict()
    assert all(torch.equal(a, p) for a, p in zip(before, model.parameters(), strict=True))


class WritesRate(torch.optim.SGD):
    """Halves the rate of its groups in every step, as optimizers with a schedule of their own do."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].mul_(0.5)
            else:
                group["lr"] *= 0.5


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)])
def test_a_rate_that_the_inner_optimizer_writes_does_not_change_the_angle(rate):
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
    optimizer = gyroscope.Layca(WritesRate(model.parameters(), lr=rate), model)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 6)).square().sum().backward()
        before = model[0].weight.detach().clone()
        optimizer.step()
        assert math.tan(angle(before, model[0].weight.detach())) == pytest.approx(0.1, rel=1e-4)
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.1, 0.1 / 8])


class Tiny(torch.optim.Optimizer):
    """Not known to Gyroscope; its steps are a given share of the weights, as those of Prodigy are at first."""

    def __init__(self, params, lr, share):
        super().__init__(params, {"lr": lr, "share": share})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * (group["share"] * p.norm() / p.grad.norm()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_displacement_of_a_few_roundings_is_left_out_and_counted(dtype):
    for share, moves in ((2.0, False), (40.0, True), (0.0, None)):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(30, 40, dtype=dtype))
        optimizer = gyroscope.Layca(Tiny([p], lr=0.1, share=share * torch.finfo(dtype).eps))
        p.grad, before = torch.randn_like(p), p.detach().clone()
        optimizer.step()
        assert torch.equal(p, before) == (not moves)
        assert optimizer.skipped() == ({"group0.0": 1} if moves is False else {})
        if moves:  # along the gradient, to the degree that rounding allows
            across = [x - (x * before).sum() / before.square().sum() * before for x in (before - p.detach(), p.grad)]
            turned, g = (x.flatten().double() for x in across)
            assert torch.cosine_similarity(turned, g, dim=0) > math.cos(math.radians(1.0))
