"""Numbers at the edges: few samples, huge and tiny values, half precision, what is not finite, nothing at all."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gyroscope
from gyroscope.errors import ConditioningError
from oracles.conditioning import Tape, agree, descending


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum(-1).mean()


def perceptron(*widths: int, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    parts: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        parts += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*parts[:-1]).to(dtype)


def beside_all_rows(net: nn.Sequential, batches: list[Any], **given: Any) -> Any:
    """An analysis of all linear layers, after it was held to the literal one."""
    tape = Tape()
    handles = [tape.watch(f"{i}.weight", layer) for i, layer in enumerate(net) if isinstance(layer, nn.Linear)]
    for x, y in batches:
        tape.backward(squares(net(x), y))
    for handle in handles:
        handle.remove()
    net.zero_grad()
    found = gyroscope.condition(net, squares, batches, spectra=True, reduction="mean", **given)
    agree(found, tape)
    return found


# Few samples, many batches


@pytest.mark.parametrize("n", [1, 2, 3, 29, 30, 31, 100])
def test_fewer_samples_than_dimensions_leave_exact_zeros(n: int) -> None:
    net = perceptron(30, 40, 20)
    found = beside_all_rows(net, [(drawn(n, 30), drawn(n, 20, seed=1))])
    for entry in found.entries:
        assert entry.rank_x == min(n, entry.dimension_x)
        assert entry.rank_g == min(n, entry.dimension_g)
        assert (entry.kappa_x[1.0] == math.inf) == (n < entry.dimension_x)
        spectrum = found.spectra[entry.layer].x
        assert not spectrum.full()[n:].any()


@pytest.mark.parametrize(
    "sizes", [(1,) * 40, (2, 3, 5, 7, 11, 13), (50, 1, 1, 50), (1, 100), (29, 1), (29, 2)], ids=str
)
def test_a_stream_is_the_formula_over_all_rows_with_the_mean_of_each_batch(sizes: tuple[int, ...]) -> None:
    """Σx = (1/ΣR) Σ XᵀX and Σ∇h = (1/ΣR) Σ R² GᵀG, G being the gradient of the mean over the batch's own R."""
    net = perceptron(30, 40, 20)
    batches = [(drawn(n, 30, seed=i), drawn(n, 20, seed=100 + i)) for i, n in enumerate(sizes)]
    found = beside_all_rows(net, batches)
    assert found.batches == len(sizes)
    assert found.entries[0].samples == sum(sizes)


@pytest.mark.parametrize("size", [1, 7, 64, 200])
def test_how_samples_are_split_into_batches_makes_no_difference(size: int) -> None:
    net = perceptron(12, 9, 4)
    x, y = drawn(200, 12), drawn(200, 4, seed=1)
    whole = gyroscope.condition(net, squares, (x, y))
    parts = gyroscope.condition(net, squares, list(zip(x.split(size), y.split(size), strict=True)))
    assert parts.loss == pytest.approx(whole.loss, rel=1e-12)
    for a, b in zip(whole.entries, parts.entries, strict=True):
        assert (b.lambda_x, b.lambda_g, b.gradient_spectral) == pytest.approx(
            (a.lambda_x, a.lambda_g, a.gradient_spectral), rel=1e-12
        )
        assert b.kappa_f == pytest.approx(a.kappa_f, rel=1e-9)


def test_a_thousand_times_the_same_sample_is_that_sample() -> None:
    net = perceptron(12, 9, 4)
    x, y = drawn(1, 12), drawn(1, 4, seed=1)
    one = gyroscope.condition(net, squares, (x, y))
    many = gyroscope.condition(net, squares, (x.expand(1000, 12), y.expand(1000, 4)))
    for a, b in zip(one.entries, many.entries, strict=True):
        assert (b.lambda_x, b.lambda_g, b.gradient_spectral) == pytest.approx(
            (a.lambda_x, a.lambda_g, a.gradient_spectral), rel=1e-12
        )


