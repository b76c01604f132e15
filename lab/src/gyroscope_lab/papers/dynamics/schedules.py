"""The schedules of the effective learning rate due to normalization and weight decay (figures 6 and 7 of Grosse's
chapter).

For a scale-invariant layer under SGD, with ‖∇J(ŵ)‖ = 1 and ‖w₀‖ = 1,

    ‖w_{k+1}‖² = (1 − αλ)² ‖w_k‖² + α²/‖w_k‖²        (19 with λ = 0, and 23)

and the effective learning rate is α̂_k = α/‖w_k‖². These are simulations, the same at every scale. The chapter does not
state its α, λ and number of steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gyroscope.theory import Growth, Schedules, decay_time, figure6, figure7, fit_norms, implicit_decay
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.study import Report, Study, Table, Verdict, no_trials

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Explicit learning rates α, and the number of steps.
RATES = (0.01, 0.1, 1.0, 5.0)
STEPS = 100_000
#: λ for all rates of figure 7's left half, and αλ for all of its right half.
DECAY, PRODUCT = 0.01, 0.001
# The tolerance for equality.
_SAME = 0.05


def spaced(count: int, points: int = 80) -> npt.NDArray[np.int64]:
    """Indices below `count`, evenly spaced on a logarithmic axis as far as whole numbers allow, with 0 and the last.

    >>> spaced(1001, points=7).tolist()
    [0, 1, 4, 16, 63, 251, 1000]
    """
    if count < 3:
        return np.arange(count)
    return np.unique(np.concatenate([[0], np.round(np.geomspace(1, count - 1, points - 1)).astype(np.int64)]))


def conclude_growth(lab: Lab) -> Report:
    """Report figure 6: norms and effective learning rates without weight decay."""
    from matplotlib.figure import Figure

    found = figure6(RATES, STEPS)
    points = spaced(len(found.steps))
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for i, alpha in enumerate(found.lr):
        for ax, values in ((left, found.norms[i]), (right, found.rates[i])):
            ax.plot(found.steps[points] + 1, values[points], color=_color(i), label=f"α = {alpha:g}")
    trend = 1 / np.sqrt(2 * np.maximum(found.steps[points], 1))
    right.plot(found.steps[points][1:] + 1, trend[1:], "k:", linewidth=1.2, label="1/√(2k)")
    over_steps(left, "norm ‖w‖", "Growth of the norm")
    over_steps(right, "effective learning rate α/‖w‖²", "Effective learning rate")
    left.legend(fontsize=8)
    right.legend(fontsize=8, loc="upper right")
    fits = [fit_norms(found.steps, norms, lr=float(a)) for a, norms in zip(found.lr, found.norms, strict=True)]
    rows = tuple(
        (f"{alpha:g}", f"{decay_time(float(alpha)):g}", f"{fit.k0:.4g}", f"{fit.r2:.6f}", float(norms[-1]),
         f"{rates[-1]:.3g}", float(rates[-1] * np.sqrt(2 * STEPS)), None)
        for alpha, norms, rates, fit in zip(found.lr, found.norms, found.rates, fits, strict=True)
    )  # fmt: skip
    columns = ("α", "k₀ = 1/(2α²)", "k₀ fitted", "R²", "‖w‖ at the end", "α̂ at the end", "α̂√(2k)", "paper")
    return Report(
        {"figure": figure},
        (Table(f"{STEPS:,} steps, ‖w₀‖ = ‖∇J(ŵ)‖ = 1", columns, rows),),
        _of_growth(found),
        _numbers(found.steps, found.lr, found.norms, found.rates),
    )


def _of_growth(found: Growth) -> tuple[Verdict, ...]:
    grown = found.norms[:, -1]
    first, last = (np.ptp(np.log(found.rates[:, at])) for at in (0, -1))
    slopes = [_slope(found.steps, rates) for rates in found.rates]
    small = [i for i, alpha in enumerate(found.lr) if alpha <= 0.1]  # a step changes the norm by little
    off = max(_off(found, i) for i in small)
    return (
        Verdict(
            "for larger α, norms grow more rapidly",
            "a picture",
            f"to {', '.join(f'{norm:.3g}' for norm in grown)} for α = {_listed(found.lr)}",
            bool((np.diff(grown) > 0).all()),
        ),
        Verdict(
            "regardless of α, all effective learning rates asymptote to the same trend",
            "a picture",
            f"the largest is {np.exp(first):.0f} times the smallest at first and {np.exp(last):.3f} times at the end",
            bool(last < np.log1p(_SAME)),
        ),
        Verdict(
            "this trend falls as 1/√k",
            "O(1/√k)",
            f"as k^{min(slopes):.3f} to k^{max(slopes):.3f} over the last half of the steps",
            max(abs(slope + 0.5) for slope in slopes) < _SAME,
        ),
        Verdict(
            "the effective learning rate is about α̂₀/√(1 + k/k₀)",
            "approximately",
            f"within {100 * off:.2g} % at every step with k₀ = 1/(2α²), for α up to 0.1",
            off < _SAME,
        ),
    )


def _off(found: Growth, i: int) -> float:
    """Return the largest relative error of the law for a small α."""
    alpha = float(found.lr[i])
    law = implicit_decay(found.steps, decay_time(alpha), start=alpha)
    return float(np.abs(found.rates[i] / law - 1).max())


def _slope(steps: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> float:
    """The exponent with which values change over the last half of the steps."""
    last = steps >= steps[-1] / 2
    return float(np.polyfit(np.log(steps[last]), np.log(values[last]), 1)[0])


def conclude_decay(lab: Lab) -> Report:
    """Report figure 7: effective learning rates with weight decay, with one λ for all α and with one αλ."""
    from matplotlib.figure import Figure

    halves = {
        f"λ = {DECAY:g}": figure7(RATES, decay=DECAY, steps=STEPS),
        f"αλ = {PRODUCT:g}": figure7(RATES, product=PRODUCT, steps=STEPS),
    }
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    for ax, (says, found) in zip(figure.subplots(1, 2, sharey=True), halves.items(), strict=True):
        points = spaced(len(found.steps))
        for i, alpha in enumerate(found.lr):
            ax.plot(found.steps[points] + 1, found.rate[i][points], color=_color(i), label=f"α = {alpha:g}")
            ax.axhline(found.limit[i], color=_color(i), linestyle=":", linewidth=1)
        over_steps(ax, "effective learning rate α/‖w‖²", f"{says} (dotted: √(2αλ))")
        ax.legend(fontsize=8, loc="upper right")
    rows = tuple(
        (says, f"{found.lr[i]:g}", f"{found.decay[i]:g}", f"{found.rate[i, -1]:.6f}", f"{found.limit[i]:.6f}",
         f"{found.exact[i]:.6f}", int(_arrival(found, i)), None)
        for says, found in halves.items() for i in range(len(found.lr))
    )  # fmt: skip
    columns = ("", "α", "λ", "α̂ at the end", "√(2αλ)", "fixed point", "within 5 % of it from step", "paper")
    return Report(
        {"figure": figure},
        (Table(f"{STEPS:,} steps, ‖w₀‖ = ‖∇J(ŵ)‖ = 1", columns, rows),),
        _of_decay(*halves.values()),
        {says: _numbers(found.steps, found.lr, found.norm, found.rate) for says, found in halves.items()},
    )


def _arrival(found: Schedules, i: int) -> int:
    """The step from which the effective learning rate stays within 5 % of its fixed point."""
    away = np.flatnonzero(np.abs(found.rate[i] / found.exact[i] - 1) > _SAME)
    return int(away[-1]) + 1 if len(away) else 0


def _of_decay(one_decay: Schedules, one_product: Schedules) -> tuple[Verdict, ...]:
    ends = one_decay.rate[:, -1], one_product.rate[:, -1]
    off = [np.abs(end / found.limit - 1) for end, found in zip(ends, (one_decay, one_product), strict=True)]
    exact = max(float(np.abs(end / f.exact - 1).max()) for end, f in zip(ends, (one_decay, one_product), strict=True))
    worst = one_decay.lr[int(off[0].argmax())] * DECAY
    return (
        Verdict(
            "with weight decay, the effective learning rate levels off at about √(2αλ), for every α",
            "equation 25",
            f"within {100 * max(o.max() for o in off):.2g} % of it, the most for αλ = {worst:g}; that is the first "
            f"order of the fixed point √(αλ(2 − αλ)), which it comes within {100 * exact:.1g} % of",
            bool(max(o.max() for o in off) < _SAME),
        ),
        Verdict(
            "it converges to α̂_∞ regardless of α",
            "a picture",
            f"with one αλ to {ends[1].min():.5f} to {ends[1].max():.5f} for all α; with one λ, α̂_∞ itself grows as "
            f"√α: from {ends[0].min():.4f} to {ends[0].max():.4f}",
            bool(np.ptp(np.log(ends[1])) < np.log1p(_SAME)),
        ),
        Verdict(
            "a larger λ leads to a higher effective learning rate",
            "in words",
            f"for α = 0.1, {_end(0.1, DECAY):.4f} with λ = {DECAY:g} and {_end(0.1, 10 * DECAY):.4f} with ten times it",
            _end(0.1, 10 * DECAY) > _end(0.1, DECAY),
        ),
    )


def _end(alpha: float, decay: float) -> float:
    return float(figure7([alpha], decay=decay, steps=STEPS // 10).rate[0, -1])


def _numbers(steps: Any, lr: Any, norms: Any, rates: Any) -> dict[str, Any]:
    points = spaced(len(steps))
    return {
        "alpha": lr.tolist(),
        "steps": steps[points].tolist(),
        "norms": [[float(f"{one:.6g}") for one in row[points]] for row in norms],
        "effective_rates": [[float(f"{one:.6g}") for one in row[points]] for row in rates],
    }


def _listed(values: Any) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _color(i: int) -> str:
    return f"C{i}"


def over_steps(ax: Axes, says: str, title: str) -> None:
    """Label a panel whose steps and values are on log axes."""
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("step k + 1", fontsize=9)
    ax.set_ylabel(says, fontsize=9)
    ax.set_title(title, fontsize=10)
    ax.spines[["top", "right"]].set_visible(False)


STUDIES = (
    Study(
        "dynamics/fig6",
        "Figure 6: growing norms and the implicit decay of effective learning rates",
        no_trials,
        conclude_growth,
    ),
    Study("dynamics/fig7", "Figure 7: effective learning rates with weight decay", no_trials, conclude_decay),
)
