"""The numbers of trained perceptrons in tables: losses by rate, factors a layer, condition numbers, dying units."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

import numpy as np

from gyroscope.conditioning import percent
from gyroscope_lab.papers.conditioning.perceptron_courses import FACTORS, Course, Kind, Values, a_layer
from gyroscope_lab.papers.conditioning.perceptron_panels import About
from gyroscope_lab.papers.study import Table

Courses = Mapping[Kind, Course]


def losses(courses: Courses, about: About) -> Table:
    """The last training loss of every learning rate, the best of which is shown elsewhere; the paper prints none."""
    lasted = max(len(one.result.loss) for one in courses.values())
    rates = sorted({rate for one in courses.values() for rate in one.tried})
    columns = ("initialization", "network", *(f"rate {rate:g}" for rate in rates), "best", "paper")
    rows = tuple(
        (kind.start, kind.name, *(_loss(one.tried.get(rate)) for rate in rates), f"{one.rate:g}", None)
        for kind, one in courses.items()
    )
    return Table(f"Training loss after {lasted} {about.epoch}s: {about.setting}", columns, rows)


def _loss(value: float | None) -> str | None:
    return None if value is None else f"{value:.3g}" if isfinite(value) else "diverged"


def factors(courses: Courses) -> Table:
    """What λmax is multiplied by a layer, forward for Σx and backward for Σ∇h, and its extremes over the layers."""
    rows: list[tuple[Any, ...]] = []
    for kind, one in courses.items():
        for name, symbol in FACTORS.items():
            values = one.lambdas[name]
            ends = (a_layer(values[place], forward=name == "x") for place in (0, -1))
            # Without the images, and without the last layer, whose outputs are the network's.
            inner = values[0][1:] if name == "x" else values[0][:-1]
            rows.append((kind.start, kind.name, f"λmax({symbol})", *(f"{end:.3g}" for end in ends),
                         f"{inner.min():.2g} to {inner.max():.2g}", None))  # fmt: skip
    columns = ("initialization", "network", "of", "a layer, at first", "in the end", "over layers, at first", "paper")
    return Table("What λmax is multiplied by from layer to layer, in the pass that makes it", columns, tuple(rows))


def kappas(courses: Courses) -> Table:
    """κ_p of both matrices, the median over layers."""
    rows: list[tuple[Any, ...]] = []
    for kind, one in courses.items():
        for name, symbol in FACTORS.items():
            for p, values in one.kappas[name].items():
                both = (as_text(middle(inner(values[place], name))) for place in (0, -1))
                rows.append((kind.start, kind.name, symbol, f"{percent(p)} %", *both, None))
    columns = ("initialization", "network", "of", "p", "at first", "in the end", "paper")
    return Table("κ_p, the median over layers", columns, tuple(rows))


def inner(values: Values, name: str) -> Values:
    """Of values [..., layers], those of layers that the network makes: not of the images, nor of its outputs."""
    return values[..., 1:] if name == "x" else values[..., :-1]


def middle(values: Values) -> float:
    """The median, where an undefined κ (λmax is 0) counts as infinite.

    >>> middle(np.array([1.0, 2.0, np.nan]))
    2.0
    """
    ordered = np.sort(np.where(np.isnan(values), np.inf, values).ravel())
    return float(ordered[(len(ordered) - 1) // 2])  # the lower one of two: the mean of ∞ and a number says nothing


def as_text(value: float) -> str:
    """A condition number in a table.

    >>> as_text(1234.5), as_text(np.inf)
    ('1.23e+03', '∞')
    """
    return f"{value:.3g}" if isfinite(value) else "∞"


def units(courses: Courses) -> Table:
    """Dying and full units of every layer, when first looked at and when last."""
    columns = [f"{kind.name}: {name}, {when}" for kind in courses for name in ("dying", "full") for when in _WHENS]
    counts = [one.units[name][at] for one in courses.values() for name in ("dying", "full") for at in _WHENS.values()]
    rows = tuple((layer, *(int(count) for count in row)) for layer, row in enumerate(np.transpose(counts), start=1))
    return Table("Dying and full units by layer (the paper prints no numbers)", ("layer", *columns), rows)


_WHENS = {"at first": 0, "in the end": -1}
