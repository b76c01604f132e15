"""Checks of the types of dataclass fields."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from gyroscope_lab.errors import LabError

# By declared type: the accepted types, and their description. NumPy's numbers are not accepted: JSON cannot hold them.
_KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "True or False"),
    int: ((int,), "a whole number (int)"),
    float: ((float, int), "a number (float)"),
    str: ((str,), "text"),
}


def require_kinds(value: object) -> None:
    """Reject a dataclass with a field of another type than declared; lists become tuples where declared.

    Without this check, comparing a text with a number raises an error that names neither, and True counts as 1. JSON
    returns lists for tuples, and lists cannot be hashed.

    >>> from gyroscope_lab.training.schedule import Schedule
    >>> Schedule(cuts=0.5)
    Traceback (most recent call last):
    gyroscope_lab.errors.LabError: `Schedule.cuts` must be a tuple (each a number (float)), got 0.5.
    """
    kind: Any = type(value)
    for name, hint in _hints(kind).items():
        given = _settled(getattr(value, name), hint)
        object.__setattr__(value, name, given)  # the dataclass is frozen, but still being initialized
        if not _fits(given, hint):
            raise LabError(f"`{kind.__name__}.{name}` must be {_in_words(hint)}, got {given!r}.")


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {one.name: hints[one.name] for one in fields(kind)}


def _settled(value: Any, hint: Any) -> Any:
    """Return the value with tuples in place of lists where tuples are declared."""
    hints = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    declared = next((one for one in hints if get_origin(one) is tuple), None)
    if declared is None or not isinstance(value, list | tuple):
        return value
    inner = get_args(declared)
    return tuple(_settled(one, inner[0] if inner[-1] is Ellipsis else Any) for one in value)


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is Literal:
        return any(value is one or (type(value) is type(one) and value == one) for one in inner)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        each = [inner[0]] * len(value) if inner[-1] is Ellipsis else list(inner)
        return len(each) == len(value) and all(_fits(*pair) for pair in zip(value, each, strict=True))
    accepted, _ = _KINDS.get(hint, ((hint,), ""))
    return isinstance(value, accepted) and not (isinstance(value, bool) and bool not in accepted)


def _in_words(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(map(_in_words, inner))
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin is tuple:
        if inner[-1] is Ellipsis:
            return f"a tuple (each {_in_words(inner[0])})"
        return f"a tuple of {len(inner)} ({', '.join(map(_in_words, inner))})"
    if hint is NoneType:
        return "None"
    return "anything" if hint is Any else _KINDS[hint][1] if hint in _KINDS else f"a {hint.__name__}"
