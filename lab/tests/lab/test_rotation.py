"""The rotation of weights from their initialization, as trainings measure it."""

from math import cos, fsum, isnan, pi, sin, sqrt

import pytest
import torch
from torch import nn

from gyroscope_lab.training.gauge import Gauge


def rotation(weight, initial):
    """The reading of a gauge made at `initial`, after the layer has become `weight`."""
    rows = initial.reshape(-1, initial.shape[-1])
    layer = nn.Linear(rows.shape[1], rows.shape[0], bias=False, dtype=initial.dtype)
    layer.weight.data.copy_(rows)
    gauge = Gauge(layer)
    layer.weight.data.copy_(weight.reshape(rows.shape))
    return gauge.read()[0, 0].item()


@pytest.mark.parametrize("angle", [0.0, 1e-6, 0.3, pi / 2, 3.0, pi])
def test_rotation_is_one_minus_the_cosine_of_the_angle(angle):
    initial = torch.tensor([2.0, 0.0], dtype=torch.float64)
    weight = 5 * torch.tensor([cos(angle), sin(angle)], dtype=torch.float64)
    # Lengths are subtracted, and what is left of their rounding is 1e-16.
    assert rotation(weight, initial) == pytest.approx(2 * sin(angle / 2) ** 2, rel=1e-9, abs=1e-15)


def test_rotation_of_an_unmoved_float32_layer_is_exactly_zero():
    weight = torch.randn(64, 32, 3, 3, generator=torch.Generator().manual_seed(0))
    assert rotation(weight, weight.clone()) == 0.0


def test_rotation_is_computed_in_float64():
    generator = torch.Generator().manual_seed(0)
    initial = torch.randn(300, 300, generator=generator)
    weight = initial + 1e-3 * torch.randn(300, 300, generator=generator)
    w, w0 = weight.flatten().tolist(), initial.flatten().tolist()
    exact = 1 - exact_dot(w, w0) / sqrt(exact_dot(w, w) * exact_dot(w0, w0))
    assert rotation(weight, initial) == pytest.approx(exact, rel=0, abs=1e-14)


def exact_dot(x, y):
    """Products of float32 are exact in float64, and fsum rounds once."""
    return fsum(a * b for a, b in zip(x, y, strict=True))


def test_a_zero_layer_has_no_direction():
    assert isnan(rotation(torch.zeros(1, 4), torch.ones(1, 4)))
    assert isnan(rotation(torch.ones(1, 4), torch.zeros(1, 4)))
