"""The monitor's kernel against literal sums; run by test_kernel_interpreted, in Triton's interpreter.

On a machine with a GPU the same claims are checked on it: `make gpu`.
"""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import gyroscope
from gyroscope.monitor import bundle
from gyroscope.monitor.bundle import Bundle, Layout, Remembered, Staged, flat
from gyroscope.monitor.kernel import Kernel
from gyroscope.monitor.quantities import COLUMNS
from gyroscope.vectors.launch import CHUNK
from interpreted import hasten_interpreter

hasten_interpreter()
DEVICE = torch.device(os.environ.get("GYROSCOPE_TEST_DEVICE", "cpu"))
# The interpreter computes with numpy, which warns where a GPU quietly gives inf or nan.
pytestmark = [pytest.mark.any_device, pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")]
# It also cuts to bfloat16 where a GPU rounds: a loss of a unit in the last place instead of half of one.
BFLOAT16 = 2.0**-8 if DEVICE.type == "cuda" else 2.0**-7
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
PRESENT = {
    "nothing": (False, False, False, False),
    "before": (True, False, False, False),
    "anchor": (False, True, False, False),
    "before and anchor": (True, True, False, False),
    "before, first displacement": (True, False, True, False),
    "before, displacement": (True, False, True, True),
    "anchor, displacement": (False, True, True, True),
    "before, anchor, displacement": (True, True, True, True),
    "displacement alone": (False, False, True, True),
}
SHAPES = ((5, 7), (4, 3, 2, 2), (600,))


def randoms(shapes, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


def buffer(layout, seed, dtype=torch.float32):
    """Anything, in the gaps too: they must not be read."""
    return randoms([(layout.total,)], seed, dtype)[0]


def remembered(layout, present, dtype=torch.float32, reference=None, previous=None):
    before, anchor, keeps, moved = PRESENT[present]
    return Remembered(
        buffer(layout, 1, reference or dtype),
        buffer(layout, 2, dtype) if before else None,
        buffer(layout, 3, dtype) if anchor else None,
        buffer(layout, 4, previous or dtype) if keeps else None,
        moved,
    )


def literal(weights, gradients, layout, given):
    """The table of inner products, layer by layer and vector by vector; and the displacements."""
    rows, moves = [], []
    for i, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
        part = slice(layout.offsets[i], layout.offsets[i] + layout.sizes[i])
        w, g = (x.detach().double().cpu().reshape(-1) for x in (weight, gradient))
        order = torch.arange(w.numel()).reshape(weight.shape).to(DEVICE)
        order = flat(torch.empty_like(weight, dtype=torch.int64).copy_(order)).cpu()  # places in memory

        def at(held, part=part, order=order):
            values = torch.empty(len(order), dtype=torch.float64)
            values[order] = held[part].double().cpu()
            return values

        vectors = {"w": w, "g": g, "e": w - at(given.reference)}
        if given.before is not None:
            vectors["b"] = at(given.before)
            vectors["u"] = vectors["v"] = w - vectors["b"]
        if given.anchor is not None:
            vectors["v"] = w - at(given.anchor)
        if "v" in vectors and given.moved and given.previous is not None:
            vectors["p"] = at(given.previous)
        rows.append([float(vectors[a] @ vectors[b]) if a in vectors and b in vectors else 0.0 for a, b in COLUMNS])
        moves.append(vectors["v"][order] if "v" in vectors else None)
    return np.array(rows).reshape(len(rows), len(COLUMNS)), moves


def copied(given):
    return replace(given, previous=None if given.previous is None else given.previous.clone())


def assert_literal(weights, gradients, given, kernel=None, layout=None):
    layout = layout or Layout.of([w.numel() for w in weights])
    kernel = kernel or Kernel(layout, DEVICE)
    expected, moves = literal(weights, gradients, layout, given)
    gaps = None if given.previous is None else given.previous.clone()
    found = kernel.products(weights, gradients, given)
    assert found.dtype == torch.float64
    sizes = np.abs(expected).max(axis=1, keepdims=True) + 1e-300
    np.testing.assert_allclose(found.cpu().numpy() / sizes, expected / sizes, rtol=0, atol=1e-13)
    if given.previous is not None:
        kept = given.previous
        for i, move in enumerate(moves):
            part = slice(layout.offsets[i], layout.offsets[i] + layout.sizes[i])
            want = gaps[part].double().cpu() if move is None else move
            loss = {torch.float64: 0, torch.float32: 2.0**-24, torch.float16: 2.0**-11}.get(kept.dtype, BFLOAT16)
            slack = 2.0**-24 if kept.dtype == torch.float16 else 0
            assert bool(((kept[part].double().cpu() - want).abs() <= loss * want.abs() * 1.01 + slack).all())
            gaps[part] = kept[part]
        assert torch.equal(gaps, kept), "what lies between layers was written to"
    return found


@pytest.mark.parametrize("present", PRESENT)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_the_literal_sums(present, dtype):
    weights, gradients = randoms(SHAPES, 5, dtype), randoms(SHAPES, 6, dtype)
    assert_literal(weights, gradients, remembered(Layout.of([w.numel() for w in weights]), present, dtype))


@pytest.mark.parametrize("present", PRESENT)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_those_of_torch_operations_in_float64(present, dtype, monkeypatch):
    monkeypatch.setattr(bundle, "_staging_dtype", lambda *_: torch.float64)
    weights, gradients = randoms(SHAPES, 5, dtype), randoms(SHAPES, 6, dtype)
    layout = Layout.of([w.numel() for w in weights])
    kernel, plain = Kernel(layout, DEVICE), Staged(layout, DEVICE, dtype)
    given = remembered(layout, present, dtype)
    for buffers in (given.reference, given.before, given.anchor, given.previous):
        if buffers is not None:  # torch operations add gaps up, and so keep them at zero
            kept = torch.zeros_like(buffers)
            for a, b in zip(layout.views(kept), layout.views(buffers), strict=True):
                a.copy_(b)
            buffers.copy_(kept)
    if given.moved:  # the square of the last displacement is remembered with it
        plain._square = torch.stack([v.double().square().sum() for v in layout.views(given.previous)])
    other = copied(given)
    one, two = kernel.products(weights, gradients, given), plain.products(weights, gradients, other)
    # Without weights before the step there is no update, and nobody looks at its columns.
    known = [given.before is not None or "u" not in name for name in COLUMNS]
    np.testing.assert_allclose(one.cpu()[:, known], two.cpu()[:, known], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("other", DTYPES)
def test_gradients_of_another_type(dtype, other):
    weights, gradients = randoms(SHAPES, 5, dtype), randoms(SHAPES, 6, other)
    assert_literal(weights, gradients, remembered(Layout.of([w.numel() for w in weights]), "before", dtype))


def test_gradients_of_several_types():
    weights = randoms(SHAPES, 5)
    gradients = [g.to(DTYPES[2:][i % 2]) if i else g for i, g in enumerate(randoms(SHAPES, 6))]
    assert_literal(weights, gradients, remembered(Layout.of([w.numel() for w in weights]), "before"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16, torch.float64])
def test_a_reference_and_displacements_of_another_type(dtype, held):
    weights, gradients = randoms(SHAPES, 5, dtype), randoms(SHAPES, 6, dtype)
    layout = Layout.of([w.numel() for w in weights])
    given = remembered(layout, "before, anchor, displacement", dtype, reference=held, previous=held)
    assert_literal(weights, gradients, given)


def laid_out(tensors, form):
    return [t.to(memory_format=form) if t.dim() == 4 else t for t in tensors]


@pytest.mark.parametrize("weight_form", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("gradient_form", [torch.contiguous_format, torch.channels_last])
def test_layouts_of_weights_and_gradients(weight_form, gradient_form):
    shapes = ((4, 3, 2, 2), (6, 5), (7, 3, 3, 3))
    weights, gradients = laid_out(randoms(shapes, 5), weight_form), laid_out(randoms(shapes, 6), gradient_form)
    layout = Layout.of([w.numel() for w in weights])
    assert_literal(weights, gradients, remembered(layout, "before, anchor, displacement"))
    target = Kernel(layout, DEVICE).copy(weights)
    for part, w in zip(layout.views(target), weights, strict=True):
        assert torch.equal(part, flat(w))


def test_transposed_weights_and_gradients_that_are_not():
    weights, gradients = [w.T for w in randoms(((6, 5), (4, 9)), 5)], randoms(((5, 6), (9, 4)), 6)
    assert not weights[0].is_contiguous()
    assert_literal(weights, gradients, remembered(Layout.of([30, 36]), "before, displacement"))


@pytest.mark.parametrize("shapes", [((0,), (3, 4), (0, 5)), ((0, 3),), ((7,), (0,))])
@pytest.mark.parametrize("present", ["before", "before, anchor, displacement"])
def test_empty_layers_have_products_of_zero(shapes, present):
    weights, gradients = randoms(shapes, 5), randoms(shapes, 6)
    layout = Layout.of([w.numel() for w in weights])
    found = assert_literal(weights, gradients, remembered(layout, present))
    assert all(not found[i].any() for i, w in enumerate(weights) if not w.numel())


@pytest.mark.parametrize("n", [CHUNK - 1, CHUNK, 2 * CHUNK + 517])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_longer_than_a_chunk(n, dtype):
    weights, gradients = randoms(((7,), (n,), (3,)), 5, dtype), randoms(((7,), (n,), (3,)), 6, dtype)
    given = remembered(Layout.of([7, n, 3]), "before, anchor, displacement", dtype)
    assert_literal(weights, gradients, given)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [1, 5])
def test_views_at_odd_offsets(dtype, offset):
    pools = randoms(((20_000,), (20_000,)), 5, dtype)
    spans = [(offset, (9, 7)), (101 + offset, (CHUNK + 3,)), (10_000 + offset, (2, 3))]
    weights, gradients = ([p[at : at + int(np.prod(s))].view(s) for at, s in spans] for p in pools)
    assert any(w.data_ptr() % 16 for w in weights)
    layout = Layout.of([w.numel() for w in weights])
    assert_literal(weights, gradients, remembered(layout, "before, displacement", dtype))
    target = Kernel(layout, DEVICE).copy(weights)
    assert all(torch.equal(part, w.flatten()) for part, w in zip(layout.views(target), weights, strict=True))


def test_aligned_weights_and_gradients_that_are_not_and_back():
    weights = randoms(((64,), (40,)), 5)
    pool = randoms(((200,),), 6)[0]
    layout = Layout.of([64, 40])
    kernel = Kernel(layout, DEVICE)
    for at in (0, 1, 0, 3):
        gradients = [pool[at : at + 64], pool[100 + at : 140 + at]]
        assert_literal(weights, gradients, remembered(layout, "before"), kernel, layout)


def test_many_small_layers():
    shapes = [(1 + i % 13, 1 + i % 3) for i in range(200 if DEVICE.type == "cuda" else 50)]
    weights, gradients = randoms(shapes, 5), randoms(shapes, 6)
    layout = Layout.of([w.numel() for w in weights])
    assert_literal(weights, gradients, remembered(layout, "before, anchor, displacement"))


def test_gradients_that_move_are_found_and_few_tables_are_kept():
    weights = randoms(SHAPES, 5)
    layout = Layout.of([w.numel() for w in weights])
    kernel = Kernel(layout, DEVICE)
    places = [randoms(SHAPES, 10 + i) for i in range(10)]
    kernel._addresses.kept.most = 8
    for i in (*range(10), 3, 3, 0):
        assert_literal(weights, places[i], remembered(layout, "before"), kernel, layout)
        assert len(kernel._addresses.kept) <= 8
    for g in places[0]:
        g.mul_(3)  # the same places, other numbers
    assert_literal(weights, places[0], remembered(layout, "before"), kernel, layout)


def test_a_copy_stays_as_it_is():
    weights = randoms(SHAPES, 5)
    layout = Layout.of([w.numel() for w in weights])
    kernel = Kernel(layout, DEVICE)
    first = kernel.copy(weights, lasting=True)
    kept = [v.clone() for v in layout.views(first)]
    for w in weights:
        w.add_(1)
    kernel.copy(weights)
    assert all(torch.equal(a, b) for a, b in zip(layout.views(first), kept, strict=True))


def test_infinite_gradients_spoil_their_own_columns_alone():
    weights, gradients = randoms(SHAPES, 5), randoms(SHAPES, 6)
    gradients[1].view(-1)[0] = torch.inf
    layout = Layout.of([w.numel() for w in weights])
    found = Kernel(layout, DEVICE).products(weights, gradients, remembered(layout, "before")).cpu()
    with_gradient = torch.tensor(["g" in name for name in COLUMNS])
    assert found[[0, 2]].isfinite().all()
    assert found[1, ~with_gradient].isfinite().all()
    assert not found[1, COLUMNS.index("gg")].isfinite()


def test_a_bundle_takes_the_kernel():
    assert isinstance(Bundle([0], randoms(((3,),), 5), torch.float32)._passes, Kernel)


class Net(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 5, 3)
        self.head = nn.Linear(5, 3)
        self.to(DEVICE, dtype)

    def forward(self, x):
        return self.head(self.conv(x).tanh().mean(dim=(2, 3)))


def watched(backend, folder, monkeypatch, dtype, form, every, **options):
    monkeypatch.setenv("GYROSCOPE_BACKEND", backend)
    model = Net(dtype).to(memory_format=form)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with gyroscope.watch(model, optimizer, folder / backend, every, budget=None, **options) as monitor:
        kinds = {type(b._passes) for track in monitor._tracks for b in track.reference.bundles}
        assert kinds == {Kernel if backend == "triton" else Staged}
        for step in range(7):
            x = torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(step)).to(DEVICE, dtype)
            optimizer.zero_grad()
            (model(x) - 1).square().mean().backward()
            optimizer.step()
        assert monitor.error is None
    return gyroscope.load(folder / backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("every", [1, 3])
def test_a_run_is_that_of_torch_operations(dtype, form, every, tmp_path, monkeypatch):
    one, other = (watched(b, tmp_path, monkeypatch, dtype, form, every) for b in ("triton", "eager"))
    assert one.steps.tolist() == other.steps.tolist()
    assert set(one.quantities) == set(other.quantities)
    for name in other.quantities:
        # Displacements are kept as the weights are, which the interpreter cuts where torch rounds.
        loose = name == "alignment" and dtype == torch.bfloat16
        np.testing.assert_allclose(
            one.series(name), other.series(name), rtol=5e-6, atol=1e-2 if loose else 1e-6, err_msg=name
        )


def test_a_run_against_a_rounded_reference_is_that_of_torch_operations(tmp_path, monkeypatch):
    form = torch.contiguous_format
    options = {"reference_dtype": "bfloat16"}
    one, other = (watched(b, tmp_path, monkeypatch, torch.float32, form, 2, **options) for b in ("triton", "eager"))
    np.testing.assert_allclose(one.series("rotation"), other.series("rotation"), rtol=1e-5, atol=2e-7)


def test_a_run_with_frozen_zero_and_sampled_layers_is_that_of_torch_operations(tmp_path, monkeypatch):
    monkeypatch.setattr("gyroscope.monitor.reference._FEWEST", 512)
    runs = []
    for name in ("triton", "eager"):
        monkeypatch.setenv("GYROSCOPE_BACKEND", name)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3)).to(DEVICE)
        model[0].requires_grad_(False)
        nn.init.zeros_(model[4].weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        limit = 512 * 4 + 512 * 8  # the last layer, and a sample of 512 elements with their positions
        with gyroscope.watch(model, optimizer, tmp_path / name, 1, budget=None, reference_memory=limit) as monitor:
            assert monitor.cost().sampled_share == 512 / 1600
            for step in range(6):
                x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).to(DEVICE)
                optimizer.zero_grad()
                (model(x) - 1).square().mean().backward()
                optimizer.step()
            assert monitor.error is None
        runs.append(gyroscope.load(tmp_path / name))
    one, other = runs
    assert np.isnan(one.series("rotation")[:, 0]).all()
    assert np.isfinite(one.series("rotation")[2:, 1:]).all()
    for name in other.quantities:
        np.testing.assert_allclose(one.series(name), other.series(name), rtol=2e-5, atol=1e-6, err_msg=name)
