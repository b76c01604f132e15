"""x ← a x + b y in place, to the rounding of x's own dtype, and nothing else is touched."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from vector_layouts import DTYPES, LAYOUTS, assert_combined, same_bits, values

from gyroscope.vectors import combine_

pytestmark = pytest.mark.usefixtures("cpu_backend")


def one(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


@pytest.mark.parametrize("y_layout", LAYOUTS)
@pytest.mark.parametrize("x_layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layout_does_not_change_a_combination(dtype: torch.dtype, x_layout: str, y_layout: str) -> None:
    old, y = values(0, dtype), LAYOUTS[y_layout](values(1, dtype))
    x = LAYOUTS[x_layout](old)
    where = x.data_ptr()
    combine_([x], [y], one(0.9), one(-0.3))
    assert_combined(x, old, y, 0.9, -0.3)
    assert x.data_ptr() == where
    assert same_bits(y, values(1, dtype))


@pytest.mark.parametrize("y_dtype", DTYPES)
@pytest.mark.parametrize("x_dtype", DTYPES)
def test_y_may_have_another_dtype(x_dtype: torch.dtype, y_dtype: torch.dtype) -> None:
    old, y = values(0, x_dtype), values(1, y_dtype)
    x = old.clone()
    combine_([x], [y], one(1.25), one(0.5))
    assert_combined(x, old, y, 1.25, 0.5)


@pytest.mark.parametrize("parts", [1, 2])
def test_what_lies_between_the_elements_of_a_slice_stays(parts: int) -> None:
    around = torch.arange(48.0).view(8, 6)
    before = around.clone()
    coefficient = torch.full((parts,), 2.0)
    combine_([around[::2, ::3]], [torch.ones(4, 2)], coefficient, coefficient, segments=[parts])
    expected = before.clone()
    expected[::2, ::3] = 2 * before[::2, ::3] + 2
    assert around.equal(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_coefficients_may_be_float32_or_float64(dtype: torch.dtype) -> None:
    old, y = values(0), values(1)
    x, a, b = old.clone(), torch.tensor([0.9], dtype=dtype), torch.tensor([0.1], dtype=dtype)
    combine_([x], [y], a, b)
    assert_combined(x, old, y, a.item(), b.item())


def test_coefficients_may_be_columns_of_a_matrix_or_one_number_expanded() -> None:
    table = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]])
    x = [torch.ones(2) for _ in range(3)]
    combine_(x, [torch.ones(2)] * 3, table[:, 0], table[:, 1])
    assert torch.stack(x).tolist() == [[11, 11], [22, 22], [33, 33]]
    combine_(x, [torch.ones(2)] * 3, torch.tensor(2.0).expand(3), torch.tensor(1.0).expand(3))
    assert torch.stack(x).tolist() == [[23, 23], [45, 45], [67, 67]]


@pytest.mark.parametrize("no_grad", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_leaf_parameter_is_updated_without_a_graph(dtype: torch.dtype, no_grad: bool) -> None:
    w = nn.Parameter(torch.ones(3, dtype=dtype))
    y = torch.ones(3, dtype=dtype, requires_grad=True) * 2
    with torch.set_grad_enabled(not no_grad):
        combine_([w], [y], one(0.5), one(1.0))
    assert w.tolist() == [2.5] * 3
    assert w.is_leaf
    assert w.requires_grad
    assert w.grad_fn is None


def test_x_and_y_may_be_the_same_tensor() -> None:
    x = torch.tensor([1.0, -2.0])
    combine_([x], [x], one(1.5), one(0.5))
    assert x.tolist() == [2, -4]


@pytest.mark.parametrize("nothing", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_with_a_1_and_b_0_keeps_its_bits(dtype: torch.dtype, layout: str, nothing: float) -> None:
    old = values(0, dtype)
    old[0, 0, 0, 0], old[0, 0, 0, 1], old[1, 0, 0, 0] = -0.0, torch.nan, torch.inf
    x = LAYOUTS[layout](old)
    combine_([x], [torch.full_like(old, nothing)], one(1.0), one(0.0))
    assert same_bits(x, old)


def test_a_layer_that_stays_does_not_hold_its_neighbours() -> None:
    x = [torch.ones(2), torch.ones(2), torch.ones(2)]
    y = [torch.ones(2), torch.full((2,), torch.nan), torch.ones(2)]
    combine_(x, y, torch.tensor([2.0, 1.0, 3.0]), torch.tensor([1.0, 0.0, 1.0]))
    assert torch.stack(x).tolist() == [[3, 3], [1, 1], [4, 4]]


# x, y, a, b: the result is an ordinary float32 number, though a coefficient or an intermediate one is not.
EXTREMES = [
    (1.0, 1e-30, 1.0, 1e39),
    (1.0, 1e-38, 0.5, 1e38),
    (1.0, 1e30, 0.5, 1e-40),
    (1e10, 1.0, 0.5, 1e-29),  # (a − 1) / b · x overflows
    (1e-25, 0.0, 0.5, 1e29),  # (a − 1) / b · x vanishes
    (1e-30, 1e-30, 1e30, 1.0),
    (1e20, 1e-20, 0.9, 1e20),
    (1e-20, 1e20, 0.9, 1e-20),
]


@pytest.mark.parametrize(("x", "y", "a", "b"), EXTREMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_coefficients_neither_overflow_nor_vanish(
    dtype: torch.dtype, x: float, y: float, a: float, b: float
) -> None:
    old, other = torch.full((5,), x, dtype=dtype), torch.full((5,), y, dtype=dtype)
    new = old.clone()
    combine_([new], [other], one(a), one(b))
    assert_combined(new, old, other, a, b)


@pytest.mark.parametrize("a", [0.0, 1e-6, -1e-3, 0.1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_shrinking_x_away_leaves_none_of_its_rounding(dtype: torch.dtype, a: float) -> None:
    old, y = 1e3 * values(0, dtype), 1e-3 * values(1, dtype)
    x = old.clone()
    combine_([x], [y], one(a), one(1.0))
    assert_combined(x, old, y, a, 1.0)


def test_the_sign_of_b_is_the_sign_of_the_step() -> None:
    x = [torch.zeros(1), torch.zeros(1)]
    combine_(x, [torch.ones(1)] * 2, torch.ones(2), torch.tensor([2.0, -2.0]))
    assert [t.item() for t in x] == [2, -2]


def test_no_layers_and_layers_without_elements_are_nothing_to_do() -> None:
    combine_([], [], torch.ones(0), torch.ones(0))
    x = [torch.ones(2), torch.ones(0, 3), torch.ones(())]
    combine_(x, [torch.ones_like(t) for t in x], torch.full((3,), 2.0), torch.full((3,), 3.0))
    assert [t.tolist() for t in x] == [[5, 5], [], 5]


def test_ten_thousand_layers_get_their_own_coefficients() -> None:
    x = [torch.ones(3) for _ in range(10_000)]
    b = torch.arange(10_000, dtype=torch.float64)
    combine_(x, [torch.ones(3)] * 10_000, torch.ones(10_000), b)
    assert torch.stack(x).double().equal((1 + b)[:, None].expand(-1, 3))


def test_layers_on_two_devices_get_their_own_coefficients(monkeypatch: pytest.MonkeyPatch) -> None:
    # One CPU stands for both devices: what is tested is which coefficients go where.
    two = {torch.device("cpu"): [1, 3], torch.device("cpu", 0): [0, 2]}
    monkeypatch.setattr("gyroscope.vectors.interface._by_device", lambda lists: two)
    x = [torch.zeros(4) for _ in range(4)]
    combine_(x, [torch.ones(4)] * 4, torch.ones(8), torch.arange(8.0), segments=[1, 2, 4, 1])
    assert torch.cat(x).tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 7, 7, 7]
