"""All that the rest of a training depends on, taken out of it and put back."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from gyroscope_lab.training.recipe import with_options_of

if TYPE_CHECKING:
    from gyroscope_lab.training.training import Training


def state(training: Training) -> dict[str, Any]:
    """What a checkpoint keeps of a training between two epochs."""
    best, tangents, last, monitor = training.best, training.tangents, training.last, training.monitor
    return {
        "key": training.trial.key,
        "epoch": training.epoch,
        "ended": training.ended,
        "curves": [training.loss, training.accuracy, training.validation, training.rotation, training.norms],
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


def load(training: Training, state: dict[str, Any]) -> None:
    """Go on from what `state` gave; the monitor's part is loaded when there is a monitor."""
    training.epoch, training.ended = state["epoch"], state["ended"]
    training.loss, training.accuracy, training.validation, training.rotation, training.norms = state["curves"]
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
