"""A summary of a run in a few sentences: how far its layers have rotated, and what stands out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from gyroscope.diagnosis import diagnose, dominated, stalled
from gyroscope.diagnosis.rules import told
from gyroscope.errors import MonitorError
from gyroscope.store import Run

#: A layer that has rotated less than this has hardly rotated: 2.6 degrees.
STILL = 0.001
#: A layer that turns by less than this per step, in radians, and has hardly rotated is still where it started.
SLOW = 1e-4
#: Rotation of less than this is rounding.
NOTHING = 1e-6
#: Layers differ if the most rotated has this many times the rotation of the least rotated.
UNEQUAL = 2.0
#: The fraction of dying or full neurons that is worth a sentence.
MANY_NEURONS = 0.5

#: A norm this many times the first one has blown up; angles to where it started say nothing then.
BLOWN_UP = 1e6

Values = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_NEITHER = "have no rotation: zero or not finite"
# Alarms that a summary states, and those that it has sentences of its own for.
_ALARMS = 2
_SAID_HERE = {"stalled", "dominated"}


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
    """Return how far the layers have rotated, the most notable other finding, and a past stall if there was one.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder, write_example(folder) as run:
    ...     print(in_words(run))
    At step 40 the layers have rotated by 0.4 (conv1.weight) to 0.8 (head.weight), 0.6 on average. They rotate
    unequally: the most rotated layer has twice the rotation of the least rotated one.
    """
    if not len(run.steps):
        return "Nothing has been measured yet."
    if "rotation" not in run.quantities:
        return f"Rotation was not measured; the run holds {', '.join(run.quantities)}."
    lost = lost_at(run)
    everything = bool((lost < len(run.steps)).all())
    end = int(lost.min()) if everything else len(run.steps)
    apart, grown = blown_up(run, end)
    if not everything:
        apart = apart | (lost < len(run.steps))
    series = run.series("rotation")[:end]
    rotation = np.where(apart, np.nan, last_values(series))
    known = np.flatnonzero(np.isfinite(rotation))
    before = [said_lost(run, lost), grown]
    now, past = _stalled(run)
    if len(known):
        step = int(run.steps[np.flatnonzero(np.isfinite(series).any(axis=1))[-1]])
        before.append(_rotated(run, rotation, known, f"At step {step:,}", "other " if apart.any() else ""))
    elif not any(before):
        return "No layer has a known rotation. Check that all weights are finite and not zero."
    alarms = _alarms(run, said=before)
    second = ""
    if not everything:  # of a step before the last one nothing else is known
        second = now or _no_gradient(run, apart) or _unknown(run, np.isnan(rotation) & ~apart) or _dominated(run, apart)
        second = second or alarms or _still(run, rotation) or _neurons(run, apart)
    if not second and not past:
        second = alarms or _spread(rotation[known])
    if alarms and second != alarms:
        second = f"{alarms} {second}".strip()
    return " ".join(said for said in (*before, second, past) if said)


def _alarms(run: Run, *, said: Sequence[str]) -> str:
    """Return the first alarms of the diagnosis, without what was said already."""
    known = {kind for kind, sentence in zip(("not_finite", "too_fast"), said, strict=False) if sentence}
    alarms = [one for one in diagnose(run).alarms if one.kind not in known | _SAID_HERE]
    return " ".join(one.sentence for one in alarms[:_ALARMS])


def _rotated(run: Run, rotation: Values, known: npt.NDArray[np.int64], at: str, other: str) -> str:
    if len(known) == 1:
        return f"{at} {run.layers[known[0]]} has rotated by {rotation[known[0]]:.3g}."
    least, most = known[rotation[known].argmin()], known[rotation[known].argmax()]
    if rotation[most] < NOTHING:
        return f"{at} no {other}layer has rotated."
    return (
        f"{at} the {other}layers have rotated by {rotation[least]:.3g} ({run.layers[least]}) "
        f"to {rotation[most]:.3g} ({run.layers[most]}), {rotation[known].mean():.3g} on average."
    )


def _stalled(run: Run) -> tuple[str, str]:
    """Return the text of a stall that lasts, and of one that is over."""
    with suppress(MonitorError):  # its evidence was not recorded
        found = stalled(run)
        if found is not None:
            return ("", str(found)) if found.until is not None else (str(found), "")
    return "", ""


def _dominated(run: Run, apart: Mask) -> str:
    with suppress(MonitorError):
        now = [one for one in dominated(run) if one.until is None and not apart[run.layers.index(one.layer)]]
        if len(now) == 1:
            return str(now[0])
        which = np.isin(run.layers, [one.layer for one in now])
        since = f"since step {min((one.since for one in now), default=0):,}"
        return _said(run, which, "", f"are dominated by their weights, the first one {since}, and hardly move")
    return ""


def _no_gradient(run: Run, apart: Mask) -> str:
    if "gradient_norm" not in run.quantities:
        return ""
    none = (last_values(run.series("gradient_norm")) == 0) & ~apart
    return _said(run, none, "has no gradient: it does not learn", "have no gradient: they do not learn")


def _unknown(run: Run, unknown: Mask) -> str:
    norm = last_values(run.series("weight_norm")) if "weight_norm" in run.quantities else np.zeros(len(unknown))
    begins = unknown & (norm > 0)  # they have a direction now, so it is their initial weights that have none
    zero = "measured against weights that are zero"
    said = (
        _said(run, begins, f"has no rotation: it is {zero}", f"have no rotation: they are {zero}"),
        _said(run, unknown & ~begins, "has no rotation: it is zero or not finite", _NEITHER),
    )
    return " ".join(filter(None, said))


def _still(run: Run, rotation: Values) -> str:
    if not (rotation >= 10 * STILL).any():  # too early to tell
        return ""
    moving = rotation >= NOTHING
    if "rate_per_step" in run.quantities:
        rate = last_values(run.series("rate_per_step"))
        moving = np.where(np.isnan(rate), moving, rate >= SLOW)
    hardly = rotation < STILL
    still = _said(run, hardly & ~moving, "is still where it started", "are still where they started")
    slow = _said(run, hardly & moving, "has hardly rotated", "have hardly rotated")
    return " ".join(said for said in (still, slow) if said)


def _neurons(run: Run, apart: Mask) -> str:
    # The last layer outputs logits, whose sign means no activity.
    hidden = np.arange(len(run.layers)) < len(run.layers) - 1
    for name, when in (("dying", "never"), ("full", "always")):
        if name in run.quantities:
            series = run.series(name)
            many = (last_values(series) > MANY_NEURONS) & ~apart & hidden
            known = run.steps[np.isfinite(series).any(axis=1)]
            at = f", as of step {known[-1]:,}" if len(known) and known[-1] < run.steps[-1] else ""
            says = f"more than half of {{}} neurons {when} active{at}"
            sentence = _said(run, many, f"has {says.format('its')}", f"have {says.format('their')}")
            if sentence:
                return sentence
    return ""


def _said(run: Run, which: Mask, one: str, several: str) -> str:
    who = named(run.layers, which, starts=True)
    return f"{who} {one if which.sum() == 1 else several}." if who else ""


def _spread(rotation: Values) -> str:
    if len(rotation) < 2 or rotation.min() <= 0:
        return ""
    least, most = float(rotation.min()), float(rotation.max())
    how = "similarly" if most / least < UNEQUAL else "unequally"
    times = "twice" if round(most / least, 1) == 2 else f"{most / least:.2g} times"
    return f"They rotate {how}: the most rotated layer has {times} the rotation of the least rotated one."


# Weights and losses that are not finite, and weights that soon will not be: reported before anything else.


def lost_at(run: Run) -> Places:
    """Return the row from which on each layer's weights are not finite; `len(run.steps)` if they are finite at the end.

    Rows in which a layer was not measured, such as another optimizer's steps, do not count. The learning rate is known
    whatever the weights are, so it tells the two apart. A layer that was never finite is not counted.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder, write_example(folder) as run:
    ...     lost_at(run) == len(run.steps)
    array([ True,  True,  True])
    """
    shows = [name for name in ("weight_norm", "rotation") if name in run.quantities]
    if not shows:
        return np.full(len(run.layers), len(run.steps))
    norm = run.series(shows[0])
    measured = np.ones(norm.shape, dtype=bool)
    if "lr" in run.quantities:
        rated = np.isfinite(run.series("lr"))
        measured = rated | ~rated.any(axis=0)
    finite = np.isfinite(norm)
    rows = np.arange(len(norm))[:, None]
    last = np.where(finite, rows, -1).max(axis=0, initial=-1)
    lost = measured & ~finite & (rows > last)
    return np.where(lost.any(axis=0) & (last >= 0), lost.argmax(axis=0) if len(norm) else 0, len(norm))


def said_lost(run: Run, lost: Places) -> str:
    """Return which weights are not finite from which step on, and which loss is not; "" if all are finite."""
    loss, since = _lost_loss(run)
    ever = lost < len(run.steps)
    if not ever.any():
        return f"From step {since:,} on, {loss} is not finite." if loss else ""
    first, final = int(lost.min()), int(lost[ever].max())
    step = int(run.steps[first])
    what = "not finite" if "weight_norm" in run.quantities else "zero or not finite"
    sentence = f"From step {step:,} on, the weights of {named(run.layers, lost == first)} are {what}"
    if final > first:
        sentence += f", and from step {int(run.steps[final]):,} on those of {named(run.layers, ever)}"
    if loss:
        together = since == step and final == first
        sentence += f"; {loss} is not finite either" if together else f"; {loss} is not finite from step {since:,} on"
    if ever.all():
        sentence += f". The rest is about step {int(run.steps[first - 1]):,}"
    return f"{sentence}."


def blown_up(run: Run, end: int) -> tuple[Mask, str]:
    """Return the layers whose norms are over a million times the first ones before row `end`, and that in words."""
    none = np.zeros(len(run.layers), dtype=bool)
    if "weight_norm" not in run.quantities or not end:
        return none, ""
    norm = np.asarray(run.series("weight_norm")[:end], dtype=float)
    finite = np.isfinite(norm)
    columns = np.arange(norm.shape[1])
    first, last = norm[finite.argmax(axis=0), columns], norm[end - 1 - finite[::-1].argmax(axis=0), columns]
    grown = np.divide(last, first, out=np.zeros_like(last), where=finite.any(axis=0) & (first > 0))
    which = grown > BLOWN_UP
    if not which.any():
        return none, ""
    most = int(grown.argmax())
    times = f"{grown[most]:.2g} times"
    if which.sum() == 1:
        return which, f"{run.layers[most]} has blown up: its norm is {times} the first one."
    who = named(run.layers, which, starts=True)
    return which, f"{who} have blown up: the norm of {run.layers[most]} is {times} the first one."


def named(layers: Sequence[str], which: Mask, *, starts: bool = False) -> str:
    """Return the layers in words: one by its name, several with some of their names, or all of them.

    Args:
        layers: the names of all layers.
        which: the layers to name.
        starts: True at the beginning of a sentence.

    >>> named(["a", "b", "c"], np.array([True, False, True])), named(["a", "b"], np.array([True, True]))
    ('2 layers (a, c)', 'all 2 layers')
    """
    names = [layers[i] for i in np.flatnonzero(which).tolist()]
    if 1 < len(names) == len(layers):
        return f"{'All' if starts else 'all'} {len(names):,} layers"
    return told(names) if names else ""


def _lost_loss(run: Run) -> tuple[str, int]:
    """Return the first loss that is not finite at the end, and the step from which on it is not."""
    for name, curve in run.scalars.items():
        if "loss" not in name.lower() or not len(curve.values) or np.isfinite(curve.values[-1]):
            continue
        known = np.flatnonzero(np.isfinite(curve.values))
        return f"the {name}", int(curve.steps[known[-1] + 1 if len(known) else 0])
    return "", 0
