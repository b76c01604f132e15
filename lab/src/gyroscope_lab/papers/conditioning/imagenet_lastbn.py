"""Batch normalization before the last layer on ImageNet (figure A13 and table A1 of the conditioning paper).

ResNets of 18 and 50 layers learn faster with it (ResNet_LastBN), and as they learn more easily they gain more from
regularization: a larger weight decay, or dropout before the last layer.

The paper draws the scale of an image at random before it takes 224 × 224 pixels of it. Here images are kept at one
scale, and moved by up to 16 pixels, as far as there would be room in 256 × 256.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from gyroscope_lab.data.augment import Augmentation
from gyroscope_lab.data.image_cache import Progress
from gyroscope_lab.data.source import Source
from gyroscope_lab.data.split import Split
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.errors import LabError
from gyroscope_lab.papers.cells import some
from gyroscope_lab.papers.study import Report, Study, Table, Verdict
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.result import Result
from gyroscope_lab.training.schedule import Schedule
from gyroscope_lab.training.task import Task
from gyroscope_lab.training.trial import Trial

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class ByEpoch(Source):
    """A source whose test set takes the place of held-out data, so that a result has a test accuracy for each epoch.

    All examples are trained on, as in the paper. These accuracies choose neither weights nor rates. The last weights
    are tested, so that the last accuracy is the test accuracy.

    Attributes:
        tested: "epoch". It has no default, so that the key of a trial differs from that of one that is tested once.

    >>> split = ByEpoch("digits", tested="epoch").load()
    >>> split.x_val is split.x_test, len(split.x_train)
    (True, 200)
    >>> ByEpoch("digits", validation=0.1, tested="epoch")
    Traceback (most recent call last):
    gyroscope_lab.errors.LabError: `validation` must be 0.0 in a ByEpoch, got 0.1: the test set takes its place...
    """

    tested: Literal["epoch"] = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.validation:
            raise LabError(
                f"`validation` must be 0.0 in a ByEpoch, got {self.validation}: the test set takes its place. "
                "Use a Source to hold examples out."
            )

    def load(self, folder: Path | str | None = None, *, on_progress: Progress | None = None) -> Split:
        """Return the examples of the source, with the test set as the validation set too."""
        split = super().load(folder, on_progress=on_progress)
        return replace(split, x_val=split.x_test, y_val=split.y_test)


#: The architectures, and the names of their models.
MODELS = {"ResNet": "imagenet-resnet", "ResNet_LastBN": "imagenet-resnet-lastbn"}
#: The depths of each scale.
DEPTHS: dict[str, tuple[int, ...]] = {"smoke": (18,), "small": (18, 50), "full": (18, 50)}
#: The three regularizations of table A1 by name: weight decay, and the share that dropout leaves out.
VARIANTS = {"standard": (1e-4, 0.0), "WD=0.0002": (2e-4, 0.0), "DR=0.3": (1e-4, 0.3)}
#: Table A1: top-1 validation errors in percent, by architecture and depth, in the order of `VARIANTS`.
PAPER = {
    ("ResNet", 18): (29.78, 30.07, 30.62),
    ("ResNet", 50): (23.97, 24.37, 23.81),
    ("ResNet_LastBN", 18): (29.38, 28.96, 29.32),
    ("ResNet_LastBN", 50): (23.76, 23.49, 23.47),
}
SEED = 1
_FULL = Task(
    "imagenet",
    ByEpoch("imagenet", normalization="channel", tested="epoch"),
    "imagenet-resnet-18",
    options=(("classes", 1000),),
    schedule=Schedule(epochs=100, batch=256, cuts=(0.3, 0.6, 0.9), factor=10.0),
    augmentation=Augmentation(shift=16, fill="reflect", rounding="uniform"),
)
# The stand-in: its epochs, and the side of its photographs in pixels.
_EPOCHS = {"smoke": 2, "small": 20}
_SIDE = 32
# A folder with more classes than this is too large for a test.
_FEW = 20
_COLORS = {"ResNet": "#2c728e", "ResNet_LastBN": "#e8a500"}


@dataclass(frozen=True)
class Trained:
    """A network of table A1, and its result."""

    architecture: str
    depth: int
    variant: str
    result: Result

    @property
    def error(self) -> float:
        """The top-1 error on the test set, in percent."""
        return 100 * (1 - self.result.test_accuracy)

    @property
    def training_errors(self) -> list[float]:
        """The top-1 error of each epoch as it was while training, in percent."""
        return [100 * (1 - accuracy) for accuracy in self.result.accuracy]

    @property
    def test_errors(self) -> list[float]:
        """The top-1 error on the test set after each epoch, in percent."""
        return [100 * (1 - accuracy) for accuracy in self.result.validation]


def standard(lab: Lab) -> list[Trial]:
    """Return the trials of figure A13.

    >>> from gyroscope_lab.training.archive import Archive
    >>> [one.task.model for one in standard(Lab(Archive("runs"), "full"))][:2]
    ['imagenet-resnet-18', 'imagenet-resnet-lastbn-18']
    """
    return [_trial(lab, name, depth, "standard") for depth in DEPTHS[lab.scale] for name in MODELS]


def every(lab: Lab) -> list[Trial]:
    """Return the trials of table A1.

    >>> from gyroscope_lab.training.archive import Archive
    >>> len(every(Lab(Archive("runs"), "full")))
    12
    """
    return [_trial(lab, name, *cell) for cell in cells(lab) for name in MODELS]


def cells(lab: Lab) -> list[tuple[int, str]]:
    """Return the columns of table A1: depths and regularizations; a smoke test has the first of each.

    >>> from gyroscope_lab.training.archive import Archive
    >>> cells(Lab(Archive("runs"))), len(cells(Lab(Archive("runs"), "small")))
    ([(18, 'standard')], 6)
    """
    chosen = ["standard"] if lab.scale == "smoke" else list(VARIANTS)
    return [(depth, variant) for depth in DEPTHS[lab.scale] for variant in chosen]


def images(lab: Lab) -> Task:
    """Return ImageNet; at other scales photographs of few classes, if the laboratory's folder has some, else digits.

    >>> from gyroscope_lab.training.archive import Archive
    >>> images(Lab(Archive("runs"))).source.name, images(Lab(Archive("runs"), "full")).source.name
    ('digits', 'imagenet')
    """
    if lab.only:
        raise LabError(f"`--task` must be left out for this study, got {', '.join(lab.only)}: it has ImageNet alone.")
    if lab.scale == "full":
        return _FULL
    schedule = Schedule(epochs=_EPOCHS[lab.scale], batch=32, cuts=(0.3, 0.6, 0.9), factor=10.0)
    classes = _classes(lab.data)
    if not 0 < classes <= _FEW:
        digits, options = ByEpoch("digits", tested="epoch"), (("channels", 1), ("classes", 10))
        return Task("digits-imagenet", digits, _FULL.model, options=options, schedule=schedule)
    return replace(
        _FULL,
        source=replace(_FULL.source, side=_SIDE),
        options=(("classes", classes),),
        schedule=schedule,
        augmentation=Augmentation(shift=2, fill="reflect", rounding="uniform"),
    )


def figure(lab: Lab) -> Report:
    """Report training and test errors by epoch."""
    found = _trained(lab, standard(lab))
    columns = ("network", "training error % here", "test error % here", "paper", "difference")
    rows = []
    for one in found:
        told = _paper(one.architecture, one.depth, one.variant) if lab.scale == "full" else None
        difference = None if told is None else one.error - told
        rows.append((f"{one.architecture}, {one.depth} layers", one.training_errors[-1], one.error, told, difference))
    return Report(
        {"figure": _draw(found)},
        (Table("Top-1 errors", columns, tuple(rows)),),
        tuple(_faster(lab, found, depth) for depth in DEPTHS[lab.scale]),
        {"networks": [_numbers(one) for one in found]},
    )


def table(lab: Lab) -> Report:
    """Report test errors of three regularizations."""
    found = {(one.architecture, one.depth, one.variant): one for one in _trained(lab, every(lab))}
    rows: list[tuple[object, ...]] = []
    for name in MODELS:
        its = [found.get((name, *cell)) for cell in cells(lab)]
        rows.append((name, "here", *(None if one is None else one.error for one in its)))
        rows.append((name, "paper", *(_paper(name, *cell) if lab.scale == "full" else None for cell in cells(lab))))
    columns = ("method", "", *(f"{depth} layers, {variant}" for depth, variant in cells(lab)))
    return Report(
        {},
        (Table("Top-1 test error (%)", columns, tuple(rows)),),
        tuple(_better(lab, found, depth) for depth in DEPTHS[lab.scale]),
        {"networks": [_numbers(one) for one in found.values()]},
    )


def _paper(architecture: str, depth: int, variant: str) -> float:
    return PAPER[architecture, depth][list(VARIANTS).index(variant)]


def _trial(lab: Lab, architecture: str, depth: int, variant: str) -> Trial:
    task = images(lab)
    decay, dropout = VARIANTS[variant]
    model = f"{MODELS[architecture]}-{depth}"
    options = (*task.options, ("dropout", dropout)) if dropout else task.options
    recipe = Recipe(f"SGD, {variant}", rate=0.1, momentum=0.9, nesterov=True, weight_decay=decay)
    name = task.name.removesuffix("imagenet") + model
    return Trial(replace(task, name=name, model=model, options=options), recipe, SEED)


def _classes(folder: Path | str | None) -> int:
    """The number of classes of photographs in a folder; 0 if there are none, or not in both parts."""
    for within in ("", "imagenet", "ImageNet", "ILSVRC2012"):
        parts = [Path(folder, within, part) for part in ("train", "val")] if folder is not None else []
        if parts and all(part.is_dir() for part in parts):
            return sum(1 for one in parts[0].iterdir() if one.is_dir() and not one.name.startswith("."))
    return 0


def _trained(lab: Lab, trials: list[Trial]) -> list[Trained]:
    held = lab.held(trials)
    found = []
    for trial, result in zip(held, lab.run(held), strict=True):
        model, _, depth = trial.task.model.rpartition("-")
        name = next(name for name, its in MODELS.items() if its == model)
        given = (trial.recipe.weight_decay, dict(trial.task.options).get("dropout", 0.0))
        variant = next(variant for variant, its in VARIANTS.items() if its == given)
        found.append(Trained(name, int(depth), variant, result))
    return list(some(found))


def _faster(lab: Lab, found: list[Trained], depth: int) -> Verdict:
    """The verdict on which network has the lower training error, on average over epochs."""
    says = f"of {depth} layers ResNet_LastBN is optimized more efficiently than ResNet"
    its = {one.architecture: one.training_errors for one in found if one.depth == depth}
    if len(its) < len(MODELS):
        return Verdict(says, "so", "–", None)
    plain, normal = (sum(its[name]) / len(its[name]) for name in MODELS)
    here = f"training error {normal:.2f} against {plain:.2f} %, the mean over epochs"
    return Verdict(says, "lower training errors", here, normal < plain if lab.scale == "full" else None)


def _better(lab: Lab, found: dict[tuple[str, int, str], Trained], depth: int) -> Verdict:
    says = f"of {depth} layers ResNet_LastBN has a lower test error than ResNet, more so with more regularization"

    names = tuple(MODELS)
    told = {variant: _paper(names[0], depth, variant) - _paper(names[1], depth, variant) for variant in VARIANTS}
    here = {}
    for variant in VARIANTS:
        plain, normal = (found.get((name, depth, variant)) for name in names)
        if plain is not None and normal is not None:
            here[variant] = plain.error - normal.error
    whole = len(here) == len(VARIANTS) and lab.scale == "full"
    holds = whole and all(gain > (here["standard"] if variant != "standard" else 0) for variant, gain in here.items())
    return Verdict(says, _listed(told), _listed(here), holds if whole else None)


def _listed(gains: dict[str, float]) -> str:
    return ", ".join(f"{variant}: by {gain:.2f}" for variant, gain in gains.items()) or "–"


def _numbers(one: Trained) -> dict[str, object]:
    return {
        "architecture": one.architecture,
        "depth": one.depth,
        "variant": one.variant,
        "test_error": one.error,
        "training_errors": [round(error, 3) for error in one.training_errors],
        "test_errors": [round(error, 3) for error in one.test_errors],
        "loss": [round(loss, 4) for loss in one.result.loss],
        "seconds": round(one.result.seconds, 1),
    }


def _draw(found: Sequence[Trained]) -> Figure:
    """Draw training errors as solid lines, and test errors as dashed ones."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    depths = sorted({one.depth for one in found})
    figure = Figure(figsize=(4.2 * len(depths) + 1.6, 3.4), layout="constrained")
    axes = figure.subplots(1, len(depths), squeeze=False)[0]
    for letter, depth, ax in zip("abcd", depths, axes, strict=False):
        for one in found:
            if one.depth != depth:
                continue
            for errors, dash, name in ((one.training_errors, "-", "training"), (one.test_errors, "--", "test")):
                epochs, label = np.arange(1, len(errors) + 1), f"{one.architecture}, {name}"
                ax.plot(epochs, errors, dash, color=_COLORS[one.architecture], linewidth=1.2, label=label)
        ax.set_title(f"({letter}) {depth} layers", fontsize=10)
        ax.set_xlabel("epoch", fontsize=9)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.grid(color="0.9", linewidth=0.6)
        ax.set_axisbelow(True)
        ax.tick_params(labelsize=8)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
    axes[0].set_ylabel("top-1 error (%)", fontsize=9)
    lines = {line.get_label(): line for ax in axes for line in ax.lines}
    figure.legend(lines.values(), lines, loc="outside right center", fontsize=8)
    figure.suptitle("Batch normalization before the last layer", fontsize=11)
    return figure


STUDIES = (
    Study("imagenet/a13", "Figure A13: errors of ResNet and ResNet_LastBN on ImageNet, by epoch", standard, figure),
    Study(
        "imagenet/tablea1",
        "Table A1: test errors of ResNet and ResNet_LastBN on ImageNet, with more decay and with dropout",
        every,
        table,
    ),
)
