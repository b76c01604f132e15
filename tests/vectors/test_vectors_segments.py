"""Rows and blocks of a layer have their own inner products and coefficients."""

from __future__ import annotations

import pytest
import torch
from vector_layouts import DTYPES, LAYOUTS, assert_combined, assert_dot, same_bits, values

from gyroscope.vectors import combine_, dots

pytestmark = pytest.mark.usefixtures("cpu_backend")

PARTS = [1, 2, 3, 6]


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("y_layout", LAYOUTS)
@pytest.mark.parametrize("x_layout", LAYOUTS)
def test_dots_of_segments_are_the_dots_of_the_parts(x_layout: str, y_layout: str, parts: int) -> None:
    x, y = LAYOUTS[x_layout](values(0, torch.float32)), LAYOUTS[y_layout](values(1, torch.float32))
    got = dots({"xy": ([x], [y]), "xx": ([x], [x])}, segments=[parts])
    assert got.shape == (parts, 2)
    for row, p, q in zip(got, x.chunk(parts), y.chunk(parts), strict=True):
        assert_dot(row[0], p, q)
        assert_dot(row[1], p, p)


def test_layers_with_different_numbers_of_segments_stand_one_below_the_other() -> None:
    x = [values(i, dtype) for i, dtype in enumerate(DTYPES)]
    got = dots({"xx": (x, x)}, segments=PARTS)
    parts = [p for xi, n in zip(x, PARTS, strict=True) for p in xi.chunk(n)]
    assert got.shape == (12, 1)
    for row, p in zip(got, parts, strict=True):
        assert_dot(row, p, p)


def test_elements_of_a_vector_may_be_segments() -> None:
    x = torch.tensor([1.0, 2.0, 3.0])
    assert dots({"xx": ([x], [x])}, segments=[3]).tolist() == [[1], [4], [9]]


@pytest.mark.parametrize("shape", [(0, 3), (4, 0)])
def test_segments_without_elements_have_dot_zero(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    assert dots({"xx": ([x], [x])}, segments=[4]).tolist() == [[0]] * 4


def test_more_rows_than_one_piece_holds() -> None:
    x = torch.arange(5.0)[:, None].expand(5, 100_000).contiguous()
    assert dots({"xx": ([x], [x])}, segments=[5]).tolist() == [[100_000 * i * i] for i in range(5)]


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_segment_is_combined_with_its_own_coefficients(dtype: torch.dtype, layout: str, parts: int) -> None:
    old, y = values(0, dtype), values(1, dtype)
    x = LAYOUTS[layout](old)
    a, b = torch.linspace(0.5, 1.5, parts, dtype=torch.float64), torch.linspace(-1, 1.5, parts, dtype=torch.float64)
    combine_([x], [y], a, b, segments=[parts])
    for new, p, q, i in zip(x.chunk(parts), old.chunk(parts), y.chunk(parts), range(parts), strict=True):
        assert_combined(new, p, q, a[i].item(), b[i].item())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_segment_with_a_1_and_b_0_keeps_its_bits_beside_one_that_moves(layout: str) -> None:
    old = values(0, torch.float32)
    x, y = LAYOUTS[layout](old), torch.full_like(old, torch.nan)
    y[2:4] = 1
    combine_([x], [y], torch.tensor([1.0, 2.0, 1.0]), torch.tensor([0.0, 3.0, 0.0]), segments=[3])
    assert same_bits(x[:2], old[:2])
    assert same_bits(x[4:], old[4:])
    assert_combined(x[2:4], old[2:4], y[2:4], 2.0, 3.0)
