"""Conversions of rates against measured rotation, and schedules against their closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._python_dispatch import TorchDispatchMode

from gyroscope import Layca, steer
from gyroscope.control import SGD_AMom, rates
from gyroscope.control.steering import Law, Ledger, Move, _factors, _learn
from gyroscope.errors import ControlError

Make = Callable[[list[Tensor]], Optimizer]


def rotations(make: Make, steps: int, seed: int = 0, shape: tuple[int, int] = (64, 64)) -> Tensor:
    """Return the mean cosine to the start over eight layers, step by step, with independent random gradients."""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(shape, generator=generator) for _ in range(8)]
    start = torch.stack(weights).flatten(1).clone()
    optimizer = make(weights)
    for w in weights:
        w.grad = torch.empty_like(w)
    cosines = []
    for _ in range(steps):
        for w in weights:
            assert w.grad is not None
            w.grad.normal_(generator=generator)
        optimizer.step()
        cosines.append(torch.cosine_similarity(torch.stack(weights).flatten(1), start).mean())
    return torch.stack(cosines)


def half_rotation(cosines: Tensor) -> int:
    """Return the first step after which the cosine is below one half."""
    return int((cosines < 0.5).nonzero()[0]) + 1


def plain(rate: float) -> Make:
    return lambda weights: Layca(torch.optim.SGD(weights, lr=rate))


def averaged(rate: float, beta: float) -> Make:
    return lambda weights: Layca(SGD_AMom(weights, lr=rate, momentum=beta))


def test_two_powers_of_three_and_momentum_rotate_four_times_slower() -> None:
    """3⁻ᵏ without momentum reaches half rotation 81/19 = 4.26 times sooner than 3⁻ᵏ⁻² with a momentum of 0.9."""
    sooner = half_rotation(rotations(plain(3**-2), 160))
    later = half_rotation(rotations(averaged(3**-4, 0.9), 640))
    assert sooner == pytest.approx(2 * math.log(2) / math.log1p(3**-4), rel=0.04)
    assert later / sooner == pytest.approx(81 / 19, rel=0.06)
    assert (3**-2 / (3**-4 / rates.with_momentum(1.0, 0.9))) ** 2 == pytest.approx(81 / 19)


@pytest.mark.parametrize("beta", [0.5, 0.8])
def test_the_converted_rate_rotates_as_far(beta: float) -> None:
    without = half_rotation(rotations(plain(0.1), 190))
    converted = half_rotation(rotations(averaged(rates.with_momentum(0.1, beta), beta), 220, seed=1))
    assert converted == pytest.approx(without, rel=0.06)


def test_a_rate_is_converted_between_momenta_and_back() -> None:
    there = rates.with_momentum(0.02, 0.99, given_for=0.9)
    assert there == pytest.approx(rates.with_momentum(rates.with_momentum(0.02, 0.0, given_for=0.9), 0.99))
    assert rates.with_momentum(there, 0.9, given_for=0.99) == pytest.approx(0.02)


def test_a_rate_from_decay_is_that_of_adamw_in_equilibrium() -> None:
    lr, decay = 0.02, 0.2
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(96, 96, generator=generator)
    w *= math.sqrt(lr / (2 * decay))  # its norm in equilibrium, so that nothing has to settle
    w.grad = torch.empty_like(w)
    optimizer = torch.optim.AdamW([w], lr=lr, weight_decay=decay, betas=(0.9, 0.95))
    angles = []
    for step in range(300):
        before = w.clone()
        w.grad.normal_(generator=generator)
        optimizer.step()
        if step >= 50:
            angles.append(torch.arccos(torch.cosine_similarity(before.flatten().double(), w.flatten().double(), dim=0)))
    assert torch.stack(angles).mean().item() == pytest.approx(rates.from_decay(lr, decay, beta=0.9), rel=0.05)
    assert rates.from_decay(lr, decay) == pytest.approx(math.sqrt(2 * lr * decay))


# Schedules


def course(schedule: LRScheduler, steps: int) -> list[list[float]]:
    """Return the `lr` of every group at steps 0 … `steps`."""
    seen = []
    for _ in range(steps + 1):
        seen.append([float(group["lr"]) for group in schedule.optimizer.param_groups])
        schedule.optimizer.step()
        schedule.step()
    return seen


def two_groups() -> Optimizer:
    groups = [{"params": [torch.zeros(2)], "lr": 0.5}, {"params": [torch.zeros(2)], "lr": 0.002}]
    return torch.optim.SGD(groups)


def test_cosine_is_half_a_cosine_of_each_group_s_own_rate() -> None:
    for t, (one, other) in enumerate(course(rates.cosine(two_groups(), 40, floor=0.1), 60)):
        expected = 0.1 + 0.9 * (1 + math.cos(math.pi * min(t, 40) / 40)) / 2
        assert (one, other) == (pytest.approx(0.5 * expected), pytest.approx(0.002 * expected))


def test_cosine_is_that_of_torch_where_there_is_one_group_and_no_floor() -> None:
    mine = two_groups()
    theirs = torch.optim.SGD([torch.zeros(2)], lr=0.5)
    expected = course(torch.optim.lr_scheduler.CosineAnnealingLR(theirs, 30), 30)
    assert [row[0] for row in course(rates.cosine(mine, 30), 30)] == pytest.approx([row[0] for row in expected])


def test_wsd_holds_the_rate_and_lowers_it_linearly() -> None:
    for t, (one, other) in enumerate(course(rates.wsd(two_groups(), 50, decay=0.4, floor=0.2), 60)):
        expected = 1.0 if t <= 30 else 0.2 + 0.8 * max(50 - t, 0) / 20
        assert (one, other) == (pytest.approx(0.5 * expected), pytest.approx(0.002 * expected))


@pytest.mark.parametrize("make", [rates.cosine, rates.wsd])
def test_there_is_no_warm_up_unless_asked_for(make: Any) -> None:
    assert course(make(two_groups(), 20), 0)[0] == [0.5, 0.002]
    risen = [row[0] for row in course(make(two_groups(), 20, warmup=3), 3)]
    assert risen == pytest.approx([0.125, 0.25, 0.375, 0.5])


def test_a_schedule_moves_a_steered_model_and_resumes() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = steer(model, rate=0.05)
    schedule = rates.cosine(optimizer, 10)
    for _ in range(5):
        optimizer.step()
        schedule.step()
    assert optimizer.rates()["0.weight"] == pytest.approx(0.025)
    resumed = rates.cosine(steer(model, rate=0.05), 10)
    resumed.load_state_dict(schedule.state_dict())
    resumed.step()
    schedule.step()
    assert resumed.get_last_lr() == schedule.get_last_lr()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: rates.with_momentum(-1.0, 0.9), r"`rate` must be a finite number ≥ 0, got -1\.0\. Try 3\*\*-3\."),
        (lambda: rates.with_momentum(0.1, 1.0), r"`beta` must be a number ≥ 0 and below 1, a momentum, got 1\.0"),
        (lambda: rates.with_momentum(0.1, 0.9, given_for=-1), r"`given_for` must be .*, got -1"),
        (lambda: rates.from_decay(0.0, 0.1), r"`lr` must be a finite number > 0, got 0\.0\. Try 0\.001\."),
        (lambda: rates.from_decay(1e-3, 0), r"Without decay there is no equilibrium"),
        (lambda: rates.from_decay(1e-3, math.nan), r"`weight_decay` must be a finite number > 0, got nan\."),
        (lambda: rates.cosine(two_groups(), 0), r"`steps` must be an integer ≥ 1, the steps of the training, got 0"),
        (lambda: rates.cosine(two_groups(), 10.5), r"`steps` must be an integer ≥ 1, .*got 10\.5"),
        (lambda: rates.cosine(two_groups(), 10, floor=2), r"`floor` must be a share of the rate, .*got 2"),
        (lambda: rates.cosine(two_groups(), 10, warmup=10), r"`warmup` must be an integer ≥ 0 and below the 10 steps"),
        (lambda: rates.wsd(two_groups(), 10, decay=-0.1), r"`decay` must be a share of the steps, .*got -0\.1"),
        (lambda: rates.wsd(two_groups(), 10, decay=0.9, warmup=5), r"`warmup` must be at most the 1 steps before"),
        (lambda: rates.wsd(None, 10), r"`optimizer` must be a torch\.optim\.Optimizer"),
    ],
)
def test_bad_arguments_are_refused(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(ControlError, match=said):
        call()


class Copies(TorchDispatchMode):
    """Counts the tensors that are copied to another device."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        self.count += function is torch.ops.aten._to_copy.default and args[0].device != out.device
        return out


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_rate_in_a_tensor_on_the_host_is_not_copied_to_the_device_of_the_layers(shape: tuple[int, ...]) -> None:
    device = torch.device("meta")
    ledger = Ledger.blank(3, device)
    rate = torch.full(shape, 0.03)
    move = Move(weights=[], displacements=[], rows=[0, 1, 2], counts=[1, 1, 1], lr=rate)
    with Copies() as copies:
        a, b = _factors(move, torch.ones(3, 3, dtype=torch.float64, device=device), ledger, Law())
        _learn(ledger, [0, 1, 2], torch.ones(3, 2, dtype=torch.float64, device=device), rate, 1.0)
    assert copies.count == 0
    assert a.shape == b.shape == (3,)
