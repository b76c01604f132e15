"""What the figures on adaptive methods have a column of: a task, its method, and what this is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.cells import Cell, cells
from gyroscope_lab.papers.rotation import paper
from gyroscope_lab.papers.rotation.recipes import (
    adapt_copy,
    adaptive,
    adaptive_layca,
    layca,
    over_seeds,
    sgd,
    sgd_decayed,
)
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.task import Task
from gyroscope_lab.training.trial import Trial

#: A recipe on a task, whose schedule may be the recipe's own.
Pair = tuple[Task, Recipe]

# Where one task stands in for five it shows all their methods, at the rates that the papers tuned these to.
_STAND_INS = {"rmsprop": ("RMSprop", -6), "adam": ("Adam", -5), "adagrad": ("Adagrad", -4)}
# Plain SGD is best at 3^-1 but for this task.
_SGD_POWERS = {"c100-wrn": -2}


@dataclass(frozen=True)
class Column:
    """A task and all that it is trained with.

    Attributes:
        method: the adaptive method.
        controlled: the same under Layca.
        plain: what it is without adapting, under Layca too: SGD, or for Adam SGD with its momentum.
        copied: that again, turning each layer by what it turned by under the adaptive method.
        best: Layca's best configuration, which differences Δη refer to.
        decayed: SGD with weight decay.
        sgd: SGD alone, at its best rate.
    """

    task: Task
    method: Pair
    controlled: Pair
    plain: Pair
    copied: Pair
    best: Pair
    decayed: Pair
    sgd: Pair

    @property
    def name(self) -> str:
        """The task and the method."""
        return f"{self.task.name}: {self.method[1].name}"


def columns(lab: Lab) -> list[Column]:
    """The columns at the laboratory's scale: a task each in the papers, a method each where one stands in for all.

    >>> from gyroscope_lab.training.archive import Archive
    >>> [column.name for column in columns(Lab(Archive("runs"), "full"))][:2]
    ['c10-cnn1: RMSprop', 'c100-resnet: Adam']
    >>> [column.name for column in columns(Lab(Archive("runs")))]
    ['digits: RMSprop', 'digits: Adam']
    """
    found = [column(task) for task in lab.tasks(paper.TASKS)]
    if lab.scale == "full":
        return found
    kinds = list(_STAND_INS)[:2] if lab.scale == "smoke" else list(_STAND_INS)
    return [standing_in(one, kind) for one in found for kind in kinds]


def speed_columns(lab: Lab) -> list[Column]:
    """The same as the speed paper has them: its C10-CNN2 kept the dropout of the original.

    >>> from gyroscope_lab.training.archive import Archive
    >>> [dict(column.method[0].options) for column in speed_columns(Lab(Archive("runs"), "full"))][3]
    {'dropout': True}
    """
    return [_dropping_out(one) if one.task.name == "c10-cnn2" else one for one in columns(lab)]


def _dropping_out(column: Column) -> Column:
    def with_dropout(pair: Pair) -> Pair:
        task, recipe = pair
        return replace(task, options=(*task.options, ("dropout", True))), recipe

    method, best, plain_sgd = map(with_dropout, (column.method, column.best, column.sgd))
    return replace(column, method=method, best=best, sgd=plain_sgd)


def column(task: Task) -> Column:
    """The column of a task, with the method that the papers train it with.

    >>> from gyroscope_lab.training.tasks import task
    >>> column(task("c100-resnet")).plain[1].name, column(task("tiny-cnn")).plain[1].name
    ('SGD_AMom-Layca 3^-5', 'SGD-Layca 3^-3')
    """
    _, recipe = method = adaptive(task)
    return Column(
        task,
        method=method,
        controlled=(task, adaptive_layca(task)),
        plain=(task, plain(recipe.optimizer)),
        copied=adapt_copy(task),
        best=(task, layca(-3)),
        decayed=sgd_decayed(task),
        sgd=(task, sgd(task, _SGD_POWERS.get(task.name, -1))),
    )


def plain(kind: str) -> Recipe:
    """What an adaptive method is without adapting, under Layca: Adam has momentum left, and so a lower rate.

    >>> plain("rmsprop").name, plain("adam").optimizer
    ('SGD-Layca 3^-3', 'sgd-amom')
    """
    if kind != "adam":
        return replace(layca(-3), name="SGD-Layca 3^-3")
    return Recipe("SGD_AMom-Layca 3^-5", rate=3.0**-5, optimizer="sgd-amom", control="layca")


def standing_in(column: Column, kind: str) -> Column:
    """The same column with another adaptive method.

    >>> from gyroscope_lab.training.tasks import task
    >>> digits = column(task("digits"))
    >>> standing_in(digits, "rmsprop") == digits, standing_in(digits, "adam").copied[1].optimizer
    (True, 'sgd-amom')
    """
    name, power = _STAND_INS[kind]
    (its, method), (_, controlled), (_, copied) = column.method, column.controlled, column.copied
    method = replace(method, name=name, rate=3.0**power, optimizer=kind)
    slow = -5 if kind == "adam" else -3
    controlled = replace(controlled, name=f"{name}-Layca 3^{slow}", rate=3.0**slow, optimizer=kind)
    copied = replace(copied, optimizer="sgd-amom" if kind == "adam" else "sgd", copies=method)
    return replace(
        column,
        method=(its, method),
        controlled=(column.task, controlled),
        plain=(column.task, plain(kind)),
        copied=(its, copied),
    )


def trials_of(lab: Lab, pairs: Iterable[Pair]) -> list[Trial]:
    """Every recipe, each once, from every seed of the laboratory.

    >>> from gyroscope_lab.training.archive import Archive
    >>> lab = Lab(Archive("runs"))
    >>> [trial.recipe.name for trial in trials_of(lab, [one.method for one in columns(lab)])]
    ['RMSprop', 'Adam']
    """
    return [trial for task, recipe in dict.fromkeys(pairs) for trial in over_seeds(task, [recipe], lab.seeds)]


def cells_of(lab: Lab, pairs: Sequence[Pair]) -> dict[Pair, Cell]:
    """The results of each."""
    return {(cell.task, cell.recipe): cell for cell in cells(lab, trials_of(lab, pairs))}
