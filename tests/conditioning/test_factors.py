"""Sums of outer products in every form they are kept in, compared with those of all samples in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from conditioning.devices import DEVICES
from gyroscope.conditioning import factors as module
from gyroscope.conditioning.factors import Factor, add_gram_, upper
from oracles.conditioning import descending


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gram(a: Tensor) -> Tensor:
    columns = a.double().cpu().reshape(a.shape[0], -1)
    return columns @ columns.T


def same(found: Tensor, expected: Tensor, accuracy: float = 1e-12) -> None:
    assert (found.cpu() - expected).abs().max() <= accuracy * max(expected.abs().max().item(), 1e-300)


LAYOUTS: dict[str, Any] = {
    "matrix": lambda: drawn(7, 20),
    "transposed": lambda: drawn(20, 7).T,
    "vector": lambda: drawn(7),
    "every other column": lambda: drawn(7, 40)[:, ::2],
    "every other row": lambda: drawn(14, 20)[::2],
    "expanded": lambda: drawn(7, 1).expand(7, 6),
    "expanded in between": lambda: drawn(7, 3, 1).expand(7, 3, 5),
    "three dimensions": lambda: drawn(7, 4, 5),
    "images": lambda: drawn(3, 7, 4, 5).movedim(1, 0),
    "images, channels last": lambda: drawn(3, 7, 4, 5).contiguous(memory_format=torch.channels_last).movedim(1, 0),
    "volumes, channels last": lambda: (
        drawn(2, 7, 3, 2, 2).contiguous(memory_format=torch.channels_last_3d).movedim(1, 0)
    ),
    "groups": lambda: torch.unflatten(drawn(3, 14, 4, 5), 1, (2, 7)).movedim(2, 0),
    "one column": lambda: drawn(7, 1),
    "one row": lambda: drawn(1, 50),
    "reversed in time": lambda: drawn(5, 3, 7).flip(0).permute(2, 1, 0),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_outer_products_are_formed_in_float64_from_any_layout(layout: str, dtype: torch.dtype, device: str) -> None:
    made = LAYOUTS[layout]()
    # Conversions keep the layout.
    a = made.to(device, dtype)
    out = torch.zeros(len(a), len(a), dtype=torch.float64, device=device)
    assert add_gram_(out, a) is out
    same(upper(out), gram(a), 1e-14)
    add_gram_(out, a)
    same(upper(out), 2 * gram(a), 1e-14)


@pytest.mark.parametrize("at_once", [1, 7, 50, 2**24])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_of_the_columns_add_up(layout: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AT_ONCE", at_once)
    monkeypatch.setattr(module, "_AT_ONCE_ON_CPU", at_once)
    a = LAYOUTS[layout]()
    same(upper(add_gram_(torch.zeros(len(a), len(a), dtype=torch.float64), a)), gram(a), 1e-14)


@pytest.mark.parametrize("d", [511, 512, 513, 1100])
def test_large_matrices_are_formed_in_blocks_of_their_upper_triangle(d: int) -> None:
    a = drawn(d, 30, dtype=torch.float32)
    out = torch.zeros(d, d, dtype=torch.float64)
    same(upper(add_gram_(out, a)), gram(a), 1e-14)


@pytest.mark.parametrize("block", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_of_any_size_make_the_whole(layout: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK_ON_CPU", block)
    a = LAYOUTS[layout]()
    same(upper(add_gram_(torch.zeros(len(a), len(a), dtype=torch.float64), a)), gram(a), 1e-14)


@pytest.mark.parametrize("shape", [(7, 0), (7, 3, 0), (0, 5), (0,)])
def test_nothing_adds_nothing(shape: tuple[int, ...]) -> None:
    d = shape[0]
    assert torch.equal(add_gram_(torch.ones(d, d), torch.zeros(shape)), torch.ones(d, d))


def test_small_columns_do_not_get_lost_beside_large_ones() -> None:
    """In float32 the sum of 1 and 1e-12 is 1: products are taken, and added up, in float64."""
    a = torch.tensor([[1.0, 1e-6], [1.0, 2e-6]])
    out = upper(add_gram_(torch.zeros(2, 2, dtype=torch.float64), a))
    assert descending(out).tolist() == pytest.approx([2.0, 5e-13], rel=1e-3)


def test_columns_are_left_as_they_are() -> None:
    a = drawn(7, 20, dtype=torch.float32)
    kept = a.clone()
    factor = Factor()
    factor.add(a)
    factor.close(3.0)
    factor.mean()
    assert torch.equal(a, kept)


@pytest.mark.parametrize("n", [3, 40])
def test_what_was_added_stays_when_its_tensor_is_written_to(n: int) -> None:
    """As by a loader that fills one buffer again and again."""
    factor, buffer = Factor(), drawn(10, n)
    expected = gram(buffer)
    factor.add(buffer)
    buffer.fill_(7.0)
    factor.close()
    buffer.fill_(8.0)
    same(upper(factor.matrix()), expected)


# Factors

Added = list[tuple[list[int], float]]  # for each batch, how many samples are added at a time, and their weight

STREAMS: dict[str, Added] = {
    "held": [([2, 3], 1.0)],
    "held to the last": [([9], 1.0)],
    "as many as dimensions": [([10], 1.0)],
    "matrix at once": [([40], 1.0)],
    "crosses within a batch": [([3, 4, 5, 6], 1.0)],
    "crosses with the last": [([3, 6, 1], 1.0)],
    "held over batches": [([2], 3.0), ([1, 2], 0.5), ([3], 1.0)],
    "crosses between batches": [([4], 3.0), ([20], 0.5), ([2], 7.0)],
    "crosses within a later batch": [([4], 3.0), ([2, 3, 5, 1], 0.5), ([1], 7.0)],
    "one at a time": [([1], float(w)) for w in range(1, 25)],
    "matrix and then few": [([30], 2.0), ([1], 5.0)],
    "a batch with nothing": [([3], 2.0), ([], 9.0), ([4], 0.25), ([], 9.0), ([10], 3.0)],
    "no columns": [([0], 2.0), ([3, 0], 3.0), ([12], 3.0)],
    "weights of very different size": [([4], 1e-8), ([8], 1.0), ([4], 1e8)],
}


def stream(added: Added, dtype: torch.dtype, device: str = "cpu", d: int = 10) -> tuple[Factor, Tensor]:
    """A factor over batches, and all its samples with their weights."""
    factor, columns, seed = Factor(), [torch.zeros(d, 0, dtype=torch.float64)], 0
    for counts, weight in added:
        for n in counts:
            seed += 1
            a = drawn(d, n, seed=seed, dtype=dtype)
            columns.append(a.double() * weight)
            factor.add(a.to(device))
        factor.close(weight)
    return factor, torch.cat(columns, 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", STREAMS)
def test_a_factor_is_the_mean_over_all_samples_however_they_come(case: str, dtype: torch.dtype, device: str) -> None:
    factor, columns = stream(STREAMS[case], dtype, device)
    n = columns.shape[1]
    expected = columns @ columns.T / n
    assert (factor.dimension, factor.samples, factor.pending, factor.eps) == (10, n, 0, torch.finfo(dtype).eps)
    # Samples are kept while they are fewer than their dimension.
    assert factor.holds_samples == (n < 10)
    mean = factor.mean()
    assert mean.dtype == torch.float64
    assert len(mean) == min(n, 10)
    values = torch.zeros(10, dtype=torch.float64)
    values[: len(mean)] = descending(mean.cpu())
    same(values, descending(expected))
    if n >= 10:
        same(mean, expected)
    same(upper(factor.matrix()), expected * n)
    same(factor.mean(), expected)


def test_asking_twice_gives_the_same_and_more_may_be_added_after() -> None:
    factor, columns = stream(STREAMS["held over batches"], torch.float64)
    assert torch.equal(factor.mean(), factor.mean())
    more = drawn(10, 15, seed=99)
    factor.add(more)
    assert factor.samples == 8
    factor.close(2.0)
    whole = torch.cat([columns, 2 * more], 1)
    same(factor.mean(), whole @ whole.T / 23)


@pytest.mark.parametrize("case", ["crosses between batches", "held over batches"])
def test_an_open_batch_that_is_dropped_leaves_no_trace(case: str) -> None:
    for n in (1, 3, 40):
        factor, columns = stream(STREAMS[case], torch.float64)
        factor.add(drawn(10, n, seed=77))
        factor.drop()
        factor.close(100.0)
        assert factor.samples == columns.shape[1]
        same(upper(factor.matrix()), columns @ columns.T)


def test_samples_that_are_held_and_a_sum_formed_elsewhere_go_together() -> None:
    a, b, c = drawn(10, 3), drawn(10, 40, seed=1), drawn(10, 2, seed=2)
    factor = Factor()
    factor.add(a)
    factor.add_gram(b @ b.T, samples=40, like=b.bfloat16())
    factor.add(c)
    factor.close(0.5)
    factor.add_gram(c @ c.T, samples=2, like=c)
    factor.close(3.0)
    whole = torch.cat([0.5 * a, 0.5 * b, 0.5 * c, 3 * c], 1)
    assert (factor.samples, factor.eps) == (47, torch.finfo(torch.bfloat16).eps)
    same(factor.mean(), whole @ whole.T / 47)


def test_images_that_are_held_are_samples_at_their_positions() -> None:
    images = drawn(2, 50, 3, 4).contiguous(memory_format=torch.channels_last)
    factor = Factor()
    factor.add(images.movedim(1, 0))
    factor.close()
    assert factor.holds_samples
    assert factor.samples == 24
    same(descending(factor.mean()), descending(gram(images.movedim(1, 0)) / 24)[:24])


def test_epsilon_is_that_of_the_coarsest_dtype() -> None:
    factor = Factor()
    seen = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        factor.add(drawn(3, 2, dtype=dtype))
        seen.append(factor.eps)
    expected = [torch.finfo(dtype).eps for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.bfloat16)]
    assert seen == expected


@pytest.mark.parametrize("device", DEVICES)
def test_one_hot_samples_are_counted(device: str) -> None:
    factor = Factor()
    batches = [torch.tensor([[3, 1], [3, 3]]), torch.tensor(0), torch.tensor([3, 4]), torch.zeros(0, dtype=torch.long)]
    for one in batches:
        factor.add_counts(one.to(device), 6)
        factor.close()
    assert (factor.samples, factor.dimension, factor.diagonal, factor.eps) == (7, 6, True, 0.0)
    assert factor.mean().tolist() == pytest.approx([1 / 7, 1 / 7, 0, 4 / 7, 1 / 7, 0], rel=1e-15)
    assert factor.matrix().tolist() == [1, 1, 0, 4, 1, 0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indices_of_either_width_are_counted(dtype: torch.dtype) -> None:
    factor = Factor()
    factor.add_counts(torch.tensor([2, 2, 0], dtype=dtype), 3)
    factor.close()
    assert factor.mean().tolist() == pytest.approx([1 / 3, 0, 2 / 3])


def test_what_takes_the_place_of_a_factor_is_what_it_says_after() -> None:
    factor, columns = stream(STREAMS["held over batches"], torch.float32)
    factor.replace_samples(columns[:, :5])
    assert (factor.samples, factor.holds_samples) == (5, True)
    same(factor.mean(), columns[:, :5].T @ columns[:, :5] / 5)
    factor.replace(columns @ columns.T, 12)
    assert (factor.samples, factor.holds_samples) == (12, False)
    same(factor.mean(), columns @ columns.T / 12)


def test_what_is_let_go_of_is_gone_but_the_counts_stay() -> None:
    factor, _ = stream(STREAMS["held"], torch.float32)
    factor.release()
    assert (factor.samples, factor.dimension, factor.holds_samples) == (5, 10, False)
