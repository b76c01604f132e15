"""The first step whose gradients are not finite is measured, whatever the interval: it shows which layer broke."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gyroscope


def trained(path, breaks, *, steps=60, at=31, every=3, dtype=torch.float32):
    """Train with measurements far apart; `breaks(net)` is called after a step in the middle."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 3)).to(dtype)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    with gyroscope.watch(net, optimizer, path, budget=None, every=every):
        for step in range(1, steps + 1):
            x = torch.randn(32, 8).to(dtype)
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), x[:, :3].argmax(1)).backward()
            optimizer.step()
            if step == at:
                breaks(net)
    return gyroscope.load(path)


def nan(net):
    net[2].weight.data[0, 0] = float("nan")


def flip(net):
    net[2].weight.data.view(torch.int32)[3, 4] ^= 1 << 30


@pytest.mark.parametrize(("breaks", "kind"), [(nan, "not_finite"), (flip, "jump")])
def test_the_layer_that_broke_between_measurements_is_named(tmp_path, breaks, kind):
    with trained(tmp_path, breaks) as run:
        assert 32 in run.steps  # 30 and 33 are those of the interval
        first = gyroscope.diagnose(run)[0]
    assert (first.kind, first.layers, first.since) == (kind, ("2.weight",), 32)


def test_steps_with_finite_gradients_are_measured_at_their_interval(tmp_path):
    with trained(tmp_path, lambda net: None) as run:
        assert run.steps.tolist() == list(range(0, 61, 3))


def test_gradients_that_stay_broken_are_measured_once_more_only(tmp_path):
    with trained(tmp_path, nan) as run:
        assert run.steps.tolist() == sorted([*range(0, 61, 3), 32])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_it_is_measured_however_far_from_the_steps_of_the_interval(tmp_path, dtype):
    with trained(tmp_path, nan, every=1000, dtype=dtype) as run:
        assert run.steps.tolist() == [0, 32, 60]
