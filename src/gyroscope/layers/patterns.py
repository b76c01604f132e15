"""Layers chosen by name: glob patterns, and what is said of one that fits nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from gyroscope.errors import LayerError

if TYPE_CHECKING:
    from gyroscope.layers.layer import Layer


def patterns(option: str, given: Any) -> list[str]:
    """One pattern or several, as a list.

    >>> patterns("include", "encoder.*")
    ['encoder.*']
    """
    listed = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else [given]
    for one in listed:
        if not isinstance(one, str):
            raise LayerError(
                f"{option}={given!r} holds a {type(one).__name__}; accepted are names of layers and glob patterns on "
                'them, one ("encoder.*") or a list of them.'
            )
    return listed


def matching(pattern: str, names: dict[str, None]) -> set[str]:
    """The names that a pattern stands for; a name stands for itself, whatever characters it has.

    >>> sorted(matching("conv*", {"conv1.weight": None, "fc.weight": None}))
    ['conv1.weight']
    """
    same = {pattern} & names.keys()
    # Thousands of names are looked up; only what has a wildcard is held against each.
    return same | {name for name in names if fnmatchcase(name, pattern)} if re.search(r"[*?[]", pattern) else same


def unmatched(pattern: str, names: list[str], found: dict[str, tuple[Layer, bool]]) -> str:
    """Why a pattern stands for no layer, and what may have been meant.

    >>> unmatched("con.weight", ["conv.weight", "fc.weight"], {})
    "pattern 'con.weight' matches no layer; close names are 'conv.weight', 'fc.weight'."
    """
    if pattern in found:
        layer, _ = found[pattern]
        if layer.name != pattern:
            return f"{pattern!r} is tied to {layer.name!r} and has no layer of its own; use that name."
        return (
            f"{pattern!r} with shape {tuple(layer.parameter.shape)} and {layer.parameter.dtype} is no layer; "
            "`include` also takes the name of a real or complex parameter of two or more dimensions."
        )
    close = get_close_matches(pattern, names, n=3, cutoff=0.4) or names[:3]
    return f"pattern {pattern!r} matches no layer; close names are {', '.join(map(repr, close))}."
