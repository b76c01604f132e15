"""Weights and losses that are finite no more, and weights about to be: said before anything else of a run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gyroscope.store import Run

#: A norm this many times the first one has blown up; angles to where it started say nothing then.
BLOWN_UP = 1e6

Places = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def lost_at(run: Run) -> Places:
    """Return the row from which on each layer's weights are not finite; `len(run.steps)` if they are at the end.

    Rows in which a layer was not measured say nothing: another optimizer's steps, for one. A learning rate is known
    whatever the weights are, so that it tells the two apart. A layer that never was finite is not counted.

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
    """Return which weights are not finite from which step on, and whether a loss is not; nothing if all are finite."""
    loss, since = _lost_loss(run)
    ever = lost < len(run.steps)
    if not ever.any():
        return f"From step {since:,} on {loss} is not finite." if loss else ""
    first, final = int(lost.min()), int(lost[ever].max())
    step = int(run.steps[first])
    what = "not finite" if "weight_norm" in run.quantities else "zero or not finite"
    sentence = f"From step {step:,} on the weights of {named(run.layers, lost == first)} are {what}"
    if final > first:
        sentence += f", from step {int(run.steps[final]):,} on those of {named(run.layers, ever)}"
    if loss:
        sentence += (
            f", nor is {loss}" if since == step and final == first else f"; {loss} is not from step {since:,} on"
        )
    if ever.all():
        sentence += f"; what follows is of step {int(run.steps[first - 1]):,}"
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
    """Return the layers that are meant: one by its name, several with some of their names, or all of them.

    `starts` is for the beginning of a sentence.

    >>> named(["a", "b", "c"], np.array([True, False, True])), named(["a", "b"], np.array([True, True]))
    ('2 layers (a, c)', 'all 2 layers')
    """
    names = [layers[i] for i in np.flatnonzero(which).tolist()]
    if len(names) < 2:
        return "".join(names)
    if len(names) == len(layers):
        return f"{'All' if starts else 'all'} {len(names):,} layers"
    some = ", ".join(names) if len(names) <= 3 else f"{names[0]}, {names[1]}, … {names[-1]}"
    return f"{len(names):,} layers ({some})"


def _lost_loss(run: Run) -> tuple[str, int]:
    """The first loss that ends without being finite, and the step from which on it is not."""
    for name, curve in run.scalars.items():
        if "loss" not in name.lower() or not len(curve.values) or np.isfinite(curve.values[-1]):
            continue
        known = np.flatnonzero(np.isfinite(curve.values))
        return f"the {name}", int(curve.steps[known[-1] + 1 if len(known) else 0])
    return "", 0
