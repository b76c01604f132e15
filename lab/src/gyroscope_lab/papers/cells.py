"""Results of trials: those of one recipe on one task over its seeds, and the run that the monitor recorded of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from gyroscope.errors import StoreError
from gyroscope.store import Run, load
from gyroscope_lab.data.digits import PER_CLASS
from gyroscope_lab.data.source import Source
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.errors import LabError
from gyroscope_lab.papers.chance import Estimate, all_exceed, estimate
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.result import Result
from gyroscope_lab.training.task import Task
from gyroscope_lab.training.trial import Trial

T = TypeVar("T")
#: A network has learned its training set from this training accuracy on, as in the rotation paper: its figure 9 leaves
#: out networks below 90 %. A stricter threshold of a study has a name of its own (`FITS` of the rule of thumb, 99 %).
LEARNED = 0.90
# All digits, of which those that are not trained on are tested on, and the published test examples of the others.
_DIGITS, _DIGIT_CLASSES = 1_797, 10
_TESTED = {"mnist": 10_000, "cifar-10": 10_000, "cifar-100": 10_000, "tiny-imagenet": 10_000, "imagenet": 50_000}


@dataclass(frozen=True)
class Cell:
    """A task, a recipe, and the results of its seeds.

    Attributes:
        task: the task.
        recipe: the recipe.
        results: the results, one per seed.
        seeds: the seeds in the same order; none where they do not matter.

    >>> from gyroscope_lab.training.tasks import task
    >>> result = Result(1.0, 0.884, loss=[0.1], layers=["a", "b"], rotation=[[0.0, 0.0], [0.2, 0.4]])
    >>> cell = Cell(task("digits"), Recipe("SGD", 0.1), (result, result))
    >>> cell.test, cell.train, round(cell.mean_rotation, 2), round(cell.unevenness, 2), cell.learned
    (88.4, 100.0, 0.3, 0.33, True)
    """

    task: Task
    recipe: Recipe
    results: tuple[Result, ...]
    seeds: tuple[int, ...] = ()

    @property
    def by_seed(self) -> dict[int, Result]:
        """The results by seed."""
        return dict(zip(self.seeds, self.results, strict=True))

    def over_seeds(self, of: Callable[[Result], float]) -> Estimate:
        """Return a number of each result as its mean with its error over seeds."""
        return estimate([of(result) for result in self.results])

    @property
    def test(self) -> float:
        """Mean test accuracy, in percent."""
        return float(np.mean([100 * result.test_accuracy for result in self.results]))

    @property
    def spread(self) -> float | None:
        """The standard deviation of the test accuracy over seeds, in percent; None for a single seed."""
        tests = [100 * result.test_accuracy for result in self.results]
        return float(np.std(tests, ddof=1)) if len(tests) > 1 else None

    @property
    def tested(self) -> Estimate:
        """`test` with its standard error: over its seeds, or for a single seed over the test examples."""
        if len(self.results) > 1:
            return self.over_seeds(lambda result: 100 * result.test_accuracy)
        error = accuracy_error(self.test / 100, examples_tested(self.task.source))
        return Estimate(self.test, error, inf)

    @property
    def test_told(self) -> str:
        """`test` as tables print it: with `spread` and the number of seeds where there are several."""
        return f"{self.test:.2f}" + ("" if self.spread is None else f" ± {self.spread:.2f} ({len(self.results)})")

    def ahead_of(self, other: Cell) -> Estimate:
        """Return by how many points its test accuracy is above that of another, with the error of the difference.

        >>> from gyroscope_lab.training.tasks import task
        >>> its = [Result(1.0, test, loss=[], layers=["a"], rotation=[[0.1]]) for test in (0.96, 0.97, 0.92)]
        >>> first, second = (Cell(task("digits"), Recipe("SGD", 0.1), tuple(some)) for some in (its[:2], its[2:]))
        >>> first.test_told, second.test_told, first.ahead_of(second).told
        ('96.50 ± 0.71 (2)', '92.00', '+4.50 ± 0.84')
        """
        return self.tested - other.tested

    @property
    def train(self) -> float:
        """Mean training accuracy at the end, in percent: that of the last epoch where earlier weights were tested."""
        return float(np.mean([100 * result.learned for result in self.results]))

    @property
    def learned(self) -> bool:
        """True if the training set was learned."""
        return self.train >= 100 * LEARNED

    @property
    def rotation(self) -> npt.NDArray[np.float64]:
        """Rotation curves [epochs + 1, layers], the mean over seeds."""
        return self.by_epoch("rotation")

    @property
    def final_rotation(self) -> npt.NDArray[np.float64]:
        """Each layer's rotation at the end, the mean over seeds."""
        return np.asarray(np.mean([result.final_rotation for result in self.results], axis=0))

    @property
    def mean_rotation(self) -> float:
        """The mean of `final_rotation` over layers."""
        return float(np.mean(self.final_rotation))

    @property
    def unevenness(self) -> float:
        """The standard deviation of final rotation over layers, as a share of its mean."""
        return float(self.final_rotation.std() / self.mean_rotation) if self.mean_rotation else 0.0

    @property
    def loss(self) -> npt.NDArray[np.float64]:
        """The training loss of each epoch, the mean over seeds."""
        return self.by_epoch("loss")

    def by_epoch(
        self, name: Literal["loss", "accuracy", "validation", "test_accuracies", "rotation"]
    ) -> npt.NDArray[np.float64]:
        """Return a curve of `Result` by its name: the mean over seeds, as far as all of them went."""
        curves = [getattr(result, name) for result in self.results]
        epochs = min(map(len, curves))
        return np.asarray(np.mean([curve[:epochs] for curve in curves], axis=0))

    def numbers(self) -> dict[str, Any]:
        """Return the numbers as JSON holds them."""
        return {
            "task": self.task.name,
            "recipe": self.recipe.name,
            "test": self.test,
            "test_std": self.spread,
            "train": self.train,
            "rotation": [round(float(value), 4) for value in self.final_rotation],
            "mean_rotation": self.mean_rotation,
            "loss": [round(float(value), 4) for value in self.loss],
            "seeds": [
                {
                    "test": result.test_accuracy,
                    "train": result.train_accuracy,
                    "running_train": result.accuracy[-1] if result.accuracy else None,
                    "validation": max(result.validation, default=None),
                    "epochs": len(result.loss),
                    "tested": result.tested,
                    "ended": result.ended,
                    "seconds": round(result.seconds, 1),
                }
                for result in self.results
            ],
        }


