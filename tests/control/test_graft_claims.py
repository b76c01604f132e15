"""Grafting: the length of one optimizer's step in the direction of another's."""

import copy
import math
import threading

import numpy as np
import pytest
import torch
from torch import nn

import gyroscope
from gyroscope.control import graft
from gyroscope.errors import ControlError
from gyroscope.vectors import eager
from oracles.control import distance

optim = torch.optim
MAKERS = {
    "sgd": lambda ps, lr: optim.SGD(ps, lr=lr),
    "sgd, decay": lambda ps, lr: optim.SGD(ps, lr=lr, weight_decay=0.2),
    "momentum": lambda ps, lr: optim.SGD(ps, lr=lr, momentum=0.9),
    "adam": lambda ps, lr: optim.Adam(ps, lr=lr),
    "adamw": lambda ps, lr: optim.AdamW(ps, lr=lr, weight_decay=0.2),
    "adafactor": lambda ps, lr: optim.Adafactor(ps, lr=lr),
}
every_granularity = pytest.mark.parametrize("granularity", ["tensor", "global"])


def parameters(dtype=torch.float64):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((4, 3), (3,), (2, 3, 3))]


def give_gradients(params, step):
    generator = torch.Generator().manual_seed(100 + step)  # not the weights themselves, which would cancel
    for i, p in enumerate(params):
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype) * 10.0**i


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "adafactor"])
@every_granularity
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_an_optimizer_on_itself_at_another_rate_is_that_optimizer(name, granularity, dtype, bound):
    params, plain = parameters(dtype), parameters(dtype)
    make = MAKERS[name]
    optimizer = gyroscope.Graft(make(params, 0.01), make(params, 1.23), granularity=granularity)
    reference = make(plain, 0.01)
    for t in range(8):
        give_gradients(params, t)
        give_gradients(plain, t)
        optimizer.step()
        reference.step()
        assert all(distance(p, q) < bound for p, q in zip(params, plain, strict=True))


@pytest.mark.parametrize("magnitude", MAKERS)
@pytest.mark.parametrize("direction", MAKERS)
@every_granularity
def test_a_step_is_as_long_as_one_optimizers_and_points_as_the_others(magnitude, direction, granularity):
    params = parameters()
    copies = {"M": [nn.Parameter(p.detach().clone()) for p in params], "D": None}
    copies["D"] = [nn.Parameter(p.detach().clone()) for p in params]
    plain = {"M": MAKERS[magnitude](copies["M"], 0.05), "D": MAKERS[direction](copies["D"], 7.0)}
    optimizer = gyroscope.Graft(
        MAKERS[magnitude](params, 0.05), MAKERS[direction](params, 7.0), granularity=granularity
    )
    for t in range(3):
        before = [p.detach().clone() for p in params]
        give_gradients(params, t)
        moved = {}
        for which, mine in plain.items():
            for q, p in zip(copies[which], params, strict=True):
                q.data.copy_(p.detach())
                q.grad = p.grad.clone()
            mine.step()
            moved[which] = [q.detach() - w for q, w in zip(copies[which], before, strict=True)]
        optimizer.step()
        now = [p.detach() - w for p, w in zip(params, before, strict=True)]
        for s, m, d in zip(now, moved["M"], moved["D"], strict=True):
            if granularity == "tensor":
                assert float(s.norm()) == pytest.approx(float(m.norm()), rel=1e-9)
            assert float((s * d).sum() / (s.norm() * d.norm())) == pytest.approx(1.0, abs=1e-10)
        if granularity == "global":
            lengths = [math.sqrt(sum(float(x.square().sum()) for x in one)) for one in (now, moved["M"])]
            assert lengths[0] == pytest.approx(lengths[1], rel=1e-9)
            ratios = [float(s.norm() / d.norm()) for s, d in zip(now, moved["D"], strict=True)]
            assert ratios == pytest.approx([ratios[0]] * len(ratios), rel=1e-9)


def test_both_optimizers_see_the_gradients_and_keep_the_state_they_would_have_alone():
    params, plain = parameters(torch.float32), parameters(torch.float32)
    optimizer = gyroscope.Graft(MAKERS["momentum"](params, 0.01), MAKERS["adam"](params, 0.01))
    alone = [MAKERS["momentum"](plain, 0.01), MAKERS["adam"](plain, 0.01)]
    for t in range(3):
        give_gradients(params, t)
        give_gradients(plain, t)
        kept = [p.grad.clone() for p in params]
        optimizer.step()
        for reference in alone:
            reference.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(params, kept, strict=True))
    for mine, reference in zip((optimizer.inner, optimizer.direction), alone, strict=True):
        for p, q in zip(params, plain, strict=True):
            assert set(mine.state[p]) == set(reference.state[q])
            assert all(torch.equal(v, reference.state[q][k]) for k, v in mine.state[p].items() if v is not None)


