"""Trainings with weight decay, and with the exponential schedule in its place, go through the same functions."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from gyroscope.errors import DynamicsError
from gyroscope.theory.batch_norm import batch_norm
from gyroscope.theory.exponential import ExponentialRates, exponential_rates, shrinkage, undo_decay

STEPS = 60


class Normal(nn.Module):
    """Batch normalization with ε = 0, which makes layers scale-invariant exactly."""

    def forward(self, x: Tensor) -> Tensor:
        return batch_norm(x)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    hidden = [nn.Linear(5, 8, bias=False), Normal(), nn.Tanh(), nn.Linear(8, 6, bias=False), Normal(), nn.Tanh()]
    return nn.Sequential(*hidden, nn.Linear(6, 3)).double()


def optimizer(model: nn.Sequential, *, lr=0.3, decay=0.02, momentum=0.0, **options) -> torch.optim.SGD:
    inner = [model[0].weight, model[3].weight]
    groups = [{"params": inner, "weight_decay": decay}, {"params": list(model[6].parameters())}]
    return torch.optim.SGD(groups, lr=lr, momentum=momentum, **options)


def batches(steps: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, 5, generator=draw, dtype=torch.float64), torch.randint(0, 3, (16,), generator=draw))
        for _ in range(steps)
    ]


def train(model, sgd, schedule=None, given=None) -> Tensor:
    outputs = []
    for x, y in batches() if given is None else given:
        out = model(x)
        outputs.append(out.detach())
        sgd.zero_grad()
        F.cross_entropy(out, y).backward()
        sgd.step()
        if schedule is not None:
            schedule.step()
    return torch.stack(outputs)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_the_schedule_goes_through_the_functions_of_weight_decay(momentum):
    decay = 0.02 if momentum < 0.9 else 0.003
    model = network()
    twin = copy.deepcopy(model)
    with_decay = train(model, optimizer(model, decay=decay, momentum=momentum))
    sgd = optimizer(twin, decay=decay, momentum=momentum)
    schedule = undo_decay(sgd)
    instead = train(twin, sgd, schedule)
    torch.testing.assert_close(instead, with_decay, rtol=1e-9, atol=1e-9)
    share = shrinkage(0.3, decay, momentum=momentum)
    for i in (0, 3):
        torch.testing.assert_close(model[i].weight, twin[i].weight * (1 - share) ** STEPS, rtol=1e-9, atol=1e-11)
    assert twin[0].weight.norm() > 1.2 * model[0].weight.norm()
    without = train(twin := network(), optimizer(twin, decay=0.0, momentum=momentum))
    assert (without - with_decay).abs().max() > 1e-3  # weight decay made a difference


def test_it_may_begin_in_the_middle_of_a_training():
    model, given = network(), batches()
    sgd = optimizer(model, momentum=0.5)
    train(model, sgd, given=given[:20])
    twin, other = copy.deepcopy((model, sgd))
    with_decay = train(model, sgd, given=given[20:])
    instead = train(twin, other, undo_decay(other), given=given[20:])
    torch.testing.assert_close(instead, with_decay, rtol=1e-9, atol=1e-9)


def test_rates_that_change_are_made_up_for_step_by_step():
    lr = np.linspace(0.5, 0.01, STEPS)
    instead = exponential_rates(lr, 0.05, STEPS)
    runs = []
    for rates, decay in ((lr, 0.05), (instead, 0.0)):
        model = network()
        sgd = optimizer(model, decay=decay)
        outputs = []
        for rate, own, one in zip(rates.tolist(), lr.tolist(), batches(), strict=True):
            sgd.param_groups[0]["lr"], sgd.param_groups[1]["lr"] = rate, own
            outputs.append(train(model, sgd, given=[one])[0])
        runs.append(torch.stack(outputs))
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_scheduler_gives_the_rates_of_the_function(momentum):
    sgd = optimizer(network(), lr=0.1, decay=0.01, momentum=momentum)
    schedule = undo_decay(sgd)
    rates = []
    for _ in range(10):
        rates.append(schedule.get_last_lr())
        sgd.step()
        schedule.step()
    first, second = np.array(rates).T
    np.testing.assert_allclose(first, exponential_rates(0.1, 0.01, 10, momentum=momentum), rtol=1e-12)
    np.testing.assert_allclose(second, 0.1)
    a = 1 - shrinkage(0.1, 0.01, momentum=momentum)
    assert a**2 - (1 + momentum - 0.001) * a + momentum == pytest.approx(0, abs=1e-15)


def test_a_schedule_is_saved_and_loaded():
    def stepped(sgd, schedule, times):
        for _ in range(times):
            sgd.step()
            schedule.step()
        return schedule.get_last_lr()

    sgd = optimizer(network(), momentum=0.5)
    schedule = undo_decay(sgd)
    stepped(sgd, schedule, 7)
    other = optimizer(network(), momentum=0.5)
    again = undo_decay(other)
    again.load_state_dict(schedule.state_dict())
    other.load_state_dict(sgd.state_dict())
    assert stepped(other, again, 1) == stepped(sgd, schedule, 1)


def test_without_weight_decay_nothing_changes():
    sgd = optimizer(network(), decay=0.0, momentum=0.9)
    schedule = undo_decay(sgd)
    assert schedule.get_last_lr() == [0.3, 0.3]
    assert not sgd.state
    assert exponential_rates(0.3, 0.0, 3).tolist() == [0.3] * 3


def test_only_the_groups_that_were_named_are_treated():
    sgd = optimizer(network())
    undo_decay(sgd, groups=[1])
    assert [group["weight_decay"] for group in sgd.param_groups] == [0.02, 0.0]


BAD = {
    "decay beyond all": (lambda: shrinkage(2.0, 1.0), "below 1"),
    "no real root": (lambda: shrinkage(0.1, 0.1, momentum=0.9), "at most"),
    "momentum": (lambda: shrinkage(0.1, 0.1, momentum=1.0), "`momentum` must .* got 1.0"),
    "negative": (lambda: shrinkage(-0.1, 0.1), "`lr` must .* got -0.1"),
    "length": (lambda: exponential_rates([0.1, 0.1], 0.1, 3), r"shape \(2,\)"),
    "changing with momentum": (
        lambda: exponential_rates([0.1, 0.1], 0.1, 2, momentum=0.5),
        "`lr` must be one number if there is momentum",
    ),
    "overflow": (lambda: exponential_rates(0.5, 1.0, 600), "beyond float64"),
    "Nesterov": (lambda: undo_decay(optimizer(network(), momentum=0.5, nesterov=True)), "Nesterov"),
    "Adam": (lambda: undo_decay(torch.optim.Adam(network().parameters())), "a Adam"),
    "group": (lambda: undo_decay(optimizer(network()), groups=[2]), "from 0 to 1"),
    "shares": (lambda: ExponentialRates(optimizer(network()), [0.1]), "2 groups"),
}


@pytest.mark.parametrize(("asked", "says"), BAD.values(), ids=BAD)
def test_what_no_schedule_makes_up_for_is_refused(asked, says):
    with pytest.raises(DynamicsError, match=says):
        asked()


def test_a_refusal_changes_nothing():
    one, other = (torch.ones(2, requires_grad=True) for _ in range(2))
    groups = [{"params": [one]}, {"params": [other], "weight_decay": 5.0}]
    sgd = torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=1e-3)
    with pytest.raises(DynamicsError):
        undo_decay(sgd)
    assert [group["weight_decay"] for group in sgd.param_groups] == [1e-3, 5.0]
    assert not sgd.state


def steps_to_the_end(w, sgd, schedule, at_most):
    """Steps on what a scale-invariant loss would give: a gradient across the weights that falls as they grow."""
    across = torch.tensor([1.0, -1.0], dtype=torch.float64)
    for step in range(at_most):
        w.grad = (1e-4 * across / w.detach().double().norm()).to(w.dtype)
        sgd.step()
        try:
            schedule.step()
        except DynamicsError as error:
            return step, str(error)
    raise AssertionError(f"no end in {at_most} steps")


ENDS = {
    "float32": (torch.float32, 0.1, 0.0, 36),
    "float16": (torch.float16, 0.1, 0.0, 4.2),
    "bfloat16": (torch.bfloat16, 0.1, 0.0, 36),
    "float64": (torch.float64, 0.4, 0.0, 345),
    "float32, momentum": (torch.float32, 0.002, 0.9, 36),
}


@pytest.mark.parametrize(("dtype", "decay", "momentum", "times"), ENDS.values(), ids=ENDS)
def test_a_schedule_ends_in_words_where_its_type_does(dtype, decay, momentum, times):
    w = torch.ones(2, dtype=dtype, requires_grad=True)
    sgd = torch.optim.SGD([w], lr=0.5, momentum=momentum, weight_decay=decay)
    steps, says = steps_to_the_end(w, sgd, undo_decay(sgd), 6000)
    assert f"beyond {dtype}, the type of the parameters in group 0" in says
    assert bool(w.isfinite().all())
    a = 1 - shrinkage(0.5, decay, momentum=momentum)
    # a^{−(2t+1)} leaves room for sums of squares at all steps that were taken, and not at the next.
    last, beyond = (-(2 * step + 1) * np.log(a) for step in (steps, steps + 1))
    most = np.log(torch.finfo(dtype).max)
    assert last < min(700, most - min(most / 4, np.log(2**24))) < beyond
    # As the documentation has it, up to what momentum and long steps add to 1 − a.
    assert steps == pytest.approx(times * (1 - momentum) / (0.5 * decay), rel=0.15)


def test_a_large_rate_ends_the_schedule_before_it_is_beyond_the_type():
    w = torch.ones(2, requires_grad=True)
    sgd = torch.optim.SGD([w], lr=1e30, weight_decay=1e-31)
    _, says = steps_to_the_end(w, sgd, undo_decay(sgd), 200)
    assert "beyond torch.float32" in says
    assert 1e37 < sgd.param_groups[0]["lr"] < torch.finfo(torch.float32).max


def test_the_state_of_a_schedule_is_numbers_and_leaves_types_to_the_parameters():
    def made(dtype):
        sgd = torch.optim.SGD([torch.ones(2, dtype=dtype, requires_grad=True)], lr=0.5, weight_decay=1.0)
        return sgd, undo_decay(sgd)

    _, narrow = made(torch.float32)
    (wide, other), state = made(torch.float64), json.loads(json.dumps(narrow.state_dict()))
    other.load_state_dict(state)
    for _ in range(100):  # a^{−2t} is beyond float32 after 64
        wide.step()
        other.step()
    assert wide.param_groups[0]["lr"] == pytest.approx(0.5 * 2.0**201)


def test_groups_that_come_later_are_refused_in_words():
    sgd = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.5, weight_decay=1.0)
    schedule = undo_decay(sgd)
    sgd.add_param_group({"params": [torch.ones(2, requires_grad=True)]})
    sgd.step()
    with pytest.raises(DynamicsError, match="has 2 groups, but the schedule was made for 1"):
        schedule.step()


def test_a_normalizer_still_normalizes_when_the_schedule_ends():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(9, 32, bias=False), nn.BatchNorm1d(32, affine=False))
    x, y = 5 * torch.randn(256, 9), torch.randint(0, 32, (256,))
    sgd = torch.optim.SGD(net.parameters(), lr=0.5, weight_decay=0.1)
    schedule = undo_decay(sgd)

    def train():
        for _ in range(1000):
            sgd.zero_grad()
            F.cross_entropy(net(x), y).backward()
            sgd.step()
            schedule.step()

    with pytest.raises(DynamicsError, match="sums of squares of activations, may be beyond"):
        train()
    assert net[0].weight.norm() > 1e10
    assert torch.allclose(net(x).std(0, correction=0), torch.ones(32), atol=1e-3)
