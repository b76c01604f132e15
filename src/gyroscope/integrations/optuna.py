"""Optuna: a monitor for each trial of a study, and a pruner that stops trials whose layers train badly.

What the pruner needs is kept in the trial's user attributes, not in files, so it also works where several machines
share a study through its storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gyroscope.base.accepted import real
from gyroscope.diagnosis.diagnose import checked_kinds
from gyroscope.diagnosis.finding import Finding
from gyroscope.errors import MonitorError
from gyroscope.integrations.mirror import imported
from gyroscope.monitor.monitor import Monitor
from gyroscope.monitor.watch import watch as watch_training
from gyroscope.store.record import LayerInfo, QuantityInfo, Record, Rows, Values

_optuna = imported("optuna", sink="GyroscopePruner", extra="optuna")

#: User attributes of a trial: the folder of its run, its findings, and steps with the mean rotation of its layers.
RUN, FINDINGS, ROTATION = "gyroscope_run", "gyroscope_findings", "gyroscope_rotation"
# The mean rotation is kept at steps that are this factor apart: about 50 numbers in 10,000 steps.
_APART = 1.15


def watch(trial: Any, model: Any, optimizer: Any, folder: str | Path = "runs", **options: Any) -> Monitor:
    """Measure and record the training of a trial, as `gyroscope.watch` does, in `folder/trial-NUMBER`.

    The folder, the findings and the mean rotation become user attributes of the trial, where `GyroscopePruner` reads
    them. Close the monitor before the objective returns: Optuna accepts no attributes for a trial that has ended.

    Args:
        trial: the trial that the objective is called with.
        model: any module.
        optimizer: the optimizer whose steps are measured.
        folder: the folder for the runs of the study.
        options: further arguments of `gyroscope.watch`.

    >>> import optuna, tempfile, torch
    >>> def objective(trial):
    ...     model = torch.nn.Linear(3, 2)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=trial.suggest_float("lr", 0.01, 0.1))
    ...     with tempfile.TemporaryDirectory() as folder, watch(trial, model, optimizer, folder):
    ...         loss = model(torch.ones(1, 3)).square().sum()
    ...         loss.backward(); optimizer.step()
    ...     return loss.item()
    >>> optuna.logging.set_verbosity(optuna.logging.WARNING)
    >>> study = optuna.create_study()
    >>> study.optimize(objective, n_trials=1)
    >>> sorted(study.best_trial.user_attrs)
    ['gyroscope_rotation', 'gyroscope_run']
    """
    if not isinstance(trial, _optuna.trial.BaseTrial):
        raise MonitorError(f"`trial` must be the trial that Optuna passes to the objective, got {trial!r:.80}.")
    path = Path(folder, f"trial-{trial.number}").absolute()
    told = options.pop("on_finding", None)
    sinks = [*options.pop("sinks", ()), _Curve(trial)]
    about = {"trial": trial.number, "params": dict(trial.params), **(options.pop("meta", None) or {})}
    on_finding = told if told == "raise" else _reporter(trial, told)
    monitor = watch_training(model, optimizer, path, sinks=sinks, on_finding=on_finding, meta=about, **options)
    trial.set_user_attr(RUN, str(path))
    return monitor


def _reporter(trial: Any, also: Callable[[Finding], object] | None) -> Callable[[Finding], None]:
    """Return a function that keeps each finding in the trial, and passes it on."""
    found: list[dict[str, Any]] = []

    def report(finding: Finding) -> None:
        found.append({name: getattr(finding, name) for name in ("kind", "severity", "since", "sentence")})
        trial.set_user_attr(FINDINGS, found)
        if also is not None:
            also(finding)

    return report


class _Curve:
    """A sink that keeps the mean rotation of a run in its trial."""

    def __init__(self, trial: Any) -> None:
        self._trial = trial
        self._last: dict[int, Values] = {}
        self._curve: list[tuple[int, float]] = []
        self._kept = 0

    def open(
        self, layers: Sequence[LayerInfo], quantities: Mapping[str, QuantityInfo], meta: Mapping[str, Any]
    ) -> None:
        """Begin; nothing is needed."""

    def write(self, record: Record) -> None:
        """Take the rotation of measured steps; parts of the network that were not measured count as they were."""
        if not isinstance(record, Rows) or "rotation" not in record.values:
            return
        for step, values in zip(record.steps.tolist(), record.values["rotation"], strict=True):
            self._last[record.part] = values
            known = np.concatenate(list(self._last.values()))
            known = known[np.isfinite(known)]
            if len(known) and (not self._curve or step >= _APART * self._curve[-1][0]):
                self._curve.append((step, float(f"{known.mean():.6g}")))
        if len(self._curve) > self._kept:
            self._kept = len(self._curve)
            self._trial.set_user_attr(ROTATION, self._curve)

    def close(self, run: Any) -> None:
        """End; everything is kept already."""


class GyroscopePruner(_optuna.pruners.BasePruner):  # type: ignore[misc, name-defined]
    """Stop trials with a serious finding, and trials that lag behind the best one in rotation and in value.

    In the layer-rotation papers, networks generalize better the further all their layers rotate. A trial lags if the
    mean rotation of its layers is below `lag` times that of the best completed trial at the same step, and the value
    that it reported last is worse than that of the best trial at that step. Rotation alone does not decide: another
    initialization or network rotates differently. Trials must be watched with `watch` of this module; others are left
    to `inner`.

    Args:
        inner: another pruner, which is asked about every trial that is not stopped here.
        lag: the share of the best trial's rotation below which a trial is stopped; 0 never stops one for it.
        after: the share of the best trial's steps before which no trial is stopped for its rotation.
        mute: kinds of serious finding that do not stop a trial.

    >>> import optuna
    >>> optuna.logging.set_verbosity(optuna.logging.WARNING)
    >>> study = optuna.create_study(pruner=GyroscopePruner(optuna.pruners.MedianPruner()))
    >>> type(study.pruner).__name__
    'GyroscopePruner'
    """

    def __init__(
        self, inner: Any = None, *, lag: float = 0.3, after: float = 0.2, mute: str | Iterable[str] = ()
    ) -> None:
        if inner is not None and not isinstance(inner, _optuna.pruners.BasePruner):
            raise MonitorError(f"`inner` must be one of optuna.pruners, or None, got {inner!r:.80}.")
        for name, value in (("lag", lag), ("after", after)):
            if not 0 <= real(value) < 1:
                raise MonitorError(f"`{name}` must be a number ≥ 0 and < 1, got {value!r:.80}. Try 0.3.")
        self._inner, self._lag, self._after = inner, float(lag), float(after)
        self._mute = checked_kinds(mute)

    def prune(self, study: Any, trial: Any) -> bool:
        """Return whether Optuna should stop the trial; `trial.should_prune()` calls it."""
        return (
            self._is_broken(trial)
            or self._lags(study, trial)
            or (self._inner is not None and bool(self._inner.prune(study, trial)))
        )

    def _is_broken(self, trial: Any) -> bool:
        found = trial.user_attrs.get(FINDINGS, ())
        return any(one["severity"] == "serious" and one["kind"] not in self._mute for one in found)

    def _lags(self, study: Any, trial: Any) -> bool:
        try:
            best = study.best_trial
        except ValueError:  # no trial is completed yet
            return False
        mine, theirs = (one.user_attrs.get(ROTATION) for one in (trial, best))
        if not self._lag or not mine or not theirs or trial.last_step not in best.intermediate_values:
            return False
        (step, rotation), (steps, values) = mine[-1], zip(*theirs, strict=True)
        turns = step < self._after * steps[-1] or rotation >= self._lag * float(np.interp(step, steps, values))
        value, other = (one.intermediate_values[trial.last_step] for one in (trial, best))
        minimizes = study.direction == _optuna.study.StudyDirection.MINIMIZE
        return not turns and not (value <= other if minimizes else value >= other)
