"""Lists that do not belong together are refused in words, before anything has changed."""

from __future__ import annotations

import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gyroscope.errors import VectorError
from gyroscope.vectors import combine_, dots


def ones(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


def csr() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the format a beta
        return ones(2, 2).to_sparse_csr()


# What is wrong with the second layer, and what the message says.
MISFITS: dict[str, tuple[Tensor, Tensor, str]] = {
    "shapes": (ones(2, 3), ones(3, 2), "Layer 1 must have one shape in all lists, got (2, 3) and (3, 2)"),
    "broadcast": (ones(2, 3), ones(1, 3), "Layer 1 must have one shape in all lists, got (2, 3) and (1, 3)"),
    "scalar": (ones(1), ones(), "Layer 1 must have one shape in all lists, got (1,) and ()"),
    "device": (ones(2), ones(2, device="meta"), "Layer 1 must be on one device in all lists, got cpu and meta."),
    "int64": (
        ones(2),
        ones(2, dtype=torch.int64),
        "or float16, got torch.int64",
    ),
    "bool": (
        ones(2, dtype=torch.bool),
        ones(2),
        "or float16, got torch.bool",
    ),
    "complex": (
        ones(2, dtype=torch.complex64),
        ones(2),
        "or float16, got torch.complex64",
    ),
    "sparse": (ones(2, 2), ones(2, 2).to_sparse(), "Layer 1 must be dense, got torch.sparse"),
    "sparse csr": (csr(), csr(), "Layer 1 must be dense, got torch.sparse"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_layers_that_do_not_fit_are_refused(misfit: str) -> None:
    x1, y1, message = MISFITS[misfit]
    x, y = [ones(3), x1], [ones(3), y1]
    with pytest.raises(VectorError, match=re.escape(message)):
        dots({"xx": (x, x), "xy": (x, y)})
    with pytest.raises(VectorError, match=re.escape(message)):
        combine_(x, y, torch.tensor([2.0, 2.0]), torch.tensor([1.0, 1.0]))
    assert x[0].tolist() == [1, 1, 1]


def test_lists_of_different_lengths_are_refused() -> None:
    x, y = [ones(2), ones(2)], [ones(2)]
    message = "got lists of 2 and 1 tensors"
    with pytest.raises(VectorError, match=message):
        dots({"xx": (x, x), "xy": (x, y)})
    with pytest.raises(VectorError, match=message):
        combine_(x, y, torch.ones(2), torch.ones(2))
    assert [t.tolist() for t in x] == [[1, 1], [1, 1]]


def test_a_third_list_is_checked_too() -> None:
    x, z = [ones(2)], [ones(3)]
    with pytest.raises(VectorError, match=re.escape("(2,) and (3,)")):
        dots({"xx": (x, x), "zz": (z, z)})


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 1), (1, 2)])
def test_coefficients_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    x, y, right, wrong = [ones(2), ones(2)], [ones(2), ones(2)], torch.full((2,), 2.0), torch.full(shape, 2.0)
    with pytest.raises(VectorError, match=re.escape(f"one number per layer or segment, got {shape} and (2,)")):
        combine_(x, y, wrong, right)
    with pytest.raises(VectorError, match=re.escape(f"one number per layer or segment, got (2,) and {shape}")):
        combine_(x, y, right, wrong)
    assert [t.tolist() for t in x] == [[1, 1], [1, 1]]


def test_segments_need_coefficients_of_their_own() -> None:
    x = [ones(4), ones(2)]
    with pytest.raises(VectorError, match=re.escape("shape (6,), one number per layer or segment, got (2,) and (2,)")):
        combine_(x, x, torch.ones(2), torch.ones(2), segments=[4, 2])


SPLITS = [
    (ones(6, 2), 4, "Layer 1 of shape (6, 2) cannot be split into 4 equal parts"),
    (ones(6, 2), 12, "Layer 1 of shape (6, 2) cannot be split into 12 equal parts"),
    (ones(6, 2), 0, "Layer 1 of shape (6, 2) cannot be split into 0 equal parts"),
    (ones(6, 2), -1, "Layer 1 of shape (6, 2) cannot be split into -1 equal parts"),
    (ones(), 2, "Layer 1 of shape () cannot be split into 2 equal parts"),
]