def cells(lab: Lab, trials: Sequence[Trial]) -> list[Cell]:
    """Run the trials that have no result yet, and group those that differ in their seed alone, in order."""
    found: dict[tuple[Task, Recipe], list[tuple[int, Result]]] = {}
    held = lab.held(trials)
    for trial, result in zip(held, lab.run(held), strict=True):
        found.setdefault((trial.task, trial.recipe), []).append((trial.seed, result))
    return [
        Cell(task, recipe, tuple(result for _, result in its), tuple(seed for seed, _ in its))
        for (task, recipe), its in found.items()
    ]


def examples_tested(source: Source) -> int:
    """Return the number of test examples of a dataset of images.

    >>> [examples_tested(source) for source in (Source("digits"), Source("digits", per_class=50), Source("imagenet"))]
    [1597, 1297, 50000]
    """
    if source.name == "digits":
        return _DIGITS - _DIGIT_CLASSES * (PER_CLASS if source.per_class is None else source.per_class)
    if source.name not in _TESTED:
        names = ", ".join(("digits", *_TESTED))
        raise LabError(f"Expected a dataset of images, one of {names}, got {source.name!r}. Train several seeds.")
    return _TESTED[source.name]


def accuracy_error(accuracy: float, examples: int) -> float:
    """Return the standard error in percent of an accuracy over test examples.

    >>> accuracy_error(0.5, 2500)
    1.0
    """
    return 100 * sqrt(accuracy * (1 - accuracy) / examples)


def all_below(pairs: Sequence[tuple[Cell, Cell]], value: Callable[[Cell], Estimate]) -> bool | None:
    """Return whether the first is below the second in all pairs; None where that may be chance, see `all_exceed`.

    Args:
        pairs: cells, of which the first should be below the second.
        value: the value that is compared, with its error over seeds.
    """
    return all_exceed([value(second) - value(first) for first, second in pairs])


def some(rows: Sequence[T]) -> Sequence[T]:
    """Return the rows; raise if there are none, since a study of which nothing is known has nothing to show.

    >>> some([])
    Traceback (most recent call last):
    gyroscope_lab.errors.LabError: None of the trainings has a result. Train them first (leave --known out).
    """
    if not rows:
        raise LabError("None of the trainings has a result. Train them first (leave --known out).")
    return rows


def recorded(lab: Lab, trial: Trial) -> Run:
    """Return the recorded run of a trial, which is trained if it has no result yet.

    >>> import tempfile
    >>> from gyroscope_lab.training.archive import Archive
    >>> from gyroscope_lab.training.recipe import Recipe
    >>> from gyroscope_lab.data.source import Source
    >>> from gyroscope_lab.training.task import Task
    >>> task = Task("digits", Source("digits"), "mlp-2x8", options=(("inputs", 64),)).lasting(1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     len(recorded(Lab(Archive(folder), engine="serial"), Trial(task, Recipe("SGD", 0.1))).layers)
    2
    """
    lab.run([trial])
    folder = lab.archive.folder(lab.trial(trial))
    try:
        return load(folder)
    except StoreError as error:
        raise LabError(
            f"{folder} holds the result of {trial.recipe.name} on {trial.task.name}, but not its recorded run. "
            "Train it in another folder."
        ) from error