def test_nothing_moves_in_no_direction():
    params = parameters()
    before = [p.detach().clone() for p in params]
    # At its first step with this gradient the magnitude is not zero, but the direction's proposal is.
    optimizer = gyroscope.Graft(MAKERS["sgd, decay"](params, 0.1), MAKERS["sgd"](params, 0.1))
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert all(torch.equal(p.detach(), w) for p, w in zip(params, before, strict=True))


def test_a_zero_length_moves_nothing():
    params = parameters()
    before = [p.detach().clone() for p in params]
    optimizer = gyroscope.Graft(MAKERS["sgd"](params, 0.0), MAKERS["adam"](params, 0.1))
    give_gradients(params, 0)
    optimizer.step()
    assert all(torch.equal(p.detach(), w) for p, w in zip(params, before, strict=True))


def test_a_parameter_with_a_non_finite_gradient_does_not_move_and_the_others_do():
    params = parameters()
    before = [p.detach().clone() for p in params]
    optimizer = gyroscope.Graft(MAKERS["sgd"](params, 0.1), MAKERS["adam"](params, 0.1))
    give_gradients(params, 0)
    params[0].grad[0, 0] = float("nan")
    optimizer.step()
    assert [torch.equal(p.detach(), w) for p, w in zip(params, before, strict=True)] == [True, False, False]


def test_a_parameter_without_gradient_stays():
    params = parameters()
    before = [p.detach().clone() for p in params]
    optimizer = gyroscope.Graft(MAKERS["momentum"](params, 0.1), MAKERS["adam"](params, 0.1))
    give_gradients(params, 0)
    params[1].grad = None
    optimizer.step()
    assert [torch.equal(p.detach(), w) for p, w in zip(params, before, strict=True)] == [False, True, False]
    assert not optimizer.inner.state[params[1]]
    assert not optimizer.direction.state[params[1]]
    for p in params:
        p.grad = None
    optimizer.step()


def test_a_scheduler_moves_the_length():
    params, plain = parameters(), parameters()
    optimizer = gyroscope.Graft(MAKERS["sgd"](params, 0.1), MAKERS["sgd"](params, 5.0))
    reference = MAKERS["sgd"](plain, 0.1)
    schedules = [optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (optimizer, reference)]
    for t in range(4):
        for group, its, schedule in ((params, optimizer, schedules[0]), (plain, reference, schedules[1])):
            give_gradients(group, t)
            its.step()
            schedule.step()
    assert all(distance(p, q) < 1e-12 for p, q in zip(params, plain, strict=True))


@pytest.mark.parametrize("pair", [("momentum", "adam"), ("adamw", "momentum")])
def test_a_saved_state_continues_the_same_trajectory(pair):
    def fresh(params):
        return gyroscope.Graft(MAKERS[pair[0]](params, 0.05), MAKERS[pair[1]](params, 0.3))

    params = parameters()
    optimizer = fresh(params)
    for t in range(3):
        give_gradients(params, t)
        optimizer.step()
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    resumed = fresh(copies)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for t in range(3, 6):
        for group, its in ((params, optimizer), (copies, resumed)):
            give_gradients(group, t)
            its.step()
    assert all(torch.equal(p, q) for p, q in zip(params, copies, strict=True))


def test_a_closure_is_evaluated_and_its_loss_returned():
    params = parameters()
    optimizer = gyroscope.Graft(MAKERS["sgd"](params, 0.1), MAKERS["adam"](params, 0.1))

    def closure():
        loss = sum(p.square().sum() for p in params)
        loss.backward()
        return loss

    expected = float(sum(p.detach().square().sum() for p in params))
    assert float(optimizer.step(closure).detach()) == pytest.approx(expected)


def test_unusable_arguments_are_named():
    params = parameters()
    other = [nn.Parameter(torch.ones(2, 2))]
    sgd = MAKERS["sgd"](params, 0.1)
    with pytest.raises(ControlError, match=r"`optimizer` must be a torch\.optim\.Optimizer, got a list"):
        gyroscope.Graft(params, sgd)
    with pytest.raises(ControlError, match=r"`direction` must be a torch\.optim\.Optimizer, got a str"):
        gyroscope.Graft(sgd, "adam")
    with pytest.raises(ControlError, match="`granularity` must be one of 'tensor', 'global', got 'layer'"):
        gyroscope.Graft(sgd, MAKERS["adam"](params, 0.1), granularity="layer")
    with pytest.raises(ControlError, match="must be two optimizers, got one object twice"):
        gyroscope.Graft(sgd, sgd)
    with pytest.raises(ControlError, match="must hold the same parameters"):
        gyroscope.Graft(sgd, MAKERS["adam"](other, 0.1))
    for pair in ((sgd, optim.LBFGS(params)), (optim.LBFGS(params), sgd)):
        with pytest.raises(ControlError, match=r"must step from one gradient, got LBFGS"):
            gyroscope.Graft(*pair)


