"""The theorems of Huang et al. (2020), to the last digits: theorems 1 and 2, proposition 1, equations 1 and 2."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import gyroscope
from gyroscope.conditioning.fisher import fisher
from oracles.conditioning import descending

EXACT = 1e-10
ALPHA = [(0.5, 3.0, 1.7, 0.2), (2.0, 2.0, 2.0, 2.0), (1.0, 1e3, 1.0, 1e-4), (0.25, 0.25, 0.25, 0.25)]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def perceptron(
    widths: tuple[int, ...], alpha: tuple[float, ...], *, bn: bool = False, rectifier: type[nn.Module] = nn.ReLU
) -> nn.Sequential:
    """h_k = α_k W_k x_{k−1}, x_k = φ(h_k) or φ(BN(h_k)); without biases."""
    parts: list[nn.Module] = []
    for k, (a, b) in enumerate(itertools.pairwise(widths)):
        linear = nn.Linear(a, b, bias=False, dtype=torch.float64)
        with torch.no_grad():
            linear.weight.copy_(alpha[k] * drawn(b, a, seed=k) / a**0.5)
        parts.append(linear)
        if bn:
            parts.append(nn.BatchNorm1d(b, eps=1e-30, affine=False, dtype=torch.float64))
        if k < len(widths) - 2:
            parts.append(rectifier())
    return nn.Sequential(*parts)


def linear_loss(mu: float) -> Any:
    """A loss whose gradient at the output is μ times the target, whatever the output."""
    return lambda output, target: mu * (output * target).sum(1).mean()


@pytest.mark.parametrize("rectifier", [nn.ReLU, nn.LeakyReLU])
@pytest.mark.parametrize("mu", [1.0, 0.03])
@pytest.mark.parametrize("alpha", ALPHA)
def test_theorem_1_scaled_weights_scale_inputs_and_gradients_of_all_layers(
    alpha: tuple[float, ...], mu: float, rectifier: type[nn.Module]
) -> None:
    """x̂_k = (∏_{i≤k} α_i) x_k, ∂L/∂ĥ_k = μ (∏_{i>k} α_i) ∂L/∂h_k, ∂L/∂Ŵ_k = μ (∏_{i≠k} α_i) ∂L/∂W_k."""
    widths = (7, 9, 8, 6, 5)
    batch = drawn(40, 7), drawn(40, 5, seed=9)
    plain = gyroscope.condition(
        perceptron(widths, (1.0,) * 4, rectifier=rectifier), linear_loss(1.0), batch, reduction="mean"
    )
    scaled = gyroscope.condition(
        perceptron(widths, alpha, rectifier=rectifier), linear_loss(mu), batch, reduction="mean"
    )
    for k, (a, b) in enumerate(zip(plain.entries, scaled.entries, strict=True)):
        before, after = math.prod(alpha[:k]), math.prod(alpha[k + 1 :])
        assert b.lambda_x == pytest.approx(before**2 * a.lambda_x, rel=EXACT)
        assert b.lambda_g == pytest.approx((mu * after) ** 2 * a.lambda_g, rel=EXACT)
        assert b.lambda_f == pytest.approx((mu * before * after) ** 2 * a.lambda_f, rel=EXACT)
        assert b.gradient_spectral == pytest.approx(mu * before * after * a.gradient_spectral, rel=EXACT)
        assert b.weight_spectral == pytest.approx(alpha[k] * a.weight_spectral, rel=EXACT)
        assert b.domination == pytest.approx(mu * before * after / alpha[k] * a.domination, rel=EXACT)
        assert (b.dying, b.full, b.rank_x, b.rank_g) == (a.dying, a.full, a.rank_x, a.rank_g)


@pytest.mark.parametrize("alpha", ALPHA)
def test_theorem_1_scaled_weights_do_not_change_how_uneven_a_layer_is(alpha: tuple[float, ...]) -> None:
    widths = (7, 9, 8, 6, 5)
    batch = drawn(40, 7), drawn(40, 5, seed=9)
    plain = gyroscope.condition(perceptron(widths, (1.0,) * 4), linear_loss(1.0), batch, reduction="mean")
    scaled = gyroscope.condition(perceptron(widths, alpha), linear_loss(1.0), batch, reduction="mean")
    for a, b in zip(plain.entries, scaled.entries, strict=True):
        # Eigenvalues have an error of 1e-16 λmax, so that κ has one of 1e-16 κ².
        for mine, its in ((b.kappa_x, a.kappa_x), (b.kappa_g, a.kappa_g)):
            assert [1 / mine[p] for p in scaled.p] == pytest.approx([1 / its[p] for p in plain.p], abs=1e-13)


@pytest.mark.parametrize("alpha", ALPHA)
def test_theorem_2_normalised_layers_do_not_feel_the_scale_of_others(alpha: tuple[float, ...]) -> None:
    """x̂_k = x_k, ∂L/∂ĥ_k = (1/α_k) ∂L/∂h_k, ∂L/∂Ŵ_k = (1/α_k) ∂L/∂W_k."""
    widths = (7, 9, 8, 6, 5)
    batch = drawn(60, 7), torch.arange(60) % 5
    plain = gyroscope.condition(perceptron(widths, (1.0,) * 4, bn=True), F.cross_entropy, batch)
    scaled = gyroscope.condition(perceptron(widths, alpha, bn=True), F.cross_entropy, batch)
    assert scaled.loss == pytest.approx(plain.loss, rel=EXACT)
    for k, (a, b) in enumerate(zip(plain.entries, scaled.entries, strict=True)):
        assert b.lambda_x == pytest.approx(a.lambda_x, rel=EXACT)
        assert b.lambda_g == pytest.approx(a.lambda_g / alpha[k] ** 2, rel=EXACT)
        assert b.lambda_f == pytest.approx(a.lambda_f / alpha[k] ** 2, rel=EXACT)
        assert b.gradient_spectral == pytest.approx(a.gradient_spectral / alpha[k], rel=EXACT)
        assert b.domination == pytest.approx(a.domination / alpha[k] ** 2, rel=EXACT)
        assert (b.dying, b.full) == (a.dying, a.full)


def test_gradients_that_come_through_a_normalisation_add_up_to_zero() -> None:
    """BN takes the mean out of the gradients of its batch (equation 15): 1ᵀG = 0, what a constant input is met by."""
    net = perceptron((7, 9, 5), (1.0, 1.0), bn=True)
    x, y = drawn(60, 7), torch.arange(60) % 5
    constant = torch.cat([x, torch.ones(60, 1, dtype=torch.float64)], 1)
    wide = nn.Linear(8, 9, bias=False, dtype=torch.float64)
    with torch.no_grad():
        wide.weight[:, :7] = net[0].weight
    found = gyroscope.condition(nn.Sequential(wide, *net[1:]), F.cross_entropy, (constant, y))
    # The column of the constant adds nothing to ∂L/∂W = GᵀX.
    before = gyroscope.condition(net, F.cross_entropy, (x, y))
    assert found.entries[0].gradient_spectral == pytest.approx(before.entries[0].gradient_spectral, rel=EXACT)


@pytest.mark.parametrize("widths", [(3, 4, 2), (6, 5, 4), (5, 2, 3)])
def test_proposition_1_spectra_of_the_product_are_products_of_spectra(widths: tuple[int, ...]) -> None:
    net = nn.Sequential(*[layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())])
    found = gyroscope.condition(
        net.double(), F.mse_loss, (drawn(50, widths[0]), drawn(50, widths[-1], seed=1)), p=[1.0]
    )
    for entry in found.entries:
        assert entry.lambda_f == pytest.approx(entry.lambda_x * entry.lambda_g, rel=1e-15)
        assert entry.kappa_f[1.0] == pytest.approx(entry.kappa_x[1.0] * entry.kappa_g[1.0], rel=1e-12)
        assert 1 < entry.kappa_f[1.0] < math.inf


def hessian(loss: Any, weight: Tensor) -> Tensor:
    found: Any = torch.autograd.functional.hessian(loss, weight)
    return found.reshape(weight.numel(), weight.numel())


def test_equation_1_linear_regression_has_the_hessian_sigma_x_times_identity() -> None:
    """H = E(xxᵀ) ⊗ I for ½‖y − Wx‖², and F is the same for targets around the output with covariance I."""
    d, c, n = 6, 3, 20
    net = nn.Linear(d, c, bias=False, dtype=torch.float64)
    x = drawn(n, d)
    away = c**0.5 * torch.cat([torch.eye(c), -torch.eye(c)]).double()
    repeated = x.repeat_interleave(2 * c, 0)
    targets = net(repeated).detach() + away.repeat(n, 1)

    def half_square(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().sum(1).mean() / 2

    found = gyroscope.condition(net, half_square, (repeated, targets), spectra=True)
    entry, spectra = found.entries[0], found.spectra["weight"]
    assert spectra.g.full() == pytest.approx(np.ones(c), rel=1e-12)
    h = hessian(lambda w: half_square(x @ w.T, drawn(n, c, seed=3)), net.weight)
    ours = np.sort(np.outer(spectra.x.full(), spectra.g.full()).ravel())[::-1]
    assert ours == pytest.approx(descending(h).numpy(), rel=EXACT)
    assert entry.lambda_f == pytest.approx(descending(x.T @ x / n)[0].item(), rel=1e-12)
    assert entry.kappa_f[1.0] == pytest.approx(entry.kappa_x[1.0], rel=1e-12)
    # Gradient descent on the quadratic converges just below the rate 2/λmax, and diverges just above.
    with torch.no_grad():
        for rate, grows in ((1.9 / entry.lambda_f, False), (2.1 / entry.lambda_f, True)):
            error = drawn(c, d, seed=4)
            start = error.norm()
            for _ in range(200):
                error = error - rate * error @ (x.T @ x / n)
            assert (error.norm() > start) == grows


@pytest.mark.parametrize("c", [2, 3, 10])
def test_equation_2_softmax_regression_at_zero_has_sigma_g_equal_to_s(c: int) -> None:
    """S = (I − 11ᵀ/c)/c, with every label once for every sample; H = E(xxᵀ) ⊗ S at W = 0."""
    d, n = 5, 12
    net = nn.Linear(d, c, bias=False, dtype=torch.float64)
    nn.init.zeros_(net.weight)
    x = drawn(n, d)
    batch = x.repeat_interleave(c, 0), torch.arange(c).repeat(n)
    found = gyroscope.condition(net, F.cross_entropy, batch, spectra=True)
    entry, spectra = found.entries[0], found.spectra["weight"]
    assert spectra.g.full() == pytest.approx([1 / c] * (c - 1) + [0.0], rel=1e-12, abs=1e-16)
    assert (entry.rank_g, entry.kappa_g[1.0]) == (c - 1, math.inf)
    assert entry.lambda_g == pytest.approx(1 / c, rel=1e-12)
    assert entry.domination is None  # the weight is zero
    h = hessian(lambda w: F.cross_entropy(x @ w.T, torch.zeros(n, dtype=torch.long)), net.weight)
    ours = np.sort(np.outer(spectra.x.full(), spectra.g.full()).ravel())[::-1]
    assert ours == pytest.approx(descending(h).numpy(), rel=EXACT, abs=1e-14)


def test_equation_2_holds_in_the_mean_for_labels_drawn_from_the_model() -> None:
    c, n = 4, 20_000
    net = nn.Linear(5, c, bias=False, dtype=torch.float64)
    nn.init.zeros_(net.weight)
    batch = drawn(n, 5), torch.zeros(n, dtype=torch.long)
    found = gyroscope.condition(net, F.cross_entropy, batch, labels="sampled", spectra=True)
    # A frequency of 1/4 has a standard error of 0.003; λ here lie four of these around 1/4, and one is zero exactly.
    assert found.spectra["weight"].g.full()[:3] == pytest.approx([1 / c] * 3, abs=0.0125)
    assert found.entries[0].rank_g == 3
    again = gyroscope.condition(net, F.cross_entropy, batch, labels="sampled", spectra=True)
    other = gyroscope.condition(net, F.cross_entropy, batch, labels="sampled", spectra=True, seed=1)
    assert found.entries[0].lambda_g == again.entries[0].lambda_g != other.entries[0].lambda_g
    true = gyroscope.condition(net, F.cross_entropy, batch)
    assert true.entries[0].rank_g == 1  # all labels are 0


def test_the_fisher_matrix_of_softmax_regression_at_zero_is_the_product_exactly() -> None:
    """There the gradient's second moments are the same for every sample, so that (4) is no approximation."""
    net = nn.Linear(5, 3, bias=False, dtype=torch.float64)
    nn.init.zeros_(net.weight)
    x = drawn(12, 5)
    exact = fisher(net, F.cross_entropy, (x, torch.zeros(12, dtype=torch.long)))
    batch = x.repeat_interleave(3, 0), torch.arange(3).repeat(12)
    found = gyroscope.condition(net, F.cross_entropy, batch, p=(0.1, 0.5, 0.66, 1.0))
    same(found.entries[0], exact.spectrum("weight"), found.p)


