"""The kernels of the quasi-diagonal preconditioner against torch's operations; run in Triton's interpreter.

`test_quasi_diagonal_kernels` starts these in a process of their own. On a machine with a GPU the same claims can be
checked on it: GYROSCOPE_TEST_DEVICE=cuda pytest <this file>.
"""

import copy
import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import gyroscope.dynamics.moments as moments
import gyroscope.dynamics.quasi_diagonal as module
from gyroscope.dynamics.direction_launch import Directions
from gyroscope.dynamics.moment_launches import MomentLaunches
from gyroscope.dynamics.quasi_diagonal import QuasiDiagonal
from interpreted import patch_language_once

patch_language_once()
DEVICE = torch.device(os.environ.get("GYROSCOPE_TEST_DEVICE", "cpu"))
# The interpreter computes with numpy, which warns where a GPU quietly gives inf or nan.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def make_net(dtype=torch.float64):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Conv2d(3, 3, 3, padding=1),
        nn.Tanh(), nn.Conv2d(3, 2, (2, 3), stride=2, bias=False), nn.Flatten(),
        nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 5, bias=False), nn.Linear(5, 3),
    )  # fmt: skip
    return net.to(DEVICE, dtype)


def batch(step, dtype=torch.float64, n=6):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(n, 2, 5, 6, generator=generator, dtype=torch.float64) + step
    return x.to(DEVICE, dtype), torch.randint(3, (n,), generator=generator).to(DEVICE)


def train(net, optimizer, step, n=6):
    optimizer.zero_grad()
    dtype = next(net.parameters()).dtype
    x, y = batch(step, dtype, n)
    F.cross_entropy(net(x).float() if dtype == torch.bfloat16 else net(x), y).backward()
    optimizer.step()


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


@pytest.fixture
def torchs(monkeypatch):
    """Switch the kernels off, for optimizers that are made and stepped under it."""

    def switch(on):
        for one in (moments, module):
            monkeypatch.setattr(one, "has_kernels", lambda held: not on and len(held) == 1)

    return switch


@pytest.fixture
def launched(monkeypatch):
    """Names of what was done by kernels."""
    names = []
    for cls, name in ((MomentLaunches, "measure"), (MomentLaunches, "fold"), (Directions, "__call__")):
        real = getattr(cls, name)

        def call(self, *given, real=real, name=name):
            found = real(self, *given)
            if name == "fold" or found is not None:
                names.append(name)
            return found

        monkeypatch.setattr(cls, name, call)
    return names


def follow(make, steps, torchs, start=None):
    """Train on the same batches by kernels and by torch's operations."""
    nets, optimizers = [], []
    for plain in (False, True):
        torchs(plain)
        net = make_net() if start is None else copy.deepcopy(start)
        optimizer = make(net)
        for step in steps:
            train(net, optimizer, step)
        nets.append(net)
        optimizers.append(optimizer)
    for ours, theirs in zip(nets[0].state_dict().values(), nets[1].state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)
    for i in range(len(optimizers[0].layers)):
        ours, theirs = (one._statistics.state(i) for one in optimizers)
        assert ours["count"] == theirs["count"]
        for name in ("mean", "variance"):
            torch.testing.assert_close(ours[name], theirs[name], **CLOSE)
    return nets[0], optimizers[0]


@pytest.mark.parametrize(
    "options", [{}, {"damping": 0.0}, {"damping": 1 / 3, "decay": 0.5}, {"biases": False}, {"every": 2}]
)
def test_training_is_that_of_torchs_operations(options, torchs, launched):
    follow(lambda net: QuasiDiagonal(sgd(net), net, **options), range(4), torchs)
    looks = 2 if "every" in options else 4
    assert [launched.count(name) for name in ("measure", "fold", "__call__")] == [looks, looks, 4]


@pytest.mark.parametrize("labels", ["true", "sampled"])
def test_scales_of_preactivations_are_those_of_torchs_operations(labels, torchs, launched):
    loss = None if labels == "true" else F.cross_entropy
    follow(lambda net: QuasiDiagonal(sgd(net), net, loss, labels=labels), range(3), torchs)
    assert launched == ["__call__"] * 3


def test_training_with_channels_last_is_that_of_torchs_operations(torchs, launched):
    start = make_net().to(memory_format=torch.channels_last)
    follow(lambda net: QuasiDiagonal(sgd(net), net), range(3), torchs, start)
    assert len(launched) == 9
