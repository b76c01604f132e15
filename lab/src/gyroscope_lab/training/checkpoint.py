"""Checkpoints of a training: one file, complete or absent, with everything that the rest of the training depends on.

A training saves at the end of an epoch, and only as often as keeps the share of time spent on saving small (`Pace`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gyroscope.base import read_whole, require_whole
from gyroscope.monitor import Monitor
from gyroscope_lab.errors import LabError
from gyroscope_lab.training.recipe import with_options_of

if TYPE_CHECKING:
    from gyroscope_lab.training.training import Training


FILE = "checkpoint.pt"


def save(folder: Path, state: dict[str, Any]) -> None:
    """Write `state` to the folder's checkpoint; the previous one is kept until the new one is on disk.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(Path(folder), {"key": "a", "epoch": 3})
    ...     load(Path(folder), key="a")["epoch"]
    3
    """
    new = folder / f"{FILE}.new"
    try:
        with new.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(folder / FILE)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError when the disk is full
        raise LabError(f"{new} cannot be written ({error}). The previous checkpoint, if any, is kept.") from error


def load(folder: Path, *, key: str) -> dict[str, Any] | None:
    """Return the state that `save` wrote, or None if there is none; no code in the file is executed."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        state = read(path)
        found = state["key"]
    except Exception as error:
        raise LabError(
            f"{path} cannot be read ({type(error).__name__}: {error}). Delete it to train from the start."
        ) from error
    if found != key:
        raise LabError(f"{path} belongs to another trial. Delete it to train from the start.")
    return state


def epoch(folder: Path) -> int:
    """Return the number of epochs in the folder's checkpoint: 0 if there is none or it cannot be read.

    >>> epoch(Path("nowhere"))
    0
    """
    try:
        require_whole(folder / FILE)
        # Memory-mapped, so that the weights are not read.
        return int(torch.load(folder / FILE, map_location="cpu", weights_only=True, mmap=True)["epoch"])
    except Exception:
        return 0


def read(path: Path) -> dict[str, Any]:
    """Return the content of a complete file of `torch.save`; no code in the file is executed."""
    found: dict[str, Any] = read_whole(path)
    return found


def recorded(monitor: Monitor) -> None:
    """Wait until the run of a monitor is on disk: a resumed training would not write the missing part."""
    try:
        monitor.flush()
        if monitor.error is not None:
            raise monitor.error
    except Exception as error:
        raise LabError(f"The run in {monitor.path} cannot be recorded ({type(error).__name__}: {error}).") from error


@contextmanager
def resumed(folder: Path) -> Iterator[None]:
    """Name the checkpoint in the error when it cannot be resumed, for example because it is of another version.

    >>> with resumed(Path("runs/a")):
    ...     {}["epoch"]
    Traceback (most recent call last):
    gyroscope_lab.errors.LabError: runs/a/checkpoint.pt cannot be resumed (KeyError: 'epoch'). Delete it to train ...
    """
    try:
        yield
    except Exception as error:
        raise LabError(
            f"{folder / FILE} cannot be resumed ({type(error).__name__}: {error}). Delete it to train from the start."
        ) from error


def state_of(training: Training) -> dict[str, Any]:
    """Return the state of a training between two epochs, for a checkpoint."""
    best, tangents, last, monitor = training.best, training.tangents, training.last, training.monitor
    return {
        "key": training.trial.key,
        "epoch": training.epoch,
        "ended": training.ended,
        "curves": [training.loss, training.accuracy, training.validation, training.rotation, training.norms],
        "test_losses": training.test_losses,
        "test_accuracies": training.test_accuracies,
        "model": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "initial": training.gauge.initial,
        "best": None if best is None else list(best),
        "order": training.feed.generator.get_state(),
        **training.own.state(),
        "tangents": None if tangents is None else tangents.state(),
        "last": None if last is None else last.state(),
        "monitor": None if monitor is None else monitor.state_dict(),
        "seconds": training.before + time.perf_counter() - training.began,
    }


def restore(training: Training, state: dict[str, Any]) -> None:
    """Resume a training from a state of `state_of`; the monitor loads its own part later."""
    training.epoch, training.ended = state["epoch"], state["ended"]
    training.loss, training.accuracy, training.validation, training.rotation, training.norms = state["curves"]
    # Absent in checkpoints of version 0.1.
    training.test_losses, training.test_accuracies = (state.get(f"test_{one}", []) for one in ("losses", "accuracies"))
    training.model.load_state_dict(state["model"])
    training.optimizer.load_state_dict(with_options_of(training.optimizer, state["optimizer"]))
    for there, saved in zip(training.gauge.initial, state["initial"], strict=True):
        there.copy_(saved)
    if state["best"] is not None:
        score, epoch, weights = state["best"]
        training.best = (score, epoch, {name: value.to(training.device) for name, value in weights.items()})
    training.feed.generator.set_state(state["order"])
    training.own.load(state)
    if training.tangents is not None:
        training.tangents.load(state["tangents"])
    if training.last is not None:
        training.last.load(state["last"])
    training.before = state["seconds"]


# A checkpoint of a thousand layers takes two seconds; saving twice per minute would take a fifteenth of the training.
_APART = 50


class Pace:
    """When a repeated action is due: after `every` seconds, and after 50 times the duration of the last action.

    Args:
        every: seconds between actions; 0 for always due.

    Attributes:
        took: seconds that the last action took; 0 before the first.

    >>> pace = Pace(0.0)
    >>> with pace.taken():
    ...     pass
    >>> pace.due, Pace(60.0).due
    (True, False)
    """

    def __init__(self, every: float) -> None:
        self._every = self._apart = every
        self._last = time.perf_counter()
        self.took = 0.0

    @property
    def due(self) -> bool:
        """True if the action is due."""
        return time.perf_counter() - self._last >= self._apart

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Measure how long the action takes, within this context."""
        began = time.perf_counter()
        yield
        self._last = time.perf_counter()
        self.took = self._last - began
        self._apart = max(self._every, _APART * self.took) if self._every else 0.0