def test_more_rows_than_are_converted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from gyroscope.conditioning import factors

    monkeypatch.setattr(factors, "_AT_ONCE_ON_CPU", 1000)
    beside_all_rows(perceptron(12, 9, 4), [(drawn(5000, 12), drawn(5000, 4, seed=1))])


def test_half_a_million_rows_in_float32_are_added_up_in_float64() -> None:
    """Ones and a little: in float32 the small direction would be lost in the rounding of the large one."""
    n = 500_000
    x = torch.ones(n, 2)
    x[::2, 1] += 2**-12
    found = gyroscope.condition(nn.Linear(2, 1), squares, (x, torch.zeros(n, 1)), spectra=True)
    expected = descending(x.double().T @ x.double() / n)
    assert found.spectra["weight"].x.full() == pytest.approx(expected.numpy(), rel=1e-9)
    assert found.entries[0].rank_x == 2


# Batches of one, and of none


def test_a_batch_of_one_has_rank_one() -> None:
    found = beside_all_rows(perceptron(5, 6, 4), [(drawn(1, 5), drawn(1, 4, seed=1))])
    for entry in found.entries:
        assert (entry.rank_x, entry.rank_g, entry.samples) == (1, 1, 1)
        assert entry.lambda_f == pytest.approx(entry.gradient_spectral**2, rel=1e-12)


def test_a_batch_of_one_goes_through_batch_normalisation_in_evaluation_alone() -> None:
    net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4)).double()
    batch = drawn(1, 5), drawn(1, 4, seed=1)
    with pytest.raises(ConditioningError, match=r"forward pass failed.*more than 1 value per channel"):
        gyroscope.condition(net, squares, batch)
    assert net.training
    assert not net[0]._forward_hooks
    found = gyroscope.condition(net.eval(), squares, batch)
    assert [entry.rank_x for entry in found.entries] == [1, 1]


def test_two_equal_samples_leave_nothing_of_what_batch_normalisation_passes_back() -> None:
    """BN of a batch without variance is constant: no gradient but rounding comes back."""
    net = nn.Sequential(nn.Linear(5, 6, bias=False), nn.BatchNorm1d(6, affine=False), nn.Linear(6, 4)).double()
    found = gyroscope.condition(net, squares, (drawn(1, 5).expand(2, 5), drawn(2, 4, seed=1)))
    first, second = found.entries
    assert second.lambda_x == pytest.approx(0.0, abs=1e-20)
    assert first.gradient_spectral == pytest.approx(0.0, abs=1e-10)


# Dead layers and zero weights


def test_a_network_whose_weights_are_zero_has_numbers_and_no_condition() -> None:
    net = nn.Sequential(nn.Linear(5, 6, bias=False), nn.ReLU(), nn.Linear(6, 4, bias=False)).double()
    for parameter in net.parameters():
        nn.init.zeros_(parameter)
    found = gyroscope.condition(net, squares, (drawn(9, 5), drawn(9, 4, seed=1)))
    first, second = found.entries
    assert (first.lambda_g, first.weight_spectral, first.gradient_spectral, first.domination) == (0.0, 0.0, 0.0, None)
    assert (second.lambda_x, second.weight_norm, second.domination) == (0.0, 0.0, None)
    assert all(k is None for entry in (first, second) for k in entry.kappa_f.values())
    assert first.kappa_x[0.1] == 1.0
    assert second.kappa_g[0.1] == 1.0


def test_zero_inputs_are_no_error() -> None:
    found = gyroscope.condition(perceptron(5, 6, 4), squares, (torch.zeros(9, 5).double(), drawn(9, 4)), spectra=True)
    first = found.entries[0]
    assert (first.lambda_x, first.rank_x, first.gradient_spectral) == (0.0, 0, 0.0)
    assert first.kappa_x == dict.fromkeys(found.p)
    assert not found.spectra["0.weight"].x.full().any()


def test_a_loss_of_zero_has_no_gradients_and_no_condition() -> None:
    net = perceptron(5, 6, 4)
    x = drawn(9, 5)
    found = gyroscope.condition(net, squares, (x, net(x).detach()))
    for entry in found.entries:
        assert (entry.lambda_g, entry.rank_g, entry.gradient_spectral, entry.domination) == (0.0, 0, 0.0, 0.0)
        assert entry.kappa_g == dict.fromkeys(found.p)


