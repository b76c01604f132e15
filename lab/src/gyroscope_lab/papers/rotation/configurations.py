"""All configurations that the layer-rotation papers train on a task, with the test accuracies that they report."""

from __future__ import annotations

from dataclasses import dataclass

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.rotation import paper
from gyroscope_lab.papers.rotation.alpha_and_rate import COLUMNS, SWEPT, paper_accuracy, recipes_of_sweep
from gyroscope_lab.papers.rotation.recipes import adaptive, adaptive_layca, lars, sgd, sgd_decayed
from gyroscope_lab.papers.rotation.sgd_rates import POWERS
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.task import Task

#: The kinds of configurations.
KINDS = ("Layca, ρ(0)", "Layca, α", "LARS", "SGD", "SGD + L2", "adaptive", "adaptive + Layca")


@dataclass(frozen=True)
class Configuration:
    """A recipe on a task, what kind it is of, and the paper's test accuracy with it."""

    kind: str
    task: Task
    recipe: Recipe
    told: float | None


def configurations(lab: Lab, task: Task) -> list[Configuration]:
    """All configurations of a task; a smoke test takes some of them.

    >>> from gyroscope_lab.training.archive import Archive
    >>> from gyroscope_lab.training.tasks import task
    >>> len(configurations(Lab(Archive("runs"), "full"), task("c10-cnn1")))
    29
    """
    name, known = task.name, task.name in paper.TASKS
    swept = [*recipes_of_sweep(lab), *COLUMNS] if name in SWEPT or not known else list(COLUMNS)
    found = [
        Configuration("Layca, α" if recipe.alpha else "Layca, ρ(0)", task, recipe, paper_accuracy(task, recipe))
        for recipe in dict.fromkeys(swept)
    ]
    for power in (-4, -1, 0) if lab.scale == "smoke" else POWERS:
        told = paper.absolute(name, paper.SGD_RATES.get(name, {}).get(power))
        found.append(Configuration("SGD", task, sgd(task, power), told))
    told = paper.absolute(name, paper.WEIGHT_DECAY.get(name))
    found.append(Configuration("SGD + L2", *sgd_decayed(task), told))
    told = paper.absolute(name, paper.ADAPTIVE.get(name))
    found.append(Configuration("adaptive", *adaptive(task), told))
    told = paper.absolute(name, paper.ADAPTIVE_LAYCA.get(name))
    found.append(Configuration("adaptive + Layca", task, adaptive_layca(task), told))
    if name in paper.LARS or not known:
        found.append(Configuration("LARS", task, lars(), paper.LARS.get(name)))
    return found
