"""Trainings on spheres, beside free ones of the same effective learning rate."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import gyroscope
from gyroscope.control.renormalize import keep_norms, renormalize_
from gyroscope.errors import DynamicsError
from gyroscope.layers.layer import layers, split
from gyroscope.theory.batch_norm import batch_norm
from gyroscope.theory.effective_rate import effective_lr

STEPS = 40


class Net(nn.Module):
    """Two layers behind batch normalization with ε = 0, and a last one that is not scale-invariant."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 7, bias=False), nn.Linear(7, 6, bias=False)
        self.last = nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(batch_norm(self.second(torch.tanh(batch_norm(self.first(x)))))))

    @property
    def inner(self) -> list:
        return layers(self, include=["first*", "second*"])

    def groups(self) -> list[dict]:
        return [{"params": [w]} for w in (self.first.weight, self.second.weight)] + [
            {"params": list(self.last.parameters())}
        ]


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, 5, generator=draw, dtype=torch.float64), torch.randint(0, 3, (16,), generator=draw))
        for _ in range(STEPS)
    ]


def train(net: Net, sgd: torch.optim.SGD, rates=None) -> tuple[Tensor, list[list[float]]]:
    """The outputs, and the norms of both inner layers before each step; `rates` are given to them step by step."""
    outputs, norms = [], []
    for k, (x, y) in enumerate(batches()):
        norms.append([float(w.detach().norm()) for w in (net.first.weight, net.second.weight)])
        for group, rate in zip(sgd.param_groups[:2], rates[k] if rates is not None else (), strict=False):
            group["lr"] = float(rate)
        out = net(x)
        outputs.append(out.detach())
        sgd.zero_grad()
        F.cross_entropy(out, y).backward()
        sgd.step()
    return torch.stack(outputs), norms


@pytest.mark.parametrize("radius", [1.0, 3.0])
def test_a_run_on_spheres_with_the_effective_rates_of_a_free_one_is_that_run(radius):
    free = Net()
    outputs, norms = train(free, torch.optim.SGD(free.groups(), lr=0.5))
    held = Net()
    sgd = torch.optim.SGD(held.groups(), lr=0.5)
    keep_norms(sgd, held.inner, radius=radius, by="tensor")
    again, kept = train(held, sgd, rates=effective_lr(0.5, norms) * radius**2)
    torch.testing.assert_close(again, outputs, rtol=1e-10, atol=1e-10)
    assert torch.tensor(kept).sub(radius).abs().max() < 1e-12
    assert norms[-1][0] > 1.05 * norms[0][0]  # the free one grew
    torch.testing.assert_close(held.first.weight / radius, free.first.weight / free.first.weight.norm())


def test_spheres_of_other_radii_are_the_same_run_at_rates_in_the_square_of_the_radius():
    runs = []
    for radius in (1.0, 5.0):
        net = Net()
        sgd = torch.optim.SGD(net.groups(), lr=0.1)
        keep_norms(sgd, net.inner, radius=radius)
        runs.append(train(net, sgd, rates=[[0.1 * radius**2] * 2] * STEPS)[0])
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-10, atol=1e-10)


def test_a_kept_norm_is_the_literal_step_on_the_sphere():
    net = Net()
    sgd = torch.optim.SGD(net.groups(), lr=0.3)
    keep_norms(sgd, net.inner, radius=2.0)
    before = net.first.weight.detach().clone()
    x, y = batches()[0]
    F.cross_entropy(net(x), y).backward()
    sgd.step()
    for j in range(7):
        stepped = before[j] - 0.3 * net.first.weight.grad[j]
        literal = 2.0 * stepped / stepped.norm()
        torch.testing.assert_close(net.first.weight[j].detach(), literal, rtol=1e-13, atol=1e-14)


def test_renormalizing_changes_norms_and_no_function_of_scale_invariant_layers():
    net, (x, _) = Net(), batches()[0]
    before = net(x)
    for by in ("unit", "tensor"):
        renormalize_(net.inner, radius=0.3, by=by)
        torch.testing.assert_close(net(x), before, rtol=1e-11, atol=1e-11)
    assert float(net.first.weight.detach().norm()) == pytest.approx(0.3)
    renormalize_(net, radius=9.0)  # the last layer too, of which the function does depend
    assert not torch.allclose(net(x), before)