# Large and small values


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e15, 1e30])
def test_inputs_of_any_size_in_float32(scale: float) -> None:
    """The square of 1e30 is no float32, and that of 1e-30 is zero in it; both are fine in float64."""
    x = drawn(20, 5).float()
    lin = nn.Linear(5, 3, bias=False)
    loss = _linear(1.0)
    target = drawn(20, 3, seed=1).float()
    plain = gyroscope.condition(lin, loss, (x, target), reduction="mean").entries[0]
    scaled = gyroscope.condition(lin, loss, (x * scale, target), reduction="mean").entries[0]
    assert scaled.lambda_x == pytest.approx(scale**2 * plain.lambda_x, rel=1e-5)
    assert scaled.kappa_x == pytest.approx(plain.kappa_x, rel=1e-4)
    assert scaled.rank_x == 5
    assert scaled.gradient_spectral == pytest.approx(scale * plain.gradient_spectral, rel=1e-5)
    assert (scaled.lambda_g, scaled.rank_g) == (plain.lambda_g, plain.rank_g)


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e15, 1e30])
def test_gradients_of_any_size_in_float32(scale: float) -> None:
    x, target = drawn(20, 5).float(), drawn(20, 3, seed=1).float()
    lin = nn.Linear(5, 3, bias=False)
    plain = gyroscope.condition(lin, _linear(1.0), (x, target), reduction="mean").entries[0]
    scaled = gyroscope.condition(lin, _linear(scale), (x, target), reduction="mean").entries[0]
    assert scaled.lambda_g == pytest.approx(scale**2 * plain.lambda_g, rel=1e-5)
    assert scaled.kappa_g == pytest.approx(plain.kappa_g, rel=1e-4)
    assert scaled.gradient_spectral == pytest.approx(scale * plain.gradient_spectral, rel=1e-5)
    assert scaled.domination == pytest.approx(scale * plain.domination, rel=1e-5)
    assert scaled.lambda_f == pytest.approx(scale**2 * plain.lambda_f, rel=1e-5)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_weights_of_any_size_in_float32(scale: float) -> None:
    lin = nn.Linear(5, 3, bias=False)
    batch = drawn(20, 5).float(), drawn(20, 3, seed=1).float()
    plain = gyroscope.condition(lin, _linear(1.0), batch, reduction="mean").entries[0]
    with torch.no_grad():
        lin.weight *= scale
    scaled = gyroscope.condition(lin, _linear(1.0), batch, reduction="mean").entries[0]
    assert scaled.weight_spectral == pytest.approx(scale * plain.weight_spectral, rel=1e-5)
    assert scaled.weight_norm == pytest.approx(scale * plain.weight_norm, rel=1e-5)
    assert scaled.domination == pytest.approx(plain.domination / scale, rel=1e-5)


def _linear(mu: float) -> Any:
    return lambda output, target: (mu * target * output).sum(1).mean()


@pytest.mark.parametrize("scale", [1e-120, 1e120])
def test_squares_near_the_ends_of_float64(scale: float) -> None:
    net = nn.Linear(5, 3, bias=False, dtype=torch.float64)
    batch = drawn(20, 5), drawn(20, 3, seed=1)
    plain = gyroscope.condition(net, _linear(1.0), batch, reduction="mean").entries[0]
    scaled = gyroscope.condition(net, _linear(1.0), (batch[0] * scale, batch[1]), reduction="mean").entries[0]
    assert scaled.lambda_x == pytest.approx(scale**2 * plain.lambda_x, rel=1e-10)
    assert scaled.kappa_x == pytest.approx(plain.kappa_x, rel=1e-8)
    assert scaled.kappa_f == pytest.approx(plain.kappa_f, rel=1e-8)


