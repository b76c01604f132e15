"""Layers in other coordinates compute the same function, exactly (equations 7 to 9, figure 3)."""

import copy

import pytest
import torch
from torch import nn

from gyroscope.errors import DynamicsError
from gyroscope.theory.reparameterize import Affine, FixedAffine, between, reparameterize, standardizing


def draw(d, generator, *, diagonal, shift=True):
    matrix = torch.randn(d, d, generator=generator, dtype=torch.float64) + 3 * torch.eye(d, dtype=torch.float64)
    shift = torch.randn(d, generator=generator, dtype=torch.float64) * shift
    return Affine(matrix.diagonal().clone() if diagonal else matrix, shift)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("diagonal", [True, False])
@pytest.mark.parametrize("shape", [(7, 4), (2, 3, 4)])
def test_a_linear_layer_between_two_maps_computes_what_it_computed(bias, diagonal, shape):
    generator = torch.Generator().manual_seed(1)
    layer = nn.Linear(4, 3, bias, dtype=torch.float64)
    psi, omega = (draw(d, generator, diagonal=diagonal) for d in (4, 3))
    a = torch.randn(shape, generator=generator, dtype=torch.float64)
    tilde = reparameterize(layer, activations=psi, preactivations=omega)
    torch.testing.assert_close(omega(tilde(psi(a))), layer(a), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(between(layer, activations=psi, preactivations=omega)(a), layer(a))
    assert not torch.allclose(tilde.weight, layer.weight)


def test_weights_and_biases_are_those_of_equation_9():
    layer = nn.Linear(3, 2, dtype=torch.float64)
    a = 5 + torch.randn(50, 3, dtype=torch.float64) * torch.tensor([1.0, 10.0, 0.1], dtype=torch.float64)
    m, variance = a.mean(0), a.var(0, correction=0)
    psi = standardizing(m, variance)
    normalized = psi(a)
    torch.testing.assert_close(normalized.mean(0), torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(normalized.var(0, correction=0), torch.ones(3, dtype=torch.float64))
    tilde = reparameterize(layer, activations=psi)
    torch.testing.assert_close(tilde.weight, layer.weight @ torch.diag(variance.sqrt()))
    torch.testing.assert_close(tilde.bias, layer.bias + layer.weight @ m)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("padding", [{}, {"padding": 1, "padding_mode": "reflect"}, {"padding": (1, 0)}])
def test_a_convolution_between_maps_of_channels_computes_what_it_computed(groups, padding):
    generator = torch.Generator().manual_seed(2)
    layer = nn.Conv2d(4, 6, (3, 2), stride=(2, 1), groups=groups, bias=False, dtype=torch.float64, **padding)
    exact = padding.get("padding_mode") is not None or not padding
    psi = draw(4, generator, diagonal=groups > 1, shift=exact)
    omega = draw(6, generator, diagonal=groups > 1)
    a = torch.randn(2, 4, 6, 5, generator=generator, dtype=torch.float64)
    tilde = reparameterize(layer, activations=psi, preactivations=omega)
    torch.testing.assert_close(omega(tilde(psi(a, dim=1)), dim=1), layer(a), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(between(layer, activations=psi, preactivations=omega)(a), layer(a))


def test_a_shift_into_zero_padding_is_refused():
    psi = Affine(torch.ones(2), torch.ones(2))
    with pytest.raises(DynamicsError, match="pads with zeros"):
        reparameterize(nn.Conv2d(2, 2, 3, padding=1), activations=psi)


def test_a_matrix_that_mixes_groups_is_refused():
    with pytest.raises(DynamicsError, match="2 groups"):
        reparameterize(nn.Conv2d(2, 2, 3, groups=2), activations=Affine(torch.eye(2), torch.zeros(2)))


@pytest.mark.parametrize("matrix", [torch.tensor([[1.0, 1.0], [1.0, 1.0]]), torch.tensor([1.0, 0.0])])
def test_a_map_without_an_inverse_is_refused(matrix):
    with pytest.raises(DynamicsError, match="must be invertible"):
        reparameterize(nn.Linear(2, 2), activations=Affine(matrix, torch.zeros(2)))


def test_maps_of_another_size_and_other_modules_are_refused():
    psi = Affine(torch.ones(3), torch.zeros(3))
    with pytest.raises(DynamicsError, match="vectors of 2 numbers, as the layer has, got a map of 3"):
        reparameterize(nn.Linear(2, 2), activations=psi)
    with pytest.raises(DynamicsError, match="LayerNorm"):
        reparameterize(nn.LayerNorm(3), activations=psi)
    with pytest.raises(DynamicsError, match="matrix of"):
        Affine(torch.ones(2, 3), torch.zeros(3))
    with pytest.raises(DynamicsError, match="variances > 0"):
        standardizing(torch.zeros(2), torch.zeros(2))


def test_the_given_layer_is_left_as_it_is_and_frozen_layers_stay_frozen():
    layer = nn.Linear(2, 2).requires_grad_(False)
    before = layer.weight.clone()
    tilde = reparameterize(layer, activations=Affine(torch.tensor([2.0, 4.0]), torch.ones(2)))
    assert torch.equal(layer.weight, before)
    assert not tilde.weight.requires_grad
    assert not tilde.bias.requires_grad
    assert not list(FixedAffine(Affine(torch.ones(2), torch.ones(2))).parameters())


def test_layers_of_half_precision_are_reparameterized_in_float64():
    torch.manual_seed(0)
    layer = nn.Linear(3, 2).half()
    psi = Affine(torch.randn(3, 3) + 2 * torch.eye(3), torch.randn(3))
    found = reparameterize(layer, activations=psi)
    expected = reparameterize(copy.deepcopy(layer).double(), activations=psi)
    assert found.weight.dtype == found.bias.dtype == torch.float16
    assert torch.equal(found.weight, expected.weight.half())
    assert torch.equal(found.bias, expected.bias.half())


WITHOUT = {
    "parametrized": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)), "computed from other parameters"),
    "lazy": (lambda: nn.LazyLinear(2), "has no values yet"),
    "meta": (lambda: nn.Linear(3, 2, device="meta"), "has no values yet"),
}


@pytest.mark.parametrize(("make", "says"), WITHOUT.values(), ids=WITHOUT)
def test_layers_without_weights_of_their_own_are_refused(make, says):
    with pytest.raises(DynamicsError, match=says):
        reparameterize(make(), activations=Affine(torch.ones(3), torch.zeros(3)))


def test_what_is_no_map_is_refused():
    with pytest.raises(DynamicsError, match="`activations` must be an Affine or None, got a Tensor"):
        reparameterize(nn.Linear(3, 2), activations=torch.eye(3))
    with pytest.raises(DynamicsError, match="`matrix` must be a floating-point tensor, got a int"):
        Affine(1, torch.zeros(2))
    with pytest.raises(DynamicsError, match=r"`mean` must be a tensor .*, got a NoneType"):
        standardizing(None, None)
