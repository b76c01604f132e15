"""The problems, recipes and scores that the studies of steering share.

Every problem has a task per scale: the embedded digits or a made text for seconds, digits or the beginning of
tinyshakespeare for minutes on a CPU, and the published data on a GPU. All of them lower the rate to zero along half a
cosine. Recipes other than steering also have a warm-up over the first twentieth, as is usual; steering has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf, isfinite, nan
from typing import Any

import numpy as np

from gyroscope import steer
from gyroscope_lab.data.augment import Augmentation
from gyroscope_lab.data.source import Source
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.cells import Cell
from gyroscope_lab.papers.chance import LEVEL, Estimate, gain
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.result import Result
from gyroscope_lab.training.schedule import Schedule
from gyroscope_lab.training.task import Task
from gyroscope_lab.training.tasks import task

#: ρ of the presets of `gyroscope.steer`, for heads of up to 128 inputs. Those over SGD and AdamW were fixed on
#: digits-CNN and on a character GPT before anything else was trained. Over Muon, 0.04 replaced 0.028 when results of
#: beyond/no-tuning and beyond/transfer and of the benchmark of regimes were known, on tinyshakespeare, on which
#: no-tuning tests its GPT and LSTM.
RATES = {"sgd": 3.0**-3, "adamw": 0.028, "muon": 0.04}
#: The share of the steps over which recipes other than steering warm up.
WARMUP = 0.05
#: Epochs of the images' tasks at full scale: a third of the papers' or fewer, so that grids can be paid for.
EPOCHS = 30
#: Seeds of a cell by scale. The small scale had three at first, from which most differences were undecided.
SEEDS = {"smoke": 1, "small": 10, "full": 3}
#: Smallest differences that count: points of accuracy, and nats of the loss of a text.
POINTS, NATS = 0.5, 0.01

_DIGITS = Source("digits")
_MADE = Source("made-text", context=16)
_PART = Source("shakespeare", context=32, characters=100_000)
_WHOLE = Source("shakespeare", context=256)
_SMALL_IMAGES = Schedule(epochs=5, passes=12, batch=32, cuts=(), cosine=True)
_SMALL_TEXT = Schedule(epochs=4, drawn=75, batch=16, cuts=(), cosine=True)
_SMOKE_IMAGES = Schedule(epochs=2, passes=2, batch=32, cuts=(), cosine=True)
_SMOKE_TEXT = Schedule(epochs=2, drawn=15, batch=8, cuts=(), cosine=True)
_FULL_TEXT = Schedule(epochs=10, drawn=250, batch=64, cuts=(), cosine=True)
_SMOKE_CNN = Task("cosine-digits-cnn", _DIGITS, "digits-cnn", schedule=_SMOKE_IMAGES, test_loss=True)
_MADE_SIZE = (("vocab", 22), ("context", 16), ("width", 16), ("depth", 1), ("heads", 2), ("tied", True))


@dataclass(frozen=True)
class Problem:
    """A problem, with its task per scale.

    Attributes:
        name: the name in tables and figures.
        full: the task at full scale.
        small: the task at the small scale.
        smoke: the task of a smoke test.
        convolutional: True if its matrices are kernels, for which there is no Muon.
    """

    name: str
    full: Task
    small: Task
    smoke: Task
    convolutional: bool = False

    def at(self, lab: Lab) -> Task:
        """The task at the laboratory's scale."""
        return {"full": self.full, "small": self.small, "smoke": self.smoke}[lab.scale]

    @property
    def preset(self) -> str:
        """The preset that `gyroscope.steer` takes."""
        return "sgd" if self.convolutional else "muon"


