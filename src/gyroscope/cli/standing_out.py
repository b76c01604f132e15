"""What stands out in a run, in words that follow from its numbers alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from gyroscope.errors import MonitorError
from gyroscope.monitor import dominated, stalled
from gyroscope.store import Run

#: A layer that has rotated less than this is still about where it started: 2.6 degrees.
STILL = 0.001
#: Rotation of less than this is rounding.
NOTHING = 1e-6
#: Layers differ if the most rotated has this many times the rotation of the least rotated.
UNEQUAL = 2.0
#: The fraction of dying or full neurons that is worth a sentence.
MANY_NEURONS = 0.5

Values = npt.NDArray[np.float64]


def last_values(values: npt.ArrayLike) -> Values:
    """Return the last known value of each column of `values` [steps, layers]; NaN if it has none.

    >>> last_values([[1.0, np.nan], [2.0, np.nan], [np.nan, np.nan]]).tolist()
    [2.0, nan]
    """
    y = np.asarray(values, dtype=float)
    if not len(y):
        return np.full(y.shape[1], np.nan)
    rows = len(y) - 1 - np.isfinite(y[::-1]).argmax(axis=0)
    return np.where(np.isfinite(y).any(axis=0), np.take_along_axis(y, rows[None], axis=0)[0], np.nan)


def in_words(run: Run) -> str:
    """Return how far the layers have rotated, the most remarkable thing beside that, and whether it had stalled.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder, write_example(folder) as run:
    ...     print(in_words(run))
    At step 40 the layers have rotated by 0.4 (conv1.weight) to 0.8 (head.weight), 0.6 on average. They rotate
    unequally: the most rotated layer is at twice the rotation of the least rotated one.
    """
    if not len(run.steps):
        return "Nothing has been measured yet."
    if "rotation" not in run.quantities:
        return f"Rotation was not measured; the run holds {', '.join(run.quantities)}."
    rotation = last_values(run.series("rotation"))
    known = np.flatnonzero(np.isfinite(rotation))
    if not len(known):
        return "The rotation of no layer is known: are all weights finite, and none of them zero?"
    first = _rotated(run, rotation, known)
    now, past = _stalled(run)
    second = now or _no_gradient(run) or _unknown(run, rotation)
    second = second or _dominated(run) or _still(run, rotation) or _neurons(run)
    if not second and not past:
        second = _spread(rotation[known])
    return " ".join(said for said in (first, second, past) if said)


def _rotated(run: Run, rotation: Values, known: npt.NDArray[np.int64]) -> str:
    step = int(run.steps[-1])
    if len(known) == 1:
        return f"At step {step:,} {run.layers[known[0]]} has rotated by {rotation[known[0]]:.3g}."
    least, most = known[rotation[known].argmin()], known[rotation[known].argmax()]
    if rotation[most] < NOTHING:
        return f"At step {step:,} no layer has rotated."
    return (
        f"At step {step:,} the layers have rotated by {rotation[least]:.3g} ({run.layers[least]}) "
        f"to {rotation[most]:.3g} ({run.layers[most]}), {rotation[known].mean():.3g} on average."
    )


def _stalled(run: Run) -> tuple[str, str]:
    """A stall that lasts, and one that is over."""
    with suppress(MonitorError):  # what shows it was not recorded
        found = stalled(run)
        if found is not None:
            return ("", str(found)) if found.until is not None else (str(found), "")
    return "", ""


def _dominated(run: Run) -> str:
    with suppress(MonitorError):
        now = [one for one in dominated(run) if one.until is None]
        if len(now) == 1:
            return str(now[0])
        which = np.isin(run.layers, [one.layer for one in now])
        since = f"since step {min((one.since for one in now), default=0):,}"
        return _said(run, which, "", f"are dominated by their weights, the first {since}: they hardly move")
    return ""


def _no_gradient(run: Run) -> str:
    if "gradient_norm" not in run.quantities:
        return ""
    none = last_values(run.series("gradient_norm")) == 0
    return _said(run, none, "has no gradient: it does not learn", "have no gradient: they do not learn")


def _unknown(run: Run, rotation: Values) -> str:
    unknown = np.isnan(rotation)
    return _said(run, unknown, "has no rotation: it is zero or not finite", "have no rotation: zero or not finite")


def _still(run: Run, rotation: Values) -> str:
    if np.nanmax(rotation) < 10 * STILL:  # it is early
        return ""
    return _said(run, rotation < STILL, "is still where it started", "are still where they started")


def _neurons(run: Run) -> str:
    for name, when in (("dying", "never"), ("full", "always")):
        if name in run.quantities:
            many = last_values(run.series(name)) > MANY_NEURONS
            says = f"more than half of {{}} neurons {when} active"
            sentence = _said(run, many, f"has {says.format('its')}", f"have {says.format('their')}")
            if sentence:
                return sentence
    return ""


def _said(run: Run, which: npt.NDArray[np.bool_], one: str, several: str) -> str:
    layers = run.layers
    names = [layers[i] for i in np.flatnonzero(which)]
    if len(names) < 2:
        return f"{names[0]} {one}." if names else ""
    if len(names) == len(layers):
        return f"All {len(names):,} layers {several}."
    return f"{len(names):,} layers ({_listed(names)}) {several}."


def _listed(names: Sequence[str]) -> str:
    if len(names) <= 3:
        return ", ".join(names)
    return f"{names[0]}, {names[1]}, … {names[-1]}"


def _spread(rotation: Values) -> str:
    least, most = float(rotation.min()), float(rotation.max())
    if len(rotation) < 2 or least <= 0:
        return ""
    how = "alike" if most / least < UNEQUAL else "unequally"
    times = "twice" if round(most / least, 1) == 2 else f"{most / least:.2g} times"
    return f"They rotate {how}: the most rotated layer is at {times} the rotation of the least rotated one."
