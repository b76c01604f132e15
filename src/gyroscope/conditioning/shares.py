"""Shares p of the dimension at which condition numbers κ_p are taken."""

from __future__ import annotations

from typing import Any

from gyroscope.base.accepted import real
from gyroscope.errors import ConditioningError

P = (0.1, 0.25, 0.5, 0.75, 1.0)


def check_p(p: Any) -> tuple[float, ...]:
    """Shares in (0, 1], or an error.

    >>> check_p([0.5, 1])
    (0.5, 1.0)
    """
    try:
        given = list(p)
    except TypeError:
        given = [p]
    for one in given:
        if not 0 < real(one) <= 1:
            raise ConditioningError(f"p holds {one!r}; accepted are shares of the dimension in (0, 1], such as 0.5.")
    return tuple(real(one) for one in given)
