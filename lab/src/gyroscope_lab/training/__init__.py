"""One training: its task, its recipe, its seed, and the loop that runs it."""

from typing import TYPE_CHECKING

from gyroscope.base import lazy

if TYPE_CHECKING:
    from gyroscope_lab.training.archive import Archive
    from gyroscope_lab.training.recipe import Recipe
    from gyroscope_lab.training.result import Result
    from gyroscope_lab.training.schedule import Schedule
    from gyroscope_lab.training.task import Task
    from gyroscope_lab.training.tasks import TASKS, task
    from gyroscope_lab.training.training import Training, train
    from gyroscope_lab.training.trial import Trial

__all__ = ["TASKS", "Archive", "Recipe", "Result", "Schedule", "Task", "Training", "Trial", "task", "train"]

if not TYPE_CHECKING:  # type checkers reject names that are not listed above
    __getattr__ = lazy(
        __name__,
        {
            "archive": "Archive",
            "recipe": "Recipe",
            "result": "Result",
            "schedule": "Schedule",
            "task": "Task",
            "tasks": "TASKS task",
            "training": "Training train",
            "trial": "Trial",
        },
    )
