"""Chance: what a difference of a few seeds can tell.

A study trains each configuration from few seeds. A difference of two means exceeds twice its standard error by chance
in 5 % of cases with many seeds, and in 18 % with three. So every verdict that compares seeds asks Student's t,
two-sided at 95 %: a difference is above chance if it exceeds t standard errors, with t = 4.30 for three seeds and 2.26
for ten.

A claim about several pairs at once ("at every depth") is shown if each of them is above chance on its own, an
intersection-union test: chance shows it no more often than it shows its weakest pair. It is refuted if one of k pairs
is reversed at a level k times as strict (Bonferroni), so that chance refutes many pairs no more often than one.

What is not corrected: where each method is compared at its best rate, that rate was chosen on the compared seeds. This
favors a method that has more rates that are nearly as good. And most studies at the small scale had three to five seeds
at first, and ten when it was known that fewer left many comparisons undecided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import exp, inf, isfinite, nan, sqrt

import numpy as np
import numpy.typing as npt

Values = Sequence[float] | npt.NDArray[np.float64]

#: The level of a verdict: the share of cases in which chance alone leaves it undecided.
LEVEL = 0.95
# Up to this share of their size two numbers are equal: the rest is rounding.
_ROUNDING = 1e-12


@cache
def limit(degrees: float, *, tests: int = 1) -> float:
    """Return the number of standard errors up to which a difference may be chance: Student's t, two-sided at 95 %.

    Args:
        degrees: the degrees of freedom of the error: one less than the seeds; infinite for many.
        tests: the number of differences of which one has to be beyond the limit.

    >>> [round(limit(seeds - 1), 2) for seeds in (2, 3, 4, 5)]
    [12.71, 4.3, 3.18, 2.78]
    >>> round(limit(inf), 2), round(limit(inf, tests=8), 2)
    (1.96, 2.73)
    """
    from scipy.stats import norm, t  # takes a while to load

    tail = (1 - LEVEL) / 2 / tests
    return float(t.isf(tail, degrees) if isfinite(degrees) else norm.isf(tail))


@dataclass(frozen=True)
class Estimate:
    """A number that was measured from several seeds, such as a mean or a difference of means.

    Attributes:
        mean: the number.
        error: its standard error; None for one seed, which has none.
        degrees: the degrees of freedom of the error.

    >>> gained = Estimate(1.0, 0.2, 2)
    >>> gained.told, gained.above, gained.exceeds(0.5), (-gained).above
    ('+1.00 ± 0.20', True, None, False)
    >>> gained.as_ratio, gained.as_factor
    ('2.72 times as high (1.15 to 6.43 at 95 %)', '2.72 times lower (1.15 to 6.43 at 95 %)')
    """

    mean: float
    error: float | None
    degrees: float

    @property
    def told(self) -> str:
        """The number with its sign and its standard error, as text."""
        return self.to(2)

    def to(self, digits: int) -> str:
        """Return the same with so many digits behind the point."""
        return f"{self.mean:+.{digits}f}" + ("" if self.error is None else f" ± {self.error:.{digits}f}")

    @property
    def span(self) -> float | None:
        """Half the width of its interval at 95 %; None for one seed."""
        return None if self.error is None else limit(self.degrees) * self.error

    @property
    def as_ratio(self) -> str:
        """A difference of logarithms as a factor with its interval, as text."""
        return f"{exp(self.mean):.2f} times as high{self._interval(self.mean, '.2f')}"

    @property
    def as_factor(self) -> str:
        """By what factor the second of two numbers is lower or higher, from ln first − ln second, as text."""
        side = "lower" if self.mean >= 0 else "higher"
        return f"{exp(abs(self.mean)):.3g} times {side}{self._interval(abs(self.mean), '.3g')}"

    @property
    def above(self) -> bool | None:
        """True if it is above zero, False if it is below; see `exceeds`."""
        return self.exceeds(0.0)

    def exceeds(self, bound: float, *, tests: int = 1) -> bool | None:
        """Return whether it is above `bound`; None where that may be chance, for one seed, and where one diverged."""
        sure = self.error is not None and abs(self.mean - bound) > limit(self.degrees, tests=tests) * self.error
        return self.mean > bound if sure else None

    def within(self, most: float) -> bool | None:
        """Return whether its size is at most `most`; None where that may be chance."""
        return all_exceed((self, -self), -most)

    def times(self, factor: float) -> Estimate:
        """Return it multiplied by a known number."""
        return Estimate(factor * self.mean, None if self.error is None else abs(factor) * self.error, self.degrees)

    def plus(self, number: float) -> Estimate:
        """Return it plus a known number."""
        return replace(self, mean=self.mean + number)

    def __neg__(self) -> Estimate:
        return self.times(-1.0)

    def __sub__(self, other: Estimate) -> Estimate:
        """The difference of two that are independent, with the degrees of freedom of Welch and Satterthwaite.

        >>> Estimate(3.0, 3.0, 4) - Estimate(1.0, 4.0, 4)
        Estimate(mean=2.0, error=5.0, degrees=7.4183976261127595)
        """
        if self.error is None or other.error is None:
            return Estimate(self.mean - other.mean, None, 0)
        parts = [(one.error**2, one.degrees) for one in (self, other) if one.error]
        variance = sum(part for part, _ in parts)
        spread = sum(part**2 / degrees for part, degrees in parts)
        return Estimate(self.mean - other.mean, sqrt(variance), variance**2 / spread if spread else inf)

    def _interval(self, mean: float, form: str) -> str:
        span = self.span
        return "" if span is None else f" ({exp(mean - span):{form}} to {exp(mean + span):{form}} at 95 %)"


def estimate(values: Values) -> Estimate:
    """Return the mean of one value per seed.

    >>> estimate([2.0, 4.0]), estimate([2.0])
    (Estimate(mean=3.0, error=1.0, degrees=1), Estimate(mean=2.0, error=None, degrees=0))
    """
    each = np.asarray(values, dtype=np.float64)
    with np.errstate(invalid="ignore"):  # one that diverged
        error = float(each.std(ddof=1) / sqrt(len(each))) if len(each) > 1 else None
    return Estimate(float(each.mean()), error, len(each) - 1)


def gain(these: Values, those: Values) -> Estimate:
    """Return the mean difference of `these` and `those`, which have the same seeds in the same order.

    NaN if one of them is not finite.

    >>> gain([2.0, 4.0], [1.0, 1.0])
    Estimate(mean=2.0, error=1.0, degrees=1)
    """
    pairs = zip(these, those, strict=True)
    first, second = np.array([pair if all(map(isfinite, pair)) else (nan, nan) for pair in pairs]).reshape(-1, 2).T
    return estimate(np.where(np.isclose(first, second, rtol=_ROUNDING, atol=0.0), 0.0, first - second))


def mean_of(several: Sequence[Estimate]) -> Estimate:
    """Return the mean of some that are independent.

    >>> mean_of([Estimate(1.0, 3.0, 2), Estimate(3.0, 4.0, 2)]).told
    '+2.00 ± 2.50'
    """
    total = Estimate(0.0, 0.0, inf)
    for one in several:
        total = total - (-one)
    return total.times(1 / len(several))


def reproduced(whole: Values, part: Values, *, share: float) -> bool | None:
    """Return whether another cause gives at least a share of a gain, both seed by seed; None where that may be chance.

    >>> reproduced([1.0, 1.1, 1.2], [0.9, 1.1, 1.0], share=0.5), reproduced([1.0, 1.1, 1.2], [0.1, 0.2, 0.1], share=0.5)
    (True, False)
    >>> reproduced([1.0, 1.1, 1.2], [0.9, 0.4, 1.0], share=0.5) is None
    True
    """
    if not estimate(whole).above:
        return None
    return gain(part, share * np.asarray(whole)).above


def all_exceed(several: Sequence[Estimate], bound: float = 0.0) -> bool | None:
    """Return whether all are above `bound`; None where that may be chance, and for none.

    True if each of them is on its own. False if one of the k is below by the limit of k tests. See the module.

    >>> clear = Estimate(5.0, 1.0, inf)
    >>> all_exceed([clear, clear]), all_exceed([clear, Estimate(1.0, 1.0, inf)]), all_exceed([clear, -clear])
    (True, None, False)
    """
    if any(one.exceeds(bound, tests=len(several)) is False for one in several):
        return False
    return True if several and all(one.exceeds(bound) for one in several) else None


def smaller_at_worst(these: Sequence[Estimate], those: Sequence[Estimate]) -> bool | None:
    """Return whether the largest of these is below the largest of those; None where that may be chance.

    The largest of those k is chosen by the same data. So each of these has to be below it at a level k times as strict.

    >>> low, high = Estimate(1.0, 0.1, 2), Estimate(9.0, 0.1, 2)
    >>> smaller_at_worst([low, low], [low, high]), smaller_at_worst([low, high], [low, low])
    (True, False)
    """
    if not those:
        return None
    worst = max(those, key=lambda one: one.mean)
    gaps = [worst - one for one in these]
    if all_exceed(gaps) is False:
        return False
    return True if gaps and all(gap.exceeds(0.0, tests=len(those)) for gap in gaps) else None


def all_hold(parts: Sequence[bool | None]) -> bool | None:
    """Return whether all parts of a claim hold: False if one does not, else None if one is undecided.

    >>> all_hold([True, True]), all_hold([True, None]), all_hold([None, False])
    (True, None, False)
    """
    return False if False in parts else True if all(parts) else None


def opposite(holds: bool | None) -> bool | None:
    """Return whether a claim does not hold; None if it is undecided.

    >>> opposite(True), opposite(None)
    (False, None)
    """
    return None if holds is None else not holds
