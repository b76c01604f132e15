"""Shares p of the dimension at which condition numbers κ_p are taken."""

from __future__ import annotations

from numbers import Real
from typing import Any

from gyroscope.errors import ConditioningError

P = (0.1, 0.25, 0.5, 0.75, 1.0)


def check_p(p: Any) -> tuple[float, ...]:
    """Shares in (0, 1], or an error.

    >>> check_p([0.5, 1])
    (0.5, 1.0)
    """
    accepted = "accepted are shares of the dimension in (0, 1], such as 0.5"
    try:
        given = [p] if isinstance(p, Real) else list(p)
    except TypeError:
        raise ConditioningError(f"p is {p!r}; {accepted}.") from None
    for one in given:
        if isinstance(one, bool) or not isinstance(one, Real) or not 0 < float(one) <= 1:
            raise ConditioningError(f"p holds {one!r}; {accepted}.")
    return tuple(float(one) for one in given)
