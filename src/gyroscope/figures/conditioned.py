"""What figures of conditioning take: one `Conditioning`, or several under labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from gyroscope.conditioning import Conditioning
from gyroscope.errors import FigureError

Several = Conditioning | Mapping[str, Conditioning] | Iterable[Conditioning]

#: The matrices of a layer, by the letter they have in the names of quantities.
TITLES = {
    "x": r"layer input, $\Sigma_x$",
    "g": r"output-gradient, $\Sigma_{\nabla h}$",
    "f": r"Fisher block, $F\approx\Sigma_x\otimes\Sigma_{\nabla h}$",
}


def as_conditioning(given: Conditioning) -> Conditioning:
    """Return `given` if it is a conditioning of at least one layer.

    >>> as_conditioning("mlp")
    Traceback (most recent call last):
    ...
    gyroscope.errors.FigureError: a figure was given a str; it takes what gyroscope.condition(...) returns
    """
    if not hasattr(given, "rows") or not hasattr(given, "spectra"):
        raise FigureError(
            f"a figure was given a {type(given).__name__}; it takes what gyroscope.condition(...) returns"
        )
    if not given.layers:
        raise FigureError("the conditioning has no layers to draw; its .untreated says why")
    return given


def networks(given: Several, labels: str | Sequence[str] | None, *, most: int) -> dict[str, Conditioning]:
    """Return conditionings by their labels: "" for a single one without, numbers for several without.

    >>> networks([], None, most=5)
    Traceback (most recent call last):
    ...
    gyroscope.errors.FigureError: there is no conditioning to draw; give at least one
    """
    # A conditioning can be iterated over as well.
    if hasattr(given, "rows") or not isinstance(given, Iterable):
        names, found = [""], [cast(Conditioning, given)]
    elif isinstance(given, Mapping):
        names, found = list(given), list(given.values())
    else:
        found = list(given)
        names = [f"network {i}" for i in range(1, len(found) + 1)] if len(found) > 1 else [""]
    if not found:
        raise FigureError("there is no conditioning to draw; give at least one")
    found = [as_conditioning(one) for one in found]
    if len(found) > most:
        raise FigureError(f"{len(found)} conditionings were given; at most {most} can be told apart")
    if labels is not None:
        names = [labels] if isinstance(labels, str) else list(labels)
        if len(names) != len(found) or len(set(names)) < len(names):
            raise FigureError(f"labels={labels!r}; give one for each of {len(found)} conditionings, all different")
    return dict(zip(names, found, strict=True))
