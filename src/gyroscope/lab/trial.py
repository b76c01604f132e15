"""The unit of an experiment."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from typing import Any, Literal

from torch import nn

from gyroscope.lab.errors import LabError
from gyroscope.lab.recipe import Recipe
from gyroscope.lab.schedule import Schedule
from gyroscope.lab.task import Task
from gyroscope.layer import layers

Precision = Literal["float32", "tf32", "bf16"]

# Changed when a training of the same description comes out differently, so that old results are not taken for new.
_VERSION = 1


@dataclass(frozen=True)
class Trial:
    """A task, a recipe and a seed: all that a result depends on.

    Attributes:
        task: what is learned.
        recipe: what trains it.
        seed: of the initialization and of the order of the examples.
        precision: what products are computed in: "float32", "tf32" (on GPUs that have it), or "bf16" by autocast.
        every: measure every so many steps; None for once an epoch.
        keeps: keep the weights too, as they were at the start and as they were tested.

    >>> from gyroscope.lab.tasks import task
    >>> trial = Trial(task("digits"), Recipe("Layca 3^-3, alpha +0.6", 3**-3, control="layca", alpha=0.6), seed=1)
    >>> trial.slug
    'layca-3^-3-alpha+0.6-seed-1-4371c04d'
    """

    task: Task
    recipe: Recipe
    seed: int = 0
    precision: Precision = "float32"
    every: int | None = None
    keeps: bool = False

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise LabError(f"the seed of a trial is {self.seed}; it can be 0 or more")
        if self.every is not None and self.every < 1:
            raise LabError(
                f"a trial is measured every {self.every} steps; it can be 1 or more, or None for once an epoch"
            )

    @property
    def schedule(self) -> Schedule:
        """The task's schedule."""
        return self.task.schedule

    @property
    def key(self) -> str:
        """A fingerprint of everything the result depends on but names: equal keys, equal results."""
        text = json.dumps([_VERSION, _told(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def description(self) -> dict[str, Any]:
        """The trial as what JSON can hold."""
        described: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return described

    @property
    def slug(self) -> str:
        """A name for files."""
        name = (
            re.sub(r"[ ,/]+", "-", self.recipe.name.lower()).replace("-+-", "-").replace("-+", "+").replace("--", "-")
        )
        return f"{name}-seed-{self.seed}-{self.key[:8]}"

    @property
    def source(self) -> Trial | None:
        """The trial whose rates this one copies, if it copies any."""
        return None if self.recipe.copies is None else replace(self, recipe=self.recipe.copies)

    def network(self) -> nn.Module:
        """The network as it starts: initialized from the seed, scaled, and frozen but for what is trained."""
        model = self.task.network(self.seed)
        its = layers(model)
        if self.recipe.scale != 1.0:
            for layer in its:
                layer.parameter.data.mul_(self.recipe.scale)
        if self.recipe.only is not None:
            if not -len(its) <= self.recipe.only < len(its):
                raise LabError(f"only layer {self.recipe.only} is to be trained; {self.task.model} has {len(its)}")
            model.requires_grad_(False)
            its[self.recipe.only].module.requires_grad_(True)
        return model


def _told(value: Any) -> Any:
    """What sets a trial apart: all that is not as it is by default, so that an option added later changes no key."""
    if isinstance(value, Task | Recipe):
        return {key: told for key, told in _fields(value).items() if key != "name"}
    if is_dataclass(value):
        return _fields(value)
    return [_told(one) for one in value] if isinstance(value, tuple) else value


def _fields(value: Any) -> dict[str, Any]:
    return {
        one.name: _told(getattr(value, one.name))
        for one in fields(value)
        if one.default is MISSING or getattr(value, one.name) != one.default
    }
