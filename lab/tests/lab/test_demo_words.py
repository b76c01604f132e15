from math import isnan

import pytest

from gyroscope_lab.papers import demo
from gyroscope_lab.papers.cells import Cell
from gyroscope_lab.papers.demo import in_words, rank_correlation
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.result import Result


def cell(name, *results):
    return Cell(demo.TASK, Recipe(name, rate=0.1), results)


def result(test, final, train=1.0):
    return Result(train, test, loss=[0.1], layers=["a", "b"], rotation=[[0.0, 0.0], final])


def summary(name, test, rotation, train=1.0):
    return cell(name, result(test, [rotation, rotation], train))


def test_the_rank_correlation_of_a_table_worked_by_hand():
    # Ranks 1 2 3 4 against 1 3 2 4: 1 − 6·(1 + 1)/(4·15).
    rows = [summary("a", t, r) for t, r in zip([0.1, 0.3, 0.2, 0.4], [0.1, 0.2, 0.3, 0.4], strict=True)]
    assert rank_correlation(rows) == pytest.approx(0.8)


def test_the_rank_correlation_of_a_constant_is_not_a_number():
    assert isnan(rank_correlation([summary("a", t, 0.5) for t in (0.1, 0.2, 0.3)]))


def test_a_cell_averages_over_seeds_and_keeps_layers_apart():
    got = cell("SGD", result(0.8, [0.1, 0.5]), result(0.9, [0.3, 0.7]))
    assert got.test == pytest.approx(85)
    assert got.spread == pytest.approx(5 * 2**0.5)
    assert got.final_rotation == pytest.approx([0.2, 0.6])
    assert got.mean_rotation == pytest.approx(0.4)
    assert demo.accuracy_text(got) == "85.0 ± 7.1"


def test_one_seed_has_no_spread():
    got = cell("SGD", result(0.8, [0.1, 0.5]))
    assert (got.spread, demo.accuracy_text(got)) == (None, "80.0")


@pytest.mark.parametrize(("train", "learned"), [(0.9, True), (0.899, False)])
def test_a_network_has_learned_from_a_training_accuracy_of_90_percent_on(train, learned):
    assert summary("SGD", 0.8, 0.1, train).learned is learned


RISING, FALLING, MIXED = [0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1], [0.2, 0.4, 0.1, 0.3]


@pytest.mark.parametrize(
    ("rotations", "says"),
    [
        (RISING, "of +1.00: the further the layers rotated, the better the network generalized."),
        (FALLING, "of -1.00: the further the layers rotated, the worse the network generalized."),
        (MIXED, "of +0.00: no clear relation between"),
        ([0.2] * 4, "cannot be ranked"),
    ],
)
def test_the_words_follow_the_numbers(rotations, says):
    tests = [0.6, 0.7, 0.8, 0.9]
    words = in_words([summary(f"r{i}", t, r) for i, (t, r) in enumerate(zip(tests, rotations, strict=True))])
    assert says in words
    assert f"from 60.0 % (r0, mean rotation {rotations[0]:.3f}) to 90.0 % (r3, " in words
    assert words.startswith("All 4 configurations learned their training digits.")


def test_the_words_name_those_that_did_not_learn():
    words = in_words([summary("slow", 0.3, 0.1, train=0.5), summary("fast", 0.9, 0.4)])
    assert words.startswith("Of 2 configurations, 1 did not learn the training digits: slow.")
