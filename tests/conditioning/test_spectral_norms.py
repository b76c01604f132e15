"""Spectral norms of weights, compared with the singular values of each matrix in float64, and weight domination."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import gyroscope
from conditioning.devices import DEVICES
from gyroscope.conditioning import solve as module
from gyroscope.conditioning.eigen import largest

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


def spectral_norms(matrices: list[Tensor]) -> Tensor:
    grams, scales = module.shorter_grams(matrices)
    return largest(grams).abs().sqrt() * scales


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
def test_only_the_smaller_gram_matrix_is_formed(shape: tuple[int, ...]) -> None:
    matrix = drawn(shape, 0)
    assert [gram.shape for gram in module.shorter_grams([matrix])[0]] == [(12, 12)]
    assert spectral_norms([matrix]).item() == pytest.approx(oracle(matrix), rel=1e-12)


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


def test_domination_is_the_ratio_of_the_spectral_norms_of_gradient_and_weight() -> None:
    """The loss ⟨u, Wv⟩ of one sample has the gradient u vᵀ, whose σmax is ‖u‖‖v‖."""
    u, v = torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0, 2.0])
    net = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        net.weight.copy_(torch.cat([torch.diag(torch.tensor([10.0, 1.0])), torch.zeros(2, 1)], dim=1))

    def loss(h: Tensor, target: Tensor) -> Tensor:
        return (h * target).sum()

    (found,) = gyroscope.condition(net, loss, (v[None], u[None]), reduction="sum").entries
    assert (found.weight_spectral, found.gradient_spectral) == pytest.approx((10.0, 15.0))
    assert found.domination == pytest.approx(1.5)
