"""The stall of a very deep network, recognized from a recorded run."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from math import inf
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import numpy.typing as npt

from gyroscope.diagnose.scale_invariance import require_run
from gyroscope.diagnose.stall import Array, Stall, found_in, picked
from gyroscope.errors import MonitorError
from gyroscope.store import Run

#: A file beside a run, with the last layer at every step: NumPy's arrays of these names among others.
FILE = "last_layer.npz"
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
    ...     np.savez(run.path / FILE, loss=np.ones(9), lambda_x=np.ones(9), weight_norm=np.ones(9))
    ...     stalls(run)  # its loss is no guess
    []
    """
    require_run(run)
    last = next((info for info in reversed(run.layer_table) if info.kind == "linear"), None)
    if last is not None and loss is None and layer in (None, last.name) and (run.path / FILE).exists():
        count = last.shape[0] if classes is None else classes
        return found_in(*_read(run.path / FILE), classes=count, layer=last.name)
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


def _read(path: Path) -> tuple[Array, Array, Array, npt.NDArray[np.int64]]:
    """Loss, λmax(Σx) and ‖W‖ of the last layer at every step, and the steps."""
    try:
        loss, inputs, norms = read_columns(path, COLUMNS)
    except Exception as error:  # a damaged file fails in whatever way its bytes happen to lead to
        said = f"accepted are {', '.join(COLUMNS)} of every step; delete it to have the run read instead"
        raise MonitorError(f"{path} cannot be read ({error}): {said}.") from error
    return _finite_or_not(loss), inputs, norms, np.arange(1, 1 + len(loss))


def read_columns(path: Path, names: Sequence[str]) -> list[Array]:
    """Arrays of one number per step from a file of `np.savez`.

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
