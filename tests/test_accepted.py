"""What counts as a number."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from gyroscope.base.accepted import real, whole


@pytest.mark.parametrize(
    "given", [3, np.int8(3), np.uint64(3), np.array(3), torch.tensor(3), torch.tensor([3])], ids=lambda one: type(one)
)
def test_whole_numbers_of_every_library_are_whole(given):
    found = whole(given)
    assert found == 3
    assert type(found) is int


@pytest.mark.parametrize(
    "given",
    [True, np.bool_(True), torch.tensor(True), 3.0, np.float64(3), torch.tensor(3.0), "3", None, [3], 3j, math.nan],
    ids=repr,
)
def test_what_is_no_whole_number_is_none(given):
    assert whole(given) is None


def test_whole_numbers_below_the_least_are_refused():
    assert [whole(k, least=1) for k in (-1, 0, 1, 2)] == [None, None, 1, 2]


@pytest.mark.parametrize(
    "given",
    [
        2, 2.0, np.float16(2), np.int32(2), np.array(2.0), np.array([[2.0]]), torch.tensor(2.0), torch.tensor([2]),
        torch.tensor(2.0, requires_grad=True), torch.nn.Parameter(torch.tensor([2.0])), Fraction(4, 2), Decimal(2),
    ],
    ids=lambda one: f"{type(one).__module__}.{type(one).__name__}",
)  # fmt: skip
def test_numbers_of_every_library_are_real(given):
    found = real(given)
    assert found == 2.0
    assert type(found) is float


@pytest.mark.parametrize(
    "given",
    ["2", b"2", np.array("2"), None, [2.0], (2.0,), 2j, np.complex64(2), np.array([1.0, 2.0]), np.array([]),
     torch.ones(2), True, np.bool_(True), torch.tensor(1j), 10**400, {}, object],
    ids=lambda one: f"{type(one).__module__}.{type(one).__name__}",
)  # fmt: skip
def test_what_is_no_number_is_none(given):
    assert math.isnan(real(given))


def test_infinities_are_numbers():
    assert (real(math.inf), real(-math.inf)) == (math.inf, -math.inf)
