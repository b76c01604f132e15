from functools import cache
from itertools import pairwise
from math import sqrt

import numpy as np
import pytest

from gyroscope_lab.data.source import Source
from gyroscope_lab.errors import LabError
from gyroscope_lab.papers.cells import Cell, all_below, examples_tested
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.result import Result
from gyroscope_lab.training.task import Task

_SGD = Recipe("SGD", 0.1)


@cache
def task_of(source):
    return Task("made", source, "mlp-2x8", options=(("inputs", 64),))


def cell(*tests, source=Source("digits")):  # noqa: B008
    """A cell whose seeds have these test accuracies, in percent."""
    results = tuple(Result(1.0, test / 100, loss=[0.1], layers=["a"], rotation=[[0.0]]) for test in tests)
    return Cell(task_of(source), _SGD, results)


def below(pairs, noise=1.0):
    return all_below(pairs, lambda one: one.test, lambda one: noise)


# The noise of a test accuracy


@pytest.mark.parametrize(
    ("source", "examples"),
    [
        (Source("digits"), 1597),
        (Source("digits", per_class=50, validation=0.2), 1297),
        (Source("mnist", per_class=100), 10_000),
        (Source("cifar-100"), 10_000),
        (Source("tiny-imagenet"), 10_000),
        (Source("imagenet", side=64), 50_000),
    ],
)
def test_the_noise_of_one_seed_is_that_of_its_test_examples(source, examples):
    assert examples_tested(source) == examples
    assert cell(90.0, source=source).noise == pytest.approx(100 * sqrt(0.9 * 0.1 / examples))


@pytest.mark.parametrize("per_class", [20, 70])
def test_as_many_digits_are_tested_on_as_the_source_loads(per_class):
    source = Source("digits", per_class=per_class)
    assert examples_tested(source) == len(source.load().x_test)


def test_a_text_of_one_seed_has_no_known_number_of_test_examples():
    with pytest.raises(LabError, match="Train several seeds"):
        _ = cell(50.0, source=Source("shakespeare")).noise
    assert cell(50.0, 52.0, source=Source("shakespeare")).noise == pytest.approx(1.0)


# Whether all of a list of pairs are ordered


def test_no_pairs_decide_nothing():
    assert below([]) is None


@pytest.mark.parametrize(("gain", "holds"), [(2.9, True), (2.7, None), (-2.7, None), (-2.9, False)])
def test_one_pair_is_decided_by_two_standard_errors_of_its_difference(gain, holds):
    assert below([(cell(50.0), cell(50.0 + gain))]) is holds  # 2√2 is 2.83


@pytest.mark.parametrize(("gain", "holds"), [(2.4, True), (2.2, None)])
def test_a_cell_that_is_in_every_pair_counts_as_often_in_the_noise_of_their_sum(gain, holds):
    """The sum 3r − a − b − c has the standard error √(9 + 3), and 3 gains of 2.31 are two of them."""
    reference = cell(60.0)
    assert below([(cell(60.0 - gain), reference) for _ in range(3)]) is holds


def test_equal_results_of_different_trainings_are_not_the_same_cell():
    """Three pairs without a common cell: 3 gains of 1.64 are twice √6."""
    assert below([(cell(58.0), cell(60.0)) for _ in range(3)]) is True


@pytest.mark.parametrize(("gain", "holds"), [(1.0, True), (0.9, None)])
def test_cells_between_the_ends_of_a_chain_cancel_in_the_sum(gain, holds):
    """The sum of (b − a) + (c − b) + (d − c) is d − a, with the standard error √2."""
    a, b, c, d = (cell(50.0 + place * gain) for place in range(4))
    assert below([(a, b), (b, c), (c, d)]) is holds


def test_the_more_pairs_the_more_one_of_them_must_be_reversed_to_refute_all():
    others = [(cell(50.0), cell(55.0)) for _ in range(7)]
    for gain, alone, among_eight in ((-3.5, False, None), (-4.0, False, False)):  # 2√2 is 2.83, and 2.76√2 is 3.91
        pair = cell(50.0), cell(50.0 + gain)
        assert below([pair]) is alone
        assert below([*others, pair]) is among_eight


@pytest.mark.parametrize("shared", [True, False], ids=["one reference", "separate pairs"])
def test_chance_decides_eight_pairs_no_more_often_than_one(shared):
    """Two standard errors are exceeded by chance on one side in 2.3 % of cases."""
    random, count, found = np.random.default_rng(0), 2000, []
    for _ in range(count):
        first = [cell(value) for value in random.normal(50.0, 1.0, 8)]
        second = [cell(value) for value in random.normal(50.0, 1.0, 1 if shared else 8)]
        found.append(below(list(zip(first, second * 8 if shared else second, strict=True))))
    limit = 0.0228 + 3 * sqrt(0.0228 / count)
    assert found.count(True) / count <= limit
    assert 0.005 < found.count(False) / count <= limit  # it can still be refuted


def test_chance_decides_a_chain_no_more_often_than_one_pair():
    random, count, found = np.random.default_rng(1), 2000, []
    for _ in range(count):
        chain = [cell(value) for value in random.normal(50.0, 1.0, 4)]
        found.append(below(list(pairwise(chain))))
    limit = 0.0228 + 3 * sqrt(0.0228 / count)
    assert found.count(True) / count <= limit
    assert found.count(False) / count <= limit
