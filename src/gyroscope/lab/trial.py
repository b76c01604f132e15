"""The unit of an experiment."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from gyroscope.lab import models
from gyroscope.lab.data import Split
from gyroscope.lab.errors import LabError
from gyroscope.lab.recipe import Recipe
from gyroscope.lab.training import Result, Schedule, train


@dataclass(frozen=True)
class Trial:
    """A model trained by a recipe from a seed; the seed sets the initialization and the order.

    With `record`, the training is recorded in that folder, under the trial's `slug`.

    >>> from gyroscope.lab import data
    >>> trial = Trial(Recipe("SGD", rate=0.1), seed=2, schedule=Schedule(epochs=1))
    >>> trial.run(data.digits()).rotation[0]
    [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    """

    recipe: Recipe
    seed: int
    model: str = "digits-cnn"
    schedule: Schedule = field(default_factory=Schedule)
    record: Path | None = None

    @property
    def slug(self) -> str:
        """A name for files.

        >>> Trial(Recipe("Layca 3^-3, alpha +0.6", rate=3**-3), seed=1).slug
        'layca-3^-3-alpha+0.6-seed-1'
        """
        return (
            f"{re.sub(r'[ ,]+', '-', self.recipe.name.lower()).replace('-+-', '-').replace('-+', '+')}-seed-{self.seed}"
        )

    def run(self, split: Split) -> Result:
        """Train and return the result; whatever goes wrong says which trial it happened in."""
        try:
            model = models.make(self.model, seed=self.seed)
            optimizer = self.recipe.optimizer(model)
            folder = None if self.record is None else self.record / self.slug
            return train(model, split, optimizer, seed=self.seed, schedule=self.schedule, record=folder)
        except Exception as error:
            reason = str(error) if isinstance(error, LabError) else f"{type(error).__name__}: {error}"
            raise LabError(f"{self.recipe.name}, seed {self.seed}: {reason}") from error
