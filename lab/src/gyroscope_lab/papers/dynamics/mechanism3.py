"""Weight decay under K-FAC as a penalty on the input-output Jacobian (section 5.3, mechanism 3; Zhang et al. 2019).

Without normalization, weight decay with a preconditioner C⁻¹ is a penalty on wᵀCw (equation 27). For the Gauss-Newton
matrix of a network of L layers with ReLUs and without biases this is L² E‖z‖², with outputs z = J_zx x. For isotropic
inputs, it is proportional to the squared Frobenius norm of the input-output Jacobian. The study trains networks by
K-FAC with increasing decay, measures their Jacobian, and compares it with the test accuracy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.nn import functional as F  # noqa: N812  (the name torch's own documentation uses)

from gyroscope.theory import estimated_jacobian_norm, gauss_newton_norm
from gyroscope_lab.data.source import Source
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.chance import gain
from gyroscope_lab.papers.dynamics.measurements import device_of, followed, kept, training_of
from gyroscope_lab.papers.study import Report, Study, Table, Verdict, no_trials
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.schedule import Schedule
from gyroscope_lab.training.task import Task

# Two quantities are proportional from this correlation of logarithms on; norms are equal within this tolerance.
_TOGETHER, _EQUAL = 0.9, 1e-4
# A correlation over levels of decay is more than chance if at most this share of their orders has one as low.
_CHANCE = 0.05


@dataclass(frozen=True)
class Level:
    """The runs with one λ, seed by seed.

    >>> Level(0.1, [{"jacobian": 1.0}, {"jacobian": 4.0}]).mean("jacobian")
    2.0
    """

    decay: float
    runs: list[dict[str, Any]]

    def all(self, name: str) -> list[float]:
        """Return one number per seed."""
        return [float("nan") if run[name] is None else float(run[name]) for run in self.runs]

    def mean(self, name: str) -> float:
        """The geometric mean over seeds, for positive quantities that span orders of magnitude."""
        return float(np.exp(np.mean(np.log(self.all(name)))))

    @property
    def tests(self) -> list[float]:
        """Test accuracies in percent."""
        return self.all("test")

    @property
    def test(self) -> float:
        """The mean of these."""
        return float(np.mean(self.tests))

    @property
    def last_loss(self) -> float:
        """The training loss of the last epoch, the mean over seeds; inf if one diverged."""
        return float(np.mean([np.inf if run["loss"][-1] is None else run["loss"][-1] for run in self.runs]))


def report(depth: int, levels: list[Level]) -> Report:
    """The figure, the table and the verdicts."""
    columns = ("λ", "test %", "gain over no decay", "last training loss", "test loss", "E‖J‖²", "E‖z‖²",
               "E‖J‖² / E‖z‖²", "wᵀGw / L² E‖z‖²", "‖w‖²")  # fmt: skip
    rows = tuple(
        (f"{one.decay:g}", one.test, gain(one.tests, levels[0].tests).told, one.last_loss, one.mean("test_loss"),
         one.mean("jacobian"), one.mean("outputs"), one.mean("jacobian") / one.mean("outputs"),
         one.mean("gauss_newton") / (depth**2 * one.mean("outputs")), one.mean("weights"))
        for one in levels
    )  # fmt: skip
    return Report(
        {"figure": _figure(levels)},
        (Table("K-FAC without normalization, by weight decay", columns, rows),),
        verdicts(depth, levels),
        {"depth": depth, "levels": [{"decay": one.decay, "runs": one.runs} for one in levels]},
    )


def verdicts(depth: int, levels: Sequence[Level]) -> tuple[Verdict, ...]:
    """Return the verdicts on the chapter's statements."""
    names = ("jacobian", "outputs", "gauss_newton")
    jacobian, outputs, newton = (np.array([one.all(name) for one in levels]).ravel() for name in names)
    off = float(np.abs(newton / (depth**2 * outputs) - 1).max())
    together = float(np.corrcoef(np.log(jacobian), np.log(newton))[0, 1])
    steps = np.diff([np.log(one.mean("jacobian")) for one in levels])
    best = max(levels[1:], key=lambda one: one.test)
    better = gain(*_chosen_on_others(levels))
    useful = [one for one in levels if one.decay <= best.decay]
    over_all, up_to_best = (
        _rank_correlation([one.mean("jacobian") for one in some], [one.test for one in some])
        for some in (levels, useful)
    )
    lower, higher = (_by_chance(sign * over_all, len(levels)) for sign in (1, -1))
    return (
        Verdict(
            "for L layers with ReLUs and without biases, wᵀGw = L² E‖z‖², G the Gauss-Newton matrix of squared errors",
            "exactly",
            f"within {100 * off:.1e} % in all {len(newton)} networks",
            off < _EQUAL,
        ),
        Verdict(
            "the norm that weight decay penalizes is proportional to that of the input-output Jacobian",
            "proportional, in a restricted case",
            f"correlation of logarithms {together:.3f}; their ratio is {_ratio(newton / jacobian)}",
            together > _TOGETHER,
        ),
        Verdict(
            "more decay leads to smaller Jacobians",
            "smaller input-output Jacobian norms",
            f"E‖J‖² from {levels[0].mean('jacobian'):.3g} without decay to {levels[-1].mean('jacobian'):.3g} at "
            f"λ = {levels[-1].decay:g}, smaller at {int((steps < 0).sum())} of {len(steps)} steps",
            bool((steps < 0).all()),
        ),
        Verdict(
            "weight decay raises test accuracy",
            "improves generalization",
            f"{better.told} points at the λ, out of {len(levels) - 1}, that is best for the other seeds; for all seeds "
            f"that is {best.decay:g}",
            better.above,
        ),
        Verdict(
            "networks with smaller Jacobians generalize better",
            "a smoother function, less capacity",
            f"rank correlation of E‖J‖² and test accuracy {over_all:+.2f} over all {len(levels)} λ, as low in "
            f"{100 * lower:.0f} % of all orders; up to the best λ = {best.decay:g} it is {up_to_best:+.2f}, but a part "
            "that ends at its best rises more often than not",
            True if lower <= _CHANCE else False if higher <= _CHANCE else None,
        ),
    )


