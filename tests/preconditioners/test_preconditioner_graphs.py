"""Steps in CUDA graphs, by recording all operations of a step and doing them again: what a replayed graph does."""

import copy

import pytest
import torch
from recorder import Recorder
from torch import nn
from torch.nn import functional as F  # noqa: N812

import gyroscope.control.preconditioners.observer as observer
import gyroscope.control.preconditioners.preconditioner as preconditioner
import gyroscope.control.preconditioners.quasi_diagonal as quasi_diagonal
import gyroscope.control.preconditioners.running as running
from gyroscope.control.preconditioners.kfac import KFAC
from gyroscope.control.preconditioners.quasi_diagonal import QuasiDiagonal
from gyroscope.errors import DynamicsError


@pytest.fixture
def capturing(monkeypatch):
    """Make everything believe that a graph is being captured, or not."""

    def switch(on):
        for module in (quasi_diagonal, observer, preconditioner, running):
            monkeypatch.setattr(module, "is_capturing", lambda: on)

    return switch


def make_net():
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 2, 3, stride=2, bias=False)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3)).double()


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6, 1, 5, 5, generator=generator).double() + step, torch.randint(3, (6,), generator=generator)


def train(net, optimizer, x, y):
    optimizer.zero_grad()
    F.cross_entropy(net(x), y).backward()
    optimizer.step()


def prepared(**options):
    net = make_net()
    inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer = QuasiDiagonal(inner, net, decay=0.8, **options)
    for step in range(2):
        train(net, optimizer, *batch(step))
    return net, optimizer


@pytest.mark.parametrize("labels", [None, "true"])
def test_a_replayed_step_trains_as_one_that_is_taken(labels, capturing):
    net, optimizer = prepared(labels=labels)
    twin, its = copy.deepcopy((net, optimizer))
    x, y = batch(2)
    capturing(True)
    start = [t.clone() for t in (*net.state_dict().values(), *_state(optimizer))]
    with Recorder() as graph:
        train(net, optimizer, x, y)
    capturing(False)
    # Unlike a graph, the recorder takes the step that it records: go back.
    with torch.no_grad():
        for t, before in zip((*net.state_dict().values(), *_state(optimizer)), start, strict=True):
            t.copy_(before)
    for step in range(2, 6):
        for static, given in zip((x, y), batch(step), strict=True):
            static.copy_(given)
        graph.replay()
        train(twin, its, *batch(step))
    for ours, theirs in zip(net.state_dict().values(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    assert optimizer._statistics.state(0)["count"] == 6


def _state(optimizer):
    """All that a step changes beside the model."""
    held = optimizer._statistics.held[0]
    averages = [one for one in (held.activations, held.slopes) if one is not None]
    own = [t for one in averages for t in (one.value, one.counts.value)]
    return [*own, *(s["momentum_buffer"] for s in optimizer.state.values())]


def test_what_was_seen_before_a_graph_is_no_part_of_it(capturing):
    net, optimizer = prepared()
    twin, its = copy.deepcopy((net, optimizer))
    F.cross_entropy(net(1000 + batch(2)[0]), batch(2)[1]).backward()
    capturing(True)
    train(net, optimizer, *batch(3))
    capturing(False)
    for buffer in ("running_mean", "running_var", "num_batches_tracked"):
        setattr(twin[1], buffer, getattr(net[1], buffer).clone())
    train(twin, its, *batch(3))
    for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_graph_of_a_first_step_or_of_other_images_is_refused(capturing):
    net = make_net()
    fresh = QuasiDiagonal(torch.optim.SGD(net.parameters(), lr=0.1), net)
    capturing(True)
    with pytest.raises(DynamicsError, match="no step before it had"):
        train(net, fresh, *batch(0))
    capturing(False)
    conv = nn.Sequential(nn.Conv2d(1, 1, 3))
    optimizer = QuasiDiagonal(torch.optim.SGD(conv.parameters(), lr=0.1), conv)
    conv(torch.randn(2, 1, 5, 5)).sum().backward()
    optimizer.step()
    capturing(True)
    conv(torch.randn(2, 1, 6, 6)).sum().backward()
    with pytest.raises(DynamicsError, match="no step before it had"):
        optimizer.step()


@pytest.mark.parametrize(
    "make",
    [
        lambda inner, net: KFAC(inner, net, labels="true"),
        lambda inner, net: QuasiDiagonal(inner, net, every=2),
        lambda inner, net: QuasiDiagonal(inner, net, F.cross_entropy, labels="sampled"),
    ],
    ids=["kfac", "every second step", "sampled labels"],
)
def test_steps_that_are_not_alike_cannot_be_captured(make, capturing):
    net = make_net()
    optimizer = make(torch.optim.SGD(net.parameters(), lr=0.1), net)
    train(net, optimizer, *batch(0))
    capturing(True)
    with pytest.raises(DynamicsError, match="cannot be captured in a CUDA graph"):
        train(net, optimizer, *batch(1))
