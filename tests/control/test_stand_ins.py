"""torch's optimizers step other tensors than the parameters, and nobody can tell."""

import pytest
import torch
from torch import nn

import gyroscope
from gyroscope.control.proposal import Proposer

optim = torch.optim
MAKE = {
    "momentum": lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.2),
    "amsgrad": lambda ps: optim.Adam(ps, lr=0.1, amsgrad=True),
    "adamw": lambda ps: optim.AdamW(ps, lr=0.1, weight_decay=0.3),
    "adadelta": lambda ps: optim.Adadelta(ps, lr=0.1),
    "rprop": lambda ps: optim.Rprop(ps, lr=0.1),
    "muon": lambda ps: optim.Muon([p for p in ps if p.dim() == 2], lr=0.1),
    "sgd_amom": lambda ps: gyroscope.SGD_AMom(ps, lr=0.1),
}


def parameters(seed=0):
    torch.manual_seed(seed)
    return [nn.Parameter(torch.randn(shape)) for shape in ((5, 5), (3,), (4, 6))]


def give_gradients(params, t):
    torch.manual_seed(100 + t)
    for p in params:
        p.grad = torch.randn(p.shape)


def seen_by_a_hook(optimizer):
    """Register a hook on the inner optimizer, so that it steps the parameters themselves; return what it saw."""
    seen = []
    optimizer.inner.register_step_pre_hook(lambda inner, *_: seen.append(list(inner.param_groups[0]["params"])))
    return seen


@pytest.mark.parametrize("name", MAKE)
def test_steps_and_states_are_those_of_parameters_that_point_elsewhere(name):
    ours, others = parameters(), parameters()
    one, other = gyroscope.Layca(MAKE[name](ours)), gyroscope.Layca(MAKE[name](others))
    seen = seen_by_a_hook(other)
    for t in range(4):
        give_gradients(ours, t)
        give_gradients(others, t)
        one.step()
        other.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, others, strict=True))
    assert seen
    assert all(any(p is q for q in others) for p in seen[0])
    states = [[{k: v for k, v in x.state[p].items() if k != "radius"} for p in ps]
              for x, ps in ((one, ours), (other, others))]  # fmt: skip
    for mine, theirs in zip(*states, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(torch.as_tensor(mine[k]), torch.as_tensor(theirs[k])) for k in mine)
    assert set(map(id, one.inner.state)) <= set(map(id, ours))


def change_nothing(p):
    pass


def move(p):
    p.data = p.data.clone()


def transpose(p):
    p.data = p.data.t()  # the same memory, read in another order


def reshape(p):
    p.data = p.data.view(1, 25)  # the same memory, in another shape


@pytest.mark.parametrize("change", [change_nothing, move, transpose, reshape])
def test_parameters_may_be_changed_between_steps(change):
    ours, others = parameters(), parameters()
    one, other = gyroscope.Layca(MAKE["adamw"](ours)), gyroscope.Layca(MAKE["adamw"](others))
    seen_by_a_hook(other)
    for t in range(4):
        for params, optimizer in ((ours, one), (others, other)):
            if t == 2:
                params[0].grad = None
                change(params[0])
                for key in ("exp_avg", "exp_avg_sq"):
                    optimizer.state[params[0]][key] = torch.zeros(params[0].shape)
            give_gradients(params, t)
            optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, others, strict=True))


@pytest.mark.parametrize("how", ["deleted", "emptied", "loaded"])
def test_a_state_that_is_replaced_between_steps_is_found(how):
    ours, others = parameters(), parameters()
    one, other = gyroscope.Layca(MAKE["amsgrad"](ours)), gyroscope.Layca(MAKE["amsgrad"](others))
    seen_by_a_hook(other)
    for t in range(4):
        for params, optimizer in ((ours, one), (others, other)):
            state = optimizer.inner.state
            if t == 2 and how == "deleted":
                del state[params[1]]
            if t == 2 and how == "emptied":
                state[params[0]] = {}
            if t == 2 and how == "loaded":
                optimizer.load_state_dict(optimizer.state_dict())
            give_gradients(params, t)
            optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, others, strict=True))


def test_everything_is_in_its_place_again_if_the_optimizer_raises():
    params = parameters()
    inner = MAKE["amsgrad"](params)
    proposer = Proposer(inner)
    give_gradients(params, 0)
    before, grads, state = [p.detach().clone() for p in params], [p.grad for p in params], inner.state
    inner.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        proposer.propose([range(3)])
    assert all(p is q for p, q in zip(inner.param_groups[0]["params"], params, strict=True))
    assert all(p.grad is g for p, g in zip(params, grads, strict=True))
    assert all(torch.equal(p, w) for p, w in zip(params, before, strict=True))
    assert inner.state is state


def test_gradients_are_not_held_between_steps():
    params = parameters()
    proposer = Proposer(MAKE["momentum"](params))
    give_gradients(params, 0)
    (proposal,), _ = proposer.propose([range(3)])
    assert proposal.stand_ins is not None
    assert all(zero.grad is None for zero in proposal.displacements)


def test_a_parameter_that_gets_its_first_gradient_late_finds_its_state():
    ours, others = parameters(), parameters()
    one, other = gyroscope.Layca(MAKE["amsgrad"](ours)), gyroscope.Layca(MAKE["amsgrad"](others))
    seen_by_a_hook(other)
    for t in range(5):
        for params, optimizer in ((ours, one), (others, other)):
            give_gradients(params, t)
            if t in (0, 1, 3):
                params[2].grad = None
            optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, others, strict=True))
    assert one.inner.state[ours[2]]["step"] == 2


def test_a_steered_model_is_stepped_by_stand_ins_too():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6))
    optimizer = gyroscope.steer(model, optim.Muon)
    for _ in range(3):
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    joint = optimizer.inner
    assert optimizer._steering.proposer._stand_ins
    assert joint.inner.state is joint.others.state is joint.state
    assert set(map(id, joint.state)) <= set(map(id, model.parameters()))
