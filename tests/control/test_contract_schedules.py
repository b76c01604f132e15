"""Schedulers on the wrapper: the angle of every step is arctan of the scheduled rate."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from contract_models import (
    NEAR,
    RHO,
    Make,
    adam,
    angle,
    backward,
    mlp,
    momentum,
    reads_weights,
    same,
    sgd,
    train,
    weights,
)
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from gyroscope import Layca, steer
from gyroscope.errors import ControlError

pytestmark = pytest.mark.any_device

Schedule = Callable[[Optimizer], Any]

SCHEDULES: dict[str, Schedule] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3], gamma=0.2),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=8),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=8),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 3), lr_scheduler.CosineAnnealingLR(o, 5)], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
}


def _alone(schedule: Schedule, steps: int) -> list[tuple[float, float]]:
    """The oracle: rates and momenta under the same scheduler on a bare SGD of the same groups."""
    p, q = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([{"params": [p]}, {"params": [q]}], lr=RHO, momentum=0.9)
    scheduler = schedule(optimizer)
    found = []
    for _ in range(steps):
        found.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_step_turns_by_arctan_of_the_scheduled_rate(name: str) -> None:
    model = mlp(dtype=torch.float64)
    optimizer = Layca(momentum(model.parameters()), model)
    scheduler = SCHEDULES[name](optimizer)
    rates = _alone(SCHEDULES[name], 6)
    assert len({round(rate, 9) for rate, _ in rates}) > 2
    for seed, (rate, expected_momentum) in enumerate(rates):
        before = weights(model)
        backward(model, seed)
        assert optimizer.param_groups[0]["momentum"] == expected_momentum
        optimizer.step()
        scheduler.step()
        for old, layer in ((before[0], model[0]), (before[2], model[2])):
            assert angle(old, layer.weight) == pytest.approx(math.atan(rate), rel=NEAR)
    assert scheduler.get_last_lr()[0] == optimizer.param_groups[0]["lr"]


def test_one_cycle_moves_the_momentum_of_the_inner_optimizer() -> None:
    assert len({m for _, m in _alone(SCHEDULES["OneCycleLR"], 6)}) > 2


@pytest.mark.parametrize("tensor", [False, True])
def test_reduce_on_plateau_lowers_every_group_once(tensor: bool) -> None:
    model = mlp(dtype=torch.float64)
    rate = torch.tensor(0.5, dtype=torch.float64) if tensor else 0.5
    optimizer = Layca(torch.optim.SGD(model.parameters(), lr=rate), model)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for seed, expected in enumerate([0.5, 0.5, 0.25, 0.125]):
        before = weights(model)
        backward(model, seed)
        optimizer.step()
        scheduler.step(1.0)
        assert angle(before[0], model[0].weight) == pytest.approx(math.atan(expected), rel=NEAR)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.0625, 0.0625]


@pytest.mark.parametrize("make", [sgd, adam, reads_weights])
@pytest.mark.parametrize("name", [*SCHEDULES, "ReduceLROnPlateau"])
def test_a_saved_scheduler_and_optimizer_continue_as_if_not_interrupted(name: str, make: Make) -> None:
    def schedule(o: Optimizer) -> Any:
        if name == "OneCycleLR":
            return lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=8, cycle_momentum=False)
        if name == "ReduceLROnPlateau":
            return lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0)
        return SCHEDULES[name](o)

    def go(model: Any, optimizer: Optimizer, scheduler: Any, seeds: range) -> None:
        for seed in seeds:
            train(model, optimizer, [seed])
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))

    model = mlp()
    optimizer = Layca(make(model.parameters()), model)
    scheduler = schedule(optimizer)
    go(model, optimizer, scheduler, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), scheduler.state_dict()))
    go(model, optimizer, scheduler, range(3, 6))

    other = mlp(seed=1)
    resumed = Layca(make(other.parameters()), other)
    resumed_scheduler = schedule(resumed)
    for part, state in zip((other, resumed, resumed_scheduler), saved, strict=True):
        part.load_state_dict(state)
    go(other, resumed, resumed_scheduler, range(3, 6))
    assert same(weights(other), weights(model))
    assert [g["lr"] for g in resumed.param_groups] == [g["lr"] for g in optimizer.param_groups]


def test_a_scheduler_stepped_before_the_optimizer_is_noticed() -> None:
    model = mlp()
    scheduler = lr_scheduler.StepLR(Layca(sgd(model.parameters()), model), 1)
    with pytest.warns(UserWarning, match=r"before `optimizer.step\(\)`"):
        scheduler.step()


def test_the_scheduled_copy_of_an_optimizer_can_be_scheduled_again() -> None:
    model = mlp(dtype=torch.float64)
    optimizer = Layca(sgd(model.parameters()), model)
    lr_scheduler.StepLR(optimizer, 1)
    twin, other = copy.deepcopy((model, optimizer))
    scheduler = lr_scheduler.ExponentialLR(other, 0.5)
    for seed in range(3):
        before = weights(twin)
        train(twin, other, [seed])
        scheduler.step()
        assert angle(before[0], twin[0].weight) == pytest.approx(math.atan(RHO * 0.5**seed), rel=NEAR)


def test_a_scheduler_built_before_a_mixed_group_is_split_is_refused() -> None:
    model = mlp()
    inner = sgd(model.parameters())
    lr_scheduler.StepLR(inner, 1)
    with pytest.raises(ControlError, match="Wrap the optimizer first"):
        Layca(inner, model)
    assert len(inner.param_groups) == 1


def test_learned_norms_take_a_rate_in_a_tensor_of_any_shape() -> None:
    def trained(rate: float | torch.Tensor) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        optimizer = steer(model, norms="learned", heads="turn")
        for group in optimizer.param_groups:
            if group["rule"] == "turn":
                group["lr"] = rate
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(5, 3)).square().sum().backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    rate = torch.tensor([[0.03]], dtype=torch.float64)
    assert all(map(torch.equal, trained(rate), trained(rate.item())))
