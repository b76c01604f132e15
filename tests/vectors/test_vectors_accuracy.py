"""How far a layer has turned, from inner products alone: as in float64, at every size and magnitude."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gyroscope.vectors import dots
from oracles.vectors import angle

pytestmark = pytest.mark.usefixtures("cpu_backend")

ANGLES = [1e-4, 1e-3, 1e-2, 0.1, 1.0]
SIZES = [2, 1_000, 100_003, 2_000_000]


def turned(size: int, theta: float, magnitude: float = 1.0) -> tuple[Tensor, Tensor]:
    """Float32 weights, and the same turned by `theta` and made half as long again."""
    rng = torch.Generator().manual_seed(size)
    w, n = (torch.randn(size, generator=rng, dtype=torch.float64) for _ in range(2))
    n -= (n @ w) / (w @ w) * w
    t = 1.5 * (math.cos(theta) * w + math.sin(theta) * w.norm() / n.norm() * n)
    return (magnitude * w).float(), (magnitude * t).float()


def measured(w: Tensor, t: Tensor) -> tuple[float, float]:
    """Cosine distance and angle, from the three inner products."""
    ww, wt, tt = dots({"ww": ([w], [w]), "wt": ([w], [t]), "tt": ([t], [t])})[0].tolist()
    return 1 - wt / math.sqrt(ww * tt), math.atan2(math.sqrt(max(0.0, ww * tt - wt * wt)), wt)


@pytest.mark.parametrize("theta", ANGLES)
@pytest.mark.parametrize("size", SIZES)
def test_angles_are_right_to_a_thousandth(size: int, theta: float) -> None:
    w, t = turned(size, theta)
    assert measured(w, t)[1] == pytest.approx(angle(w, t), rel=1e-3)
    if size > 2:  # rounding two numbers to float32 turns them by more than a thousandth of the smallest angle
        assert measured(w, t)[1] == pytest.approx(theta, rel=1e-3)


@pytest.mark.parametrize("theta", [0.0, *ANGLES, math.pi])
@pytest.mark.parametrize("size", SIZES)
def test_cosine_distances_are_right_to_a_millionth(size: int, theta: float) -> None:
    w, t = turned(size, theta)
    assert measured(w, t)[0] == pytest.approx(1 - math.cos(angle(w, t)), abs=1e-6)


def test_a_float32_dot_would_not_show_the_smallest_angle() -> None:
    w, t = turned(2_000_000, 1e-4)
    ww, wt, tt = torch.dot(w, w).item(), torch.dot(w, t).item(), torch.dot(t, t).item()
    naive = math.atan2(math.sqrt(max(0.0, ww * tt - wt * wt)), wt)
    assert naive != pytest.approx(1e-4, rel=0.1)


@pytest.mark.parametrize("theta", ANGLES)
@pytest.mark.parametrize("magnitude", [1e-20, 1e-10, 1.0, 1e10, 1e20])
def test_angles_do_not_depend_on_magnitude(magnitude: float, theta: float) -> None:
    w, t = turned(1_000, theta, magnitude)
    assert measured(w, t)[1] == pytest.approx(theta, rel=1e-3)


@pytest.mark.parametrize("magnitude", [1e-25, 1e20])
def test_norms_whose_squares_leave_float32_are_right(magnitude: float) -> None:
    w, _ = turned(1_000, 0.1, magnitude)
    assert not 0 < torch.dot(w, w).item() < math.inf
    exact = math.fsum(p * p for p in w.tolist())
    assert dots({"ww": ([w], [w])}).item() == pytest.approx(exact, rel=1e-12)


def test_positive_and_negative_products_cancel_to_the_last_digit() -> None:
    x = torch.tensor([2.0**20, 1.0, -(2.0**20), 3.0]).repeat(1_000)
    y = torch.tensor([2.0**20, 1.0, 2.0**20, 0.5]).repeat(1_000)
    assert dots({"xy": ([x], [y])}).item() == 2_500  # every partial sum is a float64 number
