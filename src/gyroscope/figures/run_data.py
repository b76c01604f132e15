"""Runs as figures read them: a run or a path to one, its quantities, and the layers to show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from os import PathLike
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gyroscope.base import accepted
from gyroscope.base.accepted import listed, whole
from gyroscope.errors import FigureError
from gyroscope.store.record import QuantityInfo


class Measured(Protocol):
    """The part of a run that figures need: `gyroscope.store.Run` has it, and so has `gyroscope.figures.Example`."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def layers(self) -> Sequence[str]: ...  # noqa: D102
    @property
    def steps(self) -> npt.NDArray[np.int64]: ...  # noqa: D102
    @property
    def quantities(self) -> Mapping[str, QuantityInfo]: ...  # noqa: D102
    @property
    def scalars(self) -> Mapping[str, Any]: ...  # noqa: D102
    def series(self, name: str) -> npt.NDArray[np.float32]: ...  # noqa: D102


RunLike = Measured | str | PathLike[str]
Layers = str | Iterable[str] | None


@dataclass(frozen=True)
class Series:
    """A quantity of some layers, at the steps at which any of them has a value.

    Attributes:
        quantity: its name.
        layers: the layers' names.
        depth: position of each layer in the run, from 0 (first) to 1 (last).
        steps: the steps, [S].
        values: the values, [S, L]; NaN where unknown.
    """

    quantity: str
    layers: tuple[str, ...]
    depth: npt.NDArray[np.float64]
    steps: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]

    def at(self, step: float) -> tuple[int, npt.NDArray[np.float64]]:
        """Return the measured step nearest to `step`, and the values there.

        >>> from gyroscope.figures import example_run
        >>> find(example_run(steps=11), "rotation").at(4.2)[0]
        4
        """
        row = int(np.abs(self.steps - step).argmin())
        return int(self.steps[row]), self.values[row]


def as_run(run: RunLike) -> Measured:
    """Return `run` itself, or the run stored at the path `run`.

    >>> from gyroscope.figures import example_run
    >>> as_run(example_run()).name
    'example'
    """
    if isinstance(run, str | PathLike):
        from gyroscope.store import load

        return load(run)
    if not hasattr(run, "series") or not hasattr(run, "layers"):
        raise FigureError(
            f"`run` must be a run or the path of one, got a {type(run).__name__}. Try gyroscope.load(path)."
        )
    return run


def find(run: Measured, quantity: str, *, layers: Layers = None, infinite: bool = False) -> Series:
    """Return a quantity of the layers whose names match; infinite values become NaN, unless `infinite`.

    >>> from gyroscope.figures import example_run
    >>> find(example_run(layers=4), "rotation", layers="block1.*").values.shape
    (101, 2)
    """
    if not isinstance(quantity, str) or quantity not in run.quantities:
        close = get_close_matches(str(quantity), run.quantities, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise FigureError(f"{described(run)} has no {quantity}; it holds {held(run)}.{hint}")
    names = run.layers
    chosen = choose(names, layers)
    stored = run.series(quantity)
    # Copying is the expensive part for large runs.
    values = (stored if layers is None else stored[:, chosen]).astype(np.float64)
    known = ~np.isnan(values) if infinite else np.isfinite(values)
    if not known.all():
        values[~known] = np.nan
    rows = known.any(axis=1)
    if not rows.any():
        if layers is not None and bool(np.isfinite(stored).any()):
            raise FigureError(
                f"{described(run)} has no values of {quantity} for layers={layers!r}; other layers have some."
            )
        raise FigureError(f"{described(run)} has no values of {quantity} yet; it holds {held(run)}.")
    return Series(
        quantity=quantity,
        layers=tuple(names[i] for i in chosen),
        depth=np.array(chosen) / max(len(names) - 1, 1),
        steps=np.asarray(run.steps)[rows],
        values=values if rows.all() else values[rows],
    )


def holds(run: Measured, quantity: str, *, layers: Layers = None) -> bool:
    """Return whether a run has a finite value of a quantity for any of the layers whose names match.

    >>> from gyroscope.figures import example_run
    >>> holds(example_run(), "rotation"), holds(example_run(), "sharpness")
    (True, False)
    """
    if quantity not in run.quantities:
        return False
    chosen = choose(run.layers, layers)
    # A run on disk knows where it has values: usually its last ones suffice, without reading all.
    where = getattr(run, "where", None)
    if where is not None:
        steps = where(quantity)
        last: Any = run.series(quantity, steps=steps[-1:])  # type: ignore[call-arg]
        if not len(steps) or np.isfinite(last[:, chosen]).any():
            return bool(len(steps))
    return bool(np.isfinite(run.series(quantity)[:, chosen]).any())


def choose(names: Sequence[str], layers: Layers) -> list[int]:
    """Return the positions of the names that match any of the glob patterns in `layers`; all for None.

    >>> choose(["conv1.weight", "conv2.weight", "fc.weight"], "conv*")
    [0, 1]
    """
    if layers is None:
        return list(range(len(names)))
    patterns = listed(layers)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise FigureError(f"`layers` must be glob patterns on the layers' names, got {layers!r:.80}. Try 'conv*'.")
    chosen = [i for i, name in enumerate(names) if any(name == p or fnmatchcase(name, p) for p in patterns)]
    if not chosen:
        close = get_close_matches(patterns[0] if patterns else "", names, n=1, cutoff=0)
        raise FigureError(
            f"`layers` must match at least one of the {len(names)} layers, got {layers!r:.80}. One of them is "
            f"{close[0]!r}."
        )
    return chosen


def numbers(given: Any, what: str) -> npt.NDArray[np.float64]:
    """Return `given` as an array of numbers.

    >>> numbers([1, 2], "x")
    array([1., 2.])
    """
    try:
        return np.asarray(given, dtype=np.float64)
    except (
        TypeError,
        ValueError,
        OverflowError,
        RuntimeError,
    ) as error:  # RuntimeError for a tensor that requires a gradient
        raise FigureError(f"`{what}` must be an array of numbers: {error}.") from error


def flag(given: Any, what: str, default: bool = False) -> bool:
    """Return `given` as a bool; None is the default.

    >>> flag(True, "legend"), flag(None, "legend", default=True)
    (True, True)
    """
    return default if given is None else accepted.flag(given, what, FigureError)


def at_least_one(given: Any, what: str) -> int:
    """Return a whole number ≥ 1.

    >>> at_least_one(3, "columns")
    3
    """
    count = whole(given, 1)
    if count is None:
        raise FigureError(f"`{what}` must be a whole number ≥ 1, got {given!r:.80}. Try 1.")
    return count


def described(run: Measured) -> str:
    """Return the name of a run as the start of an error message.

    >>> from gyroscope.figures import example_run
    >>> described(example_run())
    "The run 'example'"
    """
    return f"The run {run.name!r}"


def held(run: Measured) -> str:
    """Return the quantities of a run, for error messages.

    >>> from gyroscope.figures import example_run
    >>> held(example_run(quantities=["rotation", "rate"]))
    'rotation, rate'
    """
    return ", ".join(run.quantities) or "nothing"
