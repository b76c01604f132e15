"""Frames decode to the values of the run: exactly, or to within half a code."""

import math
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gyroscope.errors import StoreError
from gyroscope.page.frames import edges_of, frame
from gyroscope.store import load
from oracles.page import bins_of, decode
from page.made import written

TINY = 2.0**-149  # the smallest float32: means are rounded to it
QUANTITIES = ("rotation", "gradient_norm", "alignment", "of_my_own")


def known(steps, values):
    """The steps at which any layer has a value, and these values."""
    rows = [(step, row) for step, row in zip(steps, values, strict=True) if not all(map(math.isnan, row))]
    return [step for step, _ in rows], [row for _, row in rows]


def same(a, b, **tolerance):
    return (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, **tolerance)


def check(packed, steps, values, bins):
    """Compare a frame with the literal bins of what was written."""
    header, found = decode(packed)
    wanted = bins_of(*known(steps, values), bins)
    assert header["layers"] == len(values[0])
    assert header["exact"] == (bins is None or len(known(steps, values)[0]) <= bins)
    assert len(found) == header["layers"]
    wanted = wanted or [[] for _ in found]
    assert [len(cells) for cells in found] == [len(cells) for cells in wanted] == [header["bins"]] * len(found)
    clipped = 0
    for cell, true in zip((c for cells in found for c in cells), (c for cells in wanted for c in cells), strict=True):
        assert (cell["first"], cell["last"]) == (true["first"], true["last"])
        largest = max(abs(true["min"]), abs(true["max"])) if math.isfinite(true["mean"]) else 0.0
        clipped += header["scale"] == "log" and true["min"] <= 0
        for name in ("mean", "min", "max"):
            value, told = true[name], cell[name]
            if math.isnan(value):
                assert math.isnan(told)
            elif header["encoding"] == "float32":
                exactly = name != "mean" or header["exact"]
                assert told == value if exactly else same(told, value, rel_tol=1e-6, abs_tol=1e-12 * largest + TINY)
            elif header["scale"] == "linear":
                half = (header["high"] - header["low"]) / 4094 / 2
                assert abs(told - value) <= half * (1 + 1e-9) + (1e-6 * largest + TINY) * (name == "mean")
            elif value <= 0:
                assert told == header["low"]
            else:
                half = math.log(header["high"] / header["low"]) / 4094 / 2
                assert abs(math.log(told / value)) <= half * (1 + 1e-9) + 1e-6 + TINY / value
    if header["encoding"] == "codes":
        assert header["clipped"] == clipped
    return header


numbers = st.one_of(
    st.floats(width=32, allow_nan=True, allow_infinity=True),
    st.floats(np.float32(1e-6), 10, width=32),
    st.sampled_from([0.0, -0.0, 1.0, math.nan, math.inf, -math.inf]),
)


@st.composite
def tables(draw):
    count = draw(st.integers(1, 30))
    layers = draw(st.integers(1, 4))
    steps = sorted(draw(st.sets(st.integers(0, 10**6), min_size=count, max_size=count)))
    kind = draw(st.sampled_from(["any", "positive", "constant"]))
    elements = {
        "any": numbers,
        "positive": st.floats(np.float32(1e-20), np.float32(1e20), width=32),
        "constant": st.just(draw(numbers)),
    }[kind]
    return steps, draw(arrays(np.float32, (count, layers), elements=elements))


@settings(max_examples=100, deadline=None)
@given(tables(), st.sampled_from(QUANTITIES), st.one_of(st.none(), st.integers(1, 12)), st.sampled_from([0, 10**9]))
def test_a_frame_decodes_to_the_bins_of_the_run(tmp_path_factory, table, quantity, bins, limit):
    steps, values = table
    folder = tmp_path_factory.mktemp("run")
    with written(folder / "run", {quantity: values}, steps=steps) as run:
        header = check(frame(run, quantity, bins=bins, limit=limit), steps, values.tolist(), bins)
    assert header["quantity"] == quantity
    assert header["encoding"] == ("codes" if limit == 0 and header["bins"] else "float32")
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    """A run of 5 layers and 40 steps that are not equally far apart, over several decades."""
    draw = np.random.default_rng(0)
    steps = np.cumsum(draw.integers(1, 9, 40))
    values = np.exp(3 * draw.standard_normal((40, 5))).astype(np.float32)
    values[7, 2] = values[30:33, 4] = np.nan
    return written(tmp_path_factory.mktemp("noisy") / "run", {"gradient_norm": values}, steps=steps), steps, values