def test_a_state_of_another_optimizer_is_refused_and_nothing_changes():
    params = parameters()
    optimizer = gyroscope.Graft(MAKERS["momentum"](params, 0.1), MAKERS["adam"](params, 0.1))
    give_gradients(params, 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(
        ControlError, match=r"must have the key 'direction'\. Pass what state_dict\(\) of a Graft returned"
    ):
        optimizer.load_state_dict(MAKERS["momentum"](params, 0.3).state_dict())
    other = [nn.Parameter(torch.ones(2, 2))]
    wrong = gyroscope.Graft(MAKERS["momentum"](other, 0.3), MAKERS["adam"](other, 0.3)).state_dict()
    with pytest.raises(ControlError, match="another model or another grouping"):
        optimizer.load_state_dict(wrong)
    mixed = {**copy.deepcopy(saved), "direction": wrong["direction"]}
    mixed["param_groups"][0]["lr"] = 99.0
    with pytest.raises(ControlError, match="another model or another grouping"):
        optimizer.load_state_dict(mixed)
    assert optimizer.param_groups[0]["lr"] == 0.1
    for p, i in zip(params, saved["param_groups"][0]["params"], strict=True):
        assert torch.equal(optimizer.state[p]["momentum_buffer"], saved["state"][i]["momentum_buffer"])


@pytest.mark.parametrize("magnitude", MAKERS)
@pytest.mark.parametrize("direction", MAKERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@every_granularity
def test_after_a_non_finite_gradient_the_parameter_moves_again(magnitude, direction, value, granularity):
    params = parameters()
    optimizer = gyroscope.Graft(MAKERS[magnitude](params, 0.1), MAKERS[direction](params, 0.1), granularity=granularity)
    stayed = []
    for t in range(4):
        before = [p.detach().clone() for p in params]
        give_gradients(params, t)
        if t == 1:
            params[0].grad[0, 0] = value
        optimizer.step()
        stayed.append([torch.equal(p.detach(), w) for p, w in zip(params, before, strict=True)])
        assert all(bool(p.isfinite().all()) for p in params)
    assert stayed == [[False] * 3, [True, False, False], [False] * 3, [False] * 3]
    for one in (optimizer.inner, optimizer.direction):
        states = [v for p in params for v in one.state[p].values() if isinstance(v, torch.Tensor)]
        assert all(bool(v.isfinite().all()) for v in states)


def test_only_what_is_not_finite_is_cleared_from_the_state():
    params = parameters()
    optimizer = gyroscope.Graft(MAKERS["momentum"](params, 0.1), MAKERS["adam"](params, 0.1))
    give_gradients(params, 0)
    params[0].grad[0, 0] = float("inf")
    expected = params[0].grad.clone()
    expected[0, 0] = 0.0
    optimizer.step()
    assert torch.equal(optimizer.inner.state[params[0]]["momentum_buffer"], expected)
    torch.testing.assert_close(optimizer.direction.state[params[0]]["exp_avg"], 0.1 * expected)
    assert float(optimizer.direction.state[params[0]]["step"]) == 1.0


def test_a_parameter_that_sits_out_is_left_out_of_the_global_lengths():
    params, plain = parameters(), parameters()
    optimizer = gyroscope.Graft(MAKERS["sgd"](params, 0.1), MAKERS["adam"](params, 0.1), granularity="global")
    reference = gyroscope.Graft(MAKERS["sgd"](plain[1:], 0.1), MAKERS["adam"](plain[1:], 0.1), granularity="global")
    give_gradients(params, 0)
    give_gradients(plain, 0)
    params[0].grad[0, 0] = float("nan")
    optimizer.step()
    reference.step()
    assert all(distance(p, q) < 1e-12 for p, q in zip(params, plain, strict=True))
    assert not torch.equal(plain[1], parameters()[1])


def test_steps_that_were_sat_out_are_counted_by_name():
    params = parameters()
    named = [{"params": [("first", params[0])]}, {"params": [("second", params[1])]}]
    optimizer = gyroscope.Graft(optim.SGD(named, lr=0.1), MAKERS["adam"](params[:2], 0.1))
    assert optimizer.skipped() == {}
    for t in range(3):
        give_gradients(params, t)
        params[1].grad[0] = float("nan")
        if t == 0:
            params[0].grad = None  # positions are the group's, not those among the gradients
        optimizer.step()
    assert optimizer.skipped() == {"second": 3}
    assert copy.deepcopy(optimizer).skipped() == {"second": 3}


def test_steps_that_were_sat_out_are_counted_by_place_also_in_a_group_that_is_added():
    params = parameters()
    optimizer = gyroscope.Graft(MAKERS["sgd"](params[:2], 0.1), MAKERS["adam"](params[:2], 0.1))
    give_gradients(params, 0)
    params[1].grad[0] = float("inf")
    optimizer.step()
    optimizer.add_param_group({"params": [params[2]]})
    assert optimizer.skipped() == {"group0.1": 1}
    params[2].grad[0] = float("nan")
    optimizer.step()
    assert optimizer.skipped() == {"group0.1": 2, "group1.0": 1}


def test_a_group_given_as_an_iterator_is_added_to_both():
    params = parameters()
    optimizer = gyroscope.Graft(optim.SGD(params, lr=0.1), optim.Adam(params))
    more = nn.Linear(3, 2, dtype=torch.float64)
    optimizer.add_param_group({"params": more.parameters()})
    before = [p.detach().clone() for p in more.parameters()]
    give_gradients([*params, *more.parameters()], 0)
    optimizer.step()
    for p, w in zip(more.parameters(), before, strict=True):
        assert float((p.detach() - w).norm()) == pytest.approx(0.1 * float(p.grad.norm()))


def test_a_group_that_one_of_the_two_refuses_is_added_to_neither():
    params = parameters()
    magnitude, direction = optim.SGD(params, lr=0.1), optim.Adam(params)
    optimizer = gyroscope.Graft(magnitude, direction)
    new = nn.Parameter(torch.ones(2, 2))
    direction.add_param_group({"params": [new]})
    with pytest.raises(ControlError, match=r"Adam rejected the group .*; nothing was changed"):
        optimizer.add_param_group({"params": [new]})
    assert [len(one.param_groups) for one in (magnitude, direction)] == [1, 2]
    give_gradients(params, 0)
    with pytest.raises(ControlError, match="`magnitude` now holds 3 parameters and `direction` 4; nothing was changed"):
        optimizer.step()
    assert not magnitude.state


def test_an_interrupted_step_leaves_nothing_behind_for_the_next(monkeypatch):
    def run(interrupt):
        params = parameters()
        optimizer = gyroscope.Graft(optim.SGD(params, lr=0.1), optim.Adam(params))
        start = [p.detach().clone() for p in params]
        give_gradients(params, 0)
        with monkeypatch.context() as patch:
            patch.setattr("gyroscope.control.graft.combine_", interrupt)
            try:
                optimizer.step()
            except KeyboardInterrupt:
                assert all(torch.equal(p, w) for p, w in zip(params, start, strict=True))
        give_gradients(params, 1)
        optimizer.step()
        return params

    def interrupt(*_):
        raise KeyboardInterrupt

    # What both optimizers have seen is the same, and only the weights were left as they were.
    torch.testing.assert_close(run(interrupt), run(lambda *_: None))


def test_a_sparse_gradient_is_rejected_and_nothing_changes():
    embedding = nn.Embedding(5, 3, sparse=True)
    before = embedding.weight.detach().clone()
    params = [nn.Parameter(torch.ones(2)), embedding.weight]
    params[0].grad = torch.ones(2)
    embedding(torch.tensor([1])).sum().backward()
    optimizer = gyroscope.Graft(optim.SGD(params, lr=0.1), optim.SGD(params, lr=0.1, momentum=0.9))
    with pytest.raises(ControlError, match=r"of group 0 has a sparse gradient.*an optimizer of its own"):
        optimizer.step()
    assert params[0].tolist() == [1, 1]
    assert torch.equal(embedding.weight, before)


def test_a_device_without_float64_gets_no_number_of_that_type(monkeypatch):
    """Such as MPS, to which an array in float64 cannot be copied."""
    moved = []
    to_device = graft.to_device
    monkeypatch.setattr(graft, "to_device", lambda array, device: moved.append(array.dtype) or to_device(array, device))
    monkeypatch.setattr(eager, "accumulator", lambda device: torch.float32)
    monkeypatch.setattr(eager, "_kept", threading.local())
    params = parameters(torch.float32)
    optimizer = gyroscope.Graft(MAKERS["adamw"](params, 0.1), MAKERS["adamw"](params, 0.1))
    give_gradients(params, 0)
    optimizer.step()
    assert set(moved) == {np.dtype(np.float32)}