def test_what_is_removed_acts_no_more():
    net = Net()
    sgd = torch.optim.SGD(net.groups(), lr=0.3)
    keep_norms(sgd, net.inner).remove()
    _, norms = train(net, sgd)
    assert norms[-1][0] > norms[0][0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_units_of_every_shape_and_precision_get_the_norm(dtype):
    net = nn.ModuleList([nn.Conv2d(3, 4, 3), nn.ConvTranspose1d(5, 2, 3), nn.Embedding(6, 3), nn.Linear(3, 3)])
    net[3].weight.data[1] = 0
    net.to(dtype)
    net[0].weight.data.mul_(1e-6)
    renormalize_(net, radius=2.0)
    norms = [
        net[0].weight.float().flatten(1).norm(dim=1),
        net[1].weight.float().transpose(0, 1).flatten(1).norm(dim=1),
        net[2].weight.float().norm(dim=1),
        net[3].weight.float()[[0, 2]].norm(dim=1),
    ]
    off = max(float((one.detach() - 2).abs().max()) for one in norms)
    assert off < {torch.float16: 0.1, torch.bfloat16: 0.02, torch.float32: 1e-5}[dtype]
    assert net[3].weight[1].eq(0).all()  # without a direction


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (lambda net: renormalize_(net, by="row"), "`by` must be one of 'unit', 'tensor', got 'row'"),
        (lambda net: renormalize_(net, radius=0.0), "`radius` must be .*got 0.0"),
        (lambda net: renormalize_([net.weight]), "must be a model or a list of layers"),
        (lambda net: renormalize_([]), "must be a model or a list of layers"),
    ],
)
def test_what_has_no_norm_to_keep_is_refused(asked, says):
    with pytest.raises(DynamicsError, match=says):
        asked(nn.Linear(2, 2))


def test_norms_are_kept_after_the_steps_of_a_controller_and_not_of_the_optimizer_inside_it():
    net = nn.Linear(2, 2)
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    outer = gyroscope.Layca(inner, net, reproject=False)
    with pytest.raises(DynamicsError, match=r"got a SGD inside a Layca, which changes its steps.*Pass the Layca"):
        keep_norms(inner, net)
    keep_norms(outer, net)
    net(torch.ones(1, 2)).square().sum().backward()
    outer.step()
    assert net.weight.norm(dim=1).tolist() == pytest.approx([1, 1])


@pytest.mark.parametrize("scale", [1e-40, 1e-22, 1e30])
def test_norms_are_right_where_the_squares_of_weights_are_no_numbers_of_their_type(scale):
    net = nn.Linear(6, 4)
    direction = (net.weight / net.weight.norm(dim=1, keepdim=True)).detach()
    with torch.no_grad():
        net.weight.copy_(net.weight.double() * scale)
    renormalize_(net, radius=2.0)
    # Numbers far below the smallest normal one have lost digits before.
    assert torch.allclose(net.weight, 2 * direction, atol=1e-6 if scale > 1e-30 else 1e-3)


@pytest.mark.parametrize("by", ["unit", "tensor"])
def test_ordinary_weights_are_divided_by_their_norms_and_by_nothing_else_to_the_bit(by):
    torch.manual_seed(0)
    net = nn.ModuleList([nn.Linear(37, 11), nn.Conv2d(3, 5, 3), nn.ConvTranspose1d(5, 3, 3), nn.Linear(300, 2)])
    units = [split(layer, "row" if by == "unit" else "tensor") for layer in layers(net)]
    views = [layer.view(layer.parameter.detach()) for layer in units]
    expected = []
    for layer, w in zip(units, views, strict=True):
        norms = torch.linalg.vector_norm(w.reshape(layer.segments, -1), dim=1)
        expected.append(w * (0.7 / norms).view(-1, *[1] * (w.dim() - 1)))
    renormalize_(net, radius=0.7, by=by)
    assert all(map(torch.equal, views, expected))


def test_what_has_no_finite_norm_is_left_in_its_own_unit_alone():
    net = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[3.0, 4.0, 0.0], [1.0, torch.nan, 2.0], [0.0, 0.0, 0.0]]))
    renormalize_(net)
    expected = torch.tensor([[0.6, 0.8, 0.0], [1.0, torch.nan, 2.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(net.weight.detach(), expected, equal_nan=True)
