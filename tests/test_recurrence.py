"""Which recurrence of the norm an optimizer has, read from what a run remembers of torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gyroscope
from gyroscope.monitor.watch import meta_of
from gyroscope.theory.recurrence import Recurrence, optimizer_of, recurrence_of


def remembered(make) -> dict[str, object]:
    model = nn.Linear(2, 2)
    return meta_of(None, model, [make(model.parameters())])["optimizers"][0]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, nesterov=True),
            Recurrence("sgd", {"momentum": 0.9, "dampening": 0.0, "nesterov": True}),
        ),
        (
            lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.5, dampening=0.25),
            Recurrence("sgd", {"momentum": 0.5, "dampening": 0.25, "nesterov": False}),
        ),
        (
            lambda ps: gyroscope.SGD_AMom(ps, 0.1, momentum=0.8),
            Recurrence("sgd", {"momentum": 0.8, "dampening": 0.8, "nesterov": False}),
        ),
        (
            lambda ps: torch.optim.Adam(ps, betas=(0.8, 0.95)),
            Recurrence("adamw", {"momentum": 0.8}, decays=False, second=0.95),
        ),
        (lambda ps: torch.optim.AdamW(ps), Recurrence("adamw", {"momentum": 0.9}, second=0.999)),
        (lambda ps: torch.optim.RMSprop(ps, alpha=0.9), Recurrence("adamw", decays=False, second=0.9)),
    ],
    ids=["nesterov", "dampened", "SGD_AMom", "Adam", "AdamW", "RMSprop"],
)
def test_the_options_are_those_of_the_groups(make, expected):
    assert recurrence_of(remembered(make)) == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: torch.optim.AdamW(ps, amsgrad=True),
        lambda ps: torch.optim.RMSprop(ps, momentum=0.9),
        lambda ps: torch.optim.RMSprop(ps, centered=True),
        lambda ps: torch.optim.Adagrad(ps),
    ],
    ids=["amsgrad", "RMSprop with momentum", "centered", "Adagrad"],
)
def test_theory_has_none_for_the_others(make):
    assert recurrence_of(remembered(make)) is None
    assert optimizer_of(remembered(make)).family == "unknown"


def test_averages_settle_after_the_longer_of_both_memories():
    settles = {
        "SGD": remembered(lambda ps: torch.optim.SGD(ps, 0.1)),
        "momentum": remembered(lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9)),
        "Adam, long": remembered(lambda ps: torch.optim.Adam(ps, betas=(0.9, 0.999))),
        "Adam, short": remembered(lambda ps: torch.optim.Adam(ps, betas=(0.9, 0.95))),
        "RMSprop": remembered(lambda ps: torch.optim.RMSprop(ps, alpha=0.99)),
    }
    found = {name: optimizer_of(given).settles for name, given in settles.items()}
    assert found == {"SGD": 0, "momentum": 50, "Adam, long": 1000, "Adam, short": 50, "RMSprop": 100}