@pytest.mark.parametrize(("tensor", "parts", "message"), SPLITS)
def test_splits_that_do_not_come_out_even_are_refused(tensor: Tensor, parts: int, message: str) -> None:
    x = [ones(2), tensor]
    with pytest.raises(VectorError, match=re.escape(message)):
        dots({"xx": (x, x)}, segments=[1, parts])
    coefficients = torch.full((max(0, 1 + parts),), 2.0)
    with pytest.raises(VectorError, match=re.escape(message)):
        combine_(x, x, coefficients, coefficients, segments=[1, parts])
    assert x[0].tolist() == [1, 1]


@pytest.mark.parametrize("segments", [2, [1, 2.0], ["1", "2"], [1, None], 1.5])
def test_segments_that_are_no_whole_numbers_are_refused(segments: Any) -> None:
    x = [ones(2), ones(2)]
    message = rf"`segments` must be a list of integers.*got {re.escape(repr(segments))}"
    with pytest.raises(VectorError, match=message):
        dots({"xx": (x, x)}, segments=segments)
    with pytest.raises(VectorError, match=message):
        combine_(x, x, torch.ones(3), torch.ones(3), segments=segments)


@pytest.mark.parametrize(
    ("wrong", "what"), [(2.0, "a float"), ([2.0], "a list"), (torch.ones(1) * 1j, "a torch.complex64 tensor")]
)
def test_coefficients_that_are_no_tensors_of_numbers_are_refused(wrong: Any, what: str) -> None:
    x, right = [ones(2)], torch.ones(1)
    with pytest.raises(
        VectorError, match=re.escape(f"`a` must be a tensor of real numbers, one per layer or segment, got {what}")
    ):
        combine_(x, x, wrong, right)
    with pytest.raises(
        VectorError, match=re.escape(f"`b` must be a tensor of real numbers, one per layer or segment, got {what}")
    ):
        combine_(x, x, right, wrong)
    assert x[0].tolist() == [1, 1]


@pytest.mark.parametrize("segments", [[], [1], [1, 1, 1]])
def test_segments_are_one_number_a_layer(segments: list[int]) -> None:
    x = [ones(2), ones(2)]
    message = f"`segments` must have one entry per layer, got {len(segments)} entries for 2 layers."
    with pytest.raises(VectorError, match=message):
        dots({"xx": (x, x)}, segments=segments)
    with pytest.raises(VectorError, match=message):
        combine_(x, x, torch.ones(2), torch.ones(2), segments=segments)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ({"a": ones(2, 2)}, "Pair 'a' must be two lists with one tensor per layer, got a Tensor"),
        ({"a": ([ones(2)],)}, "Pair 'a' must be two lists with one tensor per layer, got 1 lists"),
        ({"a": ([ones(2)],) * 3}, "Pair 'a' must be two lists with one tensor per layer, got 3 lists"),
        ({"a": None}, "Pair 'a' must be two lists with one tensor per layer, got a NoneType"),
        ({"a": (ones(2), ones(2))}, "Each part of pair 'a' must be a list with one tensor per layer, got a Tensor"),
        ({"a": ([ones(2)], None)}, "Each part of pair 'a' must be a list with one tensor per layer, got a NoneType"),
        (([ones(2)], [ones(2)]), "`pairs` must be a dict, got a tuple"),
    ],
)
def test_pairs_that_are_not_two_lists_are_refused(pairs: Any, message: str) -> None:
    with pytest.raises(VectorError, match=re.escape(message)):
        dots(pairs)


@pytest.mark.parametrize("entry", [1.0, None, "w", [1.0, 1.0], np.ones(2)])
def test_entries_that_are_no_tensors_are_refused(entry: Any) -> None:
    message = f"Layer 1 must be a tensor, got a {type(entry).__name__}"
    x, y = [ones(2), ones(2)], [ones(2), entry]
    for one, other in ((x, y), (y, x), (y, y)):
        with pytest.raises(VectorError, match=message):
            dots({"a": (one, other)})
        with pytest.raises(VectorError, match=message):
            combine_(one, other, torch.full((2,), 2.0), torch.ones(2))
    assert x[0].tolist() == [1, 1]


def test_combine_takes_lists() -> None:
    x = ones(2, 2)
    with pytest.raises(VectorError, match=r"`x` must be a list .*, got a Tensor"):
        combine_(x, [ones(2), ones(2)], torch.ones(2), torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(VectorError, match=r"`y` must be a list .*, got a Tensor"):
        combine_([ones(2), ones(2)], x, torch.ones(2), torch.ones(2))  # type: ignore[arg-type]
