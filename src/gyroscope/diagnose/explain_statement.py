"""A statement about a layer: what it is about, whether it holds, why, and the equation behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Literal

Verdict = Literal["yes", "no", "does not apply", "undecided"]
Topic = Literal["scale invariance", "effective learning rate", "implicit decay", "equilibrium", "weight decay"]

#: In the order in which they are made: each rests on those before it.
TOPICS: tuple[Topic, ...] = (
    "scale invariance",
    "effective learning rate",
    "implicit decay",
    "equilibrium",
    "weight decay",
)


@dataclass(frozen=True)
class Statement:
    """What can be said of one layer on one topic.

    Attributes:
        layer: its name.
        topic: one of `TOPICS`.
        verdict: "yes" and "no" where a measurement says so; "does not apply" where the theory has nothing to say of
            such a layer or optimizer; "undecided" where something was not measured, or not often enough.
        words: a sentence or two; where it does not apply, "because ...".
        source: the equation or section of Grosse's chapter that it rests on.

    >>> print(Statement("conv1", "equilibrium", "does not apply", "because nothing decays.", "equation 23"))
    equilibrium: does not apply because nothing decays. (equation 23)
    """

    layer: str
    topic: Topic
    verdict: Verdict
    words: str
    source: str

    def __str__(self) -> str:
        joined = " " if self.verdict == "does not apply" else ". "
        return f"{self.topic}: {self.verdict}{joined}{self.words} ({self.source})"


def number(value: float) -> str:
    """Three digits; "–" for what is not known.

    >>> number(0.012345), number(123456.0), number(2.0), number(3e38), number(float("nan"))
    ('0.0123', '123,456', '2', '3e+38', '–')
    """
    if not isfinite(value):
        return "∞" if value == float("inf") else "–"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"


def times(count: int) -> str:
    """At how many steps.

    >>> times(1), times(2000)
    ('1 step', '2,000 steps')
    """
    return f"{count:,} step" if count == 1 else f"{count:,} steps"


def record(names: Sequence[str]) -> str:
    """How to record what is missing.

    >>> record(["rate"])
    'the run has no series rate; gyroscope.watch records it unless quantities= leaves it out'
    """
    it = "it" if len(names) == 1 else "them"
    return f"the run has no series {', '.join(names)}; gyroscope.watch records {it} unless quantities= leaves {it} out"


def sentence(words: str) -> str:
    """With a capital and a full stop.

    >>> sentence("the run has no series rate")
    'The run has no series rate.'
    """
    return f"{words[0].upper()}{words[1:]}."
