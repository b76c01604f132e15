from math import inf, nan, sqrt

import numpy as np
import pytest
from scipy import stats

from gyroscope_lab.papers.chance import (
    Estimate,
    all_exceed,
    estimate,
    gain,
    limit,
    mean_of,
    reproduced,
    smaller_at_worst,
)

COUNT = 3000


def at_most(share):
    """This share with three standard errors of `COUNT` draws."""
    return share + 3 * sqrt(share * (1 - share) / COUNT)


# The limit


def test_the_limit_is_students_t_two_sided_at_95_percent():
    assert [limit(seeds - 1) for seeds in (2, 3, 4, 5)] == pytest.approx([12.706, 4.303, 3.182, 2.776], abs=1e-3)
    assert limit(7.3) == pytest.approx(stats.t.ppf(0.975, 7.3))
    assert limit(inf) == pytest.approx(1.95996, abs=1e-5)


@pytest.mark.parametrize("degrees", [2, 4.5, inf])
def test_of_k_tests_each_has_a_kth_of_the_level(degrees):
    ours = limit(degrees, tests=4)
    assert stats.t.sf(ours, degrees) == pytest.approx(0.025 / 4)


@pytest.mark.parametrize("seeds", [2, 3, 4, 5])
def test_chance_decides_a_difference_of_few_seeds_in_five_percent_of_cases(seeds):
    """Two standard errors of three seeds would decide 18 %."""
    drawn = np.random.default_rng(seeds).normal(size=(COUNT, seeds))
    found = [estimate(one).above for one in drawn]
    for side in (True, False):
        assert 0.015 < found.count(side) / COUNT < at_most(0.025)
    by_two_errors = np.mean([abs(one.mean) > 2 * one.error for one in map(estimate, drawn)])
    assert by_two_errors > 0.10


# Estimates


def test_a_gain_is_the_mean_of_paired_differences_with_its_standard_error():
    found = gain([2.0, 5.0, 5.0], [1.0, 2.0, 3.0])
    assert (found.mean, found.degrees) == (2.0, 2)
    assert found.error == pytest.approx(sqrt(((1 - 2) ** 2 + (3 - 2) ** 2 + 0) / 2 / 3))
    # 4.30 errors are 2.48.
    assert [found.exceeds(bound) for bound in (-0.5, -0.4, 2.0, 4.4, 4.5)] == [True, None, None, None, False]


def test_one_seed_and_a_training_that_diverged_decide_nothing():
    for found in (gain([2.0], [1.0]), gain([2.0, nan], [1.0, 1.0]), gain([2.0, inf], [1.0, 1.0])):
        assert found.above is None
        assert found.within(100.0) is None
        assert all_exceed([found]) is None
    assert gain([2.0], [1.0]).told == "+1.00"
    assert gain([inf, inf], [inf, inf]).within(100.0) is None


def test_a_gain_needs_the_same_seeds_of_both():
    with pytest.raises(ValueError, match="shorter"):
        gain([1.0, 2.0, 3.0], [1.0])


def test_differences_of_rounding_are_a_tie_and_a_tie_decides_nothing():
    tests = np.array([93.1, 94.2, 92.7])
    assert gain(tests + 0.1 + 0.2, tests + 0.3).above is None
    assert gain(tests, tests).above is None


def test_paired_and_independent_differences_are_those_of_students_and_welchs_test():
    random = np.random.default_rng(0)
    decided = set()
    for _ in range(300):
        these, those = random.normal(0.8, 1.0, 4), random.normal(0.0, 3.0, 6)
        welch = stats.ttest_ind(these, those, equal_var=False)
        found = estimate(these) - estimate(those)
        assert (found.mean / found.error, found.degrees) == pytest.approx((welch.statistic, welch.df))
        assert (found.above is None) == (welch.pvalue > 0.05)
        paired = stats.ttest_rel(these, those[:4])
        assert (gain(these, those[:4]).above is None) == (paired.pvalue > 0.05)
        decided |= {found.above}
    assert decided == {True, None, False}


