"""Spectra, compared with the literal definitions on all eigenvalues."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gyroscope.conditioning import eigen
from gyroscope.conditioning.spectra import Spectrum, spectra_of
from gyroscope.errors import ConditioningError


def literal_at(values: list[float], p: float) -> float:
    """The ⌈p·d⌉-th of all eigenvalues, largest first."""
    return sorted(values, reverse=True)[math.ceil(Fraction(str(p)) * len(values)) - 1]


@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=12), st.integers(0, 5), st.integers(1, 100))
def test_lambda_p_counts_from_the_top_of_all_eigenvalues(values: list[float], more: int, percent: int) -> None:
    s = Spectrum.of(torch.tensor(values, dtype=torch.float64), len(values) + more, tolerance=0.0)
    every = values + [0.0] * more
    p = percent / 100
    assert s.at(p) == literal_at(every, p)
    assert s.full().tolist() == sorted(every, reverse=True)
    assert (s.largest, s.rank) == (max(every), sum(v > 0 for v in every))
    if max(every) == 0:
        assert s.kappa(p) is None
    elif s.at(p) == 0:
        assert s.kappa(p) == math.inf
    else:
        assert s.kappa(p) == max(every) / s.at(p)


def test_p_counts_eigenvalues_that_are_not_listed() -> None:
    s = Spectrum(np.array([8.0, 4.0]), 10)
    assert [s.at(p) for p in (0.1, 0.11, 0.2, 0.21, 1.0)] == [8, 4, 4, 0, 0]
    assert [s.kappa(p) for p in (0.1, 0.2, 0.3)] == [1, 2, math.inf]


def test_a_tenth_of_thirty_is_the_third() -> None:
    assert Spectrum(np.arange(30.0, 0, -1), 30).at(0.1) == 28


def test_eigenvalues_up_to_the_tolerance_are_exactly_zero() -> None:
    s = Spectrum.of(torch.tensor([0.25, 1024.0, -3.0, 0.26, 0.24], dtype=torch.float64), 5, tolerance=0.25 / 1024)
    assert s.values.tolist() == [1024, 0.26, 0, 0, 0]
    assert s.rank == 2


def test_rounding_below_zero_is_zero_without_any_tolerance() -> None:
    s = Spectrum.of(torch.tensor([-1e-20, -2.0]), 2, tolerance=0.0)
    assert s.values.tolist() == [0, 0]
    assert math.copysign(1, s.largest) == 1
    assert s.kappa(1.0) is None


def test_a_matrix_that_was_not_finite_has_nan_throughout() -> None:
    for bad in (math.nan, math.inf):
        s = Spectrum.of(torch.tensor([1.0, bad]), 4, tolerance=0.0)
        assert np.isnan([s.largest, s.at(0.5), s.at(1.0), s.kappa(0.5), s.kappa(1.0)]).all()
        assert s.rank == 0


def test_dimension_zero_has_no_eigenvalue_above_zero() -> None:
    s = Spectrum.of(torch.zeros(0), 0, tolerance=0.0)
    assert (s.largest, s.rank, s.at(0.5), s.kappa(0.5), len(s.full())) == (0, 0, 0, None, 0)


def test_many_spectra_are_copied_to_the_host_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []
    cpu = Tensor.cpu

    def counted(tensor: Tensor) -> Tensor:
        copies.append(tensor.shape)
        return cpu(tensor)

    monkeypatch.setattr(Tensor, "cpu", counted)
    values = [torch.tensor([1.0, 3.0]), torch.zeros(0), torch.tensor([5.0, 1e-9, 4.0], dtype=torch.float64)]
    found = spectra_of(values, [2, 4, 3], [0.0, 0.0, 1e-6])
    assert copies == [(5,)]
    assert [(s.values.tolist(), s.dimension) for s in found] == [([3, 1], 2), ([], 4), ([5, 4, 0], 3)]
    assert spectra_of([], [], []) == []


def test_what_a_spectrum_holds_does_not_change_with_the_tensor_it_came_from() -> None:
    tensor = torch.tensor([2.0, 1.0], dtype=torch.float64)
    s = Spectrum.of(tensor, 2, tolerance=0.0)
    tensor.zero_()
    assert s.values.tolist() == [2, 1]


@pytest.mark.parametrize(
    ("values", "dimension"),
    [([1.0, 2.0], 2), ([2.0, 1.0], 1), ([1.0, -1.0], 2), ([math.inf, 1.0], 2), ([1.0, math.nan], 2), ([[1.0]], 1)],
)
def test_values_that_are_no_spectrum_are_refused(values: list[float], dimension: int) -> None:
    with pytest.raises(ConditioningError, match=r"descending order.*Spectrum\.of"):
        Spectrum(np.array(values), dimension)


def test_kappa_of_a_float32_covariance_is_that_of_its_float64_spectrum() -> None:
    x = torch.randn(200, 12, generator=torch.Generator().manual_seed(0))
    sigma = (x.T @ x / 200).double()
    s = Spectrum.of(eigen.eigenvalues([sigma])[0], 12, tolerance=12 * 2.0**-52)
    assert s.kappa(1.0) == pytest.approx(np.linalg.cond(sigma.numpy()), rel=1e-10)
