"""The demo: the rotation paper's first figure in miniature, on a CPU, in about a minute.

200 digits to train on, 1,597 to test on, a network of seven layers. Every configuration learns the 200; the question is
which of them generalize. `run` trains them, and `page` shows the result as one HTML file.
"""

from __future__ import annotations

import platform
import time
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from math import isnan, nan
from typing import Any

import numpy as np
import torch

import gyroscope
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.cells import Cell
from gyroscope_lab.papers.rotation import paper
from gyroscope_lab.papers.rotation.recipes import layca
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

_STYLE = """
body { max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1c1c1c; background: #fff;
       font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
img { width: 100%; height: auto; } figure { margin: 1.5rem 0; }
figcaption, .small { color: #555; font-size: 0.875rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.875rem; }
th, td { padding: 0.2rem 0.6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #e4e4e4; }
th { border-bottom: 2px solid #999; vertical-align: bottom; }
td:first-child, th:first-child { text-align: left; }
tr.mean td { font-weight: 600; border-bottom-color: #999; }
code, pre { font-family: ui-monospace, monospace; font-size: 0.875rem; background: #f4f4f4; }
code { padding: 0.1rem 0.25rem; } pre { padding: 0.6rem 0.8rem; overflow-x: auto; } dt { font-weight: 600; }
"""
_WHAT = """
<p>A network of seven layers learns to read handwritten digits from 200 examples, under {count} configurations. While
it learns, every layer <em>rotates</em>: the direction of its weights <i>w</i> leaves the direction
<i>w</i><sub>0</sub> they started from. Rotation is the cosine distance 1 − ⟨<i>w</i>, <i>w</i><sub>0</sub>⟩ /
(‖<i>w</i>‖ ‖<i>w</i><sub>0</sub>‖): 0 where nothing has turned, 1 at a right angle.</p>
<p><em>Layca</em> makes the learning rate an angle: in each step every layer turns by arctan ρ, where ρ begins at the
power of 3 that a configuration is named after. With α below 0 the first layers turn faster than the last, with α above
0 the last ones. <em>SGD</em> does not control how far layers turn.</p>
<p>The layer-rotation paper trains larger networks on photographs in the same ways (its figure 1), and claims: all of
them can learn their training examples, but the further <em>all</em> layers rotate, the better a network does on
examples it has not seen. The column on the right of the next table has its accuracies for one of these networks,
C10-CNN1 on CIFAR-10. They belong to another task, so compare the order, not the numbers.</p>
"""
_FIGURE = """One panel per configuration, one line per layer, dark for the first and light for the last: its rotation
after each epoch. The number in a panel is the test accuracy."""
_TRAININGS = """<p class="small">The last columns show the rotation of each layer at the end, from the first layer to
the last; darker is further. Loss is the mean training loss of the last epoch. <code>demo.json</code> holds the rotation
of each layer after every epoch.</p>"""
_MORE = """<p class="small">Every training is recorded as a run: <code>gyroscope runs</code> lists them,
<code>gyroscope show</code> and <code>gyroscope plot</code> show what each layer did, <code>gyroscope compare</code>
puts runs side by side. The files next to this page are the figure (<code>rotation.png</code> and
<code>rotation.svg</code>) and every number (<code>demo.json</code>).</p>"""


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


def versions() -> dict[str, str]:
    """Return the versions of the software that made the numbers.

    >>> list(versions())
    ['gyroscope', 'torch', 'python']
    """
    return {"gyroscope": gyroscope.__version__, "torch": torch.__version__, "python": platform.python_version()}


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


def page(demo: Demo, svg: bytes, *, command: str) -> str:
    """Return the page.

    Args:
        demo: the results.
        svg: the figure.
        command: the command that makes the page.

    >>> import tempfile
    >>> from gyroscope_lab.training.archive import Archive
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     demo = run(Lab(Archive(folder)), seeds=[0], recipes=QUICK_RECIPES[:1], task=TASK.lasting(1))
    >>> page(demo, b"<svg/>", command="gyroscope demo")[:15]
    '<!DOCTYPE html>'
    """
    image = b64encode(svg).decode()
    parts = [
        "<h1>How far layers rotate, and how well a network generalizes</h1>",
        f"<p><strong>{escape(in_words(demo.cells))}</strong></p>",
        f'<figure><img alt="Rotation curves of every configuration" src="data:image/svg+xml;base64,{image}">'
        f"<figcaption>{_FIGURE}</figcaption></figure>",
        "<h2>What is shown</h2>",
        _WHAT.format(count=len(demo.recipes)),
        "<h2>Configurations</h2>",
        _configurations(demo),
        "<h2>Every training</h2>",
        _TRAININGS,
        _trainings(demo),
        "<h2>Settings</h2>",
        _settings(demo),
        "<h2>Run it again</h2>",
        f"<pre>{escape(command)} --again</pre>",
        _MORE,
    ]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    title = "<title>Gyroscope: layer rotation on digits</title>"
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>{head}{title}<style>{_STYLE}</style></head>\n'
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _configurations(demo: Demo) -> str:
    rows = []
    for cell in demo.cells:
        final, told = cell.final_rotation, _told(cell.recipe)
        numbers = (min(final), cell.mean_rotation, max(final))
        rows.append(
            _row(
                [
                    cell.recipe.name,
                    f"{cell.train:.1f}",
                    accuracy_text(cell),
                    *(f"{value:.3f}" for value in numbers),
                    "–" if told is None else f"{told:.1f}",
                ]
            )
        )
    headings = (
        "configuration", "train %", "test %", "least rotated layer", "mean rotation", "most rotated layer",
        "test %, paper (C10-CNN1)",
    )  # fmt: skip
    return _table(headings, rows)