def test_eigenvalues_far_apart_are_both_found_in_float64() -> None:
    """Singular values of samples that are 1e-6 of the largest: eigenvalues 1e-12 of it, above the rounding of sums."""
    q, _ = torch.linalg.qr(drawn(6, 6))
    steps = torch.logspace(0, -6, 6, dtype=torch.float64)
    x = torch.linalg.qr(drawn(50, 6, seed=1))[0] * steps @ q
    found = gyroscope.condition(nn.Linear(6, 2, dtype=torch.float64), squares, (x, drawn(50, 2)), p=(1.0,)).entries[0]
    assert found.rank_x == 6
    assert found.kappa_x[1.0] == pytest.approx(1e12, rel=1e-2)


def test_directions_that_float32_samples_cannot_tell_from_rounding_count_as_zero() -> None:
    """x₂ = x₁ up to rounding: the difference is of size ε, its square below (4ε)²."""
    a = drawn(100, 1).float()
    x = torch.cat([a, a * (1 + 2**-22 * torch.randn(100, 1))], 1)
    found = gyroscope.condition(nn.Linear(2, 1), squares, (x, torch.zeros(100, 1))).entries[0]
    assert (found.rank_x, found.kappa_x[1.0]) == (1, math.inf)
    x = torch.cat([a, a * (1 + 2**-15 * torch.randn(100, 1))], 1)
    found = gyroscope.condition(nn.Linear(2, 1), squares, (x, torch.zeros(100, 1))).entries[0]
    assert found.rank_x == 2


# Half precision


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_activations_as_large_as_half_precision_goes(dtype: torch.dtype) -> None:
    """The square of 6e4 is infinite in float16."""
    x = (6e4 * torch.sign(drawn(50, 8))).to(dtype)
    lin = nn.Linear(8, 3, bias=False).to(dtype)
    with torch.no_grad():
        lin.weight.copy_(torch.eye(3, 8) * 2**-12)
    found = gyroscope.condition(
        lin, lambda o, t: (o.float() - t).square().mean(), (x, torch.zeros(50, 3)), spectra=True
    )
    expected = descending(x.double().T @ x.double() / 50)
    assert found.spectra["weight"].x.full() == pytest.approx(expected.numpy(), rel=1e-12)
    assert found.entries[0].lambda_x > 3e9
    assert math.isfinite(found.entries[0].lambda_g)


@pytest.mark.parametrize("n", [64, 4096])
def test_gradients_of_a_mean_over_many_samples_do_not_vanish_in_float16(n: int) -> None:
    """1/4096 of a gradient of 1e-4 is below the least float16; that of the sum over the batch is not."""
    lin = nn.Linear(8, 3, bias=False)
    x, y = torch.randn(n, 8).half().float(), torch.zeros(n, 3)
    with torch.no_grad():
        lin.weight.copy_(lin.weight.half())

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (1e-3 * (output.float() - target).square().sum(1)).mean()

    double = gyroscope.condition(lin.double(), loss, (x.double(), y.double())).entries[0]
    half = gyroscope.condition(lin.half(), loss, (x.half(), y)).entries[0]
    assert half.lambda_g == pytest.approx(double.lambda_g, rel=1e-2)
    assert half.rank_g == double.rank_g == 3


# What is not finite


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_layer_whose_input_is_not_finite_is_listed_and_the_others_are_analysed(bad: float) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 4), nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            broken = x.clone()
            broken[3, 2] = bad
            seen = self.b(broken)
            return self.a(x) + torch.where(seen.isfinite(), seen, 0.0)

    net = Two().double()
    found = gyroscope.condition(net, squares, (drawn(9, 5), drawn(9, 4, seed=1)))
    assert found.layers == ("a.weight",)
    assert found.untreated == {"b.weight": "its input is not finite"}
    assert math.isfinite(found.entries[0].lambda_f)
    assert math.isfinite(found.entries[0].gradient_spectral)


