"""When a training ends before its last epoch."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from gyroscope_lab.training.task import Task


def why_end(task: Task, *, loss: Sequence[float], accuracy: Sequence[float], copied: int | None = None) -> str | None:
    """Return why a training ends after the epochs it has had, None if it goes on: the rules of the papers' authors.

    It ends where the loss is no number any more. With `stop_at`, also where the loss is not above that, or was the same
    in three epochs one after the other; with `fails`, where the accuracy is still that low in that epoch; and where the
    rates that it copies end.

    Args:
        task: what is learned, which says when it has been, and when it never will be.
        loss: the training loss of each epoch so far.
        accuracy: the training accuracy of each.
        copied: how many epochs the training had whose rates are copied.

    >>> from gyroscope_lab.training.tasks import task
    >>> why_end(task("c10-cnn1"), loss=[1.0, 5e-5], accuracy=[0.5, 1.0])
    'the loss has reached 0.0001 in epoch 2'
    """
    epoch = len(loss)
    if not isfinite(loss[-1]):
        return f"diverged: the loss is {loss[-1]} in epoch {epoch}; lower the rate"
    if task.stop_at is not None and loss[-1] <= task.stop_at:
        return f"the loss has reached {task.stop_at:g} in epoch {epoch}"
    if task.stop_at is not None and epoch >= 3 and len(set(loss[-3:])) == 1:
        return f"the loss has not changed for three epochs, in epoch {epoch}"
    if task.fails is not None and epoch == task.fails[0] + 1 and accuracy[-1] <= task.fails[1]:
        return f"does not learn: the training accuracy is {accuracy[-1]:.3f} in epoch {epoch}"
    if copied is not None and copied <= epoch < task.schedule.epochs:
        return f"the training that is copied ended in epoch {epoch}"
    return None
