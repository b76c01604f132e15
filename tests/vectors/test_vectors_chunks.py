"""Every element belongs to one chunk; every chunk is summed once, then updated once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyroscope.vectors import launch
from gyroscope.vectors.launch import CHUNK, cut, is_aligned, schedule, to_device

properties = settings(database=None, deadline=None, max_examples=200)


@properties
@given(lengths=st.lists(st.integers(0, 60), max_size=12), chunk=st.integers(1, 20))
def test_chunks_cover_every_element_exactly_once(lengths: list[int], chunk: int) -> None:
    segment, position, _ = cut(lengths, chunk)
    covered = []
    for s, p in zip(segment.tolist(), position.tolist(), strict=True):
        n = min(lengths[s] - p * chunk, chunk)
        assert n > 0 or lengths[s] == 0
        covered += [(s, p * chunk + i) for i in range(n)]
    assert covered == [(s, i) for s, n in enumerate(lengths) for i in range(n)]


@properties
@given(lengths=st.lists(st.integers(0, 60), max_size=12), chunk=st.integers(1, 20))
def test_first_chunks_bound_each_segment_and_none_is_without(lengths: list[int], chunk: int) -> None:
    segment, position, first = cut(lengths, chunk)
    assert len(first) == len(lengths) + 1
    assert len(segment) == len(position) == first[-1]
    for s in range(len(lengths)):
        mine = segment[first[s] : first[s + 1]].tolist()
        assert mine == [s] * max(1, -(-lengths[s] // chunk))


def test_a_list_and_an_array_of_lengths_are_cut_alike() -> None:
    lengths = [CHUNK + 1, 0, CHUNK]
    for ours, theirs in zip(cut(lengths), cut(np.array(lengths)), strict=True):
        assert ours.tolist() == theirs.tolist()
    assert cut(lengths)[0].tolist() == [0, 0, 1, 2]


@properties
@given(chunks=st.integers(0, 300))
def test_every_chunk_is_summed_once_and_after_all_sums_updated_once(chunks: int) -> None:
    order = schedule(chunks).tolist()
    sums, updates = order[:chunks], order[chunks:]
    assert sorted(sums) == list(range(chunks))
    assert sorted(-u - 1 for u in updates) == list(range(chunks))
    assert all(u < 0 for u in updates)


def test_updates_begin_with_what_was_read_last() -> None:
    assert [-u - 1 for u in schedule(4).tolist()[4:]] == [3, 2, 1, 0]


def test_a_table_on_the_device_is_a_copy() -> None:
    array = np.arange(6).reshape(2, 3)
    table = to_device(array.T, torch.device("cpu"))
    assert table.is_contiguous()
    array[:] = 0
    assert table.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_table_is_on_the_device_that_was_asked_for() -> None:
    assert to_device(np.arange(3), torch.device("meta")).device.type == "meta"


@pytest.mark.parametrize(
    ("pointers", "expected"),
    [([], True), ([0, 16, 4096], True), ([16, 24], False), ([1], False), ([2**47 + 8], False), ([2**47], True)],
)
def test_pointers_are_aligned_where_all_are_multiples_of_16(pointers: list[int], expected: bool) -> None:
    assert is_aligned(np.array(pointers, dtype=np.int64)) is expected


def test_a_table_that_a_graph_has_captured_is_found_again_however_many_others_were_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: launch.Kept[object] = launch.Kept(2)
    first = object()
    kept.keep("a", first)
    monkeypatch.setattr(launch, "is_capturing", lambda: True)
    assert kept.find("a") is first
    assert kept.find("b") is None
    monkeypatch.setattr(launch, "is_capturing", lambda: False)
    for key in "bcd":
        kept.keep(key, object())
    assert kept.find("b") is None
    assert kept.find("a") is first
    assert len(kept) == 2
