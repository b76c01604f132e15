"""A callback for Hugging Face's `Trainer`, and for the trainers that inherit from it, such as TRL's.

The callback makes a monitor when training begins and closes it when training ends. In between the optimizer's own step
hooks measure, because the gradients are gone at `on_step_end`.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
from collections import deque
from contextlib import suppress
from numbers import Real
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from gyroscope.base.accepted import real, text
from gyroscope.diagnosis.finding import Finding
from gyroscope.errors import GyroscopeError, MonitorError
from gyroscope.integrations.mirror import imported
from gyroscope.monitor.monitor import Monitor
from gyroscope.monitor.resume import agreed, file_of
from gyroscope.monitor.watch import watch
from gyroscope.store import Run, load
from gyroscope.store.folder import is_file, run_file

_LOG = logging.getLogger("gyroscope")
_hf = imported("transformers", sink="GyroscopeCallback", extra="transformers")
_events = imported("transformers.trainer_callback", sink="GyroscopeCallback", extra="transformers")

#: The folder within the Trainer's `output_dir` that is recorded in by default.
FOLDER = "gyroscope"
# Callbacks whose monitor is open. A Trainer does not tell its callbacks that an exception has ended a training.
_watching: WeakSet[GyroscopeCallback] = WeakSet()


class GyroscopeCallback(_events.TrainerCallback, _events.ExportableState):  # type: ignore[misc, name-defined]
    """Measure and record every layer while a `Trainer` trains, as `gyroscope.watch` does in a loop of your own.

    What the Trainer logs is recorded with the run, and findings are added to the Trainer's `log_history`. A training
    that is resumed from a checkpoint continues the curves of its run, measured from the same reference.

    Args:
        run: the folder to record in; by default `gyroscope` in the Trainer's `output_dir`. Each trial of a
            hyperparameter search gets a folder in it.
        options: further arguments of `gyroscope.watch`, such as `every`, `budget`, `layers` or `on_finding`.

    Attributes:
        monitor: the monitor of the current or the last training; None before the first.

    >>> import tempfile, torch, gyroscope
    >>> from transformers import Trainer, TrainingArguments
    >>> class Small(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.fc = torch.nn.Linear(3, 1)
    ...     def forward(self, x, labels):
    ...         return {"loss": (self.fc(x) - labels).square().mean()}
    >>> data = [{"x": torch.ones(3), "labels": torch.zeros(1)}] * 8
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     arguments = TrainingArguments(folder, max_steps=3, save_strategy="no", report_to="none", use_cpu=True)
    ...     watching = GyroscopeCallback(f"{folder}/first")
    ...     _ = Trainer(Small(), arguments, train_dataset=data, callbacks=[watching]).train()
    ...     with gyroscope.load(f"{folder}/first") as run:
    ...         run.layers, run.steps.tolist()
    {'train_runtime': ...}
    (('fc.weight',), [0, 1, 2, 3])
    """

    def __init__(self, run: str | os.PathLike[str] | None = None, **options: Any) -> None:
        if run is not None and not (isinstance(run, str | os.PathLike) and os.fspath(run)):
            raise MonitorError(f"`run` must be the path of a folder, got {run!r:.80}. Try 'runs/first'.")
        # An unknown option fails here, not when training begins.
        inspect.signature(watch).bind_partial(None, None, run, step=None, **options)
        self.monitor: Monitor | None = None
        self._run, self._options = run, options
        self._training: Any = None  # the Trainer's state: another object in each training
        self._trials = 0
        self._lost: list[str] = []  # options that a Trainer could not restore from a checkpoint
        self._found: deque[Finding] = deque()  # filled by the writer's thread

    @property
    def run(self) -> Run:
        """The run of the current or the last training, to read."""
        if self.monitor is None:
            raise MonitorError("The run exists once training has begun. Call `trainer.train()` first.")
        return self.monitor.run

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Begin to watch: the optimizer exists, and the weights of a checkpoint are loaded.

        Raises:
            GyroscopeError: `watch` rejects the model, the optimizer or the folder, or another callback watches this
                training. Nothing was changed.
        """
        if self._lost:
            lost = ", ".join(self._lost)
            _LOG.warning("The Trainer has restored its GyroscopeCallback without %s, which JSON cannot hold.", lost)
        folder = self._folder(args, state)
        self._end_others(state, folder)
        step = self._resumed(folder, state)
        options = {**self._options, "meta": {**_about(args), **(self._options.get("meta") or {})}}
        told = options.get("on_finding")
        if told is None or callable(told):
            options["on_finding"] = self._told
        self._found.clear()
        self.monitor = watch(_as_it_runs(given["model"]), given["optimizer"], folder, step=step, **options)
        self._training = state
        _watching.add(self)
        if (name := type(self).__name__) not in state.stateful_callbacks:
            # Resumed from a checkpoint without this callback: the Trainer could not save the next one.
            state.stateful_callbacks[name] = self.state()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the last weights of what may be the last epoch, before the best model replaces them."""
        if args.load_best_model_at_end and self.monitor is not None:
            self.monitor.record()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Record the numbers that the Trainer logs, and add findings to its `log_history`."""
        if self.monitor is not None and self in _watching:
            numbers = {name: real(value) for name, value in (logs or {}).items() if _is_number(value) and text(name)}
            self.monitor.log(numbers)
            self._report(state)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write everything that was measured, so that the run is not behind the checkpoint."""
        if self.monitor is not None and self in _watching:
            with suppress(GyroscopeError):  # recording has stopped, which was reported; training continues
                self.monitor.flush()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Finish the run."""
        if self in _watching:
            self._end()
            self._report(state)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, in `trainer_state.json`: the step and which run it belongs to.

        The reference is in the run's folder. It is as large as the model, and the same for all checkpoints.
        """
        kept = {name: value for name, value in self._options.items() if _is_json(value)}
        where = None if self._run is None else os.fspath(self._run)
        attributes = {"_saved": self._position(), "_lost": sorted(self._options.keys() - kept.keys())}
        return {"args": {"run": where, **kept}, "attributes": attributes}

    def _position(self) -> dict[str, Any] | None:
        if self.monitor is None or self.monitor.path is None:
            return None
        return {"step": self.monitor.steps, "run": str(self.monitor.path), "reference": _reference(self.monitor.path)}

    def _folder(self, args: Any, state: Any) -> Path:
        folder = Path(args.output_dir, FOLDER) if self._run is None else Path(self._run)
        if state.is_hyper_param_search:
            self._trials += 1
            folder /= state.trial_name or f"trial-{self._trials}"
        return folder.absolute()

    def _end_others(self, state: Any, folder: Path) -> None:
        """Finish what a training that raised has left open, and reject a second callback in the same training."""
        for other in list(_watching):
            twice = other._training is state
            if twice or other is self or (other.monitor is not None and other.monitor.path == folder):
                other._end(interrupted=True)
            if twice:
                raise MonitorError(
                    "`callbacks` must hold one GyroscopeCallback, got two. Remove one: trainer.remove_callback(...)."
                )

    def _resumed(self, folder: Path, state: Any) -> int | None:
        """Return the step of a training that was loaded from a checkpoint; None for one that begins.

        Raises:
            MonitorError: the folder has since been used for another training, whose reference is another.
        """
        if not state.global_step:
            return None
        saved = (state.stateful_callbacks.get(type(self).__name__) or {}).get("attributes", {}).get("_saved")
        (now,) = agreed((_reference(folder),), dist.is_available() and dist.is_initialized())
        if "reference" in self._options or (saved is not None and saved["reference"] == now):
            pass
        elif now is None:
            before = "" if saved is None else f" The folder of the run before was {saved['run']}; try reference=..."
            _LOG.warning("%s holds no run: rotation is measured from the weights of the checkpoint.%s", folder, before)
        elif saved is None:
            return None  # `watch` compares the weights with those of the run
        else:
            raise MonitorError(
                f"{folder} must hold the run of this checkpoint, got a training that began later. Pass another "
                "folder, or the weights to measure from: GyroscopeCallback(..., reference=...)."
            )
        return int(state.global_step if saved is None else saved["step"])

    def _told(self, finding: Finding) -> None:
        self._found.append(finding)
        if (told := self._options.get("on_finding")) is not None:
            told(finding)

    def _report(self, state: Any) -> None:
        while self._found:
            one = self._found.popleft()
            entry = {"gyroscope": f"{one.severity}: {one.sentence}", "epoch": state.epoch, "step": state.global_step}
            state.log_history.insert(-1, entry)  # what reads the last entry expects the Trainer's own

    def _end(self, *, interrupted: bool = False) -> None:
        _watching.discard(self)
        if self.monitor is None:
            return
        if interrupted:
            error = RuntimeError("the training did not come to its end")
            self.monitor.__exit__(RuntimeError, error, None)  # waits for no other rank
        else:
            self.monitor.close()


def _reference(folder: Path) -> list[Any] | None:
    """Return what tells the reference of a run from others: its file, and when the run was made; None without a run."""
    with suppress(GyroscopeError):
        if is_file(run_file(folder)):
            with load(folder) as run:
                return [run.meta.get("reference_file", file_of(1)), run.attempts[0].time]
    return None


def _as_it_runs(model: nn.Module) -> Any:
    """Return the model wrapped as compiled if Accelerate compiles it: callbacks are given the model inside.

    Temporary hooks would compile it again, and see nothing.
    """
    plugin = (
        imported("accelerate.state", sink="GyroscopeCallback", extra="transformers").AcceleratorState().dynamo_plugin
    )
    return model if plugin.backend.value == "NO" else torch.compile(model)


def _about(args: Any) -> dict[str, Any]:
    """Return the Trainer's arguments, to keep with the run; it leaves out secrets itself."""
    named = {name: value for name, value in args.to_sanitized_dict().items() if _is_json(value)}
    return {"transformers": _hf.__version__, "training_arguments": named}


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True
