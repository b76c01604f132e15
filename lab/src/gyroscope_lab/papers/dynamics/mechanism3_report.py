"""What weight decay did to the input-output Jacobian under K-FAC, and what the chapter says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from typing import Any

import numpy as np
import numpy.typing as npt

from gyroscope_lab.papers.dynamics.gain import gain
from gyroscope_lab.papers.study import Report, Table, Verdict

# Two quantities go together from this correlation of logarithms; norms are said equal within this.
_TOGETHER, _EQUAL = 0.9, 1e-4
# A correlation over levels of decay is more than chance that is as low in no more than this share of their orders.
_CHANCE = 0.05


@dataclass(frozen=True)
class Level:
    """What runs with one λ told, seed by seed.

    >>> Level(0.1, [{"jacobian": 1.0}, {"jacobian": 4.0}]).mean("jacobian")
    2.0
    """

    decay: float
    runs: list[dict[str, Any]]

    def all(self, name: str) -> list[float]:
        """One number a seed."""
        return [float("nan") if run[name] is None else float(run[name]) for run in self.runs]

    def mean(self, name: str) -> float:
        """The geometric mean over seeds, for what is above zero and spans orders of magnitude."""
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
        """The training loss of the last epoch, the mean over seeds; inf where one diverged."""
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
    """What the chapter says, held to these numbers."""
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
            "for L layers with ReLUs and without biases wᵀGw = L² E‖z‖², G the Gauss-Newton matrix of squared errors",
            "exactly",
            f"within {100 * off:.1e} % in all {len(newton)} networks",
            off < _EQUAL,
        ),
        Verdict(
            "and the norm that weight decay penalizes is proportional to that of the input-output Jacobian",
            "proportional, in a restricted case",
            f"correlation of logarithms {together:.3f}; their ratio is {_ratio(newton / jacobian)}",
            together > _TOGETHER,
        ),
        Verdict(
            "more decay, smaller Jacobians",
            "smaller input-output Jacobian norms",
            f"E‖J‖² from {levels[0].mean('jacobian'):.3g} without decay to {levels[-1].mean('jacobian'):.3g} at "
            f"λ = {levels[-1].decay:g}, smaller at {int((steps < 0).sum())} of {len(steps)} steps",
            bool((steps < 0).all()),
        ),
        Verdict(
            "weight decay raises test accuracy",
            "improves generalization",
            f"{better.told} points at the λ, of {len(levels) - 1}, that is best for the other seeds; for all of them "
            f"that is {best.decay:g}",
            better.above,
        ),
        Verdict(
            "networks with smaller Jacobians generalise better",
            "a smoother function, less capacity",
            f"rank correlation of E‖J‖² and test accuracy {over_all:+.2f} over all {len(levels)} λ, as low in "
            f"{100 * lower:.0f} % of all orders; up to the best λ = {best.decay:g} it is {up_to_best:+.2f}, but a part "
            "that ends at its best rises more often than not",
            True if lower <= _CHANCE else False if higher <= _CHANCE else None,
        ),
    )


def _chosen_on_others(levels: Sequence[Level]) -> tuple[list[float], list[float]]:
    """Test accuracies seed by seed at the λ above 0 that is best for all other seeds, and without decay.

    Chosen on the same seeds, the best of several is above none by chance as well. Of one seed there are no others.

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
    """Spearman's; there are no ties to speak of.

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
    colours = np.linspace(0.1, 0.9, len(levels))
    from matplotlib import colormaps

    for one, colour in zip(levels, colours, strict=True):
        right.plot(one.all("jacobian"), one.tests, "o", markersize=5, color=colormaps["viridis"](colour),
                   label=f"$\\lambda$ = {one.decay:g}")  # fmt: skip
    right.set(xscale="log", xlabel=r"$E\|J_{zx}\|_F^2$", ylabel="test accuracy (%)", title="One point a network")
    right.legend(fontsize=7)
    for ax in (left, middle, right):
        ax.title.set_fontsize(10)
        ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle("K-FAC without normalization: weight decay and the input-output Jacobian")
    return figure
