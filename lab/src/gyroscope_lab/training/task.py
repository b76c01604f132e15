"""Tasks: data, a network, a schedule, and the weights to test."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import nn

from gyroscope_lab import models
from gyroscope_lab.data.augment import Augmentation
from gyroscope_lab.data.source import Source
from gyroscope_lab.data.split import Split
from gyroscope_lab.errors import LabError
from gyroscope_lab.kinds import require_kinds
from gyroscope_lab.training.recipe import Decayed
from gyroscope_lab.training.schedule import Schedule

Precision = Literal["float32", "tf32", "bf16"]


@dataclass(frozen=True)
class Task:
    """Data, a network and a schedule, by name; the other attributes are the settings of the papers' authors.

    Attributes:
        name: the name of the task.
        source: the data.
        model: the network, by its name in `gyroscope_lab.models`.
        options: further arguments of that model, as pairs.
        schedule: the number of epochs, the batch size, and the cuts of the rate.
        augmentation: how training images are shifted and mirrored, if at all.
        decayed: the layers with weight decay.
        tests: the weights to test: the "last", or those of the epoch with the "best" validation accuracy.
        stop_at: stop when the training loss of an epoch is at most this.
        fails: (epoch, accuracy): stop if the training accuracy of this epoch, counted from 0, is at most this.
        precision: the precision of the computation; None for the default of the device.
        test_loss: measure the loss on the test examples after every epoch.
        test_curve: measure the accuracy on the test examples after every epoch; it does not change the trial's key.

    >>> task = Task("digits", Source("digits"), "digits-cnn")
    >>> task.network(seed=0)[0].weight.shape
    torch.Size([16, 1, 3, 3])
    """

    name: str
    source: Source
    model: str
    options: tuple[tuple[str, Any], ...] = ()
    schedule: Schedule = field(default_factory=Schedule)
    augmentation: Augmentation | None = None
    decayed: Decayed = "all"
    tests: Literal["last", "best"] = "last"
    stop_at: float | None = None
    fails: tuple[int, float] | None = None
    precision: Precision | None = None
    test_loss: bool = False
    test_curve: bool = False

    def __post_init__(self) -> None:
        require_kinds(self)

    def check(self, split: Split) -> None:
        """Reject data that this task cannot be learned from.

        >>> task = Task("digits", Source("digits"), "digits-cnn", tests="best")
        >>> task.check(Source("digits").load())
        Traceback (most recent call last):
        gyroscope_lab.errors.LabError: digits tests the weights of the best validation accuracy, but no examples are ...
        """
        if not len(split.y_train):
            raise LabError(f"{self.name} has no examples to train on.")
        # Checked here, because a label out of range ends the process on a GPU.
        most = max(int(y.max()) for y in (split.y_train, split.y_test, split.y_val) if y is not None and len(y)) + 1
        told = models.defaults(self.model) | dict(self.options)
        for option in ("classes", "vocab"):
            if most > told.get(option, most):
                raise LabError(
                    f"{self.name} has labels up to {most - 1}, and {self.model} is made for {told[option]} {option}. "
                    f'Give the task options=(("{option}", {most}), ...).'
                )
        if self.tests == "best" and split.x_val is None:
            raise LabError(
                f"{self.name} tests the weights of the best validation accuracy, but no examples are held out. Hold "
                "some out (validation=0.1), or test the last weights (tests='last')."
            )

    def network(self, seed: int) -> nn.Module:
        """The network as initialized from `seed`."""
        return models.make(self.model, seed=seed, **dict(self.options))

    def lasting(self, epochs: int) -> Task:
        """Return the task over another number of epochs.

        >>> Task("digits", Source("digits"), "digits-cnn").lasting(5).schedule.epochs
        5
        """
        return replace(self, schedule=self.schedule.lasting(epochs))
