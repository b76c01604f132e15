"""The stall of very deep residual networks: the loss is back at that of guessing, and the last layer cannot move.

Section 5 of the conditioning paper, and its figure 6: every residual block adds to the input x of the last linear
layer, so λmax(Σx) is large from the start, and so are the first gradients; W grows, the loss rises, and the network
escapes by making x small. Small x and large W are weight domination of the last layer: its outputs carry no
information, the loss stays at ln(classes), that of guessing, and W, whose gradient is proportional to x, hardly moves.
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

from gyroscope.diagnosis.evidence import require_run
from gyroscope.errors import MonitorError
from gyroscope.store import LayerInfo, Run

Array = npt.NDArray[np.float64]

#: The largest relative distance of the loss of guessing from ln(classes): a bias learns how frequent the classes are.
MARGIN = 0.05
#: λmax(Σx) has fallen if it is below this share of its largest value before.
FALLEN = 0.1
#: ‖W‖ is large if it is at least this many times its first value.
GROWN = 2.0
#: The number of losses, each the median of five, for which all this must hold; a stall ends when it fails for as many.
PATIENCE = 5

#: The file next to a run that holds its last layer at every step: NumPy arrays of `COLUMNS`, and others.
LAST_LAYER_FILE = "last_layer.npz"
COLUMNS = ("loss", "lambda_x", "weight_norm")
#: The most steps that such a file may hold. It is compressed, so a small file could unpack to any size.
_MOST_STEPS, _HEADER = 1 << 22, 1024
#: The default names of a recorded loss.
LOSSES = ("batch_loss", "loss")

_HOW = {
    "lambda_x": "use watch(conditioning=10)",
    "weight_norm": "watch records it by default",
    "loss": "use monitor.log(loss=loss) in the training loop, or watch(loss=criterion)",
}


@dataclass(frozen=True)
class Stall:
    """A period in which a network guesses, because the input of its last layer has become small and its weight large.

    Attributes:
        layer: the last layer's name.
        since: the first step of it.
        until: the first step after it; None if it lasts to the end.
        loss: the median loss in this period.
        guessing: ln(classes), the loss of guessing.
        lambda_x: λmax(Σx) of the last layer: its largest value before, and its median in this period.
        weight_norm: ‖W‖ of the last layer: at first, and at the end of this period.
        diverged: True if it ended because the loss was no longer finite.

    >>> print(Stall("fc.weight", 15, None, 2.3, 2.303, (1047.0, 0.012), (1.8, 28.0)))
    The network has been guessing since step 15: its loss is 2.3, and guessing has 2.3. λmax of fc.weight's input fell
    from 1.05e+03 to 0.012 while the norm of its weight grew from 1.8 to 28, so its outputs carry no information and it
    hardly moves. Normalize the input of this layer (gyroscope.layers.last_norm), or start with a smaller learning rate.
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
        when = f"has been guessing since step {self.since:,}"
        if past:
            when = f"guessed from step {self.since:,} to {self.until:,}"
        after, whose = ", after which its loss is not finite" if self.diverged else "", f"{self.layer}'s"
        return (
            f"The network {when}{after}: its loss {'was' if past else 'is'} {self.loss:.3g}, and guessing has "
            f"{self.guessing:.3g}. {self.why(whose)}"
        )

    def why(self, whose: str) -> str:
        """Return the cause and the remedy, as text about the input of `whose` layer."""
        (x, small), (w, large) = self.lambda_x, self.weight_norm
        carry, moves, was = ("carry", "moves", "is") if self.until is None else ("carried", "moved", "was")
        # A small input gives a small gradient, and an input of zero none.
        moved = f"it hardly {moves}" if small else f"its gradient {was} zero, as in a dead network"
        return (
            f"λmax of {whose} input fell from {x:.3g} to {small:.3g} while the norm of its weight grew from {w:.3g} to "
            f"{large:.3g}, so its outputs {carry} no information and {moved}. Normalize the input of this layer "
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
    """Return the stall in these series, or None: the one that lasts to the end, otherwise the longest.

    With L the running median of five losses, the network stalls where for at least `patience` losses in a row

        |L − ln(classes)| ≤ margin · ln(classes),
        λmax(Σx) ≤ fallen · max λmax(Σx) so far,   ‖W‖ ≥ grown · ‖W‖ at first.

    The stall is over when this has not held for as many. A network that has not begun to learn satisfies only the first
    of the three; one that learns satisfies at most the other two.

    Args:
        loss: cross-entropy at each step [S]; NaN if unknown. If it is infinite, or NaN to the end for longer than ever
            before, it counts as no longer finite.
        lambda_x: λmax(Σx) of the last linear layer [S]; if it is NaN, the last known value counts.
        weight_norm: ‖W‖ of the same layer [S]; if it is NaN, the last known value counts.
        classes: the number of classes.
        steps: the steps; 0, 1, 2 ... if None.
        layer: the name of the layer.
        margin: the largest relative distance of the loss from that of guessing.
        fallen: the share of its largest value that λmax(Σx) must be below.
        grown: the multiple of its first value that the norm must reach.
        patience: the number of losses for which this must hold.

    Raises:
        MonitorError: the series differ in length, there are fewer than two classes, or a bound is invalid.

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
            "`loss`, `lambda_x`, `weight_norm` and `steps` must be series of one length, got shapes "
            f"{y.shape}, {x.shape}, {w.shape} and {at.shape}."
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
    """Return all stalls in series, as in `stall`; an unknown loss is NaN, and one that was not finite is infinite.

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
    """Return the stall that lasts to the end, otherwise the longest."""
    return max(found, key=lambda one: inf if one.until is None else one.until - one.since, default=None)


def _check(**bounds: Any) -> None:
    numbers = all(isinstance(value, int | float | np.number) and 0 < value < inf for value in bounds.values())
    if not numbers or bounds["fallen"] > 1 or int(bounds["patience"]) != bounds["patience"]:
        given = ", ".join(f"{name}={value!r}" for name, value in bounds.items())
        raise MonitorError(
            "`margin` and `grown` must be finite numbers > 0, `fallen` one in (0, 1], and `patience` a whole number "
            f"≥ 1, got {given}. Try the defaults."
        )


def _counted(classes: Any) -> int:
    if not isinstance(classes, int | float | np.number) or not 2 <= classes < inf or int(classes) != classes:
        raise MonitorError(f"`classes` must be a whole number ≥ 2, got {classes!r}. Try 10.")
    return int(classes)


def _filled(values: Array) -> Array:
    """Return the series with the last known value in place of each unknown one."""
    known = np.isfinite(values)
    latest = np.maximum.accumulate(np.where(known, np.arange(len(values)), 0))
    return values[latest]


def _stretches(holds: npt.NDArray[np.bool_], patience: int, *, end: int) -> list[tuple[int, int]]:
    """Return where a condition begins and ceases to hold, each for `patience` in a row or until the `end`."""
    edges = np.flatnonzero(np.diff(holds, prepend=False, append=False)).tolist()
    found: list[tuple[int, int]] = []
    for a, b in zip(edges[::2], edges[1::2], strict=True):
        if found and a - found[-1][1] < patience:
            found[-1] = (found[-1][0], b)
        elif b - a >= patience:
            found.append((a, b))
    if found and end - found[-1][1] < patience:  # too few have followed
        found[-1] = (found[-1][0], end)
    return found


def _smooth(values: Array) -> Array:
    """Return the median of each value and up to two values on either side: a spike does not end a stall."""
    if not len(values):
        return values
    around = np.lib.stride_tricks.sliding_window_view(np.pad(values, 2, constant_values=np.nan), 5)
    found: Array = np.nanmedian(around, axis=1)
    return found


def stalled(run: Run, *, classes: int | None = None, layer: str | None = None, loss: str | None = None) -> Stall | None:
    """Return the stall of a recorded run, or None: from its loss, and λmax(Σx) and ‖W‖ of its last layer.

    If a file next to the run, `last_layer.npz`, holds all three at every step, as for the laboratory's trials with
    `follows=True`, it is read instead, unless another layer or loss is asked for.

    Args:
        run: from `gyroscope.load`, recorded with `watch(conditioning=...)` and the loss.
        classes: the number of classes; the number of outputs of the layer if None.
        layer: the name of the last layer; the last one whose λmax(Σx) is known if None.
        loss: the scalar that is the loss; "batch_loss" or "loss" if None, whichever was recorded more often.

    Raises:
        MonitorError: the run does not hold the quantities needed; the message says which, and how to record them.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder, write_example(folder) as run:
    ...     stalled(run)
    Traceback (most recent call last):
    gyroscope.errors.MonitorError: A stall shows in lambda_x, weight_norm and the loss. This run does not hold
    lambda_x (use watch(conditioning=10)) and weight_norm (watch records it by default).
    """
    return picked(stalls(run, classes=classes, layer=layer, loss=loss))


def stalls(run: Run, *, classes: int | None = None, layer: str | None = None, loss: str | None = None) -> list[Stall]:
    """Return all stalls of a recorded run, in the order of steps; see `stalled`.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder, write_example(folder) as run:
    ...     np.savez(run.path / LAST_LAYER_FILE, loss=np.ones(9), lambda_x=np.ones(9), weight_norm=np.ones(9))
    ...     stalls(run)  # its loss is not that of guessing
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
        raise MonitorError(f"A stall shows in lambda_x, weight_norm and the loss. This run does not hold {said}.")
    curve = max((run.scalars[name] for name in names), key=lambda one: len(one.steps))
    inputs, norms = run.series("lambda_x"), run.series("weight_norm")
    column = _column(run, layer, inputs)
    return of_layer(
        run.layer_table[column], run.steps, inputs[:, column], norms[:, column], curve.steps, curve.values,
        classes=classes,
    )  # fmt: skip


def of_layer(
    info: LayerInfo,
    steps: npt.NDArray[np.int64],
    inputs: npt.ArrayLike,
    norms: npt.ArrayLike,
    loss_steps: npt.NDArray[np.int64],
    loss: npt.ArrayLike,
    *,
    classes: int | None = None,
) -> list[Stall]:
    """Return all stalls that the series of the last layer show, λmax(Σx) and ‖W‖ at `steps`, with a loss at its own."""
    every = np.union1d(steps, loss_steps)
    return found_in(
        _laid_out(every, loss_steps, _finite_or_not(loss)),
        _laid_out(every, steps, inputs),
        _laid_out(every, steps, norms),
        every,
        classes=info.shape[0] if classes is None else classes,
        layer=info.name,
    )


def _last_layer(path: Path) -> tuple[Array, Array, Array, npt.NDArray[np.int64]]:
    """Return loss, λmax(Σx) and ‖W‖ of the last layer at every step, and the steps."""
    try:
        loss, inputs, norms = read_last_layer(path, COLUMNS)
    except Exception as error:  # a damaged file fails in whatever way its bytes happen to lead to
        raise MonitorError(
            f"{path} cannot be read ({error}). It must hold {', '.join(COLUMNS)} of every step; delete it to use the "
            "run's own series."
        ) from error
    return _finite_or_not(loss), inputs, norms, np.arange(1, 1 + len(loss))


def read_last_layer(path: Path, names: Sequence[str]) -> list[Array]:
    """Read arrays with one number per step, of these names, from a file of `np.savez` such as `LAST_LAYER_FILE`.

    Raises:
        Exception: there is no such file, or it holds something else.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(Path(folder, LAST_LAYER_FILE), loss=[2.3, 2.2], lambda_x=[1.0, 1.5])
    ...     read_last_layer(Path(folder, LAST_LAYER_FILE), ["loss", "lambda_x"])
    [array([2.3, 2.2]), array([1. , 1.5])]
    """
    found = []
    with ZipFile(path) as file:
        for name in names:
            entry = file.getinfo(f"{name}.npy")
            if entry.file_size > 8 * _MOST_STEPS + _HEADER:
                raise ValueError(f"{name!r} unpacks to {entry.file_size} bytes, over the limit of {_MOST_STEPS} steps")
            with file.open(entry) as packed:
                content = packed.read(entry.file_size)  # without a size it could unpack more
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
    """Return the losses with infinity for all that are not finite: NaN stands for an unknown loss."""
    y = np.asarray(losses, dtype=np.float64)
    return np.where(np.isfinite(y), y, inf)


def _column(run: Run, layer: str | None, values: npt.NDArray[np.float32]) -> int:
    if layer is None:
        known = np.flatnonzero(np.isfinite(values).any(axis=0))
        if not len(known):
            raise MonitorError("`lambda_x` of this run is finite for no layer. Check that activations were finite.")
        return int(known[-1])
    if layer not in run.layers:
        raise MonitorError(
            f"`layer` must be a layer of this run, got {layer!r}. Its last layers are {', '.join(run.layers[-3:])}."
        )
    return run.layers.index(layer)


def _laid_out(steps: npt.NDArray[np.int64], own: npt.NDArray[np.int64], values: npt.ArrayLike) -> Array:
    found = np.full(len(steps), np.nan)
    found[np.searchsorted(steps, own)] = values
    return found
