"""Figure 3: which optimizers change a network's function alike, through whatever affine maps layers are looked at."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from gyroscope.control.preconditioners.kfac import KFAC
from gyroscope.control.preconditioners.quasi_diagonal import QuasiDiagonal
from gyroscope.theory.reparameterize import Affine, between


def draw(d, generator, *, diagonal, shift=True):
    matrix = torch.randn(d, d, generator=generator, dtype=torch.float64) / d**0.5
    matrix += 2 * torch.eye(d, dtype=torch.float64)
    shift = torch.randn(d, generator=generator, dtype=torch.float64) * shift
    return Affine(matrix.diagonal().clone() if diagonal else matrix, shift)


def nets(kind, *, diagonal, preactivations=True):
    """Net 1 and net 2 of figure 3, with a batch for both."""
    torch.manual_seed(4)
    generator = torch.Generator().manual_seed(5)
    if kind == "mlp":
        linears = [nn.Linear(5, 6), nn.Linear(6, 4), nn.Linear(4, 3)]
        between_them, sizes, x = nn.Tanh(), [(5, 6), (6, 4), (4, 3)], torch.randn(60, 5, dtype=torch.float64)
        last = nn.Identity()
    else:
        linears = [nn.Conv2d(2, 3, 2), nn.Conv2d(3, 3, 2, stride=2, padding=1, padding_mode="circular")]
        between_them, sizes, last = nn.Tanh(), [(2, 3), (3, 3)], nn.Flatten()
        x = torch.randn(30, 2, 4, 3, dtype=torch.float64)
    linears = [layer.double() for layer in linears]
    others = []
    for layer, (inputs, outputs) in zip(linears, sizes, strict=True):
        psi = draw(inputs, generator, diagonal=diagonal)
        omega = draw(outputs, generator, diagonal=diagonal) if preactivations else None
        others.append(between(layer, activations=psi, preactivations=omega))
    one, two = ([part for layer in chain for part in (layer, between_them)][:-1] for chain in (linears, others))
    one, two = nn.Sequential(*one, last), nn.Sequential(*two, last)
    y = torch.randn(one(x).shape, dtype=torch.float64)
    return one, two, x, y


def trained(net, x, y, make, steps=4):
    optimizer = make(net)
    for _ in range(steps):
        loss = F.mse_loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return net(x)


def distance(kind, make, *, diagonal, preactivations=True):
    """How far apart the functions of both nets are after some steps, over how far one has moved."""
    one, two, x, y = nets(kind, diagonal=diagonal, preactivations=preactivations)
    before = one(x).detach()
    torch.testing.assert_close(two(x), before, rtol=1e-12, atol=1e-12)
    first, second = trained(one, x, y, make), trained(two, x, y, make)
    moved = (first - before).norm()
    assert moved > 1e-2 * before.norm()
    return float((first - second).norm() / moved)


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5)


def kfac(labels="sampled", **options):
    def make(net):
        given = {"damping": 0.0, "decompose_every": 2, "labels": labels, **options}
        return KFAC(sgd(net), net, None if labels == "true" else F.mse_loss, **given)

    return make


def quasi(labels=None):
    return lambda net: QuasiDiagonal(sgd(net), net, F.mse_loss if labels else None, labels=labels, damping=0.0)


@pytest.mark.parametrize("labels", ["sampled", "true"])
@pytest.mark.parametrize("kind", ["mlp", "conv"])
def test_undamped_kfac_is_invariant_to_affine_maps(kind, labels):
    assert distance(kind, kfac(labels), diagonal=False) < 1e-8


@pytest.mark.parametrize("tikhonov", ["factored", "exact"])
def test_damping_breaks_the_invariance_of_kfac(tikhonov):
    assert distance("mlp", kfac(damping=1e-2, tikhonov=tikhonov), diagonal=False) > 1e-3


@pytest.mark.parametrize("kind", ["mlp", "conv"])
def test_the_quasi_diagonal_one_with_labels_is_invariant_to_maps_of_single_units(kind):
    assert distance(kind, quasi("sampled"), diagonal=True) < 1e-8


@pytest.mark.parametrize("kind", ["mlp", "conv"])
def test_equation_10_is_invariant_to_maps_of_single_activations(kind):
    assert distance(kind, quasi(), diagonal=True, preactivations=False) < 1e-8


def test_equation_10_is_not_invariant_to_maps_of_preactivations():
    assert distance("mlp", quasi(), diagonal=True) > 1e-3


def test_the_quasi_diagonal_one_is_not_invariant_to_maps_that_mix_units():
    assert distance("mlp", quasi("sampled"), diagonal=False) > 1e-3


@pytest.mark.parametrize("diagonal", [True, False])
def test_sgd_is_invariant_to_neither(diagonal):
    assert distance("mlp", sgd, diagonal=diagonal) > 1e-3
    assert distance("mlp", sgd, diagonal=diagonal, preactivations=False) > 1e-3


def test_kfac_takes_the_same_steps_at_any_scale_of_the_weights_under_normalization():
    """Section 4.3: rescaled weights in front of a normalization are another parameterization of the same function."""
    outputs = []
    for scale in (1.0, 7.0):
        torch.manual_seed(6)
        layer, head = nn.Linear(5, 4, bias=False), nn.Linear(4, 2)
        net = nn.Sequential(layer, nn.BatchNorm1d(4, affine=False, eps=1e-30), nn.Tanh(), head).double()
        with torch.no_grad():
            layer.weight.mul_(scale)
        x, y = torch.randn(40, 5, dtype=torch.float64), torch.randn(40, 2, dtype=torch.float64)
        outputs.append(trained(net, x, y, kfac()))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-8, atol=1e-10)
