"""Ray Train and Ray Tune: a run for each trial, and what its layers did as metrics of its reports.

A worker that Ray starts again finds the run of its trial in the same folder, and continues its curves.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gyroscope.errors import MonitorError
from gyroscope.integrations.mirror import imported
from gyroscope.monitor.monitor import Monitor
from gyroscope.monitor.watch import watch as watch_training

_tune = imported("ray.tune", sink="FindingStopper", extra="ray")
_train = imported("ray.train", sink="FindingStopper", extra="ray")

#: The folder of the run within that of its trial.
FOLDER = "gyroscope"


def watch(model: Any, optimizer: Any, folder: str | Path | None = None, **options: Any) -> Monitor:
    """Measure and record the training of this worker, as `gyroscope.watch` does.

    Args:
        model: any module.
        optimizer: the optimizer whose steps are measured.
        folder: the folder to record in; by default `gyroscope` in Ray's storage, in the folder of the trial, or of the
            experiment for Ray Train.
        options: further arguments of `gyroscope.watch`.

    Raises:
        MonitorError: this is not a worker of Ray Train or Ray Tune, and no `folder` was given; or `gyroscope.watch`
            rejects an argument.

    >>> import tempfile, torch
    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with tempfile.TemporaryDirectory() as folder, watch(model, optimizer, folder) as monitor:
    ...     model(torch.ones(1, 3)).sum().backward(); optimizer.step()
    ...     monitor.run.layers
    ('weight',)
    """
    about: dict[str, Any] = {}
    if (trial := _trial()) is not None:
        storage, place = trial.get_storage(), "trial_fs_path"
        about = {"ray": {"trial": trial.get_trial_name(), "experiment": trial.get_experiment_name()}}
    elif (worker := _worker()) is not None:
        storage, place = worker.get_storage(), "experiment_fs_path"
        about = {"ray": {"experiment": worker.get_experiment_name()}}
    elif folder is None:
        raise MonitorError(f"`folder` must be given outside of the workers of Ray Train and Ray Tune. {_ELSEWHERE}")
    if folder is None:
        if storage.storage_filesystem.type_name != "local":
            raise MonitorError(
                "`folder` must be given where Ray's storage is not a file system of this machine, got storage of type "
                f"{storage.storage_filesystem.type_name!r}. Pass a folder that all workers can write to."
            )
        # Not the trial's working folder, which Ray copies while files in it come and go.
        folder = Path(getattr(storage, place), FOLDER)
    meta = {**about, **(options.pop("meta", None) or {})}
    return watch_training(model, optimizer, folder, meta=meta, **options)


def report(monitor: Monitor, metrics: Mapping[str, Any] | None = None, checkpoint: Any = None) -> dict[str, Any]:
    """Report metrics to Ray, with those of the layers added, and return them all.

    Added are "gyroscope/run" (the folder), "gyroscope/serious" and "gyroscope/warnings" (numbers of findings so far),
    "gyroscope/finding" (the first in words, or ""), and the least, the mean and the largest rotation over layers,
    "gyroscope/rotation_min", "_mean" and "_max". It waits until everything measured so far is on disk, so call it once
    per epoch rather than once per step. On ranks that record nothing, the metrics are reported as they are.

    Args:
        monitor: from `watch`.
        metrics: your own metrics.
        checkpoint: a checkpoint of Ray Train or Ray Tune.

    >>> import tempfile, torch
    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with tempfile.TemporaryDirectory() as folder, watch(model, optimizer, folder) as monitor:
    ...     report(monitor, {"loss": 2.3})  # this is no worker
    Traceback (most recent call last):
    gyroscope.errors.MonitorError: `report` must be called in a worker of Ray Train or Ray Tune. ...
    """
    found = {**_layers(monitor), **(metrics or {})}
    if _trial() is not None:
        _tune.report(found, checkpoint=checkpoint)
    elif _worker() is not None:
        _train.report(found, checkpoint=checkpoint)
    else:
        raise MonitorError(f"`report` must be called in a worker of Ray Train or Ray Tune. {_ELSEWHERE}")
    return found


class FindingStopper(_tune.Stopper):  # type: ignore[misc, name-defined]
    """A stopper of Ray Tune that ends trials with serious findings, as `report` of this module reports them.

    >>> stopper = FindingStopper()  # for tune.RunConfig(stop=stopper)
    >>> stopper("trial", {"gyroscope/serious": 1}), stopper("trial", {"gyroscope/serious": 0})
    (True, False)
    """

    def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        """Return whether this result ends its trial."""
        return bool(result.get("gyroscope/serious", 0))

    def stop_all(self) -> bool:
        """Return False: a finding in one trial ends no other."""
        return False


_ELSEWHERE = "Elsewhere, use gyroscope.watch."


def _trial() -> Any:
    """Return Tune's context in a worker of Ray Tune, else None."""
    context = _tune.get_context()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is not a worker, which is the question
        return None if context.get_trial_id() is None else context


def _worker() -> Any:
    """Return Train's context in a worker of Ray Train, else None; within Ray Tune, asking raises an error."""
    try:
        return _train.get_context()
    except RuntimeError:  # outside of a training function
        return None


def _layers(monitor: Monitor) -> dict[str, Any]:
    if monitor.path is None:
        return {}
    with monitor.run as run:
        texts = [event.text for event in run.events if event.kind == "finding"]
        serious = sum(text.startswith("serious") for text in texts)
        found = {
            "gyroscope/run": str(run.path),
            "gyroscope/serious": serious,
            "gyroscope/warnings": len(texts) - serious,
            "gyroscope/finding": texts[0] if texts else "",
        }
        at = run.where("rotation")[-1:] if "rotation" in run.quantities else run.steps[:0]
        last = run.series("rotation", steps=at) if len(at) else np.empty(0, np.float32)
    known = last[np.isfinite(last)]
    if known.size:
        found |= {
            "gyroscope/rotation_min": float(known.min()),
            "gyroscope/rotation_mean": float(known.mean()),
            "gyroscope/rotation_max": float(known.max()),
        }
    return found
