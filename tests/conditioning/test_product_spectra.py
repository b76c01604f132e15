"""Eigenvalues of Kronecker products, compared with all products sorted and with the matrix itself decomposed."""

from __future__ import annotations

import math
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from gyroscope.conditioning import spectra as module
from gyroscope.conditioning.spectra import Spectrum, index_at, product_at, spectra_of
from gyroscope.errors import ConditioningError

P = (0.1, 0.25, 0.5, 0.75, 1.0)


def spectrum(values: list[float], more: int = 0) -> Spectrum:
    """Those values in order, and as many eigenvalues as `more` that are not listed."""
    return Spectrum(np.sort(np.array(values, dtype=np.float64))[::-1], len(values) + more)


def formed(x: Spectrum, g: Spectrum, p: float) -> float:
    """λ_p from all the products."""
    with np.errstate(all="ignore"):
        every = sorted((float(np.float64(a) * np.float64(b)) for a in x.full() for b in g.full()), reverse=True)
    return every[math.ceil(Fraction(str(p)) * len(every)) - 1] if every else 0.0


def drawn(size: int, kind: str, seed: int) -> Spectrum:
    rng = np.random.default_rng(seed)
    values = {
        "wide": np.exp(10 * rng.normal(size=size)),
        "uniform": rng.uniform(size=size),
        "equal": np.ones(size),
        "nearly equal": 1 + 2.0**-52 * rng.integers(0, 5, size),
        "half zero": rng.uniform(size=size) * (np.arange(size) % 2),
        "zero": np.zeros(size),
    }[kind]
    return spectrum(list(values), more=seed % 3)


KINDS = ["wide", "uniform", "equal", "nearly equal", "half zero", "zero"]

eigenvalue = st.one_of(
    st.sampled_from([0.0, 1.0, 2.0, 0.1, 5e-324, 1e-200, 1e-160, 1e200, 1.7e308, 1 + 2.0**-52, 1 - 2.0**-53]),
    st.floats(0, 1e308),
    st.floats(0, 1e-300),
    st.integers(0, 5).map(float),
)
spectra = st.builds(spectrum, st.lists(eigenvalue, max_size=9), st.integers(0, 4))
shares = st.integers(1, 1000).map(lambda thousandths: thousandths / 1000)


@given(st.lists(st.tuples(spectra, spectra), max_size=4), st.lists(shares, max_size=4))
@example([(spectrum([1e-200, 1e-160]), spectrum([1e-200, 1e-160]))], [0.25, 0.5, 1.0])
@example([(spectrum([1e200, 1.0]), spectrum([1e200, 1e-200]))], [0.25, 0.5, 0.75, 1.0])
def test_lambda_p_of_the_product_is_that_of_all_products_sorted(
    layers: list[tuple[Spectrum, Spectrum]], p: list[float]
) -> None:
    found = product_at([x for x, _ in layers], [g for _, g in layers], p)
    assert found.shape == (len(layers), len(p))
    assert found.tolist() == [[formed(x, g, share) for share in p] for x, g in layers]


@pytest.mark.parametrize("one", KINDS)
@pytest.mark.parametrize("other", KINDS)
def test_layers_of_all_sizes_searched_at_once_are_each_exact(one: str, other: str) -> None:
    sizes = [(1, 1), (1, 40), (40, 1), (17, 40), (64, 64), (5, 3)]
    x = [drawn(a, one, seed) for seed, (a, _) in enumerate(sizes)]
    g = [drawn(b, other, seed + 7) for seed, (_, b) in enumerate(sizes)]
    assert product_at(x, g, P).tolist() == [[formed(a, b, p) for p in P] for a, b in zip(x, g, strict=True)]


def test_searches_in_batches_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, g = ([drawn(20, kind, seed + more) for seed, kind in enumerate(KINDS)] for more in (0, 9))
    whole = product_at(x, g, P)
    monkeypatch.setattr(module, "_ROWS", 50)
    assert np.array_equal(product_at(x, g, P), whole)