def _chosen_on_others(levels: Sequence[Level]) -> tuple[list[float], list[float]]:
    """Test accuracies seed by seed at the λ above 0 that is best for all other seeds, and without decay.

    If chosen on the same seeds, the best of several λ would be above no decay by chance. One seed has no others.

    >>> tests = {0.0: [5, 5], 0.1: [6, 1], 0.2: [2, 9]}
    >>> _chosen_on_others([Level(decay, [{"test": one} for one in its]) for decay, its in tests.items()])
    ([2.0, 1.0], [5.0, 5.0])
    """
    tests = np.array([one.tests for one in levels])
    seeds = range(tests.shape[1])
    others = [np.delete(tests, seed, axis=1) if len(seeds) > 1 else tests for seed in seeds]
    chosen = [float(tests[1 + int(others[seed][1:].mean(axis=1).argmax()), seed]) for seed in seeds]
    return chosen, levels[0].tests


def _ratio(values: Any) -> str:
    return f"{values.min():.3g} to {values.max():.3g}"


def _rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's rank correlation, without a treatment of ties.

    >>> round(_rank_correlation([1.0, 2.0, 3.0], [9.0, 5.0, 1.0]), 6)
    -1.0
    """
    if len(a) < 2:
        return float("nan")
    first, second = (np.argsort(np.argsort(values)) for values in (a, b))
    return float(np.corrcoef(first, second)[0, 1])


def _by_chance(correlation: float, count: int) -> float:
    """The share of all orders of `count` values whose rank correlation with a given order is as low.

    >>> _by_chance(-1.0, 3), _by_chance(1.0, 3)
    (0.16666666666666666, 1.0)
    """
    return float((_of_all_orders(count) <= correlation + 1e-9).mean())


@cache
def _of_all_orders(count: int) -> npt.NDArray[np.float64]:
    ranks = np.arange(count) - (count - 1) / 2
    return np.asarray(np.array(list(permutations(ranks))) @ ranks / (ranks @ ranks))


def _figure(levels: Sequence[Level]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 3.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    least = min(one.decay for one in levels if one.decay) / 3
    at = [one.decay or least for one in levels]
    for name, label, marker in (("jacobian", r"$E\|J_{zx}\|_F^2$", "o-"), ("gauss_newton", r"$w^\top G w$", "s--")):
        left.loglog(at, [one.mean(name) for one in levels], marker, markersize=4, label=label)
    left.set(xlabel=r"weight decay $\lambda$ (leftmost: 0)", ylabel="squared norm", title="Norms by weight decay")
    left.legend(fontsize=8)
    spread = [np.std(one.tests) for one in levels]
    middle.errorbar(at, [one.test for one in levels], yerr=spread, fmt="o-", markersize=4, capsize=2, color="C2")
    middle.set(xscale="log", xlabel=r"weight decay $\lambda$ (leftmost: 0)", ylabel="test accuracy (%)")
    middle.set_title("Test accuracy by weight decay")
    colors = np.linspace(0.1, 0.9, len(levels))
    from matplotlib import colormaps

    for one, color in zip(levels, colors, strict=True):
        right.plot(one.all("jacobian"), one.tests, "o", markersize=5, color=colormaps["viridis"](color),
                   label=f"$\\lambda$ = {one.decay:g}")  # fmt: skip
    right.set(xscale="log", xlabel=r"$E\|J_{zx}\|_F^2$", ylabel="test accuracy (%)", title="One point per network")
    right.legend(fontsize=7)
    for ax in (left, middle, right):
        ax.title.set_fontsize(10)
        ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle("K-FAC without normalization: weight decay and the input-output Jacobian")
    return figure


@dataclass(frozen=True)
class Plan:
    """The trainings of a scale.

    Attributes:
        source, model, options, depth, schedule: the task: a network without normalization and biases, of `depth`
            layers.
        rate, damping, clip: the options of K-FAC.
        decays: λ, one run each.
        examples: the number of test examples for the Jacobian.
        seeds: the seeds of the weights and of the order of examples.
    """

    source: Source
    model: str
    options: tuple[tuple[str, Any], ...]
    depth: int
    schedule: Schedule
    rate: float
    damping: float
    clip: float
    decays: tuple[float, ...]
    examples: int
    seeds: int


_MLP = (("inputs", 64), ("init", "glorot_uniform"))
PLANS = {
    "smoke": Plan(
        Source("digits"), "mlp-3x16", _MLP, 3, Schedule(epochs=8, batch=50, cuts=()), 0.1, 0.1, 0.1, (0.0, 0.03, 0.1),
        100, 1,
    ),
    "small": Plan(
        Source("digits"), "mlp-4x48", _MLP, 4, Schedule(epochs=80, batch=50, cuts=(0.8,), factor=10.0), 0.1, 0.1, 0.1,
        (0.0, 0.003, 0.01, 0.03, 0.1, 0.3), 500, 10,
    ),
    # The authors' damping without normalization; rates and decays are ours.
    "full": Plan(
        Source("mnist", per_class=1000), "mlp-5x400", (("inputs", 784), ("init", "glorot_uniform")), 5,
        Schedule(epochs=60, batch=128, cuts=(0.8,), factor=10.0, drop_last=True), 0.1, 1e-2, 1e-2,
        (0.0, 0.003, 0.01, 0.03, 0.1, 0.3), 2000, 3,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """Everything that one training depends on."""

    plan: Plan
    decay: float
    seed: int


def trained(lab: Lab, setting: Setting) -> dict[str, Any]:
    """Loss, test accuracy, and on test examples: E‖J‖²_F, E‖z‖², wᵀGw, and the cross-entropy."""
    return kept(lab, "wd-mechanism-3", setting, lambda: _run(lab, setting))


def _run(lab: Lab, setting: Setting) -> dict[str, Any]:
    plan, seed = setting.plan, setting.seed
    told = {"damping": plan.damping, "clip": plan.clip, "seed": seed}
    recipe = Recipe("K-FAC", plan.rate, "kfac", weight_decay=setting.decay, options=tuple(told.items()))
    task = Task("wd-mechanism-3", plan.source, plan.model, plan.options, plan.schedule)
    its = training_of(lab, task, recipe, seed=seed)
    found, test = followed(its), 100 * its.finish().test_accuracy
    model, split = its.model, its.split
    x = split.inputs(split.x_test[: plan.examples]).to(device_of(lab))
    z = model(x).detach()
    return {
        **found,
        "test": test,
        "jacobian": estimated_jacobian_norm(model, x, seed=seed).value,
        "outputs": float(z.square().sum(1).mean()),
        "gauss_newton": float(gauss_newton_norm(model, x)),
        "weights": float(sum(p.detach().square().sum() for p in model.parameters())),
        "test_loss": float(F.cross_entropy(z, split.y_test[: plan.examples])),
    }


def levels(lab: Lab) -> list[Level]:
    """Every decay, over seeds."""
    plan = PLANS[lab.scale]
    return [
        Level(decay, [trained(lab, Setting(plan, decay, seed)) for seed in range(plan.seeds)]) for decay in plan.decays
    ]


def conclude(lab: Lab) -> Report:
    """Report the Jacobian's norm and the test accuracy by decay."""
    return report(PLANS[lab.scale].depth, levels(lab))


STUDIES = (
    Study("dynamics/wd-mechanism-3", "Section 5.3: weight decay under K-FAC, and the input-output Jacobian", no_trials,
          conclude, seeds={scale: plan.seeds for scale, plan in PLANS.items()}),
)  # fmt: skip
