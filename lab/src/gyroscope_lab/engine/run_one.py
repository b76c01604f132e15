"""One trial, from its description to its result in the archive, as every engine on a CPU runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from gyroscope_lab.data.source import Source
from gyroscope_lab.data.split import Split
from gyroscope_lab.errors import LabError, TrialError
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.result import Result
from gyroscope_lab.training.training import Training, train
from gyroscope_lab.training.trial import Trial


@dataclass(frozen=True)
class Note:
    """The progress of a training.

    >>> Note("a1b2", "SGD, seed 0", 3, 10, loss=0.5, accuracy=0.9, rotation=0.2).share
    0.3
    """

    key: str
    name: str
    epoch: int
    epochs: int
    loss: float
    accuracy: float
    rotation: float

    @property
    def share(self) -> float:
        """The completed share of its epochs."""
        return self.epoch / self.epochs

    @classmethod
    def of(cls, training: Training) -> Note:
        """Return the note of a training at the end of an epoch."""
        trial, turned = training.trial, training.rotation[-1]
        return cls(
            key=trial.key,
            name=trial.title,
            epoch=training.epoch,
            epochs=trial.schedule.epochs,
            loss=training.loss[-1],
            accuracy=training.accuracy[-1],
            rotation=sum(turned) / len(turned),
        )


@lru_cache(maxsize=2)
def loaded(source: Source, data: Path | None) -> Split:
    """Return the examples of a source, read once per process."""
    return source.load(data)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread of a CPU, as every training does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def in_trial(trial: Trial, error: Exception) -> TrialError:
    """Return an error that names the trial it occurred in.

    >>> from gyroscope_lab.training.recipe import Recipe
    >>> from gyroscope_lab.training.tasks import task
    >>> in_trial(Trial(task("digits"), Recipe("SGD", 0.1)), KeyError("x"))
    TrialError("SGD, seed 0: KeyError: 'x'")
    """
    reason = str(error) if isinstance(error, LabError) else f"{type(error).__name__}: {error}"
    return TrialError(f"{trial.recipe.name}, seed {trial.seed}: {reason}")


def run_one(
    trial: Trial,
    archive: Archive,
    data: Path | None = None,
    tell: Callable[[Note], None] = lambda note: None,
    *,
    device: str = "cpu",
) -> Result:
    """Return a trial's kept result, or train it now; errors name the trial.

    >>> import tempfile
    >>> from gyroscope_lab.training.recipe import Recipe
    >>> from gyroscope_lab.training.tasks import task
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run_one(Trial(task("digits").lasting(1), Recipe("SGD", 0.1)), Archive(folder)).rotation[0]
    [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    """
    try:
        known = archive.result(trial)
        if known is not None:
            return known
        split = loaded(trial.task.source, data)  # before anything is written
        with archive.claimed(trial) as folder:
            known = archive.result(trial)
            if known is not None:
                return known
            return train(
                trial,
                split,
                folder=folder,
                device=device,
                rates=archive.rates(trial),
                on_epoch=lambda training: tell(Note.of(training)),
            )
    except Exception as error:
        raise in_trial(trial, error) from error
