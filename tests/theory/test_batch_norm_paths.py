"""The paths of batch normalization against autograd, and what section 4.2 concludes from them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from gyroscope.errors import DynamicsError
from gyroscope.theory.batch_norm import (
    BatchCenter,
    batch_center,
    batch_center_paths,
    batch_norm,
    batch_norm_paths,
    centered_weight_gradient,
)

SHAPES = {"matrix": (7, 3), "sequence": (5, 3, 4), "images": (4, 3, 2, 5)}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def autograd(function, x: Tensor, gradient: Tensor) -> Tensor:
    x = x.clone().requires_grad_(True)
    return torch.autograd.grad(function(x), x, gradient)[0]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("eps", [1e-300, 0.1])  # torch refuses zero
def test_batch_norm_is_torchs_without_gain_and_bias(shape, eps):
    x = 3 + 2 * drawn(*shape)
    torch.testing.assert_close(
        batch_norm(x, eps=eps), F.batch_norm(x, None, None, training=True, eps=eps), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("eps", [1e-300, 0.1])  # torch refuses zero
def test_the_two_paths_add_up_to_what_autograd_gives(shape, eps):
    x, gradient = 3 + 2 * drawn(*shape), drawn(*shape, seed=1)
    paths = batch_norm_paths(x, gradient, eps=eps)
    through_torch = autograd(lambda x: F.batch_norm(x, None, None, training=True, eps=eps), x, gradient)
    torch.testing.assert_close(paths.total, through_torch, rtol=1e-11, atol=1e-12)
    for through, path in (("direct", paths.direct), ("statistics", paths.statistics)):
        literal = autograd(lambda x, how=through: batch_norm(x, eps=eps, through=how), x, gradient)
        torch.testing.assert_close(path, literal, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_two_paths_of_batch_centering_add_up_to_what_autograd_gives(shape):
    x, gradient = 3 + drawn(*shape), drawn(*shape, seed=1)
    paths = batch_center_paths(gradient)
    torch.testing.assert_close(paths.total, autograd(batch_center, x, gradient), rtol=1e-12, atol=1e-14)
    assert torch.equal(paths.direct, gradient)


@pytest.mark.parametrize("through", ["both", "direct", "statistics"])
def test_every_path_has_the_value_of_batch_norm(through):
    x = drawn(6, 2)
    assert torch.equal(batch_norm(x, through=through), batch_norm(x))


def test_the_weight_gradient_through_batch_centering_is_that_of_centered_activations():
    a, w, target = 5 + drawn(8, 4), drawn(3, 4, seed=1).requires_grad_(True), drawn(8, 3, seed=2)
    s = batch_center(a @ w.T)
    s.retain_grad()
    (torch.tanh(s) - target).square().sum().backward()
    torch.testing.assert_close(w.grad, centered_weight_gradient(a, s.grad), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(w.grad, s.grad.T @ (a - a.mean(0)), rtol=1e-12, atol=1e-13)


def test_the_weight_gradient_through_batch_norm_is_that_of_centered_activations():
    a, w, gradient = 5 + drawn(8, 4), drawn(3, 4, seed=1), drawn(8, 3, seed=2)
    through_w = autograd(lambda w: batch_norm(a @ w.T), w, gradient)
    paths = batch_norm_paths(a @ w.T, gradient)
    torch.testing.assert_close(
        through_w, centered_weight_gradient(a, paths.direct + paths.deviation), rtol=1e-12, atol=1e-13
    )
    torch.testing.assert_close(through_w, paths.total.T @ batch_center(a), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("shift", [0.0, 100.0])
def test_off_centering_changes_the_weight_gradient_unless_a_normalizer_centres_after_it(shift):
    a, w, gradient = drawn(8, 4), drawn(3, 4, seed=1), drawn(8, 3, seed=2)
    moved = a + shift
    for function in (batch_center, batch_norm):
        plain, there = (autograd(lambda w, x=x, f=function: f(x @ w.T), w, gradient) for x in (a, moved))
        torch.testing.assert_close(there, plain, rtol=1e-9, atol=1e-10)
    without = gradient.T @ moved
    assert torch.allclose(without, gradient.T @ a) == (shift == 0.0)


def test_both_paths_shrink_gradients_with_the_norm_but_only_the_statistics_make_them_orthogonal():
    a, w, gradient = drawn(9, 5), drawn(2, 5, seed=1), drawn(9, 2, seed=2)

    def at(w: Tensor, through: str) -> Tensor:
        return autograd(lambda w: batch_norm(a @ w.T, through=through), w, gradient)

    for through in ("both", "direct", "statistics"):
        torch.testing.assert_close(at(4 * w, through), at(w, through) / 4, rtol=1e-12, atol=1e-13)
    assert (at(w, "both") * w).sum(1).abs().max() < 1e-13
    assert (at(w, "direct") * w).sum(1).abs().min() > 1e-3


def test_a_centering_layer_uses_its_running_mean_in_evaluation():
    layer, x = BatchCenter(3, momentum=0.25, bias=True).double(), 2 + drawn(16, 3, 5)
    with torch.no_grad():
        layer.bias.copy_(torch.tensor([1.0, 2.0, 3.0]))
    out = layer(x)
    torch.testing.assert_close(out.mean((0, 2)), torch.tensor([1.0, 2.0, 3.0]).double())
    torch.testing.assert_close(layer.running_mean, 0.25 * x.mean((0, 2)))
    held = layer.running_mean.clone()
    torch.testing.assert_close(layer.eval()(x), x - held.view(1, 3, 1) + layer.bias.view(1, 3, 1))
    assert torch.equal(layer.running_mean, held)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    assert set(layer.state_dict()) == {"running_mean", "bias"}


def test_a_centering_layer_follows_the_mean_as_torchs_batch_norm_does():
    ours, theirs = BatchCenter(4).double(), nn.BatchNorm1d(4).double()
    for seed in range(5):
        x = seed + drawn(6, 4, seed=seed)
        ours(x), theirs(x)
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (lambda: batch_norm(torch.ones(3)), r"\[B, D, ...\]"),
        (lambda: batch_norm(torch.ones(3, 2, dtype=torch.int64)), "int64"),
        (lambda: batch_norm(torch.ones(3, 2), through="mean"), "'direct'"),
        (lambda: batch_norm_paths(torch.ones(3, 2), torch.ones(2, 2)), "equal shapes"),
        (lambda: centered_weight_gradient(torch.ones(3, 2), torch.ones(2, 2)), r"\[B, D'\]"),
        (lambda: BatchCenter(0), "`features` must be a whole number ≥ 1"),
        (lambda: BatchCenter(2)(torch.ones(4, 3)), "2 units, got 3"),
    ],
)
def test_what_is_no_batch_is_refused(asked, says):
    with pytest.raises(DynamicsError, match=says):
        asked()
