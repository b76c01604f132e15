"""The stall of very deep residual networks: the loss is back at that of guessing, and the last layer cannot move.

Section 5 of the conditioning paper, and its figure 6: every residual block adds to the input x of the last linear
layer, so λmax(Σx) is large from the start, and so are the first gradients; W grows, the loss rises, and the network
escapes by making x small. Small x and large W are weight domination of the last layer: its outputs say nothing, the
loss stays at ln(classes), that of guessing, and W, whose gradient is proportional to x, hardly moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from math import inf, log
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import numpy.typing as npt

from gyroscope.diagnose.evidence import require_run
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

#: The file next to a run that holds its last layer at every step: NumPy arrays of `COLUMNS`, and others.
LAST_LAYER_FILE = "last_layer.npz"
COLUMNS = ("loss", "lambda_x", "weight_norm")
#: Steps that such a file may hold; it is compressed, so that a small one could be of any size.
_MOST_STEPS, _HEADER = 1 << 22, 1024
#: What a recorded loss is called, unless it is said.
LOSSES = ("batch_loss", "loss")

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
        diverged: whether it ended because losses were finite no more.

    >>> print(Stall("fc.weight", 15, None, 2.3, 2.303, (1047.0, 0.012), (1.8, 28.0)))
    The network guesses since step 15: its loss is 2.3, that of guessing 2.3. λmax of fc.weight's input fell from
    1.05e+03 to 0.012 while the norm of its weight grew from 1.8 to 28, so its outputs say nothing and it hardly moves.
    Normalize the input of this layer (gyroscope.layers.last_norm), or start with a smaller learning rate.
    """

    layer: str
    since: int
    until: int | None
    loss: float
    guessing: float
    lambda_x: tuple[float, float]
    weight_norm: tuple[float, float]
    diverged: bool = False

    def __str__(self) -> str:
        past = self.until is not None
        when = f"guessed from step {self.since:,} to {self.until:,}" if past else f"guesses since step {self.since:,}"
        after, whose = ", from where on its loss is not finite" if self.diverged else "", f"{self.layer}'s"
        return (
            f"The network {when}{after}: its loss {'was' if past else 'is'} {self.loss:.3g}, that of guessing "
            f"{self.guessing:.3g}. {self.why(whose)}"
        )

    def why(self, whose: str) -> str:
        """What became of the layer, and what helps; `whose` input it is."""
        (x, small), (w, large) = self.lambda_x, self.weight_norm
        said, moves, was = ("say", "moves", "is") if self.until is None else ("said", "moved", "was")
        # Where there is a small input there is a small gradient, and none where there is none.
        moved = f"it hardly {moves}" if small else f"its gradient {was} zero, as those of dead networks are"
        return (
            f"λmax of {whose} input fell from {x:.3g} to {small:.3g} while the norm of its weight grew from {w:.3g} to "
            f"{large:.3g}, so its outputs {said} nothing and {moved}. Normalize the input of this layer "
            "(gyroscope.layers.last_norm), or start with a smaller learning rate."
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
        loss: cross-entropy at each step [S]; NaN where it is not known, but where NaN follow to the end for longer than
            ever before, as well as where it is infinite, it is taken to be finite no more.
        lambda_x: λmax(Σx) of the last linear layer [S]; where it is NaN, the last known value counts.
        weight_norm: ‖W‖ of the same layer [S]; where it is NaN, the last known value counts.
        classes: how many there are.
        steps: when; 0, 1, 2 ... unless given.
        layer: what to call the layer.
        margin: how near to guessing the loss must be, as a share.
        fallen: the share of its largest value that λmax(Σx) must be below.
        grown: how many times its first value the norm must be.
        patience: for how many losses.

    Raises:
        MonitorError: the series are not of one length, there are fewer than two classes, or a bound means nothing.

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
    _check(margin=margin, fallen=fallen, grown=grown, patience=patience)
    known = np.flatnonzero(np.isfinite(y))
    if len(known) > 1 and len(y) - 1 - known[-1] > np.diff(known).max():
        y = np.where(np.arange(len(y)) > known[-1], inf, y)
    return picked(found_in(y, x, w, at, classes=classes, layer=layer, bounds=(margin, fallen, grown, patience)))


def found_in(
    loss: Array,
    lambda_x: Array,
    weight_norm: Array,
    steps: npt.NDArray[np.int64],
    *,
    classes: int,
    layer: str,
    bounds: tuple[float, float, float, int] = (MARGIN, FALLEN, GROWN, PATIENCE),
) -> list[Stall]:
    """All stalls in series, as in `stall`; a loss that is not known is NaN, and one that was not finite infinite.

    >>> loss, steps = np.array(2 * (3 * [9.0] + 9 * [2.3])), np.arange(24)
    >>> x, w = np.array([90.0] + 23 * [0.1]), np.array([1.0] + 23 * [4.0])
    >>> found = found_in(loss, x, w, steps, classes=10, layer="fc", bounds=(0.05, 0.1, 2.0, 3))
    >>> [(one.since, one.until) for one in found]
    [(3, 12), (15, None)]
    """
    guessing, (margin, fallen, grown, patience) = log(_counted(classes)), bounds
    x, w, known = _filled(lambda_x), _filled(weight_norm), ~np.isnan(loss)
    first, peak = float(next(iter(w[np.isfinite(w)]), np.nan)), np.fmax.accumulate(x)
    at, y, x, w, peak = steps[known], loss[known], x[known], w[known], peak[known]  # a loss is not known at step 0
    stalled = (np.abs(_smooth(y) - guessing) <= margin * guessing) & (x <= fallen * peak) & (w >= grown * first)
    end = 1 + max(np.flatnonzero(np.isfinite(y)).tolist(), default=-1)
    return [
        Stall(
            layer,
            since=int(at[a]),
            until=None if b == len(y) else int(at[b]),
            loss=float(np.median(y[a:b])),
            guessing=guessing,
            lambda_x=(float(peak[a]), float(np.median(x[a:b]))),
            weight_norm=(first, float(w[b - 1])),
            diverged=b < len(y) and not bool(np.isfinite(y[b])),
        )
        for a, b in _stretches(stalled, patience, end=end)
    ]


def picked(found: Sequence[Stall]) -> Stall | None:
    """The one that lasts to the end, or else the longest."""
    return max(found, key=lambda one: inf if one.until is None else one.until - one.since, default=None)


def _check(**bounds: Any) -> None:
    numbers = all(isinstance(value, int | float | np.number) and 0 < value < inf for value in bounds.values())
    if not numbers or bounds["fallen"] > 1 or int(bounds["patience"]) != bounds["patience"]:
        given = ", ".join(f"{name}={value!r}" for name, value in bounds.items())
        raise MonitorError(
            f"{given} were given; accepted are a margin above 0, a share of 1 or less that λmax(Σx) has fallen to, a "
            "factor above 0 that ‖W‖ has grown by, and a patience of 1 or more losses."
        )


def _counted(classes: Any) -> int:
    if not isinstance(classes, int | float | np.number) or not 2 <= classes < inf or int(classes) != classes:
        raise MonitorError(f"classes is {classes!r}; accepted is their number, 2 or more.")
    return int(classes)


def _filled(values: Array) -> Array:
    """With the last known value wherever there is none."""
    known = np.isfinite(values)
    latest = np.maximum.accumulate(np.where(known, np.arange(len(values)), 0))
    return values[latest]


def _stretches(holds: npt.NDArray[np.bool_], patience: int, *, end: int) -> list[tuple[int, int]]:
    """Where it begins to hold, and to hold no more, each time for `patience` in a row or at the `end` of all."""
    edges = np.flatnonzero(np.diff(holds, prepend=False, append=False)).tolist()
    found: list[tuple[int, int]] = []
    for a, b in zip(edges[::2], edges[1::2], strict=True):
        if found and a - found[-1][1] < patience:
            found[-1] = (found[-1][0], b)
        elif b - a >= patience:
            found.append((a, b))
    if found and end - found[-1][1] < patience:  # too little has come since
        found[-1] = (found[-1][0], end)
    return found


def _smooth(values: Array) -> Array:
    """The median of each value and the two before and after it, as far as there are any: spikes are no escape."""
    if not len(values):
        return values
    around = np.lib.stride_tricks.sliding_window_view(np.pad(values, 2, constant_values=np.nan), 5)
    found: Array = np.nanmedian(around, axis=1)
    return found


def stalled(run: Run, *, classes: int | None = None, layer: str | None = None, loss: str | None = None) -> Stall | None:
    """The stall that a recorded run shows, if it does: from its loss, and λmax(Σx) and ‖W‖ of its last layer.

    Where all three were kept at every step in a file beside the run, `last_layer.npz`, as the laboratory's trials with
    `follows=True` do, that is what is read, unless another layer or loss is asked for.

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
    return picked(stalls(run, classes=classes, layer=layer, loss=loss))


def stalls(run: Run, *, classes: int | None = None, layer: str | None = None, loss: str | None = None) -> list[Stall]:
    """All stalls of a recorded run, in the order of steps; see `stalled`.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder, write_example(folder) as run:
    ...     np.savez(run.path / LAST_LAYER_FILE, loss=np.ones(9), lambda_x=np.ones(9), weight_norm=np.ones(9))
    ...     stalls(run)  # its loss is no guess
    []
    """
    require_run(run)
    last = next((info for info in reversed(run.layer_table) if info.kind == "linear"), None)
    if last is not None and loss is None and layer in (None, last.name) and (run.path / LAST_LAYER_FILE).exists():
        count = last.shape[0] if classes is None else classes
        return found_in(*_last_layer(run.path / LAST_LAYER_FILE), classes=count, layer=last.name)
    names = [name for name in ((loss,) if loss else LOSSES) if name in run.scalars]
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
    return found_in(
        _laid_out(steps, curve.steps, _finite_or_not(curve.values)),
        _laid_out(steps, run.steps, inputs[:, column]),
        _laid_out(steps, run.steps, norms[:, column]),
        steps,
        classes=info.shape[0] if classes is None else classes,
        layer=info.name,
    )


def _last_layer(path: Path) -> tuple[Array, Array, Array, npt.NDArray[np.int64]]:
    """Loss, λmax(Σx) and ‖W‖ of the last layer at every step, and the steps."""
    try:
        loss, inputs, norms = read_last_layer(path, COLUMNS)
    except Exception as error:  # a damaged file fails in whatever way its bytes happen to lead to
        said = f"accepted are {', '.join(COLUMNS)} of every step; delete it to have the run read instead"
        raise MonitorError(f"{path} cannot be read ({error}): {said}.") from error
    return _finite_or_not(loss), inputs, norms, np.arange(1, 1 + len(loss))


def read_last_layer(path: Path, names: Sequence[str]) -> list[Array]:
    """Read arrays with one number per step, of these names, from a file of `np.savez` such as `LAST_LAYER_FILE`.

    Raises:
        Exception: there is no such file, or it holds something else.
    """
    found = []
    with ZipFile(path) as file:
        for name in names:
            entry = file.getinfo(f"{name}.npy")
            if entry.file_size > 8 * _MOST_STEPS + _HEADER:
                raise ValueError(f"{name!r} unpacks to {entry.file_size} bytes, and {_MOST_STEPS} steps are accepted")
            with file.open(entry) as packed:
                content = packed.read(entry.file_size)  # never unpacks more; without a number it would
            with BytesIO(content) as opened:
                version = np.lib.format.read_magic(opened)
                if version != (1, 0):
                    raise ValueError(f"{name!r} has the format {version}")
                shape, _, dtype = np.lib.format.read_array_header_1_0(opened)
                at = opened.tell()
            if len(shape) != 1 or dtype.kind not in "fiu" or at + shape[0] * dtype.itemsize != len(content):
                raise ValueError(f"{name!r} holds {dtype} of shape {shape} in {len(content)} bytes")
            found.append(np.frombuffer(content, dtype, offset=at).astype(np.float64))
    if len({len(one) for one in found}) > 1:
        raise ValueError(f"their lengths are {', '.join(str(len(one)) for one in found)}")
    return found


def _finite_or_not(losses: npt.ArrayLike) -> Array:
    """With infinity for all that is not finite: NaN is kept for what is not known."""
    y = np.asarray(losses, dtype=np.float64)
    return np.where(np.isfinite(y), y, inf)


def _column(run: Run, layer: str | None, values: npt.NDArray[np.float32]) -> int:
    if layer is None:
        known = np.flatnonzero(np.isfinite(values).any(axis=0))
        if not len(known):
            raise MonitorError("This run holds lambda_x, but it is finite for no layer; was it in all of its analyses?")
        return int(known[-1])
    if layer not in run.layers:
        raise MonitorError(f"There is no layer {layer!r} in this run; its last ones are {', '.join(run.layers[-3:])}.")
    return run.layers.index(layer)


def _laid_out(steps: npt.NDArray[np.int64], own: npt.NDArray[np.int64], values: npt.ArrayLike) -> Array:
    found = np.full(len(steps), np.nan)
    found[np.searchsorted(steps, own)] = values
    return found
