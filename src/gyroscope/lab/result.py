"""What a training leaves, as numbers."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from gyroscope.lab.errors import LabError


@dataclass(frozen=True)
class Result:
    """The numbers of one trial. Lists have one entry an epoch; `rotation` has one more, for the start.

    Attributes:
        train_accuracy: of the weights that were tested, on the training examples, in evaluation mode.
        test_accuracy: of these, on the test examples.
        loss: the mean training loss of each epoch, as it was while training.
        layers: the names of the layers, in forward order.
        rotation: rotation[t][l] is layer l's cosine distance to its initialization after t epochs.
        accuracy: the training accuracy of each epoch, as it was while training.
        validation: the validation accuracy after each epoch; empty where nothing was held out.
        norms: ‖w‖ of each layer, at the start and at the end.
        tested: the epoch whose weights were tested, counted from 1.
        ended: why training stopped before its last epoch; None if it did not.
        seconds: how long it took, on what it ran.

    >>> Result(0.5, 0.4, loss=[2.3], layers=["fc"], rotation=[[0.0], [0.1]]).final_rotation
    [0.1]
    """

    train_accuracy: float
    test_accuracy: float
    loss: list[float]
    layers: list[str]
    rotation: list[list[float]]
    accuracy: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    norms: list[list[float]] = field(default_factory=list)
    tested: int = 0
    ended: str | None = None
    seconds: float = field(default=0.0, compare=False)

    @property
    def final_rotation(self) -> list[float]:
        """Each layer's rotation at the end."""
        return self.rotation[-1]

    @property
    def learned(self) -> float:
        """How much of the training set was learned in the end; the tested weights may be those of an earlier epoch.

        >>> Result(0.81, 0.59, loss=[1.0, 0.1], layers=[], rotation=[], accuracy=[0.81, 0.997], tested=1).learned
        0.997
        """
        return self.accuracy[-1] if self.accuracy and 0 < self.tested < len(self.loss) else self.train_accuracy

    @property
    def diverged(self) -> bool:
        """Whether the loss was no number any more."""
        return self.ended is not None and self.ended.startswith("diverged")

    @property
    def best_validation(self) -> float:
        """The best validation accuracy, by which rates are chosen; of the test set where nothing was held out."""
        known = [value for value in self.validation if isfinite(value)]
        return max(known) if known else self.test_accuracy

    def as_json(self) -> dict[str, Any]:
        """Every number, as what strict JSON can hold: None for what is not finite."""
        cleaned: dict[str, Any] = {key: _finite(value) for key, value in asdict(self).items()}
        return cleaned

    @classmethod
    def from_json(cls, values: dict[str, Any], where: Path | str = "the result") -> Result:
        """Read what `as_json` made."""
        try:
            known = {key: _number(value) for key, value in values.items() if key in cls.__dataclass_fields__}
            known["ended"] = values.get("ended")
            found = cls(**known)
            rows = [found.loss, found.accuracy, found.validation, *found.rotation, *found.norms]
            _ = [sum(row, start=found.train_accuracy + found.test_accuracy) for row in rows]  # refuses what is none
            return found
        except (TypeError, ValueError, AttributeError) as error:
            raise LabError(f"{where} does not hold the result of a trial: {error}") from error

    def write(self, path: Path, trial: dict[str, Any]) -> None:
        """Write the result to a file that is there whole or not at all, beside the trial's description."""
        new = path.with_suffix(".new")
        text = json.dumps({"trial": trial, "result": self.as_json()}, allow_nan=False)
        with new.open("w") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)


def _finite(value: Any) -> Any:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def _number(value: Any) -> Any:
    """Numbers again, where JSON has None for what is none."""
    if isinstance(value, list):
        return [_number(one) for one in value]
    return float("nan") if value is None else value
