"""Numbers are taken in every form in which libraries give them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import gyroscope
from gyroscope.conditioning import Schedule
from gyroscope.conditioning.curvature import top_eigenvalue
from gyroscope.conditioning.fisher import fisher
from gyroscope.errors import ConditioningError

X = torch.randn(8, 9, generator=torch.Generator().manual_seed(1))
Y = torch.arange(8) % 3


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(9, 3)


@pytest.mark.parametrize("seed", [2**63, 2**64 - 1, -1, -(2**63), np.uint64(2**63 + 5), np.array(5), torch.tensor(5)])
@pytest.mark.parametrize("asks", [gyroscope.condition, fisher, top_eigenvalue], ids=lambda one: one.__name__)
def test_every_seed_of_a_generator_is_a_seed(asks: Any, seed: Any) -> None:
    drawn = []

    def labels(output: Tensor, generator: torch.Generator) -> Tensor:
        drawn.append(generator.initial_seed())
        return Y

    asks(linear(), F.cross_entropy, (X, Y), labels=labels, seed=seed)
    assert set(drawn) == {torch.Generator().manual_seed(int(seed)).initial_seed()}


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_seeds_beyond_those_of_a_generator_are_refused(seed: int) -> None:
    with pytest.raises(ConditioningError, match=f"`seed` must be a whole number .*, got {seed}"):
        gyroscope.condition(linear(), F.cross_entropy, (X, Y), seed=seed)


@pytest.mark.parametrize(
    "form",
    [float, np.float64, np.array, torch.tensor, lambda n: torch.tensor([n])],
    ids=["float", "numpy", "array", "tensor", "row"],
)
def test_tolerances_iterations_and_limits_are_numbers_of_any_library(form: Any) -> None:
    given = (linear(), F.cross_entropy, (X, Y))
    expected = top_eigenvalue(*given, tolerance=2.0**-13, iterations=300)
    assert top_eigenvalue(*given, tolerance=form(2.0**-13), iterations=form(300)) == expected
    assert fisher(*given, limit=form(30)).matrix is not None
    with pytest.raises(ConditioningError, match=r"above the limit of 29: it would take"):
        fisher(*given, limit=form(29))


def test_an_infinite_limit_is_none_and_iterations_have_an_end() -> None:
    given = (linear(), F.cross_entropy, (X, Y))
    assert fisher(*given, limit=float("inf")).matrix is not None
    with pytest.raises(ConditioningError, match="iterations=inf"):
        top_eigenvalue(*given, iterations=float("inf"))


@pytest.mark.parametrize("form", [np.array, torch.tensor])
def test_schedules_hold_plain_numbers(form: Any) -> None:
    found = Schedule(every=form(3), scale=np.array(2.0), p=form(0.5))
    assert (found.every, found.scale, found.p) == (3, 2.0, (0.5,))
    assert (type(found.every), type(found.scale), type(found.p[0])) == (int, float, float)