def test_the_mean_of_several_has_the_errors_of_all():
    random = np.random.default_rng(1)
    several = [estimate(random.normal(size=3)) for _ in range(4)]
    found = mean_of(several)
    variances = np.array([one.error**2 for one in several])
    assert found.mean == pytest.approx(np.mean([one.mean for one in several]))
    assert found.error == pytest.approx(sqrt(variances.sum()) / 4)
    assert found.degrees == pytest.approx(variances.sum() ** 2 / (variances**2 / 2).sum())
    assert mean_of([*several, Estimate(1.0, None, 0)]).error is None


@pytest.mark.parametrize(("mean", "holds"), [(0.0, True), (0.7, None), (-0.7, None), (1.5, False), (-1.5, False)])
def test_within_is_shown_only_if_chance_does_not_reach_the_bound(mean, holds):
    assert Estimate(mean, 0.2, inf).within(1.0) is holds
    assert Estimate(mean, 5.0, inf).within(1.0) is None  # however close it is to zero


# Several at once


def test_all_are_shown_no_more_often_by_chance_than_the_one_that_is_equal():
    """Three clear gains and one that is none: a significant sum with a positive sign each shows them in 49 %."""
    random = np.random.default_rng(2)
    found = [all_exceed([estimate(random.normal(mean, 1.0, 5)) for mean in (9, 9, 9, 0)]) for _ in range(COUNT)]
    assert found.count(True) / COUNT < at_most(0.025)
    assert found.count(False) / COUNT < at_most(0.025)
    assert all_exceed([estimate(random.normal(9.0, 1.0, 5)) for _ in range(4)]) is True


def test_chance_refutes_many_no_more_often_than_one():
    random = np.random.default_rng(3)
    found = [all_exceed([estimate(random.normal(0.0, 1.0, 5)) for _ in range(8)]) for _ in range(COUNT)]
    assert 0.01 < found.count(False) / COUNT < at_most(0.025)
    assert found.count(True) == 0


def test_none_decide_nothing_and_one_that_is_unknown_leaves_all_undecided():
    clear = Estimate(5.0, 1.0, inf)
    assert all_exceed([]) is None
    assert all_exceed([clear, Estimate(5.0, None, 0)]) is None
    assert all_exceed([clear, -clear, Estimate(5.0, None, 0)]) is False


def test_the_worst_of_each_are_compared_beyond_chance():
    these, those = [Estimate(mean, 0.5, inf) for mean in (1.0, 4.0)], [Estimate(mean, 0.5, inf) for mean in (0.0, 9.0)]
    assert smaller_at_worst(these, those) is True
    assert smaller_at_worst(those, these) is False
    assert smaller_at_worst([Estimate(8.0, 0.5, inf)], those) is None
    assert smaller_at_worst(these, []) is None


@pytest.mark.parametrize("seeds", [3, 10])
def test_the_worst_of_many_that_are_alike_is_not_said_to_be_worse_more_often_than_by_chance(seeds):
    """It is the worst by chance, so a test as if it had been chosen beforehand would say so in 5 % and more."""
    random = np.random.default_rng(seeds)
    said = [
        smaller_at_worst([estimate(random.normal(size=seeds))], list(map(estimate, random.normal(size=(5, seeds)))))
        for _ in range(COUNT)
    ]
    assert said.count(True) / COUNT < at_most(0.025)


# A share of a gain


def test_a_copy_that_gives_back_most_of_a_sure_gain_reproduces_it():
    sure, unsure = [2.0, 2.1, 2.2], [2.0, -0.1, 2.0]
    assert reproduced(sure, [1.5, 1.5, 1.6], share=0.5) is True
    assert reproduced(sure, [0.5, 0.5, 0.6], share=0.5) is False
    assert reproduced(sure, [1.0, 3.9, 1.2], share=0.5) is None
    assert reproduced(unsure, sure, share=0.5) is None


def test_chance_shows_that_a_share_is_reproduced_no_more_often_than_that_it_is_not():
    """A part of exactly the share: to ask no more than a higher estimate would show it in half of all cases."""
    random = np.random.default_rng(4)
    wholes, parts = (random.normal(mean, 1.0, (COUNT, 3)) for mean in (50.0, 25.0))
    found = [reproduced(whole, part, share=0.5) for whole, part in zip(wholes, parts, strict=True)]
    for side in (True, False):
        assert 0.015 < found.count(side) / COUNT < at_most(0.025)
