"""Implicit decay in networks with batch normalization: five learning rates, and their convergence to one effective rate
(section 4.3).

A layer followed by batch normalization is scale-invariant. Under SGD its norm grows by equation 19, faster the larger
the explicit learning rate α of the chapter is, and its effective learning rate α̂_k = α/‖w_k‖² falls, about as α̂₀/√(1
+ k/k₀) with k₀ = ‖w₀‖⁴/(2α²g̃²), g̃ = ‖∇J(w)‖‖w‖. This holds for all layers except the last, which no normalization
follows. So networks are trained twice: with an untrained classifier, so that only scale-invariant layers are trained,
and with the classifier trained at the same rate, as usual. Norms and gradients come from the monitor's recordings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from math import inf, log
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gyroscope.theory import Law, decay_time, effective_lr, fit_norms, norm_growth
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.errors import LabError
from gyroscope_lab.papers.cells import accuracy_error, examples_tested, recorded
from gyroscope_lab.papers.chance import Estimate, all_exceed
from gyroscope_lab.papers.dynamics.schedules import over_steps, spaced
from gyroscope_lab.papers.study import Report, Study, Table, Verdict
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.result import Result
from gyroscope_lab.training.schedule import Schedule
from gyroscope_lab.training.task import Task
from gyroscope_lab.training.trial import Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Values = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Course:
    """The norms of the layers that batch normalization makes scale-invariant: all except the last.

    Attributes:
        rate: the explicit learning rate α.
        layers: their names.
        steps: k, [S], from 0.
        norms: ‖w_k‖, [S, layers].
        gradients: g̃ = ‖∇J(w)‖‖w‖ of the step that led to each k, [S, layers]; NaN at 0.
        result: the result of the training.
        examples: the number of test examples.
    """

    rate: float
    layers: tuple[str, ...]
    steps: npt.NDArray[np.int64]
    norms: Values
    gradients: Values
    result: Result
    examples: int

    @property
    def tested(self) -> Estimate:
        """The test accuracy in percent with its error over the test examples, since there is one seed."""
        return Estimate(100 * self.result.test_accuracy, accuracy_error(self.result.test_accuracy, self.examples), inf)

    @property
    def rates(self) -> Values:
        """The effective learning rates α/‖w_k‖², [S, layers]."""
        return effective_lr(self.rate, self.norms)

    def typical(self) -> Values:
        """√(mean g̃²) after the first step, [layers]: the chapter assumes that g̃ is this constant."""
        return np.asarray(np.sqrt(np.square(self.gradients[2:]).mean(axis=0)))

    def laws(self) -> list[Law]:
        """1/√(1 + k/k₀) fitted to each layer, from the first step on.

        With a large α, that step makes up most of the norm. The law holds for small steps and does not cover it.
        """
        return [fit_norms(self.steps[1:], norms[1:], lr=self.rate) for norms in self.norms.T]

    def off(self) -> float:
        """Return the largest relative distance of norms from equation 19, given the first norm and the gradients.

        Between two measurements the later gradient is used; the result is exact if every step was measured.
        """
        gaps, worst = np.diff(self.steps), 0.0
        for norms, gradients in zip(self.norms.T, self.gradients.T, strict=True):
            each = np.repeat(gradients[1:], gaps)
            told = norm_growth(self.rate, len(each), norm=float(norms[0]), gradient=each)[self.steps]
            worst = max(worst, float(np.abs(told / norms - 1).max()))
        return worst

    def numbers(self) -> dict[str, Any]:
        """Return its numbers for JSON: points of the curves, and the fits."""
        at, laws = spaced(len(self.steps), points=15), self.laws()
        return {
            "alpha": self.rate,
            "layers": list(self.layers),
            "steps": self.steps[at].tolist(),
            "norms": _short(self.norms[at]),
            "effective_rates": _short(self.rates[at]),
            "k0": _short([law.k0 for law in laws]),
            "r2": _short([law.r2 for law in laws]),
            "gradient": _short(self.typical()),
            "equation_19_off": self.off(),
            "test": 100 * self.result.test_accuracy,
            "train": 100 * self.result.train_accuracy,
        }


def course(lab: Lab, trial: Trial) -> Course:
    """Read a training, or train it now if it is not known; all layers except the last are read."""
    run = recorded(lab, trial)
    [result] = lab.run([trial])
    norms = run.series("weight_norm").astype(np.float64)[:, :-1]
    gradients = run.series("gradient_norm").astype(np.float64)[:, :-1]
    before = np.concatenate([norms[:1], _before(run, norms)])
    return Course(
        trial.recipe.rate,
        tuple(run.layers[:-1]),
        np.asarray(run.steps, dtype=np.int64),
        norms,
        gradients * before,
        result,
        examples_tested(trial.task.source),
    )


def _before(run: Any, norms: Values) -> Values:
    """‖w‖ at which each gradient was measured, that of the step before, [S − 1, layers]."""
    if (np.diff(run.steps) == 1).all():
        return norms[:-1]
    # If steps in between were not measured: ‖Δw‖ divided by ‖Δw‖/‖w‖.
    update, ratio = (run.series(name).astype(np.float64)[1:, :-1] for name in ("update_norm", "update_ratio"))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(ratio > 0, update / ratio, norms[1:]))


def spread(courses: Sequence[Course], at: int) -> Values:
    """The largest over the smallest effective learning rate among trainings, at one index of their steps, [layers]."""
    rates = np.stack([one.rates[at] for one in courses])
    return np.asarray(rates.max(axis=0) / rates.min(axis=0))


def _short(values: npt.ArrayLike) -> Any:
    array = np.asarray(values, dtype=np.float64)
    return [_short(row) for row in array] if array.ndim > 1 else [float(f"{value:.5g}") for value in array]


#: The trainings of a task with an untrained classifier, and with a trained one.
Both = tuple[Sequence[Course], Sequence[Course]]

# Rates have converged if at most this share of the logarithm of their ratio is left, and not if more is left.
_ALIKE, _APART = 0.25, 0.5
# The tolerance for equation 19: over thousands of steps, float32 and batch normalization's ε cause about 1e-3.
_EXACT = 5e-3
# A law fits if its R² is at least this, and does not fit if it is below one half.
_FITS = 0.9
# Test accuracies within this many points are equal.
_NEAR = 2.0


def report(tasks: Mapping[str, Both]) -> Report:
    """Return the report on all tasks; the figure is of the first, its middle layer."""
    several = {name: both for name, both in tasks.items() if len(both[0]) > 1}  # one rate allows no comparison
    verdicts = [one for name, both in several.items() for one in _verdicts(name if len(tasks) > 1 else "", *both)]
    return Report(
        {("figure" if i == 0 else name): draw(name, both) for i, (name, both) in enumerate(tasks.items())},
        tuple(_table(name, its, says) for name, both in tasks.items() for its, says in _named(both)),
        tuple(verdicts),
        {name: {says: [one.numbers() for one in its] for its, says in _named(both)} for name, both in tasks.items()},
    )


def _named(both: Both) -> list[tuple[Sequence[Course], str]]:
    return [(its, says) for its, says in zip(both, ("classifier as drawn", "classifier trained"), strict=True) if its]


def _table(name: str, courses: Sequence[Course], says: str) -> Table:
    rows = tuple(
        (f"{one.rate:g}", f"{_mean(one.norms[0]):.3g}", f"{_mean(one.norms[-1]):.3g}", f"{_mean(one.rates[0]):.3g}",
         f"{_mean(one.rates[-1]):.3g}", f"{_mean(one.typical()):.3g}", f"{_mean(_k0(one)):.3g}",
         f"{_mean(np.array([law.k0 for law in one.laws()])):.3g}", min(law.r2 for law in one.laws()), None,
         100 * one.result.test_accuracy)
        for one in courses
    )  # fmt: skip
    columns = ("α", "‖w‖ at first", "at the end", "α̂ at first", "at the end", "g̃", "k₀ = ‖w₁‖⁴/(2α²g̃²)", "k₀ fitted",
               "least R²", "paper", "test %")  # fmt: skip
    steps = int(courses[0].steps[-1])
    return Table(f"{name}, {says}: {steps:,} steps, geometric means over layers", columns, rows)


def _k0(one: Course) -> Values:
    pairs = zip(one.norms[1], one.typical(), strict=True)
    return np.array([decay_time(one.rate, norm=float(norm), gradient=float(g)) for norm, g in pairs])


def _mean(values: Values) -> float:
    """The geometric mean."""
    return float(np.exp(np.log(values).mean()))


def _verdicts(name: str, drawn: Sequence[Course], trained: Sequence[Course]) -> list[Verdict]:
    where = f"{name}: " if name else ""
    grown = [_mean(one.norms[-1] / one.norms[0]) for one in drawn]
    off = max(one.off() for one in (*drawn, *trained))
    exact = (np.diff(drawn[0].steps) == 1).all()
    found = [
        Verdict(
            f"{where}norms grow according to equation 19",
            "exactly, for scale-invariant layers",
            f"within {off:.1g} at every step of {len(drawn) + len(trained)} trainings"
            + ("" if exact else ", from the gradients of some steps"),
            off < _EXACT if exact else None,
        ),
        Verdict(
            f"{where}for larger α norms grow more rapidly",
            "figure 6",
            f"{', '.join(f'{one:.2f}' for one in grown)} times as long at the end for α = {_rates(drawn)}",
            bool((np.diff(grown) > 0).all()),
        ),
        _alike(where, drawn),
        _law(where, drawn),
        _matters_little(where, drawn),
    ]
    return [*found, _last_layer(where, trained)] if trained else found


def _alike(where: str, drawn: Sequence[Course]) -> Verdict:
    first, second, last = (_mean(spread(drawn, at)) for at in (0, 1, -1))
    left = log(last) / log(first)
    passed = sum(map(_has_settled, drawn))
    return Verdict(
        f"{where}regardless of α, effective learning rates approach the same trend",
        "figure 6, asymptotically",
        f"the largest is {first:.0f} times the smallest at first, {second:.1f} times after {drawn[0].steps[1]:,} and "
        f"{last:.2f} times after {drawn[0].steps[-1]:,} steps, when k₀ has passed in {passed} of "
        f"{len(drawn)} trainings",
        True if left < _ALIKE else False if left > _APART else None,
    )


def _has_settled(one: Course) -> bool:
    """Return whether k₀, the length of the transient phase, has passed."""
    return bool(_mean(_k0(one)) < one.steps[-1])


def _law(where: str, drawn: Sequence[Course]) -> Verdict:
    r2 = np.array([law.r2 for one in drawn for law in one.laws()])
    falls = [_mean(one.gradients[-max(1, len(one.steps) // 10) :].mean(axis=0) / one.gradients[1]) for one in drawn]
    return Verdict(
        f"{where}effective learning rates fall about as 1/√(1 + k/k₀)",
        "where ‖∇J(ŵ)‖ is constant",
        f"R² is {r2.min():.2f} to {r2.max():.2f}, the median {np.median(r2):.2f}; ‖∇J(ŵ)‖ is not constant: in the "
        f"last tenth of the steps it is {min(falls):.2f} to {max(falls):.2f} times its value in the first step",
        True if np.median(r2) > _FITS else None if np.median(r2) > 0.5 else False,
    )


def _matters_little(where: str, drawn: Sequence[Course]) -> Verdict:
    """The verdict on test accuracies.

    Each is of one seed, so that it has the error of the test examples. The verdict is undecided where that error could
    turn it, and where those that differ by `_NEAR` or more are still in their transient phase.
    """
    tests = [100 * one.result.test_accuracy for one in drawn]

    def near(some: Sequence[Course]) -> bool | None:
        return all_exceed([one.tested - other.tested for one, other in permutations(some, 2)], -_NEAR)

    differ = near([one for one in drawn if _has_settled(one)]) is False
    return Verdict(
        f"{where}the explicit learning rate matters only in a transient phase at the start",
        "in words",
        f"test accuracies are {', '.join(f'{one:.1f}' for one in tests)} % for α = {_rates(drawn)}",
        True if near(drawn) else False if differ else None,
    )


def _last_layer(where: str, trained: Sequence[Course]) -> Verdict:
    first, last = (_mean(spread(trained, at)) for at in (0, -1))
    ends = [_mean(one.rates[-1]) for one in trained]
    typical = [_mean(one.typical()) for one in trained]
    return Verdict(
        f"{where}implicit decay does not apply to the output layer: α still matters if that layer is trained too",
        "in words",
        f"the gradients that reach the other layers grow with α, from {typical[0]:.3g} to {typical[-1]:.3g}, and "
        f"effective learning rates are {last:.1f} times apart at the end, {first:.0f} at first; the largest α has "
        f"{ends[-1]:.2g}, the smallest {ends[0]:.2g}",
        typical[-1] > 2 * typical[0],
    )


def _rates(courses: Sequence[Course]) -> str:
    return ", ".join(f"{one.rate:g}" for one in courses)


def draw(name: str, both: Both) -> Figure:
    """Draw norms and effective learning rates, as in figure 6; below with a trained classifier."""
    from matplotlib.figure import Figure

    rows = _named(both)
    figure = Figure(figsize=(7.2, 2.5 * len(rows)), layout="constrained")
    for (left, right), (its, says) in zip(figure.subplots(len(rows), 2, squeeze=False), rows, strict=True):
        for i, one in enumerate(its):
            _lines(left, right, one, color=f"C{i}")
        layer = its[0].layers[len(its[0].layers) // 2].removesuffix(".weight")
        over_steps(left, "norm ‖w‖", f"{name}, {layer}: {says}")
        over_steps(right, "effective learning rate α/‖w‖²", "dotted: the law 1/√(1 + k/k₀) fitted")
        right.legend(fontsize=8, loc="upper right")
    return figure


def _lines(left: Axes, right: Axes, one: Course, *, color: str) -> None:
    layer, at = len(one.layers) // 2, spaced(len(one.steps), points=150)
    steps = one.steps[at] + 1
    left.plot(steps, one.norms[at, layer], color=color)
    right.plot(steps, one.rates[at, layer], color=color, label=f"α = {one.rate:g}")
    right.plot(steps[at > 0], one.laws()[layer].curve[at[at > 0] - 1], color=color, linestyle=":", linewidth=1.2)


@dataclass(frozen=True)
class Plan:
    """The trainings of a scale: rates, passes over the examples, batches, steps between measurements."""

    rates: tuple[float, ...]
    whole: tuple[float, ...]
    passes: int
    batch: int
    every: int


# Passes per epoch: accuracies in between are not needed.
_TOGETHER = 10
_RATES = (0.1, 0.3, 1.0, 3.0, 10.0)
#: Batches are small, so that gradients do not vanish with the loss and k₀ passes for every rate. With a trained
#: classifier, a smoke test takes only the extreme rates.
PLANS = {
    "smoke": Plan(_RATES, (0.1, 10.0), passes=3, batch=8, every=1),
    "small": Plan(_RATES, _RATES, passes=160, batch=8, every=1),
    "full": Plan(_RATES, _RATES, passes=10, batch=32, every=10),
}
_PERCEPTRON = (("batch_norm", True),)


def tasks(lab: Lab) -> list[Task]:
    """The networks: a perceptron on digits; at full scale one on MNIST and C10-CNN1 on CIFAR-10.

    Rates are constant, batch normalization has no gains, and layers have no biases.

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
    """Return every rate with an untrained and with a trained classifier.

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
    """Return the norms of every training in the archive, rate by rate."""
    return [course(lab, one) for one in lab.held(_of(lab, task, frozen=frozen))]


def conclude(lab: Lab) -> Report:
    """Draw norms and effective learning rates over steps, fit the law to them, and compare rates."""
    found = {task.name: (courses(lab, task, frozen=True), courses(lab, task, frozen=False)) for task in tasks(lab)}
    some = {name: both for name, both in found.items() if both[0]}
    if not some:
        raise LabError(
            f"No training with an untrained classifier is in {lab.archive.root}. Train them first (leave --known out)."
        )
    return report(some)


STUDIES = (
    Study(
        "dynamics/implicit-decay",
        "Section 4.3: five learning rates in networks with batch normalization, whose effective rates become alike",
        trials,
        conclude,
    ),
)
