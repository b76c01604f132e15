"""The search for a rate at each α (appendix B.2 of the speed paper).

It starts from 3⁻⁴, 3⁻³ and 3⁻². As long as the best rate is the lowest or the highest of those tried, the next lower or
higher one, by a factor 3, is tried too. After that, where the best rates of two neighbouring α differ by a factor 3,
the rate between them, √3 from either, is tried for both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

#: The powers of 3 that are tried first.
START = (-3.0, -4.0, -2.0)
#: The search ends here: these are the ends of the papers' other searches.
LOWEST, HIGHEST = -7.0, 2.0

#: Scores by the power of 3 that the rate is, in the order of trying.
Tried = Mapping[float, float]
#: An α and a power of 3.
Place = tuple[float, float]


def search(alphas: Sequence[float], score: Callable[[list[Place]], Sequence[float]]) -> dict[float, dict[float, float]]:
    """Return what was tried at each α, and its scores.

    Args:
        alphas: any.
        score: gives the scores of (α, log₃ ρ), of several at a time; the higher the better.

    >>> tried = search([-0.2, 0.0], lambda places: [-abs(power + 1 + 5 * alpha) for alpha, power in places])
    >>> {alpha: sorted(its) for alpha, its in tried.items()}
    {-0.2: [-4.0, -3.0, -2.0, -1.0, -0.5, 0.0, 1.0], 0.0: [-4.0, -3.0, -2.0, -1.0, -0.5, 0.0]}
    """
    tried: dict[float, dict[float, float]] = {alpha: {} for alpha in alphas}
    while places := [(alpha, power) for alpha, its in tried.items() for power in extended(its)]:
        _score(tried, places, score)
    _score(tried, between(tried), score)
    return tried


def best(tried: Tried) -> float:
    """The power with the highest score; of equals, the one that was tried first.

    >>> best({-3: 0.9, -4: 0.8, -2: 0.9})
    -3
    """
    return max(tried, key=lambda power: tried[power])


def extended(tried: Tried) -> list[float]:
    """What is to be tried next at one α.

    >>> extended({}), extended({-3: 0.8, -4: 0.9, -2: 0.7}), extended({-3: 0.9, -4: 0.8, -2: 0.7})
    ([-3.0, -4.0, -2.0], [-5], [])
    """
    if not tried:
        return list(START)
    top = best(tried)
    further = [top - 1] if top == min(tried) else [top + 1] if top == max(tried) else []
    return [power for power in further if LOWEST <= power <= HIGHEST]


def between(tried: Mapping[float, Tried]) -> list[Place]:
    """Where the best rates of neighbouring α differ by a factor 3: what lies between, for both.

    >>> between({0.1: {-2: 0.8, -3: 0.7}, 0.0: {-2: 0.7, -3: 0.8}, 0.4: {-4: 0.5}})
    [(0.0, -2.5), (0.1, -2.5)]
    """
    bests = {alpha: best(tried[alpha]) for alpha in sorted(tried)}
    found = [
        (alpha, (bests[low] + bests[high]) / 2)
        for low, high in pairwise(bests)
        if abs(bests[low] - bests[high]) == 1
        for alpha in (low, high)
    ]
    return list(dict.fromkeys(found))


def _score(
    tried: dict[float, dict[float, float]], places: list[Place], score: Callable[[list[Place]], Sequence[float]]
) -> None:
    for (alpha, power), value in zip(places, score(places), strict=True):
        tried[alpha][power] = value