@pytest.mark.parametrize("piece", [1, 20, 10**6])
@pytest.mark.parametrize("bins", [1, 7, 39, 40, None])
def test_what_is_read_and_encoded_in_pieces_is_the_same(noisy, monkeypatch, piece, bins):
    run, steps, values = noisy
    monkeypatch.setattr("gyroscope.page.frames._PIECE", piece)
    check(frame(run, "gradient_norm", bins=bins, limit=0), steps.tolist(), values.tolist(), bins)


@pytest.mark.parametrize(("first", "last"), [(None, 60), (60, None), (30, 90), (29, 29)])
def test_a_window_holds_the_steps_within_it(noisy, first, last):
    run, steps, values = noisy
    inside = (steps >= (first or 0)) & (steps <= (last or 10**9))
    there = steps[inside].tolist()
    packed = frame(run, "gradient_norm", bins=4, first=first, last=last)
    header = check(packed, there, values[inside].tolist(), 4)
    assert (header["from"], header["to"], header["bins"]) == (there[0], there[-1], min(len(there), 4))


def test_a_window_without_steps_is_empty(noisy):
    header, cells = decode(frame(noisy[0], "gradient_norm", first=10**6))
    assert (header["bins"], header["from"], header["to"], cells) == (0, None, None, [[]] * 5)


def test_a_resumed_run_shows_what_counts(tmp_path):
    first, second = np.arange(12.0).reshape(6, 2), 100 + np.arange(8.0).reshape(4, 2)
    written(tmp_path / "run", {"rotation": first}).close()
    written(tmp_path / "run", {"rotation": second}, steps=[4, 5, 9, 10], step=3).close()
    with load(tmp_path / "run") as run:
        shown = np.concatenate([first[:4], second]).tolist()
        check(frame(run, "rotation"), [0, 1, 2, 3, 4, 5, 9, 10], shown, None)
        check(frame(run, "rotation", bins=3), [0, 1, 2, 3, 4, 5, 9, 10], shown, 3)


@pytest.mark.parametrize("limit", [0, 10**6])
@pytest.mark.parametrize("value", [0.0, -1.5, 2.0, 3e38, 1e-45])
def test_a_constant_is_itself(tmp_path, value, limit):
    with written(tmp_path / "run", {"gradient_norm": np.full((9, 2), value)}) as run:
        _, cells = decode(frame(run, "gradient_norm", bins=4, limit=limit))
    assert {cell[name] for of in cells for cell in of for name in ("mean", "min", "max")} == {float(np.float32(value))}


def test_one_layer_at_one_step_is_a_frame(tmp_path):
    with written(tmp_path / "run", {"rotation": [[0.25]]}, steps=[7]) as run:
        header, cells = decode(frame(run, "rotation"))
    assert cells == [[{"first": 7, "last": 7, "mean": 0.25, "min": 0.25, "max": 0.25}]]
    assert header == {
        "quantity": "rotation", "layers": 1, "bins": 1, "exact": True, "encoding": "float32", "scale": "linear",
        "low": None, "high": None, "clipped": 0, "from": 7, "to": 7,
    }  # fmt: skip


def test_what_was_never_known_is_a_frame_without_bins(tmp_path):
    with written(tmp_path / "run", {"rotation": np.full((3, 2), np.nan)}) as run:
        header, cells = decode(frame(run, "rotation", limit=0))
    assert (header["bins"], header["exact"], cells) == (0, True, [[], []])


def test_zeros_are_clipped_on_a_logarithmic_scale_and_counted(tmp_path):
    values = np.geomspace(1e-6, 1, 20)[:, None] * np.ones((1, 3))
    values[3], values[4, 1], values[11, 2] = 0, -1, 0
    with written(tmp_path / "run", {"gradient_norm": values}) as run:
        header = check(frame(run, "gradient_norm", bins=10, limit=0), list(range(20)), values.tolist(), 10)
    assert (header["scale"], header["clipped"]) == ("log", 5)


def test_a_frame_is_the_same_whenever_it_is_made(noisy):
    run, _, _ = noisy
    assert frame(run, "gradient_norm") == frame(run, "gradient_norm")


def test_smooth_series_become_small(tmp_path):
    time, depth = np.linspace(0, 1, 4000)[:, None], np.linspace(0.2, 1, 50)[None]
    with written(tmp_path / "run", {"rotation": depth * time}) as run:
        assert len(frame(run, "rotation")) < 50 * 512  # a byte per bin and layer, of the 12 that three numbers take


def test_bins_differ_by_one_step_at_most():
    for count in (1, 5, 511, 512, 513, 10_000):
        sizes = np.diff(edges_of(count, 512))
        assert sizes.sum() == count
        assert sizes.max() - sizes.min() <= 1
        assert len(sizes) == min(count, 512)


def test_a_quantity_that_there_is_not_is_named(noisy):
    run, _, _ = noisy
    with pytest.raises(StoreError, match="has no series 'rotaton'"):
        frame(run, "rotaton")
