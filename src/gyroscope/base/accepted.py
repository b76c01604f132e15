"""What counts as a number where users give one. Each room refuses the rest in words of its own."""

from __future__ import annotations

import math
from operator import index
from typing import Any


def whole(value: Any, least: int | None = None) -> int | None:
    """What was given as an int; None if it is no whole number, or below `least`.

    Integers of NumPy and torch are, also in arrays of no dimension; truth values and floats are not.

    >>> import numpy as np
    >>> whole(3), whole(np.int64(3)), whole(np.array(3)), whole(3.0), whole(True), whole("3"), whole(3, least=4)
    (3, 3, 3, None, None, None, None)
    """
    if _is_truth(value):
        return None
    try:
        found = index(value)
    except TypeError:
        return None
    return found if least is None or found >= least else None


def seed(value: Any, error: type[Exception]) -> int:
    """What a generator of torch's takes for a seed, as a number from 0 on; else a room's own error.

    >>> seed(5, ValueError), seed(-1, ValueError) == 2**64 - 1
    (5, True)
    >>> seed("5", ValueError)
    Traceback (most recent call last):
    ValueError: seed is '5'; accepted is a whole number from −2⁶³ to 2⁶⁴ − 1.
    """
    found = whole(value, -(2**63))
    if found is None or found >= 2**64:
        raise error(f"seed is {value!r}; accepted is a whole number from −2⁶³ to 2⁶⁴ − 1.")
    return found % 2**64


def real(value: Any) -> float:
    """What was given as a float; not a number if it is none. A tensor on an accelerator is waited for.

    Arrays and tensors of one element are numbers; text and complex numbers are not.

    >>> import numpy as np
    >>> real(0.5), real(np.float32(0.5)), real(np.array([0.5])), real("0.5"), real(None), real(1j), real([0.5])
    (0.5, 0.5, 0.5, nan, nan, nan, nan)
    """
    if isinstance(value, str | bytes | bytearray) or _is_truth(value):
        return math.nan
    try:
        # Arrays and tensors, of one element or none; item() of a tensor that needs a gradient does not warn.
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan


def flag(value: Any, name: str, error: type[Exception]) -> bool:
    """What was given as true or false; else a subpackage's own error. Text is neither: "no" would count as true.

    >>> flag(True, "units", ValueError), flag(0, "units", ValueError)
    (True, False)
    >>> flag("no", "units", ValueError)
    Traceback (most recent call last):
    ValueError: `units` must be True or False, got 'no'.
    """
    if not isinstance(value, int) and not (_is_truth(value) and not getattr(value, "shape", ())):
        raise error(f"`{name}` must be True or False, got {value!r:.80}.")
    return bool(value)


def text(value: Any) -> str | None:
    r"""What was given as text; None if it is none, or has half a letter in it, which no file can hold.

    >>> text("conv1"), text(5), text("\ud83d")
    ('conv1', None, None)
    """
    if not isinstance(value, str):
        return None
    try:
        value.encode()
    except UnicodeEncodeError:
        return None
    return value


def listed(value: Any) -> list[Any]:
    """What was given as a list: one thing, or several. Text is one thing.

    >>> listed("rate"), listed(("rate", "rotation")), listed(5)
    (['rate'], ['rate', 'rotation'], [5])
    """
    if isinstance(value, str | bytes):
        return [value]
    try:
        return list(value)
    except TypeError:  # also of an array without dimensions, which says that it can be iterated
        return [value]


def _is_truth(value: Any) -> bool:
    return isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))