def _told(recipe: Recipe) -> float | None:
    """The paper's test accuracy for a configuration on C10-CNN1."""
    known = "c10-cnn1"
    if recipe.control is None:
        told = paper.WEIGHT_DECAY[known] if recipe.weight_decay else paper.SGD_RATES[known][-1]
        return paper.absolute(known, told)
    if recipe.alpha:
        return paper.by_alpha(known, recipe.alpha)
    return paper.by_rate(known, round(np.log(recipe.rate) / np.log(3)))


def _trainings(demo: Demo) -> str:
    rows = []
    for cell in demo.cells:
        for seed, result in zip(demo.seeds, cell.results, strict=True):
            texts = [
                f"{cell.recipe.name}, seed {seed}",
                f"{100 * result.train_accuracy:.1f}",
                f"{100 * result.test_accuracy:.1f}",
                f"{result.loss[-1]:.4f}",
                f"{np.mean(result.final_rotation):.3f}",
            ]
            rows.append(_row(texts, shaded=result.final_rotation))
        if len(cell.results) > 1:
            texts = [
                f"{cell.recipe.name}, mean",
                f"{cell.train:.1f}",
                f"{cell.test:.1f}",
                f"{cell.loss[-1]:.4f}",
                f"{cell.mean_rotation:.3f}",
            ]
            rows.append(_row(texts, shaded=cell.final_rotation.tolist(), kind="mean"))
    layers = [name.removesuffix(".weight") for name in demo.layers]
    return _table(("configuration", "train %", "test %", "loss", "mean rotation", *layers), rows)


def _row(texts: Sequence[str], *, shaded: Sequence[float] = (), kind: str = "") -> str:
    plain = "".join(f"<td>{escape(text)}</td>" for text in texts)
    given = f' class="{kind}"' if kind else ""
    return f"<tr{given}>{plain}{''.join(map(_shaded, shaded))}</tr>"


def _shaded(rotation: float) -> str:
    # Up to a right angle; the lightest text stays readable on the darkest cell.
    strength = 0.55 * min(max(rotation, 0.0), 1.0) if np.isfinite(rotation) else 0.0
    return f'<td style="background: rgba(31, 119, 180, {strength:.2f})">{rotation:.3f}</td>'


def _table(headings: Iterable[str], rows: Iterable[str]) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _settings(demo: Demo) -> str:
    task, schedule = demo.task, demo.task.schedule
    cuts = ", ".join(map(str, schedule.milestones))
    seconds = sum(result.seconds for results in demo.results for result in results)
    made = ", ".join(f"{name} {version}" for name, version in versions().items())
    said = {
        "Data": "scikit-learn's digits, 8×8 pixels: 200 to train on (20 of each), 1,597 to test on; pixels are "
        "normalized by the mean and the standard deviation of the 200",
        "Network": f"{task.model}: six convolutions with batch normalization and a linear layer; no biases, no gains",
        "Schedule": f"{schedule.epochs} epochs in batches of {schedule.batch}; the rate is divided by "
        f"{schedule.factor:g} after epochs {cuts}",
        "SGD": f"a rate of {SGD_RATE:.3g} and a weight decay of {WEIGHT_DECAY:g}, the best of a grid by test accuracy: "
        "if that choice flatters anyone it is SGD, since Layca's rates are the paper's",
        "Seeds": f"{', '.join(map(str, demo.seeds))}: of the initialization and of the order of the examples; ± is the "
        "standard deviation over them",
        "Made with": f"{made}; float32 on a CPU, {seconds:.0f} s of training on one core",
    }
    return "<dl>" + "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in said.items()) + "</dl>"
