"""A callback that watches what Lightning's `Trainer` fits, for the packages `lightning` and `pytorch_lightning`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from gyroscope.base.accepted import text
from gyroscope.errors import MissingExtraError, MonitorError
from gyroscope.layers.class_names import ancestry
from gyroscope.layers.layer import Layer
from gyroscope.monitor.monitor import Monitor
from gyroscope.monitor.resume import check_state
from gyroscope.monitor.watch import measured_layers, watch

_LOG = logging.getLogger("gyroscope")

# Arguments of `watch` that the trainer gives.
_FROM_TRAINER = {"model", "optimizer", "run", "step"}

# Strategies that flatten parameters, and by what.
_FLATTENING = {"DeepSpeedStrategy": "ZeRO", "FSDPStrategy": "FSDP1"}


class _Watching:
    """Watch every layer of the module that a Lightning `Trainer` fits: `gyroscope.watch` as one callback.

    It is a `Callback` of both packages, `lightning` and `pytorch_lightning`. Layers are measured at the steps of all
    optimizers that the trainer has, under automatic and manual optimization; metrics that are logged with `self.log` go
    into the run, and so does the loss. The state is part of every checkpoint: `fit(ckpt_path=...)` continues the curves
    in the same folder, measured from the same initialization.

    A run begins when training does, after the checkpoint is loaded and after the sanity check of validation. It ends
    with the fit, also with one that raises. With `fast_dev_run`, which Lightning does not log, everything is measured
    and nothing is kept.

    Args:
        run: the folder to record in; by default a new one under `runs/`, which later fits of this callback continue.
        options: further arguments of `gyroscope.watch`, such as `every`, `layers`, `sinks` or `on_finding`.

    Attributes:
        monitor: the monitor of the fit that is under way, else None.
        path: the folder of the last run, or None.

    >>> import tempfile, torch, gyroscope
    >>> from gyroscope.integrations.lightning import GyroscopeCallback
    >>> from lightning import LightningModule, Trainer
    >>> class Small(LightningModule):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.fc = torch.nn.Linear(3, 1)
    ...     def training_step(self, batch, index):
    ...         return self.fc(batch).square().mean()
    ...     def configure_optimizers(self):
    ...         return torch.optim.SGD(self.parameters(), lr=0.1)
    >>> loader = torch.utils.data.DataLoader(torch.ones(6, 3), batch_size=2)
    >>> quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     watching = GyroscopeCallback(f"{folder}/first")
    ...     Trainer(max_epochs=1, accelerator="cpu", callbacks=[watching], **quiet).fit(Small(), loader)
    ...     with gyroscope.load(f"{folder}/first") as run:
    ...         run.layers, run.steps.tolist()
    (('fc.weight',), [0, 1, 2, 3])
    """

    def __init__(self, run: str | Path | None = None, **options: Any) -> None:
        accepted = set(signature(watch).parameters) - _FROM_TRAINER
        unknown = [name for name in options if name not in accepted]
        if unknown:
            given = unknown[0] in _FROM_TRAINER
            hint = "That is the trainer's to give." if given else f"Try one of {', '.join(sorted(accepted))}."
            raise MonitorError(f"`options` must be arguments of gyroscope.watch, got {unknown[0]!r}. {hint}")
        super().__init__()
        self.monitor: Monitor | None = None
        self.path: Path | None = None
        self._run, self._options = run, options
        self._state: dict[str, Any] = {}
        self._restored = False  # the state belongs to the checkpoint that the coming fit continues
        self._trainer: Any = None  # the one whose fit is watched
        self._stopped: Monitor | None = None  # the monitor of a fit that raised; it still knows its state
        self._scratch: TemporaryDirectory[str] | None = None
        self._seen: dict[str, Tensor] = {}
        self._losses: list[Tensor] = []  # of the batches since the last step
        self._recorded = self._counted = (0, 0)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Reject what cannot be watched, before Lightning prepares the model."""
        self._restored = False
        if stage != "fit":
            return
        flattening = [name for name in ancestry(trainer.strategy) if name in _FLATTENING]
        if flattening:
            raise MonitorError(
                f"`strategy` must leave parameters their shapes, got {flattening[0]}, which flattens them "
                f"({_FLATTENING[flattening[0]]}), so that there are no layers. Use DDP, or FSDP2 through "
                "ModelParallelStrategy, or remove the callback."
            )
        if sum(isinstance(one, _Watching) for one in trainer.callbacks) > 1:
            raise MonitorError("`callbacks` must have one GyroscopeCallback, got several. Keep one of them.")
        if self.monitor is not None:
            raise MonitorError(
                "`callbacks` must have a GyroscopeCallback of its own for each trainer, got one that watches another "
                "fit, which has not ended. Make a new one."
            )

    # Only now are weights, optimizers and callbacks restored under all strategies: FSDP and ModelParallelStrategy load
    # the checkpoint after `on_fit_start`.
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin, or continue, the run."""
        problem: Exception | None = None
        try:
            self._attach(trainer, pl_module)
        except Exception as error:
            problem = error
        # Only the first rank looks into the folder. The others would train on, and wait for it.
        first = trainer.strategy.broadcast(None if problem is None else str(problem))
        problem = MonitorError(first) if problem is None and first is not None else problem
        if problem is not None:
            self._finish(problem)
            raise problem
        self._trainer, self._stopped, self._seen, self._losses = trainer, None, {}, []
        self._recorded = self._counted = self._position(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Record the loss of a step, which with gradient accumulation is that of several batches."""
        if self.monitor is None or "loss" in self._options:
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
        if isinstance(loss, Tensor) and loss.numel() == 1:
            # Lightning has divided it by `accumulate_grad_batches`; under manual optimization the last one counts.
            self._losses = [*(self._losses if pl_module.automatic_optimization else ()), loss.detach()]
        now = self._position(trainer)
        if now != self._counted:
            self._counted = now
            if self._losses:
                each = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
                self.monitor.log(loss=sum(self._losses) * (each / len(self._losses)))
            self._losses = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Record what was logged at the last step; its own `on_train_batch_end` may have logged, too."""
        self._record_step(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Record what validation has logged."""
        self._record(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End the run; the state stays, for checkpoints that are saved later."""
        self._record(trainer)
        self._state = self.state_dict()
        self._finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the run where training stopped, with what was logged at the last step."""
        if trainer is self._trainer:
            if trainer.world_size == 1:  # what Lightning averages over ranks would wait for those that do not get here
                with suppress(Exception):  # the one that stopped training is raised
                    self._record_step(trainer)
            self._finish(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """End a run that is still open, because Lightning left the fit in another way."""
        if trainer is self._trainer:
            self._finish()

    def state_dict(self) -> dict[str, Any]:
        """Return the monitor's state, for the checkpoint: its steps and the initialization."""
        monitor = self.monitor or self._stopped
        if monitor is None:
            return self._state
        try:
            return monitor.state_dict()
        except Exception as error:  # a checkpoint without it is better than none
            _LOG.warning("%s: the checkpoint has no state of the monitor: %s", self.path, error)
            return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the monitor's state of a checkpoint until training begins; a monitor that is there continues from it."""
        self._state, self._restored, self._stopped = state_dict, True, None
        if self.monitor is not None:
            self.monitor.load_state_dict(state_dict)

    def _attach(self, trainer: Any, module: Any) -> None:
        options = dict(self._options)
        layers = options["layers"] = measured_layers(module, options.get("layers"))
        optimizers = _stepping(trainer.optimizers, layers)
        if self._restored:
            check_state(
                self._state, [one.name for one in layers], [tuple(one.parameter.shape) for one in layers],
                len(optimizers),
            )  # fmt: skip
        run: Any = self._run if self._run is not None else self.path
        if trainer.fast_dev_run:
            self._scratch = TemporaryDirectory(prefix="gyroscope-", ignore_cleanup_errors=True)
            run, options["sinks"] = Path(self._scratch.name) / "run", ()
        self.monitor = watch(module, optimizers, run, **options)
        if self._restored:
            self.monitor.load_state_dict(self._state)
        if self._scratch is None:
            self.path = self.monitor.path

    def _finish(self, problem: BaseException | None = None) -> None:
        monitor, self.monitor, self._trainer = self.monitor, None, None
        if monitor is not None:
            monitor.__exit__(None if problem is None else type(problem), problem, None)
            self._stopped = None if problem is None else monitor
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    def _position(self, trainer: Any) -> tuple[int, int]:
        """Return a pair that changes with every step; the trainer does not count steps of unwrapped optimizers."""
        return trainer.global_step, 0 if self.monitor is None else self.monitor.steps

    def _record_step(self, trainer: Any) -> None:
        """Record what was logged at the last step, if that was not done."""
        if self.monitor is not None and self._recorded != (now := self._position(trainer)):
            self._recorded = now
            self._record(trainer)

    def _record(self, trainer: Any) -> None:
        """Record the metrics that were logged since the last call, under the names that Lightning's loggers see.

        Lightning keeps the last value of every metric. A new value is a new tensor, and cannot lie where the old one
        does, which is kept here. Only metrics in the progress bar make Lightning wait for a GPU, and it has done so.
        """
        if self.monitor is None:
            return
        new: dict[str, Tensor] = {}
        for name, value in trainer.logged_metrics.items():
            if isinstance(value, Tensor) and value.numel() == 1 and text(name):
                old = self._seen.get(name)
                if old is None or value.data_ptr() != old.data_ptr() or value.device != old.device:
                    new[name] = self._seen[name] = value
        if new:
            self.monitor.log(new)


def _stepping(given: list[Any], layers: list[Layer]) -> list[Any]:
    """Return the optimizers that step layers; others, such as that of a temperature, have nothing to measure."""
    # LightningOptimizer passes steps on to the optimizer that it holds, whose hooks are called.
    found = [one.optimizer if "LightningOptimizer" in ancestry(one) else one for one in given]
    if not found or any("_MockOptimizer" in ancestry(one) for one in found):
        raise MonitorError(
            "`configure_optimizers` must return an optimizer, got none. Without steps there is nothing to watch: "
            "remove the callback."
        )
    held = {id(layer.parameter) for layer in layers}
    stepping = [
        one
        for one in found
        if not isinstance(one, Optimizer) or any(id(p) in held for group in one.param_groups for p in group["params"])
    ]
    return stepping or found  # `watch` says what is wrong with them


@cache
def _made() -> type[Any]:
    """Return the callback as a subclass of the `Callback` of every package that is installed.

    `lightning` installs `pytorch_lightning` as well, with classes of its own, and a trainer accepts only the callbacks
    of its own package.
    """
    found: list[type[Any]] = []
    problems: list[str] = []
    for package in ("lightning.pytorch", "pytorch_lightning"):
        try:
            found.append(import_module(package).Callback)
        except Exception as error:  # one that is not installed, or too old for this torch
            problems.append(str(error))
    if not found:
        raise MissingExtraError(
            f"GyroscopeCallback cannot import lightning or pytorch_lightning ({'; '.join(problems)}): "
            "pip install 'gyroscope[lightning]'"
        )
    about = {"__module__": __name__, "__doc__": _Watching.__doc__}
    return type("GyroscopeCallback", (_Watching, *found), about)


if TYPE_CHECKING:

    class GyroscopeCallback(_Watching, Any):  # type: ignore[misc]
        """The callback, as type checkers see it."""

else:

    def __getattr__(name: str) -> Any:
        if name == "GyroscopeCallback":
            return _made()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["GyroscopeCallback"]
