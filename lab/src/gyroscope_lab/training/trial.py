"""Trials, the unit of an experiment: a task, a recipe and a seed."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, get_args

from torch import nn

from gyroscope.layers import layers
from gyroscope_lab.data.augment import Augmentation
from gyroscope_lab.data.source import Source
from gyroscope_lab.errors import LabError
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.schedule import Schedule
from gyroscope_lab.training.task import Precision, Task

# Changed when the same description gives a different training, so that old results are not mistaken for new ones.
_VERSION = 1
# Results do not depend on the names of tasks and recipes, nor on a task's precision: the trial's precision counts. A
# curve that is measured in addition changes none of their other numbers.
_UNHEEDED = ("name", "precision", "test_curve")
# The number of letters of a name that a file name takes: systems allow 255 bytes, and a letter has up to four.
_LONGEST = 50


@dataclass(frozen=True)
class Trial:
    """A task, a recipe and a seed: all that a result depends on.

    Attributes:
        task: the task to learn.
        recipe: the recipe that trains it.
        seed: the seed of the initialization and of the order of the examples.
        precision: the precision of products: "float32", "tf32" (on GPUs that have it), or "bf16" by autocast.
        every: steps between measurements; None for once per epoch.
        keeps: keep the initial weights and the tested weights too.
        conditions: steps between measurements of each layer's conditioning; None for never.
        follows: follow the last layer at every step; see `gyroscope_lab.training.last_layer`.

    >>> from gyroscope_lab.training.tasks import task
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
    conditions: int | None = None
    follows: bool = False

    def __post_init__(self) -> None:
        if type(self.seed) is not int or not 0 <= self.seed < 2**32:  # torch ignores the other bits
            raise LabError(f"`seed` must be a whole number from 0 to 2³² − 1, got {self.seed!r}.")
        if self.precision not in get_args(Precision):
            accepted = ", ".join(map(repr, get_args(Precision)))
            raise LabError(f"`precision` must be one of {accepted}, got {self.precision!r}.")
        for name, none in (("every", "once per epoch"), ("conditions", "never")):
            value = getattr(self, name)
            # True equals 1, and 2.5 would give another key.
            if value is not None and (type(value) is not int or value < 1):
                raise LabError(f"`{name}` must be a whole number of steps ≥ 1, or None for {none}, got {value!r}.")
        for name in ("keeps", "follows"):
            if type(getattr(self, name)) is not bool:
                raise LabError(f"`{name}` must be True or False, got {getattr(self, name)!r}.")
        if self.follows and self.task.source.is_text:
            said = f"`follows` must be False for {self.task.name}"
            raise LabError(f"{said}: its texts have one label per character, not one per example.")
        try:
            json.dumps(_as_dict(self), allow_nan=False, default=_as_dict)
        except (TypeError, ValueError) as error:
            said = f"{self.recipe.name} on {self.task.name} cannot be kept as JSON: {error}"
            raise LabError(f"{said}. Options must be text, True, False and finite numbers.") from error

    @property
    def schedule(self) -> Schedule:
        """The task's schedule."""
        return self.task.schedule

    @property
    def title(self) -> str:
        """The names of its task and recipe, and its seed."""
        return f"{self.task.name}: {self.recipe.name}, seed {self.seed}"

    @cached_property
    def key(self) -> str:
        """A fingerprint of everything that the result depends on, without names: equal keys mean equal results."""
        text = json.dumps([_VERSION, _told(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def description(self) -> dict[str, Any]:
        """The trial as JSON values."""
        described: dict[str, Any] = json.loads(json.dumps(_as_dict(self), default=_as_dict))
        return described

    @property
    def slug(self) -> str:
        """A name for files."""
        name = file_name(self.recipe.name.lower()).replace("-+-", "-").replace("-+", "+").replace("--", "-")
        return f"{name}-seed-{self.seed}-{self.key[:8]}"

    @property
    def source(self) -> Trial | None:
        """The trial whose rates this one copies, if it copies any."""
        return None if self.recipe.copies is None else replace(self, recipe=self.recipe.copies)

    @property
    def lineage(self) -> list[Trial]:
        """This trial, preceded by all trials it needs: the one it copies, the one that one copies, and so on."""
        return [self] if self.source is None else [*self.source.lineage, self]

    @property
    def capturable(self) -> bool:
        """True if a CUDA graph can capture its gradients, and its steps too if `recipe.capturable`.

        It cannot capture those of an LSTM with dropout: cuDNN has one random state per device, and trainings side by
        side would draw from it at the same time.
        """
        return self.task.model != "lstm-small" or not dict(self.task.options).get("dropout")

    @property
    def eager(self) -> bool:
        """True if the host launches the kernels of a step one by one, all of them or those of the optimizer."""
        return not (self.capturable and self.recipe.capturable)

    def network(self) -> nn.Module:
        """The network at the start: initialized from the seed, scaled, and with the untrained layers frozen."""
        model = self.task.network(self.seed)
        its = layers(model)
        if self.recipe.scale != 1.0:
            for layer in its:
                layer.parameter.data.mul_(self.recipe.scale)
        if self.recipe.only is not None:
            if not -len(its) <= self.recipe.only < len(its):
                raise LabError(
                    f"`only` must be one of the {len(its)} layers of {self.task.model}, got {self.recipe.only}."
                )
            model.requires_grad_(False)
            its[self.recipe.only].module.requires_grad_(True)
        for index in self.recipe.frozen:
            if not -len(its) <= index < len(its):
                raise LabError(f"`frozen` must name some of the {len(its)} layers of {self.task.model}, got {index}.")
            its[index].parameter.requires_grad_(False)
        if not any(layer.parameter.requires_grad for layer in its):
            raise LabError(f"`frozen` must leave a layer of {self.task.model} to train, got {self.recipe.frozen}.")
        return model


def require_nothing_kept(trial: Trial) -> None:
    """Reject a trial without a folder if its measurements need one.

    >>> from gyroscope_lab.training.tasks import task
    >>> require_nothing_kept(Trial(task("digits"), Recipe("SGD", 0.1), follows=True))
    Traceback (most recent call last):
    gyroscope_lab.errors.LabError: The trial has follows=True, whose measurements are kept in a folder: give one,
    train(..., folder=...), or leave it out of the trial.
    """
    asked = {"keeps": trial.keeps, "conditions": trial.conditions, "follows": trial.follows}
    lost = " and ".join(f"{name}={value!r}" for name, value in asked.items() if value)
    if lost:
        what_to_do = "give one, train(..., folder=...), or leave it out of the trial"
        raise LabError(f"The trial has {lost}, whose measurements are kept in a folder: {what_to_do}.")


def file_name(name: str) -> str:
    """Return a valid file name for `name`.

    >>> file_name("Layca 3^-3, alpha +0.6"), file_name("../mine: 50 %")
    ('Layca-3^-3-alpha-+0.6', 'mine-50')
    """
    return re.sub(r"[^\w.+^=-]+", "-", name)[:_LONGEST].strip("-.") or "unnamed"


def describes(description: Any, trial: Trial) -> bool:
    """Return whether a description matches `trial`, under any name; missing options have their defaults.

    >>> from gyroscope_lab.training.tasks import task
    >>> trial = Trial(task("digits"), Recipe("SGD", 0.1))
    >>> describes(trial.description, trial), describes(trial.description, replace(trial, seed=1))
    (True, False)
    """
    return _agrees(description, trial.description)


def from_description(description: Any) -> Trial:
    """Return the trial of a description; options that it lacks were added later and have their defaults.

    Raises:
        LabError: it is not a description of a trial.

    >>> from gyroscope_lab.training.tasks import task
    >>> trial = Trial(task("c10-cnn1"), Recipe("SGD", 0.1, momentum=0.9), seed=2, precision="bf16")
    >>> from_description(trial.description) == trial
    True
    """
    try:
        task, augmentation = dict(description["task"]), description["task"]["augmentation"]
        task["source"], task["schedule"] = _source(task["source"]), Schedule(**task["schedule"])
        task["augmentation"] = None if augmentation is None else Augmentation(**augmentation)
        return Trial(**description | {"task": Task(**task), "recipe": _recipe(description["recipe"])})
    except LabError:  # a valid description of an impossible trial
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise LabError(f"Expected the description of a trial, got {str(description)[:80]!r} ({error}).") from error


def _source(description: dict[str, Any]) -> Source:
    """Return the data source; studies have sources with further fields."""
    kinds: list[type[Source]] = [Source, *Source.__subclasses__()]
    return next((one for one in kinds if description.keys() <= {its.name for its in fields(one)}), Source)(
        **description
    )


def _recipe(description: dict[str, Any]) -> Recipe:
    copies = description.get("copies")
    return Recipe(**description | {"copies": None if copies is None else _recipe(copies)})


def _agrees(there: Any, own: Any, named: str = "") -> bool:
    if not isinstance(own, dict) or not isinstance(there, dict):
        return bool(there == own)
    nameless = named in ("task", "recipe", "copies")
    common = [key for key in own if key in there and not (nameless and key in _UNHEEDED)]
    return bool(common) and all(_agrees(there[key], own[key], key) for key in common)


def _as_dict(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, as `json.dumps` asks for them; `asdict` would copy each value first."""
    return {one.name: getattr(value, one.name) for one in fields(value)}


def _told(value: Any, kind: str = "") -> Any:
    """Return the values that differ from their defaults, so that an option added later changes no key."""
    if isinstance(value, Task | Recipe):  # a task's precision does not decide the trial's
        return {key: told for key, told in _fields(value).items() if key not in _UNHEEDED}
    if is_dataclass(value):
        return _fields(value)
    if type(value) is int and "float" in kind and "int" not in kind:
        return float(value)  # 1 is 1.0 there
    if isinstance(value, float):
        return value + 0.0  # and −0 is 0
    return [_told(one, kind) for one in value] if isinstance(value, list | tuple) else value


def _fields(value: Any) -> dict[str, Any]:
    return {
        one.name: _told(getattr(value, one.name), str(one.type))
        for one in fields(value)
        if one.default is MISSING or getattr(value, one.name) != one.default
    }
