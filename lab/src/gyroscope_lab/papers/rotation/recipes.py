"""The recipes of the layer-rotation papers, task by task: rates, decays and schedules as their authors set them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.schedule import Schedule
from gyroscope_lab.training.task import Task
from gyroscope_lab.training.trial import Trial

# torch's weight decay is twice what Keras calls l2. The digits' is the best of a grid.
_L2 = {
    "c10-cnn1": 2e-3,
    "c10-cnn1-light": 2e-3,
    "c100-resnet": 2e-3,
    "tiny-cnn": 2e-3,
    "c10-cnn2": 1e-3,
    "c100-wrn": 1e-3,
    "c10-resnet110": 2e-3,
    "digits": 5e-3,
    "digits-resnet": 5e-3,
}
# The adaptive method of each task, its rate, and whether it comes with weight decay.
_ADAPTIVE: dict[str, tuple[str, float, bool]] = {
    "c10-cnn1": ("rmsprop", 3.0**-6, False),
    "c100-resnet": ("adam", 3.0**-5, False),
    "tiny-cnn": ("adagrad", 3.0**-4, False),
    "c10-cnn2": ("rmsprop", 3e-4, True),
    "c100-wrn": ("adam", 3e-4, True),
    "digits": ("rmsprop", 3.0**-6, False),
}
_TITLES = {"rmsprop": "RMSprop", "adam": "Adam", "adagrad": "Adagrad"}
_EVERY_TENTH = tuple(tenth / 10 for tenth in range(1, 10))
_WRN = Schedule(epochs=200, batch=128, cuts=(0.3, 0.6, 0.8), drop_last=True)


def layca(power: float, *, alpha: float = 0.0) -> Recipe:
    """Return Layca around SGD at ρ(0) = 3^power.

    >>> layca(-3, alpha=0.6).name
    'Layca 3^-3, alpha +0.6'
    """
    name = f"Layca 3^{power:g}" + (f", alpha {alpha:+g}" if alpha else "")
    return Recipe(name, rate=3.0**power, control="layca", alpha=alpha)


def sgd(task: Task, power: float) -> Recipe:
    """Return SGD at η = 3^power; on the wide residual network with Nesterov's momentum, which the text does not state.

    >>> from gyroscope_lab.training.tasks import task
    >>> sgd(task("c10-cnn1"), -1).name, sgd(task("c100-wrn"), -2).momentum
    ('SGD 3^-1', 0.9)
    """
    wide = task.name == "c100-wrn"
    return Recipe(f"SGD 3^{power:g}", rate=3.0**power, momentum=0.9 if wide else 0.0, nesterov=wide)


def sgd_decayed(task: Task) -> tuple[Task, Recipe]:
    """Return the task with the schedule of SGD with weight decay, and that recipe.

    >>> from gyroscope_lab.training.tasks import task
    >>> sgd_decayed(task("c10-cnn1"))[1].weight_decay
    0.002
    """
    recipe = Recipe("SGD + L2", rate=3.0**-1, weight_decay=_L2[task.name])
    if task.name == "tiny-cnn":
        return _with(task, Schedule(epochs=100, batch=128, cuts=(0.7, 0.9, 0.97))), recipe
    if task.name == "c10-cnn2":
        schedule = replace(task.schedule, cuts=_EVERY_TENTH, factor=2.0)
        return _with(task, schedule), replace(recipe, rate=0.5)
    if task.name == "c100-wrn":
        return _with(task, _WRN), replace(recipe, rate=0.1, momentum=0.9, nesterov=True)
    return task, recipe


def adaptive(task: Task) -> tuple[Task, Recipe]:
    """Return the adaptive method that the papers train a task with; it records its rates, to be copied.

    >>> from gyroscope_lab.training.tasks import task
    >>> adaptive(task("c100-resnet"))[1].name
    'Adam'
    """
    kind, rate, decays = _ADAPTIVE[task.name]
    decay = _L2[task.name] if decays else 0.0
    name = _TITLES[kind] + (" + L2" if decays else "")
    recipe = Recipe(name, rate=rate, optimizer=kind, weight_decay=decay, records=True)
    if task.name == "c10-cnn2":
        return _with(task, replace(task.schedule, cuts=_EVERY_TENTH, factor=2.0)), recipe
    if task.name == "c100-wrn":
        return _with(task, _WRN), recipe
    return task, recipe


def adaptive_layca(task: Task) -> Recipe:
    """Return the same method under Layca, without decay; Adam, whose momentum turns slowly, has a lower rate.

    >>> from gyroscope_lab.training.tasks import task
    >>> adaptive_layca(task("c100-resnet")).name, adaptive_layca(task("c10-cnn1")).name
    ('Adam-Layca 3^-5', 'RMSprop-Layca 3^-3')
    """
    kind = _ADAPTIVE[task.name][0]
    power = -5 if kind == "adam" else -3
    return Recipe(f"{_TITLES[kind]}-Layca 3^{power}", rate=3.0**power, optimizer=kind, control="layca")


def adapt_copy(task: Task) -> tuple[Task, Recipe]:
    """Return SGD under Layca with the adaptive method's recorded rates, and with Adam's momentum where Adam is copied.

    >>> from gyroscope_lab.training.tasks import task
    >>> adapt_copy(task("c100-resnet"))[1].optimizer
    'sgd-amom'
    """
    longer, copied = adaptive(task)
    kind = "sgd-amom" if copied.optimizer == "adam" else "sgd"
    return longer, Recipe("SGD-Layca-AdaptCopy", rate=1.0, optimizer=kind, control="layca", copies=copied)


def lars(power: float = -3) -> Recipe:
    """Return LARS as the papers ran it: weights start at a quarter of their size, which their text does not state.

    >>> lars().scale
    0.25
    """
    return Recipe(f"LARS 3^{power:g}", rate=3.0**power, control="lars", scale=0.25)


def over_seeds(task: Task, recipes: Sequence[Recipe], seeds: Sequence[int]) -> list[Trial]:
    """Return the trials of every recipe from every seed.

    >>> from gyroscope_lab.training.tasks import task
    >>> [trial.seed for trial in over_seeds(task("digits"), [layca(-3)], [0, 1])]
    [0, 1]
    """
    return [Trial(task, recipe, seed) for recipe in recipes for seed in seeds]


def _with(task: Task, schedule: Schedule) -> Task:
    return replace(task, schedule=schedule)
