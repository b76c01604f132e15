from math import isnan

import numpy as np
import pytest
from scipy.stats import spearmanr

from gyroscope.diagnosis.compare import rank_correlation


@pytest.mark.parametrize("seed", range(20))
def test_it_is_scipys_also_with_ties(seed):
    x, y = np.random.default_rng(seed).integers(0, 4, (2, 9)) * 0.1
    assert rank_correlation(x, y) == pytest.approx(spearmanr(x, y).statistic)


def test_of_few_or_of_equal_values_there_is_none():
    assert isnan(rank_correlation([1, 2], [1, 2]))
    assert isnan(rank_correlation([1, 2, 3], [1, 1, 1]))
