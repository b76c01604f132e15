import json
from dataclasses import replace
from math import isnan, nan
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyroscope_lab.errors import LabError
from gyroscope_lab.training.result import Result

TRIAL = {"task": {"name": "digits"}, "seed": 0}
RESULTS = Path(__file__).parents[3] / "results"


def numbers(least, most):
    return st.floats(least, most) | st.just(nan)


@st.composite
def results(draw):
    epochs, layers = draw(st.integers(0, 12)), draw(st.integers(0, 5))

    def rows(many, value):
        return draw(st.lists(st.lists(value, min_size=layers, max_size=layers), min_size=many, max_size=many))

    def each_epoch(value):
        return draw(st.lists(value, min_size=epochs, max_size=epochs))

    return Result(
        draw(st.floats(0, 1)), draw(st.floats(0, 1)), loss=each_epoch(numbers(0, 1e30)),
        layers=[f"layer {i}" for i in range(layers)], rotation=rows(epochs + 1, numbers(0, 2)),
        accuracy=each_epoch(numbers(0, 1)), validation=each_epoch(numbers(0, 1)), norms=rows(2, numbers(0, 1e9)),
        tested=epochs, ended=draw(st.none() | st.text()), seconds=draw(st.floats(0, 1e6)),
    )  # fmt: skip


def small_of(result):
    return Result.from_json(json.loads(json.dumps(result.as_json(small=True), allow_nan=False)))


def near(ours, theirs, **tolerance):
    if isinstance(theirs, list):
        return len(ours) == len(theirs) and all(near(a, b, **tolerance) for a, b in zip(ours, theirs, strict=True))
    return ours == pytest.approx(theirs, nan_ok=True, **tolerance)


def long_result(epochs=100, layers=25):
    course = [[1 - 0.5 ** (t * (layer + 1) / 500) for layer in range(layers)] for t in range(epochs + 1)]
    return Result(
        0.99917777, 0.8869, loss=[2.3 / (t + 1) for t in range(epochs)], layers=[f"conv{i}" for i in range(layers)],
        rotation=course, accuracy=[t / 45_000 for t in range(epochs)], norms=[[2.0126229] * layers] * 2, tested=epochs,
    )  # fmt: skip


@given(results())
def test_the_small_form_is_within_its_stated_resolution(result):
    small = small_of(result)
    half = 0.5 + 1e-9
    assert near(small.rotation[:-1], result.rotation[:-1], rel=0, abs=half * 1e-4)
    assert near(small.final_rotation, result.final_rotation, rel=0, abs=half * 1e-6)
    for name in ("train_accuracy", "test_accuracy", "accuracy", "validation"):
        assert near(getattr(small, name), getattr(result, name), rel=0, abs=half * 1e-6)
    for name in ("loss", "norms"):
        assert near(getattr(small, name), getattr(result, name), rel=half * 1e-4, abs=0)
    assert near(small.seconds, result.seconds, rel=1e-12, abs=half * 1e-3)
    assert (small.layers, small.tested, small.ended) == (result.layers, result.tested, result.ended)


@given(results())
def test_a_small_result_written_again_is_the_same_text(result):
    once = json.dumps(result.as_json(small=True))
    assert json.dumps(Result.from_json(json.loads(once)).as_json(small=True)) == once


@given(results())
def test_the_full_form_keeps_every_digit(result):
    again = Result.from_json(json.loads(json.dumps(result.as_json())))
    assert json.dumps(again.as_json()) == json.dumps(result.as_json())


def test_neighboring_counts_of_correct_examples_stay_distinct():
    counted = [right / 50_000 for right in range(50_001)]
    result = Result(1.0, 1.0, loss=[], layers=[], rotation=[[]], accuracy=counted)
    assert len(set(small_of(result).accuracy)) == len(counted)


def test_a_layer_without_a_direction_and_one_that_turns_are_both_kept():
    result = replace(long_result(layers=2), rotation=[[nan, t / 100] for t in range(101)])
    small = small_of(result)
    assert all(isnan(row[0]) for row in small.rotation)
    assert [row[1] for row in small.rotation] == [row[1] for row in result.rotation]


def test_a_training_of_100_epochs_and_25_layers_takes_less_than_8_kilobytes(tmp_path):
    long_result().write(tmp_path / "result.json", TRIAL, small=True)
    assert (tmp_path / "result.json").stat().st_size < 8_000


def test_final_numbers_can_be_read_in_the_small_file(tmp_path):
    long_result(layers=2).write(tmp_path / "result.json", TRIAL, small=True)
    text = (tmp_path / "result.json").read_text()
    assert '"test_accuracy": 0.8869,\n' in text
    assert '"last":[0.129449,0.242142]' in text
    assert json.loads(text)["trial"] == TRIAL


@settings(max_examples=300)
@given(st.data())
def test_damaged_packed_numbers_are_refused(data):
    values = long_result(epochs=20, layers=3).as_json(small=True)
    text = values["rotation"]["packed"]
    at = data.draw(st.integers(0, len(text) - 1))
    damaged = data.draw(
        st.sampled_from([text[:at], text[:at] + ("0" if text[at] != "0" else "1") + text[at + 1 :], text[:at] + '"'])
    )
    values["rotation"]["packed"] = damaged
    with pytest.raises(LabError, match="does not hold the result of a trial"):
        Result.from_json(values)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [20, 4]}, {"shape": [21]}, {"shape": None}, {"scale": 0}, {"scale": "10"}, {"scale": True},
        {"packed": None}, {"packed": 3}, {"last": None}, {"last": [0.1]}, {"last": ["a", "b", "c"]}, {"last": "abc"},
    ],
)  # fmt: skip
def test_packed_numbers_of_another_shape_are_refused(change):
    values = long_result(epochs=20, layers=3).as_json(small=True)
    values["rotation"] |= change
    with pytest.raises(LabError, match="does not hold the result of a trial"):
        Result.from_json(values)


def test_packed_numbers_without_a_part_are_refused():
    for part in ("shape", "scale", "packed", "last"):
        values = long_result(epochs=20, layers=3).as_json(small=True)
        del values["rotation"][part]
        with pytest.raises(LabError, match=part):
            Result.from_json(values)


def test_the_results_of_the_repository_take_less_than_20_mebibytes():
    sizes = {path: path.stat().st_size for path in RESULTS.rglob("*") if path.is_file()}
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:5]
    assert 0 < sum(sizes.values()) < 20 * 2**20, f"the largest are {largest}"
