"""Many results in few numbers, and the numbers in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan, nan

import numpy as np

from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.result import Result

#: A network counts as having learned its training set from here.
LEARNED = 0.995
#: A rank correlation is called a relation from here.
CLEAR = 0.5


@dataclass(frozen=True)
class Summary:
    """A recipe over its seeds: mean accuracies, and each layer's mean rotation at the end.

    >>> result = Result(1.0, 0.9, loss=[0.1], layers=["a", "b"], rotation=[[0.0, 0.0], [0.2, 0.4]])
    >>> summary = summarise(Recipe("SGD", rate=0.1), [result, result])
    >>> summary.test_accuracy, summary.test_std, round(summary.mean_rotation, 6)
    (0.9, 0.0, 0.3)
    """

    recipe: Recipe
    train_accuracy: float
    test_accuracy: float
    test_std: float | None
    final_rotation: list[float]

    @property
    def mean_rotation(self) -> float:
        """The mean over layers."""
        return float(np.mean(self.final_rotation))

    @property
    def test(self) -> str:
        """The test accuracy as tables print it, with its standard deviation over seeds where there are some.

        >>> Summary(Recipe("SGD", rate=0.1), 1.0, 0.967, 0.004, [0.1]).test
        '96.7 ± 0.4'
        """
        spread = "" if self.test_std is None else f" ± {100 * self.test_std:.1f}"
        return f"{100 * self.test_accuracy:.1f}{spread}"


def summarise(recipe: Recipe, results: Sequence[Result]) -> Summary:
    """Return the summary of one recipe; the standard deviation is the sample's, None for one seed.

    >>> result = Result(1.0, 0.9, loss=[0.1], layers=["a"], rotation=[[0.0], [0.2]])
    >>> summarise(Recipe("SGD", rate=0.1), [result]).test_std is None
    True
    """
    tests = [result.test_accuracy for result in results]
    return Summary(
        recipe=recipe,
        train_accuracy=float(np.mean([result.train_accuracy for result in results])),
        test_accuracy=float(np.mean(tests)),
        test_std=float(np.std(tests, ddof=1)) if len(tests) > 1 else None,
        final_rotation=np.mean([result.final_rotation for result in results], axis=0).tolist(),
    )


def rank_correlation(summaries: Sequence[Summary]) -> float:
    """Return Spearman's correlation of mean final rotation with test accuracy over recipes; nan if one is constant.

    >>> recipe = Recipe("SGD", rate=0.1)
    >>> round(rank_correlation([Summary(recipe, 1.0, 0.8, None, [0.1]), Summary(recipe, 1.0, 0.9, None, [0.2])]), 6)
    1.0
    """
    from scipy.stats import spearmanr  # takes a while to load

    rotations, accuracies = [s.mean_rotation for s in summaries], [s.test_accuracy for s in summaries]
    if min(len(set(rotations)), len(set(accuracies))) < 2:
        return nan
    return float(spearmanr(rotations, accuracies).statistic)


def in_words(summaries: Sequence[Summary]) -> str:
    """Return what the summaries show, in three sentences that follow from their numbers alone.

    >>> slow = Summary(Recipe("slow", rate=0.1), 1.0, 0.8, None, [0.1])
    >>> fast = Summary(Recipe("fast", rate=0.1), 1.0, 0.9, None, [0.7])
    >>> print(in_words([slow, fast]))
    All 2 configurations learned their training digits. On digits they had not seen they reach from
    80.0 % (slow, mean rotation 0.100) to 90.0 % (fast, mean rotation 0.700). Mean final rotation and test
    accuracy have a rank correlation of +1.00: the further the layers rotated, the better the network
    generalised.
    """
    worst = min(summaries, key=lambda s: s.test_accuracy)
    best = max(summaries, key=lambda s: s.test_accuracy)
    return (
        f"{_learned(summaries)} On digits they had not seen they reach from {_described(worst)} "
        f"to {_described(best)}. {_related(summaries)}"
    )


def _learned(summaries: Sequence[Summary]) -> str:
    short = [s.recipe.name for s in summaries if s.train_accuracy < LEARNED]
    if not short:
        return f"All {len(summaries)} configurations learned their training digits."
    names = ", ".join(short)
    return f"Of {len(summaries)} configurations, {len(short)} did not learn the training digits: {names}."


def _related(summaries: Sequence[Summary]) -> str:
    correlation = rank_correlation(summaries)
    if isnan(correlation):
        return "They cannot be ranked by rotation or by accuracy: all are equal."
    if correlation >= CLEAR:
        verdict = "the further the layers rotated, the better the network generalised"
    elif correlation <= -CLEAR:
        verdict = "the further the layers rotated, the worse the network generalised"
    else:
        verdict = "no clear relation between how far the layers rotated and how well the network generalised"
    return f"Mean final rotation and test accuracy have a rank correlation of {correlation:+.2f}: {verdict}."


def _described(summary: Summary) -> str:
    accuracy = 100 * summary.test_accuracy
    return f"{accuracy:.1f} % ({summary.recipe.name}, mean rotation {summary.mean_rotation:.3f})"
