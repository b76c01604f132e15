"""The statements about memory, compared with the list of every element's place in it."""

from __future__ import annotations

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gyroscope.vectors.layout import aligned, is_dense, like, memory_view, splits_in_memory
from oracles.vectors import offsets

properties = settings(database=None, deadline=None, max_examples=300)


@st.composite
def places(draw: st.DrawFn, shape: tuple[int, ...]) -> Tensor:
    """The numbers 0, 1, 2, ... in `shape`, with its dimensions in any order of memory, some with gaps or repeated."""
    order = draw(st.permutations(range(len(shape))))
    gaps = [draw(st.sampled_from([1, 1, 1, 2])) for _ in shape]
    room = torch.full([shape[d] * gaps[d] for d in order], -1.0)
    back = [order.index(d) for d in range(len(shape))]
    tensor = room.permute(back)[tuple(slice(None, None, g) for g in gaps)]
    tensor.copy_(torch.arange(float(tensor.numel())).reshape(shape))
    return tensor


shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@st.composite
def tensors(draw: st.DrawFn, count: int = 1) -> list[Tensor]:
    shape = draw(shapes)
    return [draw(places(shape)) for _ in range(count)]


def divisors(n: int) -> list[int]:
    return [d for d in range(1, max(n, 1) + 1) if n % d == 0]


@properties
@given(drawn=tensors())
def test_dense_means_each_place_in_a_stretch_of_memory_once(drawn: list[Tensor]) -> None:
    (t,) = drawn
    assert is_dense(t) == (sorted(offsets(t)) == list(range(t.numel())))


def test_repeated_elements_are_not_dense() -> None:
    assert not is_dense(torch.ones(1).expand(3))
    assert not is_dense(torch.ones(4).unfold(0, 2, 1))
    assert is_dense(torch.ones(1).expand(1))


@properties
@given(drawn=tensors(), data=st.data())
def test_splits_in_memory_means_each_part_is_the_next_stretch(drawn: list[Tensor], data: st.DataObject) -> None:
    (t,) = drawn
    assume(is_dense(t) and t.dim() > 0)
    parts = data.draw(st.sampled_from(divisors(t.shape[0])))
    n = t.numel() // parts
    places_of_parts = [sorted(offsets(t)[i * n : (i + 1) * n]) for i in range(parts)]
    assert splits_in_memory(t, parts) == (places_of_parts == [list(range(i * n, (i + 1) * n)) for i in range(parts)])


@properties
@given(drawn=tensors(count=3), data=st.data())
def test_aligned_tensors_have_every_element_of_a_segment_once_in_one_order(
    drawn: list[Tensor], data: st.DataObject
) -> None:
    parts = data.draw(st.sampled_from(divisors(drawn[0].shape[0]))) if drawn[0].dim() else 1
    first, *rest = aligned(drawn, parts)
    assert first.shape == (parts, drawn[0].numel() // parts)
    assert first.is_contiguous()
    assert first.sort(1).values.equal(drawn[0].reshape(parts, -1).sort(1).values)
    for other in rest:
        assert other.is_contiguous()
        assert other.equal(first)


@properties
@given(drawn=tensors(count=2))
def test_like_has_the_values_of_one_and_the_memory_of_the_other(drawn: list[Tensor]) -> None:
    t, reference = drawn
    assume(is_dense(reference))
    copy = like(t, reference)
    assert copy.equal(t)
    assert is_dense(copy)
    assert offsets(copy) == offsets(reference)
    assert (copy is t) == (t.stride() == reference.stride())


def test_like_keeps_the_dtype() -> None:
    assert like(torch.ones(2, 3, dtype=torch.float16).T, torch.ones(3, 2)).dtype == torch.float16


@properties
@given(drawn=tensors())
def test_a_memory_view_is_the_tensor_itself(drawn: list[Tensor]) -> None:
    (t,) = drawn
    assume(is_dense(t))
    memory_view(t, 1).fill_(7)
    assert bool((t == 7).all())


def test_dense_weights_are_not_copied_where_they_agree() -> None:
    w, g = (torch.ones(4, 3, 2, 2).to(memory_format=torch.channels_last) for _ in range(2))
    for parts in (1, 4):
        assert [v.data_ptr() for v in aligned([w, g], parts)] == [w.data_ptr(), g.data_ptr()]
    t = torch.ones(3, 4).T
    assert aligned([t, t], 1)[0].data_ptr() == t.data_ptr()
