"""Numbers, flags, texts and lists as users give them. Each subpackage rejects the rest with its own error."""

from __future__ import annotations

import math
from collections.abc import Collection
from operator import index
from typing import Any


def whole(value: Any, least: int | None = None) -> int | None:
    """Return `value` as an int, or None if it is not a whole number or is below `least`.

    Integers of NumPy and torch count, also as zero-dimensional arrays. Booleans and floats do not.

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
    """Return a seed that torch's generators accept as a number ≥ 0, or raise the caller's `error`.

    >>> seed(5, ValueError), seed(-1, ValueError) == 2**64 - 1
    (5, True)
    >>> seed("5", ValueError)
    Traceback (most recent call last):
    ValueError: `seed` must be a whole number from -2**63 to 2**64 - 1, got '5'. Try 0.
    """
    found = whole(value, -(2**63))
    if found is None or found >= 2**64:
        raise error(f"`seed` must be a whole number from -2**63 to 2**64 - 1, got {value!r:.80}. Try 0.")
    return found % 2**64


def real(value: Any) -> float:
    """Return `value` as a float, or NaN if it is not a number. A tensor on an accelerator is waited for.

    Arrays and tensors of one element are numbers; text, booleans and complex numbers are not.

    >>> import numpy as np
    >>> real(0.5), real(np.float32(0.5)), real(np.array([0.5])), real("0.5"), real(None), real(1j), real([0.5])
    (0.5, 0.5, 0.5, nan, nan, nan, nan)
    """
    if _is_truth(value):
        return math.nan
    try:
        # item() does not warn about a tensor that requires a gradient, as float() does.
        found = value.item() if hasattr(value, "item") else value
        return math.nan if isinstance(found, str | bytes | bytearray) else float(found)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan


def flag(value: Any, name: str, error: type[Exception]) -> bool:
    """Return `value` as a bool, or raise the caller's `error`. Text is rejected: "no" would count as true.

    >>> flag(True, "units", ValueError), flag(0, "units", ValueError)
    (True, False)
    >>> flag("no", "units", ValueError)
    Traceback (most recent call last):
    ValueError: `units` must be True or False, got 'no'.
    """
    if not isinstance(value, int) and not (_is_truth(value) and not getattr(value, "shape", ())):
        raise error(f"`{name}` must be True or False, got {value!r:.80}.")
    return bool(value)


def choice(value: Any, name: str, options: Collection[str], error: type[Exception]) -> None:
    """Raise the caller's `error` for a value that is not one of the options.

    >>> choice("adam", "kind", ("sgd", "adamw"), ValueError)
    Traceback (most recent call last):
    ValueError: `kind` must be one of 'sgd', 'adamw', got 'adam'.
    """
    if not isinstance(value, str) or value not in options:
        raise error(f"`{name}` must be one of {', '.join(map(repr, options))}, got {value!r:.80}.")


def text(value: Any) -> str | None:
    r"""Return `value` if it is text, or None if it is not, or if it has a lone surrogate, which no file can hold.

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
    """Return `value` as a list: several things, or one. Text is one thing.

    >>> listed("rate"), listed(("rate", "rotation")), listed(5)
    (['rate'], ['rate', 'rotation'], [5])
    """
    if isinstance(value, str | bytes):
        return [value]
    try:
        return list(value)
    except TypeError:  # a zero-dimensional array claims to be iterable
        return [value]


def _is_truth(value: Any) -> bool:
    return isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))