def test_it_is_the_spectrum_of_the_kronecker_product() -> None:
    gen = torch.Generator().manual_seed(0)
    a, b = (torch.randn(30, d, dtype=torch.float64, generator=gen) for d in (6, 5))
    sigma_x, sigma_g = a.T @ a / 30, b.T @ b / 30
    x, g = spectra_of([torch.linalg.eigvalsh(s) for s in (sigma_x, sigma_g)], [6, 5], [0.0, 0.0])
    whole = np.linalg.eigvalsh(torch.kron(sigma_x, sigma_g).numpy())[::-1]
    every = [k / 30 for k in range(1, 31)]
    np.testing.assert_allclose(product_at([x], [g], every)[0], whole, rtol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_proposition_1_holds_exactly(seed: int) -> None:
    """λmax(F) = λmax(Σx)λmax(Σ∇h) as floats; κ(F) = κ(Σx)κ(Σ∇h) as fractions, and so to rounding as floats."""
    x, g = drawn(11, "uniform", 3 * seed), drawn(7, "wide", 3 * seed + 3)
    first, last = product_at([x], [g], [1e-9, 1.0])[0]
    assert first == x.largest * g.largest
    assert last == x.at(1.0) * g.at(1.0)
    assert first / last == pytest.approx(x.kappa(1.0) * g.kappa(1.0), rel=4 * 2.0**-53)
    exact = [Fraction(a) * Fraction(b) for a in x.full().tolist() for b in g.full().tolist()]
    ends = [Fraction(s.largest) / Fraction(s.at(1.0)) for s in (x, g)]
    assert max(exact) / min(exact) == ends[0] * ends[1]


def test_lambda_p_of_the_product_is_not_the_product_for_other_p() -> None:
    x = g = spectrum([4.0, 1.0])
    assert product_at([x], [g], [0.5])[0, 0] == 4
    assert x.at(0.5) * g.at(0.5) == 16


def test_the_products_are_not_formed() -> None:
    x, g = drawn(3000, "wide", 0), drawn(3000, "wide", 3)
    tracemalloc.start()
    found = product_at([x], [g], [0.5])[0, 0]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3000 * 3000
    every = np.multiply.outer(x.values, g.values).ravel()
    assert found == np.partition(every, every.size // 2)[every.size // 2]


def test_what_rounds_to_zero_is_zero_and_what_overflows_is_infinite() -> None:
    small, large = spectrum([1e-100, 1e-200]), spectrum([1e200, 1e100])
    assert product_at([small, large], [small, large], [0.25, 1.0]).tolist() == [[1e-200, 0.0], [math.inf, 1e200]]


def test_a_spectrum_that_is_nan_gives_nan_for_its_layer_alone() -> None:
    nan, one, zero = Spectrum(np.full(2, np.nan), 3), spectrum([1.0, 1.0]), spectrum([0.0])
    found = product_at([nan, one, one, nan], [one, nan, one, zero], P)
    assert np.isnan(found).all(axis=1).tolist() == [True, True, False, True]
    assert (found[2] == 1).all()


def test_without_layers_without_p_or_of_dimension_zero_there_is_nothing_to_find() -> None:
    assert product_at([], [], P).shape == (0, 5)
    assert product_at([spectrum([1.0])], [spectrum([1.0])], []).shape == (1, 0)
    assert product_at([spectrum([])], [spectrum([1.0])], [1.0]).tolist() == [[0.0]]


def test_numbers_of_spectra_that_differ_are_refused() -> None:
    with pytest.raises(ConditioningError, match="one spectrum per layer each, got 2 and 1"):
        product_at([spectrum([1.0])] * 2, [spectrum([1.0])], P)


@pytest.mark.parametrize(
    ("p", "dimension", "place"),
    [(0.1, 30, 3), (0.1, 31, 4), (0.7, 10, 7), (0.3, 10, 3), (0.55, 100, 55), (1.0, 7, 7), (1, 7, 7), (1e-9, 7, 1),
     (0.1, 1, 1), (0.5, 3, 2), (0.1 + 0.2, 10, 3), (np.float64(0.1), 30, 3), (np.float32(0.1), 30, 3), (0.25, 0, 0)],
)  # fmt: skip
def test_the_place_of_lambda_p_is_that_of_the_decimal(p: float, dimension: int, place: int) -> None:
    assert index_at(p, dimension) == place


@given(st.integers(1, 10**4), st.integers(1, 10**8))
def test_the_place_is_exact_for_four_decimals(p: int, dimension: int) -> None:
    assert index_at(p / 10**4, dimension) == -(-p * dimension // 10**4)


@given(st.integers(1, 10**6).flatmap(lambda d: st.tuples(st.integers(1, d), st.just(d))))
def test_the_place_of_a_quotient_is_its_numerator(pair: tuple[int, int]) -> None:
    k, d = pair
    assert index_at(k / d, d) == k


@pytest.mark.parametrize("p", [0.0, -0.5, 1.0001, 50, math.nan, math.inf, "half"])
def test_p_that_is_no_share_is_refused(p: float) -> None:
    with pytest.raises(ConditioningError, match="share of the dimension in"):
        index_at(p, 10)
    with pytest.raises(ConditioningError, match="share of the dimension in"):
        spectrum([1.0]).at(p)
    with pytest.raises(ConditioningError, match="share of the dimension in"):
        product_at([spectrum([1.0])], [spectrum([1.0])], [p])
