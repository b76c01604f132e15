"""One layer trained, all others left as they started (figures 1 and 8 of the paper on speed, appendix A.1).

Any layer of a deep perceptron is enough to learn a hundred digits, yet the networks do not generalize alike: the later
the layer, the worse. So the signals that a layer receives matter, inputs from below and errors from above, and they
depend on the other layers. Orthogonal initialization keeps signals better (figure 8, left); and training the
first layer makes the feedback it receives tell classes apart better (right).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the name torch's own documentation uses)

from gyroscope.base import write_whole
from gyroscope_lab.data.split import Split
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.engine.run_one import loaded, one_thread
from gyroscope_lab.errors import LabError
from gyroscope_lab.papers.chance import all_exceed, estimate, gain
from gyroscope_lab.papers.study import Report, Study, Table, Verdict
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.result import Result
from gyroscope_lab.training.schedule import Schedule
from gyroscope_lab.training.task import Task
from gyroscope_lab.training.training import Training
from gyroscope_lab.training.trial import Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes


#: Figure 1 (ICLR): test accuracy in percent by the layer that was trained, the mean of ten repetitions.
FIGURE1 = (74.47, 75.98, 74.93, 73.12, 70.61, 68.27, 65.65, 63.08, 60.46, 57.52)
#: Figure 8 (ICLR), right: the test accuracy at the end of that training.
FEEDBACK_TEST = 71.88
# Layers that are frozen do not change: a run needs no measurement of every step.
_EVERY = 100
# Points of accuracy within which two means are the same.
_SAME = 1.0
# The silhouettes that a table shows; the report's numbers hold all of them.
_ROWS = 6


@dataclass(frozen=True)
class Plan:
    """The trainings of a scale: layers, repetitions, learning rate and passes; and those of the feedback."""

    layers: tuple[int, ...]
    repetitions: int
    rate: float
    epochs: int
    feedback_epochs: int
    feedback_every: int
    samples: int


# The digits' perceptron has five hidden layers of 128 units: one layer of 64 units could not learn even its examples.
_STAND_IN = "mlp-6x128"


# Ten examples of each class, all of them in every step; and the steps between two evaluations.
_EXAMPLES, _PASSES = 100, 50


PLANS = {
    "smoke": Plan((0, 4), 2, rate=3.0, epochs=300, feedback_epochs=50, feedback_every=10, samples=400),
    "small": Plan((0, 1, 2, 3, 4), 5, rate=3.0, epochs=600, feedback_epochs=200, feedback_every=10, samples=1000),
    "full": Plan(tuple(range(10)), 10, rate=10.0, epochs=4000, feedback_epochs=500, feedback_every=20, samples=5000),
}


def task_of(lab: Lab, *, init: str = "glorot_uniform", repetition: int = 0) -> Task:
    """Return the task, with other examples for each repetition.

    >>> from gyroscope_lab.training.archive import Archive
    >>> task = task_of(Lab(Archive("runs"), "full"), repetition=3)
    >>> task.model, task.source.seed, task.schedule.epochs * task.schedule.passes
    ('mlp-11x784', 3, 4000)
    """
    task = lab.task("mnist-one-layer")
    # A step is a pass: an evaluation after each would take longer than the training.
    schedule = Schedule(PLANS[lab.scale].epochs // _PASSES, batch=_EXAMPLES, cuts=(), passes=_PASSES)
    task = replace(task, schedule=schedule)
    if lab.scale != "full":
        task = replace(task, model=_STAND_IN)
    options = tuple((dict(task.options) | {"init": init}).items())
    return replace(task, options=options, source=replace(task.source, seed=repetition))


def trials(lab: Lab, init: str = "glorot_uniform") -> list[Trial]:
    """Return the trials of every layer, repetition by repetition: new examples and a new network for each.

    >>> from gyroscope_lab.training.archive import Archive
    >>> its = trials(Lab(Archive("runs"), "full"))
    >>> len(its), its[0].recipe.rate, its[9].recipe.only, its[99].seed
    (100, 10.0, 9, 9)
    """
    plan = PLANS[lab.scale]
    return [
        Trial(task_of(lab, init=init, repetition=seed), trained(plan.rate, layer), seed, every=_EVERY)
        for seed in range(plan.repetitions)
        for layer in plan.layers
    ]


def trained(rate: float, layer: int) -> Recipe:
    """Return SGD that trains one layer.

    >>> trained(10.0, 3).name
    'SGD 10, layer 3 alone'
    """
    return Recipe(f"SGD {rate:g}, layer {layer} alone", rate=rate, only=layer)


def _orthogonal_too(lab: Lab) -> list[Trial]:
    return trials(lab) + trials(lab, "orthogonal")


@dataclass(frozen=True)
class Outcome:
    """Accuracies in percent, [repetitions, layers]."""

    test: npt.NDArray[np.float64]
    train: npt.NDArray[np.float64]

    @property
    def means(self) -> npt.NDArray[np.float64]:
        """The test accuracy of each layer, the mean over repetitions."""
        return np.asarray(self.test.mean(axis=0))

    @property
    def gap(self) -> float:
        """The difference from the first of the layers to the last, in points."""
        return float(self.means[0] - self.means[-1])

    def numbers(self, layers: Sequence[int]) -> dict[str, Any]:
        """Return the numbers as JSON holds them."""
        return {"layers": list(layers), "test": self.test.tolist(), "train": self.train.tolist()}


def outcome(lab: Lab, init: str = "glorot_uniform") -> Outcome:
    """Return the accuracies of every repetition of every layer."""
    plan = PLANS[lab.scale]
    found = lab.run(trials(lab, init))
    shape = plan.repetitions, len(plan.layers)
    test = 100 * np.array([result.test_accuracy for result in found]).reshape(shape)
    return Outcome(test, 100 * np.array([result.train_accuracy for result in found]).reshape(shape))


def figure1(lab: Lab) -> Report:
    """Report test accuracy by the layer that was trained."""
    from matplotlib.figure import Figure

    plan, found = PLANS[lab.scale], outcome(lab)
    told = FIGURE1 if lab.scale == "full" else (None,) * len(plan.layers)
    rows = [
        (
            f"layer {layer}",
            float(found.means[i]),
            _deviation(found.test[:, i]),
            told[i],
            float(found.train[:, i].mean()),
        )
        for i, layer in enumerate(plan.layers)
    ]
    figure = Figure(figsize=(5.0, 3.4), layout="constrained")
    ax = figure.subplots()
    _by_layer(ax, plan.layers, found, color="C0", label="here")
    if lab.scale == "full":
        ax.plot(plan.layers, FIGURE1, "s--", color="0.6", label="paper")
        ax.legend(fontsize=8)
    ax.set_title(f"One layer trained alone ({plan.repetitions} repetitions)", fontsize=10)
    return Report(
        {"figure": figure},
        (Table(task_of(lab).name, ("trained", "test % here", "± over repetitions", "paper", "train %"), tuple(rows)),),
        (_learns(found), _degrades(found), *_as_told(lab, found)),
        found.numbers(plan.layers),
    )


def figure8(lab: Lab) -> Report:
    """Report the same with orthogonal initialization, and the silhouette of the first layer's feedback."""
    from matplotlib.figure import Figure

    plan, glorot, orthogonal = PLANS[lab.scale], outcome(lab), outcome(lab, "orthogonal")
    course = _course(lab)
    figure = Figure(figsize=(9.0, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    _by_layer(left, plan.layers, orthogonal, color="C1", label="orthogonal")
    _by_layer(left, plan.layers, glorot, color="C0", label="Glorot")
    left.legend(fontsize=8, title="initialization", title_fontsize=8)
    left.set_title("One layer trained alone", fontsize=10)
    right.plot(course.epochs, course.silhouettes, "o-", markersize=3, color="C0")
    right.set_xlabel("epoch", fontsize=9)
    right.set_ylabel("silhouette of the feedback", fontsize=9)
    right.set_title("Feedback of the first layer, which alone is trained", fontsize=10)
    right.spines[["top", "right"]].set_visible(False)
    return Report(
        {"figure": figure},
        (_initializations(lab, glorot, orthogonal), _silhouettes(lab, course)),
        tuple(_verdicts(glorot, orthogonal, course)),
        {
            "glorot": glorot.numbers(plan.layers),
            "orthogonal": orthogonal.numbers(plan.layers),
            "silhouette": {"epochs": course.epochs, "silhouettes": course.silhouettes,
                           "test": 100 * course.result.test_accuracy},
        },
    )  # fmt: skip


def _course(lab: Lab) -> Course:
    """The training of the first layer alone, at a rate of 1."""
    plan = PLANS[lab.scale]
    task = task_of(lab)
    each = replace(task.schedule, epochs=plan.feedback_epochs, passes=1)
    trial = lab.trial(Trial(replace(task, schedule=each), trained(1.0, 0)))
    kept = lab.archive.root / "feedback" / f"{trial.key[:16]}-{plan.feedback_every}-{plan.samples}.json"
    if kept.exists():
        return Course.read(kept)
    if lab.known:
        raise LabError(f"The feedback of the first layer is not in {kept}. Measure it first (leave --known out).")
    split = loaded(trial.task.source, None if lab.data is None else Path(lab.data))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    course = follow(trial, split, every=plan.feedback_every, samples=plan.samples, device=device)
    course.write(kept)
    return course


def _learns(found: Outcome) -> Verdict:
    reached = int((found.train >= 100).sum())
    return Verdict(
        "any layer alone is enough to learn the training set",
        "100 %",
        f"100 % in {reached} of {found.train.size} trainings",
        reached == found.train.size,
    )


def _as_told(lab: Lab, found: Outcome) -> list[Verdict]:
    """The verdict on the paper's accuracies.

    The layers of a repetition share its hundred images, and so whether these are easy to learn from. A repetition is
    one sample, and its layers are not ten.
    """
    if lab.scale != "full":
        return []
    off = (found.test - np.array(FIGURE1)).mean(axis=1)
    apart = estimate(off)
    return [
        Verdict(
            f"the test accuracies are those of the paper within {_SAME:g} point, on average over layers",
            f"{np.mean(FIGURE1):.1f} %",
            f"{found.means.mean():.1f} %: {apart.told} points over {len(off)} repetitions",
            apart.within(_SAME),
        )
    ]


def _degrades(found: Outcome) -> Verdict:
    half = len(found.means) // 2
    return Verdict(
        "test accuracy mostly degrades with the depth of the layer",
        f"{FIGURE1[0] - FIGURE1[-1]:.1f} points from the first to the last",
        f"{found.gap:.1f} points from the first to the last",
        bool(found.gap > 0 and found.means[:half].mean() > found.means[-half:].mean()),
    )


def _verdicts(glorot: Outcome, orthogonal: Outcome, course: Course) -> list[Verdict]:
    better = orthogonal.means - glorot.means
    first, last, most = course.silhouettes[0], course.silhouettes[-1], max(course.silhouettes)
    return [
        _learns(orthogonal),
        Verdict(
            "orthogonal initialization raises the test accuracy of every layer",
            "of all ten",
            f"of {int((better > 0).sum())} of {len(better)}, by {better.min():+.1f} to {better.max():+.1f} points",
            # Repetitions have the same examples, whatever the initialization.
            all_exceed([gain(*of_layer) for of_layer in zip(orthogonal.test.T, glorot.test.T, strict=True)]),
        ),
        Verdict(
            "and slightly reduces the gap between first and last layers",
            "slightly",
            f"{orthogonal.gap:.1f} points against {glorot.gap:.1f}",
            orthogonal.gap < glorot.gap,
        ),
        Verdict(
            "the feedback of the first layer tells classes apart better as this layer is trained",
            "its silhouette increases",
            f"from {first:.3f} to {last:.3f}, at most {most:.3f}",
            last > first,
        ),
    ]


def _initializations(lab: Lab, glorot: Outcome, orthogonal: Outcome) -> Table:
    plan = PLANS[lab.scale]
    told = FIGURE1 if lab.scale == "full" else (None,) * len(plan.layers)
    rows = [
        (f"layer {layer}", float(glorot.means[i]), told[i], float(orthogonal.means[i]), None,
         _deviation(orthogonal.test[:, i]), float(orthogonal.train[:, i].mean()))
        for i, layer in enumerate(plan.layers)
    ]  # fmt: skip
    columns = ("trained", "Glorot %", "paper", "orthogonal %", "paper", "± over repetitions", "train %, orthogonal")
    return Table(f"{task_of(lab).name}: test accuracy by initialization", columns, tuple(rows))


def _silhouettes(lab: Lab, course: Course) -> Table:
    places = sorted({round(place) for place in np.linspace(0, len(course.epochs) - 1, _ROWS)})
    rows: list[tuple[object, ...]] = [
        (f"silhouette after epoch {course.epochs[place]}", course.silhouettes[place], None) for place in places
    ]
    told = FEEDBACK_TEST if lab.scale == "full" else None
    rows.append(("test accuracy at the end, %", 100 * course.result.test_accuracy, told))
    return Table("Feedback of the first layer, trained alone", ("", "here", "paper"), tuple(rows))


def _deviation(values: npt.NDArray[np.float64]) -> float | None:
    return float(values.std(ddof=1)) if len(values) > 1 else None


def _by_layer(ax: Axes, layers: Sequence[int], found: Outcome, *, color: str, label: str) -> None:
    spread = found.test.std(axis=0, ddof=1) if len(found.test) > 1 else None
    ax.errorbar(layers, found.means, yerr=spread, fmt="o-", capsize=2, color=color, label=label)
    ax.set_xticks(list(layers))
    ax.set_xlabel("index of the trained layer", fontsize=9)
    ax.set_ylabel("test accuracy (%)", fontsize=9)
    ax.spines[["top", "right"]].set_visible(False)


@dataclass(frozen=True)
class Course:
    """The silhouette over a training, and its result.

    Attributes:
        epochs: the epochs at which it was measured, 0 for before training.
        silhouettes: the silhouettes.
        result: the result of the training.
    """

    epochs: list[int]
    silhouettes: list[float]
    result: Result

    def write(self, path: Path) -> None:
        """Write it to a file that is there whole or not at all."""
        content = {"epochs": self.epochs, "silhouettes": self.silhouettes, "result": self.result.as_json()}
        write_whole(path, json.dumps(content, allow_nan=False) + "\n")

    @classmethod
    def read(cls, path: Path) -> Course:
        """Read a file of `write`."""
        try:
            content = json.loads(path.read_text())
            return cls(content["epochs"], content["silhouettes"], Result.from_json(content["result"], path))
        except LabError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LabError(f"{path} cannot be read: {error}. Delete it to measure again.") from error


def feedback(model: nn.Sequential, place: int, x: Tensor, y: Tensor) -> Tensor:
    """Return the feedback of each example, g_i = ∂L_i/∂h_i, with h_i the output of the module at `place`.

    L_i is the cross-entropy of example i. The result is [examples, units].

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> feedback(model, 1, torch.ones(5, 2), torch.zeros(5, dtype=torch.int64)).shape
    torch.Size([5, 3])
    """
    with torch.no_grad():
        output = model[: place + 1](x)
    output.requires_grad_(True)
    # The sum, not the mean, so that an example's feedback does not depend on their number.
    loss = F.cross_entropy(model[place + 1 :](output), y, reduction="sum")
    [gradient] = torch.autograd.grad(loss, [output])
    return gradient


def silhouette(vectors: Tensor, y: Tensor) -> float:
    """Return the silhouette of vectors [N, units] in classes y.

    With a_i the mean cosine distance of vector i to the others of its class, and b_i the least of its mean distances to
    those of another class, it is s = (1/N) Σ_i (b_i − a_i) / max(a_i, b_i): 1 where classes have nothing in common, 0
    where they lie on each other.

    >>> vectors = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0], [0.0, 3.0]])
    >>> silhouette(vectors, torch.tensor([0, 0, 1, 1])), silhouette(vectors, torch.tensor([0, 1, 0, 1]))
    (1.0, -0.5)
    """
    from sklearn.metrics import silhouette_score

    return float(silhouette_score(vectors.double().cpu().numpy(), y.cpu().numpy(), metric="cosine"))


def follow(trial: Trial, split: Split, *, every: int, samples: int, device: str = "cpu") -> Course:
    """Train, and measure the silhouette of the first layer's feedback every `every` epochs, over test examples.

    A layer's output is that of its ReLU, where its feedback arrives. As with every training of a laboratory, the CPU
    computes on one thread.

    Args:
        trial: the trial; its network is a perceptron with ReLUs and without batch normalization.
        split: its data.
        every: epochs from one measurement to the next.
        samples: the number of test examples, the first ones.
        device: the device to train on.

    >>> from gyroscope_lab.training.recipe import Recipe
    >>> from gyroscope_lab.training.tasks import task
    >>> digits = task("digits-one-layer").lasting(2)
    >>> follow(Trial(digits, Recipe("SGD", 1.0, only=0)), digits.source.load(), every=1, samples=50).epochs
    [0, 1, 2]
    """
    with one_thread():
        return _follow(Training(trial, split, device=device), every, samples)


def _follow(training: Training, every: int, samples: int) -> Course:
    model = training.model
    assert isinstance(model, nn.Sequential)
    place = next(i for i, module in enumerate(model) if isinstance(module, nn.ReLU))
    x = training.split.inputs(training.split.x_test[:samples])
    y = training.split.y_test[:samples]
    epochs, found = [0], [silhouette(feedback(model, place, x, y), y)]

    def look(training: Training) -> None:
        if training.epoch % every == 0:
            epochs.append(training.epoch)
            found.append(silhouette(feedback(model, place, x, y), y))

    for _ in training.proceed(look):
        pass
    return Course(epochs, found, training.finish())


STUDIES = (
    Study("speed/fig1", "Figure 1: test accuracy by the one layer that is trained", trials, figure1),
    Study(
        "speed/fig8", "Figure 8: orthogonal initialization, and the first layer's feedback", _orthogonal_too, figure8
    ),
)
