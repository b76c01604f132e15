"""A tracker for Accelerate: what an `Accelerator` logs becomes part of the run that a monitor records."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterator, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from gyroscope.base.accepted import real, text
from gyroscope.errors import MonitorError
from gyroscope.integrations.mirror import imported
from gyroscope.monitor.monitor import Monitor
from gyroscope.monitor.watch import watch

_LOG = logging.getLogger("gyroscope")
_tracking = imported("accelerate.tracking", sink="GyroscopeTracker", extra="accelerate")


class GyroscopeTracker(_tracking.GeneralTracker):  # type: ignore[misc, name-defined]
    """Record what an `Accelerator` logs with the layers that `watch` measures.

    `Accelerator(log_with=tracker)` creates it first, `init_trackers` starts it, and `watch` takes the prepared model
    and optimizer. `accelerator.end_training()` finishes the run. Numbers are recorded at the number of steps that the
    optimizer has taken, whatever `step` is passed to `accelerator.log`; text is recorded as a note.

    Args:
        run: the folder to record in; by default a new one under `runs/`.
        options: further arguments of `gyroscope.watch`.

    Attributes:
        monitor: the monitor; None before `watch`.

    >>> import tempfile, torch, gyroscope
    >>> from accelerate import Accelerator
    >>> folder = tempfile.TemporaryDirectory()
    >>> tracker = GyroscopeTracker(f"{folder.name}/first")
    >>> accelerator = Accelerator(cpu=True, log_with=tracker)
    >>> model = torch.nn.Linear(3, 2)
    >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> accelerator.init_trackers("first", config={"lr": 0.1})
    >>> monitor = tracker.watch(model, optimizer)
    >>> loss = model(torch.ones(1, 3)).square().sum()
    >>> accelerator.backward(loss); optimizer.step(); accelerator.log({"loss": loss.item()})
    >>> accelerator.end_training()
    >>> with gyroscope.load(f"{folder.name}/first") as run:
    ...     run.layers, run.steps.tolist(), list(run.scalars)
    (('weight',), [0, 1], ['loss'])
    >>> folder.cleanup()
    """

    name = "gyroscope"
    requires_logging_directory = False
    main_process_only = False  # ranks that hold shards measure and finish together

    def __init__(self, run: str | Path | None = None, **options: Any) -> None:
        super().__init__()
        inspect.signature(watch).bind_partial(None, None, run, **options)  # an unknown option fails here, not later
        self.monitor: Monitor | None = None
        self._run, self._options = run, options
        self._open = False
        self._config: dict[str, Any] = {}
        self._waiting: list[Mapping[str, Any]] = []

    @property
    def tracker(self) -> Monitor | None:
        """The monitor, as `accelerator.get_tracker("gyroscope", unwrap=True)` returns it."""
        return self.monitor

    def watch(self, model: nn.Module, optimizer: Any) -> Monitor:
        """Begin to measure; call it on all processes, and after `accelerator.prepare` if that shards the model.

        Raises:
            MonitorError: this tracker watches a model already, or `gyroscope.watch` rejects an argument.
        """
        if self._open:
            raise MonitorError(
                "A GyroscopeTracker must watch one training at a time, got a second one. Finish the run first: "
                "accelerator.end_training()."
            )
        meta = {**self._config, **(self._options.get("meta") or {})}
        self.monitor = monitor = watch(model, optimizer, self._run, **{**self._options, "meta": meta})
        self._open = True
        waiting, self._waiting = self._waiting, []
        for values in waiting:
            _record(monitor, values)
        return monitor

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the configuration with the run, under `config`."""
        self._config = {
            "config": {str(name): value if _is_plain(value) else str(value) for name, value in values.items()}
        }
        if self._open and self.monitor is not None:  # what describes a run is written when it begins
            self.monitor.note(f"config: {self._config['config']}")

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        """Record numbers and text at the current step of the optimizer; before `watch`, they wait for it."""
        if self.monitor is None:
            self._waiting.append(dict(values))
        elif self._open:
            _record(self.monitor, values)

    def finish(self) -> None:
        """Finish the run."""
        if self._waiting:
            _LOG.warning("GyroscopeTracker has recorded nothing: call tracker.watch(model, optimizer) before training.")
        if self._open and self.monitor is not None:
            self._open = False
            self.monitor.close()


def _record(monitor: Monitor, values: Mapping[str, Any]) -> None:
    numbers: dict[str, Any] = {}
    words: dict[str, str] = {}
    for name, value in _flat(values):
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
            numbers[name] = value  # it may be on a GPU, which nobody waits for
        elif not isinstance(value, bool) and isinstance(value, Real):
            numbers[name] = real(value)
        elif isinstance(value, str):
            words[name] = value
    if numbers:
        monitor.log(numbers)
    for name, word in words.items():
        monitor.note(f"{name}: {word}")


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values by name; those of a dict within are named after both, as in `loss/train`.

    >>> list(_flat({"loss": {"train": 1, "test": 2}, "lr": 3}))
    [('loss/train', 1), ('loss/test', 2), ('lr', 3)]
    """
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}/{inner}", one) for inner, one in value.items())
        elif text(name):
            yield name, value


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