def _images(name: str, full: Task, model: str, *, convolutional: bool = True, **options: Any) -> Problem:
    """A problem whose stand-in is a network on the digits."""
    long = replace(full.schedule, epochs=EPOCHS, cuts=(), cosine=True, restarts=False)
    whole = replace(full, name=f"cosine-{full.name}", schedule=long, tests="last", stop_at=None, fails=None)
    own = f"cosine-digits-{model.removeprefix('digits-')}" + "-keras" * options.get("keras", False)
    small = Task(own, _DIGITS, model, tuple(options.items()), _SMALL_IMAGES, test_loss=True)
    if full.source == _DIGITS:
        whole = replace(small, precision="float32")  # the same trainings at both scales
    smoke = _SMOKE_CNN if convolutional else replace(small, schedule=_SMOKE_IMAGES)
    return Problem(name, replace(whole, test_loss=True), small, smoke, convolutional)


def _text(
    name: str, model: str, full: dict[str, Any], small: dict[str, Any], smoke: tuple[tuple[str, Any], ...]
) -> Problem:
    """A problem on tinyshakespeare, the beginning of it, or a made text."""
    return Problem(
        name,
        Task(f"shakespeare-{model}", _WHOLE, model, tuple(full.items()), _FULL_TEXT, test_loss=True),
        Task(f"shakespeare-part-{model}", _PART, model, tuple(small.items()), _SMALL_TEXT, test_loss=True),
        Task(f"made-text-{model}", _MADE, model, smoke, _SMOKE_TEXT, test_loss=True),
    )


_VIT = Task(
    "c10-vit",
    Source("cifar-10", validation=0.1),
    "vit-small",
    schedule=Schedule(epochs=100, batch=128, drop_last=True),
    augmentation=Augmentation(),
)
DIGITS_CNN = _images("digits-CNN", task("digits"), "digits-cnn")
GPT = _text(
    "character GPT",
    "gpt-small",
    {"context": 256, "width": 384, "depth": 6, "heads": 6, "tied": True, "dropout": 0.2},
    {"context": 32, "width": 64, "depth": 2, "heads": 4, "tied": True},
    _MADE_SIZE,
)
LSTM = _text(
    "LSTM",
    "lstm-small",
    {"width": 512, "depth": 2, "dropout": 0.2},
    {"width": 64, "depth": 2},
    (("vocab", 22), ("width", 16), ("depth", 1)),
)
VIT = _images("ViT", _VIT, "vit-small", convolutional=False, channels=1, side=8, patch=2, width=32, depth=2, heads=2)
#: The problems. C10-CNN1 has the digits-CNN as its stand-in, and in a smoke test so have all networks of convolutions.
PROBLEMS = (
    DIGITS_CNN,
    _images("C10-CNN1", task("c10-cnn1"), "digits-cnn"),
    _images("C100-resnet", task("c100-resnet"), "resnet-14", channels=1, keras=True),
    _images("ResNet-56", task("c10-deep"), "resnet-14", channels=1),
    VIT,
    GPT,
    LSTM,
)


def _unseen(name: str, source: Source, model: str, *, passes: int, on_digits: dict[str, Any], **own: Any) -> Problem:
    """A problem on few images, which has no full scale; a smoke test is on digits."""
    schedule = Schedule(epochs=5, passes=passes, batch=32, cuts=(), cosine=True)
    small = Task(f"cosine-{source.name}-{model}", source, model, tuple(own.items()), schedule, test_loss=True)
    smoke = replace(small, source=_DIGITS, options=tuple((own | on_digits).items()), schedule=_SMOKE_IMAGES)
    return Problem(name, small, small, smoke)


_TINY: dict[str, Any] = {"width": 32, "depth": 2, "heads": 2}
_TINY_ON_DIGITS: dict[str, Any] = {"channels": 1, "side": 8, "patch": 2}
_MNIST, _CIFAR = Source("mnist", per_class=100), Source("cifar-10", per_class=200)
#: Problems on which no preset, no default and no grid was chosen: they were trained after all of these were fixed.
UNSEEN = (
    _unseen("MLP, MNIST", _MNIST, "mlp-3x128", passes=2, on_digits={"inputs": 64}, inputs=784, biases=True),
    _unseen(
        "ViT, MNIST", _MNIST, "vit-small", passes=2, on_digits=_TINY_ON_DIGITS, channels=1, side=28, patch=7, **_TINY
    ),
    _unseen("ViT, CIFAR-10", _CIFAR, "vit-small", passes=1, on_digits=_TINY_ON_DIGITS, patch=8, **_TINY),
)


