"""The line of progress of a training loop: tqdm's, with what the monitor has recorded so far."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from gyroscope.errors import MissingExtraError, MonitorError

if TYPE_CHECKING:
    from gyroscope.monitor.monitor import Monitor
    from gyroscope.store.writer import Latest

T = TypeVar("T")
# Seconds between two drawings of the line.
_EVERY = 0.25


def progress(iterable: Iterable[T], monitor: Monitor, **options: Any) -> Iterable[T]:
    """Return a tqdm over `iterable` that shows the state of the monitor's run; see `Monitor.progress`.

    What is shown is in host memory already, written there by the writer's thread: nothing waits for a device or a disk.
    """
    tqdm = _tqdm()
    # Not by calling iter(), with which a data loader starts its workers and draws a random number.
    if not hasattr(iterable, "__iter__") and not hasattr(iterable, "__getitem__"):
        raise MonitorError(
            f"`iterable` must be something to loop over, got a {type(iterable).__name__}. Try your data loader."
        )

    class Line(tqdm):  # type: ignore[misc, valid-type]
        """A tqdm that asks for the numbers whenever it is drawn, which it decides itself."""

        @property
        def format_dict(self) -> dict[str, Any]:
            """The parts of the line."""
            found: dict[str, Any] = super().format_dict
            return {**found, "postfix": ", ".join(filter(None, [_state(monitor), found["postfix"]]))}

    writes = monitor._chronicle.about.writes  # one line per run: other ranks record nothing
    line: Iterable[T] = Line(iterable, **{"mininterval": _EVERY, "disable": not writes, **options})
    return line


def _state(monitor: Monitor) -> str:
    step, recorder = f"step {monitor.steps:,}", monitor._chronicle.recorder
    if recorder is None:  # a run that is resumed begins with its first step
        return step
    stopped = monitor.error is not None or recorder.writer.error is not None
    return ", ".join([step, *(["recording has stopped"] if stopped else said(recorder.writer.latest))])


def said(latest: Latest) -> list[str]:
    """Return the newest of a run in a few words.

    >>> from gyroscope.store.writer import Latest
    >>> said(Latest({"loss": 0.31234, "accuracy": 0.9}, {}, {"finding": 2}))
    ['loss 0.312', '2 findings']
    """
    rotation, findings = latest.mean("rotation"), latest.events.get("finding", 0)
    words = [f"loss {latest.scalars['loss']:.3g}"] if "loss" in latest.scalars else []
    words += [f"rotation {rotation:.3g}"] if math.isfinite(rotation) else []
    words += [f"{findings:,} finding{'s' if findings > 1 else ''}"] if findings else []
    return words


def _tqdm() -> Any:
    try:
        with warnings.catch_warnings():
            # Without ipywidgets, a notebook has a line of text. Not tqdm.auto, which calls iter() before the loop.
            warnings.simplefilter("ignore", import_module("tqdm").TqdmWarning)
            return import_module("tqdm.autonotebook").tqdm
    except ImportError as error:
        raise MissingExtraError(
            "`progress` needs tqdm, which is not installed: pip install 'gyroscope[progress]'"
        ) from error
