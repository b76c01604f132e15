from math import isnan

import pytest

from gyroscope_lab.papers.summary import Summary, in_words, rank_correlation, summarise
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.result import Result


def summary(name, test, rotation, train=1.0):
    return Summary(Recipe(name, rate=0.1), train, test, None, [rotation, rotation])


def result(test, final):
    return Result(1.0, test, loss=[0.1], layers=["a", "b"], rotation=[[0.0, 0.0], final])


def test_the_rank_correlation_of_a_table_worked_by_hand():
    # Ranks 1 2 3 4 against 1 3 2 4: 1 − 6·(1 + 1)/(4·15).
    rows = [summary("a", t, r) for t, r in zip([0.1, 0.3, 0.2, 0.4], [0.1, 0.2, 0.3, 0.4], strict=True)]
    assert rank_correlation(rows) == pytest.approx(0.8)


def test_the_rank_correlation_of_a_constant_is_not_a_number():
    assert isnan(rank_correlation([summary("a", t, 0.5) for t in (0.1, 0.2, 0.3)]))


def test_a_summary_averages_over_seeds_and_keeps_layers_apart():
    got = summarise(Recipe("SGD", rate=0.1), [result(0.8, [0.1, 0.5]), result(0.9, [0.3, 0.7])])
    assert got.test_accuracy == pytest.approx(0.85)
    assert got.test_std == pytest.approx(0.05 * 2**0.5)
    assert got.final_rotation == pytest.approx([0.2, 0.6])
    assert got.mean_rotation == pytest.approx(0.4)
    assert got.test == "85.0 ± 7.1"


def test_one_seed_has_no_spread():
    got = summarise(Recipe("SGD", rate=0.1), [result(0.8, [0.1, 0.5])])
    assert (got.test_std, got.test) == (None, "80.0")


RISING, FALLING, MIXED = [0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1], [0.2, 0.4, 0.1, 0.3]


@pytest.mark.parametrize(
    ("rotations", "says"),
    [
        (RISING, "of +1.00: the further the layers rotated, the better the network generalised."),
        (FALLING, "of -1.00: the further the layers rotated, the worse the network generalised."),
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