def problems(lab: Lab, of: Sequence[Problem] = PROBLEMS) -> list[Problem]:
    """Return the problems whose tasks at this scale differ; at full scale without those that are small."""
    its = [one for one in of if lab.scale != "full" or one.full != one.small]
    return list({one.at(lab): one for one in reversed(its)}.values())[::-1]


def presets(lab: Lab, problem: Problem) -> list[str]:
    """Return the presets of steering that are trained, by name.

    There is no Muon for convolutions. At full scale SGD's is left out where there are none: `steer` does not take it
    there, and at the small scale it was far behind.

    >>> from gyroscope_lab.training.archive import Archive
    >>> [presets(Lab(Archive("runs"), scale), GPT) for scale in ("small", "full")]
    [['sgd', 'adamw', 'muon'], ['adamw', 'muon']]
    """
    left_out = {"muon"} if problem.convolutional else {"sgd"} if lab.scale == "full" else set()
    return [name for name in RATES if name not in left_out]


def seeds(lab: Lab) -> range:
    """Return the seeds of a cell that a verdict rests on."""
    return range(SEEDS[lab.scale])


def steered(inner: str, *, rate: float | None = None, **options: Any) -> Recipe:
    """Return `gyroscope.steer` under one of its presets, with what is said changed.

    >>> steered("sgd").name, steered("adamw", rate=0.1, project=False).name
    ('steer sgd', 'steer adamw 0.1, project=False')
    """
    changed = "" if rate is None else f" {rate:.3g}"
    changed += "".join(f", {name}={value}" for name, value in options.items())
    own = (("inner", inner), *options.items())
    return Recipe(f"steer {inner}{changed}", rate=rate or RATES[inner], optimizer="steer", options=own)


def untuned(task: Task, inner: str, **options: Any) -> Recipe:
    """Return a preset of `gyroscope.steer` at the ρ that it has for the task's network, with what is said changed.

    >>> untuned(GPT.small, "adamw").name, untuned(GPT.full, "adamw").name
    ('steer adamw', 'steer adamw 0.0123')
    """
    rate = _rate(task, inner)
    return steered(inner, rate=None if rate == RATES[inner] else rate, **options)


@cache
def _rate(task: Task, inner: str) -> float:
    return float(steer(task.network(0), inner).param_groups[0]["lr"])


def adamw(task: Task, rate: float, decay: float) -> Recipe:
    """Return AdamW: with β₂ = 0.95 and without decay of vectors for sequences, else as for images.

    >>> adamw(GPT.small, 1e-3, 0.1).name
    'AdamW 0.001, decay 0.1'
    """
    kind = "adamw-text" if task.source.is_text else "adamw"
    return Recipe(f"AdamW {rate:.2g}, decay {decay:g}", rate=rate, optimizer=kind, weight_decay=decay)


def sgd(task: Task, rate: float, decay: float) -> Recipe:
    """Return SGD with a momentum of 0.9 and weight decay.

    >>> sgd(DIGITS_CNN.small, 3**-2, 5e-4).name
    'SGD 0.11, decay 0.0005'
    """
    return Recipe(f"SGD {rate:.2g}, decay {decay:g}", rate=rate, momentum=0.9, weight_decay=decay)


def warmed(task: Task, share: float = WARMUP) -> Task:
    """Return the task with a warm-up over a share of its epochs.

    >>> warmed(GPT.small).schedule.warmup
    0.2
    """
    return replace(task, schedule=replace(task.schedule, warmup=share * task.schedule.epochs))