def same(entry: Any, spectrum: Any, p: tuple[float, ...]) -> None:
    assert entry.lambda_f == pytest.approx(spectrum.largest, rel=EXACT)
    for share in p:
        kappa, exact = entry.kappa_f[share], spectrum.kappa(share)
        assert (kappa is None) == (exact is None)
        if kappa is not None:
            assert 1 / kappa == pytest.approx(1 / exact, abs=1e-12)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_for_a_single_sample_the_product_is_the_second_moment_matrix_of_every_layer(seed: int) -> None:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 4)).double()
    batch = drawn(1, 4, seed=seed), torch.tensor([seed])
    exact = fisher(net, F.cross_entropy, batch, labels="true", blocks=True)
    found = gyroscope.condition(net, F.cross_entropy, batch)
    for entry in found.entries:
        same(entry, exact.spectrum(entry.layer), found.p)
        assert entry.rank_x == entry.rank_g == exact.spectrum(entry.layer).rank == 1
        # F = vec(∂L/∂W) vec(∂L/∂W)ᵀ, and ∂L/∂W = g xᵀ has one singular value: λmax(F) is its square.
        assert entry.lambda_f == pytest.approx(entry.gradient_spectral**2, rel=EXACT)


def test_inputs_that_do_not_vary_leave_no_approximation() -> None:
    """With x the same for all samples, E(xxᵀ ⊗ ggᵀ) = xxᵀ ⊗ E(ggᵀ)."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    batch = drawn(1, 4).expand(9, 4), torch.arange(9) % 3
    exact = fisher(net, F.cross_entropy, batch, labels="true", blocks=True)
    found = gyroscope.condition(net, F.cross_entropy, batch)
    for entry in found.entries:
        assert entry.rank_x == 1
        assert entry.kappa_x == {0.1: 1.0, 0.25: math.inf if entry.dimension_x > 4 else 1.0, 0.5: math.inf,
                                 0.75: math.inf, 1.0: math.inf}  # fmt: skip
        assert entry.kappa_f[1.0] == math.inf
        same(entry, exact.spectrum(entry.layer), found.p)


SHARES = {
    0.01: Fraction(1, 100), 0.1: Fraction(1, 10), 0.11: Fraction(11, 100), 0.29: Fraction(29, 100),
    0.3: Fraction(3, 10), 0.3000001: Fraction(3_000_001, 10_000_000), 1 / 3: Fraction(1, 3), 0.5: Fraction(1, 2),
    0.7: Fraction(7, 10), 0.9: Fraction(9, 10), 0.99: Fraction(99, 100), 1.0: Fraction(1),
}  # fmt: skip


@pytest.mark.parametrize("d", [1, 2, 3, 7, 10, 30])
def test_kappa_p_takes_the_eigenvalue_at_the_share_p_of_the_dimension_rounded_up(d: int) -> None:
    """Inputs 1.5^j e_j: Σx = diag(2.25^j)/d, so that κ_p = 2.25^(⌈pd⌉ − 1)."""
    order = torch.randperm(d, generator=torch.Generator().manual_seed(0))
    x = torch.diag(1.5 ** order.double())
    net = nn.Linear(d, 2, dtype=torch.float64)
    found = gyroscope.condition(net, F.mse_loss, (x, drawn(d, 2)), p=list(SHARES)).entries[0]
    expected = {p: 2.25 ** (math.ceil(share * d) - 1) for p, share in SHARES.items()}
    assert found.kappa_x == pytest.approx(expected, rel=1e-9)
    assert found.lambda_x == pytest.approx(2.25 ** (d - 1) / d, rel=1e-12)


def test_kappa_p_counts_the_dimension_and_not_the_rank() -> None:
    """Three samples in ten dimensions: seven eigenvalues are zero, and κ_p is infinite from p = 0.31 on."""
    x = torch.zeros(3, 10, dtype=torch.float64)
    x[0, 2], x[1, 5], x[2, 7] = 1.0, 2.0, 4.0
    net = nn.Linear(10, 2, dtype=torch.float64)
    found = gyroscope.condition(net, F.mse_loss, (x, drawn(3, 2)), p=(0.1, 0.2, 0.3, 0.31, 1.0)).entries[0]
    assert found.kappa_x == pytest.approx({0.1: 1.0, 0.2: 4.0, 0.3: 16.0, 0.31: math.inf, 1.0: math.inf}, rel=1e-12)
    assert (found.rank_x, found.dimension_x, found.samples) == (3, 10, 3)


def test_a_dead_layer_passes_on_nothing_in_either_direction() -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    with torch.no_grad():
        net[2].bias.fill_(-1e3)
    found = gyroscope.condition(net, F.cross_entropy, (drawn(20, 4), torch.arange(20) % 3))
    first, dead, last = found.entries
    assert [e.layer for e in found.entries] == ["0.weight", "2.weight", "4.weight"]
    assert dead.dying == 1.0
    for entry in (first, dead):  # no gradient comes back
        assert (entry.lambda_g, entry.rank_g, entry.gradient_spectral, entry.domination) == (0.0, 0, 0.0, 0.0)
        assert set(entry.kappa_g.values()) == {None}
        assert entry.lambda_x > 0
        assert entry.kappa_x[0.1] == 1.0
    assert (last.lambda_x, last.rank_x) == (0.0, 0)  # no input goes on
    assert set(last.kappa_x.values()) == {None}
    assert last.lambda_g > 0
    for entry in found.entries:
        assert entry.lambda_f == 0.0
        assert set(entry.kappa_f.values()) == {None}
    assert str(found).count("undefined") >= 6


def test_whitened_inputs_are_perfectly_conditioned() -> None:
    x = drawn(200, 6)
    values, vectors = torch.linalg.eigh(x.T @ x / 200)
    found = gyroscope.condition(
        nn.Linear(6, 2, dtype=torch.float64), F.mse_loss, (x @ vectors / values.sqrt(), drawn(200, 2))
    ).entries[0]
    assert found.kappa_x == pytest.approx(dict.fromkeys(found.kappa_x, 1.0), rel=1e-12)
    assert found.lambda_x == pytest.approx(1.0, rel=1e-12)
    # Each of the two eigenvalues of Σ∇h is there six times.
    low = found.kappa_g[1.0]
    assert found.kappa_f == pytest.approx({0.1: 1.0, 0.25: 1.0, 0.5: 1.0, 0.75: low, 1.0: low}, rel=1e-10)


def test_a_rotation_of_the_input_or_of_the_weights_changes_no_spectrum() -> None:
    q, _ = torch.linalg.qr(drawn(6, 6, seed=7))
    net = perceptron((6, 8, 4), (1.0, 1.0))
    x, y = drawn(30, 6), torch.arange(30) % 4
    before = gyroscope.condition(net, F.cross_entropy, (x, y))
    with torch.no_grad():
        net[0].weight.copy_(net[0].weight @ q.T)
    after = gyroscope.condition(net, F.cross_entropy, (x @ q.T, y))
    for a, b in zip(before.entries, after.entries, strict=True):
        assert (b.lambda_x, b.lambda_g, b.gradient_spectral) == pytest.approx(
            (a.lambda_x, a.lambda_g, a.gradient_spectral), rel=1e-12
        )
        assert b.kappa_f[0.5] == pytest.approx(a.kappa_f[0.5], rel=1e-10)
