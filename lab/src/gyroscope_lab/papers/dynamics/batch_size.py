"""Adam's and RMSprop's steps by batch size (sections 2.1 and 6 of Grosse's chapter, equation 4).

They divide by the root of diag(F_emp^batch) = Cov(∇J_{x,t})/|B| + (∇J)², which falls with the batch size |B|: "larger
batch sizes imply larger effective learning rates", which SGD does not share. First the law and its consequences at held
weights, at the start and after some training; then trainings of as many steps with small batches as with large, and the
updates that were recorded. Section 6 sums it up the other way round ("larger batch sizes result in more gradient noise,
and hence smaller steps"), which cannot be meant; it is put to the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

import gyroscope
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.dynamics.batch_size_held import Setting, held
from gyroscope_lab.papers.dynamics.batch_size_report import figure, tables, verdicts
from gyroscope_lab.papers.study import Report, Study
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.schedule import Schedule
from gyroscope_lab.training.task import Task
from gyroscope_lab.training.trial import Trial

#: The recipes: rates at which all of them learn.
RECIPES = (
    Recipe("SGD", 0.1),
    Recipe("RMSprop", 1e-3, optimizer="rmsprop"),
    Recipe("Adam", 1e-3, optimizer="adam"),
)


@dataclass(frozen=True)
class Plan:
    """What a scale trains and measures.

    Attributes:
        per_class: examples of each class.
        sizes: of batches.
        steps: of each training.
        seeds: of the trainings.
        drawn: steps at held weights.
        warm: of these, so many are left out.
        trained: steps of training before the second measurement at held weights.
    """

    per_class: int
    sizes: tuple[int, ...]
    steps: int
    seeds: int
    drawn: int
    warm: int
    trained: int


PLANS = {
    "smoke": Plan(16, (16, 256), steps=30, seeds=1, drawn=150, warm=100, trained=30),
    "small": Plan(96, (16, 32, 64, 128, 256, 512), steps=180, seeds=3, drawn=600, warm=300, trained=100),
    "full": Plan(1000, (16, 64, 256, 1024), steps=1250, seeds=5, drawn=1000, warm=300, trained=300),
}


def task_of(lab: Lab, batch: int) -> Task:
    """The task with batches of a size, for as many steps whatever that size: they take the examples more often.

    >>> from gyroscope_lab.training.archive import Archive
    >>> for batch in (16, 512):
    ...     schedule = task_of(Lab(Archive("runs"), "small"), batch).schedule
    ...     schedule.steps(960), schedule.passes
    (180, 3)
    (180, 96)
    """
    [task] = lab.tasks(("mnist-mlp",))
    plan, options = PLANS[lab.scale], dict(task.options)
    kept = tuple((name, options[name]) for name in ("biases", "init", "inputs"))
    passes, rest = divmod(plan.steps * batch, 10 * plan.per_class)
    assert not rest, "the batches of a training are to be whole passes"
    schedule = Schedule(1, batch, cuts=(), passes=passes)
    source = replace(task.source, per_class=plan.per_class)
    return replace(task, model="mlp-3x32", options=kept, schedule=schedule, source=source)


def trials(lab: Lab) -> list[Trial]:
    """Every recipe with every batch size from every seed, measured at every step.

    >>> from gyroscope_lab.training.archive import Archive
    >>> [(one.recipe.name, one.schedule.batch) for one in trials(Lab(Archive("runs")))][:3]
    [('SGD', 16), ('SGD', 256), ('RMSprop', 16)]
    """
    plan = PLANS[lab.scale]
    return [
        Trial(task_of(lab, size), recipe, seed, every=1)
        for recipe in RECIPES
        for size in plan.sizes
        for seed in range(plan.seeds)
    ]


@dataclass(frozen=True, eq=False)
class Trained:
    """What recorded trainings tell, of one recipe, the mean over seeds.

    Attributes:
        updates: ‖Δw‖ over all layers [sizes, steps].
        moved: ‖w − w₀‖ after the last step [sizes].
        loss: of the training, the mean over its steps [sizes].
    """

    updates: npt.NDArray[np.float64]
    moved: npt.NDArray[np.float64]
    loss: npt.NDArray[np.float64]


def trained(lab: Lab, recipe: Recipe) -> Trained:
    """What was recorded of a recipe's trainings."""
    plan = PLANS[lab.scale]
    its = [one for one in trials(lab) if one.recipe == recipe]
    results = lab.run(its)
    runs = [recorded(lab, one) for one in its]
    shape = len(plan.sizes), plan.seeds
    updates = np.array([update for update, _ in runs]).reshape(*shape, -1).mean(axis=1)
    moved = np.array([way for _, way in runs]).reshape(shape).mean(axis=1)
    loss = np.array([result.loss[-1] for result in results]).reshape(shape).mean(axis=1)
    return Trained(updates, moved, loss)


def recorded(lab: Lab, trial: Trial) -> tuple[npt.NDArray[np.float64], float]:
    """The length of every update of a recorded training, [steps], and how far the weights are from their start."""
    run = gyroscope.load(lab.archive.folder(lab.trial(trial)))
    steps = run.steps[run.steps > 0]
    each = np.asarray(run.series("update_norm", steps=steps), dtype=np.float64)
    norms = np.asarray(run.series("weight_norm"), dtype=np.float64)
    turned = np.asarray(run.series("rotation"), dtype=np.float64)[-1]
    first, last = norms[0], norms[-1]
    # ‖w − w₀‖² by the law of cosines; rotation is 1 − cos.
    squares = first**2 + last**2 - 2 * first * last * (1 - turned)
    return np.sqrt((each**2).sum(axis=1)), float(np.sqrt(squares.sum()))


def points(lab: Lab) -> dict[str, dict[str, Any]]:
    """What held weights tell, at the start and after some training."""
    plan = PLANS[lab.scale]
    task = task_of(lab, plan.sizes[0])
    after = {"at the start": 0, f"after {plan.trained} steps": plan.trained}
    return {
        name: held(lab, Setting(task.source, task.model, task.options, plan.sizes, steps, plan.drawn, plan.warm))
        for name, steps in after.items()
    }


def conclude(lab: Lab) -> Report:
    """The law, the gain, and steps at held weights and in training, by batch size."""
    plan = PLANS[lab.scale]
    at, runs = points(lab), {recipe.name: trained(lab, recipe) for recipe in RECIPES}
    told: dict[str, Any] = {
        name: {"update": its.updates.mean(axis=1).tolist(), "moved": its.moved.tolist(), "loss": its.loss.tolist()}
        for name, its in runs.items()
    }
    updates = {name: its.updates for name, its in runs.items()}
    moved = {name: its.moved for name, its in runs.items()}
    losses = {name: its.loss for name, its in runs.items()}
    return Report(
        {"figure": figure(plan.sizes, at, updates)},
        tables(plan.sizes, at, updates, moved, losses),
        verdicts(plan.sizes, at, updates, moved),
        {"sizes": list(plan.sizes), "held": at, "training": told},
    )


STUDIES = (
    Study("dynamics/batch-size", "Equation 4: adaptive steps grow with the batch, SGD's do not", trials, conclude),
)
