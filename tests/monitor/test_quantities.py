"""Quantities are pure functions of inner products: registered, tried, recorded, read back and forgotten."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from watched import inputs, mlp, train

import gyroscope
from gyroscope.errors import MonitorError
from gyroscope.monitor import quantities
from gyroscope.monitor.quantities import COLUMNS, DEFAULT, Products, angle, compute, find, forget, known, quantity


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    monkeypatch.setattr(quantities, "_registry", dict(quantities._registry))


def products(w, b, g, start=None, last=None, previous=None, **more) -> Products:
    """The inner products of vectors, as one step of one layer."""
    w, b, g = (np.array(x, dtype=float) for x in (w, b, g))
    start, last = (b if x is None else np.array(x, dtype=float) for x in (start, last))
    vectors = {"w": w, "b": b, "g": g, "u": w - b, "v": w - last, "e": w - start}
    vectors["p"] = np.zeros_like(w) if previous is None else np.array(previous, dtype=float)
    numbers = {name: np.array([[vectors[name[0]] @ vectors[name[1]]]]) for name in COLUMNS}
    base = {"exact": 1.0, "lr": 0.1, "eta": 0.1, "decay": 0.0, "steps": 1.0, "rr": float(start @ start), **more}
    return Products(**numbers, **{name: np.array([[value]]) for name, value in base.items()})


def value(name: str, d: Products) -> float:
    return float(compute(find([name]), d)[name][0, 0])


def test_quantities_of_vectors_that_a_hand_can_work_out():
    d = products(w=[3, 4], b=[5, 0], g=[1, 1], start=[0, 5], last=[4, 3], previous=[1, -1], steps=2.0)
    assert value("weight_norm", d) == pytest.approx(5)
    assert value("weight_norm_before", d) == pytest.approx(5)
    assert value("gradient_norm", d) == pytest.approx(2**0.5)
    assert value("update_norm", d) == pytest.approx(20**0.5)
    assert value("update_ratio", d) == pytest.approx(20**0.5 / 5)
    assert value("rotation", d) == pytest.approx(1 - 0.8)
    assert value("rate", d) == pytest.approx(np.arccos(24 / 25))
    assert value("rate_per_step", d) == pytest.approx(np.arccos(24 / 25) / 2)
    assert value("alignment", d) == pytest.approx(-1)
    assert value("invariance", d) == pytest.approx(0.5**0.5)
    assert value("effective_lr", d) == pytest.approx(0.1 / 25)
    assert value("effective_lr_measured", d) == pytest.approx(np.arccos(0.6) / 5)


@pytest.mark.parametrize("turn", [1e-12, 1e-8, 1e-4, 0.1, 1.0, 1.5, 3.0, np.pi])
def test_small_and_large_turns_keep_their_digits(turn):
    d = products(w=[np.cos(turn), np.sin(turn)], b=[1, 0], g=[0, 1])
    assert value("rate", d) == pytest.approx(turn, rel=1e-6)
    assert value("rotation", d) == pytest.approx(2 * np.sin(turn / 2) ** 2, rel=1e-6)


@pytest.mark.parametrize("turn", [1e-3, 1.0, 2.0])
@pytest.mark.parametrize("length", [1e-30, 1e-16, 1e-8, 1e-3, 0.4, 3.0, 1e4])
def test_rotation_keeps_its_digits_however_short_or_long_the_weights_have_become(turn, length):
    d = products(w=[length * np.cos(turn), length * np.sin(turn)], b=[1, 0], g=[0, 1])
    assert value("rotation", d) == pytest.approx(2 * np.sin(turn / 2) ** 2, rel=1e-6, abs=1e-11)


@pytest.mark.parametrize("length", [1e11, 1e16, 1e20])
def test_nothing_is_said_of_weights_whose_digits_are_lost_beside_those_they_have_become(length):
    d = products(w=[length * 0.6, length * 0.8], b=[1, 0], g=[0, 1])
    for name in ("rotation", "rate", "rate_per_step", "invariance", "effective_lr_measured"):
        assert np.isnan(value(name, d)), name
    assert value("update_norm", d) == pytest.approx(length)
    assert value("update_ratio", d) == pytest.approx(length)


@pytest.mark.parametrize(
    ("longer", "turn"), [(1e2, 1e-3), (1e3, 1e-3), (1e4, 1e-2), (1e3, 1e-6), (1e4, 1e-5), (1e5, 1e-4)]
)
def test_an_angle_is_right_or_not_known_however_much_longer_the_weights_become(longer, turn):
    random = np.random.default_rng(0)
    b, other = random.normal(size=(2, 1000))
    w = longer * (b + turn * np.linalg.norm(b) * (other - (other @ b) / (b @ b) * b) / np.linalg.norm(other))
    d = w - b
    found = angle(*(np.array([one]) for one in (w @ w, w @ d, d @ d)))[0]
    assert np.isnan(found) if longer * 1e-8 > turn else found == pytest.approx(turn, rel=0.1)


@pytest.mark.parametrize("longer", [0.5, 1.0, 1 + 1e-4, 2.0, 8.0])
def test_weights_that_are_only_scaled_have_not_turned(longer):
    b = np.random.default_rng(0).normal(size=1000)
    w = longer * b
    d = w - b
    assert angle(*(np.array([one]) for one in (w @ w, w @ d, d @ d)))[0] == pytest.approx(0, abs=1e-6)


def test_a_gradient_along_the_weights_measures_no_effective_learning_rate():
    w, turn = np.random.default_rng(0).standard_normal((2, 1000))
    assert np.isnan(value("effective_lr_measured", products(w=w + 0.1 * turn, b=w, g=0.3 * w)))
    assert value("effective_lr_measured", products(w=w + 0.1 * turn, b=w, g=0.3 * w + 0.01 * turn)) > 0


def test_what_is_not_there_is_nan_and_never_a_warning():
    zeros = Products.zeros((2, 3))
    for name, values in compute(find(), zeros).items():
        assert values.shape == (2, 3), name
    for name in set(DEFAULT) - {
        "weight_norm",
        "weight_norm_before",
        "gradient_norm",
        "update_norm",
        "lr",
        "weight_decay",
    }:
        assert np.isnan(compute(find([name]), zeros)[name]).all(), name
    nan = zeros.with_(**{name: np.full((2, 3), np.nan) for name in COLUMNS})
    assert all(np.isnan(v).all() for name, v in compute(find(), nan).items() if name not in ("lr", "weight_decay"))


def test_angle_refuses_neither_zero_nor_opposite_vectors():
    assert np.isnan(angle(np.array([0.0]), np.array([0.0]), np.array([1.0]))).all()
    assert angle(np.array([1.0]), np.array([2.0]), np.array([4.0])) == pytest.approx(np.pi)


def test_a_quantity_is_registered_recorded_read_back_and_forgotten(tmp_path):
    @quantity("my_share", "1", "share of the update that changes the norm")
    def my_share(d):
        return d.wu**2 / (d.ww * d.uu)

    assert known()["my_share"].meaning == "share of the update that changes the norm"
    assert find(["my_share"])[0].needs == {"wu", "ww", "uu"}
    assert "my_share" not in [one.info.name for one in find()]
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gyroscope.watch(model, optimizer, tmp_path / "run", quantities=["my_share", "weight_norm"]) as monitor:
        before = [p.detach().double().clone() for p in model.parameters() if p.dim() > 1]
        train(model, optimizer, inputs(1))
    expected = []
    for b, p in zip(before, [p for p in model.parameters() if p.dim() > 1], strict=True):
        w = p.detach().double()
        expected.append(float(((w * (w - b)).sum() / (w.norm() * (w - b).norm())) ** 2))
    with gyroscope.load(monitor.path) as run:
        weight_side = set(run.quantities) & {*DEFAULT, "my_share"}
        assert weight_side == {"my_share", "weight_norm"}
        assert run.quantities["my_share"].unit == "1"
        np.testing.assert_allclose(run.series("my_share")[1], expected, rtol=1e-5)
    forget("my_share")
    assert "my_share" not in known()
    with pytest.raises(MonitorError, match=r"`name` must be one of .*, got 'my_share'"):
        forget("my_share")


@pytest.mark.parametrize("name", [[], 5, None])
def test_what_is_no_name_cannot_be_forgotten(name):
    with pytest.raises(MonitorError, match=f"`name` must be one of .*, got {re.escape(repr(name))}"):
        forget(name)


def test_our_own_quantities_are_not_forgotten(tmp_path):
    with pytest.raises(MonitorError, match="got 'rotation', which is built in"):
        forget("rotation")
    assert "rotation" in known()


@pytest.mark.parametrize(("unit", "meaning"), [(3, "words"), ("1", 3), ("", "words"), ("1", ""), ("1", None)])
def test_a_quantity_needs_a_unit_and_a_meaning_in_words(unit, meaning):
    with pytest.raises(MonitorError, match="must be one line of text"):
        quantity("mine", unit, meaning)


def test_products_that_no_quantity_needs_are_found_out():
    assert find(["alignment"])[0].needs >= {"vp", "pp"}
    assert not find(["rotation"])[0].needs & {"vp", "pp", "uu", "vv"}
    assert find(["invariance"])[0].needs == {"ww", "bb", "wg", "gu", "gg"}


def test_displacements_are_not_kept_where_nothing_needs_them(tmp_path):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with (
        gyroscope.watch(model, optimizer, tmp_path / "few", quantities=["rotation", "rate"]) as few,
        gyroscope.watch(model, optimizer, tmp_path / "all") as everything,
    ):
        assert few.bytes < everything.bytes


NAMES = ["", "two words", "1st", "semi;colon", "rotation", 3, None, "dash-ed", "a\n"]


@pytest.mark.parametrize("name", NAMES)
def test_names_that_are_taken_or_no_names_are_refused(name):
    with pytest.raises(MonitorError):
        quantity(name, "1", "meaning")


@pytest.mark.parametrize(("unit", "meaning"), [("", "meaning"), ("1", ""), ("1", "two\nlines"), (None, "meaning")])
def test_a_unit_and_a_meaning_of_one_line_are_needed(unit, meaning):
    with pytest.raises(MonitorError, match="must be one line of text"):
        quantity("mine", unit, meaning)


FUNCTIONS = {
    "a sum over layers": lambda d: d.ww.sum(),
    "one number a step": lambda d: d.ww.sum(1),
    "no such product": lambda d: d.xx,
    "an error": lambda d: 1 / 0,
    "words": lambda d: np.full(d.ww.shape, "words"),
    "nothing": lambda d: None,
    "complex numbers": lambda d: d.ww * 1j,
    "too many arguments": lambda d, e: d.ww,
    "no function": 3,
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_functions_that_do_not_give_one_number_a_layer_are_refused(function):
    with pytest.raises(MonitorError, match="'mine'"):
        quantity("mine", "1", "meaning")(function)
    assert "mine" not in known()
