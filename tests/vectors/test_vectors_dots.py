"""Inner products do not depend on dtype, layout, number of lists or size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from vector_layouts import DTYPES, LAYOUTS, assert_dot, values

from gyroscope.vectors import backend, combine_, dots, eager
from oracles.vectors import dot

pytestmark = pytest.mark.usefixtures("cpu_backend")


@pytest.mark.parametrize("y_layout", LAYOUTS)
@pytest.mark.parametrize("x_layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layout_does_not_change_a_dot(dtype: torch.dtype, x_layout: str, y_layout: str) -> None:
    x, y = LAYOUTS[x_layout](values(0, dtype)), LAYOUTS[y_layout](values(1, dtype))
    got = dots({"xx": ([x], [x]), "xy": ([x], [y]), "yy": ([y], [y])})
    assert got.shape == (1, 3)
    assert got.dtype == torch.float64
    for value, (p, q) in zip(got[0], [(x, x), (x, y), (y, y)], strict=True):
        assert_dot(value, p, q)


@pytest.mark.parametrize("y_dtype", DTYPES)
@pytest.mark.parametrize("x_dtype", DTYPES)
def test_lists_may_differ_in_dtype(x_dtype: torch.dtype, y_dtype: torch.dtype) -> None:
    x, y = values(0, x_dtype), values(1, y_dtype)
    assert_dot(dots({"xy": ([x], [y])}), x, y)


def test_layers_may_differ_in_dtype_and_layout() -> None:
    x = [layout(values(i, dtype)) for i, (layout, dtype) in enumerate(zip(LAYOUTS.values(), 2 * DTYPES, strict=False))]
    y = [values(10 + i) for i in range(len(x))]
    for row, p, q in zip(dots({"xy": (x, y)}), x, y, strict=True):
        assert_dot(row, p, q)


def test_an_expanded_tensor_counts_every_repetition() -> None:
    x, y = values(0), values(1)[:1].expand(6, 4, 3, 2)
    assert_dot(dots({"xy": ([x], [y])}), x, y)
    assert_dot(dots({"yy": ([y], [y])}), y, y)


@pytest.mark.parametrize("lists", [1, 2, 3, 4, 5, 6])
def test_columns_follow_the_pairs_however_many_lists(lists: int) -> None:
    every = [[values(10 * k + i, shape=shape) for i, shape in enumerate([(5,), (2, 3)])] for k in range(lists)]
    wanted = [(i, j) for i in range(lists) for j in range(lists)][::-1]  # each list in many pairs, in both orders
    got = dots({f"{i}{j}": (every[i], every[j]) for i, j in wanted})
    assert got.shape == (2, lists**2)
    for layer in range(2):
        for k, (i, j) in enumerate(wanted):
            assert_dot(got[layer, k], every[i][layer], every[j][layer])


def test_names_do_not_order_the_columns() -> None:
    one, two = [torch.tensor([1.0])], [torch.tensor([2.0])]
    assert dots({"z": (one, one), "a": (two, two), "m": (one, two)}).tolist() == [[1, 4, 2]]


def test_a_list_in_several_pairs_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    handed_over = []
    computes = backend("cpu")
    real = computes.dots

    def spy(lists: list[list[Tensor]], *rest: object) -> Tensor:
        handed_over.append(len(lists))
        return real(lists, *rest)

    monkeypatch.setattr(computes, "dots", spy)
    w, s = [values(0)], [values(1)]
    dots({"ww": (w, w), "ws": (w, s), "ss": (s, s)})
    assert handed_over == [2]


def test_equal_lists_that_are_not_the_same_object_are_pairs_too() -> None:
    x = values(0)
    assert_dot(dots({"xx": ([x], (x,))}), x, x)


def test_no_graph_is_built_for_leaves_or_results_of_operations() -> None:
    w = nn.Parameter(values(0))
    leafless = transposed_square(w)
    got = dots({"ww": ([w], [w]), "wl": ([w], [leafless])})
    assert not got.requires_grad
    assert got.grad_fn is None
    assert_dot(got[0, 1], w, leafless)


def transposed_square(w: Tensor) -> Tensor:
    return (w * w).transpose(0, 1).contiguous().transpose(0, 1)


def test_inputs_are_not_changed() -> None:
    x, y = LAYOUTS["sliced"](values(0)), LAYOUTS["channels_last"](values(1))
    dots({"xy": ([x], [y])})
    assert x.equal(values(0))
    assert y.equal(values(1))


def test_no_layers_and_no_pairs_give_empty_matrices() -> None:
    assert dots({"xy": ([], []), "yx": ([], [])}).shape == (0, 2)
    assert dots({}).shape == (0, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 4)])
def test_a_tensor_without_elements_has_dot_zero_between_others(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = [torch.ones(2, dtype=dtype), torch.ones(shape, dtype=dtype), torch.ones(3, dtype=dtype)]
    assert dots({"xx": (x, x)}).tolist() == [[2], [0], [3]]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1, 1)])
def test_one_number_is_multiplied(shape: tuple[int, ...]) -> None:
    x, y = torch.full(shape, 3.0), torch.full(shape, -0.5)
    assert dots({"xy": ([x], [y]), "xx": ([x], [x])}).tolist() == [[-1.5, 9.0]]


def test_ten_thousand_layers_keep_their_order() -> None:
    x = [torch.full((3,), float(i)) for i in range(10_000)]
    one = [torch.ones(3)] * 10_000
    expected = 3 * torch.arange(10_000, dtype=torch.float64)
    assert dots({"x": (x, one)})[:, 0].equal(expected)


def test_layers_on_two_devices_come_back_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    # One CPU stands for both devices: what is tested is the way out to them and back.
    two = {torch.device("cpu"): [1, 3], torch.device("cpu", 0): [0, 2]}
    monkeypatch.setattr("gyroscope.vectors.interface._by_device", lambda lists: two)
    x, y = ([values(10 * k + i, shape=(4, 2)) for i in range(4)] for k in range(2))
    got = dots({"xx": (x, x), "xy": (x, y)}, segments=[1, 2, 4, 1])
    parts = [(p, q) for xi, yi, n in zip(x, y, [1, 2, 4, 1], strict=True) for p, q in zip(xi.chunk(n), yi.chunk(n))]  # noqa: B905
    assert got.shape == (8, 2)
    for row, (p, q) in zip(got, parts, strict=True):
        assert_dot(row[0], p, p)
        assert_dot(row[1], p, q)


def test_many_layers_on_two_devices_are_counted_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    n, added = 500, [0]

    def counting(numbers: list[int]) -> int:
        added[0] += len(numbers)
        return sum(numbers)

    monkeypatch.setattr("gyroscope.vectors.interface.sum", counting, raising=False)
    two = {torch.device("cpu"): list(range(0, n, 2)), torch.device("cpu", 0): list(range(1, n, 2))}
    monkeypatch.setattr("gyroscope.vectors.interface._by_device", lambda lists: two)
    x, one = [torch.full((2,), float(i)) for i in range(n)], [torch.ones(2)] * n
    assert dots({"x": (x, one)})[:, 0].tolist() == [2.0 * i for i in range(n)]
    combine_(one, x, torch.ones(n), torch.zeros(n))
    assert added[0] < 10 * n


@pytest.mark.parametrize(("pieces", "more"), [(1, -1), (1, 0), (1, 1), (3, 5)])
def test_no_element_is_lost_where_a_vector_is_cut_into_pieces(pieces: int, more: int) -> None:
    size = pieces * eager._PIECE["cpu"] + more
    x, position = torch.ones(size), torch.arange(size, dtype=torch.float64)
    assert dots({"x": ([x], [position])}).item() == size * (size - 1) / 2


def test_ten_million_equal_numbers_are_summed_where_float32_is_visibly_off() -> None:
    x = torch.full((10**7,), 0.1)
    exact = 10**7 * dot(x[:1], x[:1])
    assert abs(torch.dot(x, x).item() / exact - 1) > 1e-6
    assert abs(dots({"xx": ([x], [x])}).item() / exact - 1) < 1e-12