def loss_of(task: Task, result: Result) -> float:
    """Return what is compared, the lower the better: the best test loss of a text, else the test error in percent."""
    if task.source.is_text:
        return result.best_test_loss
    return 100.0 * (1.0 - result.test_accuracy)


def score(cell: Cell) -> float:
    """The mean of `loss_of` over seeds."""
    return float(np.mean([loss_of(cell.task, result) for result in cell.results]))


def deviation(cell: Cell) -> float | None:
    """The standard deviation of `loss_of` over seeds; None for one seed."""
    values = [loss_of(cell.task, result) for result in cell.results]
    return float(np.std(values, ddof=1)) if len(values) > 1 and all(map(isfinite, values)) else None


def difference(first: Cell, second: Cell) -> Estimate:
    """Return `first` − `second` in `loss_of`, over the seeds that both have; without an error if one has no loss.

    Cells of the same seed share initial weights and batches, so their differences are compared, seed by seed.
    """
    both = [seed for seed in first.by_seed if seed in second.by_seed]
    if not both:
        return Estimate(nan, None, 0)
    found = gain(*([loss_of(cell.task, cell.by_seed[seed]) for seed in both] for cell in (first, second)))
    return found if isfinite(found.mean) else Estimate(score(first) - score(second), None, 0)


@dataclass(frozen=True)
class Gain:
    """The gain of a change to a training, in points or nats.

    Attributes:
        without: the cell without the change.
        changed: the cell with it.
    """

    without: Cell
    changed: Cell

    @property
    def value(self) -> float:
        """By how much the score falls, the lower the better."""
        return score(self.without) - score(self.changed)

    @property
    def over_seeds(self) -> Estimate:
        """The gain with its error, over the seeds that both have.

        Infinite if one of them has more seeds without a loss; by Fisher's exact test that may be chance or not.
        """
        cells = (self.without, self.changed)
        lost = [sum(not isfinite(loss_of(cell.task, result)) for result in cell.results) for cell in cells]
        if lost[0] == lost[1]:
            return difference(*cells)
        from scipy.stats import fisher_exact  # takes a while to load

        table = [[count, len(cell.results) - count] for count, cell in zip(lost, cells, strict=True)]
        is_sure = fisher_exact(table).pvalue <= 1 - LEVEL
        return Estimate(inf if lost[0] > lost[1] else -inf, 0.0 if is_sure else None, inf)

    @property
    def noise(self) -> float | None:
        """The standard error of the gain over seeds; None for one seed."""
        return self.over_seeds.error


def decided(lab: Lab, cells: Sequence[Cell]) -> bool:
    """Return whether a verdict can rest on these cells: each has all its seeds, and this is not a smoke test."""
    return lab.scale != "smoke" and all(len(cell.results) >= len(seeds(lab)) for cell in cells)


def tolerance(task: Task) -> float:
    """The smallest difference of `loss_of` that counts."""
    return NATS if task.source.is_text else POINTS


def unit(task: Task) -> str:
    """The unit of `loss_of`."""
    return "nats" if task.source.is_text else "points"


def raw(cell: Cell) -> dict[str, Any]:
    """Return the numbers of a cell, seed by seed."""
    return {
        "task": cell.task.name,
        "recipe": cell.recipe.name,
        "warmup": cell.task.schedule.warmup,
        "seeds": [
            {
                "test": result.test_accuracy,
                "train": result.train_accuracy,
                "best_test_loss": result.best_test_loss,
                "final_test_loss": result.test_losses[-1] if result.test_losses else None,
                "seconds": round(result.seconds, 1),
                "ended": result.ended,
            }
            for result in cell.results
        ],
    }


def mean(values: Sequence[float]) -> float:
    """The mean; nan for none."""
    return float(np.mean(values)) if values else float("nan")
