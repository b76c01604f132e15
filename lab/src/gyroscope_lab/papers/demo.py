"""The demo: the rotation paper's first figure in miniature, on a CPU, in about a minute.

200 digits to train on, 1,597 to test on, a network of seven layers. Every configuration learns the 200; the question is
which of them generalize. `run` trains them, and `about` has the words for the page that shows them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isnan, nan
from typing import Any

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.cells import Cell
from gyroscope_lab.papers.rotation import paper
from gyroscope_lab.papers.rotation.recipes import layca
from gyroscope_lab.papers.study import versions
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.result import Result
from gyroscope_lab.training.task import Task
from gyroscope_lab.training.tasks import task
from gyroscope_lab.training.trial import Trial

# The best of a grid (rates 3^-4 … 3^1; decays 0.001 … 0.02 at 3^-2 … 3^0) by test accuracy over three
# seeds: if that choice flatters anyone it is SGD, since Layca's rates are the paper's.
SGD_RATE = 3.0**-1
WEIGHT_DECAY = 5e-3

RECIPES: tuple[Recipe, ...] = (
    *(layca(power) for power in range(-7, -1)),
    layca(-3, alpha=-0.6),
    layca(-3, alpha=0.6),
    Recipe("SGD", rate=SGD_RATE),
    Recipe("SGD + weight decay", rate=SGD_RATE, weight_decay=WEIGHT_DECAY),
)
TASK = task("digits")

QUICK_RECIPES = tuple(recipe for recipe in RECIPES if recipe.name in ("Layca 3^-5", "Layca 3^-3", "SGD"))
QUICK_TASK = TASK.lasting(15)

#: A rank correlation is called a relation from here.
CLEAR = 0.5

_WHAT = """A network of seven layers learns to read handwritten digits from 200 examples, under {count}
configurations. While it learns, every layer rotates: the direction of its weights w leaves the direction w₀ they
started from. Rotation is the cosine distance 1 − ⟨w, w₀⟩ / (‖w‖ ‖w₀‖): 0 where nothing has turned, 1 at a right
angle."""
_CONFIGURATIONS = """Layca makes the learning rate an angle: in each step every layer turns by arctan ρ, where ρ
begins at the power of 3 that a configuration is named after. With α below 0 the first layers turn faster than the
last, with α above 0 the last ones. SGD does not control how far layers turn."""
_PAPER = """The layer-rotation paper trains larger networks on photographs in the same ways (its figure 1), and
claims: all of them can learn their training examples, but the further all layers rotate, the better a network does on
examples it has not seen. Its test accuracies for C10-CNN1 on CIFAR-10 are, in percent: {told}. They belong to another
task, so compare the order, not the numbers."""
_SEEDS = """The page shows seed {first} of each configuration. Test accuracies over the seeds ({seeds}) are, in
percent: {reached}."""
_SETTINGS = """Data: scikit-learn's digits, 8×8 pixels, 200 to train on (20 of each) and 1,597 to test on; pixels are
normalized by the mean and the standard deviation of the 200. Network: {model}, six convolutions with batch
normalization and a linear layer; no biases, no gains. Schedule: {epochs} epochs in batches of {batch}; the rate is
divided by {factor:g} after epochs {cuts}. SGD: a rate of {rate:.3g} and a weight decay of {decay:g}, the best of a
grid by test accuracy: if that choice flatters anyone it is SGD, since Layca's rates are the paper's. Seeds are of the
initialization and of the order of the examples; ± is the standard deviation over them. Made with {made}; float32 on a
CPU, {seconds:.0f} s of training on one core."""
_MORE = """Run it again with: {command} --again. Every training is recorded as a run: gyroscope runs lists them,
gyroscope show and gyroscope plot show what each layer did, gyroscope compare puts runs side by side. The files next
to this page are the figure (rotation.png and rotation.svg) and every number (demo.json)."""


@dataclass(frozen=True)
class Demo:
    """Everything the demo measured: `results[recipe][seed]`, in the order of `recipes` and `seeds`.

    Attributes:
        task: the task.
        recipes: the configurations.
        seeds: the seeds of each configuration.
        results: the results.
        trained: the number of trainings; the other results were known.
        seconds: how long these trainings took in all.

    >>> import tempfile
    >>> from gyroscope_lab.training.archive import Archive
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     demo = run(Lab(Archive(folder)), seeds=[0], recipes=QUICK_RECIPES[:1], task=TASK.lasting(1))
    >>> [cell.recipe.name for cell in demo.cells], demo.trained
    (['Layca 3^-5'], 1)
    """

    task: Task
    recipes: Sequence[Recipe]
    seeds: Sequence[int]
    results: list[list[Result]]
    trained: int
    seconds: float

    @property
    def cells(self) -> list[Cell]:
        """The results of each recipe over its seeds."""
        pairs = zip(self.recipes, self.results, strict=True)
        return [Cell(self.task, recipe, tuple(results)) for recipe, results in pairs]

    @property
    def layers(self) -> list[str]:
        """The names of the layers, in forward order."""
        return self.results[0][0].layers

    def as_json(self) -> dict[str, Any]:
        """Return every number and every setting, as `json.dumps` takes them; accuracies are shares."""
        correlation = rank_correlation(self.cells)
        return {
            **versions(),
            "seconds": self.seconds,
            "trained": self.trained,
            "data": self.task.source.name,
            "model": self.task.model,
            "schedule": asdict(self.task.schedule),
            "seeds": list(self.seeds),
            "layers": self.layers,
            "rank_correlation": None if isnan(correlation) else correlation,
            "in_words": in_words(self.cells),
            "configurations": [
                {
                    "recipe": asdict(cell.recipe),
                    "train_accuracy": cell.train / 100,
                    "test_accuracy": cell.test / 100,
                    "test_std": None if cell.spread is None else cell.spread / 100,
                    "final_rotation": cell.final_rotation.tolist(),
                    "trials": [
                        {"seed": seed, **result.as_json()}
                        for seed, result in zip(self.seeds, cell.results, strict=True)
                    ],
                }
                for cell in self.cells
            ],
        }


def run(lab: Lab, *, seeds: Sequence[int], recipes: Sequence[Recipe] = RECIPES, task: Task = TASK) -> Demo:
    """Train every recipe from every seed, except where the laboratory has a result, and return all results.

    >>> import tempfile
    >>> from gyroscope_lab.training.archive import Archive
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     demo = run(Lab(Archive(folder)), seeds=[0], recipes=QUICK_RECIPES[:1], task=TASK.lasting(1))
    >>> len(demo.results[0][0].rotation)
    2
    """
    start = time.perf_counter()
    wanted = trials(lab, seeds=seeds, recipes=recipes, task=task)
    missing = lab.archive.missing(wanted)
    flat = lab.run(wanted)
    results = [flat[i : i + len(seeds)] for i in range(0, len(flat), len(seeds))]
    return Demo(task, recipes, seeds, results, trained=len(missing), seconds=time.perf_counter() - start)


def trials(lab: Lab, *, seeds: Sequence[int], recipes: Sequence[Recipe] = RECIPES, task: Task = TASK) -> list[Trial]:
    """Return the trials of `run`: every recipe from every seed, recipe by recipe.

    >>> from gyroscope_lab.training.archive import Archive
    >>> len(trials(Lab(Archive("runs")), seeds=range(3)))
    30
    """
    return [lab.trial(Trial(task, recipe, seed)) for recipe in recipes for seed in seeds]


def rank_correlation(cells: Sequence[Cell]) -> float:
    """Return Spearman's correlation of mean final rotation with test accuracy over recipes; nan if one is constant.

    >>> pairs = ((0.8, 0.1), (0.9, 0.2))
    >>> its = [Result(1.0, test, loss=[], layers=["a"], rotation=[[turned]]) for test, turned in pairs]
    >>> round(rank_correlation([Cell(TASK, RECIPES[0], (one,)) for one in its]), 6)
    1.0
    """
    from scipy.stats import spearmanr  # takes a while to load

    rotations, accuracies = [cell.mean_rotation for cell in cells], [cell.test for cell in cells]
    if min(len(set(rotations)), len(set(accuracies))) < 2:
        return nan
    return float(spearmanr(rotations, accuracies).statistic)


def accuracy_text(cell: Cell) -> str:
    """Return the test accuracy in percent as tables print it, with its standard deviation over seeds.

    >>> its = [Result(1.0, test, loss=[], layers=["a"], rotation=[[0.1]]) for test in (0.96, 0.97)]
    >>> accuracy_text(Cell(TASK, RECIPES[0], tuple(its))), accuracy_text(Cell(TASK, RECIPES[0], tuple(its[:1])))
    ('96.5 ± 0.7', '96.0')
    """
    return f"{cell.test:.1f}" + ("" if cell.spread is None else f" ± {cell.spread:.1f}")


def in_words(cells: Sequence[Cell]) -> str:
    """Describe the results in three sentences that follow from the numbers alone.

    >>> pairs = ((0.8, 0.1), (0.9, 0.7))
    >>> its = [Result(1.0, test, loss=[], layers=["a"], rotation=[[turned]]) for test, turned in pairs]
    >>> cells = [Cell(TASK, Recipe(name, rate=0.1), (one,)) for name, one in zip(("slow", "fast"), its, strict=True)]
    >>> print(in_words(cells))
    All 2 configurations learned their training digits. On digits they had not seen they reach from
    80.0 % (slow, mean rotation 0.100) to 90.0 % (fast, mean rotation 0.700). Mean final rotation and test
    accuracy have a rank correlation of +1.00: the further the layers rotated, the better the network
    generalized.
    """
    worst = min(cells, key=lambda cell: cell.test)
    best = max(cells, key=lambda cell: cell.test)
    return (
        f"{_learned(cells)} On digits they had not seen they reach from {_described(worst)} "
        f"to {_described(best)}. {_related(cells)}"
    )


def _learned(cells: Sequence[Cell]) -> str:
    short = [cell.recipe.name for cell in cells if not cell.learned]
    if not short:
        return f"All {len(cells)} configurations learned their training digits."
    names = ", ".join(short)
    return f"Of {len(cells)} configurations, {len(short)} did not learn the training digits: {names}."


def _related(cells: Sequence[Cell]) -> str:
    correlation = rank_correlation(cells)
    if isnan(correlation):
        return "They cannot be ranked by rotation or by accuracy: all are equal."
    if correlation >= CLEAR:
        said = "the further the layers rotated, the better the network generalized"
    elif correlation <= -CLEAR:
        said = "the further the layers rotated, the worse the network generalized"
    else:
        said = "no clear relation between how far the layers rotated and how well the network generalized"
    return f"Mean final rotation and test accuracy have a rank correlation of {correlation:+.2f}: {said}."


def _described(cell: Cell) -> str:
    return f"{cell.test:.1f} % ({cell.recipe.name}, mean rotation {cell.mean_rotation:.3f})"


def about(demo: Demo, *, command: str) -> list[str]:
    """Return the words for the page: what is shown, what the paper found, the settings, and how to run it again.

    Args:
        demo: the results.
        command: the command that makes the page.

    >>> import tempfile
    >>> from gyroscope_lab.training.archive import Archive
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     demo = run(Lab(Archive(folder)), seeds=[0], recipes=QUICK_RECIPES[:1], task=TASK.lasting(1))
    >>> about(demo, command="gyroscope demo")[-1][:46]
    'Run it again with: gyroscope demo --again. Eve'
    """
    task, schedule = demo.task, demo.task.schedule
    told = {cell.recipe.name: _told(cell.recipe) for cell in demo.cells}
    settings = _SETTINGS.format(
        model=task.model, epochs=schedule.epochs, batch=schedule.batch, factor=schedule.factor,
        cuts=", ".join(map(str, schedule.milestones)), rate=SGD_RATE, decay=WEIGHT_DECAY,
        made=", ".join(f"{name} {version}" for name, version in versions().items()),
        seconds=sum(result.seconds for results in demo.results for result in results),
    )  # fmt: skip
    return [
        in_words(demo.cells),
        _WHAT.format(count=len(demo.recipes)),
        _CONFIGURATIONS,
        _PAPER.format(told="; ".join(f"{name} {value:.1f}" for name, value in told.items() if value is not None)),
        _SEEDS.format(
            first=demo.seeds[0],
            seeds=", ".join(map(str, demo.seeds)),
            reached="; ".join(f"{cell.recipe.name} {accuracy_text(cell)}" for cell in demo.cells),
        ),
        settings,
        _MORE.format(command=command),
    ]


def _told(recipe: Recipe) -> float | None:
    """The paper's test accuracy for a configuration on C10-CNN1."""
    alone = "SGD + L2" if recipe.weight_decay else "SGD 3^-1"
    return paper.told("c10-cnn1", recipe.name if recipe.control else alone)
