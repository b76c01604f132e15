"""The Triton kernels, run by Triton's interpreter; `test_vectors_triton.py` starts these in a process of their own.

The interpreter has to be chosen (`TRITON_INTERPRET=1`) before Triton is imported.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from vector_layouts import DTYPES, LAYOUTS, assert_combined, assert_dot, same_bits, values

from gyroscope.errors import VectorError
from gyroscope.vectors import backend, combine_, dots, eager, launch, triton
from gyroscope.vectors.launch import CHUNK
from interpreted import hasten_interpreter

hasten_interpreter()


def agrees_with_eager(
    got: Tensor, lists: list[list[Tensor]], pairs: list[tuple[int, int]], segments: list[int]
) -> bool:
    return torch.allclose(got, eager.dots(lists, pairs, segments), rtol=1e-12, atol=1e-12)


def assert_rounded(new: Tensor, old: Tensor, y: Tensor, a: float, b: float) -> None:
    # The interpreter cuts bfloat16 numbers off where a GPU rounds them.
    assert_combined(new, old, y, a, b, roundings=2 if new.dtype == torch.bfloat16 else 1)


def test_the_kernels_are_what_is_tested() -> None:
    assert backend("cpu").__name__ == "gyroscope.vectors.triton"


@pytest.mark.parametrize("y_layout", LAYOUTS)
@pytest.mark.parametrize("x_layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layout_does_not_change_a_dot(dtype: torch.dtype, x_layout: str, y_layout: str) -> None:
    x, y = LAYOUTS[x_layout](values(0, dtype)), LAYOUTS[y_layout](values(1, dtype))
    got = dots({"xx": ([x], [x]), "xy": ([x], [y])})
    assert_dot(got[0, 0], x, x)
    assert_dot(got[0, 1], x, y)
    assert agrees_with_eager(got, [[x], [y]], [(0, 0), (0, 1)], [1])


@pytest.mark.parametrize("y_dtype", DTYPES)
@pytest.mark.parametrize("x_dtype", DTYPES)
def test_lists_may_differ_in_dtype(x_dtype: torch.dtype, y_dtype: torch.dtype) -> None:
    x, y = values(0, x_dtype), values(1, y_dtype)
    assert_dot(dots({"xy": ([x], [y])}), x, y)


def test_layers_may_differ_in_dtype_and_segments() -> None:
    parts = [1, 2, 3, 6]
    x = [values(i, dtype) for i, dtype in enumerate(DTYPES)]
    y = [values(10 + i, dtype) for i, dtype in enumerate(reversed(DTYPES))]
    got = dots({"xy": (x, y), "xx": (x, x)}, segments=parts)
    rows = [(p, q) for i, n in enumerate(parts) for p, q in zip(x[i].chunk(n), y[i].chunk(n), strict=True)]
    assert agrees_with_eager(got, [x, y], [(0, 1), (0, 0)], parts)
    for row, (p, q) in zip(got, rows, strict=True):
        assert_dot(row[0], p, q)
        assert_dot(row[1], p, p)


@pytest.mark.parametrize("lists", [1, 2, 3, 4, 5, 6])
def test_columns_follow_the_pairs_however_many_lists(lists: int) -> None:
    every = [[values(10 * k + i, torch.float32, shape) for i, shape in enumerate([(5,), (2, 3)])] for k in range(lists)]
    wanted = [(i, j) for i in range(lists) for j in range(lists)][::-1]
    got = dots({f"{i}{j}": (every[i], every[j]) for i, j in wanted})
    for layer in range(2):
        for k, (i, j) in enumerate(wanted):
            assert_dot(got[layer, k], every[i][layer], every[j][layer])


@pytest.mark.parametrize("parts", [1, 2, 3, 6])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dots_of_segments_are_the_dots_of_the_parts(layout: str, parts: int) -> None:
    x, y = LAYOUTS[layout](values(0, torch.float32)), values(1, torch.float32)
    got = dots({"xy": ([x], [y])}, segments=[parts])
    assert got.shape == (parts, 1)
    for row, p, q in zip(got, x.chunk(parts), y.chunk(parts), strict=True):
        assert_dot(row, p, q)


@pytest.mark.parametrize("size", [1, 511, 512, 513, 1024, 1025, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 700])
@pytest.mark.parametrize("lists", [2, 3])
def test_no_element_is_lost_where_blocks_and_chunks_end(lists: int, size: int) -> None:
    every = [[torch.full((size,), float(k + 1))] for k in range(lists)]
    every[1] = [torch.arange(size, dtype=torch.float64)]
    got = dots({str(k): (every[k], every[1]) for k in range(lists) if k != 1})
    assert got.tolist() == [[(k + 1) * size * (size - 1) / 2 for k in range(lists) if k != 1]]


def test_more_chunks_than_the_last_program_adds_up_at_a_time() -> None:
    x = torch.ones(CHUNK * 130, dtype=torch.float16)
    assert dots({"xx": ([x], [x])}).item() == CHUNK * 130


def test_tensors_without_elements_and_of_one_element() -> None:
    x = [torch.ones(0, 3), torch.tensor(3.0), torch.ones(1), torch.ones(2, 0)]
    assert dots({"xx": (x, x)}).tolist() == [[0], [9], [1], [0]]
    combine_(x, x, torch.full((4,), 2.0), torch.ones(4))
    assert [t.tolist() for t in x] == [[], 9, [3], [[], []]]


def test_magnitudes_whose_squares_leave_float32() -> None:
    x = [values(0, torch.float32) * scale for scale in (1e-25, 1e-20, 1e20)]
    for row, p in zip(dots({"xx": (x, x)}), x, strict=True):
        assert_dot(row, p, p)


def test_the_same_tensors_with_new_values_give_new_dots() -> None:
    x, y = [torch.ones(CHUNK + 3)], [torch.ones(CHUNK + 3)]
    for factor in (1.0, 2.0, 3.0):
        x[0].fill_(factor)
        assert dots({"xy": (x, y)}).item() == factor * (CHUNK + 3)


def test_tensors_of_other_shapes_in_the_same_place_give_their_own_dots() -> None:
    room = torch.arange(40.0)
    for n in (40, 10, 39, 10, 40):
        x = [room[:n]]
        assert dots({"xx": (x, x)}).item() == sum(i * i for i in range(n))
    for parts in (2, 1, 4):
        x = [room]
        assert dots({"xx": (x, x)}, segments=[parts])[0].item() == sum(i * i for i in range(40 // parts))


def test_other_dtypes_in_the_same_place_give_their_own_dots() -> None:
    room = torch.zeros(64, dtype=torch.uint8)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        x = [room.view(dtype)[:8].copy_(torch.arange(8.0))]
        assert dots({"xx": (x, x)}, segments=[2]).tolist() == [[0 + 1 + 4 + 9], [16 + 25 + 36 + 49]]


def test_reallocated_tensors_give_their_own_dots() -> None:
    for i in range(40):  # more tables than are kept
        x = [torch.full((5 + i % 3,), float(i)), torch.full((2, 2), 1.0)]
        assert dots({"xx": (x, x)}).tolist() == [[i * i * (5 + i % 3)], [4]]
        x[0] = x[0].clone()
        combine_(x, x, torch.ones(2), torch.ones(2))
        assert x[0].tolist() == [2 * i] * (5 + i % 3)


@pytest.mark.parametrize("y_layout", LAYOUTS)
@pytest.mark.parametrize("x_layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layout_does_not_change_a_combination(dtype: torch.dtype, x_layout: str, y_layout: str) -> None:
    old, y = values(0, dtype), LAYOUTS[y_layout](values(1, dtype))
    x = LAYOUTS[x_layout](old)
    combine_([x], [y], torch.tensor([0.9], dtype=torch.float64), torch.tensor([-0.3], dtype=torch.float64))
    assert_rounded(x, old, y, 0.9, -0.3)
    assert same_bits(y, values(1, dtype))


@pytest.mark.parametrize("parts", [2, 3, 6])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_segment_is_combined_with_its_own_coefficients(dtype: torch.dtype, layout: str, parts: int) -> None:
    old, y = values(0, dtype), values(1, dtype)
    x = LAYOUTS[layout](old)
    a, b = torch.linspace(0.0, 1.5, parts, dtype=torch.float64), torch.linspace(-1, 1.5, parts, dtype=torch.float64)
    combine_([x], [y], a, b, segments=[parts])
    for new, p, q, i in zip(x.chunk(parts), old.chunk(parts), y.chunk(parts), range(parts), strict=True):
        assert_rounded(new, p, q, a[i].item(), b[i].item())


def test_layers_of_all_kinds_get_their_own_coefficients() -> None:
    old = [layout(values(i, dtype)) for i, (layout, dtype) in enumerate(zip(LAYOUTS.values(), DTYPES, strict=False))]
    old += [torch.ones(0), values(7, torch.float32, (CHUNK + 5,))]
    x, y = [t.clone() for t in old], [torch.ones_like(t) for t in old]
    x[3] = LAYOUTS["sliced"](old[3])
    a, b = torch.linspace(0.5, 2, len(x)), torch.linspace(-2, 2, len(x))
    combine_(x, y, a, b)
    for i, new in enumerate(x):
        assert_rounded(new, old[i], y[i], a[i].item(), b[i].item())


def test_coefficients_may_be_columns_of_a_matrix_or_one_number_expanded() -> None:
    table = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]])
    x = [torch.ones(2) for _ in range(3)]
    combine_(x, [torch.ones(2)] * 3, table[:, 0], table[:, 1])
    assert torch.stack(x).tolist() == [[11, 11], [22, 22], [33, 33]]
    combine_(x, [torch.ones(2)] * 3, torch.tensor(2.0).expand(3), torch.tensor(1.0).expand(3))
    assert torch.stack(x).tolist() == [[23, 23], [45, 45], [67, 67]]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_with_a_1_and_b_0_keeps_its_bits(dtype: torch.dtype, layout: str) -> None:
    old = values(0, dtype)
    old[0, 0, 0, 0], old[0, 0, 0, 1] = -0.0, torch.nan
    x = LAYOUTS[layout](old)
    combine_([x], [torch.full_like(old, torch.nan)], torch.ones(1), torch.zeros(1))
    assert same_bits(x, old)


def test_coefficients_beyond_float32() -> None:
    old, y = torch.ones(5), torch.full((5,), 1e-30)
    x = old.clone()
    combine_([x], [y], torch.tensor([0.5], dtype=torch.float64), torch.tensor([1e39], dtype=torch.float64))
    assert_rounded(x, old, y, 0.5, 1e39)


def test_a_graph_captures_tensors_that_lie_elsewhere_than_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of a captured step lie in the graph's own memory."""

    def pair(seed: int, count: int = 300) -> tuple[list[Tensor], list[Tensor]]:
        both = torch.randn(2, count, generator=torch.Generator().manual_seed(seed))
        return [both[0].clone(), both[0].clone()], [both[1].clone(), both[1].clone()]

    seen, new, other = pair(0), pair(1), pair(2, count=299)
    dots({"xy": seen})
    for module in (triton, launch):
        monkeypatch.setattr(module, "is_capturing", lambda: True)
    assert agrees_with_eager(dots({"xy": new}), list(new), [(0, 1)], [1, 1])
    with pytest.raises(VectorError, match="tensors of other sizes than before"):
        dots({"xy": other})
    with pytest.raises(VectorError, match="or twice of new ones"):
        dots({"xy": pair(3)})
    assert agrees_with_eager(dots({"xy": seen}), list(seen), [(0, 1)], [1, 1])


def test_leaf_parameters_are_combined_without_a_graph() -> None:
    w = torch.ones(3, requires_grad=True)
    combine_([w], [w * 2], torch.tensor([0.5]), torch.tensor([1.0]))
    assert w.tolist() == [2.5] * 3
    assert w.grad_fn is None
    assert not dots({"ww": ([w], [w])}).requires_grad
