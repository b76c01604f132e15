"""Five learning rates, and how alike they become: implicit decay in a network with batch normalization (section 4.3).

A layer followed by batch normalization is scale-invariant. Under SGD its norm grows by equation 19, faster the larger
the explicit learning rate α is, and its effective learning rate α̂_k = α/‖w_k‖² falls, about as α̂₀/√(1 + k/k₀) with
k₀ = ‖w₀‖⁴/(2α²g̃²), g̃ = ‖∇J(w)‖‖w‖. That happens to all layers but the last, which nothing normalizes. So networks are
trained twice: with the classifier left as it was drawn, where scale-invariant layers are all there is to train, and
with the classifier trained at α too, as usual.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.errors import LabError
from gyroscope_lab.papers.dynamics.norms import Course, course
from gyroscope_lab.papers.dynamics.norms_report import report
from gyroscope_lab.papers.study import Report, Study
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.schedule import Schedule
from gyroscope_lab.training.task import Task
from gyroscope_lab.training.trial import Trial


@dataclass(frozen=True)
class Plan:
    """What a scale trains: rates, for how many passes over the examples, in what batches, measured every so often."""

    rates: tuple[float, ...]
    whole: tuple[float, ...]
    passes: int
    batch: int
    every: int


# Passes of an epoch: nobody looks at accuracies in between.
_TOGETHER = 10
_RATES = (0.1, 0.3, 1.0, 3.0, 10.0)
#: Batches are small, so that gradients do not vanish with the loss and k₀ passes for every rate; with the classifier
#: trained too, a smoke test takes the extremes.
PLANS = {
    "smoke": Plan(_RATES, (0.1, 10.0), passes=3, batch=8, every=1),
    "small": Plan(_RATES, _RATES, passes=160, batch=8, every=1),
    "full": Plan(_RATES, _RATES, passes=10, batch=32, every=10),
}
_PERCEPTRON = (("batch_norm", True),)


def tasks(lab: Lab) -> list[Task]:
    """The networks: a perceptron on digits; at full scale one on MNIST and C10-CNN1 on CIFAR-10.

    Rates stay as they are, batch normalization has no gains and layers no biases.

    >>> from gyroscope_lab.training.archive import Archive
    >>> [(task.name, task.model) for task in tasks(Lab(Archive("runs"), "full"))]
    [('mnist-mlp', 'mlp-4x784'), ('c10-cnn1', 'c10-cnn1')]
    """
    plan = PLANS[lab.scale]
    together = min(plan.passes, _TOGETHER)
    schedule = Schedule(plan.passes // together, batch=plan.batch, cuts=(), passes=together, drop_last=True)
    names = ["mnist-mlp", "c10-cnn1"] if lab.scale == "full" else ["mnist-mlp"]
    found = []
    for task in lab.tasks(names):
        one = replace(task, schedule=schedule, stop_at=None, fails=None)
        if task.model.startswith("mlp"):
            pixels = dict(task.options)["inputs"]
            one = replace(one, model=f"mlp-4x{pixels}", options=(*_PERCEPTRON, ("inputs", pixels)))
        found.append(one)
    return found


def trial(task: Task, rate: float, *, frozen: bool, every: int) -> Trial:
    """SGD at a constant rate, the classifier trained or not.

    >>> from gyroscope_lab.training.tasks import task
    >>> trial(task("digits"), 3.0, frozen=True, every=1).recipe.name
    'SGD 3, classifier as drawn'
    """
    name = f"SGD {rate:g}" + (", classifier as drawn" if frozen else "")
    return Trial(task, Recipe(name, rate=rate, frozen=(-1,) if frozen else ()), every=every)


def trials(lab: Lab) -> list[Trial]:
    """Every rate with the classifier as drawn, and trained.

    >>> from gyroscope_lab.training.archive import Archive
    >>> len(trials(Lab(Archive("runs"), "small")))
    10
    """
    return [one for task in tasks(lab) for frozen in (True, False) for one in _of(lab, task, frozen=frozen)]


def _of(lab: Lab, task: Task, *, frozen: bool) -> list[Trial]:
    plan = PLANS[lab.scale]
    rates = plan.rates if frozen else plan.whole
    return [trial(task, rate, frozen=frozen, every=plan.every) for rate in rates]


def courses(lab: Lab, task: Task, *, frozen: bool) -> list[Course]:
    """What became of the norms of every training that is at hand, rate by rate."""
    return [course(lab, one) for one in lab.held(_of(lab, task, frozen=frozen))]


def conclude(lab: Lab) -> Report:
    """Draw norms and effective learning rates over steps, fit the law to them, and compare rates."""
    found = {task.name: (courses(lab, task, frozen=True), courses(lab, task, frozen=False)) for task in tasks(lab)}
    some = {name: both for name, both in found.items() if both[0]}
    if not some:
        raise LabError(f"no training with the classifier as drawn is in {lab.archive.root}; let them be trained")
    return report(some)


STUDIES = (
    Study(
        "dynamics/implicit-decay",
        "Section 4.3: five learning rates in networks with batch normalization, whose effective rates become alike",
        trials,
        conclude,
    ),
)
