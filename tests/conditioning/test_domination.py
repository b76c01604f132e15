"""Spectral norms and weight domination, beside the singular values of each matrix in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from conditioning.devices import DEVICES
from gyroscope.conditioning import domination as module
from gyroscope.conditioning.domination import domination, spectral_norms
from gyroscope.errors import ConditioningError

SHAPES = [
    (8, 3, 3, 3),
    (400, 500),
    (1, 9),
    (9, 1),
    (500, 400),
    (64,),
    (),
    (400, 500),
    (2, 2, 2),
    (700, 400),
    (8, 27),
    (3, 3),
]


def drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def oracle(tensor: Tensor) -> float:
    matrix = tensor.double().cpu().reshape(tensor.shape[0] if tensor.dim() else 1, -1)
    return torch.linalg.svdvals(matrix)[0].item()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_spectral_norms_are_the_largest_singular_values(dtype: torch.dtype, device: str) -> None:
    given = [drawn(shape, seed).to(device, dtype) for seed, shape in enumerate(SHAPES)]
    found = spectral_norms(given)
    assert (found.dtype, found.device.type) == (torch.float64, device)
    assert found.tolist() == pytest.approx([oracle(m) for m in given], rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [1, 2, 40])
def test_they_are_right_for_matrices_of_low_rank_and_steep_spectra(dtype: torch.dtype, rank: int) -> None:
    steep = drawn((450, rank), 0) * torch.logspace(0, -12, rank, dtype=torch.float64) @ drawn((rank, 600), 1)
    assert spectral_norms([steep.to(dtype)]).item() == pytest.approx(oracle(steep.to(dtype)), rel=1e-6)


def test_they_are_right_for_orthogonal_matrices() -> None:
    q, _ = torch.linalg.qr(drawn((450, 450), 0))
    assert spectral_norms([q, q[:400], 3 * q[:, :20]]).tolist() == pytest.approx([1, 1, 3], rel=1e-12)


@pytest.mark.parametrize("scale", [1e-300, 1e-200, 1e200, 1e300])
def test_squares_that_would_overflow_or_vanish_do_no_harm(scale: float) -> None:
    given = [drawn(shape, 3) for shape in [(5, 4), (400, 450)]]
    expected = [scale * oracle(m) for m in given]
    assert spectral_norms([m * scale for m in given]).tolist() == pytest.approx(expected, rel=1e-6, abs=0)


def test_the_largest_half_precision_numbers_do_no_harm() -> None:
    assert spectral_norms([torch.full((64, 64), 65504.0).half()]).item() == pytest.approx(64 * 65504, rel=1e-12)
    assert spectral_norms([torch.full((64, 64), 1e38).bfloat16()]).item() == pytest.approx(64 * 1e38, rel=1e-2)


@pytest.mark.parametrize("shape", [(5000, 12), (12, 5000), (12, 50, 100)])
def test_only_the_smaller_gram_matrix_is_formed(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    formed = []

    def seen(matrices: list[Tensor]) -> Tensor:
        formed.extend(m.shape for m in matrices)
        return whole(matrices)

    whole = module.largest
    monkeypatch.setattr(module, "largest", seen)
    matrix = drawn(shape, 0)
    assert spectral_norms([matrix]).item() == pytest.approx(oracle(matrix), rel=1e-12)
    assert formed == [(12, 12)]


def test_parts_of_long_matrices_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [drawn(shape, seed) for seed, shape in enumerate([(7, 100), (100, 7), (7, 100)])]
    monkeypatch.setattr(module, "_PART_ON_CPU", 7 * 30)
    assert spectral_norms(given).tolist() == pytest.approx([oracle(m) for m in given], rel=1e-12)


def test_tensors_may_be_transposed_sparse_or_part_of_a_graph_and_are_left_as_they_are() -> None:
    matrix = drawn((6, 9), 0)
    given = [matrix.T, matrix.T.contiguous(), matrix.to_sparse(), matrix.clone().requires_grad_()]
    found = spectral_norms(given)
    assert not found.requires_grad
    assert found.tolist() == pytest.approx([oracle(matrix)] * 4, rel=1e-12)
    assert torch.equal(matrix, drawn((6, 9), 0))


def test_empty_is_zero_and_not_finite_is_nan_for_that_one_alone() -> None:
    bad = drawn((3, 4), 0)
    bad[1, 2] = math.inf
    found = spectral_norms([torch.zeros(0, 4), bad, torch.zeros(3, 0), torch.eye(3), bad.log()]).tolist()
    assert found[0] == found[2] == 0
    assert found[3] == 1
    assert math.isnan(found[1])
    assert math.isnan(found[4])
    assert spectral_norms([]).shape == (0,)


def test_domination_is_the_ratio_of_gradient_to_weight() -> None:
    weights = [drawn(shape, seed) for seed, shape in enumerate(SHAPES)]
    gradients = [1e-3 * drawn(shape, seed + 100) for seed, shape in enumerate(SHAPES)]
    expected = [oracle(g) / oracle(w) for w, g in zip(weights, gradients, strict=True)]
    assert domination(weights, gradients).tolist() == pytest.approx(expected, rel=1e-6)


def test_domination_of_known_matrices() -> None:
    """A gradient u vᵀ of one sample has σmax = ‖u‖‖v‖."""
    u, v = torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0, 2.0])
    weight = torch.diag(torch.tensor([10.0, 1.0]))
    assert domination([torch.cat([weight, torch.zeros(2, 1)], dim=1)], [torch.outer(u, v)]).item() == pytest.approx(1.5)


@pytest.mark.parametrize("d", [1, 2, 400])
def test_a_zero_weight_is_dominated_and_zero_over_zero_is_nan(d: int) -> None:
    zero, one = torch.zeros(d, d), torch.eye(d)
    found = domination([zero, zero, one], [one, zero, zero]).tolist()
    assert found[0] == math.inf
    assert math.isnan(found[1])
    assert found[2] == 0


def test_numbers_of_weights_and_gradients_that_differ_are_refused() -> None:
    with pytest.raises(ConditioningError, match=r"2 weights and 1 gradients.*one of each"):
        domination([torch.eye(2)] * 2, [torch.eye(2)])
