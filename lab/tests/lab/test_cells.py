from functools import cache
from math import inf, sqrt

import numpy as np
import pytest

from gyroscope_lab.data.source import Source
from gyroscope_lab.errors import LabError
from gyroscope_lab.papers.cells import Cell, all_below, cells, examples_tested
from gyroscope_lab.papers.chance import Estimate
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.result import Result
from gyroscope_lab.training.task import Task
from gyroscope_lab.training.trial import Trial
from lab.made_lab import MadeLab

_SGD = Recipe("SGD", 0.1)


@cache
def task_of(source):
    return Task("made", source, "mlp-2x8", options=(("inputs", 64),))


def cell(*tests, source=Source("digits")):  # noqa: B008
    """A cell whose seeds have these test accuracies, in percent."""
    results = tuple(Result(1.0, test / 100, loss=[0.1], layers=["a"], rotation=[[0.0]]) for test in tests)
    return Cell(task_of(source), _SGD, results)


def below(pairs, noise=1.0):
    return all_below(pairs, lambda one: Estimate(one.test, noise, inf))


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
    tested = cell(90.0, source=source).tested
    assert tested.mean == pytest.approx(90.0)
    assert tested.error == pytest.approx(100 * sqrt(0.9 * 0.1 / examples))
    assert tested.degrees == inf


@pytest.mark.parametrize("per_class", [20, 70])
def test_as_many_digits_are_tested_on_as_the_source_loads(per_class):
    source = Source("digits", per_class=per_class)
    assert examples_tested(source) == len(source.load().x_test)


def test_a_text_of_one_seed_has_no_known_number_of_test_examples():
    with pytest.raises(LabError, match=r"^Expected a dataset of images, one of digits, .*got 'shakespeare'\. Train"):
        _ = cell(50.0, source=Source("shakespeare")).tested
    tested = cell(50.0, 52.0, source=Source("shakespeare")).tested
    assert (tested.error, tested.degrees) == (pytest.approx(1.0), 1)


def test_results_are_found_by_their_seed(tmp_path):
    made = {seed: Result(1.0, seed / 10, loss=[0.1], layers=["a"], rotation=[[0.0]]) for seed in (0, 2)}
    task = task_of(Source("digits"))
    lab = MadeLab(Archive(tmp_path), "small", make=lambda trial: made[trial.seed])
    [found] = cells(lab, [Trial(task, _SGD, seed) for seed in (2, 0)])
    assert (found.seeds, found.by_seed) == ((2, 0), made)


# Whether all of a list of pairs are ordered


def test_no_pairs_decide_nothing():
    assert below([]) is None


@pytest.mark.parametrize(("gain", "holds"), [(2.9, True), (2.7, None), (-2.7, None), (-2.9, False)])
def test_one_pair_is_decided_by_the_limit_of_its_difference(gain, holds):
    assert below([(cell(50.0), cell(50.0 + gain))]) is holds  # 1.96√2 is 2.77


@pytest.mark.parametrize(("gain", "holds"), [(2.9, True), (2.7, None), (0.1, None), (-3.0, None), (-4.0, False)])
def test_every_pair_has_to_be_sure_and_one_sure_reversal_refutes_all(gain, holds):
    """However clear the others are. Among eight, a pair is reversed from 2.73√2, which is 3.87."""
    clear = [(cell(20.0), cell(80.0)) for _ in range(7)]
    assert below([*clear, (cell(50.0), cell(50.0 + gain))]) is holds


def test_the_seeds_of_each_cell_decide_how_sure_it_is():
    """Both differences are 1; that of three seeds has an error of 0.41 and four degrees of freedom: 2.78 · 0.41."""
    few, more = cell(50.0, 50.5, 49.5), cell(51.0, 51.5, 50.5)
    assert all_below([(few, more)], lambda one: one.tested) is None
    many = [cell(*(middle + side for side in (-0.5, 0.0, 0.5) * 3)) for middle in (50.0, 51.0)]
    assert all_below([tuple(many)], lambda one: one.tested) is True


@pytest.mark.parametrize("shared", [True, False], ids=["one reference", "separate pairs"])
def test_chance_decides_eight_pairs_no_more_often_than_one(shared):
    random, count, found = np.random.default_rng(0), 2000, []
    for _ in range(count):
        first = [cell(value) for value in random.normal(50.0, 1.0, 8)]
        second = [cell(value) for value in random.normal(50.0, 1.0, 1 if shared else 8)]
        found.append(below(list(zip(first, second * 8 if shared else second, strict=True))))
    limit = 0.025 + 3 * sqrt(0.025 / count)
    assert found.count(True) / count <= limit
    assert 0.005 < found.count(False) / count <= limit  # it can still be refuted


@pytest.mark.parametrize("gains", [(0, 0, 0, 0), (9, 9, 9, 0)], ids=["no gains", "three gains of four"])
def test_chance_shows_four_pairs_no_more_often_than_one(gains):
    random, count, found = np.random.default_rng(1), 2000, []
    for _ in range(count):
        pairs = [(cell(50.0 + random.normal()), cell(50.0 + gain + random.normal())) for gain in gains]
        found.append(below(pairs))
    limit = 0.025 + 3 * sqrt(0.025 / count)
    assert found.count(True) / count <= limit
    assert found.count(False) / count <= limit