def test_a_gradient_that_is_not_finite_is_listed_too() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 4), nn.Linear(5, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            # The root of zero is zero, its slope infinite.
            return self.a(x) + (0 * self.b(x)).abs().sqrt()

    found = gyroscope.condition(Two().double(), squares, (drawn(9, 5), drawn(9, 4, seed=1)))
    assert found.layers == ("a.weight",)
    assert found.untreated == {"b.weight": "its output gradient is not finite"}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nothing_finite_is_an_error_and_the_model_is_given_back(bad: float) -> None:
    x = drawn(9, 5)
    x[2, 2] = bad
    masked = nn.Sequential(nn.Linear(5, 4), Masked()).double()
    with pytest.raises(ConditioningError, match=r"None of the 1 layers.*0\.weight: its input is not finite"):
        gyroscope.condition(masked, squares, (x, drawn(9, 4)))
    assert not masked[0]._forward_hooks
    assert masked[0].weight.grad is None


class Masked(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return torch.where(h.isfinite(), h, 0.0)


def test_weights_that_are_not_finite_do_not_reach_the_numbers_of_other_layers() -> None:
    net = nn.Sequential(nn.Linear(5, 6), Masked(), nn.Linear(6, 4)).double()
    with torch.no_grad():
        net[0].weight[2, 2] = math.nan
    found = gyroscope.condition(net, squares, (drawn(9, 5), drawn(9, 4, seed=1)))
    assert [entry.layer for entry in found.entries] == ["0.weight", "2.weight"]
    assert math.isnan(found["0.weight"].weight_spectral)
    assert all(math.isfinite(v) for v in (found["2.weight"].weight_spectral, found["2.weight"].domination))
    assert all(math.isfinite(v) for v in (found["2.weight"].lambda_x, found["2.weight"].lambda_g))


# Widths


def test_layers_of_width_one_and_of_a_single_output() -> None:
    found = beside_all_rows(perceptron(1, 1, 1), [(drawn(9, 1), drawn(9, 1, seed=1))])
    for entry in found.entries:
        assert (entry.rank_x, entry.rank_g, entry.dimension_x, entry.dimension_g) == (1, 1, 1, 1)
        assert entry.kappa_f == dict.fromkeys(found.p, 1.0)


def test_layers_wider_than_the_blocks_that_matrices_are_formed_in() -> None:
    net = perceptron(600, 520, 3)
    beside_all_rows(net, [(drawn(700, 600), drawn(700, 3, seed=1))], p=(0.5, 1.0))


def test_the_largest_eigenvalue_alone_is_that_of_the_whole_spectrum() -> None:
    net = perceptron(300, 280, 3)
    batch = drawn(700, 300), drawn(700, 3, seed=1)
    whole, alone = gyroscope.condition(net, squares, batch), gyroscope.condition(net, squares, batch, p=())
    for a, b in zip(whole.entries, alone.entries, strict=True):
        assert (b.lambda_x, b.lambda_g, b.lambda_f) == pytest.approx((a.lambda_x, a.lambda_g, a.lambda_f), rel=2e-6)
        assert (b.rank_x, b.rank_g, b.kappa_x, b.kappa_f) == (None, None, {}, {})
        assert b.gradient_spectral == a.gradient_spectral


def test_bfloat16_samples_keep_the_eigenvalues_that_rounding_leaves() -> None:
    x = torch.randn(4096, 64) * 0.8 ** torch.arange(64) + 1.0
    lin = nn.Linear(64, 3, bias=False).to(torch.bfloat16)
    rounded = x.to(torch.bfloat16)
    target = torch.zeros(4096, 3)
    found = gyroscope.condition(lin, lambda o, t: (o.float() - t).square().mean(), (rounded, target), spectra=True)
    exact = torch.linalg.eigvalsh(rounded.double().T @ rounded.double() / 4096).flip(0)
    assert found.spectra is not None
    spectrum = found.spectra["weight"].x
    # As far as they are above the noise of rounding, which is ε²/12 of the mean or so: far below λmax ε².
    kept = int((exact > 2.0**-11 * exact.mean()).sum())
    assert exact[kept - 1] < 2.0**-11 * exact[0]
    np.testing.assert_allclose(spectrum.values[:kept], exact[:kept].numpy(), rtol=1e-6)
    assert spectrum.rank < 64
