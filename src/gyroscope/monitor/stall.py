"""The stall of very deep residual networks: the loss is back at that of guessing, and the last layer cannot move.

Section 5 of the conditioning paper, and its figure 6: every residual block adds to the input x of the last linear
layer, so λmax(Σx) is large from the start, and so are the first gradients; W grows, the loss rises, and the network
escapes by making x small. Small x and large W are weight domination of the last layer: its outputs say nothing, the
loss stays at ln(classes), that of guessing, and W, whose gradient is proportional to x, hardly moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

import numpy as np
import numpy.typing as npt

from gyroscope.errors import MonitorError
from gyroscope.store import Run

Array = npt.NDArray[np.float64]

#: How far from ln(classes) the loss of guessing may be, as a share: a bias learns how frequent the classes are.
MARGIN = 0.05
#: λmax(Σx) has fallen if it is below this share of its largest value before.
FALLEN = 0.1
#: ‖W‖ is large if it is at least so many times what it was at first.
GROWN = 2.0
#: For how many losses, each the median of five, all this must hold, and for how many it must not to be over.
PATIENCE = 5

_HOW = {
    "lambda_x": "watch(conditioning=10), every so many steps",
    "weight_norm": "watch records it unless other quantities are asked for",
    "loss": "monitor.log(loss=loss) in the training loop, or watch(loss=criterion)",
}


@dataclass(frozen=True)
class Stall:
    """A time in which a network guesses, because the input of its last layer has become small and its weight large.

    Attributes:
        layer: the last layer's name.
        since: the first step of it.
        until: the first step after it; None where it lasts to the end.
        loss: the median loss in this time.
        guessing: ln(classes).
        lambda_x: λmax(Σx) of the last layer: its largest value before, and its median in this time.
        weight_norm: ‖W‖ of the last layer: at first, and at the end of this time.

    >>> print(Stall("fc.weight", 15, None, 2.3, 2.303, (1047.0, 0.012), (1.8, 28.0)))
    The network guesses since step 15: its loss is 2.3, that of guessing 2.3. λmax of fc.weight's input fell from
    1.05e+03 to 0.012 while the norm of its weight grew from 1.8 to 28, so its outputs say nothing and it hardly moves.
    Normalize the input of this layer (gyroscope.last_norm), or start with a smaller learning rate.
    """

    layer: str
    since: int
    until: int | None
    loss: float
    guessing: float
    lambda_x: tuple[float, float]
    weight_norm: tuple[float, float]

    def __str__(self) -> str:
        past = self.until is not None
        when = f"guessed from step {self.since:,} to {self.until:,}" if past else f"guesses since step {self.since:,}"
        (x, small), (w, large) = self.lambda_x, self.weight_norm
        said, moves = ("said", "moved") if past else ("say", "moves")
        return (
            f"The network {when}: its loss {'was' if past else 'is'} {self.loss:.3g}, that of guessing "
            f"{self.guessing:.3g}. λmax of {self.layer}'s input fell from {x:.3g} to {small:.3g} while the norm of its "
            f"weight grew from {w:.3g} to {large:.3g}, so its outputs {said} nothing and it hardly {moves}. Normalize "
            "the input of this layer (gyroscope.last_norm), or start with a smaller learning rate."
        )


def stall(
    loss: npt.ArrayLike,
    lambda_x: npt.ArrayLike,
    weight_norm: npt.ArrayLike,
    *,
    classes: int,
    steps: npt.ArrayLike | None = None,
    layer: str = "the last layer",
    margin: float = MARGIN,
    fallen: float = FALLEN,
    grown: float = GROWN,
    patience: int = PATIENCE,
) -> Stall | None:
    """The stall that these series show, if they do: the one that lasts to the end, or else the longest.

    It is where, with the loss L as a running median of five, for at least `patience` losses in a row

        |L − ln(classes)| ≤ margin · ln(classes),
        λmax(Σx) ≤ fallen · max λmax(Σx) so far,   ‖W‖ ≥ grown · ‖W‖ at first,

    and it is over when this has not held for as many. A network that has not begun to learn has the first of the three
    alone; one that learns in the end has the others at most.

    Args:
        loss: cross-entropy at each step [S]; NaN where it is not known.
        lambda_x: λmax(Σx) of the last linear layer [S]; where it is NaN, the last known value counts.
        weight_norm: ‖W‖ of the same layer [S], likewise.
        classes: how many there are.
        steps: when; 0, 1, 2 ... unless given.
        layer: what to call the layer.
        margin: how near to guessing the loss must be, as a share.
        fallen: the share of its largest value that λmax(Σx) must be below.
        grown: how many times its first value the norm must be.
        patience: for how many losses.

    Raises:
        MonitorError: the series are not of one length, or there are fewer than two classes.

    >>> loss = [2.4, 9.0, 30.0, 8.0] + 12 * [2.3]
    >>> stall(loss, [50.0, 100.0, 900.0, 40.0] + 12 * [0.01], [2.0, 4.0, 6.0] + 13 * [9.0], classes=10).since
    4
    >>> stall(loss, 16 * [50.0], 16 * [2.0], classes=10) is None  # it has only risen and come back
    True
    """
    y, x, w = (np.asarray(given, dtype=np.float64) for given in (loss, lambda_x, weight_norm))
    at = np.arange(len(y)) if steps is None else np.asarray(steps)
    if not y.shape == x.shape == w.shape == at.shape or y.ndim != 1:
        raise MonitorError(
            f"loss, lambda_x, weight_norm and steps have the shapes {y.shape}, {x.shape}, {w.shape} and {at.shape}; "
            "accepted are four of one length."
        )
    if int(classes) != classes or classes < 2:
        raise MonitorError(f"classes is {classes!r}; accepted is their number, 2 or more.")
    x, w, known = _filled(x), _filled(w), np.isfinite(y)
    guessing, first, peak = log(classes), float(next(iter(w[np.isfinite(w)]), np.nan)), np.fmax.accumulate(x)
    at, y, x, w, peak = at[known], y[known], x[known], w[known], peak[known]  # a loss is not known at step 0
    stalled = (np.abs(_smooth(y) - guessing) <= margin * guessing) & (x <= fallen * peak) & (w >= grown * first)
    stretches = _stretches(stalled, patience)
    if not stretches:
        return None
    a, b = max(stretches, key=lambda one: (one[1] == len(y), one[1] - one[0]))
    return Stall(
        layer,
        since=int(at[a]),
        until=None if b == len(y) else int(at[b]),
        loss=float(np.median(y[a:b])),
        guessing=guessing,
        lambda_x=(float(peak[a]), float(np.median(x[a:b]))),
        weight_norm=(first, float(w[b - 1])),
    )


def stalled(run: Run, *, classes: int | None = None, layer: str | None = None, loss: str | None = None) -> Stall | None:
    """The stall that a recorded run shows, if it does: from its loss, and λmax(Σx) and ‖W‖ of its last layer.

    Args:
        run: from `gyroscope.load`, of a training with `watch(conditioning=...)` and its loss.
        classes: how many there are; as many as the layer has outputs unless given.
        layer: the name of the last layer; the last one whose λmax(Σx) is known unless given.
        loss: the scalar that is the loss; "batch_loss" or "loss" unless given, whichever was recorded more often.

    Raises:
        MonitorError: the run does not hold what is needed; says what, and how it is recorded.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder, write_example(folder) as run:
    ...     stalled(run)
    Traceback (most recent call last):
    gyroscope.errors.MonitorError: A stall shows in lambda_x, weight_norm and the loss, and this run does not hold
    lambda_x (watch(conditioning=10), every so many steps) and weight_norm (watch records it unless ...).
    """
    names = [name for name in ((loss,) if loss else ("batch_loss", "loss")) if name in run.scalars]
    missing = [f"{name} ({_HOW[name]})" for name in ("lambda_x", "weight_norm") if name not in run.quantities]
    if not names:
        missing.append(f"{loss or 'loss'} ({_HOW['loss']})")
    if missing:
        said = " and ".join(missing)
        raise MonitorError(f"A stall shows in lambda_x, weight_norm and the loss, and this run does not hold {said}.")
    curve = max((run.scalars[name] for name in names), key=lambda one: len(one.steps))
    inputs, norms = run.series("lambda_x"), run.series("weight_norm")
    column = _column(run, layer, inputs)
    info = run.layer_table[column]
    steps = np.union1d(run.steps, curve.steps)
    return stall(
        _laid_out(steps, curve.steps, curve.values),
        _laid_out(steps, run.steps, inputs[:, column]),
        _laid_out(steps, run.steps, norms[:, column]),
        classes=info.shape[0] if classes is None else classes,
        steps=steps,
        layer=info.name,
    )


def _column(run: Run, layer: str | None, values: npt.NDArray[np.float32]) -> int:
    if layer is None:
        return int(np.flatnonzero(np.isfinite(values).any(axis=0))[-1])
    if layer not in run.layers:
        raise MonitorError(f"There is no layer {layer!r} in this run; its last ones are {', '.join(run.layers[-3:])}.")
    return run.layers.index(layer)


def _laid_out(steps: npt.NDArray[np.int64], own: npt.NDArray[np.int64], values: npt.ArrayLike) -> Array:
    found = np.full(len(steps), np.nan)
    found[np.searchsorted(steps, own)] = values
    return found


def _filled(values: Array) -> Array:
    """With the last known value wherever there is none."""
    known = np.isfinite(values)
    latest = np.maximum.accumulate(np.where(known, np.arange(len(values)), 0))
    return values[latest]


def _stretches(holds: npt.NDArray[np.bool_], patience: int) -> list[tuple[int, int]]:
    """Where it begins to hold, and to hold no more, each time for `patience` in a row."""
    edges = np.flatnonzero(np.diff(holds, prepend=False, append=False)).tolist()
    found: list[tuple[int, int]] = []
    for a, b in zip(edges[::2], edges[1::2], strict=True):
        if found and a - found[-1][1] < patience:
            found[-1] = (found[-1][0], b)
        elif b - a >= patience:
            found.append((a, b))
    if found and len(holds) - found[-1][1] < patience:  # too little has come since
        found[-1] = (found[-1][0], len(holds))
    return found


def _smooth(values: Array) -> Array:
    """The median of each value and the two before and after it, as far as there are any: spikes are no escape."""
    if not len(values):
        return values
    around = np.lib.stride_tricks.sliding_window_view(np.pad(values, 2, constant_values=np.nan), 5)
    found: Array = np.nanmedian(around, axis=1)
    return found
